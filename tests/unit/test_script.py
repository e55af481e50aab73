"""Scripts of a user's own: their functions, what a mistake in one looks like, and the settings of the model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from finetune import script
from finetune.config import Config, load
from finetune.data.prepare import Data, prepare
from finetune.engine import job
from finetune.engine.model import load_checks, loading
from finetune.errors import RunError, UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.hooks import Hooks
from tests.helpers import ROOT, launch, tiny

ROWS = [{"text": f"the cat sees {word}"} for word in tiny.WORDS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Written:
    """A script in a folder, its functions loaded as Python does it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mine.py"

    def hooks(self, source: str, **names: str) -> Hooks:
        self.path.write_text(source)
        module = ModuleType("mine")
        exec(compile(source, str(self.path), "exec"), module.__dict__)
        return Hooks(script=self.path, **{hook: getattr(module, name) for hook, name in names.items()})


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def settings(tmp_path: Path, *extra: str) -> Config:
    cache = ("--data.cache_dir", str(tmp_path / "cache"))
    return load(["--model.model_name_or_path", "m", *cache, *extra], script="mine.py")


def counted(path: Path, rows: Any) -> tuple[Callable[[Any], Any], list[Any]]:
    """A function that returns `rows`, and the tokenizers that it was called with."""
    calls: list[Any] = []

    def build_dataset(tokenizer: Any) -> Any:
        calls.append(tokenizer)
        return rows() if callable(rows) else rows

    return build_dataset, calls


def made(tmp_path: Path, tokenizer: Any, rows: Any, *extra: str) -> Data:
    (tmp_path / "mine.py").write_text("")
    return prepare(
        settings(tmp_path, *extra), tokenizer, Hooks(script=tmp_path / "mine.py", dataset=counted(tmp_path, rows)[0])
    )


# --- the rows of a function -------------------------------------------------------------------------------------------


