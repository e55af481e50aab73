"""What a run has left behind: the folder that holds its adapter or model, and how that was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.ledger import is_templated
from finetune.engine.checkpoint import checkpoints
from finetune.engine.preflight import model_files
from finetune.engine.record import FILE_NAME
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.types import JsonObject

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_THE_OPTIMIZER = (".pt", ".pth", ".bin")  # files of a checkpoint that only a resumed run reads
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """An adapter or a full model that can be loaded.

    given:    as the user wrote it
    folder:   of the weights and the tokenizer: the output folder, or a checkpoint in it
    adapter:  PEFT's adapter_config.json; None for a full model
    record:   run.json of the run; empty if there is none
    note:     which checkpoint was chosen and why, if the folder has no final model
    """

    given: Path
    folder: Path
    adapter: JsonObject | None
    record: JsonObject = field(default_factory=dict)
    note: str | None = None

    def setting(self, name: str, kind: type) -> Any:
        """A value of the run's configuration by its dotted name; None if there is none of this type. run.json may come
        from a stranger: nothing in it is trusted to be what it should be."""
        section, _, key = name.partition(".")
        values = self.record.get("config", {}).get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return value if type(value) is kind else None

    @property
    def base(self) -> str | None:
        """Name or folder of the model that was trained; None if it is not recorded."""
        return self._recorded("base_model_name_or_path", "model.model_name_or_path")

    @property
    def revision(self) -> str | None:
        """The revision of the base model on the Hub."""
        return self._recorded("revision", "model.revision")

    def _recorded(self, key: str, setting: str) -> str | None:
        named = (self.adapter or {}).get(key) or self.setting(setting, str)
        return named if isinstance(named, str) and named else None

    @property
    def dtype(self) -> str | None:
        """What the run computed in, by torch's name; None if it is not recorded."""
        found = self.record.get("dtype")
        return found if found in _DTYPES else None

    @property
    def bits(self) -> int | None:
        """Bits of the frozen base weights in training; None if they were not quantized."""
        four, eight = (self.setting(f"model.load_in_{bits}bit", bool) for bits in (4, 8))
        return 4 if four else 8 if eight else None

    @property
    def templated(self) -> bool | None:
        """Whether training rows were in the chat template; None if it is not recorded."""
        return False if self.setting("model.chat_template", str) == "none" else is_templated(self.record)

    @property
    def base_digest(self) -> str | None:
        """`base_weights.weights_digest` of the base model that the adapter was trained on, if it was recorded."""
        settings = self.record.get("settings")
        found = settings.get("base weights") if isinstance(settings, dict) else None
        return found if isinstance(found, str) else None


def find_trained_model(given: Path) -> TrainedModel:
    """What to load for a run's output folder, one of its checkpoints, or a folder that `save_model` or
    `save_pretrained` wrote. Checkpoints are verified by their checksums; nothing else is read than JSON and headers.

    An output folder stands for its final model; if the run has not finished, for its newest complete checkpoint.

    Raises:
        UserError: there is no such folder, it holds nothing that was trained, or what it holds is damaged.
    """
    if not given.exists():
        raise UserError(f"no such folder: {given}. Give the output_dir of a run, or a checkpoint in it.")
    if not given.is_dir():
        raise UserError(f"not a folder: {given}. Give the output_dir of a run, or a checkpoint in it.")
    folder, note = given, None
    if (given / checkpoints.MANIFEST).exists() or given in checkpoints.checkpoints(given.parent):
        record = _record(given.resolve().parent)
        _check_complete(given)
    else:
        record = _record(given)
        unfinished = bool(record) and record.get("status") != "done"
        complete = checkpoints.complete_checkpoints(given) if unfinished or _weights(given) is None else []
        if complete:
            folder = complete[-1]
            why = f"the run is {_status(record)}" if unfinished else "there is no final model"
            note = f"{given}: {why}, so its newest complete checkpoint is used: {folder.name}."
            _check_complete(folder)
    if _weights(folder) is None:
        if record:
            raise UserError(
                f"nothing is saved in {folder}: the run is {_status(record)}, without a final model or a complete "
                "checkpoint. Resume it with training.resume_from_checkpoint, or give another run."
            )
        raise UserError(
            f"not a run: {folder} has no run.json, no checkpoint, and no adapter or model in safetensors. Give the "
            "output_dir of a run, or a checkpoint in it."
        )
    found = TrainedModel(given=given, folder=folder, adapter=_adapter(folder), record=record, note=note)
    model_files.check_regular(folder)
    for file in _weights(folder) or []:
        why = model_files.why_damaged(file) if file.is_file() else "it is missing"
        if why:
            raise UserError(f"{file} is damaged: {why}. Copy it again, or give another checkpoint of the run.")
    return found


def _check_complete(folder: Path) -> None:
    """Check the sizes and checksums of a checkpoint's files, but for those that only a resumed run reads.

    Raises:
        UserError: one of them does not match.
    """
    if why := checkpoints.damage(folder, verify=True, unread=_OF_THE_OPTIMIZER):
        others = [one.name for one in checkpoints.complete_checkpoints(folder.parent) if one != folder]
        raise UserError(
            f"not a complete checkpoint: {folder} ({why}). Give another one (complete in {folder.parent}: "
            f"{', '.join(others) or 'none'}), or the output folder of the run."
        )


def _record(folder: Path) -> JsonObject:
    """The run.json in a folder; empty if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    try:
        found = files.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error)[:200]}. Restore it, or remove it.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a JSON object: it is a {type(found).__name__}. Restore it, or remove it.")
    if not isinstance(found.get("config", {}), dict):
        raise UserError(f"{path} is not the record of a run: its config is no object. Restore it, or remove it.")
    return found


def _weights(folder: Path) -> list[Path] | None:
    """The files of an adapter's or a model's weights; None if the folder has none with a configuration."""
    if (folder / model_files.ADAPTER).is_file():
        file = folder / _ADAPTER_WEIGHTS
        return [file] if file.is_file() else None
    if not (folder / "config.json").is_file():
        return None
    try:
        names = files.safetensors_names(folder)
    except (OSError, ValueError):
        return None
    return None if names is None else [folder / name for name in names]


def _status(record: JsonObject) -> str:
    return str(record.get("status", "not recorded"))[:20]


def _adapter(folder: Path) -> JsonObject | None:
    """The adapter's configuration; None for a full model.

    Raises:
        UserError: it is damaged, or not one that PEFT can read.
    """
    path = folder / model_files.ADAPTER
    if not path.is_file():
        return None
    found = model_files.read_object(path)
    if not isinstance(found.get("peft_type"), str):
        raise UserError(f"{path} is not an adapter's configuration: it has no peft_type. Copy the folder again.")
    return found
