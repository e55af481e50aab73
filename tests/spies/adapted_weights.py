"""Prints, as JSON, which weights the adapter of each model trains: `BACKEND FOLDER [FOLDER ...]`."""

from __future__ import annotations

import json
import sys

from finetune.config import load
from finetune.engine.model import adapter_coverage, loading
from finetune.runtime import bootstrap

SETTINGS = ("null", "all-linear", "[q_proj, k_proj, v_proj, o_proj]")  # of lora.target_modules


def main(backend: str, *folders: str) -> None:
    stack = bootstrap.start(backend)
    for folder in folders:
        for targets in SETTINGS:
            arguments = [
                "--model.model_name_or_path",
                folder,
                "--data.train_file",
                "x",
                "--lora.target_modules",
                targets,
            ]
            model = loading.load(load([*arguments, "--model.backend", backend]), stack, row_length=64)
            covered = adapter_coverage.coverage(model)
            assert covered is not None
            shapes = {name: list(one.shape) for name, one in model.named_parameters() if one.requires_grad}
            sys.stdout.write(json.dumps([folder, targets, covered.to_dict(), shapes]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
