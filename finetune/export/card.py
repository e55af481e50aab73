"""The model card, README.md, from a run's record: no rows of the data, and names instead of local paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import yaml

from finetune.config.schema import DEFAULTS, KEYS
from finetune.engine.preflight import model_files
from finetune.export.source import Source
from finetune.redact import redact, redact_tree
from finetune.runtime import launch_lines
from finetune.runtime.command import printable, warn
from finetune.runtime.files import read_json, write_text
from finetune.runtime.types import JsonObject
from finetune.text import counted

# Settings that say nothing about the model: where files were, and what was logged.
_LEFT_OUT = ("training.output_dir", "training.resume_from_checkpoint", "data.cache_dir", "data.num_proc", "logging.")
_TEXT = ("data.system_prompt",)  # the user's own words, which may be private
_VERSIONS = ("finetune", "torch", "transformers", "peft", "trl", "accelerate", "unsloth", "bitsandbytes")
LOSES = (  # measured: docs/learning.md#no-adapters-part-is-rounded-away
    "Unmerged in bfloat16, an adapter loses about 0.1 % of held-out loss, and after a training at 1e-5 two fifths of"
    " what it had learned; merged in float32, nothing: `finetune export RUN --to merged --dtype float32`."
)

# Fields of PEFT's configuration that vLLM's loader refuses or misapplies: docs/serving.md#which-adapters
_MERGED_ONLY = {
    "modules_to_save": "modules trained in full",
    "trainable_token_indices": "trained rows of embeddings",
    "use_dora": "DoRA",
    "lora_bias": "trained biases",
    "rank_pattern": "ranks by module (earlier releases scale all by r)",
    "alpha_pattern": "scales by module (earlier releases use lora_alpha for all)",
    "target_parameters": "adapted experts (few models take them, such as gpt-oss and Qwen3.5-MoE)",
}


def write(folder: Path, source: Source, form: str, verified: str | None) -> None:
    """Write README.md.

    Args:
        form: adapter, merged or gguf.
        verified: what the check found, in a sentence; None if it was skipped.
    """
    write_text(folder / "README.md", redact(text(source, form, verified)))


def write_of_run(folder: Path, record: dict[str, Any]) -> None:
    """Write the README.md of a finished run in place of PEFT's, which is empty and names the base model by a path."""
    adapter = read_json(folder / model_files.ADAPTER) if (folder / model_files.ADAPTER).is_file() else None
    source = Source(
        given=folder,
        folder=folder,
        record=record,
        step=record.get("steps"),
        adapter=adapter,
        base=folder,
        name=str(record["config"]["model"]["model_name_or_path"] or folder.resolve().name),
    )
    form = "merged" if adapter is None else "adapter"
    write_text(folder / "README.md", redact(text(source, form, None, exported=False)))


def try_write_of_run(folder: Path, record: dict[str, Any]) -> None:
    """`write_of_run`; a disk that cannot take it costs the card, not the run."""
    try:
        write_of_run(folder, record)
    except OSError as error:
        warn(f"{folder / 'README.md'} was not written ({error}).")


def text(source: Source, form: str, verified: str | None, *, exported: bool = True) -> str:
    """The card."""
    base, record = shortened(source.name), redact_tree(source.record)
    lines = ["---", *_metadata(source, form), "---", "", f"# {_title(source)}", "", _summary(source, base, form), ""]
    lines += ["License: _to be filled in by you; the base model's license and that of the data apply._", ""]
    lines += ["## Use", "", "```python", *_usage(base, form), "```", ""]
    if form == "adapter" and source.adapter:
        why = merged_only(source.adapter)
        lines += [why or f"To serve it: `{serving('FOLDER', base, source.adapter)}`. {LOSES}", ""]
    if source.raw:
        lines += ["It was trained without a chat template: give it the prompt as it is, not messages.", ""]
    if data := list(_data(record)):
        lines += ["## Data", "", *data, "", "License of the data: _to be filled in by you._", ""]
    if metrics := list(_metrics(record, source.step)):
        lines += ["## Results", "", "| | |", "|---|---|", *metrics, ""]
    if settings := _settings(record):
        command = _command(record)
        lines += ["## Training", "", "```bash", command, "```", "", "Settings other than the defaults:", ""]
        lines += ["```yaml", *yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).splitlines(), "```", ""]
    versions = record.get("versions")
    if isinstance(versions, dict):
        known = [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]
        lines += ["## Versions", "", ", ".join(known), ""]
    if exported:
        lines += ["## Export", "", f"Verified: {verified}." if verified else "Not verified.", ""]
    return "\n".join(printable(line).replace("\n", r"\n") for line in lines)  # a name of a file may have lines


def merged_only(adapter: JsonObject) -> str | None:
    """Why an adapter is not for vLLM beside its base, in a sentence; None if it is."""
    found = [what for name, what in _MERGED_ONLY.items() if adapter.get(name)]
    found += ["trained biases"] if adapter.get("bias") not in (None, "none") else []
    if not found:
        return None
    return f"Serve this adapter merged: beside its base, vLLM refuses or misapplies {', '.join(found)}."


def serving(folder: str, base: str, adapter: JsonObject) -> str:
    """The command that serves an adapter beside its base with vLLM, which takes powers of two from 8 on as ranks."""
    r = adapter.get("r")
    rank = max(8, 1 << (r - 1).bit_length()) if isinstance(r, int) else 8
    return f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules NAME={folder}"


