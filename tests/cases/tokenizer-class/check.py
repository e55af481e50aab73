from pathlib import Path


def check(folder: Path, output: str) -> None:
    """The run changed nothing about the tokenizer, so its files are the base's, byte for byte."""
    base = {path.name: path.read_bytes() for path in (folder / "m").iterdir() if "token" in path.name}
    base["chat_template.jinja"] = (folder / "m" / "chat_template.jinja").read_bytes()
    assert b"PreTrainedTokenizerFast" in base["tokenizer_config.json"]
    for name in ("out", "out/checkpoint-1", "merged", "adapter"):
        assert {file: (folder / name / file).read_bytes() for file in base} == base, name