def test_rows_are_made_once_and_again_when_the_script_changes(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text("VERSION = 1\n")
    function, calls = counted(tmp_path, ROWS)
    hooks = Hooks(script=path, dataset=function)
    first = prepare(settings(tmp_path), tokenizer, hooks)
    assert (first.cached, calls) == (False, [tokenizer])
    assert [tokenizer.decode(ids) for ids, _ in map(first.train.__getitem__, range(2))] == [
        "the cat sees the<|im_end|>",
        "the cat sees cat<|im_end|>",
    ]
    again = prepare(settings(tmp_path, "--training.learning_rate", "1e-3"), tokenizer, hooks)
    assert again.cached and len(calls) == 1 and again.fingerprint == first.fingerprint
    path.write_text("VERSION = 2\n")
    assert not prepare(settings(tmp_path), tokenizer, hooks).cached and len(calls) == 2
    assert not prepare(settings(tmp_path, "--data.max_length", "8"), tokenizer, hooks).cached and len(calls) == 3


def test_what_the_function_does_to_the_tokenizer_does_not_depend_on_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    """As Unsloth's apply_chat_template does, whose template a user later saves and exports."""
    (tmp_path / "mine.py").write_text("")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    calls = []

    def build_dataset(own: Any) -> Any:
        calls.append(own)
        own.chat_template, own._ollama_modelfile, own.truncation_side = template, "FROM {__FILE__}", "left"
        own.eos_token = "<|im_start|>"
        return ROWS

    hooks = Hooks(script=tmp_path / "mine.py", dataset=build_dataset)
    found = []
    for cached in (False, True):
        own = copy.deepcopy(tokenizer)
        own._ollama_modelfile = None
        data = prepare(settings(tmp_path), own, hooks)
        assert data.cached == cached and len(calls) == 1
        found.append((own.chat_template, own._ollama_modelfile, own.truncation_side, own.eos_token, own.pad_token))
    assert found[0] == found[1] and found[0][0] == template and found[0][3] == "<|im_start|>"


def test_a_data_file_that_the_script_names_counts(tmp_path: Path, tokenizer: Any) -> None:
    data, made_file = tmp_path / "rows.json", tmp_path / "made.json"
    data.write_text("[]")
    path = tmp_path / "mine.py"
    texts = {"FILE": str(data), "MADE": str(made_file), "LONG": "x" * 900 + ".json", "ABSENT": "no/such.json"}
    path.write_text("".join(f"{name} = {text!r}\n" for name, text in texts.items()))

    def writes_a_file() -> list[dict]:
        made_file.write_text("from " + data.read_text())
        return ROWS

    function, calls = counted(tmp_path, writes_a_file)
    hooks = Hooks(script=path, dataset=function)
    for count in (1, 1):  # the file that the function itself writes and the script names is no other input
        prepare(settings(tmp_path), tokenizer, hooks)
        assert len(calls) == count
    data.write_text("[1]")
    for count in (2, 2):
        prepare(settings(tmp_path), tokenizer, hooks)
        assert len(calls) == count


def test_another_result_of_the_same_script_is_other_data(tmp_path: Path, tokenizer: Any) -> None:
    """An unseeded shuffle, a changed file on the network: neither two machines nor a resumed run may mix the two."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    one, other = made(tmp_path / "a", tokenizer, ROWS), made(tmp_path / "b", tokenizer, ROWS[::-1])
    assert one.folder.name == other.folder.name and one.fingerprint != other.fingerprint


def test_held_out_rows(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    pair = (datasets.Dataset.from_list(ROWS).with_format("torch"), iter(ROWS[:3]))
    data = made(tmp_path, tokenizer, lambda: pair, "--training.eval_steps", "5")
    assert data.eval is not None
    assert (len(data.train), len(data.eval), data.ledgers["eval"]["rows_read"]) == (len(ROWS), 3, 3)
    tiny.make_rows(tmp_path / "eval.jsonl", 4)
    other = made(tmp_path, tokenizer, lambda: (ROWS, ROWS), "--data.eval_file", str(tmp_path / "eval.jsonl"))
    assert other.eval is not None and len(other.eval) == 4
    part = made(tmp_path, tokenizer, ROWS, "--data.eval_fraction", "0.4")
    assert part.eval is not None and len(part.eval) + len(part.train) == len(ROWS)
    with pytest.raises(UserError, match="only one may choose them"):
        made(tmp_path, tokenizer, lambda: (ROWS, ROWS), "--data.eval_fraction", "0.5")
    with pytest.raises(UserError, match="returns no evaluation rows"):
        made(tmp_path, tokenizer, ROWS, "--training.eval_steps", "5", "--data.max_length", "64")


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (None, "returned a NoneType"),
        ("train.jsonl", "returned a str"),
        ({"train": ROWS, "test": ROWS}, "several sets of rows (train, test)"),
        ((ROWS, ROWS, ROWS), "returned 3 values"),
        ([["text"]], "build_dataset():row 1: a row must be an object with named fields"),
        ([{"words": "x"}], "no row format matches"),
        ([{"text": ""}], "mine.py: none of 1 row"),
        ([], "no row format matches"),
    ],
)
def test_what_is_no_set_of_rows(tmp_path: Path, tokenizer: Any, rows: Any, what: str) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, tokenizer, lambda: rows)
    assert what in str(caught.value)


def test_a_file_on_the_command_line_replaces_the_function(tmp_path: Path, tokenizer: Any) -> None:
    rows = tiny.make_rows(tmp_path / "train.jsonl", 5)
    function, calls = counted(tmp_path, ROWS)
    config = settings(tmp_path, "--data.train_file", str(rows))
    data = prepare(config, tokenizer, Hooks(script=tmp_path / "mine.py", dataset=function))
    alone = prepare(replace(config, script=None), tokenizer)
    assert len(data.train) == 5 and not calls and data.fingerprint == alone.fingerprint


# --- a mistake in a function ------------------------------------------------------------------------------------------

FAILING = """
def form(row):
    return {"text": row["no such column"]}

def build_dataset(tokenizer):
    import datasets
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    return rows.map(form, num_proc=PROCESSES)

def lazily(tokenizer):
    yield {"text": "a"}
    raise ValueError("the second row")

def leaves(trainer):
    import sys
    sys.exit(3)
"""


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.process)])
def test_the_scripts_own_lines_are_told(written: Written, tokenizer: Any, tmp_path: Path, processes: Any) -> None:
    hooks = written.hooks(FAILING.replace("PROCESSES", str(processes)), dataset="build_dataset")
    with pytest.raises(RunError) as caught:
        prepare(settings(tmp_path), tokenizer, hooks)
    text = str(caught.value)
    first, *frames = text.splitlines()
    assert first.startswith("build_dataset(), the script's `dataset` function, failed at mine.py:3: KeyError: ")
    assert [frame.strip() for frame in frames] == [
        "mine.py:8, in build_dataset",
        f"return rows.map(form, num_proc={processes})",
        "mine.py:3, in form",
        'return {"text": row["no such column"]}',
    ]


def test_rows_that_fail_while_they_are_read_and_a_function_that_exits(
    written: Written, tokenizer: Any, tmp_path: Path
) -> None:
    hooks = written.hooks(FAILING.replace("PROCESSES", "1"), dataset="lazily", trainer="leaves")
    with pytest.raises(RunError, match=r"failed at mine.py:12: ValueError: the second row"):
        prepare(settings(tmp_path), tokenizer, hooks)
    with pytest.raises(
        RunError, match=r"leaves\(\), the script's `trainer` function, failed at mine.py:16: SystemExit"
    ):
        hooks.call("trainer", None)


def test_a_hook_may_return_nothing() -> None:
    hooks = Hooks(tokenizer=lambda value: None, model=lambda value, tokenizer: [value, tokenizer])
    assert hooks.replace("tokenizer", "t") == "t" and hooks.replace("model", "m", "t") == ["m", "t"]
    assert Hooks().replace("model", "m", "t") == "m" and Hooks().call("save", "m", "t") is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_help_and_missing_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "mine.py")
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    assert script.run(file) == 0
    assert capsys.readouterr().out.startswith("usage: accelerate launch mine.py [--config")
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    assert script.run(file) == 2
    assert f"settings file of mine.py not found: {tmp_path / 'mine.yaml'}" in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text("training: {seed: 1}\n")
    assert script.run(file, dataset=len) == 2 and "names no model for mine.py" in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text("model: {model_name_or_path: m}\n")
    assert script.run(file) == 2 and "there is no training data for the model" in capsys.readouterr().err


@pytest.mark.process
def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; from finetune import script\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'unsloth'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# --- settings of the model --------------------------------------------------------------------------------------------

PLAIN = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())


def loaded(folder: Path, *extra: str) -> Any:
    named = ["--model.model_name_or_path", str(folder), "--data.train_file", "t", "--model.backend", "transformers"]
    return loading.load(load([*named, *extra]), PLAIN, row_length=64)


def adapters(found: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in found.named_parameters() if p.requires_grad}


def test_adapter_settings_on_the_transformers_backend(tiny_model: Path) -> None:
    one, same = adapters(loaded(tiny_model)), adapters(loaded(tiny_model, "--lora.random_state", "42"))
    other = adapters(loaded(tiny_model, "--lora.random_state", "7"))
    assert all(torch.equal(one[name], same[name]) for name in one)  # 42 is the default of training.seed
    assert any(not torch.equal(one[name], other[name]) for name in one)
    first_layer = adapters(loaded(tiny_model, "--lora.adapter_kwargs", "{layers_to_transform: [0]}"))
    assert 0 < len(first_layer) < len(one) and all("layers.0." in name for name in first_layer)
    assert loaded(tiny_model, "--lora.bias", "all").peft_config["default"].bias == "all"


def test_arguments_that_the_backend_does_not_take(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="PEFT's LoraConfig has no `finetune_mlp_modules`"):
        loaded(tiny_model, "--lora.adapter_kwargs", "{finetune_mlp_modules: false}")
    named = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", "t", "--model.loader", "FastModel"]
    with pytest.raises(UserError, match=r"model.loader is FastModel, .* the backend is transformers \(a test\)"):
        load_checks.check(load(named), PLAIN)


@pytest.mark.parametrize("chosen", ["nonsense", "flash_attention_3"])
def test_an_attention_that_is_not_there_is_named_with_its_key(chosen: str, tiny_model: Path) -> None:
    """transformers has no such name; its package is not installed."""
    with pytest.raises(UserError, match=f"model.attn_implementation is {chosen}, .*Set it to null"):
        loaded(tiny_model, "--model.attn_implementation", chosen)


UNSLOTH = """
import json, sys
from finetune.runtime import bootstrap
from finetune.config import load
stack = bootstrap.start("unsloth")
from finetune.engine.model import loading
answers = []
for extra in json.loads(sys.argv[2]):
    config = load(["--model.model_name_or_path", sys.argv[1], "--data.train_file", "t", *extra])
    try:
        found = loading.load(config, stack, row_length=64)
        names = [name for name, p in found.named_parameters() if p.requires_grad]
        answers.append([len(names), sum("layers.1." in name for name in names), found.peft_config["default"].bias])
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


@pytest.mark.unsloth
@pytest.mark.process
def test_loader_and_adapter_settings_on_unsloth(tiny_model: Path, tmp_path: Path) -> None:
    cases = [
        ["--lora.r", "8"],
        ["--model.loader", "FastModel", "--lora.adapter_kwargs", "{layers_to_transform: [0]}"],
        ["--model.loader_kwargs", "{offload_embedding: false}", "--lora.bias", "all"],
        ["--model.loader_kwargs", "{unsloth_tiled_mlb: true}"],
        ["--lora.adapter_kwargs", "{loftq: {}}"],
        ["--model.load_in_8bit"],
    ]
    done = launch.python(["-c", UNSLOTH, str(tiny_model), json.dumps(cases)], cache=tmp_path, kind="unsloth")
    assert done.returncode == 0, done.stderr[-3000:]
    usual, first_layer, biased, misspelt, unknown, eight = json.loads(done.stdout.splitlines()[-1])
    assert usual == [28, 14, "none"]  # two layers, seven projections, A and B
    assert first_layer == [14, 0, "none"]
    assert biased == [28, 14, "all"]  # a model without biases: that the argument arrives is all that can be seen
    assert misspelt.startswith(
        "UserError: model.loader_kwargs has `unsloth_tiled_mlb`, which no loader of this model accepts"
    )
    assert unknown.startswith("UserError: lora.adapter_kwargs has `loftq`, which no loader of this model accepts")
    assert eight.startswith("UserError: model.load_in_8bit is set, but the backend loaded 16-bit weights")


def test_a_function_that_imports_unsloth_behind_the_transformers_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    job.check_backend(PLAIN)
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(UserError, match="Set model.backend to unsloth"):
        job.check_backend(PLAIN)
