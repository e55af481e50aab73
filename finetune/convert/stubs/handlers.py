"""The calls that mean more than a record: those that make a training, seeds, configuration objects, paths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .state import ENVIRONMENT, RUN, Leave, event
from .symbols import Path, Symbol, attribute, call, form, holds_symbol, is_placeholder, plain, words

# `AutoModelForCausalLM`, or the class of an architecture.
_MODELS = re.compile(r"AutoModel|\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def _load(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`X.from_pretrained`: the first model and its tokenizer get their roles; all others are ordinary symbols."""
    owner = (function._name or "").split(".")[-2]
    root = (function._name or "").split(".")[0]
    again = RUN.model is None or not any(item["kind"] in ("adapt", "trainer") for item in RUN.events)
    if root == "unsloth" and owner.startswith("Fast") and again:
        RUN.model, RUN.tokenizer = Symbol(["model"], "model"), Symbol(["tokenizer"], "tokenizer")
        event("load", [owner, values(args), values(kwargs)], f"{owner}.from_pretrained", api="unsloth")
        return RUN.model, RUN.tokenizer
    if root == "transformers" and _MODELS.match(owner) and again:
        RUN.model = Symbol(["model"], "model")
        event("load", [owner, values(args), values(kwargs)], f"{owner}.from_pretrained", api="transformers")
        return RUN.model
    if root == "transformers" and owner in ("AutoTokenizer", "AutoProcessor") and RUN.tokenizer is None:
        RUN.tokenizer = Symbol(["tokenizer"], "tokenizer")
        event("load_tokenizer", [values(args), values(kwargs)], f"{owner}.from_pretrained")
        return RUN.tokenizer
    return NotImplemented


