"""What the tests of chat share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from finetune import chat
from finetune.engine.checkpoint import run_artifacts

# Not the template of the base model: what was trained with is saved, and is what chat uses.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)
PROMPTS = ["the cat runs", "sing", "seven small green birds that sing while rain falls over the hill and the cat sees"]
LONGEST = 12


def reference(base: Path, adapter: Path | None, messages: list[dict[str, str]], template: str = TEMPLATE) -> str:
    """A greedy answer of plain transformers, with the adapter merged into the weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    ids = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, do_sample=False, max_new_tokens=LONGEST, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]


def answered(tmp_path: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a call that must succeed."""
    target = tmp_path / "answers.json"
    longest = ("--max-new-tokens", str(LONGEST)) if "--max-new-tokens" not in arguments else ()
    assert chat.main([str(folder), "--json", str(target), *longest, *arguments]) == 0
    return json.loads(target.read_text())


def generator(folder: Path, **settings: Any) -> Any:
    from finetune.chat import load
    from finetune.chat.generation import GenerationSettings, Generator

    found = run_artifacts.find_trained_model(folder)
    given = {"max_new_tokens": LONGEST, "temperature": None, "greedy": True, "seed": 1, **settings}
    return Generator(load.load(found), found, GenerationSettings(**given), system=None, raw=False)
