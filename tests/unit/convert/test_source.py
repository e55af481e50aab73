"""Nothing that a notebook says becomes code of its script, except its code: strings, headings, comments, file names."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from finetune.convert import main
from finetune.convert.command import Outcome, convert, write
from finetune.convert.notebook.read import read
from finetune.convert.script.edits import edited
from finetune.convert.source import Part, comment, docstring, expression, own, script, visible_comments
from finetune.errors import RunError
from tests.helpers import ROOT

EXAMPLE = ROOT / "examples" / "notebooks" / "qlora_alpaca.ipynb"
MODEL = 'x/y"""\nimport os\nos.system("touch MARK")\nz = """'
FILE = 'a""";import os;os.system("touch MARK");x="""b.ipynb'

# What Python, str.splitlines, YAML, a terminal or a reader may take for the end of a string, line or comment.
PIECES = (
    *('"""', "'''", '"', "'", "\\", "\\\\", '\\"', "#", "{", "}", "{0}", "%s", ": ", "- ", "&a", "!!python", "]", ";"),
    *("\n", "\r", "\r\n", "\t", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u2029", "\xa0"),
    *("\0", "\x07", "\x1b[31m", "\x7f", "\x9b", "\u202e", "\ufeff", "\ud800", "\U000e0001", "\U0001f600", "é"),
    *("marker()", "import marker", "\nmarker()\n", ";marker();", "\n    marker()\n", "coding: utf-7"),
)  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(lambda parts: "a" + "".join(parts) + "marker()")
QUICK = {"database": None, "deadline": None, "derandomize": True, "phases": [Phase.generate]}


# --- one text ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, **QUICK)
@given(HOSTILE)
def test_a_docstring_is_a_literal_of_its_text(text: str) -> None:
    (node,) = ast.parse(docstring(text)).body
    assert isinstance(node, ast.Expr) and ast.literal_eval(node.value) == text
    assert docstring(text).splitlines() == docstring(text).split("\n")  # no other line separator


@settings(max_examples=300, **QUICK)
@given(HOSTILE)
def test_a_comment_is_one_line(text: str) -> None:
    assert comment(text).replace("\xa0", "").isprintable() and ast.parse(f"{comment(text)}\n").body == []


def test_an_expression_in_a_template_keeps_its_parts_together() -> None:
    rows = ast.parse("a if b else c", mode="eval").body
    assert ast.unparse(expression("ROWS.map(F)", ROWS=rows, F=ast.Constant('"'))) == "(a if b else c).map('\"')"


# --- the script against what was emitted ------------------------------------------------------------------------------


@pytest.mark.process
def test_a_script_is_its_docstring_and_its_statements() -> None:
    text = script("Title\n\n    indented\nx\n", [Part(text="# a"), own("x = u'1'"), own("def f():\n    '''a\n  b'''")])
    title, one, function = ast.parse(text).body
    assert ast.get_docstring(ast.parse(text)) == "Title\n\n    indented\nx"
    assert ast.unparse(one) == "x = '1'" and isinstance(function, ast.FunctionDef) and isinstance(title, ast.Expr)


OTHER = {
    "a comment that became code": [Part(text="# a\nmarker()")],
    "code in another statement": [Part(text="x = 1; marker()", nodes=ast.parse("x = 1").body)],
    "a changed statement": [Part(text="x = marker()", nodes=ast.parse("x = 1").body)],
    "a statement that became a comment": [Part(text="# x = 1", nodes=ast.parse("x = 1").body)],
    "another order": [Part(text="x = 1\ny = 2", nodes=ast.parse("y = 2\nx = 1").body)],
    "another type": [Part(text="x = 1", nodes=ast.parse("x = True").body)],
    "code in a nested statement": [Part(text="if x:\n    y\n    marker()", nodes=ast.parse("if x:\n    y").body)],
}


@pytest.mark.process
@pytest.mark.parametrize("parts", OTHER.values(), ids=OTHER.keys())
def test_statements_that_were_not_emitted_are_refused(parts: list[Part]) -> None:
    with pytest.raises(RunError, match="other statements than were emitted"):
        script("Title", parts)


