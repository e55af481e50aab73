"""examples/one_file.py trains as the engine does: the same rows, losses and weights, on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_training import worst
from tests.helpers import ROOT, launch, tiny, warm

pytestmark = pytest.mark.process

STEPS, BATCH, PACK_LENGTH, RATE = 9, 5, 160, 1e-3


def one_file(ranks: int, cache: Path, *arguments: str) -> list[float]:
    """The losses that the example prints."""
    argv = [str(ROOT / "examples" / "one_file.py"), *arguments]
    env = launch.environment(cache)
    server = warm.server("transformers")
    done = server.run(argv, ranks=ranks, env=env, cwd=cache, timeout=launch.TIMEOUT, merged=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+) over \d+ tokens$", done.stdout, re.MULTILINE)]


@pytest.mark.campaign
def test_the_example_trains_as_the_engine_does(tiny_model: Path, tmp_path: Path) -> None:
    """Steps of 5 packs, fewer in the last one of an epoch: ranks have unequal numbers of rows. Losses to 1e-6, final
    weights to 1e-5."""
    data = tiny.make_rows(tmp_path / "train.jsonl", 72)
    settings = [
        *("--model.model_name_or_path", str(tiny_model), "--data.train_file", str(data)),
        *("--model.backend", "transformers", "--model.full_finetuning", "true", "--logging.generate_samples", "0"),
        *("--data.packing", "true", "--data.max_length", "128", "--data.pack_length", str(PACK_LENGTH)),
        *("--training.max_steps", str(STEPS), "--training.learning_rate", str(RATE)),
        *("--training.global_batch_size", str(BATCH)),
    ]
    engine = launch.train("1 rank", settings, out=tmp_path / "engine", cache=tmp_path)
    rows = engine["ledger"]["train"]["layout"]["rows"]
    assert rows < STEPS * BATCH and rows % BATCH
    arguments = [
        *("--model", str(tiny_model), "--data", str(data), "--pack-length", str(PACK_LENGTH), "--steps", str(STEPS)),
        *("--global-batch-size", str(BATCH), "--learning-rate", str(RATE), "--fingerprint", engine["data_fingerprint"]),
    ]
    trained = load_file(tmp_path / "engine" / "model.safetensors")
    for ranks in (1, 2):
        losses = one_file(ranks, tmp_path, *arguments, "--output", str(tmp_path / f"tuned-{ranks}"))
        assert len(losses) == STEPS and worst(engine["losses"], losses) < 1e-6
        saved = load_file(tmp_path / f"tuned-{ranks}" / "model.safetensors")
        assert saved.keys() == trained.keys()
        assert all(torch.allclose(saved[name], one, rtol=0, atol=1e-5) for name, one in trained.items())
