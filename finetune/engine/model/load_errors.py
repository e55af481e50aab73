"""Errors of the Hub, transformers, PEFT and torch while a model is loaded, as errors that name the setting."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.config import Config
from finetune.engine.preflight import remote_code
from finetune.errors import RunError, UserError
from finetune.runtime.machine.hardware import out_of_memory_details

# What transformers says if there is no such model, or a folder lacks files.
_LACKING = re.compile("Unrecognized model|not a local folder|Couldn't instantiate|does not appear")


@contextlib.contextmanager
def explain_load_error(name: str | None, what: str) -> Iterator[None]:
    """Turn errors of the Hub and of transformers into UserErrors that say what to do."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        remote_code.explain_refused_code(str(name), what, error)
        _check_files(str(name), what, error)
        full = getattr(error, "errno", None) == 28  # no space left on device: reported by the command
        if full or not isinstance(error, OSError | ValueError | pickle.UnpicklingError):
            raise
        text = str(error)
        if not isinstance(error, OSError) and not _LACKING.search(text):
            raise
        where = "There is no such folder, and the Hub has no such model. "
        if Path(str(name)).is_dir():
            where = "The folder exists but lacks files that transformers needs. "
        elif "couldn't connect" in text.lower():
            where = f"The files could not be fetched from {constants.ENDPOINT}. "
        if constants.HF_HUB_OFFLINE:
            where += "HF_HUB_OFFLINE is set, so only local folders and the cache are searched. "
        raise UserError(
            f"model.model_name_or_path is {name}: its {what} cannot be loaded. {where}"
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
        "transformers has no decoder for it that continues text (AutoModelForCausalLM, AutoModelForMultimodalLM)",
        "Use a decoder-only model: encoders, encoder-decoders and compositions of several models are not supported",
    ),
    "but you are passing a BitsAndBytesConfig": (
        "its weights are quantized already",
        "Set model.load_in_4bit and model.load_in_8bit to false, or use a model with 16-bit weights",
    ),
    "during automatic conversion of the weights": (
        "a weight in its files is incomplete, such as a quantized one without its scales",
        "Copy or download it again",
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
    lacking = isinstance(error, OSError | ImportError) or _LACKING.search(message)
    if what == "tokenizer" and Path(name).is_dir() and not lacking:
        raise UserError(
            f"model.model_name_or_path is {name}: its tokenizer files are damaged ({message[:200]}). Copy or download "
            "them again."
        ) from error


@contextlib.contextmanager
def explain_unknown_argument(config: Config) -> Iterator[None]:
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
def explain_adapter_error(config: Config) -> Iterator[None]:
    """Name the configuration keys if PEFT cannot make the adapter. Unknown arguments have another error
    (`explain_unknown_argument`). Two warnings of PEFT are untrue of stacked experts; `adapter_targets` checks both."""
    try:
        with warnings.catch_warnings():
            for text in ("The following (rank|alpha)_pattern keys did not match", "You have passed exclude_modules"):
                warnings.filterwarnings("ignore", text)
            yield
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError, re.error) as error:
        message = " ".join(str(error).split())
        if any(f"unexpected keyword argument '{name}'" in message for name in config.lora.adapter_kwargs):
            raise
        names = ("target_modules", "target_parameters", "modules_to_save")
        keys = [f"lora.{name}" for name in names if getattr(config.lora, name) is not None]
        keys += ["lora.lora_dropout"] if config.lora.lora_dropout else []
        keys += [f"lora.adapter_kwargs ({', '.join(config.lora.adapter_kwargs)})"] if config.lora.adapter_kwargs else []
        if not keys:
            raise
        raise UserError(
            f"PEFT cannot make the adapter of {', '.join(keys)}: "
            f"{message[:300].rstrip('.') or type(error).__name__}. Change or remove it."
        ) from error


@contextlib.contextmanager
def explain_attention_error(config: Config) -> Iterator[None]:
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
def explain_out_of_memory(doing: str) -> Iterator[None]:
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
