from pathlib import Path


def check(folder: Path, output: str) -> None:
    assert (folder / "victim.txt").read_text(encoding="utf-8") == "precious user data\n"
    assert [file.name for file in (folder / "out").iterdir()] == [".finetune.lock"]
