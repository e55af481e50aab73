"""The model and the tokenizer of the constructor's arguments, settled before the rows are tokenized.

The steps and their order are those of TRL's own constructor, which repeats them later without effect: it would do them
after the data has been prepared.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config import Config, rules
from finetune.config.schema import LoraConfig, ModelConfig, TrainingConfig
from finetune.drop_in import settings
from finetune.drop_in.overrides import Overrides
from finetune.drop_in.refusals import Refused
from finetune.engine import job
from finetune.engine.model import adapters, loaded_weights
from finetune.engine.model.tokenizer_loading import set_padding
from finetune.runtime import files
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model, Tokenizer

if TYPE_CHECKING:
    import trl
    from peft import PeftConfig


def load(
    model: Model | str,
    args: trl.SFTConfig,
    stack: Stack,
    quantization_config: object,
    peft_config: PeftConfig | None,
    overrides: Overrides,
) -> tuple[Model, PeftConfig | None]:
    """The model, and the adapter that it still needs. One that is given by name or folder is loaded onto this rank's
    device, with TRL's defaults, or sharded.

    Raises:
        Refused: the quantization is given twice, or the model cannot be sharded.
    """
    peft_config = overrides.adapter(peft_config)
    if overrides.get("training.strategy", None) == "shard" and distributed.ranks().world_size > 1:
        return load_sharded(model, args, stack, quantization_config, peft_config), None
    if not isinstance(model, str):
        return model, peft_config
    from trl.trainer.utils import create_model_from_path

    given = {"trust_remote_code": args.trust_remote_code, **model_arguments(args)}
    if quantization_config is not None and "quantization_config" in given:
        raise Refused("`quantization_config` is given twice: as an argument and in `model_init_kwargs`. Keep one.")
    if quantization_config is not None:
        given["quantization_config"] = quantization_config
    with loaded_weights.require_all(full=peft_config is None):
        loaded: Any = create_model_from_path(model, **{**given, "device_map": stack.device_map})
    return loaded, peft_config


def model_arguments(args: trl.SFTConfig) -> JsonObject:
    """A copy of `model_init_kwargs`."""
    given = args.model_init_kwargs
    return dict(given) if isinstance(given, dict) else {}


def without_effectless(model: Model, peft_config: PeftConfig | None) -> PeftConfig | None:
    """The adapter without the layers that one of a configuration leaves out."""
    given: Any = copy.copy(peft_config)
    if hasattr(given, "exclude_modules"):
        given.exclude_modules = adapters.excluded_modules(model, given.target_modules, given.exclude_modules)
    return given


def load_sharded(
    model: Model | str, args: trl.SFTConfig, stack: Stack, quantization_config: object, peft_config: PeftConfig | None
) -> Model:
    """A model that is given by name or folder, with its adapter, sharded over all ranks as in a run from a
    configuration: no rank ever holds it whole.

    Raises:
        Refused: it is passed as an object, or has what sharding does not support.
    """
    if not isinstance(model, str):
        raise Refused(
            "training.strategy=shard: the script passes a model that each process has loaded whole. Pass its name or "
            "folder to SFTTrainer instead."
        )
    if args.chat_template_path is not None and not _is_template(str(args.chat_template_path)):
        raise Refused(
            "training.strategy=shard: `chat_template_path` is a tokenizer, whose added tokens would resize a model "
            "that is sharded already. Give a .jinja file, or a model that has these tokens."
        )
    init = model_arguments(args)
    dtype = str(init.pop("dtype", init.pop("torch_dtype", None))).removeprefix("torch.")
    computed = "bfloat16" if args.bf16 else "float16" if args.fp16 else dtype if dtype == "bfloat16" else "float32"
    four_bit = bool(getattr(quantization_config, "load_in_4bit", False))
    known = ModelConfig(
        model_name_or_path=model,
        revision=init.pop("revision", None),
        backend="transformers",
        dtype=computed,  # type: ignore[arg-type]
        attn_implementation=init.pop("attn_implementation", None),
        load_in_4bit=four_bit,
        load_in_8bit=bool(getattr(quantization_config, "load_in_8bit", False)),
        full_finetuning=peft_config is None,
        trust_remote_code=args.trust_remote_code,
    )
    if init:
        raise Refused(f"training.strategy=shard does not know these `model_init_kwargs`: {', '.join(sorted(init))}.")
    training = TrainingConfig(
        strategy="shard",
        master_weights="float32",
        seed=args.seed,
        optim=str(getattr(args.optim, "value", args.optim)),
        gradient_checkpointing=False,  # the trainer turns it on
    )
    config = Config(model=known, lora=engine_lora_config(peft_config, model), training=training)
    if found := list(rules.sharding(config, frozenset())):
        raise Refused(" ".join(text for _, text in found))
    plain = dataclasses.replace(stack, backend="transformers", reason="the model is sharded")
    return job.load_model(config, plain, args.max_length or 0)


def engine_lora_config(peft_config: PeftConfig | None, model: str) -> LoraConfig:
    """The settings with which the engine makes the adapter that PEFT would make of `peft_config`.

    Raises:
        Refused: it is no LoRA.
    """
    from peft import LoraConfig as Lora
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from transformers import AutoConfig

    if peft_config is None:
        return LoraConfig()
    if type(peft_config) is not Lora:
        raise Refused("training.strategy=shard: `peft_config` must be a LoraConfig.")
    given = {one.name: getattr(peft_config, one.name) for one in dataclasses.fields(Lora) if one.init}
    plain = {one.name: getattr(Lora(), one.name) for one in dataclasses.fields(Lora) if one.init}
    changed = {name: value for name, value in given.items() if value != plain[name] and name != "task_type"}
    targets = given["target_modules"]
    if targets is None:
        targets = DEFAULTS.get(AutoConfig.from_pretrained(model).model_type)
    changed["target_modules"] = targets  # as an argument of PEFT's: with its meaning for a mixture of experts
    ours = {one.name for one in dataclasses.fields(LoraConfig)} - {"target_modules"}
    return dataclasses.replace(
        settings.adapter(peft_config),
        target_modules=targets if isinstance(targets, str) else sorted(targets or ()),
        adapter_kwargs={name: value for name, value in changed.items() if name not in ours},
    )


def tokenizer(
    given: object, model: Model, args: trl.SFTConfig, peft_config: PeftConfig | None
) -> tuple[Tokenizer, Model, PeftConfig | None]:
    """The tokenizer with its special tokens and chat template, and the model and adapter as these change them.

    Args:
        given: `processing_class`; None loads the model's own. Of a processor for text and images, its tokenizer.

    Raises:
        Refused: it is no tokenizer, or `eos_token` or `pad_token` is not in its vocabulary.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

    if given is None:
        init = model_arguments(args)
        given = AutoTokenizer.from_pretrained(
            model.config._name_or_path, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    found: Any = given
    if isinstance(given, ProcessorMixin):
        found = given.tokenizer  # type: ignore[attr-defined]
        if found.chat_template is None:  # rows of text are rendered by it, as in TRL
            found.chat_template = getattr(given, "chat_template", None)
    if not isinstance(found, PreTrainedTokenizerBase):
        raise TypeError("The `processing_class` must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`")
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name)
        if token is not None and token not in found.get_vocab():
            raise Refused(
                f"`{name}` {token!r} is not found in the vocabulary of the given `processing_class` "
                f"({type(found).__name__}). Use one of its tokens."
            )
        if token is not None:
            setattr(found, name, token)
    if args.chat_template_path is not None:
        model, found, peft_config = _with_template(model, found, str(args.chat_template_path), peft_config)
    return set_padding(found), model, peft_config


