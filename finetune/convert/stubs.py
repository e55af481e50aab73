"""The recording stubs. `trace.py` runs them as a separate program, in a process that cannot open anything.

A notebook's statements, or a converted script, are executed with every library replaced by symbols. A symbol records
how it was made (`load_dataset("x").map(f)`), and calls on it make further symbols, so that two programs can be compared
by what they would train with. Only a few pure modules of the standard library are real.

Containment of a hostile notebook: only names in `_PURE_MODULES` are real; attributes that reach the interpreter
(`__subclasses__`, `gi_frame`, ...) are refused before anything runs, also in format strings; an audit hook refuses
files, processes, sockets and everything else that Python reports; steps, time and memory are limited. Beneath all this,
the kernel confines the process (`sandbox.py`), even if the code takes over the interpreter. Uses the standard library
only.
"""

from __future__ import annotations

import _string  # pyright: ignore[reportMissingImports]
import ast
import builtins
import copy
import dataclasses
import functools
import hashlib
import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

# Per statement. A single operation that does not finish runs into the sandbox's CPU time limit.
STEPS, EVENTS = 200_000, 2_000


class Unsafe(BaseException):
    """The code used something that is not allowed. Not an Exception, so that the code cannot catch it."""


class Endless(BaseException):
    """The statement took more steps than allowed."""


class Leave(BaseException):
    """sys.exit, exit or quit was called."""


# --- symbols ----------------------------------------------------------------------------------------------------------

# A short description of what each hash stands for, to explain differences.
WORDS: dict[str, str] = {}


