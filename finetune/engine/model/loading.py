"""Base model, adapter and tokenizer: load and generate. Independent of the trainer.

Import it after `bootstrap.start`, like everything that uses transformers or peft.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.config import Config
from finetune.config.sft_fields import lora_fields
from finetune.data.packs import MAX_PADDING_SEGMENT
from finetune.data.templates.chat_templates import load_template
from finetune.engine import preflight
from finetune.engine.kernels import attention, fp8, fused_lora, liger
from finetune.engine.model import adapter_targets, generation_config, positions
from finetune.engine.optimizer import master_weights
from finetune.engine.sharding import shard, unit_loading
from finetune.errors import RunError, UserError
from finetune.runtime import files
from finetune.runtime.bootstrap import Stack, errors_only, quiet_ranks
from finetune.runtime.machine import flash
from finetune.runtime.machine.hardware import out_of_memory_details
from finetune.runtime.ranks import distributed

# The attention and MLP projections of the Llama, Qwen, Mistral and Gemma families: Unsloth's default targets.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer, with padding.

    Raises:
        UserError: it is found neither locally nor on the Hub.
    """
    from transformers import AutoTokenizer

    name = config.model.model_name_or_path
    files.check_name(Path(str(name)), "model.model_name_or_path")
    with _model_not_found(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    return with_padding(tokenizer)


def with_padding(tokenizer: Any) -> Any:
    """Give the tokenizer a pad token, if it has a special token for that, and right padding; and return it."""
    if tokenizer.pad_token is None:
        # Padding is masked in attention and labels, so any token will do. But a token of text would become a special
        # one, which is left out of decoded answers.
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        tokenizer.pad_token = tokenizer.eos_token or next(special, None)
    tokenizer.padding_side = "right"
    return tokenizer


def with_template(config: Config, tokenizer: Any) -> Any:
    """Give the tokenizer the chat template of the configuration, so that it is saved with the model; and return it."""
    if config.model.chat_template not in (None, "none"):
        tokenizer.chat_template = load_template(tokenizer, config.model.chat_template)
    return tokenizer


def resolve_dtype(config: Config, stack: Stack) -> torch.dtype:
    """The configured dtype. `auto`: bfloat16 if the GPU supports it, else float16; float32 on a CPU."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)
    if stack.device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def check(config: Config, stack: Stack) -> bool:
    """Whether the model is an adapter to continue training. Loads nothing, so it can run first.

    Raises:
        UserError: it is an adapter but the configuration does not continue one, bitsandbytes is missing, or the
            configuration has arguments that this backend does not accept.
    """
    if stack.backend == "transformers":
        _check_arguments(config, stack)
    adapter = preflight.adapter(config)
    if (folder := preflight.base_folder(config)) is not None:
        generation_config.check(folder)
    if bits := _quantized(config):
        _check_bitsandbytes(bits)
    if config.model.attn_implementation == "flex_attention" and stack.device == "cpu":
        raise UserError(
            "model.attn_implementation is flex_attention, which cannot train on a CPU: torch has no backward pass for"
            " it there. Set it to null, sdpa or eager."
        )
    liger.check(config, stack)
    if config.model.load_in_fp8:
        fp8.check(stack.device, resolve_dtype(config, stack))
    return adapter is not None


def check_by_config(config: Config, stack: Stack) -> None:
    """Check the attention and the adapter on the model's architecture, built without weights, so that a mistake is
    found before loading. Models that cannot be built this way (remote code, several towers, adapters) are left to
    `load`.

    Raises:
        UserError: the model has no such attention, a name matches no module, or PEFT cannot make the adapter.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model, lora = config.model, config.lora
    adapts = not (model.full_finetuning or lora.continue_adapter)
    adapts = adapts and bool(lora.target_modules or lora.modules_to_save or lora.adapter_kwargs)
    if not (adapts or model.attn_implementation) or model.loader or model.loader_kwargs or model.trust_remote_code:
        return
    attention = _attention(config) if stack.backend == "transformers" else {}
    try:
        shape = AutoConfig.from_pretrained(str(model.model_name_or_path), revision=model.revision)
        if shape is not shape.get_text_config():
            return
        with _unusable_attention(config), errors_only(), torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(shape, **attention)
    except UserError:
        raise
    except Exception:  # loading the model reports the error better
        return
    if not adapts:
        return
    adapter_targets.check(skeleton, config, _targets(config), stack.backend)
    if stack.backend == "transformers" and lora.adapter_kwargs:
        with torch.device("meta"), warnings.catch_warnings():  # which loading repeats
            warnings.simplefilter("ignore")
            with_adapter(skeleton, config)


def load(config: Config, stack: Stack, *, row_length: int, hollow: bool = False) -> Any:
    """The model on this rank's device, ready to train: with an adapter unless `full_finetuning`. One that will be
    sharded is on the host.

    Args:
        row_length: tokens of the longest training row; sizes Unsloth's rotary cache.
        hollow: leave out the base model's weights, which `shard_loading.fill` loads later.

    Raises:
        UserError: the model is not found or cannot be quantized here; also everything that `check` raises.
    """
    name = str(config.model.model_name_or_path)
    continued = check(config, stack)
    load_with = _load_unsloth if stack.backend == "unsloth" else functools.partial(_load_transformers, hollow=hollow)
    with (
        _model_not_found(name, "model"),
        _out_of_memory("loading the model"),
        _unknown_argument(config),
        _unusable_attention(config),
        quiet_ranks(),
    ):
        torch.manual_seed(config.training.seed)  # adapters are initialized at random, equally on every rank
        model = load_with(config, stack, row_length, continue_adapter=continued)
        if liger.choose(config, stack, model).kernels == liger.LIGER:
            liger.install(model)
        if config.model.load_in_fp8:
            fp8.convert(model)
        master_weights.widen(model, config.training.master_weights, config.model.full_finetuning)
        if not config.model.full_finetuning:
            fused_lora.install(model)
    bits = _quantized(config)
    if bits and not getattr(model, f"is_loaded_in_{bits}bit", False):
        raise UserError(
            f"model.load_in_{bits}bit is set, but the backend loaded 16-bit weights: this model or device has no "
            f"{bits}-bit kernels (backend {stack.backend}, device {stack.device}). Set it to false."
        )
    model.config.use_cache = False
    return model


def keep_4bit_layout(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU in the first evaluation (defects.md, A12). Training after
    it would go through a kernel without a backward pass."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _quantized(config: Config) -> int | None:
    """Bits of the quantized weights; None without quantization."""
    return 4 if config.model.load_in_4bit else 8 if config.model.load_in_8bit else None


def _adapter_seed(config: Config) -> int:
    return config.training.seed if config.lora.random_state is None else config.lora.random_state


def _load_unsloth(config: Config, stack: Stack, row_length: int, *, continue_adapter: bool) -> Any:
    import unsloth

    loader = getattr(unsloth, config.model.loader or "FastLanguageModel")
    checkpointing = config.training.gradient_checkpointing
    dtype = resolve_dtype(config, stack)
    stored, on_gpu = master_weights.stored_dtype(config, dtype), stack.device != "cpu"
    model, _ = loader.from_pretrained(
        model_name=config.model.model_name_or_path,
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
        **_attention(config),
        **config.model.loader_kwargs,
    )
    if config.model.full_finetuning or continue_adapter:
        return model
    adapter_targets.check(model, config, _targets(config), "unsloth")
    with _refused_adapter(config):
        return loader.get_peft_model(
            model,
            use_gradient_checkpointing=checkpointing,
            random_state=_adapter_seed(config),
            **_adapter_arguments(config),
        )


def _load_transformers(
    config: Config, stack: Stack, row_length: int, *, continue_adapter: bool, hollow: bool = False
) -> Any:
    from peft import PeftConfig, PeftModel, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    name = str(config.model.model_name_or_path)
    dtype = resolve_dtype(config, stack)
    quantization = quantization_config(_quantized(config), dtype)
    base = str(PeftConfig.from_pretrained(name).base_model_name_or_path) if continue_adapter else name
    stored = master_weights.stored_dtype(config, dtype)
    if hollow:
        model = unit_loading.hollow(config, stored, _attention(config))
    else:
        model = AutoModelForCausalLM.from_pretrained(
            base,
            revision=None if continue_adapter else config.model.revision,
            dtype=stored,
            device_map={"": "cpu"} if shard.wanted(config) else stack.device_map,
            quantization_config=quantization,
            trust_remote_code=config.model.trust_remote_code,
            **_attention(config),
        )
    if config.model.full_finetuning:
        return model
    checkpointing = bool(config.training.gradient_checkpointing)
    if quantization is not None:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    elif checkpointing:
        model.enable_input_require_grads()
    if continue_adapter:
        return PeftModel.from_pretrained(model, name, is_trainable=True)
    adapter_targets.check(model, config, _targets(config), "transformers")
    torch.manual_seed(_adapter_seed(config))
    return with_adapter(model, config)


def with_adapter(model: Any, config: Config) -> Any:
    """The model with a new adapter of PEFT."""
    from peft import LoraConfig, get_peft_model

    transposed: dict[str, Any] = {"fan_in_fan_out": True} if adapter_targets.is_transposed(model) else {}
    with _refused_adapter(config):
        return get_peft_model(
            model,
            LoraConfig(task_type="CAUSAL_LM", **(transposed | _adapter_arguments(config))),
        )


def _adapter_arguments(config: Config) -> dict[str, Any]:
    """Arguments of a new adapter, as PEFT and Unsloth name them."""
    lora = config.lora
    names = ("r", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora", "bias")
    return {name: getattr(lora, name) for name in names} | {"target_modules": _targets(config)} | lora.adapter_kwargs


def quantization_config(bits: int | None, dtype: torch.dtype) -> Any:
    """The transformers backend's quantization of frozen weights to 4 or 8 bits; None for None.

    Args:
        dtype: that 4-bit weights are multiplied in.
    """
    from transformers import BitsAndBytesConfig

    if bits == 4:  # NF4 with double quantization: the QLoRA paper, arXiv 2305.14314
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if bits == 8 else None


def _attention(config: Config) -> dict[str, str]:
    chosen = config.model.attn_implementation
    return {} if chosen is None else {"attn_implementation": chosen}


def _targets(config: Config) -> Any:
    chosen = config.lora.target_modules
    if chosen is None and config.model.loader == "FastModel":
        return None  # it selects by its own switches (finetune_language_layers, ...), for models with several towers
    return list(PROJECTIONS) if chosen is None else chosen


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


def _check_bitsandbytes(bits: int) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # importing it loads CUDA libraries, which fails in many ways
        raise UserError(
            f"model.load_in_{bits}bit needs bitsandbytes, which cannot be imported here ({type(error).__name__}: "
            f"{error}). Install it with `pip install bitsandbytes`, or set model.load_in_{bits}bit to false."
        ) from None


# Attention kernels that separate the documents of a packed row, by restarting position ids or by lengths.
_PACKS = ("sdpa", attention.PACKED, "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# Models that Unsloth does not pack: soft-capped attention that it cannot compile this way, and attention sinks.
_UNSLOTH_DOES_NOT_PACK = ("gemma2", "gpt_oss")


def why_not_packed(model: Any, stack: Stack) -> str | None:
    """Why packed documents would attend to each other in this model; None if they do not."""
    config = model.config
    text = config.get_text_config()
    if config is not text:
        return f"{config.model_type} is a multimodal model, whose positions are not a simple count"
    kinds = set(getattr(text, "layer_types", None) or ())
    recurrent = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    names = {type(module).__name__ for module in model.modules()}
    recurrent += sorted(
        name for name in names if any(part in name for part in ("Mamba", "GatedDelta", "Rwkv", "ShortConv"))
    )
    if recurrent:
        return f"{text.model_type} has layers that carry a state from one document to the next ({recurrent[0]})"
    if stack.backend == "unsloth" and text.model_type in _UNSLOTH_DOES_NOT_PACK:
        return f"Unsloth does not separate packed documents in {text.model_type}"
    table = positions.limit(model)
    if table is not None and table < MAX_PADDING_SEGMENT:
        return f"{text.model_type} has a table of {table} positions, fewer than the padding of a pack may take"
    own = str(text._attn_implementation)
    if own not in _PACKS:
        return f"attention {own!r} is not known to separate packed documents"
    forward = type(shard.base_of(model)).forward
    if stack.backend == "transformers" and "position_ids" not in inspect.signature(forward).parameters:
        return f"{text.model_type} takes no position ids, which say where a packed document begins"
    return None


def prepare_for_packs(model: Any, config: Config, stack: Stack) -> str | None:
    """On a GPU, enable variable-length attention over packs, in Unsloth's layers and in transformers' own, which keep
    an attention that the user has set. Every rank calls it.

    Returns:
        Why packed documents would attend to each other all the same; None if they do not.
    """
    if stack.backend == "transformers":
        dtype = resolve_dtype(config, stack)
        if stack.device == "cuda" and config.model.attn_implementation is None:
            attention.use_for_packs(model, dtype)
        if model.config._attn_implementation in (attention.PACKED, "flex_attention"):
            return None  # the first gets the boundaries from the trainer; the second would compile for the trial
        if any(distributed.gather_objects(_attends_across_documents(model, dtype))):
            return f"a packed document attends to the one before it in {model.config.model_type}, which was tried"
        return None
    if stack.device != "cuda":
        return None
    from unsloth.utils.hf_packed_attention import enable_hf_packed_attention
    from unsloth.utils.packing import mark_allow_overlength

    mark_allow_overlength(model)  # several packs form one row, longer than max_seq_length
    enable_hf_packed_attention()
    if config.model.packed_attention != "torch" and flash.is_switch_installed():
        from finetune.runtime.machine import flash_blocks  # its operators take 0.1 s of every start

        flash_blocks.install_switch()
    return None


@torch.no_grad()
def _attends_across_documents(model: Any, dtype: torch.dtype) -> bool:
    """Whether the logits of a packed document change with the document before it. Not every model of transformers
    passes the position ids on to where the mask is made (OPT, Falcon and gpt-oss do not).

    Args:
        dtype: that the run computes in.
    """
    device, vocabulary = next(model.parameters()).device, model.get_input_embeddings().weight.shape[0]
    first, tokens = 8, 20
    ids = torch.arange(tokens, device=device)[None] % vocabulary
    other = torch.cat([(ids[:, :first] + vocabulary // 2) % vocabulary, ids[:, first:]], dim=1)
    places = torch.cat([torch.arange(first), torch.arange(tokens - first)])[None].to(device)
    keep_4bit_layout(model)
    was_training = model.training
    model.eval()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):  # as the trainer calls it
        found, changed = (
            model(input_ids=one, position_ids=places, use_cache=False).logits[0, first:].float() for one in (ids, other)
        )
    model.train(was_training)
    if shard.is_sharded(model):
        shard.reshard(model)
    # Masked positions add nothing, but experts may round differently beside other tokens.
    in_float32 = device.type == "cpu" and dtype == torch.float32  # GPUs may multiply in TF32
    return bool((found - changed).abs().max() > (1e-4 if in_float32 else 0.05) * found.abs().max())


# --- generation -----------------------------------------------------------------------------------------------------


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: Collection[int] = (),
    batch_size: int = 32,
    with_other_ranks: bool = False,
) -> list[tuple[str, bool]]:
    """Greedy completions of tokenized prompts, each as text without special tokens, and whether it came to an end.

    Args:
        prompts: token ids of each prompt, up to the start of the assistant's turn.
        max_new_tokens: per answer; an end token ends it earlier.
        stops: end tokens beside those of the model and the tokenizer.
        with_other_ranks: go on until every rank has finished, as a sharded model needs it.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted({*end_tokens(model, tokenizer), *stops}),
    )
    answers: list[tuple[str, bool]] = []
    with _inference(model), master_weights.autocast(model):
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            found = complete(model, batch, settings, synced_gpus=with_other_ranks)
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            ended = [ids[-1:] and ids[-1] in settings.eos_token_id for ids in found]
            answers += zip(texts, map(bool, ended), strict=True)
    return answers


@torch.no_grad()
def complete(model: Any, prompts: Sequence[Sequence[int]], settings: Any, **further: Any) -> list[list[int]]:
    """The token ids that the model adds to each prompt of a batch, its end token included if it comes to one.

    Prompts are padded on the left, so that each is followed by its own answer; positions count from its first token.
    An answer ends where the model's positions do.

    Args:
        settings: a GenerationConfig with `pad_token_id` and a list of `eos_token_id`.
        further: arguments of transformers' `generate`, such as `streamer`.

    Raises:
        UserError: a prompt has as many tokens as the model has positions.
    """
    device = next(model.parameters()).device
    width = max(len(ids) for ids in prompts)
    room = positions.room(model, width)
    if room is not None:
        # Alone, a prompt leaves room for its own answer; a sharded model generates as often on every rank.
        if len(prompts) > 1 and (room < settings.max_new_tokens or further.get("synced_gpus")):
            return [ids for one in prompts for ids in complete(model, [one], settings, **further)]
        settings = copy.copy(settings)
        settings.max_new_tokens = min(settings.max_new_tokens, room)
    pad = settings.pad_token_id or 0  # masked, so any token will do
    padded = [[pad] * (width - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    output = model.generate(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=settings,
        **further,
    )
    ends = set(settings.eos_token_id)
    added = []
    for ids in output[:, width:].tolist():  # an answer that ended before others of its batch is padded
        last = next((place for place, token in enumerate(ids) if token in ends or token == settings.pad_token_id), None)
        added.append(ids if last is None else ids[: last + (ids[last] in ends)])
    return added


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The end tokens in the model's generation config and the tokenizer's own."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


@contextlib.contextmanager
def _inference(model: Any) -> Iterator[None]:
    """Unsloth's generation mode if the model has one, else eval mode; restores the previous mode."""
    was_training = model.training
    if hasattr(model, "for_inference"):
        model.for_inference()
    else:
        model.eval()
    try:
        yield
    finally:
        if hasattr(model, "for_training"):
            model.for_training(use_gradient_checkpointing=getattr(model, "_unsloth_gradient_checkpointing", True))
        model.train(was_training)


# --- errors ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _model_not_found(name: str | None, what: str) -> Iterator[None]:
    """Turn errors of the Hub and of transformers into UserErrors that say what to do."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        preflight.check_refused(str(name), what, error)
        _check_files(str(name), what, error)
        if not isinstance(error, OSError | ValueError | pickle.UnpicklingError):
            raise
        if isinstance(error, OSError) and error.errno == 28:  # no space left on device: reported by the command
            raise
        text = str(error)
        if not isinstance(error, OSError) and not any(
            sign in text
            for sign in ("Unrecognized model", "not a local folder", "Couldn't instantiate", "does not appear")
        ):
            raise
        offline = (
            "HF_HUB_OFFLINE is set, so only local folders and the cache are searched. "
            if constants.HF_HUB_OFFLINE
            else ""
        )
        where = "There is no such folder, and the Hub has no such model. "
        if Path(str(name)).is_dir():
            where = "The folder exists but lacks files that transformers needs. "
        elif "couldn't connect" in text.lower():
            where = f"The files could not be fetched from {constants.ENDPOINT}. "
        raise UserError(
            f"model.model_name_or_path is {name}: its {what} cannot be loaded. {where}{offline}"
            f"Check the spelling, download it first with `hf download {name}`, or give a folder. "
            f"(The library reports: {text.splitlines()[0][:200]})"
        ) from error


# Part of transformers' error about existing files -> what is wrong, and what to do.
_WRONG_FILES = {
    "does not recognize this architecture": (
        "its config.json names an architecture that the installed transformers does not have",
        "Update transformers, or use another model",
    ),
    "Unrecognized configuration class": (
        "it is not a causal language model",
        "Use a model that generates text",
    ),
    "Validation error for field": ("its config.json is not valid", "Copy or download it again"),
    "ignore_mismatched_sizes": (
        "its weights do not have the shapes in its config.json",
        "Copy or download it again",
    ),
}


def _check_files(name: str, what: str, error: Exception) -> None:
    """Raise a UserError if loading failed because of invalid model files; ignore other errors."""
    message = " ".join(str(error).split())
    for sign, (why, remedy) in _WRONG_FILES.items():
        if sign in message:
            raise UserError(f"model.model_name_or_path is {name}: {why} ({message[:200]}). {remedy}.") from error
    if what == "tokenizer" and Path(name).is_dir() and not isinstance(error, OSError | ValueError | ImportError):
        raise UserError(
            f"model.model_name_or_path is {name}: its tokenizer files are damaged ({message[:200]}). Copy or download "
            "them again."
        ) from error


def check_vocabulary(model: Any, tokenizer: Any, ledger: Mapping[str, Any], split: str) -> None:
    """Check that every token id has a row in the model's embedding. Otherwise CUDA fails with an unspecific assertion,
    and a CPU with an IndexError.

    Args:
        ledger: of the rows, `Data.ledgers`.

    Raises:
        UserError: the tokenizer's vocabulary, or a token id of the user's own, is larger than the model's.
    """
    count, largest = model.get_input_embeddings().weight.shape[0], ledger["largest"]
    if largest["id"] < count:
        return
    found = f"{largest['where']} ({split}) has the token id {largest['id']}, and the model's embedding has {count} rows"
    if tokenizer.convert_ids_to_tokens(largest["id"]) is None:
        raise UserError(f"{found}. Correct the row: its ids must be those of the model's tokenizer.")
    raise UserError(
        f"The tokenizer does not fit the model: {found}. Use the tokenizer that belongs to the model, or resize the "
        "embedding (`model.resize_token_embeddings`) and save the model first."
    )


@contextlib.contextmanager
def _unknown_argument(config: Config) -> Iterator[None]:
    """Name the configuration key of an argument that a library rejects. Libraries pass unknown arguments on, so the
    error comes from deep inside."""
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        keys = {"model.loader_kwargs": config.model.loader_kwargs, "lora.adapter_kwargs": config.lora.adapter_kwargs}
        key = next((key for key, given in keys.items() if found and found[1] in given), None)
        if key is None or found is None:
            raise
        raise UserError(
            f"{key} has `{found[1]}`, which no loader of this model accepts ({error}). Check its spelling, or "
            "remove it."
        ) from error


@contextlib.contextmanager
def _refused_adapter(config: Config) -> Iterator[None]:
    """Name the configuration keys if PEFT cannot make the adapter. An argument that is unknown has an error of its own
    (`_unknown_argument`)."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError, re.error) as error:
        message = " ".join(str(error).split())
        if any(f"unexpected keyword argument '{name}'" in message for name in config.lora.adapter_kwargs):
            raise
        given = {"target_modules": config.lora.target_modules, "modules_to_save": config.lora.modules_to_save}
        keys = [f"lora.{key}" for key, value in given.items() if value is not None]
        keys += [f"lora.adapter_kwargs ({', '.join(config.lora.adapter_kwargs)})"] if config.lora.adapter_kwargs else []
        if not keys:
            raise
        raise UserError(
            f"PEFT cannot make the adapter of {', '.join(keys)}: "
            f"{message[:300].rstrip('.') or type(error).__name__}. Change or remove it."
        ) from error


@contextlib.contextmanager
def _unusable_attention(config: Config) -> Iterator[None]:
    """Name the configuration key if the model or this installation lacks the attention implementation."""
    try:
        yield
    except (ImportError, ValueError) as error:
        chosen = config.model.attn_implementation
        message = " ".join(str(error).split())
        named = isinstance(error, ImportError) or any(sign in message for sign in ("attn_implementation", "ttention"))
        if chosen is None or not named:
            raise
        raise UserError(
            f"model.attn_implementation is {chosen}, which this model or this installation does not have. Set it to "
            f"null, or to eager. (The library reports: {message[:200]})"
        ) from error


@contextlib.contextmanager
def _out_of_memory(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch's allocator of the host's memory
            raise RunError(
                f"The host's memory is too small for {doing}. A smaller model or a lower lora.r needs less. "
                f"(torch reports: {' '.join(str(error).split())[:200]})"
            ) from error
        if not isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise RunError(
            f"CUDA ran out of memory while {doing}. A smaller model, or model.load_in_4bit: true, needs less; "
            "training.strategy: shard splits 16-bit weights over several GPUs. "
            f"({out_of_memory_details(error)})"
        ) from error
