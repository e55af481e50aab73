"""Checkpoints for tests of what is done with them."""

from __future__ import annotations

from pathlib import Path

from finetune.engine.checkpoint import checkpoints


def make_checkpoint(output: Path, step: int) -> Path:
    target = output / f"checkpoint-{step}"
    with checkpoints.staging(target) as folder:
        (folder / "weights.bin").write_bytes(b"x" * 100)
        checkpoints.seal(folder, {"step": step, "plan": "p"})
    return target
