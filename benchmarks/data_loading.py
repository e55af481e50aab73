"""What the data engine costs: tokenising against `tokenizers` alone, and loading packs, in one session on one core.

python -m benchmarks.data_loading --train train.jsonl [--json FILE]     # JSON lines with `question` and `answer`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

PACK_LENGTH = 16384
REPEATS = 5


def main() -> int:
    """Print the figures, and write them where --json says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {"date": time.strftime("%Y-%m-%d"), **tokenising(options.train), **loading()}
    for name, value in figures.items():
        sys.stdout.write(f"{name}: {value:,.3f}\n" if isinstance(value, float) else f"{name}: {value}\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def tokenising(path: Path) -> dict:
    """CPU seconds to render, tokenize and mask all rows, over those of `Tokenizer.encode_batch` on their texts."""
    from finetune.data.formats import Conversation
    from finetune.data.templates.encoder import Encoder

    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    tokenizer = make_tokenizer(rows)
    messages = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    texts = [tokenizer.apply_chat_template(one, tokenize=False) for one in messages]
    conversations = [Conversation(messages=one) for one in messages]
    encoder = Encoder(tokenizer, tokenizer.chat_template, max_length=2048)
    backend = tokenizer.backend_tokenizer
    alone, ours = [], []
    for _ in range(REPEATS):  # in turns, so that both meet the same machine
        alone.append(cpu_seconds(lambda: [one.ids for one in backend.encode_batch(texts, add_special_tokens=False)]))
        ours.append(cpu_seconds(lambda: encoder.encode_batch(conversations)))
    return {
        "rows": len(rows),
        "tokenizers_rows_per_second": len(rows) / min(alone),
        "encoder_rows_per_second": len(rows) / min(ours),
        "encoder_over_tokenizers": min(ours) / min(alone),
    }


def loading() -> dict:
    """Tokens per second that one core reads from the cache, packs and collates; first pass and median of the others."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    from finetune.data import store
    from finetune.data.collate import collate
    from finetune.data.layout import lay_out
    from finetune.data.plan import Plan, RankView

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.0, 0.8, 50_000).round().clip(32, 2048).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        writer = store.Writer(Path(folder), "train")
        for length in lengths:
            ids = rng.integers(0, 32000, length).astype(np.int32)
            writer.add(ids, ids)
        writer.close()
        layout = lay_out(store.load_rows(Path(folder), "train"), PACK_LENGTH, seed=0, fingerprint="benchmark")
        plan = Plan(
            costs=layout.packs.costs(2048),
            label_tokens=layout.label_tokens,
            global_batch_size=8,
            seed=0,
            fingerprint="benchmark",
        )
        view = RankView(plan=plan, rank=0, world_size=1, per_device=1, accumulation=8)
        loader = DataLoader(
            layout,  # type: ignore[arg-type]
            batch_sampler=view,
            collate_fn=lambda rows: collate(rows, pad_token_id=0, pack_length=PACK_LENGTH),
        )
        tokens = int(lengths.sum())
        seconds = [cpu_seconds(lambda: sum(1 for _ in loader)) for _ in range(REPEATS)]
    return {
        "packs": len(layout),
        "packing_efficiency": layout.packs.efficiency,
        "loader_tokens_per_second_first": tokens / seconds[0],
        "loader_tokens_per_second": tokens / statistics.median(seconds[1:]),
    }


def cpu_seconds(call: Callable[[], object]) -> float:
    """Of this process, so that other work on the machine does not count."""
    started = time.process_time()
    call()
    return time.process_time() - started


def make_tokenizer(rows: list[dict]):
    """A byte-level BPE of 8,192 tokens with ChatML's template, trained on the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.models import CHAT_TEMPLATE

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((f"{row['question']} {row['answer']}" for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    raise SystemExit(main())
