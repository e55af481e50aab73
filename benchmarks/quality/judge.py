"""The judge: held-out loss and exact match of a trained model, with plain transformers, no packing, the same for all.
On a GPU the loss is of the model in float32 (what was learned) and, as `served_loss`, in bfloat16 (what PEFT serves);
of some cells also of the merged export and of the model that `finetune chat` loads.

`python -m benchmarks.quality.judge REQUEST.json RESULT.json`, started by `benchmarks.quality`. The loss is the mean
over the supervised tokens of `rows.encode`, whatever the stack supervised in training; TRL's own `eval_loss` of chat
rows is lower, because it also counts the line break after the end of turn.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.quality import rows

BATCH = 64  # rows
LOGITS = 6e8  # of a batch: large vocabularies get fewer rows
NEW_TOKENS = 256
NUMBER = re.compile(r"-?[\d,]*\.?\d+")


def main() -> int:
    """Load, judge, write."""
    import torch
    from transformers import AutoTokenizer

    from finetune.chat.load import load
    from finetune.engine.checkpoint.run_artifacts import find_trained_model

    request = json.loads(Path(sys.argv[1]).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(request["base"])
    tokenizer.padding_side = "left"  # for generation; the loss pads on the right
    trained = Path(request["trained"] or request["base"])
    held_out = rows.read(request["rows"])
    with torch.no_grad():
        result = loss(_load(request, trained, device, torch.float32), tokenizer, held_out, request["as_text"])
        if device == "cuda" or request["exact"]:
            model = _load(request, trained, device, torch.bfloat16 if device == "cuda" else torch.float32)
            result["served_loss"] = loss(model, tokenizer, held_out, request["as_text"])["loss"]
        result |= {"exact": None, "asked": request["exact"]}
        if request["exact"]:
            result["exact"] = exact(model, tokenizer, held_out[: request["exact"]])  # pyright: ignore[reportPossiblyUnboundVariable]
        if request["merged"]:
            merged = _load(request, Path(request["merged"]), device, torch.bfloat16)
            result["merged_loss"] = loss(merged, tokenizer, held_out, request["as_text"])["loss"]
            chat = load(find_trained_model(trained)).model  # last: it may import Unsloth, which changes transformers
            result["chat_loss"] = loss(chat, tokenizer, held_out, request["as_text"])["loss"]
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


def _load(request: dict[str, Any], trained: Path, device: str, dtype: Any) -> Any:
    """The trained model, with its sums in `dtype`."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    adapter = (trained / "adapter_config.json").is_file()
    model: Any = AutoModelForCausalLM.from_pretrained(
        request["base"] if adapter else trained,
        dtype=dtype,
        device_map={"": device},
        quantization_config=quantized if request["four_bit"] else None,
    )
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(trained))
    return model.eval()


def loss(model: Any, tokenizer: Any, held_out: list[dict[str, str]], as_text: bool) -> dict[str, float]:
    """Mean negative log-likelihood per supervised token, in float32, and the number of these tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    # Longest first: later batches fit into memory that earlier ones have freed.
    encoded = sorted((rows.encode(tokenizer, row, as_text) for row in held_out), key=lambda row: -len(row["input_ids"]))
    total, tokens, done = 0.0, 0, 0
    while done < len(encoded):
        count = BATCH
        while count > 1 and count * len(encoded[done]["input_ids"]) > LOGITS / len(tokenizer):
            count //= 2
        batch = encoded[done : done + count]
        done += count
        shape = len(batch), len(batch[0]["input_ids"])
        ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, rows.IGNORED)
        attention = torch.zeros(shape, dtype=torch.long)
        for place, row in enumerate(batch):
            length = len(row["input_ids"])
            ids[place, :length] = torch.tensor(row["input_ids"])
            labels[place, :length] = torch.tensor(row["labels"])
            attention[place, :length] = 1
        logits = model(input_ids=ids.to(model.device), attention_mask=attention.to(model.device)).logits
        labels = labels[:, 1:].to(model.device)
        kept = labels != rows.IGNORED
        total += cross_entropy(logits[:, :-1][kept].float(), labels[kept], reduction="sum").item()
        tokens += int(kept.sum())
    return {"loss": total / tokens, "judged_tokens": tokens}


def exact(model: Any, tokenizer: Any, asked: list[dict[str, str]]) -> float:
    """Share of rows whose greedy answer has the right number after "####"."""
    right = 0
    for first in range(0, len(asked), BATCH):
        batch = asked[first : first + BATCH]
        texts = [rows.prompt(tokenizer, row) for row in batch]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        answers = model.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(answers[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(number(answer) == number(row["answer"]) for answer, row in zip(answers, batch, strict=True))
    return right / len(asked)


def number(answer: str) -> str | None:
    """The first number after the last "####"; of the whole answer without one."""
    found = NUMBER.findall(answer.split("####")[-1])
    return found[0].replace(",", "") if found else None


if __name__ == "__main__":
    raise SystemExit(main())
