"""Whole runs of the shipped command on one process and on two gloo ranks, through the shipped profiles."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.runtime.tags import tag
from tests.helpers import launch

pytestmark = pytest.mark.process

STEPS = 6


def settings(model: Path, data: Path, *extra: str) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_file", str(data / "eval.jsonl"), "--training.max_steps", str(STEPS)),
        *("--logging.logging_steps", "2", "--logging.generate_samples", "0", *extra),
    ]


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


FULL = ("--model.full_finetuning", "--training.learning_rate", "1e-3")


@pytest.mark.parametrize(
    "how", [("1 rank", "2 ranks"), pytest.param(("single.yaml", "cpu_2.yaml"), marks=pytest.mark.campaign)]
)
def test_two_ranks_train_as_one_process_does(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, how: tuple[str, str]
) -> None:
    """Full fine-tuning, ragged rows: losses to 1e-5, evaluation to 1e-6, final weights to 1e-5, and to a tenth of the
    learning rate where AdamW takes whole steps along gradients that are mere rounding. On each of two ranks the
    gradients are DDP's buckets from the second micro-batch on (D9)."""
    script = launch.SPIES / "gradient_storage.py"
    extra = ("--model.backend", "transformers", *FULL)
    # Of 12 rows a step, one process takes 3 x 4, two ranks 3 x 2 each: padding differs, results must not.
    batch = ("--training.global_batch_size", "12", "--training.per_device_train_batch_size")
    arguments = settings(tiny_model, tiny_data, *extra, *batch)
    runs = [
        launch.train(started, [*arguments, str(4 // ranks)], out=tmp_path / started, cache=tmp_path, script=script)
        for started, ranks in zip(how, (1, 2), strict=True)
    ]
    one, two = runs
    assert [run["world_size"] for run in runs] == [1, 2]
    assert [run["backend"] for run in runs] == ["transformers"] * 2
    assert one["batch"]["accumulation"] == two["batch"]["accumulation"] == 3
    assert len(one["losses"]) == STEPS
    assert worst(one["losses"], two["losses"]) < 1e-5
    assert (
        worst([one["eval_loss_before"], one["eval_loss_after"]], [two["eval_loss_before"], two["eval_loss_after"]])
        < 1e-6
    )
    assert one["eval_loss_after"] < one["eval_loss_before"]
    assert len(two["peak_memory_gib"]) == 2
    for rank in (0, 1):
        first, buckets, *others = (tmp_path / f"held-2-{rank}.txt").read_text().splitlines()
        assert len(others) == 3 * STEPS - 2 and set(others) == {buckets} and first != buckets
    weights = [load_file(next((tmp_path / started).glob("*model.safetensors"))) for started in how]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-4, atol=1e-4), name
        assert torch.isclose(tensor, weights[1][name], rtol=1e-4, atol=1e-5).float().mean() > 0.999, name


@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [pytest.param("unsloth", "true", marks=pytest.mark.unsloth), ("transformers", "false")],
)
def test_training_equals_a_plain_loop(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, backend: str, checkpointing: str
) -> None:
    """Final weights of a full fine-tuning against 6 steps written out in plain PyTorch, on the same rows."""
    out = tmp_path / "out"
    run = launch.train(
        "1 rank",
        settings(
            tiny_model, tiny_data, *FULL, "--model.backend", backend, "--training.global_batch_size", "7",
            "--training.lr_scheduler_type", "constant", "--training.per_device_train_batch_size", "1",
            "--training.optim", "adamw_torch", "--training.gradient_checkpointing", checkpointing,
        ),
        out=out,
        cache=tmp_path,
    )  # fmt: skip
    losses, weights = plain_loop(tiny_model, tiny_data, run, tmp_path)
    assert worst(losses, run["losses"]) < 1e-5
    saved = load_file(out / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.allclose(tensor, saved[name], rtol=1e-3, atol=2e-5), name


def plain_loop(model: Path, data: Path, run: dict, cache: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Sum of token losses over the rows of each planned step, divided by their label tokens; AdamW; clipping at 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.data import store
    from finetune.data.packs import one_per_row
    from finetune.data.plan import Plan

    (folder,) = {path.parent for path in (cache / "data").glob("*/train.arrow")}
    rows = store.load_rows(folder, "train")
    assert len(rows) == len((data / "train.jsonl").read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        json.loads((data / "train.jsonl").read_text().splitlines()[0])["messages"], tokenize=False
    )
    assert tokenizer.decode(rows[0][0]) == text
    plan = Plan(
        costs=one_per_row(rows.lengths).costs(64),
        label_tokens=rows.label_tokens,
        global_batch_size=7,
        seed=run["config"]["training"]["seed"],
        fingerprint=run["order_key"],
        lengths=rows.lengths,
    )
    assert plan.digest() == run["plan"]
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for index in plan.step_rows(0, step):
            ids, labels = (torch.tensor(values, dtype=torch.int64) for values in rows[int(index)])
            logits = trained(input_ids=ids[None]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in trained.state_dict().items()}


def test_resumed_run_ends_with_the_same_bits(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """All ranks are killed after step 3, and the run is resumed, with dropout; the newest checkpoint is damaged and
    skipped, with a warning. The charts have no step twice. More kills: `make kills`."""
    how = "2 ranks"
    extra = ("--training.save_steps", "3", "--lora.lora_dropout", "0.1", "--training.global_batch_size", "4")
    arguments = settings(tiny_model, tiny_data, *extra)
    whole = tmp_path / "whole"
    first = launch.train(how, arguments, out=whole, cache=tmp_path)
    again = tmp_path / "again"
    step = random.Random(72).randint(4, 5)
    assert faulty(how, arguments, again, tmp_path, "SIGKILL", "all", step).returncode != 0
    assert launch.read(again)["status"] == "running" and not (again / "adapter_model.safetensors").exists()
    shutil.copytree(whole / "checkpoint-6", again / "checkpoint-6")
    (again / "checkpoint-6" / "optimizer.pt").write_bytes(b"torn")
    done = launch.run(
        how,
        [*arguments, "--training.resume_from_checkpoint", "true", "--training.output_dir", str(again)],
        cache=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "checkpoint-6 is damaged" in " ".join(done.stdout.split())
    second = json.loads((again / "run.json").read_text())
    assert second["resumed_from"].endswith("checkpoint-3")
    assert second["losses"] == first["losses"][3:]
    assert second["tokens"] == first["tokens"]
    events = EventAccumulator(str(again / "runs" / "again"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars(tag("loss"))] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars(tag("eval_loss"))] == [0, STEPS]
    assert (whole / "adapter_model.safetensors").read_bytes() == (again / "adapter_model.safetensors").read_bytes()
    sealed = json.loads((again / "checkpoint-6" / "checkpoint.json").read_text())["xxh3_128"]
    assert all(len(sealed[f"rng_state_{rank}.pth"]) == 32 for rank in (0, 1))
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*")}
    third = launch.train(how, [*arguments, "--training.resume_from_checkpoint", "true"], out=again, cache=tmp_path)
    assert third == second and {path: path.stat().st_mtime_ns for path in again.rglob("*")} == before


def test_resume_on_more_ranks_goes_on_with_the_next_step(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """From one rank on two. Both runs stop early after the same step, on two ranks counting on from the checkpoint, and
    end with the same best model: with greater_is_better, of falling losses, it is that of step 1."""
    extra = ("--training.save_steps", "3", "--training.global_batch_size", "4", "--training.max_steps", "9")
    best = ("--training.load_best_model_at_end", "true", "--training.greater_is_better", "true")
    rule = ("--training.eval_steps", "1", "--training.early_stopping_patience", "5")
    arguments = settings(tiny_model, tiny_data, *extra, *best, *rule)
    whole = launch.train("1 rank", arguments, out=tmp_path / "whole", cache=tmp_path)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", again)
    shutil.rmtree(again / "checkpoint-6")
    resumed = launch.train(
        "2 ranks", [*arguments, "--training.resume_from_checkpoint", "true"], out=again, cache=tmp_path
    )
    assert (whole["world_size"], resumed["world_size"]) == (1, 2)
    assert worst(whole["losses"][3:], resumed["losses"]) < 1e-5
    for run in (whole, resumed):
        assert (run["best"]["step"], run["steps"], run["early_stopping"]["step"]) == (1, 6, 6)
        assert run["eval_loss_after"] == pytest.approx(run["best"]["value"], rel=1e-6)  # each rank has those weights
    name = "adapter_model.safetensors"
    assert (again / name).read_bytes() == (tmp_path / "whole" / "checkpoint-1" / name).read_bytes()


@pytest.mark.campaign
def test_multi_cpu_profile_that_starts_one_process_is_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    profile = yaml.safe_load((launch.PROFILES / "cpu_2.yaml").read_text()) | {"distributed_type": "MULTI_CPU"}
    (tmp_path / "multi_cpu.yaml").write_text(yaml.safe_dump(profile))
    out = tmp_path / "out"
    done = launch.run(
        str(tmp_path / "multi_cpu.yaml"),
        settings(tiny_model, tiny_data, "--training.output_dir", str(out)),
        cache=tmp_path,
    )
    assert done.returncode != 0
    assert "was asked for 2 processes but started one" in done.stdout
    assert not out.exists()


def faulty(how: str, arguments: list[str], out: Path, cache: Path, kind: str, rank: int | str, step: int):
    fault = {"FAULT": kind, "FAULT_RANK": str(rank), "FAULT_STEP": str(step)}
    return launch.run(
        how, [*arguments, "--training.output_dir", str(out)], cache=cache, script=launch.SPIES / "fault.py", **fault
    )


@pytest.mark.parametrize(("how", "rank"), [pytest.param("cpu_2.yaml", 0, marks=pytest.mark.campaign), ("2 ranks", 1)])
def test_a_failing_rank_ends_all_and_shows_its_own_error(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, how: str, rank: int
) -> None:
    arguments = settings(tiny_model, tiny_data, "--training.global_batch_size", "4")
    done = faulty(how, arguments, tmp_path / "out", tmp_path, "raise", rank, 2)
    assert done.returncode != 0
    ours, launcher, _ = done.stdout.partition("ChildFailedError")  # of accelerate's own report
    assert bool(launcher) is (how == "cpu_2.yaml")
    assert ours.count("ValueError: the fault of this test") == 1
    assert f"[rank {rank}] Traceback" in ours and f"[rank {1 - rank}] Traceback" not in ours
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "the fault of this test" in record["error"]


@pytest.mark.parametrize(
    ("how", "kind"), [("1 rank", "SIGINT"), pytest.param("torchrun", "SIGTERM", marks=pytest.mark.campaign)]
)
def test_a_signal_saves_and_ends_with_130(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, how: str, kind: str
) -> None:
    """One rank gets the signal; all save after the same step, and the run can be resumed to the same losses."""
    arguments = settings(tiny_model, tiny_data, "--training.global_batch_size", "4")
    same = "1 rank" if how == "1 rank" else "2 ranks"
    whole = launch.train(same, arguments, out=tmp_path / "whole", cache=tmp_path)
    out = tmp_path / "out"
    done = faulty(how, arguments, out, tmp_path, kind, 0 if how == "1 rank" else 1, 1)
    if how == "1 rank":
        assert done.returncode == 130, done.stdout[-3000:]
    else:  # torchrun ends with 1, lists each rank's code, and may end a rank that was about to return its own
        assert "exitcode  : 130" in done.stdout, done.stdout[-3000:]
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert 0 < record["steps"] < STEPS
    assert (out / f"checkpoint-{record['steps']}" / "checkpoint.json").is_file()
    command = next(line for line in done.stdout.splitlines() if "-m finetune.train" in line).split()
    launcher = "python -m" if how == "1 rank" else "torchrun --standalone --nproc_per_node 2 -m"
    assert " ".join(command).startswith(f"{launcher} finetune.train")
    resumed = launch.train(same, command[command.index("finetune.train") + 1 :], out=out, cache=tmp_path)
    assert record["losses"] + resumed["losses"] == whole["losses"]


@pytest.mark.campaign
def test_a_rank_that_is_killed_is_named_by_the_others(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """And the last checkpoint is whole, from which the run goes on to the same losses."""
    arguments = settings(tiny_model, tiny_data, "--training.global_batch_size", "4", "--training.save_steps", "2")
    whole, out = launch.train("2 ranks", arguments, out=tmp_path / "whole", cache=tmp_path), tmp_path / "out"
    done = faulty("torchrun", arguments, out, tmp_path, "SIGKILL", 1, 3)
    assert done.returncode != 0
    record = json.loads((out / "run.json").read_text())
    cause = record["error"] if record["status"] == "failed" else record["interrupted_by"]
    assert "the end of local rank 1, which was killed if it left no error" in cause, record
    resumed = launch.train(
        "2 ranks", [*arguments, "--training.resume_from_checkpoint", "true"], out=out, cache=tmp_path
    )
    assert resumed["losses"] == whole["losses"][2:]


def test_a_loss_that_is_not_finite_stops_the_run(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    arguments = settings(tiny_model, tiny_data, "--training.global_batch_size", "4")
    done = faulty("1 rank", arguments, tmp_path / "out", tmp_path, "nan", 0, 3)
    assert done.returncode == 1
    assert "error: The loss of step 4 is not finite (nan)" in done.stdout
    assert "Traceback" not in done.stdout
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "failed" and "step 4" in record["error"]
