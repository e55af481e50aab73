"""Table of the probes by cause: `python -m tests.notebooks.probe_table [--wrong] [--todo] [--oracle] [CAUSE...]`.

`--wrong` also prints each unexpected outcome, at once; `--todo`, without causes, writes those to
probes/TODO.txt. `--oracle` also compares what each notebook and its script train with, about 5 s each.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.notebooks.oracle import sandbox, warm
from tests.notebooks.oracle.compare import of_conversion
from tests.notebooks.probe import FOLDER, Probe, Verdict, judge, probes

KINDS = ("right", "refused as expected", "wrong", "refused wrongly", "failed")


def verdict_of(probe: Probe, oracle: bool = False) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        verdict = judge(probe, Path(folder))
        if oracle and verdict.kind == "right":
            found = of_conversion(Path(folder) / "stranger.ipynb")
            return Verdict(kind="wrong" if found.status == "differs" else "right", details=found.reason)
        return verdict


def _warm() -> None:
    """Both sides of the oracle in forks of a process that has imported the libraries: the probes are our own."""
    sandbox.run_libraries = warm.run_libraries


def main(arguments: list[str]) -> int:
    """Print the table. Returns 1 if an outcome is unexpected."""
    causes = [argument for argument in arguments if not argument.startswith("--")]
    chosen = [probe for probe in probes() if not causes or probe.cause in causes]
    verdicts: list[Verdict] = []
    with ProcessPoolExecutor(2, initializer=_warm) as pool:
        for found in pool.map(partial(verdict_of, oracle="--oracle" in arguments), chosen):
            if "--wrong" in arguments and not found.good:
                sys.stdout.write(f"{chosen[len(verdicts)].name}: {found.kind}: {found.details}\n")
                sys.stdout.flush()
            verdicts.append(found)
    counts = Counter((probe.cause, found.kind) for probe, found in zip(chosen, verdicts, strict=True))
    lines = [["cause", "probes", *KINDS]]
    for cause in [*dict.fromkeys(probe.cause for probe in chosen), "all"]:
        numbers = [sum(n for (c, k), n in counts.items() if cause in (c, "all") and k == kind) for kind in KINDS]
        lines.append([cause, str(sum(numbers)), *map(str, numbers)])
    for line in lines:
        sys.stdout.write(
            f"{line[0]:24}"
            + "  ".join(text.rjust(len(head)) for text, head in zip(line[1:], lines[0][1:], strict=True))
            + "\n"
        )
    bad = [(probe.name, found) for probe, found in zip(chosen, verdicts, strict=True) if not found.good]
    if "--oracle" in arguments:
        sys.stdout.write(f"not compared: {sum(one.kind == 'right' and one.details != '' for one in verdicts)}\n")
    if "--todo" in arguments and not causes:
        reasons = [f"{name}: {found.kind}: {' '.join(found.details.split())[:160]}\n" for name, found in bad]
        (FOLDER / "TODO.txt").write_text("".join(reasons), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
