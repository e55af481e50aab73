import io
import sys
from pathlib import Path
from unittest import mock

from finetune import cli
from finetune.runtime import command

DATA = "--model.model_name_or_path m --model.backend transformers --data.train_file rows.jsonl"
TRAIN = (
    f"train {DATA} --training.output_dir out --training.overwrite_output_dir true --data.eval_file rows.jsonl"
    " --training.global_batch_size 2 --training.eval_steps 1 --training.max_steps 1"
)
COMMANDS = [f"prepare {DATA}", TRAIN, "chat out --prompts 猫.txt --max-new-tokens 2"]


def check(folder: Path, output: str) -> None:
    """Every command ends as on any console, whatever that can show."""
    (folder / "猫.txt").write_text("猫 runs ☀\n", encoding="utf-8")
    for line, encoding in zip(COMMANDS, ("cp1252", "latin-1", "ascii"), strict=True):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
        with mock.patch.object(sys, "stdout", streams[0]), mock.patch.object(sys, "stderr", streams[1]):
            assert cli.main(line.split()) == 0, line
            assert cli.main(["train", "--config", "猫.yaml"]) == command.BAD_INPUT
        for stream in streams:
            stream.flush()
        shown, error = (stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert "? " in shown, line
        assert "error: " in error and ".yaml" in error
