"""What both sides of the witness run on: a tiny model and tokenizer, and generated rows in place of downloads.

The witness sends this file's source into the sandbox, where both sides execute it. It imports nothing of this project.
The libraries are the installed ones; only what reads from the hub, from files or from a GPU is replaced.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import traceback
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from unittest.mock import MagicMock

Values: TypeAlias = dict[str, Any]  # by name: arguments, columns of a row, or the parts of a report

ROWS = 120
SPECIAL = (
    "<|pad|> <|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|begin_of_text|> <|end_of_text|> <|start_header_id|>"
    " <|end_header_id|> <start_of_turn> <end_of_turn> <bos> <eos> <s> </s> <unk> <|user|> <|assistant|> <|system|>"
    " <|end|> <|im_sep|> <think> </think> <pad> [PAD] <|finetune_right_pad_id|> <|reserved_special_token_0|>"
    " <|reserved_special_token_1|> <|vision_pad|> <|image_pad|> <|PAD_TOKEN|> <mask> <|eom_id|> <|separator|>"
).split()
WORDS = "the cat runs é over 漢字 a 'quoted' hill, and 😀 sees {seven} green birds: that\nsing while rain falls".split(
    " "
)
FRAME = """You are Qwen, created by Alibaba Cloud. You are a helpful assistant.

Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
### Input:
### Response:
system
user
assistant
model
Question: Answer: [INST] [/INST]"""
VOCABULARY = 652
CONVERSATIONS = frozenset("messages conversations conversation conversations_raw chat dialogue dialog convo".split())
NUMBERS = frozenset("id idx index label labels score rating length len year".split())
OPTIONAL = frozenset("input context system".split())  # empty in some rows

record: Values = {}  # what the program under test passed to loaders and adapters


class Blocker(importlib.abc.MetaPathFinder):
    """Makes modules and everything below them unimportable."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(name == blocked or name.startswith(f"{blocked}.") for blocked in self.names):
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)


class From(importlib.abc.MetaPathFinder):
    """Finds packages in a folder that itself cannot be listed."""

    def __init__(self, folder: str, *names: str) -> None:
        self.folder, self.names = folder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        package = os.path.join(self.folder, name)
        return importlib.util.spec_from_file_location(
            name, os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )


class Missing(MagicMock):
    """Anything of a package that is not installed here. As text it is the same on both sides."""

    __version__ = "0"

    def __repr__(self) -> str:
        return "<not installed>"


def missing_package(name: str) -> object:
    """A package that is not installed; rows can be divided as by scikit-learn's."""
    found = Missing()
    if name.partition(".")[0] == "sklearn":
        found.train_test_split = found.model_selection.train_test_split = divided
    # Secrets of Colab and Kaggle, which become environment variables.
    found.get = found.userdata.get = found.UserSecretsClient.return_value.get_secret = lambda *_, **__: "none"
    return found


def divided(*tables: Any, test_size: Any = None, random_state: Any = None, **named: Any) -> list[Any]:
    """Each table as two, of the same rows."""
    import numpy

    length = len(tables[0])
    size = named.get("train_size")
    if test_size is None and size is not None:
        test_size = 1 - size if isinstance(size, float) else length - size
    test_size = share(0.25 if test_size is None else test_size, length)
    held = round(test_size * length) if isinstance(test_size, float) else test_size
    order = list(range(length))
    if named.get("shuffle", True):
        order = [int(i) for i in numpy.random.RandomState(random_state or 0).permutation(length)]
    return [_chosen(table, part) for table in tables for part in (order[held:], order[:held])]


def _chosen(table: Any, part: list[int]) -> Any:
    if hasattr(table, "iloc"):
        return table.iloc[part]
    if hasattr(table, "select"):
        return table.select(part)
    return [table[i] for i in part] if isinstance(table, list | tuple) else table[part]


def missing_variable(error: BaseException | None) -> str | None:
    """The environment variable that a program read and that is not set."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, KeyError) and frames and frames[-1].filename in (os.__file__, "<frozen os>"):
            return str(error.args[0])
        error = error.__cause__
    return None


def seed() -> None:
    """Both sides draw the same at random: the script sets a seed where the notebook has none."""
    import random

    import numpy
    import transformers

    random.seed(0)
    numpy.random.seed(0)
    transformers.set_seed = lambda *_, **__: None


def environment(here: str) -> dict[str, str]:
    """What libraries read when they are imported."""
    return dict(
        CUDA_VISIBLE_DEVICES="", UNSLOTH_DISABLE_STATISTICS="1", HF_HUB_DISABLE_TELEMETRY="1", WANDB_MODE="disabled",
        UNSLOTH_COMPILE_LOCATION=os.path.join(here, "compiled"), TOKENIZERS_PARALLELISM="false",
        HF_DATASETS_CACHE=os.path.join(here, "datasets"), MPLBACKEND="Agg", OMP_NUM_THREADS="1",
    )  # fmt: skip


def prepare(unsloth: bool, *, template: bool = True) -> None:
    """Import the libraries, Unsloth first if the program uses it, and replace what loads.

    `template`: whether the tokenizer has a chat template.
    """
    here = os.getcwd()
    os.environ.update(environment(here))
    if unsloth:
        importlib.import_module("unsloth")
    import datasets

    _save_tiny(os.path.join(here, "tiny"), template)
    _replace_models(os.path.join(here, "tiny"))
    if unsloth:
        _replace_unsloth()
    _replace_adapters()
    _replace_data()
    _replace_trackers()
    seed()
    datasets.disable_progress_bars()


# --- model and tokenizer ----------------------------------------------------------------------------------------------


def _save_tiny(folder: str, has_template: bool) -> None:
    """A byte-level BPE tokenizer with Qwen's chat template, and the configuration of a Llama. Most words of the rows
    are one token, so that rows are not much longer than real ones.

    The template marks the assistant's turns. For one without marks, TRL would take its own variant, whose marks differ
    from the package's on purpose (docs/data.md).
    """
    import tokenizers
    import trl
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 12, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([f"{' '.join(WORDS)} {FRAME}"] * 2, trainer)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<s>", unk_token="<unk>"
    )
    template = os.path.join(os.path.dirname(trl.__file__), "chat_templates", "qwen2_5_training.jinja")
    if has_template:
        with open(template, encoding="utf-8") as stream:
            tokenizer.chat_template = stream.read()
    tokenizer.save_pretrained(folder)
    settings: Values = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    LlamaConfig(**settings).save_pretrained(folder)


def tiny_model(recipe: Values) -> Any:
    """A new one, with random weights. `recipe`: what `loading` returns."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained("tiny")
    config._name_or_path = recipe["model"] or config._name_or_path
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config)
    model.recipe = record["recipe"] = recipe
    model.loaded = _state(model)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = (recipe["bits per frozen weight"] == n for n in (4, 8))
    model.generate = _generate
    model.print_trainable_parameters = lambda *_: None
    model.get_nb_trainable_parameters = lambda *_: (1, 1)
    return model


