"""Checks of the model settings before any weight is loaded."""

from __future__ import annotations

import warnings

import torch

from finetune.config import Config
from finetune.config.sft_fields import lora_fields
from finetune.engine import multimodal
from finetune.engine.kernels import fp8, liger
from finetune.engine.model import adapter_targets, generation_config
from finetune.engine.model.adapters import adapter_target_modules, add_adapter
from finetune.engine.model.load_arguments import attention_arguments, quantization_bits, resolve_dtype
from finetune.engine.model.load_errors import explain_attention_error
from finetune.engine.preflight import adapter_files
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack, errors_only


def check(config: Config, stack: Stack) -> bool:
    """Whether the model is an adapter to continue training. Loads nothing, so it can run first.

    Raises:
        UserError: it is an adapter but the configuration does not continue one, bitsandbytes is missing, or the
            configuration has arguments that this backend does not accept.
    """
    if stack.backend == "transformers":
        _check_arguments(config, stack)
    adapter = adapter_files.adapter(config)
    if (folder := adapter_files.base_folder(config)) is not None:
        generation_config.check(folder)
    if bits := quantization_bits(config):
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # importing it loads CUDA libraries, which fails in many ways
            raise UserError(
                f"model.load_in_{bits}bit needs bitsandbytes, which cannot be imported here ({type(error).__name__}: "
                f"{error}). Install it with `pip install bitsandbytes`, or set model.load_in_{bits}bit to false."
            ) from None
    if config.model.attn_implementation == "flex_attention" and stack.device == "cpu":
        raise UserError(
            "model.attn_implementation is flex_attention, which cannot train on a CPU: torch has no backward pass for"
            " it there. Set it to null, sdpa or eager."
        )
    liger.check(config, stack)
    if config.model.load_in_fp8:
        fp8.check(stack.device, resolve_dtype(config, stack))
    return adapter is not None


def check_on_meta_model(config: Config, stack: Stack) -> None:
    """Check the attention and the adapter on the model's architecture, built without weights, so that a mistake is
    found before loading. Models that cannot be built this way (remote code, adapters) are left to `load`.

    Raises:
        UserError: the model has no such attention, a name matches no module, or PEFT cannot make the adapter.
    """
    from transformers import AutoConfig

    model, lora = config.model, config.lora
    adapts = not (model.full_finetuning or lora.continue_adapter)
    named = lora.target_modules or lora.target_parameters or lora.modules_to_save
    adapts = adapts and bool(named or lora.adapter_kwargs or lora.lora_dropout)
    if not (adapts or model.attn_implementation) or model.loader or model.loader_kwargs or model.trust_remote_code:
        return
    attention = attention_arguments(config) if stack.backend == "transformers" else {}
    try:
        shape = AutoConfig.from_pretrained(str(model.model_name_or_path), revision=model.revision)
        with explain_attention_error(config), errors_only(), torch.device("meta"):
            skeleton = multimodal.auto_class(shape).from_config(shape, **attention)
    except UserError:
        raise
    except Exception:  # loading the model reports the error better
        return
    if not adapts:
        return
    adapter_targets.check(skeleton, config, adapter_target_modules(config), stack.backend)
    if stack.backend == "transformers" and lora.adapter_kwargs:
        with torch.device("meta"), warnings.catch_warnings():  # which loading repeats
            warnings.simplefilter("ignore")
            add_adapter(skeleton, config)


def _check_arguments(config: Config, stack: Stack) -> None:
    """Refuse arguments for Unsloth's classes on the transformers backend."""
    for key, value in (("loader", config.model.loader), ("loader_kwargs", config.model.loader_kwargs)):
        if value:
            raise UserError(
                f"model.{key} is {value}, which is for Unsloth's classes, but the backend is transformers "
                f"({stack.reason}). Remove it, or run on a machine that Unsloth supports."
            )
    for name in config.lora.adapter_kwargs:
        if name not in lora_fields():
            raise UserError(
                f"lora.adapter_kwargs has `{name}`, which PEFT's LoraConfig does not accept, and the backend is "
                f"transformers ({stack.reason}). Remove it, or run on a machine that Unsloth supports."
            )
