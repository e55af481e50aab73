"""Symbols: unknown values that record how they were made. Calls on them make further symbols."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from .state import BY_NAME, ENVIRONMENT, HANDLERS, REAL_VALUES, RUN, WORDS, digest, event


class Symbol:
    """An unknown value. `form` records how it was made, as hashes; `name` is its dotted name if it has one."""

    def __init__(self, form: Any, words: str, name: str | None = None):
        d = self.__dict__
        d["_form"], d["_name"], d["_known"] = digest(form), name, {}
        if isinstance(form, list) and (form[0] == "element" or OF_ELEMENTS and _mentions(form)):
            OF_ELEMENTS.add(d["_form"])
        d["_text"] = ""  # what str() gives, if it is known
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
        return iter(elements(self, 2 if RUN.assumed else 3))  # how many there are is unknown

    def __contains__(self, item: Any) -> bool:
        return bool(contains(item, self))

    def __bool__(self) -> bool:
        opposite = self.__dict__.get("_not")
        return not opposite if opposite is not None else RUN.assumed

    def __format__(self, spec: str) -> str:
        return self._text or f"<<{self._form}{':' + spec if spec else ''}>>"

    def __str__(self) -> str:
        return self._text or f"<<{self._form}>>"

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

    def __instancecheck__(self, value: Any) -> bool:
        return RUN.assumed


def _binary(sign: str, reverse: bool = False) -> Callable[[Symbol, Any], Any]:
    def operator(self: Symbol, other: Any) -> Any:
        one, two = (other, self) if reverse else (self, other)
        return operation(sign, one, two)

    return operator


_OPPOSITES = {"!=": "==", ">=": "<", "<=": ">"}


def operation(sign: str, one: Any, two: Any) -> Symbol:
    """`one + two`, `one < two` and others, with an unknown side."""
    made = Symbol(["op", sign, form(one), form(two)], f"({words(one)} {sign} {words(two)})")
    if sign in _OPPOSITES:
        made.__dict__["_not"] = operation(_OPPOSITES[sign], one, two)
    return made


def opposite(value: Symbol) -> Symbol:
    """`not value`."""
    if (same := value.__dict__.get("_not")) is not None:
        return same
    made = Symbol(["not", form(value)], f"not {value._words}")
    made.__dict__["_not"] = value
    return made


def contains(item: Any, container: Any) -> Any:
    """`item in container`: a symbol unless both are known."""
    if isinstance(container, Symbol) and container._name == "os.environ":
        if item not in ENVIRONMENT:
            event("asked", [plain(item), None], f"{words(item)} in os.environ")
        return item in ENVIRONMENT
    known = not isinstance(container, Symbol) and not holds_symbol(item)
    if known and isinstance(container, str):
        known = not holds_symbol(container)
    if known and (item in list(container) if isinstance(container, list | tuple) else item in container):
        return True  # also if it holds unknown items besides
    if known and not any(holds_symbol(one) for one in (container if isinstance(container, _COLLECTIONS) else ())):
        return False
    return Symbol(["in", form(item), form(container)], f"({words(item)} in {words(container)})")


_COLLECTIONS = (list, tuple, set, frozenset, dict)
_PLACEHOLDER = re.compile(r"<<([0-9a-f]{16})(?::[^<>]*)?>>")
# Hashes of what is made from an element of an unknown value: how many of them there are is unknown.
OF_ELEMENTS: set[str] = set()


def is_placeholder(text: str) -> bool:
    """Whether a text has a part that is only known at run time."""
    return "<<" in text and _PLACEHOLDER.search(text) is not None


def _mentions(form: Any) -> bool:
    """Whether a form has a hash of OF_ELEMENTS."""
    if isinstance(form, list):
        return any(map(_mentions, form))
    return isinstance(form, str) and (
        form in OF_ELEMENTS or "<<" in form and any(one in OF_ELEMENTS for one in _PLACEHOLDER.findall(form))
    )


def unknown_length(value: Any) -> bool:
    """Whether len() of a known container is unknown, because a loop over an unknown value fills it."""
    if isinstance(value, str):
        return is_placeholder(value)
    if isinstance(value, set | frozenset | dict):
        return any(holds_symbol(one) for one in value) or (isinstance(value, dict) and _mentions(form(value)))
    return isinstance(value, list | tuple) and _mentions(form(value))


def add_operators() -> None:
    """Operators on symbols make further symbols."""
    for name, sign in [
        pair.split() for pair in "add +;sub -;mul *;truediv /;floordiv //;mod %;pow **;and &;or |;xor ^".split(";")
    ]:
        setattr(Symbol, f"__{name}__", _binary(sign))
        setattr(Symbol, f"__r{name}__", _binary(sign, reverse=True))
    for name, sign in [pair.split() for pair in "lt <;le <=;gt >;ge >=;eq ==;ne !=".split(";")]:
        setattr(Symbol, f"__{name}__", _binary(sign))
    for name in ("neg", "pos", "invert"):
        setattr(Symbol, f"__{name}__", lambda self, sign=name: Symbol([sign, form(self)], f"{sign}({self._words})"))


class Base:
    """Replaces a base class that is a symbol, in classes of the notebook."""

    _stub: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        self._given = [form(args), form(kwargs)]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return attribute(type(self)._stub, key)


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
    if isinstance(value, types.FunctionType | types.MethodType) and of_notebook(value):
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
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(words, value)))}}}"[:120]  # in no order of its own
    text = getattr(value, "__name__", "function") if callable(value) else repr(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # memory addresses
    return text if len(text) < 120 else text[:120] + "..."


def plain(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def holds_symbol(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Symbol):
        return True
    if isinstance(value, str):
        return is_placeholder(value)
    if depth < 8 and isinstance(value, list | tuple | set | frozenset):
        return any(holds_symbol(item, depth + 1) for item in value)
    if depth < 8 and isinstance(value, dict):
        return any(holds_symbol(item, depth + 1) for pair in value.items() for item in pair)
    return False


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
    if (given := _argument(symbol, key)) is not None:
        return given
    name = f"{symbol._name}.{key}" if symbol._name else None
    if name in REAL_VALUES:
        return REAL_VALUES[name]
    made = Symbol(["attr", form(symbol), key], f"{symbol._words}.{key}", name)
    if symbol._name is None and role(symbol.__dict__.get("_owner", symbol)):
        made.__dict__["_owner"] = symbol.__dict__.get("_owner", symbol)
        made.__dict__["_path"] = f"{symbol.__dict__.get('_path', '')}.{key}"
    if name is None:
        made.__dict__["_method"] = (symbol, key)
    return made


_CONFIGURATIONS = ("LoraConfig", "SFTConfig", "TrainingArguments")


class _Targets(list[Any]):
    """A list of target modules, which PEFT makes a set."""

    def add(self, name: Any) -> None:
        self += [] if name in self else [name]

    def discard(self, name: Any) -> None:
        self[:] = [one for one in self if one != name]

    def update(self, *more: Any) -> None:
        for name in (name for names in more for name in names):
            self.add(name)


def _argument(symbol: Symbol, key: str) -> Any:
    """An argument that a configuration object was made with, which may be changed in place."""
    function, _, kwargs = symbol.__dict__.get("_made_by", (None, (), {}))
    if function is None or (function._name or "").rsplit(".", 1)[-1] not in _CONFIGURATIONS or key not in kwargs:
        return None
    if key == "target_modules" and type(kwargs[key]) is list:
        kwargs[key] = _Targets(kwargs[key])
    return None if isinstance(kwargs[key], Symbol) else kwargs[key]


def set_attribute(symbol: Symbol, key: str, value: Any) -> None:
    if symbol is RUN.trainer and key in ("tokenizer", "processing_class") and symbol._known.get(key) is value:
        return  # it has this tokenizer already
    changed(symbol, ["setattr", key, form(value)], f".{key} = {words(value)}")
    symbol.__dict__.setdefault("_set", {})[key] = value
    if not holds_symbol(value):
        symbol._known[key] = value


def elements(symbol: Symbol, count: int) -> list[Symbol]:
    return [Symbol(["element", form(symbol), n], f"{symbol._words}[element {n}]") for n in range(count)]


def call(function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function._name
    handler = HANDLERS.get((name or "").rsplit(".", 1)[-1]) if name else None
    if name and name in BY_NAME:
        handler = BY_NAME[name]
    if handler is not None:
        result = handler(function, args, kwargs)
        if result is not NotImplemented:
            return result
    text = f"{function._words}({', '.join([*map(words, args), *(f'{k}={words(v)}' for k, v in kwargs.items())])})"
    detail = [form(function), form(args), form(kwargs)]
    method = function.__dict__.get("_method")
    if method and method[0] is RUN.model and method[1] in MOVES:
        if (kind := _cast(method[1], (*args, *kwargs.values()))) is not None:
            event("cast", kind, text)
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
        args=roles_of(args, kwargs),
    )
    if method and method[1].startswith("add_") and owner is not None and role(owner) == "tokenizer":
        changed(owner, ["call", method[1], *detail[1:]], f".{method[1]}(...)")
    result = Symbol(["call", *detail], text)
    result.__dict__["_made_by"] = (function, args, kwargs)
    return result


MOVES = ("to", "cuda", "half", "float", "double", "bfloat16", "train", "eval")
_CASTS = {"half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16"}


def _cast(method: str, given: tuple[Any, ...]) -> str | None:
    """The type that `model.half()` or `model.to(torch.float32)` casts to; None if it only moves the model."""
    names = [(value._name or "").removeprefix("torch.") for value in given if isinstance(value, Symbol)]
    names = [_CASTS.get(name, name) for name in names]
    return _CASTS.get(method) or next((name for name in names if name in _CASTS.values()), None)


def roles_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    return [name for value in (*args, *kwargs.values()) if (name := role(value))]


class Path(PurePosixPath):
    """A path of which only the name is known; everything that needs the file is a symbol."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return attribute(Symbol(["path", str(self)], repr(self)), key)


def of_notebook(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename == "notebook"
