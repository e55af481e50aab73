"""Resume does what was asked: runs of the shipped command inside this process, on a Llama of 100,000 parameters."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from finetune.config import Config, TrainingConfig, load
from finetune.engine import job
from finetune.engine.checkpoint import checkpoints, resume
from finetune.engine.training.state_files import load_optimizer_and_schedule
from finetune.errors import RunError, UserError
from tests.helpers import tiny
from tests.helpers.runs import Runs, in_this_process

RESUME = ("--training.resume_from_checkpoint", "true")
CHANGED = (*RESUME, "--training.resume_with_changes", "true")
FINAL = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tiny.make_model(folder / "model")
    tiny.make_rows(folder / "train.jsonl", 40)
    return folder


@pytest.fixture
def runs(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    with in_this_process(monkeypatch, shared):
        yield Runs(shared, monkeypatch)


@pytest.fixture(scope="module")
def whole_run(shared: Path) -> Path:
    """A finished run of 6 steps under cosine with a checkpoint at 2, 4 and 6."""
    with pytest.MonkeyPatch.context() as monkeypatch, in_this_process(monkeypatch, shared):
        Runs(shared, monkeypatch)(shared / "whole", *SIX)
    return shared / "whole"


SIX = ("--training.max_steps", "6", "--training.save_steps", "2", "--training.save_total_limit", "null")


@pytest.fixture
def out(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(whole_run, tmp_path / "out"))


def state(folder: Path) -> dict[str, Any]:
    """Every file below a folder: digest and time of writing; of folders that they are there."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns)
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def words(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return " ".join((captured.out + captured.err).split())


# --- a run that is finished -----------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_changes_nothing(runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(out)
    runs(out, *SIX, *RESUME)
    assert "already finished: 6 of 6 steps" in words(capsys)
    runs(out, *SIX, "--training.resume_from_checkpoint", str(out / "checkpoint-6"))
    assert "already finished: 6 of 6 steps" in words(capsys)
    assert state(out) == before


def test_a_run_has_a_model_card_without_paths_of_this_machine(whole_run: Path, shared: Path) -> None:
    text = (whole_run / "README.md").read_text()
    assert "model, fine-tuned by supervised fine-tuning for 6 steps: a LoRA adapter of rank" in text
    assert "| optimizer steps | 6 |" in text and "max_steps: 6" in text
    for absent in (str(shared), "More Information Needed", "## Export"):
        assert absent not in text
    yaml.safe_load(text.split("---")[1])
    assert not (whole_run / "checkpoint-6" / "README.md").exists()  # PEFT's


@pytest.mark.campaign
def test_a_finished_run_of_a_part_of_an_epoch(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.3 of an epoch of 10 steps is 3 steps; `--json` gets the results of the finished run."""
    arguments = ("--training.num_train_epochs", "0.3", "--training.save_steps", "2")
    first = runs(tmp_path / "out", *arguments)
    before = state(tmp_path / "out")
    assert runs(tmp_path / "out", *arguments, *RESUME, "--json", str(tmp_path / "again.json")) == first
    said = words(capsys)
    assert "already finished: 3 of 3 steps" in said
    assert state(tmp_path / "out") == before
    further = f"--training.num_train_epochs 1.3 {' '.join(CHANGED)}"
    assert f"One more epoch: the same command with {further}" in said
    assert json.loads((tmp_path / "again.json").read_text()) == first
    assert runs(tmp_path / "out", "--training.save_steps", "2", *further.split())["steps"] == 13


def test_a_finished_run_without_checkpoints(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays as it is; another one in its place is refused."""
    arguments = ("--training.max_steps", "2", "--training.save_steps", "0")
    runs(tmp_path / "out", *arguments)
    before = state(tmp_path / "out")
    runs(tmp_path / "out", *arguments, *RESUME)
    assert "already finished: 2 of 2 steps" in words(capsys)
    for other in (("--training.max_steps", "3"), ("--training.learning_rate", "1e-3"), ("--training.seed", "1")):
        runs(tmp_path / "out", *arguments, *other, *RESUME, code=2)
        assert "finished run of 2 steps" in words(capsys)
    assert state(tmp_path / "out") == before


def test_a_run_killed_after_its_last_checkpoint_gets_its_end_and_no_further_step(
    runs: Runs, whole_run: Path, out: Path
) -> None:
    (out / FINAL).unlink()
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "status": "running"}))
    checkpoint = state(out / "checkpoint-6")
    runs.watch()
    again = runs(out, *SIX, *RESUME)
    assert runs.groups == [] and again["losses"] == []
    assert (again["status"], again["steps"], again["tokens"]) == ("done", 6, record["tokens"])
    assert (out / FINAL).read_bytes() == (whole_run / FINAL).read_bytes()
    assert state(out / "checkpoint-6") == checkpoint
    assert [path.name for path in checkpoints.checkpoints(out)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    before = state(out)
    runs(out, *SIX, *RESUME)
    assert state(out) == before


def test_full_fine_tuning_killed_after_its_last_checkpoint_gets_its_end(runs: Runs, tmp_path: Path) -> None:
    """The base model plays no part: all weights are in the checkpoint."""
    out, full = tmp_path / "out", ("--model.full_finetuning", "true", "--training.max_steps", "2")
    runs(out, *full)
    trained = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    base = shutil.copytree(runs.folder / "model", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    again = runs(out, *full, *RESUME, "--model.model_name_or_path", str(base))
    assert again["losses"] == [] and again["status"] == "done"
    assert (out / "model.safetensors").read_bytes() == trained


def test_a_run_that_ended_early_by_itself_is_finished(
    runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with an EarlyStoppingCallback after step 4 of 6; a longer run is another one, and is refused under cosine."""
    shutil.rmtree(out / "checkpoint-6")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "steps": 4}))
    before = state(out)
    runs(out, *SIX, *RESUME)
    assert "already finished: 4 of 6 steps" in words(capsys)
    runs(out, *SIX, *RESUME, "--training.max_steps", "7", code=2)
    assert "was 6, now 7" in words(capsys)
    assert state(out) == before


# --- how long -------------------------------------------------------------------------------------------------------


def test_an_end_before_the_checkpoint_is_refused(runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(out)
    runs(out, *SIX, *RESUME, "--training.max_steps", "4", code=2)
    message = words(capsys)
    assert "max_steps is 4" in message and "at step 6 already" in message
    runs(out, *CHANGED, "--training.save_steps", "2", "--training.num_train_epochs", "0.35", code=2)
    message = words(capsys)
    assert "num_train_epochs is 0.35, which is 4 steps" in message and "at step 6 already" in message
    assert state(out) == before


@pytest.mark.campaign
def test_a_longer_run_under_a_constant_rate_goes_on_as_one_that_was_never_stopped(runs: Runs, tmp_path: Path) -> None:
    constant = ("--training.lr_scheduler_type", "constant", "--training.save_steps", "2")
    runs(tmp_path / "once", *constant, "--training.max_steps", "5")
    runs(tmp_path / "twice", *constant, "--training.max_steps", "3")
    again = runs(tmp_path / "twice", *constant, "--training.max_steps", "5", *RESUME)
    assert again["resumed_from"].endswith("checkpoint-3") and again["resumed_with_changes"] == []
    assert (tmp_path / "once" / FINAL).read_bytes() == (tmp_path / "twice" / FINAL).read_bytes()


def test_qlora_goes_on_as_one_that_was_never_stopped(runs: Runs, tmp_path: Path) -> None:
    """Its adapter is float32 before and after, and DoRA's magnitudes move."""
    steps = ("--training.max_steps", "2", "--training.save_steps", "1", "--lora.target_modules", "[q_proj, down_proj]")
    quantized = (*steps, "--model.load_in_4bit", "true", "--lora.adapter_kwargs", "{use_dora: true}")
    first = runs(tmp_path / "once", *quantized)
    shutil.copytree(tmp_path / "once" / "checkpoint-1", tmp_path / "twice" / "checkpoint-1")
    again = runs(tmp_path / "twice", *quantized, *RESUME)
    assert again["losses"] == first["losses"][1:]
    assert (tmp_path / "once" / FINAL).read_bytes() == (tmp_path / "twice" / FINAL).read_bytes()
    before, after = load_file(tmp_path / "once" / "checkpoint-1" / FINAL), load_file(tmp_path / "once" / FINAL)
    assert {one.dtype for one in after.values()} == {torch.float32}
    assert all((after[name] != one).any() for name, one in before.items() if "magnitude" in name)


def test_a_longer_run_under_a_decaying_rate_needs_permission(
    runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then each step has the rate that transformers' own schedule of the new length gives it."""
    before = state(out)
    runs(out, *SIX, *RESUME, "--training.max_steps", "9", code=2)
    message = words(capsys)
    assert "was 6, now 9" in message and "resume_with_changes: true" in message
    assert f"the same command with --training.max_steps 9 {' '.join(CHANGED)}" in message
    assert state(out) == before
    runs.watch()
    again = runs(out, *SIX, *CHANGED, "--training.max_steps", "9")
    assert [group["lr"] for group in runs.groups] == pytest.approx(rates("cosine", 1e-2, 9)[6:], rel=1e-12)
    (change,) = again["resumed_with_changes"]
    assert (change["step"], change["was"], change["now"]) == (6, 6, 9)
    assert "total steps" in change["key"]


def rates(name: str, peak: float, total: int, warmup: int = 0) -> list[float]:
    """The learning rate of each step, from transformers' schedule stepped from its beginning."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


# --- other settings -------------------------------------------------------------------------------------------------

OTHER = {
    "lora.r": ("8", "16, now 8"),
    "lora.target_modules": ("[q_proj]", 'null, now ["q_proj"]'),
    "lora.modules_to_save": ("[lm_head]", 'null, now ["lm_head"]'),
    "lora.bias": ("all", '"none", now "all"'),
    "training.optim": ("sgd", '"adamw_torch_fused", now "sgd"'),
    "lora.lora_alpha": ("512", "16, now 512"),
    "lora.lora_dropout": ("0.1", "0.0, now 0.1"),
    "lora.use_rslora": ("true", "false, now true"),
    "lora.adapter_kwargs": ("{use_dora: true}", None),
    "training.learning_rate": ("1e-5", "0.01, now 1e-05"),
    "training.lr_scheduler_type": ("linear", '"cosine", now "linear"'),
    "training.warmup_steps": ("2", "0.0, now 2.0"),
    "training.weight_decay": ("0.1", "0.0, now 0.1"),
    "training.max_grad_norm": ("0.5", "1.0, now 0.5"),
    "training.adam_beta1": ("0.8", "0.9, now 0.8"),
    "training.neftune_noise_alpha": ("5", "null, now 5"),
    "model.dtype": ("bfloat16", '"float32", now "bfloat16"'),
}


def test_all_other_settings_are_refused_at_once_and_nothing_is_touched(
    runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(out / "checkpoint-6")
    before = state(out)
    given = [word for name, (value, _) in OTHER.items() for word in (f"--{name}", value)]
    runs(out, *SIX, *RESUME, *given, code=2)
    message = words(capsys)
    assert "checkpoint-4 was trained with other settings" in message
    for name, (_, change) in OTHER.items():
        assert f"- {name}: was {change}" in message if change else f"- {name}.use_dora" in message, name
    fixed, free = message.split("These change the result")
    assert "lora.r:" in fixed and "training.optim:" in fixed and "lora.lora_alpha:" in free and "lora.r:" not in free
    runs(out, *SIX, *CHANGED, *given, code=2)
    message = words(capsys)
    assert "lora.r:" in message and "lora.lora_alpha" not in message
    assert state(out) == before


def test_another_kind_of_training_and_other_data_are_refused(
    runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(out)
    runs(out, *SIX, *CHANGED, "--model.full_finetuning", "true", code=2)
    assert "model.full_finetuning: was false, now true" in words(capsys)
    runs(out, *SIX, *CHANGED, "--training.seed", "7", code=2)
    assert "belongs to another plan of steps: training.seed was 42, now 7. Restore what was" in words(capsys)
    assert state(out) == before


@pytest.mark.campaign
def test_a_checkpoint_of_version_0_1_0_keeps_the_order_that_its_held_out_rows_changed(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes with the same held-out rows and keeps its plan; without them it is refused."""
    held_out = ("--data.eval_file", str(runs.folder / "held_out.jsonl"))
    tiny.make_rows(runs.folder / "held_out.jsonl", 6)
    rows = job.prepare
    with monkeypatch.context() as version:
        version.setattr(
            job, "prepare", lambda *given: (data := rows(*given)) and replace(data, order_key=data.fingerprint)
        )
        whole = runs(tmp_path / "whole", *held_out, *SIX)
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "whole", out)
    resumed = runs(out, *held_out, *SIX, "--training.resume_from_checkpoint", str(out / "checkpoint-2"))
    assert resumed["plan"] == whole["plan"] and resumed["losses"][-4:] == whole["losses"][-4:]
    assert runs(tmp_path / "now", *held_out, *SIX)["plan"] != whole["plan"]
    capsys.readouterr()
    runs(out, *SIX, "--training.resume_from_checkpoint", str(out / "checkpoint-2"), code=2)
    assert 'held_out.jsonl", now null (in version 0.1.0, the order of the training rows depended on it)' in words(
        capsys
    )


def test_other_base_weights_under_a_lora_are_refused(
    runs: Runs, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights in another folder are the same model; one tensor of another seed is not, nor another shape."""
    base = tmp_path / "base"
    shutil.copytree(runs.folder / "model", base)
    elsewhere = (*SIX, *CHANGED, "--model.model_name_or_path", str(base))
    runs(out, *elsewhere)
    assert "already finished" in words(capsys)
    before = state(out)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    runs(out, *elsewhere, code=2)
    assert "model config.rms_norm_eps: was 1e-06, now 0.001" in words(capsys)
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    runs(out, *elsewhere, code=2)
    assert "base weights: was" in words(capsys)
    assert state(out) == before


def test_changes_by_permission_take_effect(runs: Runs, out: Path) -> None:
    """As in a run whose settings are changed in place at that step, which was never saved or loaded. The optimizer's
    moments go on, the rate follows the new curve, the adapter's scale is the new one."""
    shutil.rmtree(out / "checkpoint-6")
    (out / FINAL).unlink()
    changes = {
        "training.learning_rate": ("5e-3", 1e-2, 5e-3),
        "training.lr_scheduler_type": ("linear", "cosine", "linear"),
        "training.warmup_steps": ("1", 0.0, 1.0),
        "training.weight_decay": ("0.1", 0.0, 0.1),
        "training.adam_beta2": ("0.9", 0.999, 0.9),
        "lora.lora_alpha": ("64", 16, 64),
    }
    given = [word for name, (value, _, _) in changes.items() for word in (f"--{name}", value)]
    curve = rates("linear", 5e-3, 6, 1)

    def change_in_place(trainer: Any, step: int) -> None:
        if step >= 4:
            for group in trainer.optimizer.param_groups:
                group.update(lr=curve[min(step, 5)], weight_decay=0.1, betas=(0.9, 0.9))
            for module in trainer.model.modules():
                if hasattr(module, "lora_A"):
                    module.scaling["default"] = 64 / 16

    reference = out.parent / "reference"
    with pytest.MonkeyPatch.context() as monkeypatch:
        unstopped = Runs(runs.folder, monkeypatch)
        unstopped.watch(change_in_place)
        expected = unstopped(reference, *SIX)
    runs.watch()
    found = runs(out, *SIX, *CHANGED, *given)
    assert [group["lr"] for group in runs.groups] == pytest.approx(curve[4:], rel=1e-12)
    assert {(group["weight_decay"], tuple(group["betas"])) for group in runs.groups} == {(0.1, (0.9, 0.9))}
    recorded = {change["key"]: (change["was"], change["now"]) for change in found["resumed_with_changes"]}
    assert recorded == {name: (was, now) for name, (_, was, now) in changes.items()}
    assert found["losses"] == pytest.approx(expected["losses"][4:], rel=1e-6)
    trained, wanted = load_file(out / FINAL), load_file(reference / FINAL)
    assert all(torch.allclose(trained[name], wanted[name], rtol=1e-5, atol=1e-8) for name in wanted)
    assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == 64
    # The next resume compares with the changed settings, and keeps the history.
    manifest = checkpoints.manifest(out / "checkpoint-6")
    assert manifest["settings"]["lora.lora_alpha"] == 64 and len(manifest["resumed_with_changes"]) == len(changes)
    before = state(out)
    runs(out, *SIX, *RESUME, *given)
    assert state(out) == before


def test_dropout_by_permission_takes_effect(runs: Runs, out: Path) -> None:
    shutil.rmtree(out / "checkpoint-6")
    runs.watch()
    runs(out, *SIX, *CHANGED, "--lora.lora_dropout", "0.25")
    rates = {module.p for module in runs.model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}


@pytest.mark.process
def test_settings_that_leave_the_result_alone_are_free_and_take_effect(runs: Runs, whole_run: Path, out: Path) -> None:
    """How often to save is that of now, not that in the checkpoint's trainer_state.json."""
    for step in (4, 6):
        shutil.rmtree(out / f"checkpoint-{step}")
    free = {
        "training.save_steps": "3",
        "training.save_total_limit": "1",
        "training.gradient_checkpointing": "false",
        "training.ddp_timeout": "60",
        "training.dataloader_num_workers": "1",
        "training.adam_beta1": "0.9",  # its default
        "logging.logging_steps": "2",
    }
    again = runs(out, *SIX, *RESUME, *(word for name in free for word in (f"--{name}", free[name])))
    assert again["resumed_from"].endswith("checkpoint-2") and again["steps"] == 6
    assert [path.name for path in checkpoints.checkpoints(out)] == ["checkpoint-2", "checkpoint-6"]
    assert (out / FINAL).read_bytes() == (whole_run / FINAL).read_bytes()


# --- which checkpoint -----------------------------------------------------------------------------------------------


def test_no_more_checkpoints_are_kept_than_asked_for(runs: Runs, tmp_path: Path) -> None:
    arguments = ("--training.save_steps", "1", "--training.save_total_limit", "2", "--training.max_steps", "5")
    runs(tmp_path / "out", *arguments)
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "out")] == ["checkpoint-4", "checkpoint-5"]


def test_weights_alone_are_not_resumed(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--training.max_steps", "1", "--training.save_only_model", "true")
    runs(tmp_path / "out", *given)
    runs(tmp_path / "out", *given, *RESUME, code=2)
    assert "checkpoint-1 has no state to resume from (training.save_only_model)" in capsys.readouterr().err


def test_resumed_by_path_the_new_checkpoint_stays(runs: Runs, out: Path) -> None:
    """From checkpoint-2 beside 4 and 6, with room for one: the new ones, and the one resumed from."""
    (out / FINAL).unlink()
    seen: list[list[str]] = []
    runs.watch(lambda trainer, step: seen.append([path.name for path in checkpoints.checkpoints(out)]))
    arguments = (*SIX, "--training.save_steps", "1", "--training.save_total_limit", "1")
    runs(out, *arguments, "--training.resume_from_checkpoint", str(out / "checkpoint-2"))
    assert [names for names in seen[1:]] == [["checkpoint-2", f"checkpoint-{step}"] for step in (3, 4, 5)]


def test_what_was_given_up_is_not_resumed(runs: Runs, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Back to checkpoint-2 beside 4 and 6 with another rate, to step 4, and on from the newest."""
    (out / FINAL).unlink()
    changed = (*SIX, "--training.resume_with_changes", "true", "--training.learning_rate", "1e-5")
    shorter = ("--training.max_steps", "4", "--training.resume_from_checkpoint", str(out / "checkpoint-2"))
    runs(out, *changed, *shorter)
    assert f"Moved checkpoint-6 to {out}/earlier-run-1: this run resumed from an earlier step." in words(capsys)
    assert [path.name for path in checkpoints.checkpoints(out)] == ["checkpoint-2", "checkpoint-4"]
    assert [path.name for path in checkpoints.complete_checkpoints(out / "earlier-run-1")] == ["checkpoint-6"]
    assert runs(out, *changed, *RESUME)["resumed_from"].endswith("checkpoint-4")


def test_a_damaged_checkpoint_is_skipped_and_a_renamed_one_is_taken(
    runs: Runs, whole_run: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "optimizer").mkdir()
    file = out / "checkpoint-6" / "optimizer.pt"
    file.write_bytes(bytes(file.stat().st_size))
    before = state(out)
    runs(out, *SIX, "--training.resume_from_checkpoint", str(out / "checkpoint-6"), code=2)
    assert "it is damaged: optimizer.pt does not match its checksum" in words(capsys)
    assert state(out) == before
    again = runs(out, *SIX, *RESUME)
    assert "checkpoint-6 is damaged (optimizer.pt does not match its checksum); skipping it" in words(capsys)
    assert again["resumed_from"].endswith("checkpoint-4") and len(again["losses"]) == 2
    assert checkpoints.damage(out / "checkpoint-6", verify=True) is None  # written again
    (out / "checkpoint-4").rename(out / "mine")
    again = runs(out, *SIX, "--training.resume_from_checkpoint", str(out / "mine"))
    assert again["resumed_from"].endswith("mine") and len(again["losses"]) == 2
    assert (out / FINAL).read_bytes() == (whole_run / FINAL).read_bytes()


# --- the order of the rows ------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_order(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grouped = ("--training.train_sampling_strategy", "group_by_length")
    steps = ("--training.max_steps", "4", "--training.save_steps", "2")
    runs(tmp_path / "grouped", *steps, *grouped)
    (tmp_path / "grouped" / FINAL).unlink()
    shutil.rmtree(tmp_path / "grouped" / "checkpoint-4")
    runs(tmp_path / "grouped", *steps, *RESUME, code=2)
    assert 'training.train_sampling_strategy was "group_by_length", now "random"' in words(capsys)
    assert runs(tmp_path / "grouped", *steps, *grouped, *RESUME)["resumed_from"].endswith("checkpoint-2")


def test_shapes_of_another_model_do_not_fit(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    resume.check_shapes(model, tmp_path)
    save_file({"weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"weight has shape \[2, 4\] in the checkpoint and \[2, 3\] in this run"):
        resume.check_shapes(model, tmp_path)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_does_not_run(runs: Runs, out: Path, tmp_path: Path, name: str) -> None:
    """In a checkpoint whose manifest is made to match."""

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    shutil.rmtree(out / "checkpoint-6")
    torch.save(Payload(), out / "checkpoint-4" / name)
    reseal(out / "checkpoint-4")
    runs(out, *SIX, *RESUME, code=1)
    assert not (tmp_path / "ran").exists()


def test_a_weight_that_a_full_checkpoint_lacks_does_not_stay_the_base_models(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one whose manifest is made to match."""
    full = ("--model.full_finetuning", "true", "--training.max_steps", "2", "--training.save_steps", "1")
    runs(tmp_path, *full)
    shutil.rmtree(tmp_path / "checkpoint-2")
    checkpoint = tmp_path / "checkpoint-1"
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    reseal(checkpoint)
    runs(tmp_path, *full, *RESUME, code=1)
    assert "does not fit the model: model.layers.1.mlp.up_proj.weight is missing" in words(capsys)


def reseal(checkpoint: Path) -> None:
    manifest = checkpoints.manifest(checkpoint)
    (checkpoint / checkpoints.MANIFEST).unlink()
    checkpoints.seal(checkpoint, {key: value for key, value in manifest.items() if key != "files"})


WRONG_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "trainer_state.json")
WRONG = [(name, content) for name in WRONG_STATES for content in ({}, {"state": 1, "param_groups": [{}]}, [1])]
WRONG += [("trainer_state.json", {"global_step": "4"}), ("adapter_model.safetensors", b"[]")]


@pytest.mark.parametrize(("name", "content"), WRONG)
def test_state_files_that_hold_something_else(
    runs: Runs, out: Path, name: str, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the right checksum, so nothing is damaged."""
    shutil.rmtree(out / "checkpoint-6")
    checkpoint = out / "checkpoint-4"
    if isinstance(content, bytes):
        (checkpoint / name).write_bytes(len(content).to_bytes(8, "little") + content)
    elif name == "trainer_state.json":
        (checkpoint / name).write_text(json.dumps(content or [1]))
    else:
        torch.save(content, checkpoint / name)
    reseal(checkpoint)
    runs(out, *SIX, *RESUME, code=2 if isinstance(content, bytes) else 1)
    assert "cannot be used" in words(capsys)


VALUES = {  # the next step would fail on them, spread them or write beyond them
    "lr": lambda groups, states, schedule: groups[0].update(lr="x"),
    "exp_avg has a NaN": lambda groups, states, schedule: states[1]["exp_avg"][0, 0].fill_(float("nan")),
    "has shape [2]": lambda groups, states, schedule: states[2].update(exp_avg=torch.ones(2)),
    "no state of 1 of 3 weights": lambda groups, states, schedule: states.pop(1),
    "last_epoch": lambda groups, states, schedule: schedule.update(last_epoch=float("nan")),
}


@pytest.mark.parametrize("wanted", VALUES)
def test_wrong_values_of_optimizer_and_schedule(wanted: str, tmp_path: Path, capsys: Any) -> None:
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step(lambda: sum(weight.sum() for weight in weights).backward())
    states, position = optimizer.state_dict(), schedule.state_dict()
    VALUES[wanted](states["param_groups"], states["state"], position)
    torch.save(states, tmp_path / "optimizer.pt")
    torch.save(position, tmp_path / "scheduler.pt")
    with pytest.raises(RunError) if "no state" not in wanted else contextlib.nullcontext() as caught:
        load_optimizer_and_schedule(tmp_path, optimizer, schedule, sharded=False, rebuild=False, step=1)
    assert wanted in str(caught.value if caught else words(capsys))


def test_resume_with_changes_needs_a_resume() -> None:
    with pytest.raises(Exception, match="resume_with_changes needs a checkpoint to resume from"):
        load(["--training.resume_with_changes"])


def test_a_batch_that_grew_with_the_ranks_is_kept_on_others_unless_a_factor_changes() -> None:
    """2 x 3 rows on each of 4 ranks, resumed on 2, and then with other factors."""
    manifest = {"batch": {"per_device": 2, "global_batch_size": 24, "world_size": 4}}

    def resumed(world: int, **factors: int) -> tuple[int, int, int]:
        found = resume.resumed_batch(Config(training=TrainingConfig(**factors)), manifest, world)
        return found.per_device, found.accumulation, found.global_batch_size

    assert resumed(2, per_device_train_batch_size=2, gradient_accumulation_steps=3) == (2, 6, 24)
    assert resumed(2, per_device_train_batch_size=1, gradient_accumulation_steps=3) == (1, 3, 6)
    assert resumed(2, global_batch_size=24) == (2, 6, 24)  # the size of the checkpoint, not the default
    assert resumed(3, global_batch_size=15) == (5, 1, 15)  # 2 does not divide 5 rows
    for damaged in ({}, {"batch": None}, {"batch": {"per_device": "x", "global_batch_size": 24, "world_size": 0}}):
        assert resume.resumed_batch(Config(), damaged, 1).global_batch_size == 16
