from pathlib import Path


def check(folder: Path, output: str) -> None:
    script = (folder / "converted" / "export_on_drive.py").read_text(encoding="utf-8")
    assert 'HOME = "birds"' in script and 'f"{HOME}/merged"' in script
    assert "/content" not in script
