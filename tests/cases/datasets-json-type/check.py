from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    """The files of `datasets` hold the rows of the JSON lines."""
    rows, calls = marked_rows(folder, "c_rows"), marked_rows(folder, "c_calls")
    assert '"default": 1}' in rows[0] and '"default": "x"}' in rows[1]
    assert '"arguments": {"a": 1}' in calls[0] and '"arguments": {"a": "one"}' in calls[1]
    for copy in ("parquet", "disk"):
        assert marked_rows(folder, f"c_rows_{copy}") == rows
        assert marked_rows(folder, f"c_calls_{copy}") == calls
