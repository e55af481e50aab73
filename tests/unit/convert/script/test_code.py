"""What `finetune convert` makes of a notebook's code for several ranks, and what is refused."""
# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.convert import main
from finetune.convert.checks import NotVerified, has_every_statement, has_its_frame, safe_on_ranks
from finetune.convert.command import convert, steps
from finetune.convert.notebook.read import Refusal

pytestmark = pytest.mark.process  # ruff runs in a process of its own

LOAD = """import os, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig, get_peft_model
from trl import SFTTrainer, SFTConfig
from datasets import Dataset, load_dataset
model = AutoModelForCausalLM.from_pretrained("acme/tiny", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("acme/tiny")"""
DATA = """rows = load_dataset("acme/questions", split="train")
def to_text(row):
    return {"text": row["q"] + row["a"] + tokenizer.eos_token}
rows = rows.map(to_text)"""
CONFIG = """peft_config = LoraConfig(r=8, task_type="CAUSAL_LM")
args = TrainingArguments(output_dir="out", evaluation_strategy="no", warmup_ratio=0.1, report_to="wandb", group_by_length=True)"""
TRAINER = """trainer = SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=peft_config, tokenizer=tokenizer, dataset_text_field="text", max_seq_length=512)"""
TRAIN = "trainer.train()"
SAVE = 'trainer.save_model("final")\ntokenizer.save_pretrained("final")'
CELLS = {"load": LOAD, "data": DATA, "config": CONFIG, "trainer": TRAINER, "train": TRAIN, "save": SAVE}
UNSLOTH = """import os
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
length = 1024
model, tokenizer = FastLanguageModel.from_pretrained("acme/tiny", max_seq_length=length, load_in_4bit=True, device_map="auto")
model = FastLanguageModel.get_peft_model(model, r=8)"""


@pytest.fixture
def notebook(tmp_path: Path) -> Callable[..., Path]:
    def write(**changed: str) -> Path:
        cells = [text for text in (CELLS | changed).values() if text]
        order = [*CELLS, *(set(changed) - set(CELLS))]
        if "before" in changed:  # ahead of the trainer
            texts = CELLS | changed
            order = ["load", "data", "before", "config", "trainer", "train", "save"]
            cells = [texts[name] for name in order if texts[name]]
        code = [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells]
        path = tmp_path / "mine.ipynb"
        path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code}))
        return path

    return write


def converted(path: Path) -> Any:
    outcome = convert(path)
    assert outcome.result == "converted", outcome
    return outcome.conversion


def body(script: str) -> str:
    """main(), by its syntax: independent of layout."""
    tree = ast.parse(script)
    return "\n".join(
        ast.unparse(one)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
        for one in node.body
    )


def test_the_notebooks_code_in_its_order(notebook: Callable[..., Path]) -> None:
    conversion = converted(notebook())
    script, text = conversion.script, body(conversion.script)
    top = [line for line in script.splitlines() if line.startswith(("from", "import"))]
    assert top[0] == "import os" and top[1].startswith("from finetune import SFTTrainer, TrainingArguments")
    assert "from trl" not in script and 'os.environ.setdefault("FINETUNE_BACKEND", "transformers")' in script
    order = [
        "set_seed(42)",
        "AutoModelForCausalLM",
        "load_dataset(",
        "def to_text",
        "rows.map(to_text)",
        "LoraConfig(",
        "TrainingArguments(",
        "SFTTrainer(",
        "trainer.train()",
        "trainer.save_model",
        "tokenizer.save_pretrained",
    ]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert "device_map={'': PartialState().device}" in text
    passed = dict.fromkeys(("V1", "V2", "V3", "V4", "V6"), "passed")
    assert conversion.report["verification"] == passed
    assert script.rstrip().endswith('if __name__ == "__main__":\n    main()')


def call(script: str, name: str) -> dict[str, str]:
    """The keywords of the one call with this name."""
    (found,) = [
        one for one in ast.walk(ast.parse(script)) if isinstance(one, ast.Call) and ast.unparse(one.func) == name
    ]
    return {str(item.arg): ast.unparse(item.value) for item in found.keywords}


