from pathlib import Path


def check(folder: Path, output: str) -> None:
    """The configuration of `init` has the line that uses the template."""
    text = (folder / "c.yaml").read_text(encoding="utf-8")
    assert "In the model's chat template instead:\n  # columns: {instruction: question, output: answer}" in text