def shortened(value: Any) -> Any:
    """`value` with local paths reduced to their last part. Names on the Hub (USER/NAME) are kept."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if not isinstance(value, str) or ("\n" in value and not _exists(value)):
        return value
    if cached := _OF_HUB.search(value):
        return "/".join(cached.groups())
    if re.match(r"\w{2,}://", value):
        return value
    local = value.startswith(("/", "~", ".", "\\")) or re.match(r"[A-Za-z]:[\\/]", value) or _exists(value)
    deep = len(PurePath(value).parts) > 2
    return PureWindowsPath(value).name if (local or deep) and value.strip("./\\~") else value


# A model or dataset in the Hub's cache: .../models--USER--NAME/snapshots/COMMIT.
_OF_HUB = re.compile(r"[\\/](?:models|datasets)--(\w[\w.-]*?)--(\w[\w.-]*)[\\/]snapshots[\\/]\w+[\\/]?$")


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # not a path: too long, or with a zero byte
        return False


def _metadata(source: Source, form: str) -> Iterator[str]:
    name = shortened(source.name)
    if "/" in name:  # the Hub looks the name up
        yield f"base_model: {name}"
    yield "pipeline_tag: text-generation"
    yield f"library_name: {'peft' if form == 'adapter' and source.adapter else 'transformers'}"
    yield "# license: of your choice, compatible with the base model's"
    tags = {"lora": source.adapter, "sft": True, "gguf": form == "gguf"}
    yield from ("tags:", *(f"- {tag}" for tag, has in tags.items() if has))


def _title(source: Source) -> str:
    given = source.given.resolve()
    return f"{given.parent.name}, {given.name}" if given.name.startswith("checkpoint-") else given.name


def _summary(source: Source, base: str, form: str) -> str:
    steps = f" for {counted(source.step, 'step')}" if source.step else ""
    how = "all weights trained" if source.adapter is None else f"a LoRA adapter of rank {source.adapter.get('r')}"
    shape = {"adapter": "", "merged": ", merged into the model", "gguf": ", merged and converted to GGUF"}[form]
    return f"{base}, fine-tuned by supervised fine-tuning{steps}: {how}{shape if source.adapter else ''}."


def _usage(base: str, form: str) -> list[str]:
    if form == "gguf":
        return ["# llama-cli -m model.gguf, or any program that reads GGUF files"]
    if form == "adapter":
        return [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import GenerationConfig",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("PATH OR NAME")  # loads {base} too',
            'model.generation_config = GenerationConfig.from_pretrained("PATH OR NAME")  # stops where training did',
        ]
    return ["from transformers import pipeline", "", 'chat = pipeline("text-generation", "PATH OR NAME")']


def _data(record: JsonObject) -> Iterator[str]:
    section = record.get("config", {}).get("data", {})
    for key in ("train_file", "dataset_name", "train", "eval_file"):
        if section.get(key):
            named = shortened(section[key])
            listed = named if isinstance(named, list) else [named]
            names = [one.get("file") or one.get("name") if isinstance(one, dict) else one for one in listed]
            yield f"- {'held out' if key == 'eval_file' else 'trained on'}: {', '.join(map(str, names))}"
    for split, counts in (record.get("ledger") or {}).items():
        if isinstance(counts, dict) and "rows_kept" in counts:
            tokens = counts.get("tokens")
            also = f", {counted(tokens, 'token')}" if isinstance(tokens, int) else ""
            yield f"- {split}: {counted(counts['rows_kept'], 'row')}{also}"


def _metrics(record: JsonObject, step: int | None) -> Iterator[str]:
    if step is not None:
        yield f"| optimizer steps | {step:,} |"
    if step == record.get("steps"):  # of the final model
        names = {"eval_loss": "loss on held-out rows", "exact_match": "exact match on held-out rows"}
        for name, what in names.items():
            for when in ("before", "after"):
                if isinstance(value := record.get(f"{name}_{when}"), int | float):
                    yield f"| {what} {when} training | {value:.4f} |"
        losses = record.get("losses")
        if isinstance(losses, list) and losses and isinstance(losses[-1], int | float):
            yield f"| last training loss | {losses[-1]:.4f} |"


def _settings(record: JsonObject) -> JsonObject:
    """The settings that differ from the defaults, by section."""
    found: dict[str, JsonObject] = {}
    for name in KEYS:
        section, _, key = name.partition(".")
        values = record.get("config", {}).get(section, {})
        left_out = name.startswith(_LEFT_OUT) or name in _TEXT
        if not left_out and isinstance(values, dict) and key in values and values[key] != DEFAULTS[name]:
            found.setdefault(section, {})[key] = shortened(values[key])
    extra = record.get("config", {}).get("training", {}).get("extra")
    if isinstance(extra, dict) and extra:
        found.setdefault("training", {}).update(shortened(extra))
    return found


def _command(record: JsonObject) -> str:
    """The launch command, with the configuration's file name; --section.key options are among the settings."""
    size = record.get("world_size")
    on_cpu = (record.get("hardware") or {}).get("device") == "cpu"
    words = launch_lines.user_command(size if isinstance(size, int) else 1, on_cpu=on_cpu)
    file = record.get("config", {}).get("config_file")
    words += ["-m", "finetune.train", *(["--config", PurePath(str(file)).name] if file else [])]
    return " ".join(words)
