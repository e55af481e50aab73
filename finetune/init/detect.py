"""What a configuration is written for: the model, the rows and the GPUs, as far as they are on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.config.schema import DataConfig, ModelConfig
from finetune.data import formats, sources
from finetune.data.prepare import SAMPLE_ROWS
from finetune.data.remote import is_url
from finetune.engine.preflight import adapter_files, config_checks
from finetune.errors import UserError
from finetune.measure import strategy
from finetune.measure.rules import MEMORY_MARGIN
from finetune.runtime import files
from finetune.runtime.machine.hardware import Hardware
from finetune.text import counted

BYTES_PER_PARAMETER = 2  # bfloat16
# The share of the rows to hold out, if there are enough: each is drawn by itself, so that of few rows it may be none.
HELD_OUT = 0.02
ENOUGH_ROWS = 500
# Files of a model folder that hold a chat template (transformers' tokenization_utils_base.py).
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CONVERSATIONS = ("messages", "sharegpt")  # formats that only a chat template can render


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by its Hub name or folder; the rest is None if its files are not on this machine yet."""

    name: str
    parameters: int | None = None
    has_template: bool | None = None
    renders_tools: bool | None = None  # whether its template knows tool calls


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows are, and how they are read; `format` is None for a dataset on the Hub, which is not read here."""

    key: str  # data.train_file or data.dataset_name
    name: str
    format: formats.Format | None = None
    described: str = "the format is detected when the run starts"
    enough_to_hold_out: bool = True
    has_tool_calls: bool = False


class NoFormat(UserError):
    """Rows whose columns fit no format; `columns` are theirs."""

    def __init__(self, message: str, columns: list[str]):
        super().__init__(message)
        self.columns = columns


def model(name: str) -> Model:
    """Look at a model's files. A Hub name that is not in the cache is taken as it is: nothing is downloaded.

    Raises:
        UserError: a folder that holds no model or a damaged one, or an adapter.
    """
    if not name:
        raise UserError("no model was given. Give a Hub name, such as unsloth/Qwen3-0.6B, or a folder.")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError(f"there is no such model folder: {name}. Give a folder that holds a model, or a Hub name.")
    name = str(folder) if folder.is_dir() else name
    config = Config(model=ModelConfig(model_name_or_path=name))
    if folder.is_dir():
        config_checks.check_model(config)
    found = adapter_files.base_folder(config)
    if found is None:
        return Model(name=name)
    template = _template(found)
    return Model(
        name=name,
        parameters=strategy.parameter_count(str(found)),
        has_template=bool(template),
        renders_tools="tool_calls" in template,
    )


def _template(folder: Path) -> str:
    """The text that holds a model's chat template; "" if it has none."""
    for name in TEMPLATE_FILES:
        if (folder / name).is_file():
            return files.read_text(folder / name)
    try:
        return str(files.read_json(folder / "tokenizer_config.json").get("chat_template") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def rows(name: str, columns: Mapping[str, str] | None = None) -> Rows:
    """Read the first rows and detect their format, as a run does.

    Args:
        name: a path, glob, folder or URL; or the name of a dataset on the Hub.
        columns: field of the format -> column.

    Raises:
        NoFormat: no format matches.
        UserError: there is no such file, or it cannot be read.
    """
    if not name:
        raise UserError("no data was given. Give a file, folder, glob or URL, or the name of a dataset on the Hub.")
    if _is_hub_name(name):
        return Rows(key="dataset_name", name=name)
    read = list(islice(sources.iter_rows([name]), ENOUGH_ROWS))
    first = read[:SAMPLE_ROWS]
    present = list(dict.fromkeys(column for row, _ in first for column in row))
    try:
        format = formats.detect(present, [row for row, _ in first], "auto", columns)
    except UserError as error:
        example = "--columns instruction=COLUMN,output=COLUMN"
        raise NoFormat(f"{first[0][1]}: {error} With `finetune init`: {example}.", present) from None
    described = formats.describe(
        format, has_template=True, assistant_only_loss=DataConfig().assistant_only_loss, completion_only_loss=None
    )
    return Rows(
        key="train_file",
        name=name,
        format=format,
        described=described,
        enough_to_hold_out=len(read) == ENOUGH_ROWS,
        has_tool_calls=any(_has_tool_calls(row, format) for row, _ in read),
    )


def _has_tool_calls(row: Mapping[str, Any], format: formats.Format) -> bool:
    lists = (row.get(column) for column in format.columns.values())
    messages = (message for found in lists if isinstance(found, list) for message in found)
    return any(isinstance(message, dict) and message.get("tool_calls") for message in messages)


def _is_hub_name(name: str) -> bool:
    """Whether a name is `owner/data` rather than a path: nothing here has that name, and it has no file's ending."""
    path = Path(name).expanduser()
    plain = name.count("/") == 1 and not name.startswith((".", "~", "/")) and not set(name) & set("*?[")
    return plain and not is_url(name) and not path.exists() and not path.parent.exists() and not path.suffix


def method(model: Model, machine: Hardware) -> tuple[str, str]:
    """The method to suggest (lora or qlora), and why: QLoRA if the weights alone would fill the usable GPU memory."""
    if model.parameters is None or machine.memory_gib is None:
        return "lora", "trains a small adapter on the frozen model"
    needed = BYTES_PER_PARAMETER * model.parameters / 2**30
    if needed > MEMORY_MARGIN * machine.memory_gib:
        return "qlora", f"the weights need {needed:.0f} GiB in 16 bits and the GPU has {machine.memory_gib:.0f} GiB"
    return "lora", f"the weights need {needed:.1f} GiB in 16 bits and the GPU has {machine.memory_gib:.0f} GiB"


def machine_in_words(machine: Hardware) -> str:
    """The GPUs found, such as `2 x NVIDIA H200, 139 GiB each`; or the processor."""
    if machine.device == "cpu":
        return f"no GPU: runs use the CPU ({counted(machine.cpu_cores, 'core')}, {machine.ram_gib:.0f} GiB of memory)"
    each = " each" if machine.count > 1 else ""
    return f"{machine.count} x {machine.name}, {machine.memory_gib or 0:.0f} GiB{each}"


def facts(machine: Hardware) -> dict[str, Any]:
    """The machine for JSON."""
    return {"device": machine.device, "name": machine.name, "gpus": machine.count, "memory_gib": machine.memory_gib}
