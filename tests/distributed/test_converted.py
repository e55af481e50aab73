"""Converted notebooks, launched as users do: on one process and on two gloo ranks."""

# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finetune.convert.command import convert
from tests.helpers import ROOT, launch

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
QUICK = "qlora_alpaca"  # of these `make test` converts and runs one on two ranks
CONVERTED = ROOT / "notebooks_converted"
KINDS = (".py", ".report.json")


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def test_there_is_a_script_for_each_notebook() -> None:
    assert len(NOTEBOOKS) >= 4
    expected = {path.stem + kind for path in NOTEBOOKS for kind in KINDS}
    assert {path.name for path in CONVERTED.iterdir() if path.is_file()} == expected | {"README.md"}


@pytest.mark.process
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_converted_scripts_are_up_to_date(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.convert import main

    monkeypatch.chdir(ROOT)
    assert main([str(notebook.relative_to(ROOT)), "--out", str(tmp_path)]) == 0
    for kind in KINDS:
        name = notebook.stem + kind
        assert (tmp_path / name).read_bytes() == (CONVERTED / name).read_bytes(), f"{name}: run `make notebooks`"


# What each script needs to train on this machine: the model and the rows by other names, and a few steps.
LOCAL = {
    "model": r'(model_name=)"[^"]*"',
    "rows": r"load_dataset\([^()]*\)",
    "steps": r"(max_steps|num_train_epochs)=\d+",
    "optimizer": r'optim="[^"]*"',
    "folder": r'output_dir="[^"]*"',
    "bits": r"load_in_4bit=True",
}
_MESSAGES = [{"role": "user", "content": "how many? {n}"}, {"role": "assistant", "content": "{n} birds"}]
ROWS = {
    "full_text": {"text": "one bird sings {n} times in the morning"},
    "lora_messages": {"conversations": [{"from": "human", "value": "how? {n}"}, {"from": "gpt", "value": "{n} birds"}]},
    "multi_turn_responses": {"messages": _MESSAGES},
    "qlora_alpaca": {"instruction": "count {n}", "input": "", "output": "{n} birds"},
}


def local(stem: str, model: Path, folder: Path) -> Path:
    """The converted script with a local model, local rows and four steps; the text of its rows differs."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROWS[stem]).replace("{n}", str(n)) + "\n" for n in range(64)))
    new = {
        "model": rf'\1"{model}"',
        "rows": f'load_dataset("json", data_files="{rows}", split="train")',
        "steps": "max_steps=4",
        "optimizer": 'optim="adamw_torch"',
        "folder": 'output_dir="outputs"',
        "bits": "load_in_4bit=False",
    }
    text = (CONVERTED / f"{stem}.py").read_text(encoding="utf-8")
    for name, pattern in LOCAL.items():
        text, count = re.subn(pattern, new[name], text)
        assert count == 1 or name == "bits", (name, count)
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(one, marks=[] if one.stem == QUICK else [pytest.mark.campaign]) for one in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_converted_script_on_two_ranks_trains_as_on_one(notebook: Path, tiny_model: Path, tmp_path: Path) -> None:
    runs = []
    for how in ("1 rank", "2 ranks"):
        folder = tmp_path / how
        folder.mkdir()
        script = local(notebook.stem, tiny_model, folder)
        done = launch.run(how, [], cache=folder, script=script)
        assert done.returncode == 0, done.stdout[-8000:]
        runs.append(launch.read(folder / "outputs"))
    one, two = runs
    assert [run["world_size"] for run in runs] == [1, 2]
    assert one["batch"]["global_batch_size"] == two["batch"]["global_batch_size"]
    assert len(one["losses"]) == 4 and worst(one["losses"], two["losses"]) < 1e-5


# --- a notebook for each kind of rows -----------------------------------------------------------------------------------

CELL_LOAD = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("MODEL")
tokenizer = AutoTokenizer.from_pretrained("MODEL")
rows = load_dataset("json", data_files="ROWS", split="train")
"""
CELL_MAP = """def change(row):
    question, answer = row["messages"][-2]["content"], row["messages"][-1]["content"]
    return {}
rows = rows.map(change, remove_columns=rows.column_names)
"""
CELL_TRAIN = """trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(r=4), MORE)
trainer.train()
trainer.save_model("OUT/final")
"""
CELL_ARGS = """args = SFTConfig(output_dir="OUT", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4, learning_rate=1e-3,
                 bf16=False, logging_steps=1, max_length=128, seed=7, MORE)
"""
BY_ROWS = {
    # name: statements about the rows, arguments of SFTConfig, arguments of the trainer
    "text": (CELL_MAP.replace("{}", '{"text": question + answer + tokenizer.eos_token}'), 'warmup_steps=1', ""),
    "messages": ("", 'lr_scheduler_type="cosine"', ""),
    "completions": (CELL_MAP.replace("{}", '{"prompt": question, "completion": " " + answer}'), "weight_decay=0.1", ""),
    "formatting": ('def form(row):\n    return row["messages"][-1]["content"] + tokenizer.eos_token\n', "max_grad_norm=0.3", "formatting_func=form"),
    "packed": (CELL_MAP.replace("{}", '{"text": answer + tokenizer.eos_token}'), "packing=True", ""),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("name", BY_ROWS)
def test_losses_of_each_kind_of_rows_do_not_depend_on_the_ranks(
    name: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    data, arguments, more = BY_ROWS[name]
    text = CELL_LOAD + data + CELL_ARGS.replace("MORE", arguments) + CELL_TRAIN.replace("MORE", more)
    text = text.replace("MODEL", str(tiny_model)).replace("ROWS", str(tiny_data / "train.jsonl"))
    notebook = tmp_path / "mine.py"
    notebook.write_text("# %%\n" + text.replace("OUT", str(tmp_path / "out")))
    outcome = convert(notebook)
    assert outcome.result == "converted", outcome.reason
    conversion = outcome.conversion
    losses = []
    for ranks, how in ((1, "1 rank"), (2, "2 ranks")):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        out = folder / "out"
        (folder / f"{conversion.name}.py").write_text(conversion.script.replace(str(tmp_path / "out"), str(out)))
        done = launch.run(
            how, [], cache=folder, script=folder / f"{conversion.name}.py", HF_DATASETS_CACHE=str(folder / "datasets"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        found = next(folder.rglob("run.json"))
        record = json.loads(found.read_text())
        assert record["world_size"] == ranks and record["batch"]["global_batch_size"] == 8
        losses.append(record["losses"])
    assert len(losses[0]) == 4
    assert worst(*losses) < 1e-5, losses
