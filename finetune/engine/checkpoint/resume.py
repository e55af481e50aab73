"""What a resumed run must share with its checkpoint, compared before anything is written.

There are three kinds of settings. Some cannot change: the checkpoint's weights or optimizer state would not fit. Some
change the result: they need `training.resume_with_changes`, and then apply. All others are free: intervals for logging,
saving and evaluation, folders, and whatever computes the same function with different rounding (number of GPUs,
micro-batch size, gradient checkpointing, attention kernel, backend). The plan's digest covers data, seed and global
batch size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config import Batch, Config, resolve_batch
from finetune.config.batch import grows_with_world_size, with_fixed_batch
from finetune.engine import record
from finetune.engine.checkpoint import checkpoints
from finetune.engine.checkpoint.base_weights import base_model
from finetune.engine.checkpoint.checkpoints import ResumePoint
from finetune.engine.checkpoint.output_folder import FINAL_WEIGHTS
from finetune.engine.checkpoint.run_settings import (
    CANNOT_CHANGE,
    LENGTH,
    depends_on_length,
    differences,
    differences_message,
    result_settings,
    setting_name,
)
from finetune.errors import UserError
from finetune.redact import redact_tree
from finetune.runtime import files
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model
from finetune.text import counted


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a run starts, and what its checkpoints will record about that.

    found:     the checkpoint, if there is one
    settings:  what `result_settings` returned for this configuration
    changes:   settings that differ from the checkpoint's, with permission: {step, key, was, now} each
    history:   changes of earlier resumes, then these
    notes:     sentences on what could not be compared
    rebuild:   whether optimizer and schedule take their settings from this configuration, not from the checkpoint
    """

    found: ResumePoint = field(default_factory=ResumePoint)
    settings: JsonObject = field(default_factory=dict)
    changes: tuple[JsonObject, ...] = ()
    history: tuple[JsonObject, ...] = ()
    notes: tuple[str, ...] = ()
    rebuild: bool = False

    @property
    def per_device(self) -> int | None:
        """The micro-batch size that the checkpoint was trained with; None without one."""
        batch = self.found.manifest.get("batch")
        return batch.get("per_device") if isinstance(batch, dict) else None

    @property
    def activations(self) -> JsonObject | None:
        """How the run of the checkpoint kept its activations (`engine.job.Choice`); None without one."""
        found = self.found.manifest.get("activations")
        return found if isinstance(found, dict) else None

    def manifest(self, *, steps_per_epoch: int, total_steps: int) -> JsonObject:
        """The manifest fields of this run's checkpoints beside step, plan and files."""
        return {
            "settings": self.settings,
            "steps_per_epoch": steps_per_epoch,
            "total_steps": total_steps,
            "resumed_with_changes": list(self.history),
        }


# --- before the model is loaded -------------------------------------------------------------------------------------


def prepare(config: Config, batch: Batch, dtype: str, weights: str) -> StartPoint:
    """Choose the checkpoint, verify its checksums and compare its settings. Every rank calls it once the ranks can
    communicate; one process per machine reads. Writes nothing.

    Args:
        weights: how this run would keep its trained weights (`master_weights`); if the configuration leaves it open,
            the checkpoint's decision holds, whatever the GPUs are now.

    Raises:
        UserError: on every rank: the checkpoint does not exist, is damaged, or the settings do not match it.
    """
    output_dir, asked = Path(config.training.output_dir), config.training.resume_from_checkpoint
    found: ResumePoint = _once_per_machine(lambda: checkpoints.find(output_dir, asked), "checkpoint")
    if found.path is not None and not (found.path / "scheduler.pt").is_file():
        raise UserError(
            f"{found.path} has no state to resume from (training.save_only_model). To start anew from its weights, set "
            f"model.model_name_or_path: {found.path}, and for an adapter lora.continue_adapter: true."
        )
    base = _once_per_machine(lambda: base_model(config), "base model")
    if found.path is not None and config.training.master_weights == "auto":
        weights = found.manifest["settings"].get("training.master_weights", weights)
    now = result_settings(config, batch, dtype) | {"training.master_weights": weights} | base
    start = StartPoint(found=found, settings=now)
    return compare_settings(config, start) if found.path is not None else start


