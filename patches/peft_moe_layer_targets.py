"""PEFT takes the names of layers beside a mixture's experts for those of the experts.

In a family that stores its experts as single layers in its files (Qwen, GLM, DeepSeek and others), PEFT changes every
target that ends in `gate_proj`, `up_proj` or `down_proj` into the stacked experts, even a name that only a dense layer
or a shared expert has.
Without this: `shared_experts.up_proj` gets no adapter, and that of a saved adapter is not loaded; the experts have one.
"""

import functools
from types import SimpleNamespace
from typing import Any

UPSTREAM = "https://github.com/huggingface/peft/pull/3715"
REMOVE_WHEN = None  # when a release has it; 0.21.2 does not

FUNCTION = "_convert_peft_config_moe"


def _module() -> Any:
    from peft.utils import transformers_weight_conversion

    return transformers_weight_conversion if hasattr(transformers_weight_conversion, FUNCTION) else None


def needed() -> bool:
    """Whether the name of a shared expert's layer is gone from the targets."""
    import torch
    from peft import LoraConfig

    module = _module()
    if module is None:
        return False
    model = torch.nn.Module()
    model.shared_experts = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(1, 1, device="meta")})
    model.config = SimpleNamespace(model_type="qwen3_moe")  # type: ignore[assignment]
    config = LoraConfig(target_modules=["shared_experts.down_proj"])
    getattr(module, FUNCTION)(config, model)
    return "shared_experts.down_proj" not in (config.target_modules or ())


def apply() -> None:
    """Keep the names with a dot that are of linear layers of the model out of the conversion."""
    module = _module()
    if module is None or not needed():
        return
    original = getattr(module, FUNCTION)

    @functools.wraps(original)
    def convert(peft_config: Any, model: Any) -> None:
        targets = peft_config.target_modules
        if isinstance(targets, str) or not targets:
            return original(peft_config, model)
        kept = {target for target in targets if "." in target and _is_layer(target, model)}
        peft_config.target_modules = {target for target in targets if target not in kept}
        original(peft_config, model)
        peft_config.target_modules = {*peft_config.target_modules, *kept}
        return None

    setattr(module, FUNCTION, convert)


def _is_layer(target: str, model: Any) -> bool:
    import torch

    return any(
        isinstance(getattr(module, "base_layer", module), torch.nn.Linear)
        for name, module in model.named_modules()
        if name == target or name.endswith(f".{target}")
    )
