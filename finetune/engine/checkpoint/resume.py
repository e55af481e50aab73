"""What a resumed run must share with its checkpoint, compared before anything is written.

There are three kinds of settings. Some cannot change: the checkpoint's weights or optimizer state would not fit. Some
change the result: they need `training.resume_with_changes`, and then apply. All others are free: intervals for logging,
saving and evaluation, folders, and whatever computes the same function with different rounding (number of GPUs,
micro-batch size, gradient checkpointing, attention kernel, backend). The plan's digest covers data, seed and global
batch size.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config import Batch, Config, resolve_batch, scaled_learning_rate
from finetune.config.batch import grows_with_world_size, with_fixed_batch
from finetune.data import ORDER
from finetune.engine import preflight, record
from finetune.engine.checkpoint import checkpoints
from finetune.engine.checkpoint.checkpoints import Found
from finetune.errors import UserError
from finetune.redact import redact_tree
from finetune.runtime import files
from finetune.runtime.ranks import distributed
from finetune.text import counted

CANNOT_CHANGE = frozenset(
    {
        "model.full_finetuning",
        "lora.r",
        "lora.target_modules",
        "lora.modules_to_save",
        "lora.bias",
        "training.optim",
        "training.master_weights",
        "base weights",
        "model config",
    }
)
# Further SFTConfig fields that do not change the result. Any field not listed counts as changing it.
FREE_EXTRA = frozenset(
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
    " logging_first_step log_level log_level_replica log_on_each_node include_num_input_tokens_seen skip_memory_metrics"
    " torch_empty_cache_steps ddp_bucket_cap_mb ddp_backend ddp_find_unused_parameters ddp_broadcast_buffers"
    " gradient_checkpointing_kwargs activation_offloading save_only_model restore_callback_states_from_checkpoint"
    " torch_compile torch_compile_backend torch_compile_mode tf32 debug disable_tqdm run_name project".split()
)
# Keys of a model's config.json that do not affect what the model computes.
_NOT_SHAPE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "unsloth_version")
LENGTH = "total steps (training.max_steps, training.num_train_epochs)"
_MISSING = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts, and what its checkpoints will record about that.

    found:     the checkpoint, if there is one
    settings:  what `settings` returned for this configuration
    changes:   settings that differ from the checkpoint's, with permission: {step, key, was, now} each
    history:   changes of earlier resumes, then these
    notes:     sentences on what could not be compared
    rebuild:   whether optimizer and schedule take their settings from this configuration, not from the checkpoint
    """

    found: Found = field(default_factory=Found)
    settings: dict[str, Any] = field(default_factory=dict)
    changes: tuple[dict[str, Any], ...] = ()
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    rebuild: bool = False

    @property
    def per_device(self) -> int | None:
        """The micro-batch size that the checkpoint was trained with; None without one."""
        batch = self.found.manifest.get("batch")
        return batch.get("per_device") if isinstance(batch, dict) else None

    def manifest(self, *, steps_per_epoch: int, total_steps: int) -> dict[str, Any]:
        """The manifest fields of this run's checkpoints beside step, plan and files."""
        return {
            "settings": self.settings,
            "steps_per_epoch": steps_per_epoch,
            "total_steps": total_steps,
            "resumed_with_changes": list(self.history),
        }


# --- the settings of a run ------------------------------------------------------------------------------------------


