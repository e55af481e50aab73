"""One training with TRL's own trainer, or with stock Unsloth: `python -m benchmarks.quality.trl_peer REQUEST.json
RESULT.json`, started by `benchmarks.quality`.

TRL would also supervise the line break after the end of turn, which this package masks. Both peers are given the tokens
and labels of `rows.encode`, as pre-tokenized rows, so that the masks are equal. LoRA trains adapters in float32 on
bfloat16 weights, full fine-tuning float32 weights with bfloat16 autocast: TRL's recommendation for each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import stock
from benchmarks.quality import rows


def main() -> int:
    """Train, save, and write what was measured."""
    request = json.loads(Path(sys.argv[1]).read_text())
    if request["stack"] == "unsloth":
        import unsloth  # noqa: F401  (before the libraries that it changes)
    import torch
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    cuda = torch.cuda.is_available()
    if not cuda:
        from tests.conformance.trl_on_cpu import give_kernel

        give_kernel()
    # With cuDNN's attention, Qwen's weights become NaN (patches/torch_cudnn_attention_nan.py).
    torch.backends.cuda.enable_cudnn_sdp(False)
    mode = request["mode"]
    set_seed(request["seed"])
    model, tokenizer, adapters = stock.load(
        request,
        mode,
        length=request["max_length"],
        checkpointing="unsloth",
        seed=request["seed"],
        dtype=torch.bfloat16 if cuda and mode != "full" else torch.float32,
        **({"use_gradient_checkpointing": "unsloth"} if request["stack"] == "unsloth" else {}),
    )
    encoded = [rows.encode(tokenizer, row, request["as_text"]) for row in rows.read(request["rows"])]
    config = SFTConfig(
        output_dir=str(Path(request["out"]) / "trainer"),
        per_device_train_batch_size=request["micro"],
        gradient_accumulation_steps=request["global_batch_size"] // request["micro"],
        num_train_epochs=request["epochs"],
        max_length=request["pack_length"] if request["packed"] else request["max_length"],
        packing=request["packed"],
        learning_rate=request["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=request["warmup_steps"],
        weight_decay=0.0,
        optim="adamw_torch_fused",
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=request["stack"] == "unsloth",
        seed=request["seed"],
        logging_steps=10,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        dataloader_num_workers=2 if cuda else 0,
    )
    trainer: Any = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(encoded), args=config,
        peft_config=adapters,
    )  # fmt: skip
    measured = trainer.train().metrics
    trainer.save_model(request["out"])
    steps, tokens = trainer.state.global_step, sum(len(row["input_ids"]) for row in encoded)
    result = {
        "train_seconds": measured["train_runtime"],
        "steps": steps,
        "tokens_per_step": tokens * request["epochs"] / steps,
        "first_loss": next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
