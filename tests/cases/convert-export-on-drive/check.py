from pathlib import Path

import yaml


def check(folder: Path, output: str) -> None:
    settings = yaml.safe_load((folder / "settings" / "export_on_drive.yaml").read_text(encoding="utf-8"))
    assert settings["training"]["output_dir"] == "birds/adapter"
    for form in ("settings", "drop-in"):
        script = (folder / form / "export_on_drive.py").read_text(encoding="utf-8")
        assert 'HOME = "birds"' in script and 'f"{HOME}/merged"' in script
        assert "/content" not in script
