"""Chat templates: the text equals that of transformers to the character, and hostile templates are stopped."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.formats import Conversation
from finetune.data.templates import render as module
from finetune.data.templates.chat_templates import TEMPLATES, load_template
from finetune.data.templates.encoder import Encoder
from finetune.data.templates.render import TemplateLimit, check_syntax, render
from finetune.errors import UserError
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, build_tokenizer

TURNS: list[Any] = [
    {"role": "user", "content": " What is\n2 + 2? "},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour, 日本 🙂.\n"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six {{ 7 }}."},
]
CONVERSATIONS = [TURNS[:1], TURNS[:2], TURNS, [{"role": "system", "content": "Be brief."}, *TURNS]]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, {"b": None}]}}}]
# Every construct that a limit applies to, used as in real templates.
FEATURES = r"""{%- set ns = namespace(a='', n=0) %}{%- macro say(m, up=false) %}<{{ m.role|upper if up else m.role }}>
{%- if m.content is string %}{{ m.content|trim|replace('\n', ' ') }}{% endif %}{% endmacro %}
{%- for message in messages if message.role != 'tool' %}{{ say(message, loop.last) ~ '|' ~ loop.index0 ~ loop.length }}
{%- set ns.a = ns.a + message.role[:1] %}{%- set ns.n = ns.n + 1 %}{{ loop.previtem.role if loop.previtem is defined }}
{%- generation %}{{ message.content.split('</think>')[-1].lstrip('\n') }}{% endgeneration %}
{%- if loop.index == 3 %}{% continue %}{% endif %}{{- cycler('a', 'b').next() }}{%- endfor %}
{%- for key, value in {'b': 1, 'a': [1, 2.5, none]}|dictsort %}{{ key }}={{ value|tojson }};{% endfor %}
{{- tools|tojson(indent=2) if tools }}{% if tools %}{{ tools[0].function.name.center(9) }}{% endif %}
{{- '%s-%03d' % (ns.a, ns.n) }}{{ '{}:{:>4}'.format('x', 3) }}{{ '-' * 8 }}{{ 2 ** 5 + 7 % 3 }}{{ (1, 2) + (3,) }}
{{- messages|map(attribute='role')|join(', ') }}{{ messages[::-1]|length }}{{ range(3)|list }}{{ 'a b'|indent(2) }}
{%- for item in [[1, [2]], [3]] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}
{%- set text %}x{{ bos_token }}y{% endset %}{{ text|length }}{{ missing }}{{ none }}{{ [true, {'k': text}] }}"""
ALL = {**{name: item.template for name, item in CHAT_TEMPLATES.items()}, **TEMPLATES, "features": FEATURES}


@pytest.mark.parametrize("name", ALL)
def test_the_text_equals_that_of_transformers(name: str) -> None:
    rendered = 0
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            for tools in (None, TOOLS):
                special = {"bos_token": "<s>", "eos_token": "</s>"}
                given = {"tools": tools, "add_generation_prompt": prompt, **special}
                try:
                    texts, spans = render_jinja_template(
                        [messages], chat_template=ALL[name], return_assistant_tokens_mask=True, **given
                    )
                except (TemplateError, TypeError) as error:
                    with pytest.raises(type(error), match=".*"):
                        render(ALL[name], messages, **given)
                    continue
                assert render(ALL[name], messages, **given) == (texts[0], [])
                assert render(ALL[name], messages, marks=True, **given) == (texts[0], [tuple(one) for one in spans[0]])
                rendered += 1
    assert rendered >= 4


DEEP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
HOSTILE = {
    "repeat": "{{ 'x' * 10**7 }}",
    "repeat from the right": "{{ 10**7 * 'x' }}",
    "a list": "{{ ([1] * 10**9)|length }}",
    "a list of texts": "{{ ([messages[0].content * 100] * 10**4)|join }}",
    "a power": "{% set x = 10 ** (10 ** 9) %}",
    "a tower": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "nested loops": DEEP,
    "nested loops that print": DEEP.replace("{% endfor %}", "much text{% endfor %}", 1),
    "doubling": DOUBLING.replace("BODY", "ns.x ~ ns.x"),
    "doubling by plus": DOUBLING.replace("BODY", "ns.x + ns.x"),
    "doubling by format": DOUBLING.replace("BODY", "'%s%s' % (ns.x, ns.x)"),
    "doubling by str.format": DOUBLING.replace("BODY", "'{0}{0}'.format(ns.x)"),
    "doubling by join": DOUBLING.replace("BODY", "[ns.x, ns.x]|join"),
    "doubling by str.join": DOUBLING.replace("BODY", "''.join([ns.x, ns.x])"),
    "doubling by replace": DOUBLING.replace("BODY", "ns.x|replace('x', 'xx')"),
    "doubling by str.replace": DOUBLING.replace("BODY", "ns.x.replace('x', 'xx')"),
    "doubling by a list": DOUBLING.replace("BODY", "[ns.x, ns.x]"),
    "doubling by a dict": DOUBLING.replace("BODY", "{'a': ns.x, 'b': ns.x}"),
    "doubling by a tuple": DOUBLING.replace("BODY", "(ns.x, ns.x)"),
    "doubling by namespaces": DOUBLING.replace("BODY", "namespace(a=ns.x, b=ns.x)"),
    "doubling by a block": DOUBLING.replace(
        "{% set ns.x = BODY %}", "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"
    ),
    "many large values": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x + ['y' * (9000 + i)] %}{% endfor %}",
    "a filter's width": "{{ 'x'|center(10**7) }}",
    "a method's width": "{{ 'x'.center(10**7) }}",
    "zfill": "{{ 'x'.zfill(10**7) }}",
    "expandtabs": r"{{ '\t'.expandtabs(10**7) }}",
    "translate": "{{ ('a' * 9000).translate({97: 'b' * 9000}) }}",
    "indentation": r"{{ 'x\ny'|indent(10**7) }}",
    "indentation by a text": r"{{ ('x\n' * 9000)|indent('y' * 9000) }}",
    "% width": "{{ '%9999999d' % 1 }}",
    "% star": "{{ '%*d' % (10**7, 1) }}",
    "the filter format": "{{ '%9999999d'|format(1) }}",
    "format's width": "{{ '{:9999999}'.format(1) }}",
    "format's nested width": "{{ '{:{}}'.format(1, 10**7) }}",
    "format_map": "{{ '{a:9999999}'.format_map({'a': 1}) }}",
    "to_bytes": "{{ (1).to_bytes(10**7, 'big') }}",
    "bytes": "{{ 'x'.encode() * 10**7 }}",
    "batches": "{{ [1]|batch(10**6, 0)|list }}",
    "slices": "{{ [1]|slice(10**6)|list }}",
    "rounding": "{{ 1.5|round(10**5, 'ceil') }}",
    "tojson": "{{ [1, [2]]|tojson(indent=10**7) }}",
    "wrapping": "{{ ('x ' * 9000)|wordwrap(1, wrapstring='y' * 9000) }}",
    "placeholder text": "{{ lipsum(10**7) }}",
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "a large range": "{% for i in range(10**6) %}{% endfor %}",
    "constant text": "{% for a in range(999) %}" + "text " * 999 + "{% endfor %}",
    "deep nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "a long template": "x" * (module.MAX_TEMPLATE + 1),
}


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that a template soon exceeds them."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(module, "MAX_BYTES", 64 << 20)
    monkeypatch.setattr(module, "MAX_CHARACTERS", 20_000)
    monkeypatch.setattr(module, "PER_CHARACTER", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the kernel")
@pytest.mark.usefixtures("low_limits")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the timer may first fire in a callback
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_with_a_message(name: str) -> None:
    """Before it has taken more than the limit of memory; the limits are the former ones afterwards."""
    former = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for marks in (False, True) if name in ("repeat", "doubling", "constant text") else (False,):
        with pytest.raises(TemplateLimit, match="The chat template .* was stopped: .* model.chat_template") as caught:
            render(HOSTILE[name], TURNS, marks=marks)
        message = str(caught.value)
        assert len(message) < 900, message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB, with imports
    assert former == (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UserError)  # it comes from a worker process


@pytest.mark.process
def test_a_comparison_that_does_not_return_ends_the_process() -> None:
    template = DOUBLING.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "")
    template += template.replace("ns", "other") + "{{ ns.x == other.x }}"
    if (child := os.fork()) == 0:
        module.KILL_SECONDS = signal.alarm(60) + 0.5
        os._exit(len(render(template, TURNS)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGPROF


@pytest.mark.parametrize(("count", "words"), [(1000, 1000), (4000, 40)])
def test_long_conversations_are_within_the_limits(count: int, words: int) -> None:
    messages = [{"role": "assistant" if i % 2 else "user", "content": "word " * words} for i in range(count)]
    rendered = 0
    for name, template in {**{name: item.template for name, item in CHAT_TEMPLATES.items()}, **TEMPLATES}.items():
        try:
            expected = render_jinja_template([messages], chat_template=template, bos_token="", eos_token="")[0][0]
        except TemplateError:
            continue
        assert render(template, messages, bos_token="", eos_token="")[0] == expected, name
        rendered += 1
    assert rendered >= len(CHAT_TEMPLATES)


def test_other_failures_are_failures_of_the_row() -> None:
    for template in ("{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{{ messages.x.y }}", "{{ 'a' + 1 }}"):
        with pytest.raises((TemplateError, TypeError)):
            render(template, TURNS)


def test_the_encoder_and_the_loader_refuse_hostile_templates(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["<|im_end|>"], "<|im_end|>")
    row = Conversation(messages=[{"role": "user", "content": "now"}, {"role": "assistant", "content": "no"}])
    for template in (HOSTILE["repeat"], HOSTILE["deep nesting"]):
        (tmp_path / "hostile.jinja").write_text(template)
        with pytest.raises(UserError, match="was stopped"):
            chat_template = load_template(tokenizer, str(tmp_path / "hostile.jinja"))
            Encoder(tokenizer, chat_template).encode_batch([row])
    template = "{% if messages[0].content == 'now' %}{{ 'x' * 10**10 }}{% endif %}" + TEMPLATES["chatml"]
    encoder = Encoder(build_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>"), template)
    with pytest.raises(UserError, match="was stopped"):
        encoder.encode_batch([row])
    check_syntax(template)
