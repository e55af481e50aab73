"""Base model, adapter and tokenizer: load and generate. Independent of the trainer.

Import it after `bootstrap.start`, like everything that uses transformers or peft.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from finetune.config import Config
from finetune.config.rules import LOADED_AS
from finetune.engine import multimodal
from finetune.engine.kernels import fp8, fused_lora, grouped_experts, liger
from finetune.engine.model import adapter_targets, expert_targets, experts, loaded_weights
from finetune.engine.model.adapters import (
    adapter_arguments,
    adapter_seed,
    adapter_target_modules,
    add_adapter,
    load_adapter,
)
from finetune.engine.model.load_arguments import (
    attention_arguments,
    dequantization_config,
    quantization_bits,
    quantization_config,
    resolve_dtype,
)
from finetune.engine.model.load_checks import check
from finetune.engine.model.load_errors import (
    explain_adapter_error,
    explain_attention_error,
    explain_load_error,
    explain_out_of_memory,
    explain_unknown_argument,
)
from finetune.engine.optimizer import master_weights
from finetune.engine.sharding import shard, unit_loading
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack, quiet_ranks
from finetune.runtime.types import Model


def load(config: Config, stack: Stack, *, row_length: int, without_weights: bool = False) -> Model:
    """The model on this rank's device, ready to train: with an adapter unless `full_finetuning`. One that will be
    sharded is on the host.

    Args:
        row_length: tokens of the longest training row; sizes Unsloth's rotary cache.
        without_weights: leave out the base model's weights, which `unit_loading.load_unit` loads later.

    Raises:
        UserError: the model is not found or cannot be quantized here; also everything that `check` raises.
    """
    name = str(config.model.model_name_or_path)
    continued = check(config, stack)
    load_with = (
        _load_unsloth
        if stack.backend == "unsloth"
        else functools.partial(_load_transformers, without_weights=without_weights)
    )
    with (
        explain_load_error(name, "model"),
        loaded_weights.require_all(full=config.model.full_finetuning),
        explain_out_of_memory("loading the model"),
        explain_unknown_argument(config),
        explain_attention_error(config),
        quiet_ranks(),
    ):
        torch.manual_seed(config.training.seed)  # adapters are initialized at random, equally on every rank
        model = load_with(config, stack, row_length, continue_adapter=continued)
        if liger.choose(config, stack, model).kernels == liger.LIGER:
            liger.install(model)
        if config.model.load_in_fp8:
            fp8.convert(model)
        master_weights.widen(model, config.training.master_weights, config.model.full_finetuning)
        multimodal.prepare(model)
        if config.model.full_finetuning:
            experts.freeze_biases_of_choice(model)
        else:
            fused_lora.install(model, roomy=not shard.is_requested(config))
            grouped_experts.install(model)
    bits = quantization_bits(config)
    if bits and not getattr(model, f"is_loaded_in_{bits}bit", False):
        raise UserError(
            f"model.load_in_{bits}bit is set, but the backend loaded 16-bit weights: this model or device has no "
            f"{bits}-bit kernels (backend {stack.backend}, device {stack.device}). Set it to false."
        )
    model.config.use_cache = False
    if stack.backend == "unsloth" and config.training.leaves_activations_open:
        # For `recompute.apply`, which else takes the model to be loaded with the kind that it is given.
        model.recomputes = LOADED_AS  # type: ignore[attr-defined]
    return model


def keep_4bit_layout(model: Model) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU in the first evaluation (defects.md, A12): it fails on
    rows that are not whole blocks, and training after it would go through a kernel without a backward pass."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


@contextlib.contextmanager
def without_slow_tokenizers() -> Iterator[None]:
    """Context in which no slow tokenizer is loaded. Unsloth would compare one with the fast one, though transformers 5
    has one kind only; it goes on without. A run has its own tokenizer."""
    from transformers import AutoTokenizer

    before, load = vars(AutoTokenizer)["from_pretrained"], AutoTokenizer.from_pretrained

    def fast(*names: Any, from_slow: bool = False, **given: Any) -> Any:
        if from_slow:
            raise ValueError("a run needs no slow tokenizer")
        return load(*names, **given)

    AutoTokenizer.from_pretrained = staticmethod(fast)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = before  # type: ignore[method-assign]


def _load_unsloth(config: Config, stack: Stack, row_length: int, *, continue_adapter: bool) -> Model:
    import unsloth

    loader = getattr(unsloth, config.model.loader or "FastLanguageModel")
    checkpointing = LOADED_AS if config.training.leaves_activations_open else config.training.gradient_checkpointing
    dtype = resolve_dtype(config, stack)
    stored, on_gpu = master_weights.stored_dtype(config, dtype), stack.device != "cpu"
    name = config.model.model_name_or_path
    load = loader.from_pretrained if on_gpu else multimodal.in_unsloths_loader(name)(loader.from_pretrained)
    model, _ = without_slow_tokenizers()(load)(
        model_name=name,
        revision=config.model.revision,
        max_seq_length=row_length,
        dtype=dtype if on_gpu else stored,  # Unsloth's loader for CPUs casts no weights
        load_in_4bit=config.model.load_in_4bit,
        load_in_8bit=config.model.load_in_8bit,
        full_finetuning=config.model.full_finetuning,
        device_map=stack.device_map,
        use_gradient_checkpointing=checkpointing,
        trust_remote_code=config.model.trust_remote_code,
        random_state=config.training.seed,
        **({"float32_mixed_precision": stored != dtype} if on_gpu and config.model.full_finetuning else {}),
        **attention_arguments(config),
        **config.model.loader_kwargs,
    )
    if config.model.full_finetuning or continue_adapter:
        return model
    adapter_targets.check(model, config, adapter_target_modules(config), "unsloth")
    with explain_adapter_error(config):
        model = loader.get_peft_model(
            model,
            use_gradient_checkpointing=checkpointing,
            random_state=adapter_seed(config),
            **adapter_arguments(model, config),
        )
    adapter_targets.check_patterns(model, config)
    return model


def _load_transformers(
    config: Config, stack: Stack, row_length: int, *, continue_adapter: bool, without_weights: bool = False
) -> Any:
    from peft import PeftConfig

    name = str(config.model.model_name_or_path)
    dtype = resolve_dtype(config, stack)
    quantization = quantization_config(quantization_bits(config), dtype)
    base = str(PeftConfig.from_pretrained(name).base_model_name_or_path) if continue_adapter else name
    stored = master_weights.stored_dtype(config, dtype)
    if without_weights:
        model: Any = unit_loading.meta_model(config, stored, attention_arguments(config))
        loaded_weights.note_unused(model, model.unused_tensors, config.model.full_finetuning)
    else:
        model = load_base(
            base,
            revision=None if continue_adapter else config.model.revision,
            dtype=stored,
            quantization=quantization,
            adapter=name if continue_adapter else None,
            device_map={"": "cpu"} if shard.is_requested(config) else stack.device_map,
            trust_remote_code=config.model.trust_remote_code,
            **attention_arguments(config),
        )
    if config.model.full_finetuning:
        return model
    if quantization is not None:
        _prepare_quantized(model)
    if continue_adapter:
        return load_adapter(model, name, is_trainable=True)
    adapter_targets.check(model, config, adapter_target_modules(config), "transformers")
    torch.manual_seed(adapter_seed(config))
    return add_adapter(model, config)


def load_base(name: str, *, revision: str | None = None, quantization: object = None, **arguments: Any) -> Any:
    """The language model of a folder or a name on the Hub, by transformers, with all that it has beside text.

    Args:
        quantization: None leaves the weights as they are in the files, but for experts in MXFP4.
        arguments: of `multimodal.from_pretrained`.
    """
    with loaded_weights.require_all():
        model = multimodal.from_pretrained(
            name,
            revision=revision,
            quantization_config=quantization or dequantization_config(name, revision),
            **arguments,
        )
    keep_4bit_layout(model)
    return model


def _prepare_quantized(model: Any) -> None:
    """Freeze all. Norms and embeddings in float16 become float32, as in PEFT's `prepare_model_for_kbit_training`,
    because hidden states, which take their type, may exceed float16. In bfloat16 they stay, as with TRL and Unsloth: in
    float32 each layer's input would take twice the memory. So do stacked experts, which bitsandbytes leaves in 16 bits
    and which are most of the model. The trainer turns checkpointing on."""
    model.requires_grad_(False)
    stacked = {id(one) for one in expert_targets.stacked_weights(model).values()}
    for one in model.parameters():
        packed = type(one).__name__ == "Params4bit"
        if one.dtype == torch.float16 and not packed and id(one) not in stacked:
            one.data = one.data.float()