def digest(form: Any) -> str:
    return hashlib.sha1(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Symbol:
    """An unknown value. `form` records how it was made, as hashes; `name` is its dotted name if it has one."""

    def __init__(self, form: Any, words: str, name: str | None = None):
        d = self.__dict__
        d["_form"], d["_name"], d["_known"] = digest(form), name, {}
        d["_words"] = words if len(words) < 400 else words[:400] + "..."
        WORDS[d["_form"]] = d["_words"]

    def __getattr__(self, key: str) -> Any:
        return attribute(self, key)

    def __setattr__(self, key: str, value: Any) -> None:
        set_attribute(self, key, value)

    def __delattr__(self, key: str) -> None:
        changed(self, ["del", key], f"del .{key}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        known = self._known
        try:
            if ("item", key) in known:
                return known[("item", key)]
        except TypeError:
            pass
        return Symbol(["item", form(self), form(key)], f"{self._words}[{words(key)}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._name == "os.environ":
            ENVIRONMENT[plain(key)] = value
            event("env", [form(key), form(value)], f"os.environ[{words(key)}] = {words(value)}")
            return
        changed(self, ["setitem", form(key), form(value)], f"[{words(key)}] = {words(value)}")

    def __delitem__(self, key: Any) -> None:
        changed(self, ["delitem", form(key)], f"del [{words(key)}]")

    def __iter__(self) -> Iterator[Any]:
        return iter(elements(self, 2))

    def __contains__(self, item: Any) -> bool:
        if self._name == "os.environ":
            return item in ENVIRONMENT
        return RUN.assumed

    def __bool__(self) -> bool:
        return RUN.assumed

    def __format__(self, spec: str) -> str:
        return f"<<{self._form}{':' + spec if spec else ''}>>"

    def __str__(self) -> str:
        return f"<<{self._form}>>"

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self._form)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def __await__(self) -> Any:
        return self
        yield

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (type(f"Of{self._form}", (Base,), {"_stub": self}),)

    def __instancecheck__(self, _: Any) -> bool:
        return RUN.assumed


def _binary(sign: str, reverse: bool = False) -> Callable[[Symbol, Any], Any]:
    def operator(self: Symbol, other: Any) -> Any:
        one, two = (other, self) if reverse else (self, other)
        return Symbol(["op", sign, form(one), form(two)], f"({words(one)} {sign} {words(two)})")

    return operator


for _name, _sign in [
    pair.split() for pair in "add +;sub -;mul *;truediv /;floordiv //;mod %;pow **;and &;or |;xor ^".split(";")
]:
    setattr(Symbol, f"__{_name}__", _binary(_sign))
    setattr(Symbol, f"__r{_name}__", _binary(_sign, reverse=True))
for _name, _sign in [pair.split() for pair in "lt <;le <=;gt >;ge >=;eq ==;ne !=".split(";")]:
    setattr(Symbol, f"__{_name}__", _binary(_sign))
for _name in ("neg", "pos", "invert"):
    setattr(Symbol, f"__{_name}__", lambda self, sign=_name: Symbol([sign, form(self)], f"{sign}({self._words})"))


class Base:
    """Replaces a base class that is a symbol, in classes of the notebook."""

    _stub: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        self._given = [form(args), form(kwargs)]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return attribute(type(self)._stub, key)


# --- normal form ------------------------------------------------------------------------------------------------------


def form(value: Any, depth: int = 0) -> Any:
    """A value as JSON: plain values unchanged, symbols by their hash, functions by their code and result."""
    if isinstance(value, bool | int | str | type(None)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else ["float", repr(value)]
    if depth > 40:
        return ["deep"]
    if isinstance(value, Symbol):
        return ["sym", value._form]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *(form(item, depth + 1) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([form(key, depth + 1), form(item, depth + 1)] for key, item in value.items())]
    if isinstance(value, set | frozenset):
        return ["set", *sorted((form(item, depth + 1) for item in value), key=str)]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, types.FunctionType | types.MethodType) and _of_notebook(value):
        return function_form(value, depth)
    if isinstance(value, type):
        return ["class", value.__name__, value.__dict__.get("_source_", "")]
    if isinstance(value, Path):
        return ["path", str(value)]
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace) or _of_class(value):
        own = {key: item for key, item in vars(value).items()}
        return ["object", form(type(value)), form(own, depth + 1)]
    return ["other", type(value).__name__, str(value) if not callable(value) else getattr(value, "__name__", "")]


def _of_class(value: Any) -> bool:
    """Whether it is an instance of a class that the notebook defines."""
    return "_source_" in type(value).__dict__


def function_form(value: Any, depth: int) -> Any:
    """The code, and the result of one call with symbols for all arguments without a default."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    code = getattr(function, "_source_", function.__name__)
    if id(function) in RUN.inside or depth > 12:
        return ["function", code]
    RUN.inside.add(id(function))
    try:
        spec = function.__code__
        count = spec.co_argcount - len(function.__defaults__ or ())
        given = [Symbol(["argument", n], f"argument {n}") for n in range(count)]
        if isinstance(value, types.MethodType):
            given = given[1:]
        only = {name: Symbol(["argument", name], name) for name in _keyword_only(function)}
        if spec.co_flags & 0x20:  # a generator: its first two values
            produced = value(*given, **only)
            result = [item for item, _ in zip(produced, range(2), strict=False)]
        else:
            result = value(*given, **only)
        return ["function", code, form(result, depth + 1)]
    except Exception as error:
        return ["function", code, ["raises", type(error).__name__]]
    finally:
        RUN.inside.discard(id(function))


def _keyword_only(function: Any) -> list[str]:
    spec = function.__code__
    names = spec.co_varnames[spec.co_argcount : spec.co_argcount + spec.co_kwonlyargcount]
    return [name for name in names if name not in (function.__kwdefaults__ or {})]


def words(value: Any) -> str:
    if isinstance(value, Symbol):
        return value._words
    text = getattr(value, "__name__", "function") if callable(value) else repr(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # memory addresses
    return text if len(text) < 120 else text[:120] + "..."


def plain(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def holds_symbol(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Symbol):
        return True
    if isinstance(value, str):
        return "<<" in value
    if depth < 4 and isinstance(value, list | tuple | set):
        return any(holds_symbol(item, depth + 1) for item in list(value)[:50])
    if depth < 4 and isinstance(value, dict):
        return any(holds_symbol(item, depth + 1) for item in list(value.values())[:50])
    return False


# --- what a run records -----------------------------------------------------------------------------------------------


class Run:
    """One execution: the value assumed for unknown conditions, the events, and the roles."""

    def __init__(self, assumed: bool, rank: int):
        self.assumed, self.rank = assumed, rank
        self.events: list[dict[str, Any]] = []
        self.statement: int | None = None
        self.steps, self.noted = 0, 0
        self.inside: set[int] = set()
        self.model: Symbol | None = None
        self.tokenizer: Symbol | None = None
        self.trainer: Symbol | None = None
        self.own_tokenizer = False  # the script loads a tokenizer other than the model's


RUN = Run(True, 0)
ENVIRONMENT: dict[str, Any] = {}
KNOWLEDGE: dict[str, list[str]] = {}  # kind of call -> names, from knowledge.py


def event(kind: str, detail: Any, text: str, **more: Any) -> None:
    RUN.noted += 1
    if RUN.noted > EVENTS:
        raise Endless(f"more than {EVENTS} calls")
    RUN.events.append({"kind": kind, "detail": detail, "words": text[:500], "statement": RUN.statement, **more})


# Attributes for padding and truncation: they do not change the text that a template renders.
_NO_TEXT = frozenset("padding_side pad_token pad_token_id truncation_side model_max_length".split())


def role(value: Any) -> str | None:
    if value is None:
        return None
    for name in ("tokenizer", "model", "trainer"):
        if value is getattr(RUN, name):
            return name
    return None


def changed(symbol: Symbol, how: list[Any], text: str) -> None:
    """Record that a symbol was changed in place, which changes the hash of everything made from it afterwards."""
    owner = symbol.__dict__.get("_owner", symbol)
    key = how[1] if len(how) > 1 else None
    event(
        "change",
        [role(owner) or owner._form, symbol.__dict__.get("_path", ""), *how],
        f"{symbol._words}{text}",
        role=role(owner),
        name=symbol._name,
    )
    if not (role(owner) == "tokenizer" and how[0] == "setattr" and key in _NO_TEXT) and role(owner) not in (
        "model",
        "trainer",
    ):
        _advance(owner, [symbol.__dict__.get("_path", ""), *how])
        if owner is not symbol:
            _advance(symbol, how)


def _advance(symbol: Symbol, how: list[Any]) -> None:
    symbol.__dict__["_form"] = digest(["changed", symbol._form, how])
    WORDS[symbol._form] = symbol._words + " (changed)"


def attribute(symbol: Symbol, key: str) -> Any:
    if key.startswith("__") and key.endswith("__") and key not in ("__name__", "__version__", "__doc__", "__file__"):
        raise AttributeError(key)
    if key in symbol._known:
        return symbol._known[key]
    if symbol is RUN.tokenizer and key == "tokenizer":
        return symbol  # processor.tokenizer
    if symbol is RUN.trainer and key in ("model", "processing_class", "tokenizer"):
        return RUN.model if key == "model" else RUN.tokenizer
    name = f"{symbol._name}.{key}" if symbol._name else None
    if name in _REAL_VALUES:
        return _REAL_VALUES[name]
    made = Symbol(["attr", form(symbol), key], f"{symbol._words}.{key}", name)
    if symbol._name is None and role(symbol.__dict__.get("_owner", symbol)):
        made.__dict__["_owner"] = symbol.__dict__.get("_owner", symbol)
        made.__dict__["_path"] = f"{symbol.__dict__.get('_path', '')}.{key}"
    if name is None:
        made.__dict__["_method"] = (symbol, key)
    return made


def set_attribute(symbol: Symbol, key: str, value: Any) -> None:
    changed(symbol, ["setattr", key, form(value)], f".{key} = {words(value)}")
    symbol.__dict__.setdefault("_set", {})[key] = value
    if not holds_symbol(value):
        symbol._known[key] = value


def elements(symbol: Symbol, count: int) -> list[Symbol]:
    return [Symbol(["element", form(symbol), n], f"{symbol._words}[element {n}]") for n in range(count)]


def call(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function._name
    handler = _HANDLERS.get((name or "").rsplit(".", 1)[-1]) if name else None
    if name and name in _BY_NAME:
        handler = _BY_NAME[name]
    if handler is not None:
        result = handler(function, args, kwargs)
        if result is not NotImplemented:
            return result
    text = f"{function._words}({', '.join([*map(words, args), *(f'{k}={words(v)}' for k, v in kwargs.items())])})"
    detail = [form(function), form(args), form(kwargs)]
    method = function.__dict__.get("_method")
    if method and method[0] is RUN.model and method[1] in ("to", "cuda", "half", "float", "bfloat16", "train", "eval"):
        return RUN.model
    owner = method[0].__dict__.get("_owner", method[0]) if method else None
    if method and role(owner) == "trainer" and method[1] == "train":
        event("train", detail[1:], text)
        return Symbol(["trained"], "trainer.train()")
    event(
        "call",
        detail,
        text,
        name=name,
        method=method[1] if method else None,
        role=role(owner),
        args=_roles(args, kwargs),
    )
    if method and method[1].startswith("add_") and owner is not None and role(owner) == "tokenizer":
        changed(owner, ["call", method[1], *detail[1:]], f".{method[1]}(...)")
    result = Symbol(["call", *detail], text)
    result.__dict__["_made_by"] = (function, args, kwargs)
    return result


def _roles(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    return [name for value in (*args, *kwargs.values()) if (name := role(value))]


# --- the calls that make a training -----------------------------------------------------------------------------------


def _load(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`X.from_pretrained`: the first model and its tokenizer get their roles; all others are ordinary symbols."""
    owner = (function._name or "").split(".")[-2]
    root = (function._name or "").split(".")[0]
    again = RUN.model is None or not any(item["kind"] in ("adapt", "trainer") for item in RUN.events)
    if root == "unsloth" and owner.startswith("Fast") and again:
        RUN.model, RUN.tokenizer = Symbol(["model"], "model"), Symbol(["tokenizer"], "tokenizer")
        event("load", [owner, values(args), values(kwargs)], f"{owner}.from_pretrained", api="unsloth")
        return RUN.model, RUN.tokenizer
    if root == "transformers" and owner.startswith("AutoModel") and again:
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
    made = function(Symbol(["argument", 0], "argument 0"))
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


def _same_model(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`FastLanguageModel.for_inference(model)` returns the model."""
    return RUN.model if args and args[0] is RUN.model else NotImplemented


def _prepared(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and args[0] is RUN.model:
        event("kbit", values(kwargs), "prepare_model_for_kbit_training")
        return args[0]
    return NotImplemented


def _leave(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Leave


def _get_environment(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    key = plain(args[0]) if args else ""
    default = args[1] if len(args) > 1 else kwargs.get("default", kwargs.get("d"))
    if (function._name or "").endswith("setdefault"):
        if key not in ENVIRONMENT:
            ENVIRONMENT[key] = default
        event("env", [key, form(default)], f"os.environ.setdefault({key!r})")
    elif key not in ENVIRONMENT and default is not None:
        event("asked", [key, plain(default)], f"os.getenv({key!r})")
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


def _random(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (function._name or "").count(".") and (function._name or "").split(".")[0] in ("random", "numpy"):
        RANDOM.append(["drawn"])
        return Symbol([function._name, form(RANDOM), form(args), form(kwargs)], f"{function._name}(...)")
    return NotImplemented


# --- configuration objects and paths ----------------------------------------------------------------------------------


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


class Path(PurePosixPath):
    """A path of which only the name is known; everything that needs the file is a symbol."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return attribute(Symbol(["path", str(self)], repr(self)), key)


def _path(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Path(*args) if args and not any(holds_symbol(item) for item in args) else NotImplemented


RANDOM: list[Any] = []
_HANDLERS: dict[str, Callable[..., Any]] = {
    "from_pretrained": _load,
    "get_peft_model": _adapt,
    "SFTTrainer": _trainer,
    "train_on_responses_only": _responses,
    "prepare_model_for_kbit_training": _prepared,
    "for_inference": _same_model,
    "for_training": _same_model,
    "seed": _seed,
    "set_seed": _seed,
    "seed_everything": _seed,
    "manual_seed": _seed,
}
_BY_NAME: dict[str, Callable[..., Any]] = {
    "sys.exit": _leave,
    "os._exit": _leave,
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
    "random.shuffle": _shuffle,
    "numpy.random.shuffle": _shuffle,
    **{f"random.{n}": _random for n in "random randint choice choices sample uniform randrange gauss".split()},
    **{f"numpy.random.{n}": _random for n in "rand randn randint choice permutation random uniform normal".split()},
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
        return {"text": value} if "<<" in value and ">>" in value else value
    if isinstance(value, bool | int | type(None)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else {"other": repr(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return {"set": sorted((values(item) for item in value), key=str)}
    return {"other": words(value), "form": form(value)}


# --- builtins and modules ---------------------------------------------------------------------------------------------

# Real code of the standard library: pure functions and types without access to files or the interpreter.
_PURE_MODULES: dict[str, str] = {
    "json": "dumps loads JSONDecodeError",
    "re": "compile match fullmatch search sub subn split findall finditer escape I IGNORECASE M MULTILINE S DOTALL"
    " X VERBOSE A",
    "math": "*",
    "itertools": "*",
    "functools": "partial reduce lru_cache cache wraps cmp_to_key",
    "collections": "defaultdict Counter OrderedDict deque namedtuple ChainMap",
    "dataclasses": "dataclass field asdict astuple replace",
    "typing": "Any List Dict Tuple Set Optional Union Callable Iterable Iterator Literal Sequence Mapping"
    " TypedDict NamedTuple"
    " Generator TypeVar Type Final cast Protocol",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation whitespace printable hexdigits"
    " capwords",
    "textwrap": "dedent indent wrap fill shorten",
    "copy": "copy deepcopy",
    "enum": "Enum IntEnum auto Flag",
    "operator": "itemgetter add mul sub eq lt gt",
    "statistics": "mean median stdev pstdev mode",
    "hashlib": "md5 sha1 sha256",
    "base64": "b64encode b64decode",
    "html": "escape unescape",
    "unicodedata": "normalize category name",
    "abc": "ABC abstractmethod",
    "contextlib": "contextmanager nullcontext suppress",
    "__future__": "annotations",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "difflib": "get_close_matches",
    "heapq": "heappush heappop nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right",
    "ast": "literal_eval",
    "argparse": "ArgumentParser Namespace",
    "types": "SimpleNamespace",
    "os.path": "join basename dirname splitext normpath",
}
_REAL_VALUES: dict[str, Any] = {
    "os.sep": "/",
    "sys.argv": ["script.py"],
    "sys.version_info": sys.version_info,
    "os.linesep": "\n",
}


def _dataclass(made: Any = None, /, **options: Any) -> Any:
    """`dataclass` compiles the names of fields into code, so they must be identifiers."""
    if made is None:
        return lambda later: _dataclass(later, **options)
    annotations = made.__dict__.get("__annotations__", {})
    if type(annotations) is not dict:
        raise Unsafe("annotations that are not a dict")
    inherited = (name for base in made.__mro__ for name in base.__dict__.get("__dataclass_fields__", ()))
    for name in (*annotations, *inherited):
        if type(name) is not str or not name.isidentifier():
            raise Unsafe("a dataclass field whose name is not an identifier")
    return dataclasses.dataclass(made, **options)


def _wraps(wrapped: Any) -> Any:
    """`functools.wraps` without its lists of attributes, which could contain any name."""
    return functools.wraps(wrapped)


_dataclass.__name__ = _dataclass.__qualname__ = "dataclass"
_wraps.__name__ = _wraps.__qualname__ = "wraps"
_GUARDED: dict[str, Any] = {"dataclasses.dataclass": _dataclass, "functools.wraps": _wraps}


def _fill_real_values() -> None:
    for module, names in _PURE_MODULES.items():
        real = importlib.import_module(module)
        chosen = [n for n in dir(real) if not n.startswith("_")] if names == "*" else names.split()
        for name in chosen:
            item = getattr(real, name)
            if not isinstance(item, types.ModuleType):
                _REAL_VALUES[f"{module}.{name}"] = _GUARDED.get(f"{module}.{name}", item)


MODULES: dict[str, Symbol] = {}


def module(name: str) -> Symbol:
    if name not in MODULES:
        MODULES[name] = Symbol(["module", name], name, name)
    return MODULES[name]


_GUARDED_ATTRIBUTES = frozenset(("format", "format_map", "__class__"))
_FORBIDDEN = frozenset(
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await ag_frame ag_code f_back f_globals f_builtins f_locals"
    " f_code"
    " tb_frame tb_next tb_lasti func_globals func_code co_code co_consts mro".split()
)
_DUNDERS = frozenset(
    "__init__ __name__ __file__ __doc__ __class__ __len__ __getitem__ __setitem__ __iter__ __next__ __call__ __enter__"
    " __exit__ __repr__ __str__ __eq__ __hash__ __post_init__ __version__ __all__ __main__ __contains__ __lt__ __gt__"
    " __add__ __bool__ __shell__ __qualname__ __ne__ __le__ __ge__ __future__".split()
)


def check_name(name: str) -> None:
    """Raise Unsafe for a name that reaches the interpreter. A subclass of str could compare as another name."""
    if type(name) is not str:
        raise Unsafe("a name that is not a plain string")
    if name in _FORBIDDEN or (name.startswith("__") and name.endswith("__") and name not in _DUNDERS):
        raise Unsafe(f"the name {name} reaches the interpreter")


def check_template(text: str, depth: int = 0) -> None:
    """Raise Unsafe for a format string whose fields reach the interpreter."""
    try:
        for _, name, spec, _ in _string.formatter_parser(text):
            for is_attribute, part in _string.formatter_field_name_split(name)[1] if name else ():
                if is_attribute and part.startswith("_"):
                    raise Unsafe(f"the name {part} in a format string reaches the interpreter")
                if is_attribute:
                    check_name(part)
            if spec and depth < 3:
                check_template(spec, depth + 1)
    except ValueError:
        return  # str.format raises the error


def _format(template: str, /, *args: Any, **kwargs: Any) -> str:
    """`str.format` as an unbound method."""
    check_template(str.__getitem__(template, slice(None)))
    return str.format(template, *args, **kwargs)


def _checked_attribute(value: Any, name: str) -> Any:
    """Guard `.format`, `.format_map` and `.__class__`, which give access to other attributes."""
    if name == "__class__":
        return _type(value)
    found = getattr(value, name)
    receiver = getattr(found, "__self__", None)
    if isinstance(found, types.BuiltinMethodType) and isinstance(receiver, str):
        check_template(str.__getitem__(receiver, slice(None)))
    elif isinstance(found, types.MethodDescriptorType) and name == "format":
        return _format
    elif isinstance(found, types.MethodDescriptorType):
        raise Unsafe("str.format_map is not allowed")
    return found


def _getattr(value: Any, name: str, *default: Any) -> Any:
    check_name(plain(name))
    if plain(name) in _GUARDED_ATTRIBUTES:
        try:
            return _checked_attribute(value, plain(name))
        except AttributeError:
            if default:
                return default[0]
            raise
    if isinstance(value, Symbol) and default and value is RUN.tokenizer and name == "tokenizer":
        return value
    return getattr(value, plain(name), *default)


def _setattr(value: Any, name: str, new: Any) -> None:
    check_name(plain(name))
    setattr(value, plain(name), new)


def _hasattr(value: Any, name: str) -> bool:
    check_name(plain(name))
    return RUN.assumed if isinstance(value, Symbol) else hasattr(value, plain(name))


def _type(value: Any, *more: Any) -> Any:
    if more:
        raise Unsafe("creating classes with type() is not allowed")
    if isinstance(value, type):
        raise Unsafe("type() of a class is not allowed, because a metaclass creates classes")
    return Symbol(["type", form(value)], "type") if isinstance(value, Symbol) else type(value)


def _isinstance(value: Any, kinds: Any) -> bool:
    if isinstance(value, Symbol) or holds_symbol(kinds) or isinstance(value, Base):
        return RUN.assumed
    return isinstance(value, kinds)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unsafe(f"{name}() is not allowed")

    return refuse


_BUILTINS = (
    "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format"
    " frozenset"
    " hash hex id int iter len list map max min next object oct ord pow property range repr reversed round set"
    " slice sorted"
    " staticmethod classmethod str sum super tuple zip ArithmeticError AssertionError AttributeError BaseException"
    " Exception FileNotFoundError FileExistsError ImportError ModuleNotFoundError IndexError KeyError KeyboardInterrupt"
    " LookupError MemoryError NameError NotImplementedError OSError IOError OverflowError PermissionError RuntimeError"
    " StopIteration SyntaxError SystemExit TimeoutError TypeError UnicodeDecodeError UnicodeError ValueError Warning"
    " UserWarning DeprecationWarning FutureWarning ZeroDivisionError ConnectionError EOFError NotImplemented Ellipsis"
    " True False None __build_class__ __debug__"
).split()


def namespace(program: str) -> dict[str, Any]:
    """The globals of one program."""
    allowed = {name: getattr(builtins, name) for name in _BUILTINS}
    allowed |= {
        name: _refused(name)
        for name in ("eval", "exec", "compile", "globals", "locals", "vars", "breakpoint", "memoryview")
    }
    allowed |= {
        "__import__": _import_statement,
        "getattr": _getattr,
        "setattr": _setattr,
        "hasattr": _hasattr,
        "isinstance": _isinstance,
        "issubclass": lambda *_: RUN.assumed,
        "type": _type,
        "dir": lambda *_: [],
        "print": lambda *_, **__: None,
        "display": lambda *_, **__: None,
        "input": lambda *_: Symbol(["input"], "input()"),
        "open": lambda *args, **kwargs: call(Symbol(["open"], "open", "open"), args, kwargs),
        "exit": lambda *_: _leave(None, (), {}),  # type: ignore[arg-type]
        "quit": lambda *_: _leave(None, (), {}),  # type: ignore[arg-type]
        "get_ipython": lambda: Symbol(["ipython"], "get_ipython()", "get_ipython()"),
        "__shell__": lambda line: Symbol(["shell", line], f"!{line}"),
        "__tick__": _tick,
        "__do__": _do,
        "__is__": _is,
        "__not__": lambda value: (
            Symbol(["not", form(value)], f"not {value._words}") if isinstance(value, Symbol) else not value
        ),
        "__unpack__": _unpack,
        "__each__": _each,
        "__bare__": _bare,
        "__spread__": lambda value: {"**": value} if isinstance(value, Symbol) else value,
        "__mark__": _mark,
        "__guarded__": _checked_attribute,
    }
    return {"__builtins__": allowed, "__name__": "__main__", "__file__": program, "__doc__": None, "os": module("os")}


def _import_statement(name: str, _globals: Any = None, _locals: Any = None, names: Any = (), level: int = 0) -> Any:
    if level:
        raise Unsafe("relative imports are not allowed")
    if names:
        return module(name)
    return module(name.split(".")[0])


def _tick() -> None:
    RUN.steps += 1
    if RUN.steps > STEPS:
        raise Endless(f"more than {STEPS} steps")


def _do(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make one call. If real code cannot take symbols, the result is a symbol for the call."""
    _tick()
    if isinstance(function, Symbol) or _of_notebook(function):
        return function(*args, **kwargs)
    if isinstance(function, type) and ("_source_" in function.__dict__ or issubclass(function, BaseException)):
        return function(*args, **kwargs)
    if function in _DEEP:  # these accept a symbol but treat it as something else
        if any(holds_symbol(value) for value in args):
            return _symbol_of(function, args, kwargs)
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        receiver = getattr(function, "__self__", None)
        involved = (*args, *kwargs.values(), *([receiver] if not isinstance(receiver, types.ModuleType) else []))
        if any(holds_symbol(value) for value in involved):
            return _symbol_of(function, args, kwargs)
        raise error from None


def _of_notebook(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename == "notebook"


def _symbol_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    name = getattr(function, "__qualname__", type(function).__name__)
    receiver = getattr(function, "__self__", None)
    inside = form(receiver) if isinstance(receiver, str | list | dict | tuple) else None
    return Symbol(["real", name, inside, form(args), form(kwargs)], f"{name}({', '.join(map(words, args))})")


_DEEP: set[Any] = set()


def _is(one: Any, other: Any, same: bool) -> Any:
    """`x is y`. Whether a symbol is None is unknown."""
    if isinstance(one, Symbol) and other is None:
        return not RUN.assumed if same else RUN.assumed
    return (one is other) if same else (one is not other)


def _unpack(value: Any, count: int, star: bool) -> Any:
    if isinstance(value, Symbol):
        return elements(value, count)
    return value


def _each(value: Any, count: int, star: bool) -> Iterator[Any]:
    for item in value:
        yield elements(item, count) if isinstance(item, Symbol) else item


def _bare(value: Any) -> None:
    """A call whose result is unused: assume that it changes its receiver or its first argument."""
    if not isinstance(value, Symbol) or "_made_by" not in value.__dict__:
        return
    function, args, kwargs = value.__dict__["_made_by"]
    method = function.__dict__.get("_method")
    how = ["called", function._name or (method[1] if method else "?"), form(args), form(kwargs)]
    if method is not None:
        owner = method[0]
        if method[1] not in KNOWLEDGE["keeps"] and role(owner.__dict__.get("_owner", owner)) != "tokenizer":
            changed(owner, how, f".{method[1]}(...)")
    elif (
        args
        and isinstance(args[0], Symbol)
        and (function._name or "").split(".")[-1] not in {*KNOWLEDGE["keeps"], "display", "len"}
    ):
        changed(args[0], how, f" by {function._name}")
    elif args and isinstance(args[0], list) and (function._name or "").split(".")[0] not in KNOWLEDGE["shows"]:
        args[0].append(Symbol(how, "changed"))


def _mark(source: str) -> Callable[[Any], Any]:
    def mark(made: Any) -> Any:
        try:
            made._source_ = source
        except (AttributeError, TypeError):
            pass
        return made

    return mark


# --- instrumenting ----------------------------------------------------------------------------------------------------


class Instrument(ast.NodeTransformer):
    """Route calls, `is`, unpacking and bare expressions through the functions above, and count steps."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "globals", "vars"):
            return node
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = _helper("__spread__", [keyword.value])
        return _helper("__do__", [node.func, *node.args], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in _GUARDED_ATTRIBUTES and isinstance(node.ctx, ast.Load):
            return _helper("__guarded__", [node.value, ast.Constant(node.attr)])
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            same = ast.Constant(isinstance(node.ops[0], ast.Is))
            return _helper("__is__", [node.left, node.comparators[0], same])
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _helper("__not__", [node.operand]) if isinstance(node.op, ast.Not) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple | ast.List):
            node.value = _unpacking("__unpack__", node.value, node.targets[0])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Tuple | ast.List):
            node.iter = _unpacking("__each__", node.iter, node.target)
        node.body.insert(0, ast.Expr(_helper("__tick__", [])))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Tuple | ast.List):
            node.iter = _unpacking("__each__", node.iter, node.target)
        node.ifs.insert(0, ast.BoolOp(ast.Or(), [_helper("__tick__", []), ast.Constant(True)]))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_helper("__tick__", [])))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        return ast.Expr(_helper("__bare__", [node.value]))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._marked(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._marked(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._marked(node)

    def _marked(self, node: Any) -> ast.AST:
        source = digest(_code(node))
        self.generic_visit(node)
        body = node.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body.insert(0, ast.Expr(_helper("__tick__", [])))
        node.decorator_list.append(_helper("__mark__", [ast.Constant(source)]))
        return node


def _code(node: ast.AST) -> str:
    """The code of a definition, to compare it, without docstrings: their layout changes with the indentation."""
    copied = copy.deepcopy(node)
    for inner in ast.walk(copied):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(copied)


def _helper(name: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), args, keywords or [])


def _unpacking(name: str, value: ast.expr, target: Any) -> ast.Call:
    star = any(isinstance(item, ast.Starred) for item in target.elts)
    return _helper(name, [value, ast.Constant(len(target.elts)), ast.Constant(star)])


def _names(node: ast.AST) -> Iterator[str]:
    """Every name that a node binds or reads, in any field."""
    if isinstance(node, ast.Constant):
        return
    for key, value in ast.iter_fields(node):
        if key != "type_comment":
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    yield from item.split(".")


def prepared(source: str) -> Any:
    """Compile one statement or program. Raises Unsafe for names that are not allowed."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in _names(node):
            check_name(name)
        if isinstance(node, ast.MatchClass) and _GUARDED_ATTRIBUTES & set(node.kwd_attrs):
            raise Unsafe("a pattern that reads an attribute that reaches the interpreter")
    tree = ast.fix_missing_locations(Instrument().visit(tree))
    return compile(tree, "notebook", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def execute(code: Any, scope: dict[str, Any]) -> None:
    if code.co_flags & 0x80:  # top-level await
        routine = types.FunctionType(code, scope)()
        try:
            while True:
                routine.send(None)
        except StopIteration:
            return
    exec(code, scope)


# --- runs -------------------------------------------------------------------------------------------------------------


def run_notebook(statements: list[tuple[int, str]], assumed: bool) -> dict[str, Any]:
    """Execute the statements in order. A failure is recorded and the next statement runs."""
    reset(assumed, 0)
    scope = namespace("notebook.py")
    failed: dict[str, str] = {}
    for identity, source in statements:
        RUN.statement, RUN.steps, RUN.noted = identity, 0, 0
        try:
            execute(prepared(source), scope)
        except Unsafe as error:
            failed[str(identity)] = f"unsafe: {error}"
        except Endless as error:
            failed[str(identity)] = f"endless: {error}"
        except Leave:
            failed[str(identity)] = "leaves: sys.exit()"
        except Exception as error:
            failed[str(identity)] = f"{type(error).__name__}: {error}"
    return result(failed)


def run_script(source: str, assumed: bool, rank: int, own_tokenizer: bool) -> dict[str, Any]:
    """Execute a converted script with a `finetune.script.run` that calls the hooks in the real order."""
    reset(assumed, rank)
    RUN.own_tokenizer = own_tokenizer
    ENVIRONMENT.update(zip("RANK LOCAL_RANK WORLD_SIZE".split(), (str(rank), str(rank), "2"), strict=True))
    failed: dict[str, str] = {}
    _BY_NAME["finetune.script.run"] = _replay
    try:
        execute(prepared(source), namespace("script.py"))
    except (Unsafe, Endless) as error:
        failed["0"] = f"{type(error).__name__}: {error}"
    except SystemExit as error:
        if error.code not in (0, None) and not isinstance(error.code, Symbol):
            failed["0"] = f"SystemExit: {error.code}"
    except (Exception, Leave) as error:
        failed["0"] = f"{type(error).__name__}: {error}"
    return result(failed)


def _replay(function: Symbol, args: tuple[Any, ...], hooks: dict[str, Any]) -> Any:
    unknown = set(hooks) - {"dataset", "tokenizer", "model", "trainer", "save"}
    if unknown or len(args) != 1:
        raise TypeError(f"script.run takes a file and hooks, not {sorted(unknown)}")
    RUN.model, tokenizer = Symbol(["model"], "model"), Symbol(["tokenizer"], "tokenizer")
    RUN.tokenizer = None if RUN.own_tokenizer else tokenizer  # the first one loaded gets the role
    event("load", None, "script.run")
    if "tokenizer" in hooks:
        tokenizer = (
            hooks["tokenizer"](tokenizer) or tokenizer if RUN.assumed else _or(hooks["tokenizer"](tokenizer), tokenizer)
        )
    RUN.tokenizer = tokenizer if RUN.tokenizer is None else RUN.tokenizer
    event("adapt", None, "script.run")
    data = hooks["dataset"](tokenizer) if "dataset" in hooks else None
    train, held_out = data if isinstance(data, tuple) else (data, None)
    if "model" in hooks:
        hooks["model"](RUN.model, tokenizer)
    RUN.trainer = Symbol(["trainer"], "trainer")
    RUN.trainer._known["processing_class"] = RUN.trainer._known["tokenizer"] = tokenizer
    event("trainer", None, "script.run", forms={"processing_class": form(tokenizer)})
    event("dataset", ["train_dataset", form(train)], words(train))
    event("dataset", ["eval_dataset", form(held_out)], words(held_out))
    if "trainer" in hooks:
        hooks["trainer"](RUN.trainer)
    event("train", None, "script.run")
    if "save" in hooks and RUN.rank == 0:
        hooks["save"](RUN.model, tokenizer)
    return 0


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def reset(assumed: bool, rank: int) -> None:
    global RUN
    RUN = Run(assumed, rank)
    ENVIRONMENT.clear()
    RANDOM.clear()
    MODULES.clear()
    environ = Symbol(["attr", "os", "environ"], "os.environ", "os.environ")
    module("os")._known["environ"] = environ
    _BY_NAME.pop("finetune.script.run", None)


def result(failed: dict[str, str]) -> dict[str, Any]:
    used = {item for e in RUN.events for item in _hashes(e["detail"])}
    return {"events": RUN.events, "failed": failed, "words": {key: WORDS[key] for key in used if key in WORDS}}


def _hashes(detail: Any) -> Iterator[str]:
    if isinstance(detail, list):
        if len(detail) == 2 and detail[0] == "sym" and isinstance(detail[1], str):
            yield detail[1]
        for item in detail:
            yield from _hashes(item)


# --- the sandbox ------------------------------------------------------------------------------------------------------


def _load_all() -> None:
    """Import what the standard library imports lazily: no import is possible after confinement."""
    import encodings.idna
    import locale
    import shutil  # argparse needs this and locale

    assert encodings.idna and locale and shutil


def _lock() -> None:
    """Install the audit hook: from now on nothing outside this process can be reached."""
    harmless = (
        "compile",
        "exec",
        "object.__getattr__",
        "object.__setattr__",
        "object.__delattr__",
        "builtins.id",
        "code.__new__",
        "function.__new__",
        "sys._getframe",
        "import",
    )

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name not in harmless:
            raise Unsafe(f"{name} {args!r:.80}")

    sys.addaudithook(hook)


def main(confine: Callable[[], list[str]]) -> None:
    """Read jobs, and what is known about calls, as JSON from standard input; write the results to standard output.

    `confine` asks the kernel to confine this process and returns what was not granted.
    """
    given = json.loads(sys.stdin.buffer.read())
    KNOWLEDGE.update(given["knowledge"])
    _fill_real_values()
    _DEEP.update([json.dumps, json.loads, hashlib.sha256, hashlib.md5, str.join])
    out = sys.stdout.buffer
    _load_all()
    missing = confine()
    _lock()
    sys.setrecursionlimit(600)
    results = []
    for job in given["jobs"]:
        YAML.clear()
        YAML.update(job["yaml"])
        if job["kind"] == "notebook":
            results.append(run_notebook([tuple(item) for item in job["statements"]], job["assumed"]))
        else:
            results.append(run_script(job["source"], job["assumed"], job["rank"], job["own_tokenizer"]))
    out.write(json.dumps({"missing": missing, "results": results}).encode())
    out.flush()