def _adapt(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (args and args[0] is RUN.model) or kwargs.get("model") is RUN.model:
        event(
            "adapt",
            [function._name, values(args[1:]), values({k: v for k, v in kwargs.items() if k != "model"})],
            "get_peft_model",
        )
        return RUN.model
    return NotImplemented


def _trainer(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not (function._name or "").startswith(("trl.", "unsloth.")):
        return NotImplemented
    names = ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(given.get("model"), str) and not holds_symbol(given["model"]):
        _load_by_name(given)
    RUN.trainer = Symbol(["trainer"], "trainer")
    if given.get("formatting_func") is not None:
        for key in ("train_dataset", "eval_dataset"):
            given[key] = _formatted(given.get(key), given["formatting_func"])
    for name in ("processing_class", "tokenizer"):
        if isinstance(given.get(name), Symbol):
            RUN.trainer._known["processing_class"] = RUN.trainer._known["tokenizer"] = given[name]
    if "tokenizer" in given:
        given.setdefault("processing_class", given["tokenizer"])
    event("trainer", values(given), function._name or "", forms={key: form(value) for key, value in given.items()})
    for key in ("train_dataset", "eval_dataset"):
        event("dataset", [key, form(given.get(key))], words(given.get(key)))
    for callback in given.get("callbacks") or ():
        call(attribute(RUN.trainer, "add_callback"), (callback,), {})
    return RUN.trainer


def _load_by_name(given: dict[str, Any]) -> None:
    """The trainer loads the model itself, and the tokenizer if it is not given one."""
    made = given["args"].__dict__.get("_made_by") if isinstance(given.get("args"), Symbol) else None
    arguments = made[2] | given["args"].__dict__.get("_set", {}) if made else {}
    how = dict(given.get("model_init_kwargs") or arguments.get("model_init_kwargs") or {})  # older TRL: the trainer's
    if given.get("quantization_config") is not None:
        how["quantization_config"] = given["quantization_config"]
    how.setdefault("trust_remote_code", arguments.get("trust_remote_code", False))
    RUN.model = Symbol(["model"], "model")
    if RUN.tokenizer is None:
        RUN.tokenizer = Symbol(["tokenizer"], "tokenizer")
    event("load", ["SFTTrainer", values((given["model"],)), values(how)], "SFTTrainer(model=...)", api="transformers")


def _formatted(dataset: Any, function: Any) -> Any:
    """The data with the column `text` made by `formatting_func`, which is batched if it returns a list."""
    if not isinstance(dataset, Symbol):
        return dataset
    RUN.inside.add(id(function))
    try:
        made = function(Symbol(["argument", 0], "argument 0"))
    finally:
        RUN.inside.discard(id(function))
    scope = {"f": function, "__builtins__": {}}
    if isinstance(made, list):
        convert = eval(compile("lambda rows: {'text': f(rows)}", "notebook", "eval"), scope)
        given = {"batched": True, "remove_columns": attribute(dataset, "column_names")}
        return call(attribute(dataset, "map"), (convert,), given)
    convert = eval(compile("lambda row: {'text': f(row)}", "notebook", "eval"), scope)
    return call(attribute(dataset, "map"), (convert,), {})


def _responses(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trainer = args[0] if args else kwargs.get("trainer")
    if trainer is not RUN.trainer:
        return NotImplemented
    names = ("trainer", "instruction_part", "response_part", "force_match", "tokenizer", "return_function", "num_proc")
    given = dict(zip(names, args, strict=False)) | kwargs
    given.pop("trainer", None)
    event("responses", values(given), "train_on_responses_only")
    return trainer


def _chat_format(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """TRL's former `setup_chat_format(model, tokenizer)` returns both."""
    given = dict(zip(("model", "tokenizer", "format", "resize_to_multiple_of"), args, strict=False)) | kwargs
    model, tokenizer = given.pop("model", None), given.pop("tokenizer", None)
    if model is not RUN.model or not isinstance(tokenizer, Symbol):
        return NotImplemented
    event("chat_format", values(given), "setup_chat_format")
    return model, tokenizer


def _same_model(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`FastLanguageModel.for_inference(model)` returns the model."""
    return RUN.model if args and args[0] is RUN.model else NotImplemented


def _prepared(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and args[0] is RUN.model:
        event("kbit", values(kwargs), "prepare_model_for_kbit_training")
        return args[0]
    return NotImplemented


def leave(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Leave


_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)


def _get_environment(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    key = plain(args[0]) if args else ""
    default = args[1] if len(args) > 1 else kwargs.get("default", kwargs.get("d"))
    if (function._name or "").endswith("setdefault"):
        if key not in ENVIRONMENT:
            ENVIRONMENT[key] = default
        event("env", [key, form(default)], f"os.environ.setdefault({key!r})")
    elif key not in ENVIRONMENT and default is None and _SECRET.search(str(key)):
        return NotImplemented  # whether a token is set is only known at run time
    elif key not in ENVIRONMENT:
        event("asked", [key, None if default is None else plain(default)], f"os.getenv({key!r})")
    return ENVIRONMENT.get(key, default)


def _update_environment(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for key, value in {**(args[0] if args and isinstance(args[0], dict) else {}), **kwargs}.items():
        ENVIRONMENT[key] = value
        event("env", [key, form(value)], f"os.environ[{key!r}]")


def _shuffle(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], list):
        state = form(RANDOM)
        args[0][:] = [Symbol(["shuffled", state, form(args[0])], "shuffled")]
        return None
    return NotImplemented


def _seed(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    RANDOM.append([function._name, form(args)])
    event("seed", [function._name, form(args), form(kwargs)], f"{function._name}{args}")
    return None


def random_value(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (function._name or "").count(".") and (function._name or "").split(".")[0] in ("random", "numpy"):
        RANDOM.append(["drawn"])
        return Symbol([function._name, form(RANDOM), form(args), form(kwargs)], f"{function._name}(...)")
    return NotImplemented


class Attributes(dict[str, Any]):
    """A dict whose keys are also attributes, such as OmegaConf's or EasyDict."""

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(key)

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = _with_attributes(value)


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return Attributes({key: _with_attributes(item) for key, item in value.items()})
    return [_with_attributes(item) for item in value] if isinstance(value, list) else value


def _without_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_attributes(item) for key, item in value.items()}
    return [_without_attributes(item) for item in value] if isinstance(value, list) else value


def _attribute_dict(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = YAML.get(args[0]) if args and isinstance(args[0], str) else args[0] if args else {}
    if not isinstance(given, dict) or len(args) > 1 or "flags" in kwargs:
        return NotImplemented
    if re.search(r"\$\{|\?\?\?", json.dumps(given, default=str)):  # OmegaConf would resolve these
        return NotImplemented
    return _with_attributes(given | kwargs)


def _plain_dict(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _without_attributes(args[0]) if args and isinstance(args[0], Attributes) else NotImplemented


# String literals of the program, parsed as YAML by the parent.
YAML: dict[str, Any] = {}


def _safe_load(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], str) and args[0] in YAML:
        return _without_attributes(YAML[args[0]])  # a copy
    return NotImplemented


def _path(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Path(*args) if args and not any(holds_symbol(item) for item in args) else NotImplemented


RANDOM: list[Any] = []


def handlers_by_word() -> dict[str, Callable[..., Any]]:
    return {
        "from_pretrained": _load,
        "get_peft_model": _adapt,
        "SFTTrainer": _trainer,
        "train_on_responses_only": _responses,
        "prepare_model_for_kbit_training": _prepared,
        "setup_chat_format": _chat_format,
        "for_inference": _same_model,
        "for_training": _same_model,
        "seed": _seed,
        "set_seed": _seed,
        "seed_everything": _seed,
        "manual_seed": _seed,
    }


_DRAWS = "random randint choice choices sample uniform randrange gauss".split()
_NUMPY_DRAWS = "rand randn randint choice permutation random uniform normal".split()


def _device(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.device("cuda", 0)` is text, as conditions read it: `"cuda" in str(device)`, `device.type == "cuda"`."""
    given = [*args, *kwargs.values()]
    if not given or not isinstance(given[0], str) or is_placeholder(given[0]):
        return NotImplemented
    kind, _, index = given[0].partition(":")
    number = [str(one) for one in (*given[1:2], *([index] if index else []))][:1]
    made = Symbol(["call", form(function), form(args), form(kwargs)], f"torch.device({', '.join(map(words, given))})")
    made.__dict__["_text"] = ":".join([kind, *number])
    made.__dict__["_known"]["type"] = kind
    return made


def handlers_by_name() -> dict[str, Callable[..., Any]]:
    return {
        "sys.exit": leave,
        "os._exit": leave,
        "os.environ.get": _get_environment,
        "os.getenv": _get_environment,
        "os.environ.setdefault": _get_environment,
        "os.environ.update": _update_environment,
        "pathlib.Path": _path,
        "yaml.safe_load": _safe_load,
        "yaml.load": _safe_load,
        "omegaconf.OmegaConf.create": _attribute_dict,
        "omegaconf.OmegaConf.to_container": _plain_dict,
        "easydict.EasyDict": _attribute_dict,
        "munch.Munch": _attribute_dict,
        "box.Box": _attribute_dict,
        "ml_collections.ConfigDict": _attribute_dict,
        "torch.device": _device,
        "torch.cuda.is_available": lambda *_: True,  # the script is for GPUs
        "random.shuffle": _shuffle,
        "numpy.random.shuffle": _shuffle,
        **{f"random.{name}": random_value for name in _DRAWS},
        **{f"numpy.random.{name}": random_value for name in _NUMPY_DRAWS},
    }


def values(value: Any) -> Any:
    """Plain values unchanged, anything else as {"sym": words, "form": ...}, to derive settings from."""
    if isinstance(value, Symbol):
        made = value.__dict__.get("_made_by")
        if made is not None:
            kwargs = made[2] | value.__dict__.get("_set", {})  # including attributes assigned later
            return {"sym": value._words, "name": made[0]._name, "args": values(made[1]), "kwargs": values(kwargs)}
        return {"sym": value._words, "name": value._name, "form": value._form}
    if isinstance(value, dict):
        return {"dict": [[values(key), values(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [values(item) for item in value]}
    if isinstance(value, list):
        return [values(item) for item in value]
    if isinstance(value, str):
        return {"text": value} if is_placeholder(value) else value
    if isinstance(value, bool | int | type(None)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else {"other": repr(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return {"set": sorted((values(item) for item in value), key=str)}
    return {"other": words(value), "form": form(value)}
