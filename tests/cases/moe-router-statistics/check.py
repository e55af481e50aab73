import json
from collections import Counter
from pathlib import Path

import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def check(folder: Path, output: str) -> None:
    """The figures of the first step are those of a plain loop over each document's router logits: an adapter begins as
    the base model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "m").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "m")
    counts: list[Counter[int]] = [Counter(), Counter()]
    for line in (folder / "rows.jsonl").read_text().splitlines():
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = model(input_ids=ids, use_cache=False, output_router_logits=True)
        for layer, logits in enumerate(found.router_logits):
            for token in logits:
                counts[layer].update(sorted(range(4), key=lambda expert: -token[expert])[:2])
    loads = [[layer[expert] * 4 / layer.total() for expert in range(4)] for layer in counts]
    events = EventAccumulator(str(folder / "out" / "runs" / "out")).Reload()

    def shown(name: str) -> float:
        return events.Scalars(f"2 health/{name}")[0].value

    worst = max(map(max, loads))
    assert abs(shown("busiest expert [x even]") - sum(map(max, loads)) / 2) < 1e-5
    assert abs(shown("busiest of a layer [x even]") - worst) < 1e-5 and worst > 1
    assert abs(shown("least busy expert [x even]") - sum(map(min, loads)) / 2) < 1e-5
    assert abs(shown("least busy of a layer [x even]") - min(map(min, loads))) < 1e-5
    assert shown("experts unused [0-1]") == 0
    run = json.loads((folder / "out" / "run.json").read_text())
    assert run["experts"] == {"layers": 2, "per_layer": 4, "per_token": 2, "grouped": 2}
    assert run["ledger"]["train"]["tokens"] == counts[0].total() / 2
    assert run["parameters"] - run["active_parameters"] == 2 * 2 * 3 * 64 * 64
    assert run["trainable_parameters"] < run["active_parameters"]
