"""`finetune convert` on notebooks as people write them: what is written, what is refused, and what is never run."""
# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import ast
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convert_mutations import mutants
from finetune.convert import command, main
from finetune.convert.checks import NotVerified, safe_on_ranks, verify
from finetune.convert.command import convert, steps
from finetune.convert.notebook.read import read
from finetune.convert.script.report import Conversion, slug
from finetune.convert.source import formatted, ruff
from finetune.errors import UserError

INSTALL = '%%capture\nimport os\nif "COLAB_" not in "".join(os.environ.keys()):\n    !pip install unsloth\nelse:\n    !pip install "trl==0.22.2" \\\n        "peft>=0.17"'
LOADER = """from unsloth import FastLanguageModel
import torch
max_seq_length = 1024  # any length
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "acme/tiny", max_seq_length = max_seq_length, load_in_4bit = True,
)"""
ADAPTER = """model = FastLanguageModel.get_peft_model(
    model, r = 8, lora_alpha = 16, target_modules = ["q_proj", "v_proj"], bias = "none", random_state = 7,
)"""
DATA = '''prompt = """### Question:
{}

### Answer:
{}"""

def to_text(rows):
    # the end token, or it never stops
    return {"text": [prompt.format(q, a) + tokenizer.eos_token for q, a in zip(rows["q"], rows["a"])]}

from datasets import load_dataset
dataset = load_dataset("acme/questions", split = "train")
dataset = dataset.map(to_text, batched = True)'''
PEEK = 'dataset[0]["text"]\nprint(dataset)'
TRAINER = """from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset, dataset_text_field = "text",
    max_seq_length = max_seq_length,
    args = SFTConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, warmup_steps = 5, max_steps = 60,
        learning_rate = 2e-4, optim = "adamw_8bit", seed = 3407, output_dir = "outputs", report_to = "none",
    ),
)"""
STATS = "gpu_stats = torch.cuda.get_device_properties(0)\nprint(gpu_stats.name)"
TRAIN = "trainer_stats = trainer.train()"
INFERENCE = """FastLanguageModel.for_inference(model)
inputs = tokenizer(["Hello"], return_tensors = "pt").to("cuda")
outputs = model.generate(**inputs, max_new_tokens = 64)
tokenizer.batch_decode(outputs)"""
SAVE = 'model.save_pretrained("my_lora")\ntokenizer.save_pretrained("my_lora")'
DEAD = 'if False:\n    from unsloth import FastLanguageModel\n    model.push_to_hub("me/x", token = "YOUR_HF_TOKEN")'
ALL = [INSTALL, LOADER, ADAPTER, DATA, PEEK, TRAINER, STATS, TRAIN, INFERENCE, SAVE, DEAD]


def document(*cells: str) -> dict[str, Any]:
    code = [
        {"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": [], "metadata": {}} for cell in cells
    ]
    heading = {"cell_type": "markdown", "source": ["## The data\n", "text"], "metadata": {}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [heading, *code]}


@pytest.fixture
def notebook(tmp_path: Path) -> Callable[..., Path]:
    def write(*cells: str, name: str = "mine.ipynb") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(document(*cells)), encoding="utf-8")
        return path

    return write


def with_cells(**changed: str) -> list[str]:
    """A short notebook, with some cells replaced; `extra` stands before the trainer."""
    parts = {
        "loader": LOADER,
        "adapter": ADAPTER,
        "data": DATA,
        "extra": "",
        "trainer": TRAINER,
        "train": TRAIN,
        "after": "",
    }
    return [cell for cell in (parts | changed).values() if cell]


def converted(path: Path) -> Any:
    outcome = convert(path)
    assert outcome.result == "converted", outcome
    return outcome.conversion


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_notebook_becomes_its_own_code_made_safe(notebook: Callable[..., Path]) -> None:
    script = converted(notebook(*ALL)).script
    functions = {node.name for node in ast.walk(ast.parse(script)) if isinstance(node, ast.FunctionDef)}
    assert functions == {"main", "to_text"}
    code = script.split('"""', 2)[2]
    for word in ("pip", "generate", "get_device_properties", "push_to_hub", "cuda"):
        assert word not in code, word
    assert "# the end token, or it never stops" in script
    assert "### Question:\n{}\n\n### Answer:\n{}" in script  # a text over several lines is not indented
    order = ["from finetune import SFTConfig, SFTTrainer", "from unsloth import", "def main()", "from_pretrained(",
             "get_peft_model(", "def to_text", ".map(to_text", "SFTTrainer(", "trainer.train()", "save_pretrained("]  # fmt: skip
    places = [script.index(word) for word in order]
    assert places == sorted(places)
    assert "global_batch_size=8" in script and 'if __name__ == "__main__":\n    main()\n' in script


@pytest.mark.process
def test_what_was_left_out_is_listed_once_at_the_top(notebook: Callable[..., Path]) -> None:
    conversion = converted(notebook(*ALL))
    top = ast.get_docstring(ast.parse(conversion.script)) or ""
    listed = " ".join(top.partition("Left out")[2].split())
    for text in ("display (cells 5, 9)", "memory and time statistics (cell 7)"):
        assert listed.count(text) == 1, (text, top)
    for line in (
        "python -m finetune.dryrun mine.py",
        "python -m finetune.advise mine.py",
        "accelerate launch mine.py",
    ):
        assert line in top
    summary = conversion.report["summary"]
    assert next(iter(conversion.report)) == "summary" and len(summary) <= 10
    assert summary[0] == f"13 of {len(conversion.report['statements'])} statements are kept, 1 are rewritten"


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "written", "note"),
    [
        ('"wandb"', '"wandb"', "metrics also go to wandb: log in"),
        ('["tensorboard", "mlflow"]', '["tensorboard", "mlflow"]', "metrics also go to mlflow: log in"),
        ('"tensorboard"', '"tensorboard"', ""),
        ('"all"', '"none"', ""),
    ],
)
def test_metrics_go_to_the_trackers_that_are_named(
    given: str, written: str, note: str, notebook: Callable[..., Path]
) -> None:
    told = TRAINER.replace('report_to = "none"', f"report_to = {given}")
    assert told != TRAINER
    conversion = converted(notebook(*with_cells(trainer=told)))
    assert f"report_to={written}" in conversion.script.replace(" = ", "=")
    assert [one.partition("metrics also")[1] != "" for one in conversion.report["notes"]].count(True) == bool(note)
    assert note in "\n".join(conversion.report["notes"])


@pytest.mark.process
def test_every_statement_is_in_the_report_with_its_reason(notebook: Callable[..., Path]) -> None:
    path = notebook(*ALL)
    report = converted(path).report
    assert len(report["statements"]) == len(read(path).statements)
    assert all(item["outcome"] == "kept" or item["reason"] for item in report["statements"])
    assert {item["outcome"] for item in report["statements"]} == {"kept", "rewritten", "dropped"}
    assert report["verification"] == {f"V{number}": "passed" for number in (1, 2, 3, 4, 6)}


