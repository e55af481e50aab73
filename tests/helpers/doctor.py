"""What the tests of doctor share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from finetune.doctor import copies
from tests.helpers import ROOT, launch

HUB_TOKEN, SECRET, KEY = "hf_" + "aBcD" * 8, "correct horse battery", "sk-" + "f00d" * 6


def examine(home: Path, *arguments: str, fakes: dict[str, str] | None = None, **extra: str) -> Any:
    """Run the shipped command with a home of its own; `fakes` are modules that stand in for installed ones."""
    home.mkdir(exist_ok=True)
    for name, source in (fakes or {}).items():
        (home / f"{name}.py").write_text(source)
    env = launch.environment(home / "cache", HOME=str(home), **extra)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join([str(home), str(ROOT)])
    command = [sys.executable, "-m", "finetune", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=300, check=False)


def config_file(folder: Path, **training: Any) -> Path:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    settings = {
        "model": {"model_name_or_path": str(model), "backend": "transformers"},
        "data": {"train_file": str(folder / "rows.jsonl")},
        "training": {"output_dir": str(folder / "out"), "gradient_checkpointing": True, **training},
    }
    file = folder / "my.yaml"
    file.write_text(json.dumps(settings))  # YAML reads JSON
    return file


def gpus(count: int) -> list[dict[str, Any]]:
    card = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_gib": 139.8, "free_gib": 139.3}
    return [{"index": index, **card, "computes": True} for index in range(count)]


def copied(source: str, target: str, wrong: int | None = 0, error: str | None = None) -> dict[str, Any]:
    return {"source": source, "target": target, "sent": copies.BYTES, "wrong": wrong, "error": error}
