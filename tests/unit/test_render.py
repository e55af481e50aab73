"""Chat templates: the text of transformers to the character, and an end to those that would never end."""

from __future__ import annotations

import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data import render as module
from finetune.data.formats import Conversation
from finetune.data.render import TemplateLimit, check_syntax, render
from finetune.data.template import TEMPLATES, Encoder, load_template
from finetune.errors import UserError
from tests.unit.chat_templates import CHAT_TEMPLATES, build_tokenizer

TURNS: list[Any] = [
    {"role": "user", "content": " What is\n2 + 2? "},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour, 日本 🙂.\n"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six {{ 7 }}."},
]
CONVERSATIONS = [TURNS[:1], TURNS[:2], TURNS, [{"role": "system", "content": "Be brief."}, *TURNS]]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, {"b": None}]}}}]
# Every construct that a limit looks at, used as templates use it.
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
def test_the_text_is_that_of_transformers(name: str) -> None:
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


DEEP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(64) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
HOSTILE = {
    "repeat": "{{ 'x' * 10**10 }}",
    "repeat from the right": "{{ 10**10 * 'x' }}",
    "a list": "{{ ([1] * 10**9)|length }}",
    "a list of texts": "{{ ([messages[0].content * 1000] * 10**6)|join }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
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
    "{% set ns.x = ns.x + ['y' * (900000 + i)] %}{% endfor %}",
    "large operators": "{% for i in range(99999) %}{% set t = 'y' * 900000 %}{% endfor %}",
    "a filter's width": "{{ 'x'|center(10**10) }}",
    "a method's width": "{{ 'x'.center(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": r"{{ '\t'.expandtabs(10**10) }}",
    "translate": "{{ ('a' * 9000).translate({97: 'b' * 9000}) }}",
    "indentation": r"{{ 'x\ny'|indent(10**10) }}",
    "indentation by a text": r"{{ ('x\n' * 9000)|indent('y' * 9000) }}",
    "% width": "{{ '%9999999999d' % 1 }}",
    "% star": "{{ '%*d' % (10**9, 1) }}",
    "the filter format": "{{ '%9999999999d'|format(1) }}",
    "format's width": "{{ '{:9999999999}'.format(1) }}",
    "format's nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "bytes": "{{ 'x'.encode() * 10**10 }}",
    "batches": "{{ [1]|batch(10**10, 0)|list }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "tojson": "{{ [1, [2]]|tojson(indent=10**10) }}",
    "wrapping": "{{ ('x ' * 9000)|wordwrap(1, wrapstring='y' * 9000) }}",
    "filler text": "{{ lipsum(10**8) }}",
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "a large range": "{% for i in range(10**12) %}{% endfor %}",
    "constant text": "{% for a in range(9999) %}" + "text " * 9999 + "{% endfor %}",
    "deep nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "a long template": "x" * (module.MOST_TEMPLATE + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for marks in (False, True) if name in ("repeat", "doubling", "constant text") else (False,):
        stopped = "the chat template .* was stopped: .* model.chat_template"
        with pytest.raises(TemplateLimit, match=stopped) as caught:
            render(HOSTILE[name], TURNS, marks=marks)
        assert len(str(caught.value)) < 900
    if sys.platform == "linux":  # KiB there
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UserError)  # it comes from a worker process


def test_the_time_of_a_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    with pytest.raises(TemplateLimit, match="seconds for one conversation"):
        render("{% for m in messages %}{% endfor %}", TURNS)


def test_long_conversations_are_within_the_limits() -> None:
    messages = [{"role": "assistant" if i % 2 else "user", "content": "word " * 1000} for i in range(1000)]
    for name, item in CHAT_TEMPLATES.items():
        try:
            expected = render_jinja_template([messages], chat_template=item.template, bos_token="", eos_token="")[0][0]
        except TemplateError:
            continue
        assert render(item.template, messages, bos_token="", eos_token="")[0] == expected, name


def test_other_failures_stay_failures_of_a_row() -> None:
    for template in ("{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{{ messages.x.y }}", "{{ 'a' + 1 }}"):
        with pytest.raises((TemplateError, TypeError)):
            render(template, TURNS)


def test_the_encoder_and_the_loader_refuse(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["<|im_end|>"], "<|im_end|>")
    for template in (HOSTILE["repeat"], HOSTILE["deep nesting"]):
        (tmp_path / "hostile.jinja").write_text(template)
        with pytest.raises(UserError, match="was stopped"):
            chat_template = load_template(tokenizer, str(tmp_path / "hostile.jinja"))
            Encoder(tokenizer, chat_template)
    template = "{% if messages[0].content == 'now' %}{{ 'x' * 10**10 }}{% endif %}" + TEMPLATES["chatml"]
    encoder = Encoder(build_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>"), template)
    row = Conversation(messages=[{"role": "user", "content": "now"}, {"role": "assistant", "content": "no"}])
    with pytest.raises(UserError, match="was stopped"):
        encoder.encode_batch([row])
    check_syntax(template)
