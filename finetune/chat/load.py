"""Loads what a run has trained, as it was trained: quantization and dtype of the base model, adapter, tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.config.schema import ModelConfig
from finetune.engine.checkpoint.run_artifacts import TrainedModel
from finetune.engine.preflight import adapter_files, hub, model_files
from finetune.errors import RunError, UserError
from finetune.runtime import bootstrap
from finetune.runtime.types import JsonObject, Model, Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A trained model, ready to generate.

    base:   the model before training; None if it was not asked for. The same object as `model` if the adapter can be
            switched off.
    description: one sentence on what was loaded
    """

    model: Any
    base: Model | None
    tokenizer: Any
    description: str

    @contextlib.contextmanager
    def as_base(self) -> Iterator[Model]:
        """The base model, for the time of a block."""
        assert self.base is not None
        if self.base is not self.model:
            yield self.base
            return
        with self.model.disable_adapter():
            yield self.model


def load(
    found: TrainedModel,
    *,
    base: str | None = None,
    trust_remote_code: bool = False,
    compare: bool = False,
    backend: str = "auto",
) -> LoadedModel:
    """The model and tokenizer of `found` on this machine's first GPU, or on the CPU.

    Args:
        base: name or folder of the base model, if it is not where the run found it.
        compare: load the base model as well. With an adapter it is the same model, the adapter switched off.
        backend: what generates: "transformers", "unsloth", or "auto", which is Unsloth for an adapter that Unsloth
            trained, on a GPU.

    Raises:
        UserError: the base model is not found, is another one than the adapter was trained on, or files are damaged;
            or Unsloth was asked for and cannot generate with this.
        RunError: the GPU has too little memory.
    """
    name = base or found.base
    if name is None and (found.adapter is not None or compare):
        raise UserError(f"{found.folder} does not record its base model. Name it with --base.")
    if found.adapter is not None or compare:
        _check_base(found, str(name), base is not None)
    stack = bootstrap.start(choose_backend(backend, found, base), "error", setting="--backend")
    import torch

    from finetune.engine.model.adapters import load_adapter
    from finetune.engine.model.load_arguments import quantization_config
    from finetune.engine.model.loading import load_base

    dtype = getattr(torch, found.dtype) if found.dtype else None
    switched = found.adapter is not None and found.adapter.get("bias", "none") in ("none", None)
    common: JsonObject = {"device_map": stack.device_map, "trust_remote_code": trust_remote_code}
    common["dtype"] = dtype or "auto"
    with _loading(found.folder, "tokenizer"):
        tokenizer = _tokenizer(found, name, trust_remote_code)
    revision = None if base else found.revision

    def base_model() -> Any:
        with _loading(Path(str(name)), "base model"):
            quantization = quantization_config(found.bits, dtype or torch.bfloat16)
            adapter = None if found.adapter is None else found.folder
            return load_base(str(name), revision=revision, quantization=quantization, adapter=adapter, **common)

    if stack.backend == "unsloth":
        with _loading(found.folder, "adapter"):
            model = _load_with_unsloth(found, **common | {"dtype": dtype})
    elif found.adapter is not None:
        model = base_model()
        with _loading(found.folder, "adapter"):
            model = load_adapter(model, str(found.folder))
    else:
        with _loading(found.folder, "model"):
            model = load_base(str(found.folder), **common)
    before = None if not compare else model if switched else base_model()
    for one in (model, before):
        if one is not None:
            one.eval()
            one.config.use_cache = True
    kind = f"adapter {found.folder} on {name}" if found.adapter is not None else f"model {found.folder}"
    quantized = f", base in {found.bits} bits" if found.bits and found.adapter is not None else ""
    placed = f"{str(model.dtype).removeprefix('torch.')} on {stack.device}, with {stack.backend}"
    description = f"Loaded the {kind}{quantized}, {placed}"
    return LoadedModel(model=model, base=before, tokenizer=tokenizer, description=description)


