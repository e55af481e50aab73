"""A model that is an adapter: its configuration, and the folder of its base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.engine.preflight.hub import hub_is_off
from finetune.engine.preflight.model_files import ADAPTER, TOKENIZER, local_file, model_folder, read_object
from finetune.errors import UserError
from finetune.runtime.bootstrap import http_library
from finetune.runtime.files import read_json


def adapter(config: Config) -> dict | None:
    """The model's adapter_config.json, from the Hub if necessary; None for a full model.

    Raises:
        UserError: it is an adapter but the configuration does not continue one.
    """
    found = local_adapter(config) or _hub_adapter(config)
    check_adapter(config, found)
    return found


def base_folder(config: Config) -> Path | None:
    """Folder of the base model: local, or a snapshot in the Hub's cache. For an adapter, the folder of its base. None
    if it is not on this machine yet."""
    name, revision = str(config.model.model_name_or_path), config.model.revision
    if (adapter := local_adapter(config)) is not None:
        name, revision = str(adapter.get("base_model_name_or_path")), None
    return model_folder(name, revision)


def tokenizer_source(config: Config) -> tuple[str, str | None]:
    """Name and revision of the model that has the tokenizer: the base of an adapter whose folder has none, which is how
    PEFT saves it."""
    name, revision = str(config.model.model_name_or_path), config.model.revision
    found = local_adapter(config) if Path(name).is_dir() else None
    if found is None or any((Path(name) / one).is_file() for one in TOKENIZER):
        return name, revision
    return str(found.get("base_model_name_or_path")), None


def local_adapter(config: Config) -> dict | None:
    """The adapter's configuration in the folder or the cache."""
    file = local_file(config, ADAPTER)
    return read_object(file) if file else None


def _hub_adapter(config: Config) -> dict | None:
    from huggingface_hub import file_exists, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    name, revision = str(config.model.model_name_or_path), config.model.revision
    if Path(name).is_dir() or hub_is_off():
        return None
    try:
        if not file_exists(name, ADAPTER, revision=revision):
            return None
        return read_json(Path(hf_hub_download(name, ADAPTER, revision=revision)))
    except (http_library().HTTPError, HFValidationError, OSError):
        return None  # loading the model reports the error better


def check_adapter(config: Config, adapter: dict | None) -> None:
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
            "replace it. To continue training this one, set lora.continue_adapter: true; to start a new one, give "
            "the base model."
        )
    wanted = {"r": config.lora.r, "lora_alpha": config.lora.lora_alpha}
    found = {key: adapter.get(key) for key in wanted}
    if wanted != found:
        raise UserError(
            f"lora.continue_adapter keeps the shape of {name}, which has {found}; the configuration has {wanted}. "
            "Set lora.r and lora.lora_alpha to the adapter's values."
        )


# Mixtures whose stacked experts Unsloth computed itself from 2026-02-05 to 2026-09-17 (unsloth-zoo#1269). It took the
# columns of lora_B expert by expert; in those of PEFT, vLLM and later releases, experts are the fastest dimension.
_IN_OLDER_ORDER = frozenset(
    "deepseek_v3 ernie4_5_moe ernie4_5_vl_moe gemma4 glm4_moe glm4_moe_lite gpt_oss lfm2_moe mixtral qwen3_5_moe"
    " qwen3_moe qwen3_next qwen3_vl_moe".split()
)
PEFTS_ORDER = {"lora_B_layout": "rank_major"}  # as Unsloth records it, in `auto_mapping` or beside it


def is_in_older_order(adapter: Mapping[str, Any], kind: str) -> bool:
    """Whether lora_B of stacked experts has its columns in the order of Unsloth before 2026.9.6. Later releases record
    the order, so an adapter of Unsloth that has no record is older.

    Args:
        adapter: adapter_config.json.
        kind: `model_type` of the base's text model.
    """
    mapping = adapter.get("auto_mapping")
    mapping = mapping if isinstance(mapping, dict) else {}
    for source in (adapter, mapping):
        detail = source.get("unsloth_fused_expert_lora")
        for record in (source, detail if isinstance(detail, dict) else {}):
            if "lora_B_layout" in record:
                return record["lora_B_layout"] != PEFTS_ORDER["lora_B_layout"]
    by_unsloth = bool(adapter.get("target_parameters") and mapping.get("unsloth_fixed"))
    return by_unsloth and kind.removesuffix("_text") in _IN_OLDER_ORDER