def _state(model: Any) -> Values:
    """Configuration and weights: what a program may change in place. Numbers of special tokens, which the package sets
    from the tokenizer, and the cache do not count."""
    config = {key: _jsonable(value) for key, value in model.config.to_dict().items() if key not in OF_TRAINER}
    return {"config": config, "weights": {name: _sample(weight) for name, weight in model.named_parameters()}}


def _sample(weight: Any) -> list[float]:
    """Its size, its sum, and some of its numbers."""
    numbers = weight.detach().double().flatten()
    return [float(len(numbers)), float(numbers.abs().sum()), *map(float, numbers[:: max(1, len(numbers) // 16)])]


def _changed(one: list[float] | None, two: list[float]) -> bool:
    """Whether a weight is another one, beyond the rounding of a shorter type."""
    return one is None or len(one) != len(two) or not all(map(_close, one, two, (0, 1e-3, *[1e-2] * len(two))))


def _close(one: float, two: float, part: float) -> bool:
    return abs(one - two) <= part * max(abs(one), abs(two))


OF_TRAINER = frozenset(
    "use_cache pad_token_id eos_token_id bos_token_id torch_dtype dtype vocab_size pretraining_tp _name_or_path"
    " architectures transformers_version quantization_config unsloth_fixed unsloth_version max_seq_length".split()
)


def checkpoint(given: object) -> object:
    """What training resumes from."""
    return given if isinstance(given, bool) else str(given) if given else None


def freeze(model: object) -> None:
    """As an adapter does with its base model."""
    for weight in getattr(model, "parameters", list)():
        weight.requires_grad_(False)


def _generate(inputs: object = None, **named: object) -> object:
    """What a model that answers nothing generates: the prompt."""
    import torch

    for given in (inputs, named.get("input_ids"), named.get("inputs_embeds")):
        if isinstance(given, torch.Tensor):
            return given
    return torch.zeros((1, 1), dtype=torch.long)


today = False  # whether the program must work with the installed releases; a notebook may need older ones
# Arguments of a model's loader that transformers 5 has no more.
FORMER = frozenset("use_auth_token load_in_4bit load_in_8bit resume_download use_flash_attention_2".split())
_TOKENIZER_ARGUMENTS = ("padding_side", "truncation_side", "eos_token", "pad_token", "bos_token", "unk_token")


def _replace_models(folder: str) -> None:
    transformers: Any = importlib.import_module("transformers")
    from transformers.models.auto import auto_factory

    load_tokenizer = transformers.AutoTokenizer.from_pretrained
    load_config = transformers.AutoConfig.from_pretrained

    def tokenizer(pretrained_model_name_or_path: object = None, *_: object, **given: object) -> Any:
        name = pretrained_model_name_or_path
        if isinstance(name, str) and os.path.isdir(name):
            return load_tokenizer(name, **given)
        found = load_tokenizer(folder, **{key: given[key] for key in given if key in _TOKENIZER_ARGUMENTS})
        found.name_or_path = str(name)
        kept = {key: _jsonable(given[key]) for key in sorted(given) if key not in _OF_MACHINE}
        record.setdefault("tokenizers", {}).setdefault(found.name_or_path, kept)
        return found

    def config(*_: object, return_unused_kwargs: bool = False, **rest: object) -> Any:
        return (load_config(folder), rest) if return_unused_kwargs else load_config(folder)

    def model(pretrained_model_name_or_path: object = None, *_: object, **given: object) -> Any:
        if today and (former := sorted(FORMER & given.keys())):
            raise TypeError(f"from_pretrained() got an unexpected keyword argument {former[0]!r}")
        with_report = given.pop("output_loading_info", False)  # the package asks for it
        found = tiny_model(loading(pretrained_model_name_or_path, given))
        return (found, {"missing_keys": set(), "unexpected_keys": set()}) if with_report else found

    transformers.AutoTokenizer.from_pretrained = staticmethod(tokenizer)
    transformers.AutoProcessor.from_pretrained = staticmethod(tokenizer)
    transformers.AutoConfig.from_pretrained = staticmethod(config)
    modeling = importlib.import_module("transformers.models.auto.modeling_auto")
    for kind in [auto_factory._BaseAutoModelClass, *vars(modeling).values()]:
        if isinstance(kind, type) and issubclass(kind, auto_factory._BaseAutoModelClass):
            kind.from_pretrained = staticmethod(model)
    transformers.PreTrainedModel.from_pretrained = classmethod(lambda cls, *given, **named: model(*given, **named))
    base = transformers.PreTrainedTokenizerBase
    original = base.from_pretrained.__func__

    def any_class(cls: object, name: object = None, *rest: object, **given: object) -> object:
        if isinstance(name, str) and os.path.isdir(name):
            return original(cls, name, *rest, **given)
        return tokenizer(name, **given)

    base.from_pretrained = classmethod(any_class)
    _no_gpu()
    _no_accounts()


def _no_accounts() -> None:
    """Logins do nothing, and the variables of their tokens are set."""
    for name in ("HF_TOKEN", "HUGGINGFACE_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        os.environ[name] = "none"
    import huggingface_hub

    library: Any = huggingface_hub
    for name in ("login", "notebook_login", "interpreter_login", "whoami", "create_repo"):
        setattr(library, name, lambda *_, **__: {"name": "none"})
    library.HfApi = lambda *_, **__: account()
    # A path in no folder, for which rows are generated when it is read.
    library.hf_hub_download = lambda repo_id="", filename="", *_, **__: f"{repo_id}/{filename}"
    library.snapshot_download = lambda repo_id="", *_, **__: str(repo_id)


def _replace_trackers() -> None:
    """Callbacks that report to a tracker can be created without its package."""
    from transformers.integrations import integration_utils

    for kind in vars(integration_utils).values():
        if (
            isinstance(kind, type)
            and kind.__name__.endswith("Callback")
            and kind.__module__ == integration_utils.__name__
        ):
            kind.__init__ = lambda self, *_, **__: None  # type: ignore[misc]


def account() -> object:
    """The hub's client, for a user whose name is the same on both sides."""
    found = Missing()
    found.whoami = lambda *_, **__: {"name": "none"}
    return found


def _no_gpu() -> None:
    """Moves to a GPU do nothing; its properties are an A100's."""
    import torch
    import transformers

    torch.cuda.get_device_capability = lambda *_, **__: (8, 0)
    torch.cuda.get_device_name = lambda *_, **__: "NVIDIA A100-SXM4-40GB"
    torch.cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(
        name="NVIDIA A100-SXM4-40GB", total_memory=40 * 2**30, major=8, minor=0, multi_processor_count=108
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.mem_get_info = lambda *_, **__: (38 * 2**30, 40 * 2**30)
    torch.cuda.memory_summary = lambda *_, **__: ""
    for name in ("allocated", "reserved"):
        setattr(torch.cuda, f"memory_{name}", lambda *_, **__: 0)
        setattr(torch.cuda, f"max_memory_{name}", lambda *_, **__: 0)
    for name in dir(torch.cuda):
        if name.startswith("reset_") or name == "synchronize":
            setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.is_bf16_supported = lambda *_, **__: True

    move = torch.nn.Module.to

    def cast(dtype: str) -> Callable[..., object]:
        def called(self: Any) -> object:
            recipe = getattr(self, "recipe", None)
            return getattr(torch.nn.Module, f"_{dtype}")(self) if recipe is None else _is_cast(self, dtype)

        return called

    for name, dtype in (("half", "float16"), ("float", "float32"), ("double", "float64"), ("bfloat16", "bfloat16")):
        setattr(torch.nn.Module, f"_{dtype}", getattr(torch.nn.Module, name))
        setattr(torch.nn.Module, name, cast(dtype))

    def to(self: Any, *given: Any, **named: Any) -> Any:
        dtypes = [value for value in (*given, *named.values()) if isinstance(value, torch.dtype)]
        if dtypes and hasattr(self, "recipe"):
            return _is_cast(self, dtypes[0])
        try:
            return move(self, *given, **named)
        except (AssertionError, RuntimeError):
            return self

    def encoding_to(self: object, *_: object, **__: object) -> Any:
        return self

    torch.nn.Module.to = to
    torch.Tensor.cuda = lambda self, *_, **__: self
    transformers.BatchEncoding.to = encoding_to
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _is_cast(model: Any, dtype: object) -> object:
    """The whole model is cast; its tiny one stays as it is, for a CPU."""
    model.recipe["dtype"] = _dtype(dtype)
    return model


def _replace_unsloth() -> None:
    import unsloth
    from unsloth_zoo.cpu import trainer

    trainer.normalize_cpu_training_arguments = lambda args, *_, **__: args  # keep what training on a GPU would use
    package: Any = unsloth
    loads = _defaults_on_gpu("loader.py", "from_pretrained")
    sources = {"FastLanguageModel": "llama.py", "FastModel": "vision.py", "FastVisionModel": "vision.py"}
    for name, source in sources.items():  # one class for all of them on a CPU
        if hasattr(unsloth, name):
            adapts = _defaults_on_gpu(source, "get_peft_model")
            setattr(package, name, type(name, (getattr(unsloth, name),), _unsloth_methods(loads, adapts)))
    package.unsloth_save_model = getattr(package, "unsloth_save_model", Missing())
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"):  # of GPUs only; FastLanguageModel chooses
        setattr(package, f"Fast{family}Model", unsloth.FastLanguageModel)


def _unsloth_methods(loads: Values, adapts: Values) -> Values:
    """What one of Unsloth's classes is asked for. `loads`, `adapts`: defaults of its two methods, in their order."""

    def from_pretrained(*given: Any, **named: Any) -> Any:
        import transformers

        values = loads | dict(zip(loads, given, strict=False)) | named
        model = tiny_model(loading(values["model_name"], values))
        model.max_seq_length = values["max_seq_length"]
        model.for_training = lambda *_, **__: model  # by which a trainer knows a model of Unsloth's
        return model, transformers.AutoTokenizer.from_pretrained(values["model_name"])

    def get_peft_model(model: object, *given: object, **named: object) -> object:
        values = adapts | dict(zip(adapts, given, strict=False)) | named
        record["lora"] = adapter(values)
        return model

    def unchanged(model: object = None, *_: object, **__: object) -> object:
        return model

    methods = {"from_pretrained": from_pretrained, "get_peft_model": get_peft_model}
    methods |= {"for_inference": unchanged, "for_training": unchanged}
    return {name: staticmethod(method) for name, method in methods.items()}


# What both sides must agree on beside the trainer's arguments.
MODEL = ("model", "revision", "dtype", "attn_implementation", "trust_remote_code", "bits per frozen weight",
         "tokenizer", "end token", "tokens", "rows of the embedding", "frozen parameters", "other arguments",
         "configuration", "changed weights", "trained besides the adapter", "own functions", "checkpoint")  # fmt: skip


def loading(name: object, given: Values) -> Values:
    """What a loader is asked for."""
    former = "flash_attention_2" if given.get("use_flash_attention_2") else None
    kept = {key: _jsonable(given[key]) for key in sorted(given) if key in _NEUTRAL - _OF_MACHINE}
    record["loader"] = kept | {"quantization": quantization(given)}
    return {
        "model": None if name is None else str(name),
        "revision": given.get("revision"),
        "dtype": _dtype(given.get("dtype") or given.get("torch_dtype")),
        "attn_implementation": given.get("attn_implementation") or former,
        "trust_remote_code": bool(given.get("trust_remote_code")),
        "bits per frozen weight": bits(given),
        "other arguments": {key: _jsonable(given[key]) for key in sorted(given) if key not in _COMPARED_OR_NEUTRAL},
    }


# Arguments of a loader that change no number of the training, or next to none.
_NEUTRAL = frozenset(
    "full_finetuning use_cache low_cpu_mem_usage cache_dir return_dict use_safetensors local_files_only offload_folder"
    " offload_state_dict force_download use_gradient_checkpointing random_state offload_embedding"
    " tokenizer_name load_in_fp8 float8_kv_cache fast_inference gpu_memory_utilization disable_log_stats max_lora_rank"
    " unsloth_tiled_mlp use_exact_model_name".split()
)
# What the script may choose in another way.
_OF_MACHINE = frozenset("device_map max_memory token use_auth_token resume_download low_cpu_mem_usage".split())
_COMPARED_OR_NEUTRAL = (
    _NEUTRAL
    | _OF_MACHINE
    | frozenset(
        "model_name pretrained_model_name_or_path revision dtype torch_dtype attn_implementation"
        " use_flash_attention_2 trust_remote_code quantization_config load_in_4bit load_in_8bit load_in_16bit"
        " max_seq_length".split()
    )
)
_QUANTIZATION = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "float32",
                 "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None}  # fmt: skip


def quantization(given: Values) -> Values:
    """How a loader with these arguments quantizes, with bitsandbytes's defaults."""
    config = given.get("quantization_config")
    values = config if isinstance(config, dict) else vars(config) if config is not None else {}
    return {
        name: _dtype(value) if name.endswith("dtype") else _jsonable(value)
        for name, value in ((name, values.get(name, default)) for name, default in _QUANTIZATION.items())
    }


def _dtype(value: object) -> str | None:
    name = str(value).removeprefix("torch.")
    return None if name in ("None", "auto") else {"half": "float16", "float": "float32"}.get(name, name)


def model_settings(model: Any, tokenizer: Any, unsloth: bool) -> Values:
    """What is loaded, and what is left to train of it."""
    found = dict(getattr(model, "recipe", record.get("recipe") or loading(None, {})))
    # As the package does on a GPU like this one: `fp16=True` alone loads a transformers model in that type.
    found["dtype"] = found["dtype"] or ("float16" if record.get("fp16") and not unsloth else "bfloat16")
    found["tokenizer"] = str(getattr(tokenizer, "name_or_path", None))
    found |= {"end token": str(getattr(tokenizer, "eos_token", None)), "tokens": len(tokenizer)}
    found["rows of the embedding"] = int(model.get_input_embeddings().weight.shape[0])
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    adapted = record.get("lora") is not None
    found["frozen parameters"] = [] if adapted else frozen  # an adapter freezes the rest itself
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    found["trained besides the adapter"] = trained if adapted and record.get("frozen") else []
    loaded, now = getattr(model, "loaded", None), _state(model)
    loaded = loaded or now
    found["configuration"] = {key: value for key, value in now["config"].items() if loaded["config"].get(key) != value}
    found["changed weights"] = [
        name for name, one in now["weights"].items() if _changed(loaded["weights"].get(name), one)
    ]
    found["own functions"], found["checkpoint"] = record.get("own functions", []), record.get("checkpoint")
    found.setdefault("other arguments", {})
    return {name: found[name] for name in MODEL}


def bits(given: Values) -> int:
    """Bits per weight in which a loader with these arguments holds the base model; 16 stands for unquantized."""
    quantization = given.get("quantization_config")
    if quantization is not None:
        given = quantization if isinstance(quantization, dict) else vars(quantization)
        four, eight = (given.get(f"load_in_{n}bit", given.get(f"_load_in_{n}bit")) for n in (4, 8))
        return 4 if four else 8 if eight else 16
    if given.get("full_finetuning") or given.get("load_in_16bit"):
        return 16
    return 8 if given.get("load_in_8bit") else 4 if given.get("load_in_4bit") else 16


def _defaults_on_gpu(source: str, function: str) -> Values:
    """Defaults of a function's parameters, in their order, in one of Unsloth's modules for GPUs, which cannot be
    imported without one."""
    import unsloth

    with open(os.path.join(os.path.dirname(unsloth.__file__ or ""), "models", source), encoding="utf-8") as stream:
        tree = ast.parse(stream.read())
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: Values = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function and node.args.defaults:
            names = [one.arg for one in node.args.args][-len(node.args.defaults) :]
            for name, value in zip(names, node.args.defaults, strict=True):
                value = constants.get(value.id, value) if isinstance(value, ast.Name) else value
                found.setdefault(name, _literal(value))
    return found


def _literal(value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except ValueError:  # computed from the device
        return None


def _replace_adapters() -> None:
    import peft
    import peft.mapping_func
    import trl.trainer.sft_trainer as sft

    def get_peft_model(model: Any, peft_config: object = None, *_: object, **named: object) -> object:
        record_adapter(peft_config or named.get("peft_config"), model)
        if getattr(model, "adapted", False):  # PEFT puts it inside of the other one, and trains both
            record.setdefault("adapter", {})["over another"] = True
        model.adapted = True
        return model

    def unchanged(model: object, *given: object, **named: object) -> object:
        if by_program(1):
            record["prepared for k-bit training"] = shown([given, named])
        return model

    peft.get_peft_model = peft.mapping_func.get_peft_model = sft.get_peft_model = get_peft_model
    peft.prepare_model_for_kbit_training = unchanged
    peft.prepare_model_for_int8_training = unchanged  # pyright: ignore[reportAttributeAccessIssue]  (its former name)


def record_adapter(config: Any, model: object) -> None:
    """The adapter of a LoraConfig, on this model."""
    if config is not None:
        record["lora"] = adapter(config.to_dict())
        freeze(model)
        record["frozen"] = hasattr(model, "parameters")


# Arguments of LoraConfig that change what is trained, and those that Unsloth adds. `random_state` is Unsloth's alone.
ADAPTER = (
    "peft_type r lora_alpha lora_dropout target_modules exclude_modules bias use_rslora use_dora modules_to_save"
    " init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern trainable_token_indices"
    " target_parameters lora_bias layer_replication fan_in_fan_out random_state finetune_vision_layers"
    " finetune_language_layers finetune_attention_modules finetune_mlp_modules"
).split()
_MORE_OF_ADAPTER = "use_gradient_checkpointing loftq_config task_type inference_mode max_seq_length".split()


def adapter(values: Values) -> Values:
    """The adapter, JSON-safe."""
    found = {name: _jsonable(values.get(name)) for name in ADAPTER}
    for name in ("target_modules", "modules_to_save", "exclude_modules"):
        if isinstance(chosen := found[name], list):
            found[name] = sorted(chosen, key=str)
    record["adapter"] = {name: _jsonable(values.get(name)) for name in _MORE_OF_ADAPTER}
    weights = True if found["init_lora_weights"] is None else found["init_lora_weights"]
    found["peft_type"] = str(found["peft_type"] or "LORA").rpartition(".")[2]
    rest = {"lora_dropout": float(found["lora_dropout"] or 0), "use_rslora": bool(found["use_rslora"])}
    return found | rest | {"init_lora_weights": weights}


def _jsonable(value: object) -> Any:
    if isinstance(value, set | frozenset | list | tuple | range):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# --- rows -------------------------------------------------------------------------------------------------------------

# Name -> text, number, messages (role and content), sharegpt (from and value), json (messages as text), choice:a|b,
# text:a|b (two of three texts have these words in them), number:3 (below 3), object:a|b (texts by these keys)
columns: dict[str, str] = {}


empty = False  # whether some values of every column of text are empty
asked: list[Any] = []  # what rows were generated for


def _text(column: str, row: int, source: str, part: int = 0) -> str:
    """Deterministic text: short and long, with unusual characters, empty in some rows of optional columns."""
    if column.lower() in OPTIONAL and row % 3 == 1 or empty and (row + len(column) + part) % 5 == 1:
        return ""
    start = sum(map(ord, column)) + 7 * row + 3 * part
    long = part < 2 and (row + sum(map(ord, column)) + 7 * part) % 15 == 5  # other rows for other columns and turns
    count = 700 // (1 + row // 30) if long else 2 + (start * 5) % 17
    return f"{column} {row}{source} " + " ".join(WORDS[(start + i * (1 + row % 3)) % len(WORDS)] for i in range(count))


def _with_words(text: str, words: list[str]) -> str:
    """The text with these in it, each followed by some of its words."""
    parts = text.split(" ")
    for place, word in zip(range(2, 2 + 2 * len(words), 2), words, strict=True):
        parts.insert(place, f"\n{word}")  # on a line of its own, where its tokens are those of the word alone
    return " ".join(parts) if text else text


def _value(column: str, kind: str, row: int, source: str) -> object:
    kind, _, more = kind.partition(":")
    if kind == "number":
        return row % int(more or ROWS)
    if kind == "text":
        return _with_words(_text(column, row, source), more.split("|") if row % 3 < 2 else [])
    if kind == "object":
        return {key: _text(f"{column} {key}", row, source) for key in more.split("|")}
    if kind == "choice":
        options = more.split("|")
        return options[row % len(options)]
    if kind == "json":
        return json.dumps(_value(column, "messages", row, source))
    who, what, names = (
        ("role", "content", ("user", "assistant")) if kind == "messages" else ("from", "value", ("human", "gpt"))
    )
    turns = 2 * (1 + row % 3)
    return [{who: names[turn % 2], what: _text(column, row, source, turn)} for turn in range(turns)]


def rows(count: int = ROWS, source: object = None) -> list[Values]:
    """Rows with the columns that are known so far. `source`: what was asked for; rows of two sources differ."""
    asked.append(source)
    chosen = columns or {"row_number": "number"}
    place = re.sub(r"//[^/@]*@", "//", repr(source))  # a script has no password of the notebook's
    tag = "" if source is None else f" {zlib.crc32(place.encode()) % 9973}"
    return [{name: _value(name, kind, row, tag) for name, kind in chosen.items()} for row in range(count)]


SPLITS = ("train", "test", "validation", "train_sft", "test_sft")
FEWEST = 20  # a smaller part of so few rows says nothing about that part of a real data set


def _replace_data() -> None:
    import datasets

    def load(*given: object, split: object = None, **named: object) -> object:
        source = [*given[:2], *(named.get(key) for key in ("name", "data_files", "data_dir", "path", "revision"))]
        if split is None:
            return datasets.DatasetDict({name: part(source, name) for name in SPLITS})
        if isinstance(split, list | tuple):
            return [part(source, one) for one in split]
        return part(source, split)

    def part(source: object, split: object) -> Any:
        """One split, or the part of it that is named."""
        try:
            instructions = datasets.ReadInstruction.from_spec(str(split)).to_absolute(dict.fromkeys(SPLITS, ROWS))
            # "train[:9000]" is less of a larger data set than "train".
            whole = all(one.to - one.from_ == ROWS for one in instructions)
            names = [str(split) if whole else one.splitname for one in instructions]
            parts = [
                rows(ROWS, (source, name))[one.from_ : one.to] for name, one in zip(names, instructions, strict=True)
            ]
        except (ValueError, AssertionError, KeyError):  # more rows than there are, or another split
            parts = []
        found = [row for some in parts for row in some]
        return datasets.Dataset.from_list(found if len(found) >= FEWEST else rows(ROWS, (source, str(split))))

    def saved(load_saved: Any) -> Any:
        def from_disk(path: Any = None, *given: Any, **named: Any) -> object:
            path = named.pop("dataset_path", path)
            if os.path.isdir(str(path)):  # the program has written it
                return load_saved(path, *given, **named)
            return load(str(path), split="train")

        return from_disk

    def file(read: Any) -> Any:
        def from_file(path: Any = None, *given: Any, **named: Any) -> object:
            path = named.pop("path_or_paths", path)
            if isinstance(path, str | os.PathLike) and os.path.isfile(path):
                return read(path, *given, **named)
            return load(str(path), split="train")

        return from_file

    read_files = datasets.load_dataset

    def load_or_read(*given: Any, **named: Any) -> object:
        """Files that the program has written are read."""
        files = named.get("data_files")
        paths = files.values() if isinstance(files, dict) else files if isinstance(files, list | tuple) else [files]
        paths = [path for path in paths if isinstance(path, str | os.PathLike)]
        if files and len(paths) and all(map(os.path.isfile, paths)):
            return read_files(*given, **(named | {"num_proc": None}))
        return load(*given, **named)

    datasets.load_dataset = load_or_read
    datasets.load_from_disk = saved(datasets.load_from_disk)
    datasets.Dataset.load_from_disk = staticmethod(saved(datasets.Dataset.load_from_disk))
    for name in ("from_json", "from_csv", "from_parquet", "from_text"):
        setattr(datasets.Dataset, name, staticmethod(file(getattr(datasets.Dataset, name))))
    _tolerate_sizes(datasets.Dataset)
    _replace_pandas()
    _replace_open()


def _tolerate_sizes(dataset: Any) -> None:
    """Selections and splits for larger data sets work on this one, and another size is another selection; nothing
    starts processes."""
    select, split, shuffle = dataset.select, dataset.train_test_split, dataset.shuffle
    apply, keep = dataset.map, dataset.filter

    def selected(self: Any, indices: Any, *given: object, **named: object) -> object:
        found = [int(getattr(one, "as_py", lambda one=one: one)()) for one in indices]
        return select(self, places(found, len(self)), *given, **named)

    def divided(self: Any, test_size: Any = None, train_size: object = None, **named: Any) -> Any:
        named["seed"] = named.get("seed") or 0  # drawn anew by each side otherwise
        sizes = {"test_size": test_size, "train_size": train_size}
        fitting = {key: share(size, len(self)) for key, size in sizes.items()}
        if all(isinstance(size, int) and size > 1 for size in sizes.values()):
            fitting["train_size"] = None
        return split(self, **fitting, **named)

    def shuffled(
        self: object, seed: object = None, *given: object, buffer_size: object = None, **named: object
    ) -> object:
        return shuffle(self, seed or 0, *given, **named)

    def alone(method: Callable[..., Any]) -> Callable[..., object]:
        def called(self: Any, *given: Any, **named: Any) -> object:
            return method(self, *given, **(named | {"num_proc": None}))

        return called

    dataset.select, dataset.train_test_split, dataset.shuffle = selected, divided, shuffled
    dataset.map, dataset.filter = alone(apply), alone(keep)
    for name in STEPS:
        setattr(dataset, name, noted(name, getattr(dataset, name)))


STEPS = (
    "map filter select shuffle sort train_test_split rename_column rename_columns remove_columns select_columns"
    " cast_column add_column shard take skip"
).split()


def noted(name: str, method: Callable[..., Any]) -> Callable[..., object]:
    """A method of a data set whose result knows the steps that made it. A step that changes none of the generated rows
    may change real ones."""

    def called(self: Any, *given: Any, **named: Any) -> object:
        found = method(self, *given, **named)
        kept = {key: value for key, value in named.items() if key not in _OF_CACHE}
        steps = [*getattr(self, "steps", ()), f"{name} {shown(given)} {shown(kept)}"]
        if isinstance(found, dict):
            for key, part in found.items():
                part.steps = [*steps, key]
        else:
            found.steps = steps
        return found

    return called


_OF_CACHE = frozenset("num_proc desc load_from_cache_file keep_in_memory writer_batch_size cache_file_name".split())


def shown(value: object) -> str:
    """A value as text that is the same on both sides. A function is its constants and its names, whether they are
    global, as in a notebook, or of the function around it."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return f"<{' '.join(sorted(_words(function.__code__)))}>"
    if isinstance(value, functools.partial):
        return shown([value.func, value.args, value.keywords])
    if isinstance(value, dict):
        return shown(sorted((str(key), shown(one)) for key, one in value.items()))
    if isinstance(value, list | tuple):
        return str(zlib.crc32(repr(value).encode())) if len(value) > 50 else f"[{', '.join(map(shown, value))}]"
    if isinstance(value, str):
        return repr(" ".join(value.split()))
    return repr(value) if value is None or isinstance(value, int | float | range) else type(value).__name__


def _words(code: Any) -> set[str]:
    """Names and constants of a function and of those inside it."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for one in code.co_consts:
        found |= _words(one) if isinstance(one, types.CodeType) else {shown(one)}
    return found


def places(indices: list[int], length: int) -> list[int]:
    """Rows for indices of a larger data set: those that exist, less some of the last, whose number depends on how many
    were asked for; the remainders if none exists."""
    inside = [i for i in indices if -length <= i < length]
    if not inside:
        return list(dict.fromkeys(i % length for i in indices))[:FEWEST] if length else []
    cut = len(indices) % 11 if len(inside) < len(indices) and len(inside) >= 2 * FEWEST else 0
    return inside[: len(inside) - cut]


def share(size: object, length: int) -> Any:
    """A number of rows of a larger data set, as a share of this one: between 5 % and 15 %, not the same for all."""
    if not isinstance(size, int) or isinstance(size, bool) or size <= length // 4:
        return size
    return 0.05 + size % 97 / 970


# --- files ------------------------------------------------------------------------------------------------------------

by_line = False  # whether the program reads JSON line by line, whatever its file is called
files: dict[str, str] = {}  # in the folder of the sandbox, by the name that was asked for


HERE = os.getcwd()


def by_program(depth: int) -> bool:
    """Whether the function so many frames up was called by the program under test."""
    frame: Any = sys._getframe(depth + 1)
    while os.path.basename(frame.f_code.co_filename) in ("pathlib.py", "contextlib.py"):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(("<cell", HERE))


def _replace_open() -> None:
    """A file of rows that the program under test opens and that does not exist is generated; one that it writes
    where it may not is written into the folder of the sandbox."""
    really, here = io.open, os.getcwd()

    def open(file: Any, mode: str = "r", *given: Any, **named: Any) -> object:
        try:
            return really(files.get(file, file) if isinstance(file, str) else file, mode, *given, **named)
        except (FileNotFoundError, PermissionError):
            if not isinstance(file, str | os.PathLike) or not by_program(1):
                raise
            if not (other := _elsewhere(os.fspath(file), mode)):
                raise
        return really(other, mode, *given, **named)

    def folder(make: Callable[..., object]) -> Callable[..., None]:
        def called(path: Any, *given: Any, **named: Any) -> None:
            outside = not os.path.abspath(os.fsdecode(path)).startswith(here)
            with contextlib.suppress(PermissionError, *([FileNotFoundError] if outside else [])):
                make(path, *given, **named)

        return called

    builtins.open = io.open = open  # type: ignore[assignment]
    os.makedirs, os.mkdir = folder(os.makedirs), folder(os.mkdir)


def _elsewhere(name: object, mode: str) -> str | None:
    """A file in the folder of the sandbox for one that cannot be opened: to write, or with generated rows to read."""
    if mode[0] == "r":
        return _generated(name)
    return _placed(name, "") if isinstance(name, str) else None


def _placed(name: str, kind: str) -> str:
    files[name] = os.path.join(os.environ["HF_DATASETS_CACHE"] + "-files", f"{len(files)}{kind}")
    os.makedirs(os.path.dirname(files[name]), exist_ok=True)
    return files[name]


def _generated(name: Any) -> str | None:
    """A file with rows in the format of its name; None for another format."""
    kind = os.path.splitext(name)[1].lower() if isinstance(name, str) else ""
    if kind not in (".json", ".jsonl", ".csv", ".tsv"):
        return None
    with io.FileIO(_placed(name, kind), "w") as stream:
        stream.write(_written(rows(ROWS, name), kind).encode())
    return files[name]


def _written(found: list[Values], kind: str) -> str:
    import pandas

    if kind == ".json" and not by_line:
        return json.dumps(found)
    if kind in (".json", ".jsonl"):
        return "".join(json.dumps(row) + "\n" for row in found)
    return pandas.DataFrame(found).to_csv(index=False, sep="," if kind == ".csv" else "\t")


def _replace_pandas() -> None:
    import pandas

    def frame(read: Callable[..., Any]) -> Callable[..., object]:
        def called(*given: Any, **named: Any) -> object:
            source = given[0] if given else named.get("filepath_or_buffer", named.get("path_or_buf", named.get("path")))
            source = "" if source is None else source
            if not isinstance(source, str | os.PathLike) or os.path.isfile(source):
                return read(*given, **named)
            return _as_asked(pandas.DataFrame(rows(ROWS, str(source))), named)

        return called

    for name in ("csv", "json", "parquet", "excel", "table", "pickle", "feather"):
        setattr(pandas, f"read_{name}", frame(getattr(pandas, f"read_{name}")))
    _tolerate_samples(pandas.DataFrame)


def _as_asked(table: Any, named: Values) -> object:
    """With the columns that the reader was asked for by name."""
    for key in ("usecols", "columns"):
        if isinstance(chosen := named.get(key), list) and all(isinstance(name, str) for name in chosen):
            table = table[chosen]
    names = named.get("names")
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        if missing := [name for name in names if name not in columns]:
            raise KeyError(missing[0])
        table = table[list(names)]
    return table.head(named["nrows"]) if isinstance(named.get("nrows"), int) else table


def _tolerate_samples(table: Any) -> None:
    """Samples of more rows than there are, and without a seed."""
    sample = table.sample

    def sampled(self: Any, n: object = None, frac: object = None, replace: object = False, **named: object) -> object:
        named["random_state"] = 0 if named.get("random_state") is None else named["random_state"]
        if isinstance(n, int) and n > len(self) and not replace:
            n = len(self) - n % 11 if len(self) > FEWEST else len(self)
        return sample(self, n, frac, replace, **named)

    table.sample = sampled


# --- training arguments -----------------------------------------------------------------------------------------------

# What depends on the machine, or on where results go.
PRECISION = ("fp16", "bf16", "tf32", "half_precision_backend", "fp16_full_eval", "bf16_full_eval", "fp16_opt_level")
ELSEWHERE = (*PRECISION, "report_to", "push_to_hub", "deepspeed", "fsdp", "fsdp_config", "use_cpu", "torch_compile",
             "dataset_num_proc", "dataloader_num_workers", "padding_free", "dataloader_pin_memory")  # fmt: skip


def replace_configs(unsloth: bool, renamed: Mapping[str, str] | None = None) -> None:
    """Training arguments can be built without a GPU, with Unsloth's defaults if the program uses it.

    `renamed`: current names of former arguments; arguments that do not exist any more are then dropped.
    """
    import transformers
    import trl

    known = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    own = {key: value for key, value in unsloth_defaults().items() if key in known} if unsloth else {}
    _replace_config(transformers.TrainingArguments, {}, renamed)
    _replace_config(trl.SFTConfig, own, renamed)


def unsloth_defaults() -> Values:
    """The defaults of Unsloth's SFTConfig on a GPU, read from its generator, which does not run on a CPU."""
    import unsloth

    path = os.path.join(os.path.dirname(unsloth.__file__ or ""), "models", "rl.py")
    with open(path, encoding="utf-8") as stream:
        tree = ast.parse(stream.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            with contextlib.suppress(ValueError):
                values = ast.literal_eval(node.value)
                if {"per_device_train_batch_size", "optim", "seed"} <= set(values):
                    return values | {"warmup_steps": 0.1}  # set below that dictionary, for transformers 5
    raise LookupError("the defaults of Unsloth's SFTConfig are not where they were")


def _replace_config(kind: Any, defaults: Values, renamed: Mapping[str, str] | None) -> None:
    build = kind.__init__
    names = list(inspect.signature(build).parameters)[1:]
    parameters = set(names)

    @functools.wraps(build)  # its signature, which a program may read
    def init(self: Any, *positional: object, **given: Any) -> None:
        has_length = given.get("max_seq_length") is not None
        if renamed is not None:
            given = {renamed.get(key, key): value for key, value in given.items()}
            if (share := given.pop("warmup_ratio", None)) and not given.get("warmup_steps"):
                given["warmup_steps"] = float(share)  # below 1, it is a share of the steps
            if given.pop("group_by_length", False) and not given.get("packing"):  # packs have one length
                given["train_sampling_strategy"] = "group_by_length"
            given = {key: value for key, value in given.items() if key in parameters}
        if "fp16" in given:
            record["fp16"] = bool(given["fp16"] or record.get("fp16"))  # a copy is made without it
        asked = dict(zip(names, positional, strict=False)) | given
        for name in FORCED:
            if (value := _jsonable(asked.get(name))) not in (None, False, "trainer_output", *record.get(name, ())):
                record.setdefault(name, []).append(value)
        values = {key: value for key, value in (defaults | given).items() if key not in ELSEWHERE}
        values["output_dir"] = "trainer_output"  # the notebook's may be a folder that cannot be made here
        values["load_best_model_at_end"] = False
        build(self, **dict(zip(names, positional, strict=False)) | values, use_cpu=True, report_to="none")
        self._has_length = has_length

    init.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]  # a notebook may ask for it
    kind.__init__ = init


SETTINGS = (
    "learning_rate num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay optim"
    " max_grad_norm seed adam_beta1 adam_beta2 adam_epsilon neftune_noise_alpha label_smoothing_factor loss_type"
    " optim_args optim_target_modules"
).split()


# Arguments that both sides build with the same value; what the program asked for is recorded.
FORCED = ("output_dir", "load_best_model_at_end")
# Arguments that change no number of the training itself.
ARGUMENTS = (
    "logging_steps logging_strategy logging_first_step eval_strategy eval_steps eval_delay eval_on_start"
    " save_strategy save_steps save_total_limit save_only_model"
    " metric_for_best_model greater_is_better gradient_checkpointing gradient_checkpointing_kwargs"
    " completion_only_loss assistant_only_loss packing_strategy eos_token pad_token remove_unused_columns"
    " train_sampling_strategy shuffle_dataset truncation_mode dataset_kwargs chat_template_path pad_to_multiple_of"
    " run_name"
).split()
_OF_TRAINER = ("steps of the rows", "held-out rows", "callbacks", "formatting_func")
GIVEN = (*ARGUMENTS, "rows per step", *FORCED, *_OF_TRAINER, "prepared for k-bit training", "tokenizer's arguments",
         "loader's arguments", "adapter's arguments")  # fmt: skip


def arguments(args: Any) -> Values:
    """The other training arguments, JSON-safe. The package's trainer may be given the batch as such."""
    batch = record.get("batch") or args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {name: _plain(getattr(args, name, None)) for name in ARGUMENTS} | {"rows per step": batch}


def own_functions(given: Mapping[str, object]) -> list[str]:
    """Arguments of the trainer that replace a part of the training."""
    values = {name: given.get(name) for name in ("optimizers", "optimizer_cls_and_kwargs", "compute_loss_func")}
    return [name for name, value in values.items() if value is not None and value != (None, None)]


def record_trainer(given: Mapping[str, Any]) -> None:
    """What a program gives to its trainer, beside the training arguments."""
    held = given.get("eval_dataset")
    record["steps of the rows"] = getattr(given.get("train_dataset"), "steps", [])
    record["held-out rows"] = (
        {str(k): _held_out(v) for k, v in held.items()} if isinstance(held, dict) else _held_out(held)
    )
    called = [one if isinstance(one, type) else type(one) for one in given.get("callbacks") or ()]
    record["callbacks"] = [one.__name__ for one in called]
    record["formatting_func"] = shown(given.get("formatting_func"))


def _held_out(table: Any) -> object:
    if not hasattr(table, "column_names"):
        return None if table is None else type(table).__name__
    text = json.dumps(table[:], default=str)
    return [len(table), zlib.crc32(text.encode()), *getattr(table, "steps", ())]


def given(values: Values, tokenizer: object) -> Values:
    """What the program gave to loaders and its trainer that no row and no number shows. `values`: by `arguments`."""
    if record.get("held-out rows") is None:
        values = values | {name: None for name in values if name.startswith("eval_")}
    more = {name: record.get(name) for name in (*FORCED, *_OF_TRAINER, "prepared for k-bit training")}
    loaded = record.get("tokenizers", {}).get(str(getattr(tokenizer, "name_or_path", None)))
    more |= {"tokenizer's arguments": loaded, "loader's arguments": record.get("loader")}
    return values | more | {"adapter's arguments": record.get("adapter")}


def settings(args: Any) -> Values:
    """The resolved training arguments that both sides must agree on, JSON-safe."""
    found = {name: _plain(getattr(args, name, None)) for name in SETTINGS}
    if not found["warmup_steps"] and getattr(args, "warmup_ratio", None):
        found["warmup_steps"] = args.warmup_ratio
    if found["max_steps"] and found["max_steps"] > 0:
        found["num_train_epochs"] = None
    if not found["lr_scheduler_kwargs"]:
        found["lr_scheduler_kwargs"] = None
    if found["loss_type"] == "chunked_nll":  # the same loss, with less memory
        found["loss_type"] = "nll"
    found["global batch"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return found


def _plain(value: object) -> Any:
    value = _jsonable(getattr(value, "value", value))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def row(ids: Any, labels: Any) -> list[list[int]] | None:
    """Token ids and labels; None without a supervised token. The first label is never predicted."""
    ids, labels = [int(i) for i in ids], [-100, *(int(i) for i in labels[1:])]
    return [ids, labels] if any(label != -100 for label in labels) else None


class Stop(BaseException):
    """The program has reached `train()`."""