def resumed_batch(config: Config, manifest: Mapping[str, Any], world_size: int) -> Batch:
    """How a resumed run divides its steps: what the configuration leaves open is as in the checkpoint, as far as that
    divides over this number of ranks.

    Raises:
        UserError: the settings do not multiply to the global batch on this world size.
    """
    training, had = config.training, manifest.get("batch")
    names = {"per_device", "global_batch_size", "world_size"}
    if not (isinstance(had, dict) and had.keys() >= names and all(type(had[name]) is int for name in names)):
        had = dict.fromkeys(names, 0)
    if grows_with_world_size(training) and had["world_size"] > 0:
        whole = dataclasses.replace(training, context_parallel=1)  # the checkpoint counts ranks with different rows
        then = with_fixed_batch(whole, had["world_size"], config.data)
        if then.global_batch_size == had["global_batch_size"]:  # else the user has changed a factor
            training = dataclasses.replace(then, context_parallel=training.context_parallel)
    found, kept = resolve_batch(training, world_size, config.data), had["per_device"]
    is_open = (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (None, None)
    divides = is_open and kept > 0 and found.per_device * found.accumulation % kept == 0
    return found.divided(kept) if divides else found


def _once_per_machine(read: Callable[[], Any], what: str) -> Any:
    """The result of `read()`, called once per machine, on every rank.

    Args:
        what: the name of the result in messages.

    Raises:
        UserError: on every rank: one of the calls raised it, or the results differ between machines.
    """
    result, error = None, None
    if distributed.ranks().is_local_main:
        try:
            result = read()
        except UserError as refusal:
            error = str(refusal)
    everyone = distributed.gather_objects((distributed.ranks().is_local_main, result, error))
    results = [(rank, result, error) for rank, (has_read, result, error) in enumerate(everyone) if has_read]
    for _, _, error in results:
        if error is not None:
            raise UserError(error)
    for rank, result, _ in results:
        if result != results[0][1]:
            raise UserError(
                f"The machines of rank {rank} and rank 0 have different files: the {what} differs. Give all machines "
                "the same files, on a shared file system or as identical copies."
            )
    return results[0][1]


def compare_settings(config: Config, start: StartPoint) -> StartPoint:
    """`start` with the permitted changes, and notes on what could not be compared.

    Raises:
        UserError: names all differences that are not permitted.
    """
    had = start.found.manifest
    before, notes = had["settings"], []
    steps_per_epoch, total = had.get("steps_per_epoch"), had.get("total_steps")
    now = dict(start.settings)
    if isinstance(steps_per_epoch, int) and isinstance(total, int):
        asked = total_steps(config, steps_per_epoch)
        check_length(config, start.found, asked)
        if depends_on_length(before) or depends_on_length(now):
            before, now = before | {LENGTH: total}, now | {LENGTH: asked}
    differing, unknown = differences(before, now)
    allowed = config.training.resume_with_changes
    if differing and (not allowed or any(setting_name(key) in CANNOT_CHANGE for key, _, _ in differing)):
        raise UserError(differences_message(start.found.path, differing, allowed, config))
    changes = tuple({"step": start.found.step, "key": key, "was": was, "now": now} for key, was, now in differing)
    earlier = had.get("resumed_with_changes")
    history = (*(earlier if isinstance(earlier, list) else ()), *changes)
    if unknown:
        notes.append(f"{start.found.path} does not record {', '.join(unknown)}: not compared.")
    return dataclasses.replace(
        start,
        changes=changes,
        history=history,
        notes=tuple(notes),
        rebuild=allowed and bool(changes or notes),  # what may differ takes effect as well
    )


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the complete run."""
    training = config.training
    return training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * steps_per_epoch)


def check_length(config: Config, found: ResumePoint, total: int) -> None:
    """Check that the checkpoint is not past the end of the requested run.

    Raises:
        UserError: it is.
    """
    if found.path is not None and total < found.step:
        training = config.training
        given = (
            f"training.max_steps is {training.max_steps}"
            if training.max_steps > 0
            else f"training.num_train_epochs is {training.num_train_epochs:g}, which is {counted(total, 'step')}"
        )
        raise UserError(
            f"{given}, and {found.path} is at step {found.step} already. Set at least {counted(found.step, 'step')}, "
            "or give an earlier checkpoint as training.resume_from_checkpoint."
        )


# --- after the model is loaded, before the first write --------------------------------------------------------------


_PLAN_KEYS = ("seed", "global_batch_size", "train_sampling_strategy")


def _plan_changes(checkpoint: Path, config: Config) -> str:
    """The keys that set the plan and differ from run.json beside the checkpoint, or what may differ if none does."""
    try:
        had = files.read_json(checkpoint.resolve().parent / record.FILE_NAME)["config"]
        was = {f"training.{key}": had["training"][key] for key in _PLAN_KEYS}
        was |= {f"data.{key}": value for key, value in had["data"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        was = {}
    now = {f"data.{one.name}": getattr(config.data, one.name) for one in dataclasses.fields(config.data)}
    now |= {f"training.{key}": getattr(config.training, key) for key in _PLAN_KEYS}
    changed = {
        key: f"{key} was {json.dumps(was[key])}, now {json.dumps(files.to_json_types(value))}"
        for key, value in now.items()
        if key in was and redact_tree(files.to_json_types(value)) != was[key]
    }
    held_out = {"data.eval", "data.eval_file"}
    if changed and changed.keys() <= held_out:
        return f"{'; '.join(changed.values())} (in version 0.1.0, the order of the training rows depended on it)"
    return "; ".join(text for key, text in changed.items() if key not in held_out) or (
        "the rows, their tokenizer or masks, training.seed or training.global_batch_size have changed (run.json in its "
        "output folder has the old configuration)"
    )


def confirm(start: StartPoint, config: Config, model: Model, plan_digest: str, total: int) -> StartPoint:
    """Compare what is known only after loading: the plan of steps, the run's length, the shapes of the weights, and the
    files of a model that was just downloaded. Every rank calls it.

    Raises:
        UserError: on every rank, naming what does not match.
    """
    if None in [start.settings.get(key, "") for key in ("model config", "base weights")]:
        late = _once_per_machine(lambda: base_model(config), "base model")
        start = dataclasses.replace(start, settings=start.settings | late)
        if start.found.path is not None:
            start = compare_settings(config, start)
    if start.found.path is None:
        return start
    if start.found.manifest.get("plan") != plan_digest:
        raise UserError(
            f"{start.found.path} belongs to another plan of steps: {_plan_changes(start.found.path, config)}. Restore "
            "what was, or start a new run in another training.output_dir."
        )
    check_length(config, start.found, total)
    check_shapes(model, start.found.path)
    return start


def check_shapes(model: Model, checkpoint: Path) -> None:
    """Check that the names and shapes of a checkpoint's tensors match the model's.

    Raises:
        UserError: names the first that does not match.
    """
    stored = {
        name: tuple(tensor["shape"])
        for path in sorted(checkpoint.glob("*model*.safetensors"))
        for name, tensor in _read_header(path).items()
    }
    adapter = getattr(model, "peft_config", None) is not None
    if adapter:
        from peft import get_peft_model_state_dict

        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:
        expected = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, shape in shapes.items():
        if name in stored and stored[name] != shape:
            problem = f"{name} has shape {list(stored[name])} in the checkpoint and {list(shape)} in this run"
        elif adapter and name not in stored:
            problem = f"this run trains {name}, which the checkpoint lacks"
        else:
            continue
        raise UserError(_wrong_shape_message(checkpoint, problem))
    extra = [name for name in stored if "lora_" in name and name not in shapes]
    if adapter and extra:
        raise UserError(
            _wrong_shape_message(checkpoint, f"the checkpoint has {extra[0]}, which this run does not train")
        )


def _read_header(path: Path) -> JsonObject:
    try:
        with files.open_regular(path) as file:
            return files.safetensors_header(file)[0]
    except (EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be used: {error}. Resume from another checkpoint.") from error


def _wrong_shape_message(checkpoint: Path, problem: str) -> str:
    return (
        f"{checkpoint} does not fit the model: {problem}. Restore the `model:` and `lora:` settings it was trained "
        "with (run.json in its output folder has them), or start a new run in another training.output_dir."
    )


# --- a run that is finished already ---------------------------------------------------------------------------------


def finished_record(config: Config, start: StartPoint, plan_digest: str, total: int) -> JsonObject | None:
    """The run.json of a finished run, else None; every rank gets what rank 0 reads.

    A run that was killed after its last checkpoint is not finished: it still has to evaluate and save.

    Raises:
        UserError: the folder holds another finished run, without a checkpoint.
    """
    training, found = config.training, start.found
    if not training.resume_from_checkpoint:
        return None
    output_dir = Path(training.output_dir)
    if (done := done_record(output_dir)) is None:
        return None
    if found.path is not None:
        stopped_early = (done.get("total_steps"), done.get("steps")) == (total, found.step)
        ended = done.get("early_stopping")  # the rule that ended it, unless a callback of the script did
        if isinstance(ended, dict) and {**ended, "step": None} != {**(training.early_stopping or {}), "step": None}:
            stopped_early = False
        return done if found.step >= total or stopped_early else None
    had = done.get("settings")
    same = not isinstance(had, dict) or not differences(had, start.settings)[0]
    if same and (done.get("plan"), done.get("steps")) == (plan_digest, total):
        return done
    raise UserError(
        f"training.output_dir is {output_dir}, which holds a finished run of {done.get('steps')} steps with other "
        "settings or data, and no complete checkpoint to resume from. Give another folder, or replace that run with "
        "training.overwrite_output_dir: true instead of training.resume_from_checkpoint."
    )


def done_record(output_dir: Path) -> JsonObject | None:
    """The run.json of a run that ended as planned and whose final model exists, as rank 0 reads it."""
    content = None
    if any((output_dir / name).is_file() for name in FINAL_WEIGHTS):
        with contextlib.suppress(OSError, ValueError):
            content = files.read_json(output_dir / record.FILE_NAME)
    done = isinstance(content, dict) and content.get("status") == "done"
    return distributed.gather_objects(content if done else None)[0]
