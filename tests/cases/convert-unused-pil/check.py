from pathlib import Path


def check(folder: Path, output: str) -> None:
    for name in ("unused_pil", "unused_audio", "shown_picture"):
        script = (folder / "converted" / f"{name}.py").read_text(encoding="utf-8")
        assert not any(word in script for word in ("PIL", "librosa", "soundfile", "torchaudio", "SNAC", "robin.png"))
