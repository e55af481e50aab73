"""The builtins and modules that a notebook's code gets, and what it must not reach."""

from __future__ import annotations

import _string  # pyright: ignore[reportMissingImports]
import builtins
import dataclasses
import functools
import importlib
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from .handlers import leave
from .state import KNOWLEDGE, REAL_VALUES, RUN, STEPS, Endless, Unsafe
from .symbols import (
    Base,
    Symbol,
    call,
    changed,
    contains,
    elements,
    form,
    holds_symbol,
    of_notebook,
    operation,
    opposite,
    plain,
    role,
    unknown_length,
    words,
)

# Real code of the standard library: pure functions and types without access to files or the interpreter.
PURE_MODULES: dict[str, str] = {
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


def fixed_values() -> dict[str, Any]:
    return {
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


def fill_real_values() -> None:
    for module, names in PURE_MODULES.items():
        real = importlib.import_module(module)
        chosen = [n for n in dir(real) if not n.startswith("_")] if names == "*" else names.split()
        for name in chosen:
            item = getattr(real, name)
            if not isinstance(item, types.ModuleType):
                REAL_VALUES[f"{module}.{name}"] = _GUARDED.get(f"{module}.{name}", item)


MODULES: dict[str, Symbol] = {}


def module(name: str) -> Symbol:
    if name not in MODULES:
        MODULES[name] = Symbol(["module", name], name, name)
    return MODULES[name]


GUARDED_ATTRIBUTES = frozenset(("format", "format_map", "__class__"))
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


def checked_attribute(value: Any, name: str) -> Any:
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
    if plain(name) in GUARDED_ATTRIBUTES:
        try:
            return checked_attribute(value, plain(name))
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
    if isinstance(value, Symbol):
        return RUN.assumed
    return hasattr(value, plain(name))


def _type(value: Any, *more: Any) -> Any:
    if more:
        raise Unsafe("creating classes with type() is not allowed")
    if isinstance(value, type):
        raise Unsafe("type() of a class is not allowed, because a metaclass creates classes")
    return Symbol(["type", form(value)], "type") if isinstance(value, Symbol) else type(value)


# Their classes may hold plain values, or the stubs have plain values in their place.
_ABSTRACT = frozenset(
    "abc box collections easydict ml_collections munch numbers omegaconf os six types typing typing_extensions".split()
)


def _isinstance(value: Any, kinds: Any) -> bool:
    if type(value) in (str, int, float, bool, list, tuple, dict, set, type(None)):
        if isinstance(kinds, tuple):
            return any(_isinstance(value, kind) for kind in kinds)
        if isinstance(kinds, Symbol) and (kinds._name or "").partition(".")[0] not in ("", *_ABSTRACT):
            return False  # a class of a library, such as io.IOBase or torch.Tensor
    if isinstance(value, Symbol) or holds_symbol(kinds) or isinstance(value, Base):
        return RUN.assumed
    return isinstance(value, kinds)  # type: ignore[arg-type]


def _issubclass(one: Any, kinds: Any) -> bool:
    return RUN.assumed


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
        "issubclass": _issubclass,
        "type": _type,
        "dir": lambda *_: [],
        "print": lambda *_, **__: None,
        "display": lambda *_, **__: None,
        "input": lambda *_: Symbol(["input"], "input()"),
        "open": lambda *args, **kwargs: call(Symbol(["open"], "open", "open"), args, kwargs),
        "exit": lambda *_: leave(None, (), {}),  # type: ignore[arg-type]
        "quit": lambda *_: leave(None, (), {}),  # type: ignore[arg-type]
        "get_ipython": lambda: Symbol(["ipython"], "get_ipython()", "get_ipython()"),
        "__shell__": lambda line: Symbol(["shell", line], f"!{line}"),
        "__tick__": tick,
        "__do__": do,
        "__compare__": compare,
        "__item__": item,
        "__true__": truth,
        "__unless__": unless,
        "__subject__": lambda value: text_symbol(value) if isinstance(value, str) and holds_symbol(value) else value,
        "__not__": lambda value: opposite(value) if isinstance(value, Symbol) else not truth(value),
        "__unpack__": unpack,
        "__each__": each,
        "__bare__": bare,
        "__spread__": lambda value: {"**": value} if isinstance(value, Symbol) else value,
        "__mark__": mark,
        "__guarded__": checked_attribute,
    }
    return {"__builtins__": allowed, "__name__": "__main__", "__file__": program, "__doc__": None, "os": module("os")}


def _import_statement(name: str, _globals: Any = None, _locals: Any = None, names: Any = (), level: int = 0) -> Any:
    if level:
        raise Unsafe("relative imports are not allowed")
    if names:
        return module(name)
    return module(name.split(".")[0])


def tick() -> None:
    RUN.steps += 1
    if RUN.steps > STEPS:
        raise Endless(f"more than {STEPS} steps")


def do(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make one call. If real code cannot take symbols, the result is a symbol for the call."""
    tick()
    if isinstance(function, Symbol) or of_notebook(function):
        return function(*args, **kwargs)
    if isinstance(function, type) and ("_source_" in function.__dict__ or issubclass(function, BaseException)):
        return function(*args, **kwargs)
    if _reads(function, args, kwargs):
        return symbol_of(function, args, kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        receiver = getattr(function, "__self__", None)
        involved = (*args, *kwargs.values(), *([receiver] if not isinstance(receiver, types.ModuleType) else []))
        if any(holds_symbol(value) for value in involved):
            return symbol_of(function, args, kwargs)
        raise error from None


# Methods of real values whose result does not depend on what an unknown item is.
_PASSES = frozenset(
    "format format_map join encode append extend insert copy clear get pop popitem setdefault items keys values update"
    " add discard fromkeys appendleft remove reverse".split()
)
_READERS = frozenset({sorted, min, max, int, float, ord, hash, set, frozenset, str.join})
_READING_MODULES = frozenset(
    "re _sre textwrap html difflib ast json json.decoder json.encoder unicodedata _hashlib hashlib base64 statistics"
    " heapq _heapq bisect _bisect string decimal fractions math".split()
)


def _reads(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of real code depends on what an unknown argument, or receiver, is."""
    given = (*args, *kwargs.values())
    receiver = getattr(function, "__self__", None)
    if function is len:
        return bool(args) and unknown_length(args[0])
    if isinstance(receiver, str | list | tuple | dict | set):
        name = function.__name__
        if isinstance(receiver, dict) and name in ("get", "pop") and args:
            known = args[0] in receiver if _hashable(args[0]) else False
            return not known and (holds_symbol(args[0]) or any(map(holds_symbol, receiver)))
        if name in _PASSES:
            return False
        return holds_symbol(receiver) or any(map(holds_symbol, given))
    if function in _READERS or function in DEEP or getattr(function, "__module__", None) in _READING_MODULES:
        return any(map(holds_symbol, given))
    receiver_module = type(receiver).__module__
    return receiver_module in ("re", "_sre") and any(map(holds_symbol, given))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def symbol_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    name = getattr(function, "__qualname__", type(function).__name__)
    receiver = getattr(function, "__self__", None)
    inside = form(receiver) if isinstance(receiver, str | list | dict | tuple) else None
    return Symbol(["real", name, inside, form(args), form(kwargs)], f"{name}({', '.join(map(words, args))})")


DEEP: set[Any] = set()


def text_symbol(value: Any) -> Symbol:
    """An unknown text as a symbol."""
    return Symbol(["text", form(value)], words(value))


def compare(sign: str, one: Any, other: Any) -> Any:
    """`one sign other`: a symbol if it is only known at run time."""
    if sign in ("is", "is not"):
        found = is_same(one, other)
        return found if sign == "is" else opposite(found) if isinstance(found, Symbol) else not found
    if sign in ("in", "not in"):
        found = contains(one, other)
        return found if sign == "in" else opposite(found) if isinstance(found, Symbol) else not found
    if isinstance(one, Symbol) or isinstance(other, Symbol) or not (holds_symbol(one) or holds_symbol(other)):
        return _COMPARISONS[sign](one, other)
    if sign in ("==", "!=") and type(one) is not type(other):
        return sign == "!="
    return operation(sign, one, other)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def is_same(one: Any, other: Any) -> Any:
    """`one is other`. Whether a symbol is None is unknown; by default it is something."""
    if one is other or not (isinstance(one, Symbol) or isinstance(other, Symbol)):
        return one is other
    made = Symbol(["is", form(one), form(other)], f"({words(one)} is {words(other)})")
    something = Symbol(["is not", form(one), form(other)], f"({words(one)} is not {words(other)})")
    made.__dict__["_not"] = something
    return made


def item(value: Any, key: Any) -> Any:
    """`value[key]`: a symbol if either is only known at run time."""
    if isinstance(value, Symbol) or not isinstance(value, str | list | tuple | dict):
        return value[key]
    bounds = (key.start, key.stop, key.step) if isinstance(key, slice) else key
    unknown = holds_symbol(value) if isinstance(value, str) else holds_symbol(bounds)
    if not unknown or (isinstance(value, dict) and key in value):
        try:
            return value[key]
        except LookupError:
            if not (any(map(holds_symbol, value)) if isinstance(value, dict) else unknown_length(value)):
                raise
    return Symbol(["item", form(value), form(bounds)], f"{words(value)}[{words(bounds)}]")


def truth(value: Any) -> Any:
    """The value of a condition. An unknown text may be empty, and so may a list that an unknown loop fills."""
    if not isinstance(value, Symbol) and isinstance(value, str | list | tuple | set | dict) and unknown_length(value):
        bare = not isinstance(value, str) or not re.sub(r"<<[0-9a-f]{16}>>", "", value)
        return RUN.assumed if bare else True
    return value


def unless(value: Any) -> bool:
    """The condition of a statement that ends the program: if it is only known at run time, the program goes on."""
    return False if isinstance(value, Symbol) or truth(value) is not value else bool(value)


def unpack(value: Any, count: int, star: bool) -> Any:
    if isinstance(value, Symbol):
        return elements(value, count)
    return value


def each(value: Any, count: int, star: bool) -> Iterator[Any]:
    for item in value:
        yield elements(item, count) if isinstance(item, Symbol) else item


def bare(value: Any) -> None:
    """A call whose result is unused: assume that it changes its receiver or its first argument."""
    if not isinstance(value, Symbol) or "_made_by" not in value.__dict__:
        return
    function, args, kwargs = value.__dict__["_made_by"]
    if re.fullmatch(KNOWLEDGE["account"][0], function._name or ""):
        return  # it logs in or logs out, and the token stays as it is
    method = function.__dict__.get("_method")
    how = ["called", function._name or (method[1] if method else "?"), form(args), form(kwargs)]
    if method is not None:
        owner = method[0]
        if method[1] not in KNOWLEDGE["keeps"] and role(owner.__dict__.get("_owner", owner)) != "tokenizer":
            changed(owner, how, f".{method[1]}(...)")
        if method[1] == "shuffle" and args:  # a generator's, which shuffles its argument
            if isinstance(args[0], list):
                args[0][:] = [Symbol(["shuffled", how], "shuffled")]
            elif isinstance(args[0], Symbol):
                changed(args[0], how, " shuffled")
    elif (
        args
        and isinstance(args[0], Symbol)
        and (function._name or "").split(".")[-1] not in {*KNOWLEDGE["keeps"], "display", "len"}
    ):
        changed(args[0], how, f" by {function._name}")
    elif args and isinstance(args[0], list) and (function._name or "").split(".")[0] not in KNOWLEDGE["shows"]:
        args[0].append(Symbol(how, "changed"))


def mark(source: str) -> Callable[[Any], Any]:
    def mark(made: Any) -> Any:
        try:
            made._source_ = source
        except (AttributeError, TypeError):
            pass
        return made

    return mark
