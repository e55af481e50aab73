"""Load a finished run with plain transformers and peft, and measure its held-out loss: a check from outside.

python benchmarks/reload.py RUN_FOLDER BASE_MODEL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Prints one line of JSON: the loss over the held-out rows of the run's configuration, and a generated answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder, base = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "run.json").read_text())["config"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adapter = (folder / "adapter_config.json").is_file()
    quantization = None
    if config["model"]["load_in_4bit"]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(
        base if adapter else folder, dtype=torch.bfloat16, device_map={"": device}, quantization_config=quantization
    )
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    total = count = 0.0
    columns = config["data"]["columns"]
    rows = [json.loads(line) for line in Path(config["data"]["eval_file"]).open(encoding="utf-8")]
    for row in rows:
        question = [{"role": "user", "content": row[columns["instruction"]]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(row[columns["output"]] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        whole = prompt + answer + tokenizer("\n")["input_ids"]
        ids = torch.tensor([whole[: config["data"]["max_length"]]], device=device)
        with torch.no_grad():
            logits = model(ids).logits[0].float()
        supervised = range(len(prompt), min(len(prompt) + len(answer), ids.shape[1]))
        scores = torch.log_softmax(logits, -1)
        total -= sum(float(scores[place - 1, ids[0, place]]) for place in supervised)
        count += len(supervised)
    prompt = torch.tensor([prompt], device=device)
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    generated = tokenizer.decode(made[0, prompt.shape[1] :])
    sys.stdout.write(json.dumps({"loss": total / count, "generated": generated}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
