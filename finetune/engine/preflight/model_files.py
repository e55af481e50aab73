"""Preflight checks before any heavy import: the model's files, the dataset and the optimizer's package."""

from __future__ import annotations

from pathlib import Path

from finetune.config import Config
from finetune.errors import UserError
from finetune.runtime.files import open_regular, read_json, safetensors_header, special_entry

ADAPTER = "adapter_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHAPES = ("config.json", ADAPTER)  # one of them describes the other files


def check_regular(folder: Path) -> None:
    """Check that a folder, if it exists, holds only regular files: libraries that load a model open whatever is there.

    Raises:
        UserError: it holds a FIFO, a socket or a device.
    """
    for part in (folder, folder / "additional_chat_templates"):
        if part.is_dir() and (found := special_entry(part)):
            raise UserError(
                f"{part} cannot be loaded as a model: {found}, not a regular file. Remove it, or copy the model again."
            )


def check_folder(folder: Path) -> None:
    """Check that configuration files are JSON objects and that weight files match the sizes in their headers."""
    for name in (*SHAPES, *TOKENIZER):
        if (folder / name).is_file():
            read_object(folder / name)
    for file in sorted(folder.glob("*.safetensors")):
        if why := why_damaged(file):
            raise UserError(
                f"model.model_name_or_path is {folder}: its {file.name} is damaged ({why}). Copy or download it again."
            )


def read_object(file: Path) -> dict:
    """A JSON object of a model's folder. Raises UserError if it cannot be read or is something else."""
    try:
        found = read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}. Copy or download the model again.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. Check the permissions of the model.") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} must be a JSON object: it is a {type(found).__name__}. Copy the model again.")
    return found


def why_damaged(file: Path) -> str | None:
    """What is wrong with a safetensors file, judged by its header: 8 bytes of length, JSON with offsets, data."""
    size = 0
    try:
        size = file.stat().st_size
        with open_regular(file) as content:
            header, start = safetensors_header(content)
        expected = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except EOFError:
        return f"it has {size:,} bytes, too few for its header"
    except ValueError:
        return "its header is not valid"
    return None if size == expected else f"it has {size:,} bytes instead of {expected:,}"


def model_folder(name: str, revision: str | None) -> Path | None:
    """Folder of a model: local, or a snapshot in the Hub's cache. None if it is not on this machine.

    Raises:
        UserError: it holds something else than regular files.
    """
    file = None if Path(name).is_dir() else cached_file(name, SHAPES[0], revision)
    folder = Path(name) if Path(name).is_dir() else file and file.parent
    if folder is not None:
        check_regular(folder)
    return folder


def cached_model_file(config: Config, file: str) -> Path | None:
    return cached_file(str(config.model.model_name_or_path), file, config.model.revision)


def local_file(config: Config, name: str) -> Path | None:
    """A file in the model's folder, or in the Hub's cache; None if it is not on this machine."""
    folder = Path(str(config.model.model_name_or_path))
    file = folder / name if folder.is_dir() else cached_model_file(config, name)
    return file if file and file.is_file() else None


def cached_file(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # not a valid name on the Hub
        return None
    return Path(found) if isinstance(found, str) else None