@pytest.mark.process
def test_packages_that_a_process_installs_are_in_the_report(notebook: Callable[..., Path]) -> None:
    cell = 'import subprocess, sys\nsubprocess.run([sys.executable, "-m", "pip", "install", "trl==0.22.2"])'
    report = converted(notebook(cell, *with_cells())).report
    assert [item["text"] for item in report["not_python"]] == ["python -m pip install trl==0.22.2"]


@pytest.mark.process
def test_without_ruff_nothing_is_converted(
    notebook: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ruff", None)  # `import ruff` raises ImportError
    assert main([str(notebook()), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'finetune-multigpu[convert]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_the_script_stays_as_it_is_under_ruff(notebook: Callable[..., Path]) -> None:
    script = converted(notebook(*ALL)).script
    assert formatted(script) == script
    done = subprocess.run(
        [ruff(), "check", "--isolated", "--select", "F,E9", "--ignore", "F841", "-"],
        input=script.encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


STYLES = {
    "positional": {"trainer": 'from trl import SFTTrainer\nfrom transformers import TrainingArguments\nargs = TrainingArguments("out", per_device_train_batch_size=2)\ntrainer = SFTTrainer(model, args, train_dataset=dataset)'},
    "splatted": {"adapter": 'rank = 4\nkw = dict(r=rank, lora_alpha=2 * rank)\nkw["use_rslora"] = True\nmodel = FastLanguageModel.get_peft_model(model, **kw)'},
    "dataclass": {"loader": "from dataclasses import dataclass\n@dataclass\nclass C:\n    lr: float = 3e-4\n" + LOADER, "trainer": TRAINER.replace("2e-4", "C().lr")},
    "a namespace": {"loader": "from types import SimpleNamespace\ncfg = SimpleNamespace(lr=1e-4, steps=7)\ncfg.steps += 2\n" + LOADER, "trainer": TRAINER.replace("2e-4", "cfg.lr").replace("60", "cfg.steps")},
    "YAML in a text": {"loader": 'import yaml\ncfg = yaml.safe_load("""\ntrain:\n  lr: 1.0e-4\n  name: acme/tiny\n""")["train"]\n' + LOADER.replace('"acme/tiny"', 'cfg["name"]'), "trainer": TRAINER.replace("2e-4", 'cfg["lr"]')},
    "YAML in an indented text": {"loader": 'import yaml, textwrap\ncfg = yaml.load(textwrap.dedent("""\n  lr: 1.0e-4\n  names: [a, b]\n"""), Loader=yaml.FullLoader)\n' + LOADER, "trainer": TRAINER.replace("2e-4", 'cfg["lr"]')},
    "OmegaConf": {"loader": 'from omegaconf import OmegaConf\ncfg = OmegaConf.create({"lora": {"r": 4}, "lr": 1e-4})\ncfg.steps = 9\nprint(OmegaConf.to_yaml(cfg))\n' + LOADER, "adapter": ADAPTER.replace("r = 8", "r = cfg.lora.r"), "trainer": TRAINER.replace("2e-4", "cfg.lr").replace("60", "cfg.get('steps', 1)")},
    "EasyDict": {"loader": 'from easydict import EasyDict as edict\ncfg = edict(lr=1e-4)\ncfg.name = "questions"\n' + LOADER, "data": DATA.replace('"acme/questions"', 'f"acme/{cfg.name}"'), "trainer": TRAINER.replace("2e-4", "cfg.lr")},
    "paths": {"loader": 'from pathlib import Path\nOUT = Path("runs") / "x"\nOUT.mkdir(parents=True, exist_ok=True)\n' + LOADER, "trainer": TRAINER.replace('"outputs"', "str(OUT / 'all')"), "after": "trainer.save_model(OUT)"},
    "a path of the trainer": {"loader": 'import pathlib\n' + LOADER, "trainer": TRAINER.replace('"outputs"', "pathlib.Path('runs', 'x')")},
    "resumed": {"train": "trainer.train(resume_from_checkpoint = True)"},
    "packed": {"trainer": TRAINER.replace("    max_seq", "    packing = True, max_seq")},
    "responses": {"train": 'from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer, instruction_part="Q:", response_part="A:")\n' + TRAIN},
    "responses by the template": {"train": 'from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer, last_response_only=True)\n' + TRAIN},
    "another column": {"trainer": TRAINER.replace('= "text"', '= "body"')},
    "made twice": {"trainer": TRAINER.replace("60", "10") + "\n" + TRAINER},
    "drive": {"after": 'model.save_pretrained("/content/drive/MyDrive/lora")'},
    "fast model": {"loader": LOADER.replace("FastLanguageModel", "FastModel"), "adapter": "model = FastModel.get_peft_model(model, finetune_vision_layers = False, r = 8)"},
    "set later": {"trainer": "from trl import SFTConfig, SFTTrainer\nta = SFTConfig(max_steps = 1)\nta.max_steps = 9\ntrainer = SFTTrainer(model = model, train_dataset = dataset, args = ta)"},
    "under the guard": {"train": "if __name__ == '__main__':\n    trainer.train()\n    model.save_pretrained('there')"},
    "full": {"loader": LOADER.replace("load_in_4bit = True", "full_finetuning = True"), "adapter": ""},
    "full in float32": {"loader": LOADER.replace("load_in_4bit = True", "full_finetuning = True, float32_mixed_precision = True"), "adapter": ""},
    "grouped by length": {"trainer": TRAINER.replace("60", "60, group_by_length = True")},
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("style", STYLES)
def test_each_style_trains_the_same(style: str, notebook: Callable[..., Path]) -> None:
    report = converted(notebook(*with_cells(**STYLES[style]))).report
    assert report["verification"]["V4"] == "passed"


HUB = """import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
dataset = load_dataset("acme/questions", split="train")"""
HUB_MODEL = """model = AutoModelForCausalLM.from_pretrained("acme/tiny", use_flash_attention_2=False, low_cpu_mem_usage=True)
tokenizer = AutoTokenizer.from_pretrained("acme/tiny")"""
HUB_TRAINER = """trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=dataset, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), args=SFTConfig(output_dir="o"))
trainer.train()"""
# Notebooks without Unsloth: cells after HUB; what the settings say; words that the script has, and those it has not.
HUB_STYLES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "a model by its name": (
        ['SFTTrainer(\n    model="acme/tiny", train_dataset=dataset,\n    args=SFTConfig(max_length=None, model_init_kwargs={"dtype": torch.bfloat16, "attn_implementation": "sdpa"}),\n).train()'],
        [], ["AutoModel"],
    ),
    "and its quantization": (
        ['trainer = SFTTrainer("acme/tiny", train_dataset=dataset, quantization_config=BitsAndBytesConfig(load_in_4bit=True), peft_config=LoraConfig())', TRAIN],
        [], [],
    ),
    "PEFT's targets by the family": (
        [HUB_MODEL.replace("acme/tiny", "acme/falcon-7b"), HUB_TRAINER],
        [], [],
    ),
    "targets of one kind of layer": (
        [HUB_MODEL, 'import bitsandbytes as bnb\ndef find_linear(model):\n    names = set()\n    for name, module in model.named_modules():\n        if isinstance(module, bnb.nn.Linear4bit):\n            names.add(name.split(".")[-1])\n    return list(names)\nmodules = find_linear(model)', HUB_TRAINER.replace("r=4", "r=4, target_modules=modules")],
        ["modules = find_linear(model)"], [],
    ),
    "the tokenizer of another model": (
        [HUB_MODEL.replace('AutoTokenizer.from_pretrained("acme/tiny")', 'AutoTokenizer.from_pretrained("acme/chat")'), HUB_TRAINER],
        ['tokenizer = AutoTokenizer.from_pretrained("acme/chat")'], [],
    ),
    "prompts and completions as texts": (
        ['dataset = dataset.map(lambda row: {"prompt": row["q"], "completion": row["a"]}, remove_columns=["q", "a"])', HUB_MODEL, HUB_TRAINER],
        [], [],
    ),
    "checkpointing by PEFT": (
        [HUB_MODEL, "model = prepare_model_for_kbit_training(model)\nmodel.is_parallelizable = True\nmodel = get_peft_model(model, LoraConfig(r=4))", "from transformers import TrainingArguments\n" + HUB_TRAINER.replace(', peft_config=LoraConfig(r=4, task_type="CAUSAL_LM")', "").replace("SFTConfig(", "TrainingArguments(save_steps=0.5, max_steps=20, ")],
        [], ["is_parallelizable"],
    ),
    "frozen layers": (
        [HUB_MODEL, 'def freeze(model):\n    for name, p in model.named_parameters():\n        p.requires_grad = "layers.3" in name\nfreeze(model)\nfor p in model.lm_head.parameters():\n    p.requires_grad = False', HUB_TRAINER.replace('peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), ', "")],
        ["freeze(model)", "for p in model.lm_head.parameters()"], [],
    ),
    "a function that gives the model back": (
        [HUB_MODEL, 'def prepare(m):\n    """In place."""\n    m.config.use_cache = False\n    m.enable_input_require_grads()\n    return m\nmodel = prepare(model)', "model = get_peft_model(model, LoraConfig(r=4))", HUB_TRAINER.replace('peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), ', "")],
        ["model = prepare(model)", "m.config.use_cache = False"], [],
    ),
    "a function that does what the package does": (
        [HUB_MODEL, "def prepare(model):\n    model.gradient_checkpointing_enable()\n    model.enable_input_require_grads()\n    return model\nmodel = prepare(model)", HUB_TRAINER],
        ["model = prepare(model)"], [],
    ),
    "the configuration before the adapter": (
        [HUB_MODEL, "tokenizer.pad_token = tokenizer.eos_token\nmodel.config.pad_token_id = tokenizer.pad_token_id\nif model.config.eos_token_id is None:\n    model.config.eos_token_id = tokenizer.eos_token_id\nmodel.config.pretraining_tp = 1\nmodel.generation_config.temperature = 0.1", "model = get_peft_model(model, LoraConfig(r=4))", HUB_TRAINER.replace('peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), ', "")],
        ["model.config.pretraining_tp = 1", "model.generation_config.temperature = 0.1"], [],
    ),
    "data that are saved and loaded again": (
        ['from datasets import load_from_disk\nFOLDER = "processed"\nrows = dataset.map(lambda row: {"text": row["q"]})\nrows.save_to_disk(FOLDER)\nrows = load_from_disk(FOLDER)\nrows.save_to_disk("again")\ndata = load_from_disk("again")\nprint(data)', HUB_MODEL, HUB_TRAINER.replace("train_dataset=dataset", "train_dataset=data")],
        ["rows.save_to_disk(FOLDER)", "rows = load_from_disk(FOLDER)"], [],
    ),
    "a file that a function writes": (
        ['import json\ndef dump(rows, path):\n    with open(path, "w") as file:\n        for row in rows:\n            file.write(json.dumps({"text": row}) + "\\n")\nheld_out = "held_out.jsonl"\ndump(["a"], "rows.jsonl")\ndump(["b"], path=held_out)\ndataset = load_dataset("json", data_files={"train": "rows.jsonl", "test": held_out})["train"]', HUB_MODEL, HUB_TRAINER],
        ['dump(["a"], "rows.jsonl")', 'dump(["b"], path=held_out)'], [],
    ),
    "a loader that reports its failure": (
        ["try:\n    " + HUB_MODEL.replace("\n", "\n    ") + "\nexcept Exception as error:\n    print(error)\n    raise", HUB_TRAINER],
        ["try:", "print(error)"], [],
    ),
    "rows changed in a loop": (
        ['import json\nrows = json.load(open("rows.json"))\nfor row in rows:\n    row["text"] = row["q"] + row["a"]\nfrom datasets import Dataset\ndataset = Dataset.from_list(rows)', HUB_MODEL, HUB_TRAINER],
        ['row["text"] = '], [],
    ),
    "merged and saved": (
        [HUB_MODEL, HUB_TRAINER, 'model.save_pretrained("lora")\nmerged = model.merge_and_unload()\nmerged.save_pretrained("whole")\ntokenizer.save_pretrained("whole")'],
        ['merged.save_pretrained("whole")', 'model.save_pretrained("lora")'], [],
    ),
    "loaded again and merged": (
        [HUB_MODEL, HUB_TRAINER, 'from peft import PeftModel\nbase = AutoModelForCausalLM.from_pretrained("acme/tiny")\nmodel = PeftModel.from_pretrained(base, "o")\nmodel = model.merge_and_unload()\nmodel.push_to_hub("me/mine")'],
        ["if PartialState().is_main_process:", "model = model.merge_and_unload()"], ["push_to_hub"],
    ),
    "a prediction before": (
        [HUB_MODEL, 'from transformers import pipeline\ndef predict(rows, model, tokenizer):\n    found = []\n    for row in rows:\n        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)\n        found.append(pipe(row)[0]["generated_text"])\n    return found\nfound = predict(["a"], model, tokenizer)', HUB_TRAINER],
        [], ["predict"],
    ),
    "a function of its own that is called run": (
        ['def run(name):\n    print(name)\nrun("acme")', HUB_MODEL, HUB_TRAINER],
        ['run("acme")'], [],
    ),
    "a file that nothing reads before": (
        ['held = load_dataset("acme/questions", split="test")\nheld.select(range(9)).to_json("test.json", orient="records")', HUB_MODEL, HUB_TRAINER, 'held = load_dataset("json", data_files="test.json")'],
        ["to_json", "is_local_main_process"], [],
    ),
    "a class that a branch may choose": (
        ['from transformers import AutoModelForImageTextToText\nname = "acme/tiny"\nif name == "acme/tiny":\n    kind = AutoModelForCausalLM\nelse:\n    kind = AutoModelForImageTextToText\nmodel = kind.from_pretrained(name, **dict(torch_dtype=torch.bfloat16))\ntokenizer = AutoTokenizer.from_pretrained(name)', HUB_TRAINER],
        ["kind = AutoModelForCausalLM"], [],
    ),
    "columns of prompts": (
        ['from datasets import Dataset\ndataset = Dataset.from_dict({"prompt": [str(row["q"]) for row in dataset], "completion": [row["a"] for row in dataset]})', HUB_MODEL, HUB_TRAINER],
        [], [],
    ),
    "prompts of messages": (
        ['dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["q"]}], "completion": [{"role": "assistant", "content": row["a"]}]})', HUB_MODEL, HUB_TRAINER],
        [], [],
    ),
    "modules cast in a loop": (
        [HUB_MODEL, HUB_TRAINER.replace("trainer.train()", 'for name, module in trainer.model.named_modules():\n    if "norm" in name:\n        module = module.to(torch.float32)\ntrainer.train()')],
        ["module = module.to(torch.float32)"], [],
    ),
    "frozen before the trainer attaches the adapter": (
        [HUB_MODEL + "\nfor p in model.parameters():\n    p.requires_grad = False", HUB_TRAINER],
        ["p.requires_grad = False"], [],
    ),
    "resized before the trainer attaches the adapter": (
        [HUB_MODEL + "\nmodel.resize_token_embeddings(len(tokenizer))", HUB_TRAINER],
        ["model.resize_token_embeddings(len(tokenizer))"], [],
    ),
    "everything seeded": (
        ["import os, random\nimport numpy as np\ndef seed_all(seed=42):\n    random.seed(seed)\n    np.random.seed(seed)\n    torch.manual_seed(seed)\n    os.environ['PYTHONHASHSEED'] = str(seed)\n    torch.backends.cudnn.deterministic = True\n    torch.set_float32_matmul_precision('high')\nseed_all()", HUB_MODEL, HUB_TRAINER],
        ["seed_all()", "torch.backends.cudnn.deterministic = True"], [],
    ),
    "stopped early": (
        [HUB_MODEL, HUB_TRAINER.replace("args=SFTConfig(", "eval_dataset=dataset, args=SFTConfig(eval_strategy='steps', eval_steps=5, ").replace("trainer.train()", "from transformers import EarlyStoppingCallback\ntrainer.add_callback(EarlyStoppingCallback(2))\ntrainer.train()")],
        ["trainer.add_callback(EarlyStoppingCallback(2))"], [],
    ),
    "saved before": (
        ['dataset.push_to_hub("me/rows")', HUB_MODEL + '\nmodel.save_pretrained("before")\ntokenizer.push_to_hub("me/tokens")', HUB_TRAINER],
        [], ["push_to_hub", "save_pretrained"],
    ),
    "the trainer's model published": (
        [HUB_MODEL, HUB_TRAINER, 'model.config.use_cache = True\ntrainer.model.push_to_hub("me/mine")'],
        [], ["push_to_hub"],
    ),
    "loaded again and merged by another name": (
        [HUB_MODEL, HUB_TRAINER, 'from peft import AutoPeftModelForCausalLM\nmodel = AutoPeftModelForCausalLM.from_pretrained("o")\nmerged = model.merge_and_unload()\nmerged.save_pretrained("whole")'],
        ["if PartialState().is_main_process:", 'merged.save_pretrained("whole")'], [],
    ),
    "in functions": (
        ['def load(name, four=True):\n    """Load it."""\n    # in bits\n    model = AutoModelForCausalLM.from_pretrained(name, load_in_4bit=four)\n    tok = AutoTokenizer.from_pretrained(name)\n    tok.pad_token = tok.eos_token  # padded\n    return model, tok', 'def main():\n    model, tokenizer = load("acme/tiny")\n    data = dataset.map(lambda row: {"text": row["q"] + tokenizer.eos_token})\n    args = SFTConfig(output_dir="o", max_steps=9)\n    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=data, args=args, peft_config=LoraConfig(r=4))\n    trainer.train()\n    trainer.save_model("there")\n\nif __name__ == "__main__":\n    main()'],
        ["tok.pad_token = tok.eos_token", 'quantization_config={"load_in_4bit": True} if four else None'], [],
    ),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("style", HUB_STYLES)
@pytest.mark.campaign
def test_notebooks_without_unsloth(style: str, notebook: Callable[..., Path]) -> None:
    cells, there, not_there = HUB_STYLES[style]
    conversion = converted(notebook(HUB, *cells))
    assert [word for word in there if word not in conversion.script] == []
    assert [word for word in not_there if word in conversion.script] == []
    assert conversion.report["verification"]["V4"] == "passed"


NOTES = {
    "the folder, by a magic": ({"data": "%cd /content/drive/mine\n" + DATA.replace('"acme/questions"', '"json", data_files = "rows.jsonl"')}, "paths are relative to /content/drive/mine"),
    "the folder, by a call": ({"extra": 'import os\nos.chdir("/content/drive/mine")'}, "start the script in that folder"),
    "files that are sent": ({"extra": "from google.colab import files\nfiles.upload()"}, "put the files next to the script"),
    "published": ({"after": "from huggingface_hub import HfApi\napi = HfApi()\napi.upload_folder(folder_path = 'o', repo_id = 'me/x')"}, "hf upload"),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("case", NOTES)
def test_what_the_reader_has_to_know_is_said(case: str, notebook: Callable[..., Path]) -> None:
    cells, expected = NOTES[case]
    assert any(expected in note for note in converted(notebook(*with_cells(**cells))).report["notes"])


# Cells before the training that install, or draw and measure with packages that a script may not have.
SHOWN = {
    "a chart": "import matplotlib.pyplot as plt\nlengths = [len(t) for t in dataset['text']]\nfig, ax = plt.subplots()\nax.hist(lengths, bins=20)\nax.set_xlabel('characters')\nax2 = ax.twinx()\nax2.set_ylim(0, 1)\nfig.savefig('lengths.png')\nplt.show()",
    "several charts": "import matplotlib.pyplot as plt\nimport seaborn as sns\nfig, axes = plt.subplots(1, 2)\nfor one, name in zip(axes, ['q', 'a']):\n    one.boxplot([len(t) for t in dataset[name]])\nfor n, one in enumerate(axes):\n    one.set_title(str(n))\ngrid = sns.histplot([1])\ngrid.set(title='x')",
    "a metric": "import evaluate\nrouge = evaluate.load('rouge')\ndef scores(pair):\n    return rouge.compute(predictions=pair[0], references=pair[1])\nprint(scores((['a'], ['a'])))",
    "installations": "import subprocess, sys, os\nsubprocess.check_call([sys.executable, '-m', 'pip', 'install', '-q', 'peft'])\nos.system('pip install peft')\ndef install(name):\n    subprocess.run([sys.executable, '-m', 'pip', 'install', name], check=True)\nfor name in ['a', 'b']:\n    install(name)\nprint(subprocess.run(['nvidia-smi'], capture_output=True, text=True).stdout)\nif 'google.colab' in sys.modules:\n    os.system(f'pip install {name}')",
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("shown", SHOWN)
def test_what_draws_or_installs_is_left_out(shown: str, notebook: Callable[..., Path]) -> None:
    plain = converted(notebook(*with_cells()))
    before = converted(notebook(*with_cells(trainer=SHOWN[shown] + "\n" + TRAINER)))
    after = converted(notebook(*with_cells(after=SHOWN[shown])))
    assert body(before) == body(after) == body(plain)


# Cells before the training that are harmless on every rank, so they stay.
HARMLESS = {
    "a counter": "from collections import Counter\nc = Counter()\nfor row in dataset['text']:\n    c.update(row.split())\nprint(c.most_common(3))",
    "a log": "import logging\nlogger = logging.getLogger(__name__)\nlogger.addHandler(logging.StreamHandler())\nlogger.info(len(dataset))",
    "a table": "from rich.table import Table\ntable = Table()\ntable.add_row('a')\nprint(table)",
    "a check": "assert len(dataset) > 3\nprint(dataset[0])",
}


@pytest.mark.process
@pytest.mark.parametrize("cell", HARMLESS)
def test_what_is_harmless_stays(cell: str, notebook: Callable[..., Path]) -> None:
    conversion = converted(notebook(*with_cells(trainer=HARMLESS[cell] + "\n" + TRAINER)))
    script = {ast.unparse(node) for node in ast.walk(ast.parse(conversion.script)) if isinstance(node, ast.stmt)}
    assert {ast.unparse(node) for node in ast.parse(HARMLESS[cell]).body} <= script


@pytest.mark.process
def test_a_collection_that_the_training_needs_is_kept(notebook: Callable[..., Path]) -> None:
    data = "from datasets import Dataset\nrows = []\nfor q in ['a', 'b']:\n    rows.append({'text': q})\nrows.extend([{'text': 'c'}])\nseen = set()\nseen.add('a')\ndataset = Dataset.from_list(rows)"
    script = converted(notebook(*with_cells(data=data))).script
    assert "rows.append" in script and "rows.extend" in script


@pytest.mark.parametrize("folder", ["/etc/x", "../../x", "a/../../x", "~/x"])
@pytest.mark.process
def test_an_output_folder_elsewhere_is_kept_with_a_note(
    folder: str, notebook: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(*with_cells(trainer=TRAINER.replace('"outputs"', f'"{folder}"')))
    assert f'"{folder}"' in converted(path).script
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert f"output_dir is {folder}, outside of the folder" in capsys.readouterr().out
    plain = converted(notebook(*with_cells(), name="plain.ipynb"))
    assert not any("output_dir is" in note for note in plain.report["notes"])


# --- tokens -----------------------------------------------------------------------------------------------------------

HF, WANDB, OPENAI = "hf_" + "aB3" * 10, "0123456789abcdef" * 2 + "01234567", "sk-proj-" + "x1Y" * 10


@pytest.mark.process
def test_tokens_are_never_copied(notebook: Callable[..., Path], tmp_path: Path) -> None:
    cells = with_cells(
        loader=f'!huggingface-cli login --token {HF}\nimport wandb, os\nwandb.login(key="{WANDB}")\nos.environ["HF_TOKEN"] = "{HF}"\nfrom huggingface_hub import login\nlogin("{HF}")\n'
        + LOADER,
        data=DATA.replace('split = "train"', f'split = "train", token = "{HF}"  # {HF}\n')
        + f'\nOPENAI_KEY = "{OPENAI}"',
        after=f'model.push_to_hub("me/mine", token = "{HF}")',
    )
    path = notebook(*cells)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    texts = "".join(file.read_text() for file in (tmp_path / "out").iterdir())
    assert not any(token in texts for token in (HF, WANDB, OPENAI))
    assert texts.count('token=os.environ.get("HF_TOKEN")') == 1
    assert any("HF_TOKEN" in note for note in json.loads((tmp_path / "out/mine.report.json").read_text())["notes"])


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "no trainer": ({"trainer": "", "train": ""}, "R0"),
    "never trained": ({"train": ""}, "R0"),
    "another trainer": ({"trainer": TRAINER.replace("SFT", "DPO")}, "R1"),
    "a trainer of its own": ({"trainer": "from trl import SFTTrainer\nclass Mine(SFTTrainer):\n    pass\n" + TRAINER.replace("= SFTTrainer(", "= Mine(")}, "R1"),
    "two trainings": ({"after": TRAIN}, "R2"),
    "images": ({"loader": LOADER.replace("FastLanguageModel", "FastVisionModel")}, "R3"),
    "sound": ({"data": "import torchaudio\n" + DATA + "\ndataset = dataset.map(torchaudio.load)"}, "R3"),
    "a TPU": ({"extra": "import torch_xla.core.xla_model as xm\nxm.xla_device()"}, "R4"),
    "a shell behind an installation": ({"extra": 'import os\nos.system("pip install x; make data")'}, "R4"),
    "a process of a computed name": ({"extra": 'import subprocess\nfor name in ["a", "b"]:\n    subprocess.run([name, "install"])'}, "R4"),
    "a module from a cell": ({"data": "from helper import f\n" + DATA.replace("prompt.format", "f")}, "R4"),
    "data from the model": ({"data": DATA + "\ndataset = dataset.map(lambda row: {'text': model.generate(row)})"}, "R4"),
    "another loss": ({"trainer": TRAINER.replace("seed", 'loss_type = "dft", seed')}, "R4"),
    "unknown at run time": ({"trainer": TRAINER.replace("2e-4", "float(input())")}, "R4"),
    "a compiled model": ({"extra": "model = torch.compile(model)"}, "R4"),
    "a function that gives another model": ({"extra": "def wrap(model):\n    model = torch.nn.DataParallel(model)\n    return model\nmodel = wrap(model)"}, "R4"),
    "a folder that a shell line names": ({"data": DATA + '\nfrom datasets import load_from_disk\ndataset.save_to_disk("rows")\n!cp -r other rows\ndataset = load_from_disk("rows")'}, "R4"),
    "a folder that a shell reads": ({"data": DATA + '\nfrom datasets import load_from_disk\ndataset.save_to_disk("x")\nimport os\nos.system("touch x")\nos.remove("x")\ndataset = load_from_disk("x")'}, "R4"),
    "data from a service": ({"data": DATA + "\nfrom openai import OpenAI\nclient = OpenAI()\ndataset = dataset.map(lambda row: {'text': client.responses.create(row)})"}, "R4"),
    "data from another model": ({"data": DATA + "\nfrom transformers import pipeline\npipe = pipeline('text-generation')\ndataset = dataset.map(lambda row: {'text': pipe(row)})"}, "R4"),
    "a loss of its own": ({"trainer": TRAINER.replace("args =", "compute_loss_func = len, args =")}, "R4"),
    "rows packed by TRL's class": ({"trainer": "from trl.trainer import ConstantLengthDataset\ndataset = ConstantLengthDataset(tokenizer, dataset)\n" + TRAINER}, "R4"),
    "a stream": ({"data": DATA.replace('split = "train"', 'split = "train", streaming = True')}, "R4"),
    "data that are sent": ({"data": "from google.colab import files\nsent = files.upload()\n" + DATA.replace('"acme/questions"', '"json", data_files = list(sent)[0]')}, "R4"),
    "settings after the trainer": ({"trainer": TRAINER + "\ntrainer.args.learning_rate = 1e-5"}, "R4"),
    "newer Python": ({"data": DATA + "\nmatch x:\n"}, "R5"),
    "vLLM": ({"loader": LOADER.replace("load_in_4bit", "fast_inference = True, load_in_4bit")}, "R6"),
    "unknown magic": ({"data": "%%cython\nint x\n"}, "E-MAGIC"),
}  # fmt: skip
# Commands before the training that may make what it needs.
NOTED = {
    "a process": {"extra": 'import subprocess\nsubprocess.run(["make", "data"])'},
    "a shell": {"extra": 'import os\nos.system("make data")'},
    "a file from the shell": {"data": "!wget -q https://acme.org/data.json\n" + DATA.replace('"acme/questions"', '"json", data_files = "data.json"')},
    "a file copied by a cell that installs": {"loader": "!pip install unsloth\n!cp /drive/rows.jsonl rows.jsonl\n" + LOADER, "data": DATA.replace('"acme/questions"', '"json", data_files = "rows.jsonl"')},
}  # fmt: skip
# What a settings file could not say: the script has it as the notebook does.
KEPT = {
    "a text field that is known at run time": {"trainer": TRAINER.replace('dataset_text_field = "text"', 'dataset_text_field = torch.field(), formatting_func = to_text')},
    "a collator of its own": {"trainer": "def collate(rows):\n    return rows\n" + TRAINER.replace("args =", "data_collator = collate, args =")},
    "an unknown number of steps": {"trainer": TRAINER.replace("60", "len(dataset) // 8")},
    "a function that casts the model": {"extra": "def cast(model):\n    model.config.use_cache = False\n    model.half()\n    return model\nmodel = cast(model)"},
    "a function that may give another model": {"extra": "def pick(model):\n    if model.config.use_cache:\n        return None\n    return model\nmodel = pick(model)"},
    "a folder that changes": {"data": DATA + '\nfrom datasets import load_from_disk\ndataset.save_to_disk("x")\ndataset = dataset.filter(len)\ndataset.save_to_disk("x")\ndataset = load_from_disk("x")'},
    "a folder with other data": {"data": DATA + '\nfrom datasets import load_from_disk\ndataset.save_to_disk("x")\ndataset = dataset.filter(len)\ndataset = load_from_disk("x")'},
    "a model in a list": {"extra": "parts = [model]\nparts[0].resize_token_embeddings(10)"},
    "tokens before the adapter": {"loader": LOADER + "\nmodel.resize_token_embeddings(10)"},
    "early stopping by epochs": {"trainer": "from transformers import EarlyStoppingCallback\n" + TRAINER.replace("args =", "callbacks = [EarlyStoppingCallback()], args =")},
    "YAML with aliases": {"loader": 'import yaml\ncfg = yaml.safe_load("a: &a 1\\nb: *a")\n' + LOADER, "trainer": TRAINER.replace("2e-4", 'cfg["b"]')},
    "YAML of a file": {"loader": 'import yaml\ncfg = yaml.safe_load(open("config.yaml"))\n' + LOADER, "trainer": TRAINER.replace("2e-4", 'cfg["b"]')},
    "values that refer to others": {"loader": 'from omegaconf import OmegaConf\ncfg = OmegaConf.create({"a": 1, "b": "${a}"})\n' + LOADER, "trainer": TRAINER.replace("60", 'cfg.b')},
    "new tokens": {"loader": LOADER + "\nfrom unsloth import add_new_tokens\nadd_new_tokens(model, tokenizer, new_tokens = ['<a>'])"},
    "in a function that is called twice": {"trainer": "def go():\n    from trl import SFTConfig, SFTTrainer\n    return SFTTrainer(model=model, train_dataset=dataset, args=SFTConfig())\ntrainer = go()\ntrainer = go()"},
    "half of the markers": {"train": 'from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer, instruction_part="Q:")\n' + TRAIN},
    "another model's chat tokens": {"extra": "from trl import setup_chat_format\nmodel, tokenizer = setup_chat_format(model, tokenizer)"},
    "a template after the data": {"data": DATA + "\nrender = tokenizer.apply_chat_template\ndataset = dataset.map(lambda row: {'text': render(row)})", "extra": "tokenizer.chat_template = 'x'"},
    "several held-out sets": {"trainer": TRAINER.replace("args =", "eval_dataset = {'a': dataset, 'b': dataset}, args =")},
    "the trainer's model merged": {"after": 'model = trainer.model.merge_and_unload()\nmodel.save_pretrained("whole")'},
    "a head before the trainer's adapter": {"adapter": "", "extra": "from peft import LoraConfig\nmodel.lm_head = torch.nn.Sequential(model.lm_head)", "trainer": TRAINER.replace("args =", "peft_config = LoraConfig(r = 8), args =")},
    "modules by their names in print": {"adapter": "import re\nfrom peft import LoraConfig, get_peft_model\nfound = re.findall(r'(\\w+): Linear', str(model))\nmodel = get_peft_model(model, LoraConfig(target_modules = found))"},
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("case", KEPT)
def test_what_no_setting_can_say_stays_code(case: str, notebook: Callable[..., Path]) -> None:
    assert converted(notebook(*with_cells(**KEPT[case]))).report["verification"]["V4"] == "passed"


@pytest.mark.process
@pytest.mark.parametrize("case", NOTED)
def test_commands_before_the_training_are_noted(case: str, notebook: Callable[..., Path]) -> None:
    notes = converted(notebook(*with_cells(**NOTED[case]))).report["notes"]
    assert any("is left out: if the training needs what it makes, run it first" in note for note in notes)


@pytest.mark.process
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_code_and_reason_and_write_nothing(
    case: str, notebook: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, code = REFUSED[case]
    cells = with_cells(**changed)
    if case == "a module from a cell":
        cells.insert(0, "%%writefile helper.py\ndef f(*a):\n    return a\n")
    path = notebook(*cells)
    out, result = tmp_path / "out", tmp_path / "result.json"
    assert main([str(path), "--out", str(out), "--json", str(result)]) == 3
    assert not out.exists()
    found = json.loads(result.read_text())
    assert found["code"] == code and len(found["reason"]) > 15
    assert code in capsys.readouterr().err


# A reason names the statement, and what to do.
REASONS = {
    "a sweep": ([HUB, HUB_MODEL, "for lr in [1e-4, 2e-4]:\n    " + HUB_TRAINER.replace("\n", "\n    ")], "R2", ["`for lr in [0.0001, 0.0002]:`", "--finetune training.learning_rate"]),
    "a sweep by a function": ([HUB, HUB_MODEL, "def go(lr):\n    " + HUB_TRAINER.replace("\n", "\n    ") + "\nfor lr in [1e-4, 2e-4]:\n    go(lr)"], "R2", ["in a loop (`for lr"]),
    "epochs": ([HUB, HUB_MODEL, HUB_TRAINER.replace("trainer.train()", "for epoch in range(3):\n    trainer.train()")], "R2", ["in a loop (`for epoch", "num_train_epochs"]),
    "a compiled model": ([HUB, HUB_MODEL, "model = torch.compile(model)", HUB_TRAINER], "R4", ["`torch.compile`", "torch_compile=True"]),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("case", REASONS)
def test_reasons_say_what_was_found_and_what_to_do(case: str, notebook: Callable[..., Path]) -> None:
    cells, code, wanted = REASONS[case]
    outcome = convert(notebook(*cells))
    assert (outcome.result, outcome.code) == ("refused", code), outcome
    assert outcome.cell is not None and all(word in outcome.reason for word in wanted), outcome.reason


@pytest.mark.process
def test_an_import_that_nothing_uses_refuses_nothing(notebook: Callable[..., Path]) -> None:
    unused = (
        "import torchaudio, librosa\nimport torch_xla.core.xla_model as xm\nfrom transformers import WhisperProcessor"
    )
    assert "torchaudio" not in converted(notebook(*with_cells(extra=unused))).script


def test_other_languages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.ipynb"
    path.write_text(json.dumps(document("x <- 1") | {"metadata": {"kernelspec": {"language": "R", "name": "ir"}}}))
    assert convert(path).code == "E-LANGUAGE"


def bad_files(folder: Path) -> dict[str, Path]:
    files = {
        name: folder / name
        for name in ("empty.ipynb", "text.ipynb", "null.ipynb", "latin.ipynb", "list.ipynb", "prose.ipynb", "data.csv")
    }
    files["empty.ipynb"].write_bytes(b"")
    files["text.ipynb"].write_text("no JSON")
    files["null.ipynb"].write_bytes(b'{"cells": []}\0')
    files["latin.ipynb"].write_bytes('{"cells": ["é"]}'.encode("latin-1"))
    files["list.ipynb"].write_text("[1, 2]")
    files["prose.ipynb"].write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": "# text"}], "metadata": {}})
    )
    files["data.csv"].write_text("a,b")
    with (folder / "large.ipynb").open("wb") as file:
        file.truncate(100 * 2**20)
    return files | {"large": folder / "large.ipynb", "missing": folder / "none.ipynb", "folder": folder}


@pytest.mark.process
def test_bad_input_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, path in bad_files(tmp_path).items():
        assert main([str(path)]) == 2, name
        words = capsys.readouterr().err
        assert "Traceback" not in words and str(path) in words, name
    assert main([]) == 2
    assert main(["--check", str(tmp_path / "none")]) == 2


def test_a_notebook_that_is_no_regular_file_is_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo.ipynb")
    (tmp_path / "zero.ipynb").symlink_to("/dev/zero")
    for name, what in (("fifo", "FIFO"), ("zero", "device")):
        assert main([str(tmp_path / f"{name}.ipynb")]) == 2
        assert f"{name}.ipynb: it is a {what}, not a regular file" in capsys.readouterr().err
    assert main(["--check", str(tmp_path)]) == 0
    assert "2 bad input" in capsys.readouterr().out


# Each ended in a traceback, and --check with it. (cell or notebook, result, what the reason says)
TRACEBACKS = {
    "null in format 3": ({"worksheets": [{"cells": None}]}, "bad input", "no list `cells`"),
    "a number in format 3": ({"worksheets": [{"cells": 7}]}, "bad input", "no list `cells`"),
    "20,000 digits": ("x = 0x" + "f" * 20_000, "refused", "limit .4300 digits."),
    "900 attributes": ("x = a" + ".b" * 900, "refused", "recursion"),
    "a sum of 1,500": ("x = " + "+".join(["1"] * 1500), "refused", "recursion"),
    "900 added strings": (f"prompt = {'+'.join(['prompt'] * 900)}", "refused", "recursion"),
}


@pytest.mark.parametrize("name", TRACEBACKS)
def test_a_notebook_that_meets_a_limit_of_python_is_an_outcome(name: str, tmp_path: Path) -> None:
    content, result, reason = TRACEBACKS[name]
    content = content if isinstance(content, dict) else document(*with_cells(extra=content))
    (tmp_path / "x.ipynb").write_text(json.dumps(content))
    outcome = convert(tmp_path / "x.ipynb")
    assert outcome.result == result and re.search(reason, outcome.reason), outcome
    assert outcome.exit_code == {"bad input": 2, "refused": 3}[result]
    assert result == "bad input" or "cell 4" in f"cell {outcome.cell}"


def test_an_error_that_nothing_expected_is_an_outcome(
    notebook: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook("x = 1")

    def raising(error: Exception) -> Callable[..., None]:
        def broken(*arguments: object, **options: object) -> None:
            raise error

        return broken

    monkeypatch.setattr(command, "_verified", raising(ZeroDivisionError("of a library")))
    outcome = convert(path)
    assert (outcome.result, outcome.exit_code, outcome.code) == ("refused", 3, "E-CODE")
    assert "ZeroDivisionError: of a library at convert/command.py:" in outcome.reason
    assert main(["--check", str(path.parent)]) == 0
    assert "refused E-CODE" in capsys.readouterr().out
    for error, reason in ((OSError(errno.ENOSPC, "full"), "No space left on the disk"), (MemoryError(), "MemoryError")):
        monkeypatch.setattr(command, "_verified", raising(error))
        outcome = convert(path)
        assert (outcome.result, outcome.exit_code) == ("failed", 1) and outcome.reason.startswith(reason)


def test_a_file_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mine-\xff.ipynb"))
    path.write_text(json.dumps(document(*with_cells())))
    assert main([str(path)]) == 2
    assert "file name is not UTF-8" in capsys.readouterr().err
    assert main(["--check", str(tmp_path), "--json", str(tmp_path / "result.json")]) == 0
    assert "bad input" in capsys.readouterr().out.encode().decode()
    assert json.loads((tmp_path / "result.json").read_text())["notebooks"][0]["exit_code"] == 2


def test_no_control_character_of_a_notebook_reaches_the_terminal(
    notebook: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;pwned\x07\x1b[31m\u202e\x9b"
    for path in (notebook(f"%{hostile}foo"), notebook(f"x = {hostile}"), tmp_path / f"{hostile}.ipynb"):
        assert main([str(path)]) in (2, 3)
        said = capsys.readouterr().err
        assert "\\x1b]0;pwned\\x07\\x1b[31m\\u202e\\x9b" in said
        assert not any(letter in said for letter in "\x1b\x07\x9b\u202e")
    notebook(f"%{hostile}foo", name=f"{hostile}.ipynb")
    assert main(["--check", str(tmp_path)]) == 0
    assert not any(letter in capsys.readouterr().out for letter in "\x1b\x07\x9b\u202e")


# --- files that are notebooks in other ways ---------------------------------------------------------------------------


def body(conversion: Any) -> str:
    """The functions of a script: what does not name its notebook."""
    return "\n".join(
        ast.unparse(node) for node in ast.parse(conversion.script).body if isinstance(node, ast.FunctionDef)
    )


@pytest.mark.process
def test_exports_and_old_formats_give_the_same_script(notebook: Callable[..., Path], tmp_path: Path) -> None:
    cells = with_cells(after=SAVE)
    wanted = body(converted(notebook(*cells)))
    texts = {
        "percent.py": "\n".join(f"# %%\n{cell}" for cell in cells),
        "light.py": "# ---\n# jupyter:\n# ---\n\n# # Title\n\n" + "\n\n".join(cells),
        "colab.py": '# -*- coding: utf-8 -*-\n"""Mine.ipynb\n\nAutomatically generated by Colab.\n"""\n\n!pip install unsloth\n\n' + "\n\n".join(cells),
        "nbconvert.py": "#!/usr/bin/env python\n# In[1]:\nget_ipython().system('pip install unsloth')\n" + "".join(f"\n# In[2]:\n\n{cell}\n" for cell in cells),
        "windows.ipynb": json.dumps(document(*cells)).replace("\\n", "\\r\\n"),
        "old.ipynb": json.dumps({"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "language": "python", "input": cell.splitlines(True)} for cell in cells]}]}),
        "bare.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}),
        "outputs.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": cell, "outputs": [{"data": {"image/png": "A" * 2**20}}]} for cell in cells]}),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
        assert body(converted(tmp_path / name)) == wanted, name


def test_magics_are_taken_out_by_the_line(notebook: Callable[..., Path]) -> None:
    lines = [
        "#@title A cell", "%%time", "x = 5 % 2", "!ls -l \\", "  -a", "%matplotlib inline", "if x:", "    !nvidia-smi",
        'text = """', "! not a command", "%not a magic", '"""', "files = !ls", "%env A_VARIABLE = 1 # why", "x?",
    ]  # fmt: skip
    found = read(notebook("\n".join(lines)))
    assert [statement.head for statement in found.statements] == [
        "x = 5 % 2", "if x:", 'text = """', "files = __shell__('ls')", "os.environ['A_VARIABLE'] = '1'",
    ]  # fmt: skip
    assert [shell.text for shell in found.shells] == ["ls -l  -a", "%matplotlib inline", "nvidia-smi", "ls"]
    assert ast.literal_eval(found.statements[2].node.value) == "\n! not a command\n%not a magic\n"  # type: ignore[attr-defined]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_same_bytes_again_and_never_over_another_file(notebook: Callable[..., Path], tmp_path: Path) -> None:
    path, out = notebook(*ALL), tmp_path / "out"
    assert main([str(path), "--out", str(out)]) == 0
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    assert sorted(first) == ["mine.py", "mine.report.json"]
    assert main([str(path), "--out", str(out)]) == 0
    assert {file.name: file.read_bytes() for file in out.iterdir()} == first
    (out / "mine.py").write_text("mine = 1\n")
    assert main([str(path), "--out", str(out)]) == 2
    assert (out / "mine.py").read_text() == "mine = 1\n"
    assert main([str(path), "--out", str(out), "--overwrite"]) == 0
    assert (out / "mine.py").read_bytes() == first["mine.py"]


@pytest.mark.parametrize("kind", ["link to a file", "dangling link", "FIFO", "folder"])
@pytest.mark.parametrize("name", ["mine.py", "mine.report.json"])
def test_an_output_is_never_written_through_a_link(name: str, kind: str, tmp_path: Path) -> None:
    """The default output folder is the notebook's own: a repository would choose where its code is written."""
    target = tmp_path / "elsewhere.py"
    if kind == "link to a file":
        target.write_text("precious")
    if kind == "FIFO":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(target)
    before = sorted(tmp_path.iterdir())
    made = Conversion(name="mine", script="import os\n", report={})
    shown = kind if kind in ("FIFO", "folder") else "symbolic link"
    for overwrite in (False, True):
        with pytest.raises(UserError, match=f"{name} is a {shown}, not a regular file. Remove it, or give another"):
            command.write(made, tmp_path, overwrite=overwrite)
    assert sorted(tmp_path.iterdir()) == before
    assert kind != "link to a file" or target.read_text() == "precious"


@pytest.mark.process
def test_check_prints_a_table_and_writes_nothing(
    notebook: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(*with_cells(), name="good.ipynb")
    notebook(*with_cells(train=""), name="refused.ipynb")
    (tmp_path / "broken.ipynb").write_text("{")
    assert main(["--check", str(tmp_path), "--json", str(tmp_path / "result.json")]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("good.ipynb", "converted", "refused R0", "bad input"))
    found = json.loads((tmp_path / "result.json").read_text())["notebooks"]
    assert [item["exit_code"] for item in found] == [2, 0, 3]
    assert not list(tmp_path.glob("*.py"))


# --- the verification -------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_every_deletion_is_seen(notebook: Callable[..., Path]) -> None:
    cells = with_cells(
        data=DATA + "\ndataset = dataset.shuffle(seed = 1)", after='model.save_pretrained_merged("merged", tokenizer)'
    )
    path = notebook(*cells)
    found, conversion = steps(path)
    verify(found, conversion)
    for gone, script in mutants(conversion.script):
        if gone.startswith("set_seed"):
            continue  # added by the converter
        with pytest.raises(NotVerified):
            verify(found, replace(conversion, script=script))
            pytest.fail(f"nobody sees that `{gone}` is gone")


@pytest.mark.process
def test_unsafe_scripts_are_seen(notebook: Callable[..., Path]) -> None:
    script = converted(notebook(*with_cells())).script
    safe_on_ranks(script)
    for line in ("tokenizer.save_pretrained('x')", "device = 'cuda:0'", "trainer.train()", "get_ipython()"):
        with pytest.raises(NotVerified, match="V3"):
            safe_on_ranks(script.replace("def main() -> None:\n", f"def main() -> None:\n    {line}\n"))


@pytest.mark.process
def test_a_script_that_fails_is_not_written(
    notebook: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = command.steps

    def another_rate(path: Path, out: Path) -> Any:
        found, conversion = write(path, out)
        return found, replace(conversion, script=conversion.script.replace("random_state=7", "random_state=8"))

    monkeypatch.setattr(command, "steps", another_rate)
    path = notebook(*with_cells())
    assert main([str(path), "--out", str(tmp_path / "out")]) == 1
    assert "V4" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("notebook", "script"),
    [
        ("Llama3.2_(1B)-Alpaca.ipynb", "llama3_2_1b_alpaca"),
        ("4bit.ipynb", "nb_4bit"),
        ("pandas.ipynb", "pandas_sft"),
        ("Code.ipynb", "code_sft"),
        ("mylib.ipynb", "mylib_sft"),
        ("(%).ipynb", "notebook"),
    ],
)
def test_a_script_is_not_named_like_a_library(notebook: str, script: str) -> None:
    """Python looks for modules in the script's folder first: pandas.py would be imported as pandas."""
    assert slug(notebook, {"mylib"}) == script


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("intro\n## The [data](http://x) of **today** <br>", "The data of today"),
        ("# " + "[" * 200_000, ""),
        ("# Rows " + "[" * 200_000, "Rows"),
        ("token:" * 33_000, ""),
        ("# Rows token:" + "token:" * 33_000, "Rows"),
        ("![x](data:image/png;base64," + "iVBORw0K" * 2**20 + ")\n# After the image", "After the image"),
        ("# ![x](data:image/png;base64," + "iVBORw0K" * 2**20 + ") Beside the image", "x Beside the image"),
        ("# [a](http://" + "u" * 970 + ") hf" + "_" + "aB3xK9qZ7mW2" * 3, "a"),
    ],
    ids=["markup", "brackets", "words and brackets", "no heading", "names", "image", "image beside", "cut"],
)
def test_headings_of_any_text(notebook: Callable[..., Path], text: str, heading: str) -> None:
    """Under an expression that backtracks, each of these took from a minute to hours: the test then never ends."""
    path = notebook("x = 1")
    content = json.loads(path.read_text())
    content["cells"][0]["source"] = text
    path.write_text(json.dumps(content))
    assert read(path).statements[0].heading == heading
