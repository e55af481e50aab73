"""Render untrusted chat templates with bounded time and memory.

A chat template is a program that comes with the model. Jinja's sandbox limits it to the messages, but does not stop it
from running forever or growing a string to 10 GB. Here it is compiled with the filters, globals and extensions of
transformers, so the text is identical to the character, in an environment that counts loop iterations, macro calls, and
the characters and list items created, and that checks the size of a value before it is created. A template that exceeds
a limit ends with a UserError.

The limits grow with the conversation and are far above what templates need: a value may have 20 times the characters of
the input, and a rendering may create 64 times that in total.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Environment, Template
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from finetune.errors import UserError
from finetune.runtime.types import JsonObject

MAX_STEPS = 300_000  # loop iterations, calls and operators per rendering, in addition to PER_CHARACTER
MAX_SECONDS = 60.0  # for anything not counted; several thousand times what a row takes
BASE_CHARACTERS = 1_000_000  # characters per value, in addition to PER_CHARACTER
PER_CHARACTER = 20  # added to both limits for each character of the input
TOTAL_FACTOR = 64  # a rendering may create this many times the largest value in total
MAX_TEMPLATE = 1_000_000  # characters of a template; the longest known has 40,000
_MAX_WIDTH = 10_000  # of a width, an indentation or a number of columns
_MAX_BITS = 4096  # of an integer
_MAX_SLOW = 100_000  # characters passed to filters that take more than linear time

Span = tuple[int, int]


class TemplateLimit(UserError):
    """A chat template exceeds the limits of a rendering."""


def render(
    template: str,
    messages: list[JsonObject],
    *,
    tools: list[JsonObject] | None = None,
    add_generation_prompt: bool = False,
    marks: bool = False,
    **special: object,
) -> tuple[str, list[Span]]:
    """The text of a conversation, equal to that of `apply_chat_template`, and with `marks` the spans [start, end) of
    its `{% generation %}` blocks.

    Raises:
        TemplateLimit: the template needs too much time or memory.
        jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError: it fails on these messages.
    """
    from transformers.utils import chat_template_utils
    from transformers.utils.chat_template_utils import _render_with_assistant_indices

    # From transformers 5.23 on, a message's reasoning is given to the template under each name that templates read.
    if alias := getattr(chat_template_utils, "_alias_reasoning_fields", None):
        messages = alias(messages)
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        compiled = _compiled(template)
        compiled.environment.budget.start(len(template) + _weight([messages, tools], 10**9))  # pyright: ignore
        if marks:
            text, spans = _render_with_assistant_indices(compiled_template=compiled, **given, **special)
            return text, [(int(start), int(end)) for start, end in spans]
        return compiled.render(**given, **special), []
    except TemplateLimit as error:
        raise TemplateLimit(_message(template, str(error))) from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateLimit(_message(template, f"{type(error).__name__}: {error}")) from None
    except (ArithmeticError, RuntimeError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def check_syntax(template: str) -> None:
    """Compile a template. Raises jinja2.TemplateSyntaxError, or TemplateLimit if compiling it needs too much."""
    try:
        _compiled(template)
    except (RecursionError, MemoryError) as error:
        raise TemplateLimit(_message(template, f"{type(error).__name__}: {error}")) from None
    except TemplateLimit as error:
        raise TemplateLimit(_message(template, str(error))) from None


def _message(template: str, why: str) -> str:
    return (
        f"The chat template ({' '.join(template.split())[:60]!r}...) was stopped: {why[:300]}. Read it before you "
        "trust this model, or set model.chat_template to another one (a known name or a Jinja file)."
    )


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    """The template compiled with the filters, globals and extensions of transformers."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(template) > MAX_TEMPLATE:
        raise TemplateLimit(f"it has {len(template)} characters, more than {MAX_TEMPLATE}")
    stock = _compile_jinja_template("").environment
    environment = BoundedEnvironment(
        trim_blocks=stock.trim_blocks, lstrip_blocks=stock.lstrip_blocks, extensions=_extensions(stock)
    )
    environment.filters = {name: _bounded_filter(environment, name, kind) for name, kind in stock.filters.items()}
    environment.globals = {**stock.globals, "lipsum": _lipsum}
    environment.budget.start(len(template))
    return environment.from_string(template)


def _extensions(stock: Environment) -> list[type[Extension]]:
    return [type(extension) for extension in stock.extensions.values()]


# --- counting ---------------------------------------------------------------------------------------------------------


