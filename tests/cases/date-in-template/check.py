import json
from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    """The date is the same on every day; another one is other data; run.yaml repeats the run."""
    for cache, date in (("c1", "01 Jan 2026"), ("c2", "27 Nov 2026"), ("c4", "27 Nov 2026")):
        for row in marked_rows(folder, cache):
            assert row.startswith(f"<|im_start|>system\nToday is {date}.<|im_end|>\n")
    first, second = (json.loads((folder / name).read_text())["fingerprint"] for name in ("1.json", "2.json"))
    run, again = (json.loads((folder / name / "run.json").read_text()) for name in ("out", "again"))
    assert run["data_fingerprint"] == again["data_fingerprint"] == second != first
    assert run["losses"] == again["losses"]
