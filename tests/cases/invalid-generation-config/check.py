import json
from pathlib import Path


def check(folder: Path, output: str) -> None:
    """The base's values are in every folder, as they are."""
    base = json.loads((folder / "m" / "generation_config.json").read_text())
    for name in ("out", "out/checkpoint-2", "merged"):
        assert (folder / name / "model.safetensors").is_file(), name
        found = json.loads((folder / name / "generation_config.json").read_text())
        assert {key: found.get(key) for key in ("do_sample", "temperature", "top_p", "eos_token_id")} == {
            key: base[key] for key in ("do_sample", "temperature", "top_p", "eos_token_id")
        }, name
