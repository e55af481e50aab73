"""How fast `finetune chat --prompts` answers, against transformers' continuous batching and Unsloth's inference.

    python -m benchmarks.answers --run RUN --prompts train.jsonl --out FILE.jsonl [--only ours,continuous,unsloth]

RUN is the output folder of a LoRA run. Each way is a process of its own that answers the same prompts greedily, 64 at a
time where it has batches, first a few to warm up, and appends one JSON line: generated tokens, seconds, the answers'
token ids. No end token is honored, so that all ways generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("ours", "continuous", "unsloth")
BATCH = 64


def main() -> int:
    """Measure each way. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="output folder of a LoRA run")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with question, as GSM8K")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--only", default=",".join(WAYS), help="ways, separated by commas")
    parser.add_argument("--count", type=int, default=128, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    given = parser.parse_args()
    if "," in given.only:
        for way in given.only.split(","):
            words = ["--run", given.run, "--prompts", given.prompts, "--out", given.out, "--only", way]
            words += ["--count", given.count, "--tokens", given.tokens]
            subprocess.run([sys.executable, "-m", "benchmarks.answers", *map(str, words)], check=False)
        return 0
    lines = given.prompts.read_text(encoding="utf-8").splitlines()[: given.count]
    found = measure(given, [json.loads(line)["question"] for line in lines])
    line = json.dumps({"way": given.only, "prompts": len(lines), "tokens_each": given.tokens, "batch": BATCH} | found)
    with given.out.open("a") as out:
        out.write(line + "\n")
    sys.stdout.write(line[:400] + "\n")
    return 0


def measure(given: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """Seconds for all prompts, after a warm-up."""
    way = given.only
    if way == "unsloth":
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(str(given.run), max_seq_length=1024, load_in_4bit=False)
        FastLanguageModel.for_inference(model)
    else:
        from finetune.chat.load import load
        from finetune.engine.checkpoint import run_artifacts

        loaded = load(run_artifacts.find_trained_model(given.run), backend="transformers")
        model, tokenizer = loaded.model, loaded.tokenizer
    import torch

    encoded = [
        tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"] for text in prompts
    ]
    answer = continuous if way == "continuous" else batches
    answer(model, encoded[:BATCH], settings(tokenizer, given.tokens))
    began = time.perf_counter()
    found = answer(model, encoded, settings(tokenizer, given.tokens))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tokens = sum(len(one) for one in found)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "answers": found}


def batches(model: Any, encoded: list[list[int]], manner: Any) -> list[list[int]]:
    """As chat/batch.py does: prompts of similar length together, padded on the left."""
    from finetune.engine.model.generation import complete

    order = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), BATCH):
        group = order[start : start + BATCH]
        found |= dict(zip(group, complete(model, [encoded[i] for i in group], manner), strict=True))
    return [found[place] for place in range(len(encoded))]


def continuous(model: Any, encoded: list[list[int]], manner: Any) -> list[list[int]]:
    """transformers' continuous batching."""
    outputs = model.generate_batch(inputs=encoded, generation_config=manner)
    ordered = sorted(outputs.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
    return [list(one.generated_tokens) for one in ordered]


def settings(tokenizer: Any, tokens: int) -> Any:
    """Greedy, without an end."""
    from transformers import GenerationConfig

    pad = tokenizer.pad_token_id
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=pad, eos_token_id=[-1])


if __name__ == "__main__":
    raise SystemExit(main())