class Budget:
    """The remaining steps, characters and seconds of one rendering."""

    def start(self, input_characters: int) -> None:
        self.largest = BASE_CHARACTERS + PER_CHARACTER * input_characters
        self.left, self.steps = TOTAL_FACTOR * self.largest, MAX_STEPS + PER_CHARACTER * input_characters
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> str:
        """Count one loop iteration or call. Returns an empty text, so that templates can call it."""
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimit("its loops and macros take too many steps for one conversation")
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:.0f} seconds for one conversation")
        return ""

    def charge(self, size: int) -> None:
        """Count a value of `size` characters or items, before or after it is created."""
        self.left -= size
        if size > self.largest:
            raise TemplateLimit(f"it creates a value of more than {self.largest} characters or items")
        if self.left < 0:
            raise TemplateLimit(
                f"it creates more than {TOTAL_FACTOR * self.largest} characters or items for one conversation"
            )

    def checked(self, value: Any) -> Any:
        """Count the size of a value. Returns the value."""
        if value.__class__ is str:  # the most frequent type, without the slower isinstance
            self.charge(len(value))
        elif isinstance(value, str | bytes):
            self.charge(len(value))
        elif isinstance(value, list | tuple | Mapping | Namespace | set | frozenset):
            self.charge(_weight(value, self.largest + 1))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TemplateLimit("it creates an integer of more than a thousand digits")
        return value

    def joined(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.charge(sum(map(len, parts)))
        return "".join(parts)


def _weight(value: object, most: int) -> int:
    """Size of a value when written out, in characters and items; an object contained twice counts twice. Stops at
    `most`."""
    total, pending = 0, [value]
    while pending and total < most:
        item = pending.pop()
        if isinstance(item, str | bytes):
            total += len(item)
            continue
        total += 8
        if isinstance(item, Namespace):
            pending.append(item._Namespace__attrs)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            if len(item) > most:
                return most
            pending += item
    return total


class BoundedTemplate(Template):
    def generate(self, *args: object, **kwargs: object) -> Iterator[str]:
        budget, total = self.environment.budget, 0  # pyright: ignore[reportAttributeAccessIssue]
        for part in super().generate(*args, **kwargs):
            total += len(part)
            if total > budget.largest:
                budget.charge(total)
            yield part


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with every step and every value counted."""

    template_class = BoundedTemplate
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.budget = Budget()
        self.budget.start(0)
        self.step, self.checked = self.budget.step, self.budget.checked
        self.concat = self.budget.joined  # joins the parts of renderings, macros and `{% set %}` blocks
        super().__init__(*args, finalize=self.budget.checked, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and left.__class__ is str and right.__class__ is str:  # the most frequent operation
            self.budget.charge(len(left) + len(right))
            return left + right
        charge, largest = self.budget.charge, self.budget.largest
        self.budget.step()
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(times, int):
                    charge(max(1, min(_weight(one, largest), largest)) * max(0, times) + 8 * max(0, times))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            charge(_weight([left, right], largest + 1))
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if __obj is self.step or __obj is self.checked:
            return __obj(*args)
        self.budget.step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            self.budget.charge(len(owner))
            self._check_method(owner, name, args, kwargs)
        elif isinstance(owner, int) and name == "to_bytes":
            self.budget.charge(int(args[0] if args else kwargs.get("length", 1)))
        return self.budget.checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_method(value.__self__, value.__name__, args, kwargs)
            return wrapped(*args, **kwargs)

        return bounded

    def _check_method(self, owner: str | bytes, name: str, args: tuple, kwargs: JsonObject) -> None:
        """Count the result of a string method that may be longer than the string."""
        charge = self.budget.charge
        numbers = [abs(value) for value in (*args, *kwargs.values()) if isinstance(value, int)]
        if name in ("center", "ljust", "rjust", "zfill") and numbers:
            charge(max(numbers))
        elif name == "expandtabs" and numbers:
            charge(len(owner) * (1 + max(numbers)))
        elif name == "replace" and len(args) >= 2:
            charge(len(owner) + _count(owner, args[0]) * _length(args[1]))
        elif name == "join" and args:
            parts = args[0] if hasattr(args[0], "__len__") else ()
            charge(sum(map(_length, parts)) + len(owner) * len(parts))
        elif name == "translate" and args and isinstance(args[0], Mapping):
            charge(len(owner) * (1 + max(map(_length, args[0].values()), default=0)))
        elif name in ("format", "format_map"):
            mapping = args[0].values() if name == "format_map" and args and isinstance(args[0], Mapping) else ()
            self._format(owner, (*args, *kwargs.values(), *mapping))

    def _format(self, pattern: str | bytes, values: Iterable[Any]) -> None:
        """Count the result of `%` or `format`: bounded widths, and every value possibly at every placeholder."""
        text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        placeholders = text.count("%") + text.count("{")
        nested = "*" in text or re.search(r"\{[^{}]*\{", text)
        if any(len(digits) > 5 for digits in re.findall(r"\d+", text)) and placeholders:
            raise TemplateLimit("it formats a value with a width of more than 99999 characters")
        total = 0
        for value in values:
            value = tuple(value.values()) if isinstance(value, Mapping) else value
            if nested and isinstance(value, int) and abs(value) > _MAX_WIDTH:
                raise TemplateLimit(f"it formats a value with a width of more than {_MAX_WIDTH} characters")
            total += _weight(value, self.budget.largest + 1)
        widths = sum(int(digits) for digits in re.findall(r"\d+", text)) + (_MAX_WIDTH * placeholders if nested else 0)
        self.budget.charge(len(text) + total * max(1, placeholders) + widths)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimit("it creates an integer of more than a thousand digits")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes) else 32


def _count(text: Any, part: object) -> int:
    try:
        return text.count(part)
    except TypeError:
        return 0


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    if n * max > _MAX_SLOW:
        raise TemplateLimit(f"it asks for {n * max} words of placeholder text")
    return generate_lorem_ipsum(n, html, min, max)


# --- filters ----------------------------------------------------------------------------------------------------------

_TAKE_WIDTH = frozenset("batch center indent round slice tojson truncate wordwrap".split())
_CONSTANT_TIME = frozenset("count first length".split())
_SLOW = frozenset("pprint striptags title urlize wordcount wordwrap xmlattr".split())  # more than linear time


def _bounded_filter(environment: BoundedEnvironment, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    budget = environment.budget
    first = 1 if hasattr(original, "jinja_pass_arg") else 0  # after the context or environment

    @functools.wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.step()
        if name in _CONSTANT_TIME:  # else `messages|length` in a loop would take quadratic time
            return original(*args, **kwargs)
        value, given = args[first], (*args[first + 1 :], *kwargs.values())
        if name == "join" and not hasattr(value, "__len__"):
            value = list(value)
            args = (*args[:first], value, *args[first + 1 :])
        budget.checked(value)
        numbers = [abs(number) for number in given if isinstance(number, int)]
        if name in _TAKE_WIDTH and max(numbers, default=0) > _MAX_WIDTH:
            raise TemplateLimit(f"it uses the filter {name} with {max(numbers)}, more than {_MAX_WIDTH}")
        if name in _SLOW and _weight(value, _MAX_SLOW + 1) > _MAX_SLOW:
            raise TemplateLimit(f"it uses the filter {name} on more than {_MAX_SLOW} characters")
        texts = [len(text) for text in given if isinstance(text, str)]
        if name == "join":
            budget.charge(_weight(value, budget.largest + 1) + max(texts, default=0) * len(value))
        elif name in ("indent", "wordwrap"):
            width = max([*numbers, *texts], default=4)
            lines = len(str(value)) if name == "wordwrap" else str(value).count("\n") + 1
            budget.charge(len(str(value)) + lines * width)
        elif name == "replace" and len(given) >= 2:
            budget.charge(len(str(value)) + _count(str(value), str(given[0])) * len(str(given[1])))
        elif name == "format":
            environment._format(str(value), given)
        elif name == "tojson" and numbers:
            budget.charge(_weight(value, budget.largest + 1) * (1 + max(numbers)))
        return budget.checked(original(*args, **kwargs))

    return bounded


# --- the template's tree ----------------------------------------------------------------------------------------------


class _Counting(NodeTransformer):
    """Adds counting to a template: of loop iterations, macro calls and blocks, and of values from literals and `~`."""

    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call("step"), lineno=node.lineno), *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body  # noqa: N815

    def _value(self, node: Any) -> Any:
        self.generic_visit(node)
        # The target of `{% for a, b in ... %}` and `{% set a, b = ... %}` is also a tuple.
        return node if getattr(node, "ctx", "load") == "store" else _call("checked", node)

    visit_List = visit_Tuple = visit_Dict = _value  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Rewrite `a ~ b ~ c` as pairs, so that every intermediate result is counted."""
        self.generic_visit(node)
        result: nodes.Expr = node.nodes[0]
        for other in node.nodes[1:]:
            parts = [_call("checked", result), _call("checked", other)]
            result = _call("checked", nodes.Concat(parts, lineno=node.lineno))
        return result


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    line = arguments[0].lineno if arguments else 1
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=line)
