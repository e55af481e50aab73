"""The engine in one file: packs, a plan of global steps, and a loss that is the same on any number of GPUs.

    python examples/one_file.py                                   # the embedded demo, on one GPU or a CPU
    torchrun --nproc-per-node 2 examples/one_file.py --model DIR --data conversations.jsonl --output tuned

It trains all weights on what the assistant says. Losses and weights are those of `finetune train` with the same
settings (tests/distributed/test_one_file.py). That adds adapters, sharding, checkpoints, records and faster kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

Document = tuple[list[int], list[int]]  # token ids, and labels: the same, or IGNORE where nothing is learned
IGNORE = -100

# --- documents --------------------------------------------------------------------------------------------------------


def tokenize(messages: list[dict[str, str]], tokenizer) -> Document:
    """A conversation that ends with an answer: the answer is supervised, up to and including the end of its turn."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    return ids, [IGNORE] * start + ids[start:end] + [IGNORE] * (len(ids) - end)


# --- packs: documents -> rows -----------------------------------------------------------------------------------------


def random_order(count: int, key: str) -> np.ndarray:
    """A permutation of `count` indices that depends on `key` alone: every rank draws the same."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


def pack(lengths: np.ndarray, pack_length: int, key: str) -> list[list[int]]:
    """Documents of each pack: whole ones in random order, each put into the fullest pack that has room for it.

    Among about as many as a pack holds, the longest comes first, and the short ones fill the gaps. Sorted further, a
    pack would hold documents of one length, and a step would be no random sample.
    """
    order = random_order(len(lengths), key)
    per_pack = pack_length * len(lengths) // lengths.sum()
    block = np.arange(len(order)) // (per_pack if per_pack > 1 else 128)
    packs: list[list[int]] = []
    with_room: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for document in order[np.lexsort((-lengths[order], block))].tolist():
        length = int(lengths[document])
        fullest = bisect_left(with_room, (length, 0))
        if fullest == len(with_room):
            with_room.append((pack_length, len(packs)))
            packs.append([])
        room, number = with_room.pop(fullest)
        packs[number].append(document)
        if room > length:
            insort(with_room, (room - length, number))
    return packs


def collate(documents: list[Document], pack_length: int, pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One pack as tensors [1, pack_length]. Positions restart at each document, which is how transformers knows that
    documents of a row must not attend to each other. Padding is one more document, without labels."""
    rest = pack_length - sum(len(ids) for ids, _ in documents)
    padded = [*documents, ([pad] * rest, [IGNORE] * rest)]
    columns = {
        "input_ids": [one for ids, _ in padded for one in ids],
        # The first token of a document would be predicted from the document before.
        "labels": [one for _, labels in padded for one in [IGNORE, *labels[1:]][: len(labels)]],
        "position_ids": [position for ids, _ in padded for position in range(len(ids))],
    }
    return {name: torch.tensor([values], device=device) for name, values in columns.items()}


# --- the plan: rows -> global steps -> ranks --------------------------------------------------------------------------


def plan_epoch(rows: int, global_batch: int, key: str) -> list[np.ndarray]:
    """The rows of each optimizer step of an epoch. The number of ranks has no say in it."""
    order = random_order(rows, key)
    return [order[start : start + global_batch] for start in range(0, rows, global_batch)]


def rows_of_rank(rows: np.ndarray, costs: np.ndarray, rank: int, world: int) -> list[int]:
    """A rank's rows of a step. Neighbors in cost go to different ranks, so that all have about equal work."""
    return rows[np.argsort(-costs[rows], kind="stable")][rank::world].tolist()


# --- training ---------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    args = arguments().parse_args(argv)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if world > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if args.model is None:
        from finetune.engine.demo import materialize

        demo = materialize(Path("outputs/one_file-demo"))
        args.model, args.data = demo.model_dir, demo.train_file

    text = Path(args.data).read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    documents = [tokenize(json.loads(line)["messages"], tokenizer) for line in text.splitlines()]
    documents = [(ids, labels) for ids, labels in documents if len(ids) <= args.pack_length]
    lengths = np.array([len(ids) for ids, _ in documents])
    fingerprint = args.fingerprint or hashlib.sha256(text.encode()).hexdigest()
    packs = pack(lengths, args.pack_length, f"{args.seed} {fingerprint}")
    supervised = np.array([sum(one != IGNORE for one in labels[1:]) for _, labels in documents])
    label_tokens = np.array([supervised[row].sum() for row in packs])
    costs = np.array([(lengths[row] ** 2).sum() for row in packs])  # of attention; all else is equal in all packs

    # The weights stay float32, so that no update is rounded away; a GPU computes in bfloat16.
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).train()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    per_epoch = -(-len(packs) // args.global_batch_size)
    for step in range(args.steps):
        epoch, within = divmod(step, per_epoch)
        rows = plan_epoch(len(packs), args.global_batch_size, f"{args.seed} {epoch} {fingerprint}")[within]
        total = int(label_tokens[rows].sum())  # of all ranks, known without asking them
        loss = torch.zeros((), device=device)
        for row in rows_of_rank(rows, costs, rank, world):
            batch = collate([documents[one] for one in packs[row]], args.pack_length, tokenizer.pad_token_id, device)
            labels = batch.pop("labels")
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                logits = model(**batch, use_cache=False).logits.float()
            # A sum over this row's tokens, divided by the tokens of the whole step: these shares add up to the exact
            # loss. A mean over each row would weigh a token by how many others share its row.
            share = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=IGNORE, reduction="sum") / total
            share.backward()
            loss += share.detach()
        # So the gradients of all ranks are added, not averaged. DDP does this while the backward pass still runs.
        for one in parameters:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad  # of a rank without a row
            if world > 1:
                dist.all_reduce(one.grad)
        if world > 1:
            dist.all_reduce(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.7g} over {total} tokens", flush=True)  # noqa: T201
    if args.output and rank == 0:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    if world > 1:
        dist.destroy_process_group()
    return losses


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fine-tune all weights of a model on conversations.")
    parser.add_argument("--model", help="folder or Hub name (default: the embedded demo)")
    parser.add_argument("--data", help='JSON lines with "messages"; required with --model')
    parser.add_argument("--output", help="folder for the trained model")
    parser.add_argument("--global-batch-size", type=int, default=8, help="packs per optimizer step, over all ranks")
    parser.add_argument("--pack-length", type=int, default=512, help="tokens; longer conversations are left out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fingerprint", help="of the data; with the seed it decides the order of the rows")
    return parser


if __name__ == "__main__":
    main()