def test_old_spellings_and_defaults_stay(notebook: Callable[..., Path]) -> None:
    """The script's TrainingArguments and SFTTrainer take them, on their values."""
    script = converted(notebook()).script
    assert call(script, "TrainingArguments") == {
        "output_dir": "'out'", "evaluation_strategy": "'no'", "warmup_ratio": "0.1", "report_to": "'wandb'",
        "group_by_length": "True",
    }  # fmt: skip
    assert call(script, "SFTTrainer") == {
        "model": "model", "args": "args", "train_dataset": "rows", "peft_config": "peft_config",
        "tokenizer": "tokenizer", "dataset_text_field": "'text'", "max_seq_length": "512", "global_batch_size": "8",
    }  # fmt: skip


# How the notebook gives its batch, and what the trainer is given. Defaults: TRL's 8 x 1, Unsloth's 4 x 2.
BATCHES = {
    "numbers": ("args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=3)", "args", "6"),
    "one number": ("args = TrainingArguments('out', gradient_accumulation_steps=4)", "args", "32"),
    "an older name": ("args = TrainingArguments('out', per_gpu_train_batch_size=2)", "args", "2"),
    "variables": ("micro = 2\nargs = SFTConfig(per_device_train_batch_size=micro, gradient_accumulation_steps=32 // micro)", "args", "32"),
    "a dict": (
        "given = dict(per_device_train_batch_size=3)\nargs = SFTConfig(**given)",
        "args",
        "args.per_device_train_batch_size * args.gradient_accumulation_steps",
    ),
    "inside": ("", "SFTConfig(per_device_train_batch_size=5)", "5"),
    "none": ("", "None", "8"),
    "set later": (
        "args = SFTConfig(per_device_train_batch_size=2)\nargs.gradient_accumulation_steps = 4",
        "args",
        "args.per_device_train_batch_size * args.gradient_accumulation_steps",
    ),
    "set by the machine": (
        "steps = 4 if torch.cuda.is_available() else 2",
        "SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=steps)",
        "2 * steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_is_the_notebooks_on_any_number_of_gpus(case: str, notebook: Callable[..., Path]) -> None:
    config, args, expected = BATCHES[case]
    trainer = f"trainer = SFTTrainer(model=model, args={args}, train_dataset=rows, peft_config=LoraConfig(r=8))"
    conversion = converted(notebook(config=config, trainer=trainer))
    assert call(conversion.script, "SFTTrainer")["global_batch_size"] == expected
    assert any(f"global_batch_size={expected} is the notebook's batch" in note for note in conversion.report["notes"])


def test_a_configuration_from_a_function_is_made_once(notebook: Callable[..., Path]) -> None:
    config = "def arguments(rows):\n    return SFTConfig(per_device_train_batch_size=rows)"
    trainer = "trainer = SFTTrainer(model=model, args=arguments(2), train_dataset=rows, peft_config=LoraConfig(r=8))"
    given = call(converted(notebook(config=config, trainer=trainer)).script, "SFTTrainer")
    assert given["args"] == "(sft_args := arguments(2))"
    assert given["global_batch_size"] == "sft_args.per_device_train_batch_size * sft_args.gradient_accumulation_steps"


def test_a_batch_that_is_not_known_is_said(notebook: Callable[..., Path]) -> None:
    trainer = "def make(args):\n    return SFTTrainer(model=model, args=args, train_dataset=rows)\ntrainer = make(None)"
    conversion = steps(notebook(load=UNSLOTH, config="", trainer=trainer))[1]
    assert "global_batch_size" not in conversion.script
    assert any("on N GPUs a step has N times the notebook's rows" in note for note in conversion.report["notes"])


CHECKPOINTS = {
    "a folder": ('PeftModel.from_pretrained(base, "out/checkpoint-750")', "out/checkpoint-750"),
    "a file of it": ('torch.load("out/checkpoint-5/optimizer.pt")', "out/checkpoint-5/optimizer.pt"),
    "a path in parts": ('PeftModel.from_pretrained(base, os.path.join("out", "checkpoint-12"))', "checkpoint-12"),
    "another folder": ('PeftModel.from_pretrained(base, "out/checkpoint-best")', None),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_named_by_its_step_is_said(case: str, notebook: Callable[..., Path]) -> None:
    code, path = CHECKPOINTS[case]
    save = f'from peft import PeftModel\nbase = model\nlast = {code}\nlast.save_pretrained("merged")'
    notes = [note for note in converted(notebook(save=save)).report["notes"] if "checkpoint-" in note]
    assert len(notes) == (path is not None)
    assert path is None or f"{path} is a step of the notebook's training" in notes[0]


def test_what_unsloth_fills_in_is_left_to_it(notebook: Callable[..., Path]) -> None:
    """Its SFTConfig is in the place of TRL's, in the script as in the notebook; its defaults are 4 x 2 rows."""
    config = "SFTConfig(max_steps=5, gradient_accumulation_steps=3)"
    trainer = f"trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, args={config})"
    script = converted(notebook(load=UNSLOTH, config="", trainer=trainer)).script
    assert call(script, "SFTConfig") == {"max_steps": "5", "gradient_accumulation_steps": "3"}
    assert call(script, "SFTTrainer")["global_batch_size"] == "12" and "set_seed(3407)" in script
    assert "device_map" not in script and "CUDA_VISIBLE_DEVICES" not in script and "FINETUNE_BACKEND" not in script
    lines = script.splitlines()
    ours = next(n for n, line in enumerate(lines) if line.startswith("from finetune"))
    assert 'os.environ["TOKENIZERS_PARALLELISM"] = "false"' in lines[:ours]
    assert lines[ours + 1].startswith("from unsloth")


def test_unsloths_trainer_without_arguments_stays(notebook: Callable[..., Path]) -> None:
    trainer = "trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=rows)"
    script = steps(notebook(load=UNSLOTH, config="", trainer=trainer))[1].script
    assert call(script, "SFTTrainer").keys() == {"model", "tokenizer", "train_dataset", "global_batch_size"}


def test_an_unsloth_that_nothing_uses_is_still_imported(notebook: Callable[..., Path]) -> None:
    """It patches TRL and transformers: without it, the script would train by other defaults."""
    script = converted(notebook(load="from unsloth import FastLanguageModel\n" + LOAD)).script
    assert "\nimport unsloth\n" in script and "FINETUNE_BACKEND" not in script


def test_arguments_in_a_dict_stay_there(notebook: Callable[..., Path]) -> None:
    given = 'given = {"model": model, "args": args, "train_dataset": rows}\ngiven["peft_config"] = peft_config\n'
    script = converted(notebook(trainer=given + "trainer = SFTTrainer(**given)")).script
    batch = "given['args'].per_device_train_batch_size * given['args'].gradient_accumulation_steps"
    assert call(script, "SFTTrainer") == {"None": "given", "global_batch_size": batch}
    assert "given" in script and '"train_dataset": rows' in script


LOADS = {
    "load_in_4bit=True": "quantization_config={'load_in_4bit': True}",
    "load_in_8bit=four": "quantization_config={'load_in_8bit': True} if four else None",
    "use_flash_attention_2=True": "attn_implementation='flash_attention_2'",
    "use_flash_attention_2=False": "",
    "use_auth_token=key": "token=key",
}


@pytest.mark.parametrize("given", LOADS)
def test_a_loader_has_todays_arguments(given: str, notebook: Callable[..., Path]) -> None:
    load = "four, key = True, None\n" + LOAD.replace('device_map="auto"', given)
    script = converted(notebook(load=load)).script
    found = call(script, "AutoModelForCausalLM.from_pretrained")
    assert [f"{name}={value}" for name, value in found.items()] == ([LOADS[given]] if LOADS[given] else [])


def test_a_client_that_only_judges_afterwards_is_left_out(notebook: Callable[..., Path]) -> None:
    save = SAVE + "\nprint(client.ask('?'))"
    script = converted(notebook(before="import openai\nclient = openai.OpenAI()", save=save)).script
    assert "openai" not in script.split('"""', 2)[2]


GONE = {
    "pip": "!pip install trl",
    "pip by a process": 'import subprocess, sys\nsubprocess.check_call([sys.executable, "-m", "pip", "install", "trl"])',
    "pip with its output away": 'os.system("pip install trl > /dev/null 2>&1")',
    "ensurepip": "import ensurepip\nensurepip.bootstrap()",
    "a login": "from huggingface_hub import login, whoami, HfApi\nlogin()\nprint(whoami())\napi = HfApi()",
    "wandb": 'import wandb\nos.environ["WANDB_API_KEY"] = "x"\nwandb.login()\nrun = wandb.init(project="p")',
    "display": "rows[0]\nrows.features\nrows.to_pandas().head()\n[tokenizer.decode(row).strip() for row in rows['input_ids']]",
    "a histogram": "lengths = [len(tokenizer(r['text'])['input_ids']) for r in rows]\nimport matplotlib.pyplot as plt\nplt.hist(lengths)\nplt.show()",
    "generation": 'inputs = tokenizer("a", return_tensors="pt").to("cuda")\noutputs = model.generate(**inputs)\nprint(tokenizer.decode(outputs[0]))',
    "a pipeline": 'from transformers import pipeline\npipe = pipeline("text-generation", model=model, tokenizer=tokenizer)\npipe("a")',
    "a function that generates": 'def ask(q):\n    inputs = tokenizer(q, return_tensors="pt").to("cuda")\n    return tokenizer.decode(model.generate(**inputs)[0])\nprint(ask("a"))',
    "a function that moves the model": 'def ask(q):\n    model.to("cuda").eval()\n    return model.generate(torch.tensor([tokenizer.encode(q)]).to(model.device))\nprint(ask("a"))',
    "a function that computes": 'def ask(q):\n    print(model(**tokenizer(q)).logits.float(), model.generate(q))\nask("a")',
    "a function with a history": 'asked = []\ndef ask(q):\n    asked.append(q)\n    print(model.generate(q))\nask("a")',
    "a device": 'torch.cuda.set_device(0)\nDEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"\nif DEVICE != "cpu":\n    model.to(DEVICE)',
    "model parallelism": "if torch.cuda.device_count() > 1:\n    model.is_parallelizable = True\n    model.model_parallel = True",
    "dead code": "if False:\n    model = None",
    "memory": "gpu = torch.cuda.get_device_properties(0)\nprint(gpu.name)\n!nvidia-smi",
    "publishing": 'rows.push_to_hub("me/rows")\nmodel.push_to_hub("me/model")',
}


@pytest.mark.parametrize("case", GONE)
def test_what_the_training_does_not_need_is_left_out(case: str, notebook: Callable[..., Path]) -> None:
    plain = steps(notebook())[1]
    more = steps(notebook(before=GONE[case]))[1]
    assert body(more.script) == body(plain.script)
    outcomes = {item["statement"]: item for item in more.report["statements"] if item["cell"] == 2}
    assert all(item["outcome"] == "dropped" and item["reason"] for item in outcomes.values())


KEPT = {
    "a shuffle in place": ("import random\ndata = list(rows)\nrandom.shuffle(data)\nrows = Dataset.from_list(data)", ["random.shuffle(data)"]),
    "a cast": ("model = model.to(torch.bfloat16)\nmodel.half()", ["model.to(torch.bfloat16)", "model.half()"]),
    "settings of the model": ("model.config.use_cache = False\nmodel.enable_input_require_grads()", ["model.config.use_cache = False", "model.enable_input_require_grads()"]),
    "new tokens": ('tokenizer.add_special_tokens({"pad_token": "<p>"})\nmodel.resize_token_embeddings(len(tokenizer))', ["add_special_tokens", "resize_token_embeddings"]),
    "a format of its own": ("rows.set_format('torch')", ["rows.set_format('torch')"]),
    "a function that also logs in": (
        'from huggingface_hub import login\ndef setup():\n    login()\n    tokenizer.pad_token = "<p>"\nsetup()',
        ["setup()", "tokenizer.pad_token = '<p>'"],
    ),
    "a function that also generates": (
        'def setup():\n    print(model.generate(rows))\n    tokenizer.add_tokens(["<p>"])\nsetup()',
        ["setup()", "tokenizer.add_tokens(['<p>'])"],
    ),
    "a function that also changes its argument": (
        'def ask(tokenizer):\n    tokenizer.add_tokens(["<p>"])\n    return model.generate(rows)\nprint(ask(tokenizer))',
        ["ask(tokenizer)", "tokenizer.add_tokens(['<p>'])"],
    ),
    "a function that also freezes": (
        "def ask():\n    for p in model.parameters():\n        p.requires_grad = False\n    print(model.generate(rows))\nask()",
        ["ask()", "p.requires_grad = False"],
    ),
    "a function that also casts": (
        "def ask():\n    print(model.generate(rows))\n    model.to(torch.float16)\n    model.get_input_embeddings().half()\nask()",
        ["ask()", "model.to(torch.float16)"],
    ),
    "globals": ("count = 0\ndef number(row):\n    global count\n    count += 1\n    return row\nrows = rows.map(number)", ["nonlocal count"]),
    "tokens by the notebook": ("def tok(r):\n    enc = tokenizer(r['text'])\n    enc['labels'] = [-100] + enc['input_ids'][1:]\n    return enc\nrows = rows.map(tok)", ["enc['labels'] = [-100]", "rows.map(tok)"]),
    "a hard-coded device": ('x = torch.zeros(1).to("cuda:1")\nmodel.register_buffer("x", x)', ["to('cuda')"]),
    "a secret": ('from google.colab import userdata\nkey = userdata.get("HF_TOKEN")\nrows = load_dataset("acme/x", token=key)', ["key = os.environ.get('HF_TOKEN')"]),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_the_training_may_need_stays(case: str, notebook: Callable[..., Path]) -> None:
    cell, wanted = KEPT[case]
    text = body(converted(notebook(before=cell)).script)
    assert [word for word in wanted if word not in text] == []


def test_a_written_file_is_written_once_per_machine(notebook: Callable[..., Path]) -> None:
    write = 'import json\nwith open("rows.jsonl", "w") as file:\n    for row in rows:\n        file.write(json.dumps(row))\nrows = load_dataset("json", data_files="rows.jsonl", split="train")'
    text = body(converted(notebook(before=write)).script)
    guard, wait = (
        text.index("if PartialState().is_local_main_process:\n    with open"),
        text.index("\nPartialState().wait_for_everyone()"),
    )
    assert guard < wait < text.index("data_files='rows.jsonl'")
    both = "def store(rows):\n    rows.to_json('x.jsonl')\n    return 5\nsteps = store(rows)\nrows = rows.select(range(steps))"
    refused = convert(notebook(before=both))
    assert refused.code == "R4" and "`steps = store(rows)` writes a file and computes steps" in refused.reason


def test_several_written_folders_are_one_block(notebook: Callable[..., Path]) -> None:
    folders = "\n".join(f"os.makedirs('folder-{n}', exist_ok=True)" for n in range(7))
    text = body(converted(notebook(before=folders)).script)
    assert text.count("if PartialState().is_local_main_process:") == 1
    lines = text[text.index("if PartialState().is_local_main_process:") :].splitlines()
    assert lines[1:8] == [f"    os.makedirs('folder-{n}', exist_ok=True)" for n in range(7)]
    assert lines[8] == "PartialState().wait_for_everyone()"


def test_preparation_runs_first_on_one_rank_of_a_machine(notebook: Callable[..., Path]) -> None:
    tree = ast.parse(converted(notebook()).script)
    (guard,) = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    assert ast.unparse(guard.items[0]) == "PartialState().local_main_process_first()"
    inside = ast.unparse(guard)
    assert "load_dataset(" in inside and "rows.map(to_text)" in inside and "SFTTrainer" not in inside


def test_saves_run_on_the_main_rank_and_the_trainers_on_every_rank(notebook: Callable[..., Path]) -> None:
    save = 'trainer.save_model("a")\nmerged = model.merge_and_unload()\nmerged.save_pretrained("b")\ntokenizer.push_to_hub("me/x")\nfor n in range(3):\n    print(n)'
    conversion = converted(notebook(save=save))
    after = body(conversion.script).split("trainer.train()")[1]
    assert after.strip() == (
        "PartialState().wait_for_everyone()\ntrainer.save_model('a')\nif PartialState().is_main_process:\n"
        "    merged = model.merge_and_unload()\n    merged.save_pretrained('b')"
    )
    assert any("tokenizer.push_to_hub" in note and "hf upload" in note for note in conversion.report["notes"])


def test_what_every_rank_must_call_is_never_on_the_main_rank_alone(notebook: Callable[..., Path]) -> None:
    save = 'loss = trainer.evaluate()["eval_loss"]\nmodel.save_pretrained(f"out-{loss}")'
    after = body(converted(notebook(save=save)).script).split("wait_for_everyone()")[-1].strip()
    assert after.splitlines()[0] == "loss = trainer.evaluate()['eval_loss']"
    assert after.splitlines()[1] == "if PartialState().is_main_process:"


def test_training_in_a_function_stays_there(notebook: Callable[..., Path]) -> None:
    function = (
        "def go(lr):\n    with open('x.json', 'w') as file:\n        file.write('1')\n    "
        + TRAINER
        + '\n    trainer.train()\n    trainer.model.save_pretrained("out")\n    return trainer'
    )
    path = notebook(
        trainer=function,
        train="if torch.cuda.is_available():\n    done = go(1e-4)\nelse:\n    done = go(1e-5)",
        save="",
    )
    text = body(converted(path).script)
    assert "    if PartialState().is_local_main_process:\n        with open('x.json', 'w') as file:" in text
    assert "    PartialState().wait_for_everyone()\n    trainer = SFTTrainer(" in text
    assert "    if PartialState().is_main_process:\n        trainer.model.save_pretrained('out')" in text
    assert "tokenizer=tokenizer" in text


def test_how_to_run_the_script_is_said(
    notebook: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(notebook()), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for command in ("python -m finetune.dryrun", "python -m finetune.advise", "accelerate launch"):
        assert f"{command} {out / 'mine.py'} " in said
    assert "--finetune training.learning_rate=1e-4" in said
    assert sorted(one.name for one in out.iterdir()) == ["mine.py", "mine.report.json"]
    assert main([str(notebook()), "--out", str(out), "--form", "settings"]) == 2
    assert "unknown option: `--form`" in capsys.readouterr().err


_OWN_MODULE = "import sys\nsys.path.append('src')\nfrom mine import render\nrows = rows.map(render)"
REFUSED = {
    "a sweep": ({"trainer": "for lr in [1, 2]:\n    " + TRAINER + "\n    trainer.train()", "train": ""}, "R2", "in a loop"),
    "a service": ({"before": "import openai\nc = openai.OpenAI()\nrows = rows.map(lambda r: {'text': c.ask(r)})"}, "R4", "depend on a service"),
    "another model": ({"before": "other = AutoModelForCausalLM.from_pretrained('x')\nrows = rows.map(lambda r: {'text': other(r)})"}, "R4", "another model"),
    "rows of the model": ({"before": "rows = rows.map(lambda r: {'text': model.generate(r)})"}, "R4", "generated by the model"),
    "an installation and more": ({"before": 'os.system("pip install x; make data")'}, "R4", "os.system"),
    "modules of a repository": ({"before": _OWN_MODULE}, "R4", "it imports mine, a module of the repository, which is not beside the notebook"),
    "an unknown argument": ({"trainer": TRAINER.replace("max_seq_length", "bogus")}, "R4", "no argument `bogus`"),
    "another loss": ({"config": CONFIG.replace('output_dir="out"', 'label_smoothing_factor=0.1')}, "R4", "changes the loss"),
    "a later setting": ({"trainer": TRAINER + "\ntrainer.args.learning_rate = 1"}, "R4", "after the trainer is created"),
    "parallel by hand": ({"before": "model = torch.nn.DataParallel(model)"}, "R4", "DataParallel"),
    "names at run time": ({"before": "rows = globals()['rows']"}, "R4", "only exist at run time"),
    "a class that TRL dropped": ({"before": "from trl.trainer import ConstantLengthDataset\nrows = ConstantLengthDataset(tokenizer, rows)"}, "R4", "ConstantLengthDataset"),
    "every name of a module": ({"before": "from helpers import *\nrows = f(rows)"}, "R4", "imports every name"),
    "another trainer": ({"trainer": "from trl import DPOTrainer\n" + TRAINER.replace("SFT", "DPO")}, "R1", "DPO"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unsafe_is_refused_with_the_remedy(case: str, notebook: Callable[..., Path]) -> None:
    changed, code, word = REFUSED[case]
    path = notebook(**changed)
    with pytest.raises(Refusal) as found:
        steps(path)
    assert found.value.code == code and word in found.value.reason


def test_unsafe_scripts_are_seen(notebook: Callable[..., Path]) -> None:
    script = converted(notebook()).script
    safe_on_ranks(script)
    for old, new, word in (
        ("trainer.train()", "trainer.train()\n    trainer.train()", "2 times"),
        ("if PartialState().is_main_process:", "if True:", "on every rank"),
        (
            'trainer.save_model("final")',
            'if PartialState().is_main_process:\n        trainer.save_model("final")',
            "must be called on every rank",
        ),
        ('"acme/questions"', '"cuda:1"', "hard-coded"),
    ):
        assert old in script
        with pytest.raises(NotVerified, match=word):
            safe_on_ranks(script.replace(old, new, 1))


# --- what the script brings with it -----------------------------------------------------------------------------------


def test_what_trl_has_removed_comes_from_the_package(notebook: Callable[..., Path]) -> None:
    cell = 'from trl import DataCollatorForCompletionOnlyLM, setup_chat_format\ncollator = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer)\ntokenizer.chat_template = None\nmodel, tokenizer = setup_chat_format(model, tokenizer)'
    path = notebook(before=cell, trainer=TRAINER.replace("max_seq", "data_collator=collator, max_seq"))
    script = convert(path).conversion.script
    names = "DataCollatorForCompletionOnlyLM, SFTTrainer, TrainingArguments, setup_chat_format"
    assert f"from finetune import {names}" in " ".join(script.replace("(", " ").replace(")", " ").split())
    assert "CompletionOnly" not in converted(notebook()).script


def test_a_statement_that_is_missing_is_seen(notebook: Callable[..., Path]) -> None:
    """V4 and the frame of V3: each line of the script without which it trains or saves something else."""
    read_again, conversion = steps(notebook(before="tokenizer.padding_side = 'left'"))
    has_every_statement(read_again, conversion)
    has_its_frame(conversion)
    for line, check in (
        ("    tokenizer.padding_side = 'left'\n", lambda other: has_every_statement(read_again, other)),
        ("    rows = rows.map(to_text)\n", lambda other: has_every_statement(read_again, other)),
        ("    PartialState().wait_for_everyone()\n", has_its_frame),
        ('os.environ.setdefault("FINETUNE_BACKEND", "transformers")  # as in the notebook\n', has_its_frame),
        ('if __name__ == "__main__":\n    main()\n', has_its_frame),
    ):
        found = [text for text in (line, line.replace("'", '"'), "    " + line) if text in conversion.script]
        assert found, (line, conversion.script)
        with pytest.raises(NotVerified):
            check(replace(conversion, script=conversion.script.replace(found[-1], "")))


BATCH = ", global_batch_size="
WRONG = {  # entry of the report -> what a wrong converter makes of it: "" leaves it out
    "a step of the rows": ("rows = rows.map(to_text)", ""),
    "an argument": ("peft_config = LoraConfig(r=8", 'peft_config = LoraConfig(task_type="CAUSAL_LM")'),
    "a value": ("peft_config = LoraConfig(r=8", 'peft_config = LoraConfig(r=9, task_type="CAUSAL_LM")'),
    "a column": (
        "def to_text(row)",
        'def to_text(row):\n    return {"text": row["q"] + row["q"] + tokenizer.eos_token}',
    ),
    "an operator": (
        "def to_text(row)",
        'def to_text(row):\n    return {"text": row["q"] - row["a"] + tokenizer.eos_token}',
    ),
    "an attribute": ("tokenizer.padding_side", ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rewriting_is_seen_whatever_the_report_says(case: str, notebook: Callable[..., Path]) -> None:
    """V4: the script and its report agree with each other, and not with the notebook."""
    head, becomes = WRONG[case]
    read_again, right = steps(notebook(before="tokenizer.padding_side = 'left'"))
    report = json.loads(json.dumps(right.report))
    (entry,) = (one for one in report["statements"] if one["statement"].startswith(head))
    old = ast.unparse(ast.parse(next(s.source for s in read_again.statements if s.head.startswith(head))))
    entry |= {"outcome": "rewritten", "becomes": becomes} if becomes else {"outcome": "dropped"}
    entry["reason"] = "the batch is the notebook's on any number of GPUs"
    script = ast.unparse(ast.parse(right.script))
    indent = next(" " * n for n in (0, 4, 8) if textwrap.indent(old, " " * n) in script)
    changed = script.replace(textwrap.indent(old, indent), textwrap.indent(becomes or "pass", indent))
    wrong = replace(right, script=changed, report=report)
    assert changed != script
    has_every_statement(read_again, replace(right, script=script))
    with pytest.raises(NotVerified, match="V4"):
        has_every_statement(read_again, wrong)


def test_what_stands_beside_a_tracker_is_compared(notebook: Callable[..., Path]) -> None:
    """V4: of a function from which calls of a tracker are left out, the rest."""
    cell = "from wandb import log as note\nimport wandb\ndef count(rows):\n    run = wandb.init()\n    run.log({'rows': 5})\n    note(7)\n    rows.info.length = 8\ncount(rows)"
    read_again, right = steps(notebook(before=cell, config=CONFIG.replace('"wandb"', '"none"')))
    has_every_statement(read_again, right)
    entry = next(one for one in right.report["statements"] if one["statement"].startswith("def count"))
    assert entry["becomes"] == "def count(rows):\n    rows.info.length = 8"
    for becomes in ("def count(rows):\n    pass", "def count(rows):\n    rows.info.length = 9"):
        script = ast.unparse(ast.parse(right.script)).replace("rows.info.length = 8", becomes.rpartition("    ")[2])
        report = json.loads(json.dumps(right.report))
        next(one for one in report["statements"] if one["statement"].startswith("def count"))["becomes"] = becomes
        with pytest.raises(NotVerified, match=r"V4.*is not in"):
            has_every_statement(read_again, replace(right, script=script, report=report))


def test_a_module_above_is_found_where_the_script_is_written(notebook: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "render.py").write_text(
        "from mine import words\ndef to_words(row):\n    return {'text': words.one(row)}\n"
    )
    (tmp_path / "mine" / "__init__.py").write_text("")
    inner = tmp_path / "training"
    inner.mkdir()
    path = notebook(before="from mine.render import to_words\nrows = rows.map(to_words)").rename(inner / "nb.ipynb")
    refused = convert(path)
    assert refused.code == "R4" and refused.reason.endswith(f"write the script there: --out {tmp_path}")
    notes = convert(path, tmp_path).conversion.report["notes"]
    assert any("imports mine/render.py: keep it beside the script" in note for note in notes)


def test_a_batch_that_grows_and_ranks_that_draw_alone_are_seen(notebook: Callable[..., Path]) -> None:
    conversion = steps(notebook())[1]
    script = ast.unparse(ast.parse(conversion.script))
    has_its_frame(replace(conversion, script=script))
    for old, word in (("set_seed(42)", "seed"), (script[script.index(BATCH) :].partition(")")[0], "batch")):
        with pytest.raises(NotVerified, match=word):
            has_its_frame(replace(conversion, script=script.replace(old, "pass" if "(" in old else "")))
