#!/usr/bin/env python3
"""The summary of a run of pytest, for GitHub: the versions, the counts, and the first test that failed.

    .ci/first_failure.py REPORT.xml [VENV]

REPORT.xml is what `pytest --junitxml` wrote. Needs only Python, and works when the installation failed.
"""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

NAMED = ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers", "torch", "transformers", "trl")


def main(report: Path, venv: Path | None = None) -> int:
    """Print the summary as Markdown."""
    lines = ["## Tests with the main branches of transformers, TRL and PEFT", "", *failures(report)]
    if venv is not None:
        lines += ["", "```text", *versions(venv), "```"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def failures(report: Path) -> list[str]:
    """The first failed test with its message, then the names of the others."""
    try:
        cases = list(ET.parse(report).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        cases = []
    if not cases:
        return ["No test is reported: the installation failed, or pytest did not end. The job's log has the reason."]
    failed = [(case, found) for case in cases for found in [*case.findall("failure"), *case.findall("error")]]
    if not failed:
        return [f"{len(cases):,} tests, none failed."]
    (case, found), *others = failed
    text = (found.text or found.get("message") or "").strip().splitlines()
    lines = [
        f"{len(cases):,} tests, {len(failed):,} failed. The first: **`{name(case)}`**",
        "",
        "```text",
        *text[-25:],
        "```",
    ]
    return lines + [f"- `{name(case)}`" for case, _ in others[:50]]


def name(case: ET.Element) -> str:
    """As pytest takes it: `tests/unit/test_x.py::test_y[z]`; the file alone if it could not be imported."""
    test = case.get("name") or ""
    where = (case.get("classname") or test).split(".")
    for n in range(len(where), 0, -1):
        file = Path(*where[:n]).with_suffix(".py")
        if file.is_file():
            return "::".join([file.as_posix(), *where[n:], *([test] if case.get("classname") else [])])
    return ".".join(filter(None, [case.get("classname"), test]))


def versions(venv: Path) -> list[str]:
    """What pip installed, with the commits of main branches."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "freeze"]
    try:
        frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        return [f"versions unknown: {error}"]
    return [line for line in frozen if line.split("==")[0].split(" @ ")[0].replace("-", "_") in NAMED]


if __name__ == "__main__":
    raise SystemExit(main(*map(Path, sys.argv[1:])))