@pytest.mark.process
def test_a_docstring_without_escapes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetune.convert.source.docstring", lambda text: f'"""{text}"""')
    (tmp_path / FILE).write_bytes(EXAMPLE.read_bytes())
    assert main([str(tmp_path / FILE), "--out", str(tmp_path / "out")]) == 1
    assert "other statements than were emitted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- whole notebooks --------------------------------------------------------------------------------------------------


def check_no_code(text: str, *names: str) -> None:
    for node in ast.walk(ast.parse(text)):
        assert not (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names), ast.unparse(node)
        assert not (isinstance(node, ast.alias) and node.name in names), node.name


@pytest.mark.process
def test_names_of_the_model_and_the_notebook_are_text(tmp_path: Path) -> None:
    document = EXAMPLE.read_text(encoding="utf-8")
    name = '\\"unsloth/mistral-7b-v0.3-bnb-4bit\\",\\n'
    assert document.count(f"model_name = {name}") == 1
    changed = json.dumps(f"{MODEL!r},\n")[1:-1]
    (tmp_path / FILE).write_text(document.replace(f"model_name = {name}", f"model_name = {changed}"), encoding="utf-8")
    outcome = convert(tmp_path / FILE)
    assert outcome.result == "converted", outcome
    found = outcome.conversion
    check_no_code(found.script, "os.system")
    assert FILE in " ".join((ast.get_docstring(ast.parse(found.script)) or "").split())


PLACES = (
    *("model", "data", "output", "column", "template", "prompt", "instruction", "response", "run", "saved"),
    *("variable", "value", "installation", "secret", "heading", "file", "comment", "kernel", "title", "shell", "magic"),
)  # fmt: skip


def cells(place: dict[str, str]) -> list[str]:
    """The code cells of a notebook that has each text in its place."""
    remark = "".join(one for one in place["comment"] if one not in "\r\n\0")
    line = " ".join(place["magic"].split())
    shell = " ".join(place["shell"].split())
    texts = {name: repr(text) for name, text in place.items()}
    return [
        "import os\n"
        f'if "COLAB_" not in "".join(os.environ.keys()):\n    !pip install unsloth {shell}\n'
        f"else:\n    os.environ[{texts['installation']}] = {texts['installation']}\n    !pip install trl",
        f"%env MINE={line}",
        f"os.environ[{texts['variable']}] = {texts['value']}\nos.environ[{texts['secret']}] = 'hf_{'aB3' * 12}'",
        "from unsloth import FastLanguageModel\n"
        f"model, tokenizer = FastLanguageModel.from_pretrained({texts['model']}, max_seq_length=512)\n"
        f"model = FastLanguageModel.get_peft_model(model, r=8)  # {remark}",
        f"from datasets import load_dataset\nprompt = {texts['prompt']}\ntokenizer.chat_template = {texts['template']}",
        f"# {remark}\ndef to_text(row):\n    # {remark}\n"
        f"    return {{{texts['column']}: prompt + row['q'] + tokenizer.eos_token}}",
        f"dataset = load_dataset({texts['data']}, split='train').map(to_text)",
        "from trl import SFTConfig, SFTTrainer\nfrom unsloth.chat_templates import train_on_responses_only\n"
        "trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, args=SFTConfig(\n"
        f"    max_steps=3, output_dir={texts['output']}, dataset_text_field={texts['column']}, report_to='wandb',\n"
        f"    run_name={texts['run']}))\n"
        f"trainer = train_on_responses_only(trainer, instruction_part={texts['instruction']},"
        f" response_part={texts['response']})",
        "trainer.train()",
        f"model.save_pretrained({texts['saved']})",
    ]


def notebook(place: dict[str, str], folder: Path) -> Path:
    code = [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells(place)]
    heading = {"cell_type": "markdown", "source": f"## {place['heading']}\n", "metadata": {}}
    metadata = {"kernelspec": {"display_name": place["kernel"]}, "title": place["title"]}
    document = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": [heading, *code]}
    stem = "".join(one for one in place["file"] if one not in "/\0").encode("utf-8", "replace").decode()
    path = folder / f"{stem[:60]}.ipynb"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def shape(text: str) -> str:
    """The syntax of a script, whatever its strings say."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def tried(place: dict[str, str], folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    return convert(notebook(place, folder))


