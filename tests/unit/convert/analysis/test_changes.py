"""A statement that is left out takes no change with it: of the model, the tokenizer, the adapter or the arguments.
Either the change is in the script, or the notebook is refused with the change as the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.convert.command import Outcome, convert

PARTS = {
    "load": """import torch, os, json, subprocess, sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from trl import SFTTrainer, SFTConfig
model_id = "acme/tiny"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id)""",
    "config": 'peft_config = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules=["q_proj"])',
    "adapt": "model = get_peft_model(model, peft_config)",
    "data": 'dataset = load_dataset("acme/answers", split="train")',
    "args": 'args = SFTConfig(output_dir="out", learning_rate=2e-4, max_steps=60, dataset_text_field="text")',
    "trainer": "trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)",
    "train": "trainer.train()",
}
GENERATE = "model.generate(**tokenizer('a', return_tensors='pt'))"


def converted(folder: Path, after: str, code: str) -> Outcome:
    """The notebook with this code in a cell after one of PARTS; "adapter in place" has no other adapter."""
    alone = "get_peft_model(" in code
    cells = [
        text
        for name, part in PARTS.items()
        if not (alone and name == "adapt")
        for text in (part, *([code] if name == after else []))
    ]
    path = folder / "stranger.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    return convert(path)


# Beside an inference in one `with`, which is left out.
IN_INFERENCE = {
    "model.half()": "adapt",
    "model.lm_head.weight.zero_()": "adapt",
    "model.config.attention_dropout = 0.5": "adapt",
    "tokenizer.pad_token = '<pad>'": "adapt",
    "tokenizer.add_tokens(['<x>'])": "adapt",
    "model.init_weights()": "adapt",
    "model.lm_head.apply(print)": "adapt",
    "model.load_state_dict(torch.load('w.pt'))": "adapt",
    "model.unload()": "adapt",
    "model.disable_adapter_layers()": "adapt",
    "torch.nn.init.zeros_(model.lm_head.weight)": "adapt",
    "torch.nn.Module.half(model)": "adapt",
    "torch.nn.utils.prune.l1_unstructured(model.lm_head, 'weight', 0.3)": "adapt",
    "setattr(model.config, 'attention_dropout', 0.5)": "adapt",
    "args.learning_rate = 1e-3": "args",
    "peft_config.r = 4": "config",
    "trainer.model.half()": "trainer",
    "[p.requires_grad_(False) for p in model.parameters()]": "adapt",
    "for p in model.parameters():\n        p.add_(1)": "adapt",
    "head = model.lm_head\n    head.half()": "adapt",
}


@pytest.mark.parametrize("code", IN_INFERENCE)
def test_a_change_beside_an_inference_is_refused(code: str, tmp_path: Path) -> None:
    found = converted(tmp_path, IN_INFERENCE[code], f"with torch.no_grad():\n    {GENERATE}\n    {code}")
    assert (found.result, found.code) == ("refused", "R4")
    assert "(inference), but it also changes" in found.reason and "as a statement of its own" in found.reason
    assert ("= ...`" in found.reason) == (" = " in code and "head" not in code)


REFUSED = {
    "after a login": "try:\n    import huggingface_hub\n    huggingface_hub.login()\n"
    "    tokenizer.pad_token = '<pad>'\nexcept Exception:\n    pass",
    "rows after a login": "import wandb\nrows = []\nwith open('x.json') as file:\n    wandb.login()\n"
    "    rows.append(1)\nmodel.config.rows = rows",
    "on Colab alone": "if 'google.colab' in sys.modules:\n    from google.colab import drive\n"
    "    drive.mount('/content/drive')\n    tokenizer.padding_side = 'left'",
    "after an installation": "if len('a') == 1:\n    subprocess.run('pip install x', shell=True)\n    model.half()",
    "of what generates": f"out = {GENERATE.replace('model.', 'model.half().')}\nprint(out)",
    "in a statistic": "peak = (torch.cuda.max_memory_allocated(), model.half())",
    "in a value that only an inference reads": f"m = model.half()\n{GENERATE.replace('model.', 'm.')}",
    "in a value that is only shown": "frozen = [p.requires_grad_(False) for p in model.parameters()]\nlen(frozen)",
    "in a plot": "import matplotlib.pyplot as plt\nplt.plot(model.half().lm_head.weight[0].tolist())",
    "in a save before the training": "model.merge_and_unload().save_pretrained('merged')",
    "with a value that is left out": f"out = {GENERATE}\ntorch.nn.init.constant_(model.lm_head.weight, len(out))",
    "in a default": "def unused(m=model.half()):\n    pass",
    "by a decorator": "@model.apply\ndef unused(m):\n    m.half()",
    "in the body of a class": "class Unused:\n    m = model.half()",
    "in what is prepared": "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "model = accelerator.prepare(model.half())",
    "by a function of the notebook": "def warm(m):\n    m.half()\n    return m\n"
    f"with torch.no_grad():\n    {GENERATE}\n    warm(model)",
}


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED.keys())
def test_a_change_in_what_is_left_out_is_refused(code: str, tmp_path: Path) -> None:
    found = converted(tmp_path, "adapt", code)
    assert (found.result, found.code) == ("refused", "R4"), found.reason
    assert "is left out (" in found.reason and "it also changes" in found.reason


# Code after one of PARTS -> what the script must have.
KEPT = {
    "with_adapter = get_peft_model(model, peft_config)\nwith_adapter.print_trainable_parameters()": "get_peft_model(m",
    "base = model\nbase = get_peft_model(base, peft_config)": "get_peft_model(base, peft_config)",
    "prepared = prepare_model_for_kbit_training(model)": "prepare_model_for_kbit_training(model)",
    "other = PeftModel.from_pretrained(model, 'acme/adapter')": "PeftModel.from_pretrained(model",
    "merged = model.merge_and_unload()": "model.merge_and_unload()",
    "kind = torch.float16\nmodel.to(kind)": "model.to(kind)",
    "kind = torch.float16\nmodel = model.to(kind)": "model.to(kind)",
    "kind = {'dtype': torch.float16}\nmodel.to(**kind)": "model.to(**kind)",
    "example = torch.ones(1).half()\nmodel.to(example)": "model.to(example)",
    "class Kinds:\n    half = torch.float16\nmodel.to(Kinds.half)": "model.to(Kinds.half)",
    "kinds = {'a': torch.float16}\nmodel.to(kinds['a'])": 'model.to(kinds["a"])',
    "model.to(getattr(torch, 'fl' + 'oat16'))": "model.to(getattr(",
    "kind = torch.float16\nmodel = AutoModelForCausalLM.from_pretrained(model_id).to(kind)": ".to(kind)",
    "class Base:\n    def __init_subclass__(cls):\n        model.half()\nclass C(Base):\n    pass": "class C(Base)",
    "if torch.cuda.is_available():\n    torch.backends.cuda.matmul.allow_tf32 = True": "allow_tf32 = True",
}


@pytest.mark.process
@pytest.mark.parametrize("code", KEPT)
def test_a_change_that_stands_alone_is_kept(code: str, tmp_path: Path) -> None:
    found = converted(tmp_path, "config", code)
    assert found.conversion is not None, found.reason
    assert KEPT[code] in found.conversion.script.replace("'", '"')


UNCHANGED = {
    'model = model.to("cuda")': "model.to(",
    'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\nmodel = model.to(device)': "model.to(",
    'device = "cuda"\nmodel.to(device)\nmodel.train()': "model.to(",
    f"with torch.no_grad(), model.disable_adapter():\n    print({GENERATE})": "generate(",
    "for p in model.parameters():\n    torch.cuda.memory_allocated(), p.float().mean()": "memory_allocated",
}


@pytest.mark.process
@pytest.mark.parametrize("code", UNCHANGED)
def test_what_changes_nothing_is_left_out(code: str, tmp_path: Path) -> None:
    found = converted(tmp_path, "adapt", code)
    assert found.conversion is not None, found.reason
    assert UNCHANGED[code] not in found.conversion.script
