"""Tests of finetune/chat/serve.py."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from tests.helpers.chat import answered


def test_serving_prints_commands_that_a_shell_reads(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    shutil.copytree(run, folder)
    found = answered(tmp_path, folder, "--serve")
    export, serve = (shlex.split(line) for line in found["vllm"])
    assert export == ["finetune", "export", str(folder), "--to", "merged", "--out", f"{folder}-merged"]
    assert serve[:3] == ["vllm", "serve", f"{folder}-merged"] and serve[-2:] == ["--max-model-len", "1024"]
    export, server = (shlex.split(line) for line in found["llama.cpp"])
    assert export[3:5] == ["--to", "gguf"] and server[0] == "llama-server"
    assert json.loads(shlex.split(found["ask"])[-1])["model"] == "it's a run"
