"""A dry run in a separate process, on the first device."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.errors import RunError, UserError
from finetune.runtime import files, subprocesses
from finetune.runtime.machine import cpu_threads
from finetune.runtime.types import JsonObject


def run(
    target: Sequence[str],
    arguments: Sequence[str],
    *,
    on_gpu: bool,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> JsonObject:
    """The report of a dry run.

    Args:
        target: the module or script that makes it.
        arguments: of the target; `--json` is put before them.
        ranks: of a run on a CPU, whose cores they share; the dry run takes those of one.
        environment: further variables.

    Raises:
        UserError: the job is invalid.
        RunError: the dry run failed for another reason than memory.
    """
    env = {**os.environ, **(environment or {})}
    if on_gpu:
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    elif ranks > 1 and cpu_threads.VARIABLE not in env:
        env[cpu_threads.VARIABLE] = str(cpu_threads.default_threads(cpu_threads.cores(), ranks))
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        report = Path(folder) / "dry.json"
        done = subprocesses.run([sys.executable, *target, "--json", str(report), *arguments], env=env)
        if not report.is_file():
            text = subprocesses.first_error(done.stderr) or (done.stdout + done.stderr)[-3000:]
            raise (UserError if done.returncode == 2 else RunError)(f"A dry run failed: {text}")
        return files.read_json(report)
