"""Write into $SPY how many rows this rank tokenized, what each optimizer step was computed from (documents of each
rank), its synchronized gradient, and when DDP's first buckets were let go of."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from finetune.data.templates import encoder
from finetune.runtime.ranks import distributed
from tests.spies import train_with

FOLDER = Path(os.environ.get("SPY", "."))


def count_tokenized() -> None:
    """Note the rows of each batch that is tokenized."""
    encode = encoder.Encoder.encode_batch

    def encode_counted(self: Any, rows: Any) -> Any:
        with (FOLDER / "tokenized.txt").open("a") as file:
            file.write(f"{len(rows)}\n")
        return encode(self, rows)

    encoder.Encoder.encode_batch = encode_counted


def watch(trainer: Any) -> None:
    """Note what the steps of this trainer are made of."""
    import torch
    from transformers import TrainerCallback

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if distributed.ranks().is_main and state.global_step < 3:
                gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
                torch.save(torch.cat(gradients), FOLDER / f"gradient-{state.global_step}.pt")

    trainer.add_callback(Gradients())
    fetch, away = trainer.get_batch_samples, distributed.drain_nccl_work

    def get_batch_samples(iterator: Any, count: int, device: Any) -> Any:
        batches, total = fetch(iterator, count, device)
        for batch in batches:
            name = FOLDER / f"step-{trainer.state.global_step}-rank-{distributed.ranks().rank}.txt"
            with name.open("a") as file:
                file.writelines(repr(row.tolist()) + "\n" for row in documents(batch))
        return batches, total

    def put_away() -> None:
        (FOLDER / f"put-away-in-{trainer.state.global_step}-rank-{distributed.ranks().rank}").touch(exist_ok=False)
        away()

    def look(model: Any, args: Any, kwargs: Any) -> None:
        lengths = kwargs.get("packed_seq_lengths")
        assert lengths is None or torch.is_tensor(lengths), lengths

    distributed.drain_nccl_work = put_away
    trainer.get_batch_samples = get_batch_samples
    trainer.model.register_forward_pre_hook(look, with_kwargs=True)


def documents(batch: Any) -> list[Any]:
    """Token ids of each document of a batch, without padding, which is 0."""
    if "packed_seq_lengths" in batch:
        lengths = batch["packed_seq_lengths"].tolist()
        return [piece for piece in batch["input_ids"][0].split(lengths) if piece.any()]
    if "attention_mask" not in batch:  # a pack for the transformers backend: positions begin anew with each document
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        return [piece for piece in batch["input_ids"][0].tensor_split(starts) if piece.any()]
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()] for ids, mask in rows if ids.any()]


if __name__ == "__main__":
    count_tokenized()
    sys.exit(train_with(watch))
