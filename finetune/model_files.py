"""The files of the model that is to be trained: found and judged before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.config import Config
from finetune.errors import UserError

ADAPTER = "adapter_config.json"
SHAPES = ("config.json", ADAPTER)  # one of them says what the other files hold


def check(config: Config) -> None:
    """The folder or the hub's cache holds a model, and one that the configuration means to train. A name that is not
    in the cache is left to those who ask the hub.

    Raises:
        UserError: no model is there, or it is an adapter that is not to be continued.
    """
    name = str(config.model.model_name_or_path)
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in SHAPES):
        raise UserError(
            f"model.model_name_or_path is {name}, a folder with neither {SHAPES[0]} nor {ADAPTER}. Give the folder "
            "that `save_pretrained` wrote, or the model's name on the hub."
        )
    if not folder.is_dir() and _hub_is_off() and not any(_cached(config, file) for file in SHAPES):
        raise UserError(
            f"model.model_name_or_path is {name}: no such folder is here, nor such a model in the cache, and "
            f"HF_HUB_OFFLINE is set. Check the spelling, download it first with `hf download {name}`, or give a folder."
        )
    _check_adapter(config, _found(config))


def adapter(config: Config) -> dict | None:
    """The adapter_config.json of the model, which may have to be asked of the hub; None for a whole model.

    Raises:
        UserError: it is an adapter that is not to be continued.
    """
    found = _found(config) or _on_hub(config)
    _check_adapter(config, found)
    return found


def base_folder(config: Config) -> Path | None:
    """Folder of the model whose weights are frozen or trained: the base of an adapter; a snapshot in the hub's cache.
    None if it is not on this machine yet."""
    name, revision = str(config.model.model_name_or_path), config.model.revision
    if (adapter := _found(config)) is not None:
        name, revision = str(adapter.get("base_model_name_or_path")), None
    if Path(name).is_dir():
        return Path(name)
    file = _cached_file(name, SHAPES[0], revision)
    return file.parent if file is not None else None


def _found(config: Config) -> dict | None:
    """The adapter's configuration in the folder or the cache."""
    folder = Path(str(config.model.model_name_or_path))
    file = folder / ADAPTER if folder.is_dir() else _cached(config, ADAPTER)
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else None


def _cached(config: Config, file: str) -> Path | None:
    return _cached_file(str(config.model.model_name_or_path), file, config.model.revision)


def _cached_file(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # no name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def _on_hub(config: Config) -> dict | None:
    import httpx
    from huggingface_hub import file_exists, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    name, revision = str(config.model.model_name_or_path), config.model.revision
    if Path(name).is_dir() or _hub_is_off():
        return None
    try:
        if not file_exists(name, ADAPTER, revision=revision):
            return None
        return json.loads(Path(hf_hub_download(name, ADAPTER, revision=revision)).read_text(encoding="utf-8"))
    except (httpx.HTTPError, HFValidationError, OSError):
        return None  # loading the model itself says better what is wrong


def _hub_is_off() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _check_adapter(config: Config, adapter: dict | None) -> None:
    if adapter is None:
        return
    name, base = config.model.model_name_or_path, adapter.get("base_model_name_or_path")
    if config.model.full_finetuning:
        raise UserError(
            f"model.model_name_or_path is {name}, an adapter of {base}, and model.full_finetuning is set. Merge the "
            "adapter first, or give the base model."
        )
    if not config.lora.continue_adapter:
        raise UserError(
            f"model.model_name_or_path is {name}, which is already an adapter of {base}. A second adapter would "
            "replace it. To go on training this one set lora.continue_adapter: true; to start anew give the base "
            "model."
        )
    wanted = {"r": config.lora.r, "lora_alpha": config.lora.lora_alpha}
    found = {key: adapter.get(key) for key in wanted}
    if wanted != found:
        raise UserError(
            f"lora.continue_adapter keeps the shape of {name}, which has {found}; the configuration says {wanted}. "
            "Set lora.r and lora.lora_alpha to the adapter's values."
        )