def _with_template(
    model: Any, tokenizer: Any, source: str, peft_config: PeftConfig | None
) -> tuple[Model, Tokenizer, PeftConfig | None]:
    """Take over a chat template: of a Jinja file, or with its special tokens of another tokenizer. Added tokens get
    embeddings, which an adapter trains."""
    from trl import clone_chat_template

    if _is_template(source):
        tokenizer.chat_template = files.read_text(Path(source))
        return model, tokenizer, peft_config
    model, tokenizer, added = clone_chat_template(model, tokenizer, source)
    if added and peft_config is not None:
        trained = dict(getattr(peft_config, "trainable_token_indices", None) or {})
        trained["embed_tokens"] = [*trained.get("embed_tokens", []), *added]
        saved = list(getattr(peft_config, "modules_to_save", None) or [])
        saved += [] if "lm_head" in saved else ["lm_head"]
        peft_config = dataclasses.replace(peft_config, trainable_token_indices=trained, modules_to_save=saved)
    return model, tokenizer, peft_config


def _is_template(source: str) -> bool:
    """Whether a `chat_template_path` is a template alone."""
    return Path(source).is_file() and source.endswith((".jinja", ".j2"))


def model_stack(model: object, stack: Stack) -> Stack:
    """The backend of this model: transformers for one that Unsloth has not loaded, even if Unsloth is imported."""
    if stack.backend != "unsloth" or loaded_by_unsloth(model):
        return stack
    reason = "Unsloth is imported, but the model was not loaded with FastLanguageModel or FastModel"
    return dataclasses.replace(stack, backend="transformers", reason=reason)


def loaded_by_unsloth(model: object) -> bool:
    """Whether Unsloth has loaded the model."""
    return hasattr(model, "for_training") or hasattr(model, "save_pretrained_merged")


def loaded_length(model: object) -> int | None:
    """The `max_seq_length` that Unsloth loaded a model with; None for a model that it has not loaded."""
    length = getattr(model, "max_seq_length", None) if loaded_by_unsloth(model) else None
    return length if isinstance(length, int) and length > 0 else None
