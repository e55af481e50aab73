"""Finds what is exported: the final model of a run or a checkpoint, its record and its base model, all verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.ledger import is_templated
from finetune.engine import record
from finetune.engine.checkpoint import base_weights, checkpoints
from finetune.engine.checkpoint.run_artifacts import TrainedModel, find_trained_model
from finetune.engine.preflight import adapter_files, model_files
from finetune.errors import UserError
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
    trained = find_trained_model(path)
    content, adapter = trained.record, trained.adapter
    if trained.folder != path:
        complete = ", ".join(str(path / one.name) for one in checkpoints.complete_checkpoints(path))
        raise UserError(
            f"The run in {path} has no final model: its status is {content.get('status')}. Export a checkpoint: "
            f"{complete}."
        )
    if (path / checkpoints.MANIFEST).is_file():
        about = checkpoints.manifest(path)
        step = about["step"]
    elif content:
        _check_final_files(path, content)
        about, step = content, content.get("steps")
    else:
        raise UserError(
            f"{path} is not the output folder of a run: it has no {record.FILE_NAME}. Give training.output_dir of a "
            "run of `finetune train`, or one of its checkpoints."
        )
    settings = about.get("settings")
    named = trained.setting("model.model_name_or_path", str)
    found, name, notes = path, str(named or path.name), []
    if adapter is not None:
        if not isinstance(adapter.get("lora_alpha"), int | float):
            raise UserError(f"{path / model_files.ADAPTER} is incomplete: it has no lora_alpha. Export a checkpoint.")
        found, name, notes = _base(trained, settings if isinstance(settings, dict) else {}, base)
        shape = files.read_json(found / "config.json")
        kind = str((shape.get("text_config") or shape).get("model_type"))
        if adapter_files.is_in_older_order(adapter, kind):
            notes.append(
                "The adapter does not record the order of its stacked experts. The export takes PEFT's, in which runs "
                "train. If it is one of Unsloth before 2026.9.6, continue it with lora.continue_adapter first."
            )
    return Source(
        given=path,
        folder=path,
        record=content,
        step=step if isinstance(step, int) else None,
        adapter=adapter,
        base=found,
        name=name,
        notes=notes,
    )


def _check_final_files(path: Path, content: JsonObject) -> None:
    """Check the files of a final model against their checksums in run.json, which records of earlier versions lack."""
    recorded = content.get("final_files")
    for name, checksum in sorted(recorded.items()) if isinstance(recorded, dict) else ():
        file = path / str(name)
        if file.name != name or not file.is_file():
            why = "is missing"
        elif files.checksum(file) != checksum:
            why = f"does not match its checksum in {record.FILE_NAME}"
        else:
            continue
        raise UserError(f"The final model in {path} is damaged: {name} {why}. Export a checkpoint of the run.")


# --- the base model ---------------------------------------------------------------------------------------------------


def _base(trained: TrainedModel, settings: JsonObject, given: str | None) -> tuple[Path, str, list[str]]:
    """Folder and name of the base model, and what could not be compared.

    A run that quantizes on load names the original model, which is what the adapter is merged onto. Unsloth may have
    loaded a 4-bit copy instead, which the adapter then names; it serves if the original is not on this machine.
    """
    adapter = trained.adapter or {}
    own = str(adapter.get("base_model_name_or_path") or "")
    asked = trained.setting("model.model_name_or_path", str) or own
    recorded = [(asked, trained.setting("model.revision", str)), (own, adapter.get("revision"))]
    for name, revision in [(given, None)] if given else recorded:
        folder = model_files.model_folder(name, revision) if name else None
        if folder is not None and (folder / model_files.ADAPTER).is_file() and not (folder / "config.json").is_file():
            continue  # the run continued this adapter, whose base the new one names
        if folder is not None:
            return folder, given and asked or name, _compared(folder, name, settings, given)
    name = given or asked or own
    raise UserError(
        f"The base model {name} of {trained.given} is not on this machine. Download it with `hf download {name}`, or "
        "give its folder with --base."
    )


def _compared(folder: Path, name: str, settings: JsonObject, given: str | None) -> list[str]:
    """What could not be compared.

    Raises:
        UserError: these are not the weights that the run was trained on.
    """
    now = base_weights.base_model_files(folder)
    notes, differing = [], []
    configs = [one if isinstance(one, dict) else None for one in (settings.get("model config"), now["model config"])]
    if len({bool(one and one.get("quantization_config")) for one in configs}) > 1:  # of one model and its 4-bit copy
        ours = ("quantization_config", "unsloth_fixed")
        was, here = (one and {key: one[key] for key in one if key not in ours} for one in configs)
        settings, now = {"model config": was}, {"model config": here, "base weights": None}
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
