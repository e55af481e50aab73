"""Packages that an optimizer or a tracker needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from finetune.config.rules import TRACKERS
from finetune.errors import UserError

# Prefixes of optimizer names (`transformers.training_args.OptimizerNames`), their module, its name for pip.
PACKAGES = (
    (("adamw_8bit", "adamw_bnb_", "ademamix", "lion_", "paged_", "rmsprop_"), "bitsandbytes", "bitsandbytes"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("adamw_torch_xla",), "torch_xla", "torch_xla"),
    (("adamw_torch_npu_fused",), "torch_npu", "torch-npu"),
    (("adamw_anyprecision",), "torchdistx", "torchdistx"),
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)


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
