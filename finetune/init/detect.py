"""Detects the model, data and GPUs that a configuration is generated for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from finetune.config import Config
from finetune.config.schema import DataConfig, ModelConfig
from finetune.data import formats, sources
from finetune.data.readers import SAMPLE_ROWS
from finetune.data.remote import is_url
from finetune.engine.preflight import adapter_files, config_checks
from finetune.errors import UserError
from finetune.measure import held
from finetune.runtime import files
from finetune.runtime.machine.hardware import Hardware
from finetune.text import counted

# The share of the rows to hold out, by their number: each is drawn by itself, so that of few rows it may be none.
HELD_OUT, HELD_OUT_OF_FEW = 0.02, 0.1
ENOUGH_ROWS, FEW_ROWS = 500, 100
FEWEST_STEPS, MOST_EPOCHS = 60, 5  # of a run that is to learn something, if so many epochs allow it
SMALLEST_BATCH, STEPS_PER_EPOCH = 4, 16  # of few rows
COUNTED = 20_000  # rows; of more, the settings do not depend on their number
CHARACTERS_PER_TOKEN = 4  # of raw text, about
# Files of a model folder that hold a chat template (transformers' tokenization_utils_base.py).
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CONVERSATIONS = ("messages", "sharegpt")  # formats that only a chat template can render


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by its Hub name or folder; the rest is None if its files are not on this machine yet."""

    name: str
    parameters: int | None = None
    has_template: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows are, and how they are read; `format` is None for a dataset on the Hub, which is not read here."""

    key: str  # data.train_file or data.dataset_name
    name: str
    format: formats.Format | None = None
    described: str = "the format is detected when the run starts"
    eval_fraction: float = HELD_OUT  # to hold out; 0 of too few rows
    count: int | None = None  # rows, or pieces of raw text; None of very many, and if they are not read here


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is, and how often it logs, evaluates and saves. The defaults are those of many rows."""

    global_batch_size: int = 16
    epochs: int = 1
    logging_steps: int = 10
    eval_steps: int = 100
    save_steps: int = 500
    few_steps: bool = False


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
    sizes = held.read_sizes(found)
    parameters = sizes.total if sizes is not None else None
    return Model(name=name, parameters=parameters, has_template=_has_template(found))


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in TEMPLATE_FILES):
        return True
    try:
        return bool(files.read_json(folder / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def rows(name: str, columns: Mapping[str, str] | None = None) -> Rows:
    """Read the first rows and detect their format, as a run does.

    Args:
        name: a path, glob, folder or URL; or the name of a dataset on the Hub.
        columns: field of the format -> column.

    Raises:
        UserError: there is no such file, it cannot be read, or no format matches.
    """
    if not name:
        raise UserError("no data was given. Give a file, folder, glob or URL, or the name of a dataset on the Hub.")
    if _is_hub_name(name):
        return Rows(key="dataset_name", name=name)
    stream = sources.iter_rows([name])
    read = list(islice(stream, ENOUGH_ROWS))
    first = read[:SAMPLE_ROWS]
    present = list(dict.fromkeys(column for row, _ in first for column in row))
    try:
        format = formats.detect(present, [row for row, _ in first], "auto", columns)
    except UserError as error:
        guess = formats.suggested(present, [row for row, _ in first]) or {"instruction": "COLUMN", "output": "COLUMN"}
        example = f"--columns {shlex.quote(','.join(f'{field}={column}' for field, column in guess.items()))}"
        raise UserError(f"{first[0][1]}: {error} With `finetune init`: {example}.") from None
    raw = "" if is_url(name) else sources.divided(sources.expand([name])[0], whole=False)
    count = len(read) + sum(1 for _ in islice(stream, 0 if is_url(name) else COUNTED - len(read)))
    fraction = HELD_OUT if count >= ENOUGH_ROWS else HELD_OUT_OF_FEW if count >= FEW_ROWS else 0.0
    described = formats.describe(
        format, has_template=True, assistant_only_loss=DataConfig().assistant_only_loss, completion_only_loss=None
    )
    if raw:
        lengths = [len(row["text"]) for row, _ in read]
        tokens = sum(lengths) / len(lengths) / CHARACTERS_PER_TOKEN
        described = f"{counted(count, 'document')} of raw text, {raw}, about {tokens:,.0f} tokens each"
        count = sum(math.ceil(length / CHARACTERS_PER_TOKEN / 2048) for length in lengths)
    return Rows(
        key="train_file",
        name=name,
        format=format,
        described=described,
        eval_fraction=fraction,
        count=None if count >= COUNTED or len(read) == ENOUGH_ROWS and (raw or is_url(name)) else count,
    )


def length(rows: Rows) -> Length:
    """The length of a run on these rows: at least 60 steps if 5 epochs allow it, 20 log entries, 5 evaluations and a
    checkpoint half-way."""
    many = Length()
    if rows.count is None:
        return many
    trained = max(round(rows.count * (1 - rows.eval_fraction)), 1)
    batch = many.global_batch_size
    while batch > SMALLEST_BATCH and trained < STEPS_PER_EPOCH * batch:
        batch //= 2
    per_epoch = math.ceil(trained / batch)
    epochs = min(math.ceil(FEWEST_STEPS / per_epoch), MOST_EPOCHS)
    steps = epochs * per_epoch
    return Length(
        global_batch_size=batch,
        epochs=epochs,
        logging_steps=min(max(steps // 20, 1), many.logging_steps),
        eval_steps=min(math.ceil(steps / 5), many.eval_steps),
        save_steps=min(math.ceil(steps / 2), many.save_steps),
        few_steps=steps < 100,
    )


def _is_hub_name(name: str) -> bool:
    """Whether a name is `owner/data` rather than a path: nothing here has that name, and it has no file's ending."""
    path = Path(name).expanduser()
    plain = name.count("/") == 1 and not name.startswith((".", "~", "/")) and not set(name) & set("*?[")
    return plain and not is_url(name) and not path.exists() and not path.parent.exists() and not path.suffix


def method(model: Model, machine: Hardware) -> tuple[str, str]:
    """The method to suggest (lora or qlora), and why: QLoRA if the weights alone would fill the usable GPU memory."""
    if model.parameters is None or machine.memory_gib is None:
        return "lora", "trains a small adapter on the frozen model"
    needed = held.storage(Config()).kept(model.parameters, 0) / 2**30  # of LoRA: frozen, in 16 bits
    if not held.fits(needed, held.limit_of(machine.memory_gib)):
        return "qlora", f"the weights need {needed:.0f} GiB in 16 bits and the GPU has {machine.memory_gib:.0f} GiB"
    return "lora", f"the weights need {needed:.1f} GiB in 16 bits and the GPU has {machine.memory_gib:.0f} GiB"


def machine_in_words(machine: Hardware) -> str:
    """The GPUs found, such as `2 x NVIDIA H200, 139 GiB each`; or the processor."""
    if machine.device == "cpu":
        return f"no GPU: runs use the CPU ({counted(machine.cpu_cores, 'core')}, {machine.ram_gib:.0f} GiB of memory)"
    each = " each" if machine.count > 1 else ""
    return f"{machine.count} x {machine.name}, {machine.memory_gib or 0:.0f} GiB{each}"
