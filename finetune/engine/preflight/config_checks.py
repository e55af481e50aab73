"""Checks of a configuration before any heavy import: the model's files, the dataset, and the packages it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from finetune.config import Config
from finetune.config.data_sources import evaluation_sources, training_sources
from finetune.config.rules import TRACKERS
from finetune.engine.preflight.adapter_files import base_folder, check_adapter, local_adapter
from finetune.engine.preflight.hub import check_hub, hub_is_off, use_cache_without_network
from finetune.engine.preflight.model_files import ADAPTER, SHAPES, cached_model_file, check_folder, check_regular
from finetune.engine.preflight.remote_code import check_code
from finetune.errors import UserError
from finetune.runtime import user_code

# Prefixes of optimizer names (`transformers.training_args.OptimizerNames`), their module, its name for pip.
PACKAGES = (
    (("adamw_8bit", "adamw_bnb_", "ademamix", "lion_", "paged_", "rmsprop_"), "bitsandbytes", "bitsandbytes"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)


def check(config: Config) -> None:
    """Check that the model, the dataset and the optimizer of a configuration can be used here.

    Raises:
        UserError: what is missing, and what to do.
    """
    check_optimizer(config.training.optim)
    check_trackers(config.logging.trackers)
    for key, name in user_code.configured(config.logging):
        user_code.check(key, name, config.config_file)
    check_model(config)
    check_data(config)


def check_model(config: Config) -> None:
    """Check that the folder or the Hub's cache holds a model, and one that the configuration can train. Names that are
    not in the cache are checked when the Hub is asked.

    Raises:
        UserError: there is no model, or it is an adapter but the configuration does not continue one.
    """
    name = str(config.model.model_name_or_path)
    folder = Path(name)
    check_regular(folder)
    if folder.is_dir() and not any((folder / file).is_file() for file in SHAPES):
        raise UserError(
            f"model.model_name_or_path is {name}, a folder with neither {SHAPES[0]} nor {ADAPTER}. Give the folder "
            "that `save_pretrained` wrote, or the model's name on the Hub."
        )
    if not folder.is_dir() and hub_is_off() and not any(cached_model_file(config, file) for file in SHAPES):
        raise UserError(
            f"HF_HUB_OFFLINE is set, and model.model_name_or_path is {name}: there is no such folder and no such model "
            f"in the cache. Unset it, or download the model first with `hf download {name}`; check the spelling."
        )
    if not folder.is_dir() and not hub_is_off():
        if any(cached_model_file(config, file) for file in SHAPES):
            use_cache_without_network()
        else:
            check_hub(f"model.model_name_or_path is {name}")
    if folder.is_dir():
        check_folder(folder)
    check_adapter(config, local_adapter(config))
    base_folder(config)
    check_code(config)


def check_data(config: Config) -> None:
    """Check that each dataset of the Hub is in the cache, or that the Hub can be reached.

    Raises:
        UserError: there is no connection at all.
    """
    from huggingface_hub import constants

    origins = [*training_sources(config.data), *evaluation_sources(config.data)]
    names = dict.fromkeys(origin.name for origin in origins if origin.name is not None)
    for name in names:
        if Path(name).exists() or hub_is_off():
            continue
        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        if folder.is_dir():
            use_cache_without_network()
        else:
            check_hub(f"{'data.dataset_name' if config.data.dataset_name == name else 'the dataset'} is {name}")


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers in logging.report_to are installed.

    Raises:
        UserError: one is not; it names all of them.
    """
    missing = [name for name in names if importlib.util.find_spec(TRACKERS[name][0]) is None]
    if missing:
        packages = " ".join(TRACKERS[name][1] for name in missing)
        raise UserError(
            f"logging.report_to names {', '.join(missing)}, which is not installed here. Run `pip install {packages}`, "
            "or remove it."
        )


def check_optimizer(name: str) -> None:
    """Check that the package of the optimizer `name` is installed.

    Raises:
        UserError: it is not.
    """
    for beginnings, module, package in PACKAGES:
        if name.startswith(beginnings) and importlib.util.find_spec(module) is None:
            raise UserError(
                f"training.optim: {name} needs the package {package}, which is not installed here. Run "
                f"`pip install {package}`, or omit training.optim to use torch's AdamW."
            )
