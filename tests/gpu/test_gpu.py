"""What only a GPU can show. Run on one H200: `python -m pytest -m gpu tests/gpu`; on two: `-m multigpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch, tiny

LIMITED = """
import sys
import torch
torch.cuda.set_per_process_memory_fraction({fraction})
from finetune import train
sys.exit(train.main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make_model(tmp_path / "model")
    tiny.make_rows(tmp_path / "train.jsonl", 64, longest=150)
    return tmp_path


def arguments(folder: Path, *extra: str) -> list[str]:
    return [
        "--model.model_name_or_path",
        str(folder / "model"),
        "--data.train_file",
        str(folder / "train.jsonl"),
        *extra,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_out_of_memory_says_what_to_change(folder: Path, dry: bool) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU. The allocator is held to a sliver of the card."""
    script = folder / "limited.py"
    script.write_text(LIMITED.format(fraction=0.0008))  # about 110 MiB of an H200
    batch = ["--training.global_batch_size", "64", "--training.per_device_train_batch_size", "64"]
    extra = [*batch, "--training.gradient_checkpointing", "false", "--model.backend", "transformers"]
    out = ["--training.output_dir", str(folder / "out"), *(["--dry-run"] if dry else [])]
    done = launch.run("python", arguments(folder, *extra, *out), cache=folder, script=script)
    words = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout[-4000:]
    assert "CUDA ran out of memory" in words and "Traceback" not in words, words[-3000:]
    if dry:
        assert "NO-GO" in words and not (folder / "out").exists()
    else:
        assert "per_device_train_batch_size to 32" in words
        assert launch.read(folder / "out")["status"] == "failed"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
@pytest.mark.parametrize("documents", [1, 5, 40])
def test_packed_documents_are_as_if_alone(folder: Path, backend: str, documents: int) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU: bfloat16, logits and gradients to 1e-2."""
    command = [sys.executable, "-m", "tests.packed_against_alone", str(folder / "model"), backend, str(documents)]
    done = subprocess.run(command, capture_output=True, text=True, env=launch.environment(folder), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{backend} {found}\n")
    assert found["logits"] < 1e-2 and found["gradient"] < 1e-2 and found["loss"] < 1e-3, found


@pytest.mark.gpu
def test_the_demo_learns_on_a_gpu(tmp_path: Path) -> None:
    """`python -m pytest -m gpu tests/gpu` on one GPU."""
    run = launch.train("accelerate", [], out=tmp_path / "out", cache=tmp_path)
    assert run["hardware"]["device"] == "cuda"
    assert run["exact_match_after"] >= 0.9


@pytest.mark.multigpu
def test_two_gpus_give_the_losses_of_one(folder: Path) -> None:
    """`python -m pytest -m multigpu tests/gpu` on two GPUs: bfloat16 LoRA, losses to 1e-3."""
    extra = ["--training.max_steps", "8", "--training.global_batch_size", "16", "--logging.generate_samples", "0"]
    losses = [
        launch.train(how, arguments(folder, *extra), out=folder / how, cache=folder)["losses"]
        for how in ("single.yaml", "ddp_2.yaml")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
