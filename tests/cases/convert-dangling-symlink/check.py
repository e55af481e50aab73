from pathlib import Path


def check(folder: Path, output: str) -> None:
    assert [file.name for file in (folder / "elsewhere").iterdir()] == ["private.py"]
    assert (folder / "elsewhere" / "private.py").read_text(encoding="utf-8") == "x = 1\n"
    assert [file.name for file in (folder / "out").iterdir()] == ["nb.report.json"]
    assert not (folder / "nb.py").exists()
