"""One plan, any number of ranks: the same documents, gradients, evaluation and weights on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_training import worst
from tests.helpers import launch, tiny

pytestmark = pytest.mark.process

STEPS, ROWS = 12, 90


@pytest.mark.campaign
@pytest.mark.parametrize("backend", [pytest.param("unsloth", marks=pytest.mark.unsloth), "transformers"])
def test_packed_documents_are_as_if_alone(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    """Logits and gradients of packs of 1, 7 and 40 documents against each document alone, fp32: 1e-5."""
    for one in launch.packed_against_alone(tiny_model, backend, [1, 7, 40], cache=tmp_path):
        assert one["logits"] < 1e-5 and one["gradient"] < 1e-5 and one["loss"] < 1e-6, one


def spied(ranks: int, arguments: list[str], out: Path, cache: Path) -> dict:
    """Train on so many ranks; run.json, with the documents and gradients of its steps under out/../spy-NAME."""
    spy = cache / f"spy-{out.name}"
    spy.mkdir()
    how = {count: name for name, count in launch.WARM.items()}[ranks]
    return launch.train(how, arguments, out=out, cache=cache, script=launch.SPIES / "steps.py", SPY=str(spy))


def step_documents(spy: Path, step: int) -> list[str]:
    return sorted(line for file in spy.glob(f"step-{step}-rank-*.txt") for line in file.read_text().splitlines())


@pytest.mark.campaign
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_world_size_does_not_matter(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """12 ragged steps on several ranks and on one, evaluated in batches of 1, 3 and 8; packed, resumed on two
    ranks from step 7 of the run on one."""
    worlds = (4, 1) if packing else (2, 1)
    tiny.make_rows(tmp_path / "train.jsonl", ROWS)
    tiny.make_rows(tmp_path / "eval.jsonl", 11, seed=1)
    arguments = [
        *("--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "train.jsonl")),
        *("--data.eval_file", str(tmp_path / "eval.jsonl"), "--training.max_steps", str(STEPS)),
        *("--training.global_batch_size", "4" if packing else "12", "--training.save_steps", "7"),
        *("--training.per_device_train_batch_size", "1", "--logging.generate_samples", "0"),
        *("--training.learning_rate", "1e-3", "--training.save_total_limit", "9"),
        *(["--data.packing", "--data.max_length", "128", "--data.pack_length", "200"] if packing else []),
    ]
    runs = {}
    for ranks in worlds:
        size = ["--training.per_device_eval_batch_size", {1: "8", 2: "3", 4: "1"}[ranks]]
        runs[ranks] = spied(ranks, [*arguments, *size], tmp_path / str(ranks), tmp_path)
    # The first run's ranks prepared the data together, each row once; the others found it in the cache.
    assert tokenized(tmp_path / f"spy-{worlds[0]}") == ROWS + 11 and not any(
        tokenized(tmp_path / f"spy-{ranks}") for ranks in worlds[1:]
    )
    one = runs[1]
    assert one["ledger"]["train"]["layout"]["pack_length"] == (200 if packing else None)
    per_epoch = -(-one["ledger"]["train"]["layout"]["rows"] // one["batch"]["global_batch_size"])
    assert per_epoch < STEPS, "the test should cross the end of an epoch, whose last step is not full"
    whole_epoch = [text for step in range(per_epoch) for text in step_documents(tmp_path / "spy-1", step)]
    assert len(whole_epoch) == one["ledger"]["train"]["rows_kept"]  # each document once
    for ranks in worlds[:-1]:
        run = runs[ranks]
        assert put_away(tmp_path / f"spy-{ranks}") == [f"put-away-in-0-rank-{rank}" for rank in range(ranks)]
        assert run["plan"] == one["plan"]
        for step in range(STEPS):
            assert step_documents(tmp_path / f"spy-{ranks}", step) == step_documents(tmp_path / "spy-1", step), step
        for step in range(3):
            mine, ref = (torch.load(tmp_path / f"spy-{r}" / f"gradient-{step}.pt").double() for r in (ranks, 1))
            assert torch.nn.functional.cosine_similarity(mine, ref, dim=0) > 0.99999
            assert abs(mine.norm() / ref.norm() - 1) < 1e-4
        assert worst(one["losses"], run["losses"]) < 1e-5
        for when in ("eval_loss_before", "eval_loss_after"):
            assert worst([one[when]], [run[when]]) < 1e-6
        assert_same_weights(tmp_path / "1", tmp_path / str(ranks))
    if not packing:
        return

    again = tmp_path / "again"
    shutil.copytree(tmp_path / "1", again)
    shutil.rmtree(again / f"checkpoint-{STEPS}")
    resumed = spied(2, [*arguments, "--training.resume_from_checkpoint", "true"], again, tmp_path)
    assert resumed["resumed_from"].endswith("checkpoint-7")
    assert put_away(tmp_path / "spy-again") == [f"put-away-in-7-rank-{rank}" for rank in range(2)]
    assert worst(one["losses"][7:], resumed["losses"]) < 1e-5
    assert not list((tmp_path / "spy-again").glob("step-6-*"))
    assert step_documents(tmp_path / "spy-again", 7) == step_documents(tmp_path / "spy-1", 7)
    assert_same_weights(tmp_path / "1", again)


def tokenized(spy: Path) -> int:
    file = spy / "tokenized.txt"
    return sum(map(int, file.read_text().split())) if file.exists() else 0


def put_away(spy: Path) -> list[str]:
    """When, and on which ranks, DDP's first buckets were let go of (D8)."""
    return sorted(file.name for file in spy.glob("put-away-*"))


def assert_same_weights(one: Path, other: Path) -> None:
    """Final adapters, each tensor to 1e-5 of its norm (and of a typical weight where it is nearly zero)."""
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= 1e-5 * max(float(tensor.norm()), 1.0), name


def test_a_rank_with_other_data_refuses_to_start(tiny_model: Path, tmp_path: Path) -> None:
    """Each rank reads a file of its own name, as two machines with different copies would."""
    for rank in (0, 1):
        tiny.make_rows(tmp_path / f"rank-{rank}.jsonl", 20, seed=rank)
    script = launch.SPIES / "own_data.py"
    arguments = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "rank-RANK.jsonl")]
    done = launch.run(
        "2 ranks", [*arguments, "--training.output_dir", str(tmp_path / "out")], cache=tmp_path, script=script
    )
    assert done.returncode != 0
    assert "rank 1 differs from rank 0 in the data's fingerprint" in done.stdout
    assert done.stdout.count("error: ") == 1
    assert not (tmp_path / "out").exists()
