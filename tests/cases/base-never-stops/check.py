import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def check(folder: Path, output: str) -> None:
    """Every folder names both end tokens, and plain transformers stops at the one that was trained."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    base, trained = (tokenizer.convert_tokens_to_ids(one) for one in ("<|endoftext|>", "<|im_end|>"))
    for name in ("out", "merged", "lora", "lora/checkpoint-1", "merged_lora", "adapter"):
        content = json.loads((folder / name / "generation_config.json").read_text())
        assert content["eos_token_id"] == [base, trained], name
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "merged")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the cat"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "runs<|im_end|>"
