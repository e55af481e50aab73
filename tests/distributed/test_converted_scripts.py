"""Five notebooks, converted: the scripts train on one rank and on two with the same losses."""

# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.convert.command import convert
from tests.helpers import launch

pytestmark = [pytest.mark.campaign, pytest.mark.process]

LOAD = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("MODEL")
tokenizer = AutoTokenizer.from_pretrained("MODEL")
rows = load_dataset("json", data_files="ROWS", split="train")
"""
MAP = """def change(row):
    question, answer = row["messages"][-2]["content"], row["messages"][-1]["content"]
    return {}
rows = rows.map(change, remove_columns=rows.column_names)
"""
TRAIN = """trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(r=4), MORE)
trainer.train()
trainer.save_model("OUT/final")
"""
ARGS = """args = SFTConfig(output_dir="OUT", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4, learning_rate=1e-3,
                 bf16=False, logging_steps=1, max_length=128, seed=7, MORE)
"""
NOTEBOOKS = {
    # name: statements about the rows, arguments of SFTConfig, arguments of the trainer
    "text": (MAP.replace("{}", '{"text": question + answer + tokenizer.eos_token}'), 'warmup_steps=1', ""),
    "messages": ("", 'lr_scheduler_type="cosine"', ""),
    "completions": (MAP.replace("{}", '{"prompt": question, "completion": " " + answer}'), "weight_decay=0.1", ""),
    "formatting": ('def form(row):\n    return row["messages"][-1]["content"] + tokenizer.eos_token\n', "max_grad_norm=0.3", "formatting_func=form"),
    "packed": (MAP.replace("{}", '{"text": answer + tokenizer.eos_token}'), "packing=True", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_losses_do_not_depend_on_the_ranks(name: str, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    data, arguments, more = NOTEBOOKS[name]
    text = LOAD + data + ARGS.replace("MORE", arguments) + TRAIN.replace("MORE", more)
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
    assert max(abs(a - b) / a for a, b in zip(*losses, strict=True)) < 1e-5, losses
