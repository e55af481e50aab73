"""Which optimizers of transformers are in packages of their own, known before anything heavy is imported."""

from __future__ import annotations

import importlib.util

from finetune.errors import UserError

# How their names begin (`transformers.training_args.OptimizerNames`), the module, and what pip calls it.
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


def check(name: str) -> None:
    """The package of the optimizer `name` is installed.

    Raises:
        UserError: it is not.
    """
    for beginnings, module, package in PACKAGES:
        if name.startswith(beginnings) and importlib.util.find_spec(module) is None:
            raise UserError(
                f"training.optim: {name} is in the package {package}, which is not installed here: "
                f"`pip install {package}`. Or leave training.optim out, for torch's own AdamW."
            )
