"""Finds what is exported: the final model of a run or a checkpoint, its record and its base model, all verified."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.ledger import is_templated
from finetune.engine import record
from finetune.engine.checkpoint import base_weights, checkpoints, output_folder
from finetune.engine.preflight import model_files
from finetune.errors import UserError
from finetune.export.adapter import FILE as ADAPTER_WEIGHTS
from finetune.runtime import files
from finetune.runtime.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is exported.

    given:   the path as the user gave it
    folder:  holds the weights and the tokenizer
    record:  run.json; empty for a checkpoint that lies apart from its run
    step:    optimizer steps
    adapter: adapter_config.json; None for a fully trained model
    base:    folder of the base model; the same as `folder` for a fully trained model
    name:    the base model as the run named it: a name on the Hub, or a path
    notes:   what could not be compared
    """

    given: Path
    folder: Path
    record: JsonObject
    step: int | None
    adapter: JsonObject | None
    base: Path
    name: str
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> JsonObject:
        """The `model:` section of the run's configuration; empty if it is not known."""
        section = self.record.get("config", {}).get("model", {})
        return section if isinstance(section, dict) else {}

    @property
    def raw(self) -> bool:
        """Whether the run is known to have trained without a chat template."""
        return self.model.get("chat_template") == "none" or is_templated(self.record) is False


def find(path: Path, base: str | None = None) -> Source:
    """What `path` holds.

    Args:
        path: output folder of a run, or one of its checkpoints.
        base: folder or name of the base model, instead of the recorded one.

    Raises:
        UserError: it is neither, it is incomplete or damaged, or its base model is missing or has changed.
    """
    if not path.is_dir():
        raise UserError(f"There is no such folder: {path}. Give the output folder of a run, or one of its checkpoints.")
    model_files.check_regular(path)
    if (path / checkpoints.MANIFEST).is_file() or path.name.startswith("checkpoint-"):
        content, settings, step = _checkpoint(path)
    else:
        content, settings, step = _final(path)
    adapter = _adapter(path)
    if adapter is None:
        name = str(content.get("config", {}).get("model", {}).get("model_name_or_path") or path.name)
        return Source(given=path, folder=path, record=content, step=step, adapter=None, base=path, name=name)
    found, name, notes = _base(path, content, settings, adapter, base)
    return Source(
        given=path, folder=path, record=content, step=step, adapter=adapter, base=found, name=name, notes=notes
    )


def _checkpoint(path: Path) -> tuple[JsonObject, JsonObject, int]:
    """Record, settings and step of a checkpoint, whose files all match their checksums."""
    if why := checkpoints.damage(path, verify=True):
        others = [one.name for one in checkpoints.complete_checkpoints(path.resolve().parent) if one.name != path.name]
        instead = f"Export another one: {', '.join(others)}." if others else "There is no other one in its folder."
        raise UserError(f"{path} is not a complete checkpoint: {why}. {instead}")
    manifest = checkpoints.manifest(path)
    parent = path.resolve().parent
    content = _record(parent) if (parent / record.FILE_NAME).is_file() else {}
    settings = manifest.get("settings")
    return content, settings if isinstance(settings, dict) else {}, manifest["step"]


def _final(path: Path) -> tuple[JsonObject, JsonObject, int | None]:
    """Record, settings and steps of a finished run, whose final files are complete."""
    if not (path / record.FILE_NAME).is_file():
        raise UserError(
            f"{path} is not the output folder of a run: it has no {record.FILE_NAME}. Give training.output_dir of a "
            "run of `finetune train`, or one of its checkpoints."
        )
    content = _record(path)
    weights = [name for name in output_folder.FINAL_WEIGHTS if (path / name).is_file()]
    if content.get("status") != "done" or not weights:
        complete = [str(path / one.name) for one in checkpoints.complete_checkpoints(path)]
        instead = (
            f"Export a checkpoint: {', '.join(complete)}." if complete else "Resume it first: it has no checkpoint."
        )
        why = (
            "its folder has no weights" if content.get("status") == "done" else f"its status is {content.get('status')}"
        )
        raise UserError(f"The run in {path} has no final model: {why}. {instead}")
    for name in sorted({*(one.name for one in path.glob("*.safetensors")), *_recorded(content)}):
        why = _damage(path / name, _recorded(content).get(name))
        if why is not None:
            raise UserError(f"The final model in {path} is damaged: {name} {why}. Export a checkpoint of the run.")
    settings = content.get("settings")
    steps = content.get("steps")
    return content, settings if isinstance(settings, dict) else {}, steps if isinstance(steps, int) else None