def settings(config: Config, batch: Batch, dtype: str) -> dict[str, Any]:
    """Everything except the data that determines the training result, as JSON-compatible values.

    Args:
        dtype: the resolved one, for example bfloat16.
    """
    training, lora, model = config.training, config.lora, config.model
    found: dict[str, Any] = {
        "model.full_finetuning": model.full_finetuning,
        "model.dtype": dtype,
        "model.load_in_4bit": model.load_in_4bit,
        "model.load_in_8bit": model.load_in_8bit,
        "model.load_in_fp8": model.load_in_fp8,
        "model.loader": model.loader,
        "model.loader_kwargs": model.loader_kwargs,
    }
    if not model.full_finetuning:
        names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "adapter_kwargs")
        found |= {f"lora.{name}": getattr(lora, name) for name in names}
        targets, saved = lora.target_modules, lora.modules_to_save
        found["lora.target_modules"] = sorted(set(targets)) if isinstance(targets, list) else targets
        found["lora.modules_to_save"] = sorted(set(saved)) if saved else None
    found["training.learning_rate"] = scaled_learning_rate(training, batch.global_batch_size)
    found |= {
        f"training.{name}": getattr(training, name)
        for name in ("lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "max_grad_norm")
    }
    found["training"] = {name: value for name, value in training.extra.items() if name not in FREE_EXTRA}
    return files.to_json_types(found)


def base_model(config: Config) -> dict[str, Any]:
    """{"model config": its config.json, "base weights": their digest}; a value is None if its file is not on this
    machine.

    Full fine-tuning has no base weights: all weights are in the checkpoint.
    """
    folder = preflight.base_folder(config)
    if folder is None:
        found: dict[str, Any] = {"model config": None, "base weights": None}
    else:
        found = base_files(folder, weights=not config.model.full_finetuning)
    return {"model config": found["model config"]} if config.model.full_finetuning else found


def base_files(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """{"model config": its config.json, "base weights": their digest} of a model folder; None for what cannot be read,
    or is not asked for."""
    try:
        shape = files.read_json(folder / "config.json")
    except (OSError, ValueError):
        shape = None
    if isinstance(shape, dict):
        shape = {name: value for name, value in shape.items() if name not in _NOT_SHAPE}
    found: dict[str, Any] = {"model config": files.to_json_types(shape)}
    try:
        found["base weights"] = weights_digest(folder) if weights else None
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        found["base weights"] = None  # unreadable: loading the model reports it better
    return found


SAMPLE_BYTES = 1 << 15


def weights_digest(folder: Path) -> str | None:
    """Digest of samples of a model's weights; None if the folder does not hold all of them.

    For each safetensors tensor it covers the name, type, shape and three samples of 32 KiB: the first, middle and last
    bytes. It detects other weights, further training, merging, quantization, and added, removed or replaced tensors,
    and does not depend on how tensors are split into files. It misses an edit that lies entirely between the samples.
    For other weight files it covers the size and 16 evenly spaced pieces of 1 MiB.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        paths = [folder / name for name in sorted(set(files.read_json(index)["weight_map"].values()))]
    elif (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths or not all(path.is_file() for path in paths):
        return None
    pieces: list[Any] = []
    for path in paths:
        pieces += _sampled_tensors(path) if path.suffix == ".safetensors" else [_sampled_file(path)]
    return files.checksum_of_json(sorted(pieces))


def _sampled_tensors(path: Path) -> Iterator[list[Any]]:
    """[name, type, shape, checksum of the samples] of each tensor in a safetensors file."""
    import xxhash

    with files.open_regular(path) as file:
        header, data = files.safetensors_header(file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            digest = xxhash.xxh3_128()
            for start in (begin, (begin + end) // 2, max(end - SAMPLE_BYTES, begin)):
                file.seek(data + start)
                digest.update(file.read(min(SAMPLE_BYTES, end - start)))
            yield [name, tensor["dtype"], tensor["shape"], digest.hexdigest()]


def _sampled_file(path: Path) -> list[Any]:
    import xxhash

    size, digest = path.stat().st_size, xxhash.xxh3_128()
    with files.open_regular(path) as file:
        for part in range(16):
            file.seek(max(size - 2**20, 0) * part // 15)
            digest.update(file.read(2**20))
    return [path.name, "", [size], digest.hexdigest()]


# --- before the model is loaded -------------------------------------------------------------------------------------


def prepare(config: Config, batch: Batch, dtype: str, weights: str) -> Start:
    """Choose the checkpoint, verify its checksums and compare its settings. Every rank calls it once the ranks can
    communicate; one process per machine reads. Writes nothing.

    Args:
        weights: how this run would keep its trained weights (`master_weights`); if the configuration leaves it open,
            the checkpoint's decision holds, whatever the GPUs are now.

    Raises:
        UserError: on every rank: the checkpoint does not exist, is damaged, or the settings do not match it.
    """
    output_dir, asked = Path(config.training.output_dir), config.training.resume_from_checkpoint
    found: Found = _once_per_machine(lambda: checkpoints.find(output_dir, asked), "checkpoint")
    if found.path is not None:
        _check_order(found)
    base = _once_per_machine(lambda: base_model(config), "base model")
    if found.path is not None and config.training.master_weights == "auto":
        weights = found.manifest["settings"].get("training.master_weights", weights)
    now = settings(config, batch, dtype) | {"training.master_weights": weights} | base
    start = Start(found=found, settings=now)
    return compared(config, start) if found.path is not None else start


def batch_of(config: Config, manifest: Mapping[str, Any], world_size: int) -> Batch:
    """How a resumed run divides its steps: what the configuration leaves open is as in the checkpoint, as far as that
    divides over this number of ranks.

    Raises:
        UserError: the settings do not multiply to the global batch on this world size.
    """
    training, had = config.training, manifest.get("batch")
    names = {"per_device", "global_batch_size", "world_size"}
    if not (isinstance(had, dict) and had.keys() >= names and all(type(had[name]) is int for name in names)):
        return resolve_batch(training, world_size, config.data)
    if grows_with_world_size(training) and had["world_size"] > 0:
        then = with_fixed_batch(training, had["world_size"], config.data)
        if then.global_batch_size == had["global_batch_size"]:  # else the user has changed a factor
            training = then
    found = resolve_batch(training, world_size, config.data)
    kept = max(had["per_device"], 0)
    is_open = (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (None, None)
    if is_open and kept and found.global_batch_size % (world_size * kept) == 0:
        training = dataclasses.replace(training, per_device_train_batch_size=kept)
    return resolve_batch(training, world_size, config.data)


def _check_order(found: Found) -> None:
    """Raises UserError unless this version can repeat the order of the rows."""
    settings = found.manifest.get("settings")
    known = isinstance(settings, dict) and isinstance(settings.get("training", {}), dict)
    if found.manifest.get("order") != ORDER or not known:
        raise UserError(
            f"{found.path} was written by a version that trained the rows in another order: packs of the longest "
            "documents first, and steps of rows of similar length. Its remaining steps cannot be repeated. Start a new "
            "run in another training.output_dir, or resume with the version that wrote it (versions in run.json)."
        )


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


def compared(config: Config, start: Start) -> Start:
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
        if _depends_on_length(before) or _depends_on_length(now):
            before, now = before | {LENGTH: total}, now | {LENGTH: asked}
    differing, unknown = differences(before, now)
    allowed = config.training.resume_with_changes
    if differing and (not allowed or any(_root(key) in CANNOT_CHANGE for key, _, _ in differing)):
        raise UserError(_refusal(start.found.path, differing, allowed, config))
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


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """(key, was, now) of each setting that differs, key by key for mappings; and the keys that one side lacks."""
    found, unknown = [], []
    for key in [*was, *(key for key in now if key not in was)]:
        old, new = was.get(key, _MISSING), now.get(key, _MISSING)
        if key in ("base weights", "model config") and None in (old, new) or _MISSING in (old, new):
            if "model.full_finetuning" not in was or was["model.full_finetuning"] == now.get("model.full_finetuning"):
                unknown.append(key)
        elif isinstance(old, dict) and isinstance(new, dict):
            default = _defaults() if key == "training" else {}
            for name in sorted({*old, *new}):
                pair = [side.get(name, default.get(name)) for side in (old, new)]
                if pair[0] != pair[1]:
                    found.append((f"{key}.{name}", *pair))
        elif old != new:
            found.append((key, old, new))
    return found, unknown


def _defaults() -> dict[str, Any]:
    """Default of each SFTConfig field: setting a field to its default is not a difference."""
    import trl

    return {
        item.name: files.to_json_types(item.default)
        for item in dataclasses.fields(trl.SFTConfig)
        if item.default is not dataclasses.MISSING
    }


def _root(key: str) -> str:
    return next((name for name in ("model config", "base weights") if key.startswith(name)), key)


def _refusal(checkpoint: Path | None, differing: list[tuple[str, Any, Any]], allowed: bool, config: Config) -> str:
    fixed = [one for one in differing if _root(one[0]) in CANNOT_CHANGE]
    free = [] if allowed else [one for one in differing if one not in fixed]

    def lines(some: list[tuple[str, Any, Any]]) -> str:
        return "".join(f"\n  - {key}: was {json.dumps(was)}, now {json.dumps(now)}" for key, was, now in some)

    text = f"{checkpoint} was trained with other settings. Nothing was started."
    if fixed:
        text += "\nThese cannot change in a resumed run. Restore them, or start a new run in another folder:"
        text += lines(fixed)
    if free:
        text += "\nThese change the result. Restore them, or apply them with training.resume_with_changes: true:"
        text += lines(free)
    if [key for key, _, _ in differing] == [LENGTH]:
        training = config.training
        by_steps = training.max_steps > 0
        text += "\nTo train the further steps: the same command with "
        text += further("max_steps", training.max_steps) if by_steps else further_epochs(training.num_train_epochs)
    return text


def further_epochs(count: float) -> str:
    """The options that train a finished run to `count` epochs."""
    return further("num_train_epochs", f"{count:g}")


def further(setting: str, value: object) -> str:
    """The options that train a run to another length than it was planned for."""
    changed = "--training.resume_from_checkpoint true --training.resume_with_changes true"
    return f"--training.{setting} {value} {changed}"


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the complete run."""
    training = config.training
    return training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * steps_per_epoch)


def _depends_on_length(settings: Mapping[str, Any]) -> bool:
    """Whether a step's learning rate depends on the number of steps of the run."""
    name, warmup = settings.get("training.lr_scheduler_type"), settings.get("training.warmup_steps", 0)
    if any(str(key).startswith("warmup") for key in settings.get("training", {})):
        return True
    if name in ("constant", "reduce_lr_on_plateau", "greedy"):
        return False
    absolute = isinstance(warmup, int | float) and (warmup == 0 or warmup >= 1)
    return not (name in ("constant_with_warmup", "inverse_sqrt") and absolute)


def check_length(config: Config, found: Found, total: int) -> None:
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
    changed = [
        f"{key} was {json.dumps(was[key])}, now {json.dumps(files.to_json_types(value))}"
        for key, value in now.items()
        if key in was and redact_tree(files.to_json_types(value)) != was[key]
    ]
    return "; ".join(changed) or (
        "the rows, their tokenizer or masks, training.seed or training.global_batch_size have changed (run.json in its "
        "output folder has the old configuration)"
    )


def confirm(start: Start, config: Config, model: Any, plan_digest: str, total: int) -> Start:
    """Compare what is known only after loading: the plan of steps, the run's length, the shapes of the weights, and the
    files of a model that was just downloaded. Every rank calls it.

    Raises:
        UserError: on every rank, naming what does not match.
    """
    if None in [start.settings.get(key, "") for key in ("model config", "base weights")]:
        late = _once_per_machine(lambda: base_model(config), "base model")
        start = dataclasses.replace(start, settings=start.settings | late)
        if start.found.path is not None:
            start = compared(config, start)
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


def check_shapes(model: Any, checkpoint: Path) -> None:
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
        raise UserError(_misfit(checkpoint, problem))
    extra = [name for name in stored if "lora_" in name and name not in shapes]
    if adapter and extra:
        raise UserError(_misfit(checkpoint, f"the checkpoint has {extra[0]}, which this run does not train"))


def _read_header(path: Path) -> dict[str, Any]:
    with files.open_regular(path) as file:
        return files.safetensors_header(file)[0]


def _misfit(checkpoint: Path, problem: str) -> str:
    return (
        f"{checkpoint} does not fit the model: {problem}. Restore the `model:` and `lora:` settings it was trained "
        "with (run.json in its output folder has them), or start a new run in another training.output_dir."
    )


def finished(config: Config, start: Start, plan_digest: str, total: int) -> dict[str, Any] | None:
    """The run.json of a finished run, else None; every rank gets what rank 0 reads.

    A run that was killed after its last checkpoint is not finished: it still has to evaluate and save.

    Raises:
        UserError: the folder holds another finished run, without a checkpoint.
    """
    training, found = config.training, start.found
    if not training.resume_from_checkpoint:
        return None
    output_dir = Path(training.output_dir)
    if (done := record_of_done_run(output_dir)) is None:
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


def record_of_done_run(output_dir: Path) -> dict[str, Any] | None:
    """The run.json of a run that ended as planned and whose final model exists, as rank 0 reads it."""
    return distributed.gather_objects(_record_of_done_run(output_dir))[0]


def _record_of_done_run(output_dir: Path) -> dict[str, Any] | None:
    if not any((output_dir / name).is_file() for name in checkpoints.FINAL_WEIGHTS):
        return None
    try:
        content = files.read_json(output_dir / record.FILE_NAME)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("status") == "done" else None
