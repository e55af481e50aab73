"""What rounding a merged adapter, or a fully trained model, to bfloat16 loses, on short rows of GSM8K.

    python -m benchmarks.quality.rounding --model MODELS/smollm2 --data GSM8K --out rounding.jsonl

Trains a short LoRA, continues it with a higher learning rate, and trains all weights in float32. Each result is rounded
to nearest, stochastically (several seeds) and with error feedback along the input dimension, and judged by the held-out
loss of plain transformers, computed in float32. A line of the record is one of these models: its loss, the share of the
gain over the base model that it keeps, and <rounded - base, update> / <update, update> over all trained weights.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import judge, rows
from finetune.engine.optimizer import rounding

LENGTH, BATCH = 130, 4  # tokens of a row at most, rows of a step
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rounding = Callable[[torch.Tensor, str], torch.Tensor]


def nearest(exact: torch.Tensor, name: str) -> torch.Tensor:
    """Rounding to nearest."""
    return exact.bfloat16()


def error_feedback(exact: torch.Tensor, name: str) -> torch.Tensor:
    """Rounding to nearest, with the error of each weight added to the next one of the same output."""
    if exact.dim() != 2:
        return exact.bfloat16()
    columns, found, error = exact.t().contiguous(), [], 0
    for column in columns:
        wanted = column + error
        found.append(wanted.bfloat16())
        error = wanted - found[-1].float()
    return torch.stack(found, 1)


def seeded(seed: int) -> Rounding:
    """Stochastic rounding."""
    return lambda exact, name: rounding.round_stochastically(exact, torch.bfloat16, name, seed)


METHODS: dict[str, Rounding] = {
    "nearest": nearest,
    "stochastic, seed 0": seeded(0),
    "error feedback": error_feedback,
    "stochastic, seed 1": seeded(1),
    "stochastic, seed 2": seeded(2),
}


def train(model: Any, encoded: list[dict[str, list[int]]], rate: float, steps: int, weights: list[Any]) -> float:
    """AdamW with a warm-up of a tenth, in bfloat16 autocast, `BATCH` rows per step. Returns the last step's loss."""
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    model.train()
    loss = torch.tensor(0.0)
    for step in range(steps):
        batch = encoded[step * BATCH : (step + 1) * BATCH]
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(BATCH, longest, dtype=torch.long)
        labels = torch.full((BATCH, longest), rows.IGNORED)
        for place, row in enumerate(batch):
            ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            labels[place, : len(row["labels"])] = torch.tensor(row["labels"])
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 10 * (step + 1) / steps)
        with torch.autocast(DEVICE, torch.bfloat16):  # padding is on the right, where no supervised token attends
            loss = model(input_ids=ids.to(DEVICE), labels=labels.to(DEVICE)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item()


@torch.no_grad()
def judged(
    model: Any,
    exact: dict[str, torch.Tensor],
    base: dict[str, torch.Tensor],
    how: Rounding | None,
    loss: Callable[[Any], float],
) -> tuple[float, float]:
    """The loss of the model with rounded weights, and the share of the update that they keep. `model` has the weights
    of `base` then."""
    own = dict(model.named_parameters())
    kept, whole = 0.0, 0.0
    for name, value in exact.items():
        new = value if how is None else how(value, name).float()
        update = (value - base[name]).double()
        kept += float(((new - base[name]).double() * update).sum())
        whole += float((update * update).sum())
        own[name].copy_(new)
    found = loss(model)
    for name, value in base.items():
        own[name].copy_(value)
    return found, kept / whole


def main(argv: Sequence[str] | None = None) -> int:
    """Train, round, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--out", type=Path, required=True, help="the record: JSON lines")
    parser.add_argument("--steps", type=int, default=30, help="of each training")
    parser.add_argument("--held-out", type=int, default=60, help="rows")
    parser.add_argument("--only", choices=["lora", "full"])
    given = parser.parse_args(argv)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)

    def short(file: str, count: int) -> list[dict[str, str]]:
        found = []
        for row in rows.read(given.data / file):
            if len(rows.encode(tokenizer, row, as_text=False)["input_ids"]) <= LENGTH:
                found.append(row)
            if len(found) == count:
                break
        return found

    hardware = f"CPU, {torch.get_num_threads()} threads" if DEVICE == "cpu" else torch.cuda.get_device_name()
    held_out = short("test.jsonl", given.held_out)
    encoded = [rows.encode(tokenizer, row, as_text=False) for row in short("train.jsonl", 2 * given.steps * BATCH)]
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, device_map={"": DEVICE})
    base = {name: one.detach().clone() for name, one in model.named_parameters()}
    shared = {
        "model": given.model.name, "rows": f"GSM8K, at most {LENGTH} tokens", "held_out": given.held_out,
        "batch": BATCH, "date": str(datetime.date.today()), "hardware": hardware,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }  # fmt: skip

    def write(**found: Any) -> None:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found | shared) + "\n")

    @torch.no_grad()
    def loss(one: Any) -> float:
        return judge.loss(one, tokenizer, held_out, as_text=False)["loss"]

    start = loss(model)
    write(training="none", weights="base", loss=start)

    def compare(training: dict[str, Any], exact: dict[str, torch.Tensor]) -> None:
        whole, _ = judged(model, exact, base, None, loss)
        write(**training, weights="float32", loss=whole, gain_kept=1.0, update_kept=1.0)
        few = "stochastic, seed 1", "stochastic, seed 2", "error feedback"
        for method, how in METHODS.items():
            if method in few and training["rate"] != 1e-4:
                continue
            began = time.perf_counter()
            one, kept = judged(model, exact, base, how, loss)
            gain = (start - one) / (start - whole)
            seconds = time.perf_counter() - began
            write(**training, weights=method, loss=one, gain_kept=gain, update_kept=kept, seconds=seconds)

    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules="all-linear")
    peft = get_peft_model(copy.deepcopy(model), lora)
    weights = [one for one in peft.parameters() if one.requires_grad]

    def adapter(rate: float, first: int) -> None:
        last = train(peft, encoded[first * BATCH :], rate, given.steps, weights)
        merged = copy.deepcopy(peft).merge_and_unload()
        exact = {n: one.detach() for n, one in merged.named_parameters() if not torch.equal(one, base[n])}
        compare({"training": "LoRA", "rate": rate, "steps": first + given.steps, "last_loss": last}, exact)

    if given.only != "lora":
        last = train(model, encoded, 1e-5, given.steps, list(model.parameters()))
        exact = {name: one.detach().clone() for name, one in model.named_parameters()}
        compare({"training": "full, float32 weights", "rate": 1e-5, "steps": given.steps, "last_loss": last}, exact)
    if given.only != "full":
        adapter(1e-4, 0)
        adapter(2e-3, given.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