EXPLOITS = {
    "model": 'x""";marker();y="""z',
    "file": 'a""";marker();x="""b',
    "saved": 'x", device_map=marker(), y="',
    "secret": 'x"]+marker()+os.environ["y',
    "magic": "x'; marker(); y = '",
    "heading": "a\x00b\ud800",
    "column": 'x" in marker() or "y',
}


@pytest.mark.process
def test_texts_that_fit_the_templates_of_the_converter_stay_texts(tmp_path: Path) -> None:
    plain = {name: f"plain {name}" for name in PLACES}
    outcome = tried(plain | EXPLOITS, tmp_path)
    assert outcome.result == "converted", outcome
    check_no_code(outcome.conversion.script, "marker")


@pytest.mark.process
@pytest.mark.campaign
def test_no_text_of_a_notebook_becomes_code(tmp_path: Path) -> None:
    plain = {name: f"plain {name}" for name in PLACES}
    base = tried(plain, tmp_path / "plain")
    assert base.result == "converted", base
    outcomes: list[str] = []
    wanted = shape(base.conversion.script)

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow], **QUICK)
    @given(st.fixed_dictionaries({}, optional=dict.fromkeys(PLACES, HOSTILE)))
    def check(changed: dict[str, str]) -> None:
        outcome = tried(plain | changed, tmp_path / str(len(outcomes)))
        outcomes.append(outcome.result)
        assert "report this notebook" not in outcome.reason, (changed, outcome)
        if outcome.result != "converted":
            return
        found = outcome.conversion
        check_no_code(found.script, "marker")
        assert shape(found.script) == wanted, changed
        files = write(found, tmp_path / f"out{len(outcomes)}", overwrite=False)
        assert json.loads(files[1].read_bytes())["sha256"] == found.report["sha256"]

    check()
    assert outcomes.count("converted") > len(outcomes) / 3, outcomes


# --- where strings end ------------------------------------------------------------------------------------------------