def choose_backend(asked: str, found: TrainedModel, base: str | None) -> str:
    """The backend for `bootstrap.start`. Unsloth generates 1.7 times as fast on an H200 (benchmarks/results),
    and loads an adapter only with the base model that the adapter names.

    Raises:
        UserError: Unsloth was asked for and cannot load this.
    """
    if asked == "transformers":
        return asked
    named = found.adapter.get("base_model_name_or_path") if found.adapter else None
    if asked == "unsloth":
        if named is None:
            raise UserError("--backend unsloth only supports adapters. Remove it.")
        if base not in (None, named):
            raise UserError(
                f"--backend is unsloth, which loads the base model that the adapter names ({named}), and --base is "
                f"{base}. Keep one of them."
            )
        return asked
    import torch

    fits = found.record.get("backend") == "unsloth" and named is not None and base in (None, named)
    return "auto" if fits and torch.cuda.is_available() else "transformers"


def _load_with_unsloth(found: TrainedModel, **arguments: Any) -> Model:
    import unsloth

    from finetune.engine import multimodal
    from finetune.engine.model import loaded_weights, positions

    length = found.setting("data.max_length", int) or 2048  # Unsloth extends its tables when a row is longer
    length = min(length, positions.context(found.base or str(found.folder)) or length)  # beyond, it would scale RoPE
    with loaded_weights.require_all(), multimodal.in_unsloths_loader(found.folder):
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            str(found.folder),
            max_seq_length=length,
            load_in_4bit=found.bits == 4,
            load_in_8bit=found.bits == 8,
            **arguments,
        )
    unsloth.FastLanguageModel.for_inference(model)
    return model


def _check_base(found: TrainedModel, name: str, named: bool) -> None:
    """Check that the base model is here, or on a Hub that answers, and that it is the one that was trained.

    Raises:
        UserError: it is not.
    """
    from huggingface_hub import constants

    from finetune.engine.checkpoint import base_weights

    given = f"--base is {name}" if named else f"the base model of {found.folder} is {name}"
    revision = None if named else found.revision
    folder = adapter_files.base_folder(Config(model=ModelConfig(model_name_or_path=name, revision=revision)))
    if folder is None and constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{given}: there is no such folder and no such model in the cache, and HF_HUB_OFFLINE is set. Give its "
            "folder with --base."
        )
    if folder is None:
        hub.check_hub(given)
        return
    if not Path(name).is_dir():
        hub.use_cache_without_network()
    if found.adapter is None or found.base_digest is None:
        return
    try:
        digest = base_weights.weights_digest(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{given}, whose weights cannot be read: {str(error)[:200]}. Copy the model again.") from None
    if digest is not None and digest != found.base_digest:
        raise UserError(
            f"{given}, and its weights are not those that {found.folder} was trained on. Give the folder of the "
            "original model with --base."
        )


def _tokenizer(found: TrainedModel, base: str | None, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer that was saved with the weights; or the base model's, for an adapter that was saved without one."""
    from transformers import AutoTokenizer

    from finetune.engine.model.tokenizer_loading import set_padding

    own = any((found.folder / file).is_file() for file in model_files.TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(
        str(found.folder) if own or base is None else base,
        revision=None if own else found.revision,
        trust_remote_code=trust_remote_code,
    )
    return set_padding(tokenizer)


@contextlib.contextmanager
def _loading(name: Path, what: str) -> Iterator[None]:
    """Turn every error of a library about these files into a sentence: they may be damaged in any way."""
    import torch

    try:
        yield
    except UserError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise RunError(
            f"CUDA ran out of memory while loading the {what} {name}. Free the GPU, or use a larger one."
        ) from (error)
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "Copy it again, or give another folder"
        if "trust_remote_code" in text:
            remedy = "It brings Python code: read that, then give --trust-remote-code"
        raise UserError(f"the {what} cannot be loaded: {name} ({text}). {remedy}.") from error