def _recorded(content: JsonObject) -> dict[str, str]:
    """Checksums of the final files, by name; empty in records of earlier versions."""
    found = content.get("final_files")
    return {str(name): str(one) for name, one in found.items()} if isinstance(found, dict) else {}


def _damage(file: Path, checksum: str | None) -> str | None:
    if file.name != Path(file.name).name or not file.is_file():
        return "is missing"
    if file.suffix == ".safetensors" and (why := model_files.why_damaged(file)):
        return f"is not a whole file ({why})"
    return "does not match its checksum in run.json" if checksum and files.checksum(file) != checksum else None


def _record(folder: Path) -> JsonObject:
    try:
        content = files.read_json(folder / record.FILE_NAME)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / record.FILE_NAME} cannot be read: {error}. Restore it, or run again.") from None
    if not isinstance(content, dict) or not isinstance(content.get("config", {}), dict):
        raise UserError(f"{folder / record.FILE_NAME} is not the record of a run. Restore it, or run again.")
    return content


def _adapter(folder: Path) -> JsonObject | None:
    """adapter_config.json; None for a full model.

    Raises:
        UserError: the folder holds neither, or the file is invalid.
    """
    file = folder / model_files.ADAPTER
    if not file.is_file():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} holds neither an adapter nor a model: no {model_files.ADAPTER} and no config.json."
            )
        return None
    content, complete = None, False
    with contextlib.suppress(OSError, ValueError, KeyError):
        content = files.read_json(file)
        complete = isinstance(content, dict) and isinstance(content["lora_alpha"], int | float)
    if not complete or not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"The adapter in {folder} is incomplete: {file.name} or {ADAPTER_WEIGHTS}. Export a checkpoint."
        )
    return content


# --- the base model ---------------------------------------------------------------------------------------------------


def _base(
    path: Path, content: JsonObject, settings: JsonObject, adapter: JsonObject, given: str | None
) -> tuple[Path, str, list[str]]:
    """Folder and name of the base model, and what could not be compared.

    A run that quantizes on load names the original model, which is what the adapter is merged onto. Unsloth may have
    loaded a 4-bit copy instead, which the adapter then names; it serves if the original is not on this machine.
    """
    model = content.get("config", {}).get("model", {})
    own = str(adapter.get("base_model_name_or_path") or "")
    asked = str(model.get("model_name_or_path") or own)
    candidates = [(given, None)] if given else [(asked, model.get("revision")), (own, adapter.get("revision"))]
    for name, revision in candidates:
        folder = model_files.model_folder(name, revision) if name else None
        if folder is not None and (folder / model_files.ADAPTER).is_file() and not (folder / "config.json").is_file():
            continue  # the run continued this adapter, whose base the new one names
        if folder is not None:
            return folder, given and asked or name, _compared(folder, name, settings, given)
    name = given or asked or own
    raise UserError(
        f"The base model {name} of {path} is not on this machine. Download it with `hf download {name}`, or give its "
        "folder with --base."
    )


def _compared(folder: Path, name: str, settings: JsonObject, given: str | None) -> list[str]:
    """What could not be compared.

    Raises:
        UserError: these are not the weights that the run was trained on.
    """
    now = base_weights.base_model_files(folder)
    notes, differing = [], []
    was_quantized = _is_quantized(settings.get("model config"))
    if was_quantized != _is_quantized(now["model config"]):  # the original of a 4-bit copy, or the other way around
        settings = {"model config": _without_quantization(settings.get("model config"))}
        now = {"model config": _without_quantization(now["model config"]), "base weights": None}
    for key, what in (("model config", "config.json"), ("base weights", "weights")):
        if settings.get(key) is None or now[key] is None:
            notes.append(f"The base model's {what} could not be compared with those that the run was trained on.")
        elif settings[key] != now[key]:
            differing.append(what)
    if differing:
        raise UserError(
            f"The base model has changed since the run: {folder} has other {' and '.join(differing)} than the run "
            "recorded. Restore it, or give the model that the run was trained on with --base."
        )
    return notes


def _is_quantized(config: object) -> bool:
    return isinstance(config, dict) and bool(config.get("quantization_config"))


def _without_quantization(config: object) -> JsonObject | None:
    if not isinstance(config, dict):
        return None
    return {key: value for key, value in config.items() if key not in ("quantization_config", "unsloth_fixed")}