def notebook_of(path: Path, *sources: str) -> Path:
    """A notebook of these code cells."""
    content = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": source} for source in sources]
    path.write_text(json.dumps({"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def dumped(path: Path) -> list[str]:
    return [ast.dump(one.node) for one in read(path).statements]


@pytest.mark.parametrize(
    "text",
    [
        'p = """a \\"""\n!x \\\n"""\nq = """\nmarker()\nr = \'\'\'\n"""\ns = 1 # \'\'\'',
        'p = """\\"""\n!hello\n%time 5\n\\"""Below"""',
        "p = r'''a \\'''\n!x\n'''",
        'p = """a""" + """\n!x\n"""',
    ],
)
def test_lines_inside_a_string_are_no_magics(tmp_path: Path, text: str) -> None:
    """Beside a shell line, for which the cell is not Python: its other statements are those of the cell alone."""
    whole = dumped(notebook_of(tmp_path / "n.ipynb", f"!pip install foo\n{text}"))
    assert whole == [ast.dump(node) for node in ast.parse(text).body]


def test_marks_of_cells_inside_a_string_split_nothing(tmp_path: Path) -> None:
    text = 'a = 1\n# %%\nb = """\n# %%\nmarker()\n# In[3]:\n"""\n# %% next\nc = 2\n'
    (tmp_path / "n.py").write_text(text)
    assert dumped(tmp_path / "n.py") == [ast.dump(node) for node in ast.parse(text).body]
    assert [one.cell for one in read(tmp_path / "n.py").statements] == sorted(
        {one.cell for one in read(tmp_path / "n.py").statements}
    )


def test_statements_on_one_line_are_each_read_once(tmp_path: Path) -> None:
    text = '# above\na = 1; b = 2; c = """x\ny"""; d = 4\n# of e\ne = 5  # after'
    notebook = read(notebook_of(tmp_path / "n.ipynb", text))
    assert [ast.dump(one.node) for one in notebook.statements] == [ast.dump(node) for node in ast.parse(text).body]
    assert notebook.statements[-1].source == "# of e\ne = 5  # after"


def test_characters_that_hide_code_are_escapes_in_comments() -> None:
    code = "x = '\u202e'  # a\u202e b\u2028c\x0cd"
    shown = visible_comments(code)
    assert shown == "x = '\u202e'  # a\\u202e b\\u2028c\\x0cd" and ast.dump(ast.parse(shown)) == ast.dump(
        ast.parse(code)
    )
    assert visible_comments("y = 1  # caf\u00e9") == "y = 1  # caf\u00e9"


@pytest.mark.process
def test_an_empty_shell_line_is_left_out(tmp_path: Path) -> None:
    content = json.loads(EXAMPLE.read_text())
    content["cells"].insert(2, {"cell_type": "code", "metadata": {}, "outputs": [], "source": "!"})
    (tmp_path / "n.ipynb").write_text(json.dumps(content))
    assert convert(tmp_path / "n.ipynb").result == "converted"


def test_half_of_a_character_is_named(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": "name = '\ud83d'", "metadata": {}, "outputs": [], "execution_count": None}
    (tmp_path / "n.ipynb").write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    ((index, why, _),) = read(tmp_path / "n.ipynb").unparsed
    assert index == 0 and "half of a character (a lone surrogate)" in why


# --- the notebook's text with what was rewritten in it ----------------------------------------------------------------

CALL = """# the trainer
trainer = SFTTrainer(
    model,  # with its adapter
    args=SFTConfig(learning_rate=2e-4, report_to="wandb",  # online
                   max_steps=60),
    eval_dataset=None,  # none yet
)"""

# What changes in a statement -> its text afterwards.
EDITS = {
    "nothing": (CALL, lambda call: None, CALL),
    "an argument is added": (
        CALL,
        lambda call: call.keywords.append(ast.keyword("global_batch_size", ast.Constant(8))),
        CALL[:-1] + "global_batch_size=8)",
    ),
    "one is left out, with its comment": (
        CALL,
        lambda call: call.keywords.pop(),
        CALL.replace("eval_dataset=None,  # none yet", ""),
    ),
    "one inside is another": (
        CALL,
        lambda call: setattr(call.keywords[0].value.keywords[1], "value", ast.Constant("none")),
        CALL.replace('"wandb"', "'none'"),
    ),
    "without a comma at the end": (
        "t = f(1, a=0x10)  # six",
        lambda call: call.keywords.append(ast.keyword("b", ast.Constant(2))),
        "t = f(1, a=0x10, b=2)  # six",
    ),
    "of a call without arguments": (
        "t = f()",
        lambda call: call.keywords.append(ast.keyword("b", ast.Constant(2))),
        "t = f(b=2)",
    ),
    "behind letters of several bytes": (
        't = f("漢字", a=1e3, b=2)',
        lambda call: call.keywords.pop(),
        't = f("漢字", a=1e3, )',
    ),
    "another function": ("t = trl.f(1e3)", lambda call: setattr(call, "func", ast.Name("f", ast.Load())), "t = f(1e3)"),
    "another number of arguments": ("t = f(1e3)", lambda call: call.args.append(ast.Constant(2)), "t = f(1000.0, 2)"),
}


@pytest.mark.parametrize("case", EDITS)
def test_what_is_rewritten_keeps_the_rest_of_the_text(case: str) -> None:
    source, change, expected = EDITS[case]
    (new,) = ast.parse(source).body
    assert isinstance(new, ast.Assign)
    change(new.value)
    assert edited(source, ast.fix_missing_locations(new)) == expected


def test_a_statement_of_another_kind_is_written_anew() -> None:
    assert edited("import os  # here", ast.parse("import sys").body[0]) is None


def test_two_statements_on_a_line_stay_where_they_are() -> None:
    source = "def f():\n    a = 1e3; b = g(x=2)  # both\n    c = 0x10"
    (new,) = ast.parse(source).body
    new.body[1].value.keywords[0].value = ast.Constant(5)
    assert edited(source, ast.fix_missing_locations(new)) == source.replace("x=2", "x=5")
    del new.body[0]
    assert edited(source, new) is None
