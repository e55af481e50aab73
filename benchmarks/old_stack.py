"""Whole old releases of Unsloth on two GPUs: the gradient that a user's script trains on, against one GPU's.

    for release in "unsloth==2025.10.4 unsloth_zoo==2025.10.4" "unsloth==2026.4.8 unsloth_zoo==2026.4.9"; do
        pip install --no-deps --target "old-${release##*=}" $release
    done
    pip install --no-deps --target pins transformers==4.56.2 trl==0.23.0 peft==0.18.1 ...    # what the releases ask for
    python -m benchmarks.old_stack OUT old-2025.10.4:pins old-2026.4.9:pins

An argument is the folders of one stack, as in PYTHONPATH. Each stack trains one step of the same eight rows of unlike
length, on a Llama of 1.2 billion random weights with LoRA: on one GPU with two accumulated batches of four rows, and on
two GPUs with one batch each. The script is the one people copied; on two GPUs it runs as published, with the loss
cloned by hand as guides for several GPUs have it, and with the patches of this project. Prints one line of JSON per
stack and variant, also to OUT/old_stack.jsonl; OUT/old_stack.log has the output of every process. Exit 2: too few GPUs.

The gradients are those that the optimizer gets, unclipped. A third one, of torch's cross entropy of the model's own
logits, row by row, without trainer and fused loss, says whether one GPU is a reference at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import processes

WORLD_SIZE = 2
ROWS_PER_BATCH = 4
# Of each row, at two tokens a word. Any four fill over 1,024 tokens: below, releases of 2025 do not fuse the loss.
WORDS = (80, 130, 170, 210, 260, 330, 400, 480)
REFERENCE, PUBLISHED, CLONED, PATCHED = "one GPU", "as published", "loss cloned by hand", "with the patches"
BUILD_SECONDS, TRAIN_SECONDS = 90, 150  # at most; a step takes half a minute where everything is compiled first
SHAPE = os.environ.get("OLD_STACK_SHAPE", "llama-1.2b")  # a key of benchmarks.models.SHAPES
ROOT = Path(__file__).resolve().parent.parent


def rows() -> list[dict[str, str]]:
    """The training set, which is one global batch: in whatever order it is drawn, the step is the same."""
    words = random.Random(0)
    return [{"text": " ".join(f"word{words.randrange(500)}" for _ in range(count))} for count in WORDS]


# --- What runs inside a stack ---


def train(variant: str, model_folder: Path, out: Path) -> dict[str, Any]:
    """The script of a user, one optimizer step; rank 0 leaves its gradients in `out`. Returns what it saw."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    # Ranks that write the same generated trainer at once were a defect of its own (unslothai/unsloth#3031).
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(out / f"unsloth_compiled_cache_{rank}")
    import torch

    import patches
    from patches import core

    torch.cuda.set_device(rank)
    record: dict[str, Any] = {}
    if variant == PATCHED:
        record["applied"] = [verdict.name for verdict in core.run(patches.EARLY) if verdict.applied]

    from unsloth import FastLanguageModel  # isort: skip  # before trl and transformers
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if variant == PATCHED:
        record["applied"] += [verdict.name for verdict in core.run(patches.LATE) if verdict.applied]
        again = core.run([*patches.EARLY, *patches.LATE])
        record["applied_again"] = [verdict.name for verdict in again if verdict.applied]

    class ClonedLoss(SFTTrainer):
        """The workaround that went around."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss.clone() * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    class Keep(transformers.TrainerCallback):
        """Writes the gradients that the optimizer is about to take."""

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if rank == 0:
                torch.save(gradients(model), out / "gradients.pt")
            if variant == REFERENCE:
                by_hand(model, trainer.train_dataset["input_ids"])
                torch.save(gradients(model), out / "by_hand.pt")

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(model_folder), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False, device_map={"": rank}
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=False,
        random_state=3407,
    )
    trainer: Any = (ClonedLoss if variant == CLONED else SFTTrainer)(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows()),
        callbacks=[Keep()],
        args=SFTConfig(
            output_dir=str(out / "trainer"),
            dataset_text_field="text",
            dataset_num_proc=1,
            packing=False,
            per_device_train_batch_size=ROWS_PER_BATCH,
            gradient_accumulation_steps=len(WORDS) // ROWS_PER_BATCH // world_size,
            max_steps=1,
            learning_rate=2e-4,
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            bf16=True,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to="none",
            seed=3407,
        ),
    )
    trainer.train()
    step = transformers.Trainer
    return record | {
        "loss": trainer.state.log_history[0]["loss"],
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "world_size": trainer.accelerator.num_processes,
        "compiled": os.environ.get("TORCHDYNAMO_DISABLE") != "1",
        "trainer": f"{SFTTrainer.__module__}.{SFTTrainer.__name__}",
        # Releases from 2025.10.5 on replace the `loss *=` of transformers, which hides that the loss is a view.
        "compute_loss_of": getattr(step, "_old_compute_loss", step.compute_loss).__globals__["__name__"],
    }


def gradients(model: Any) -> dict[str, Any]:
    """The gradients of a model's trained parameters, in float32 on the CPU."""
    return {name: part.grad.float().cpu() for name, part in model.named_parameters() if part.grad is not None}


def by_hand(model: Any, batch: list[list[int]]) -> None:
    """Leave in `model` the gradient of torch's cross entropy, averaged over all tokens of `batch`."""
    import torch

    model.zero_grad()
    count = sum(len(ids) - 1 for ids in batch)
    for ids in batch:
        row = torch.tensor([ids], device=model.device)
        with torch.autocast(row.device.type, torch.bfloat16):
            logits = model(input_ids=row).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits.float(), row[0, 1:], reduction="sum") / count).backward()


def inside(action: str, model_folder: Path, out: Path) -> None:
    """Build the model, or train one variant; what was seen, or the error, goes to a file of this rank."""
    from benchmarks import models

    if action == "build":
        corpus = out / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
        models.write(model_folder, SHAPE, corpus)
        return
    try:
        record = train(action, model_folder, out)
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}"[:600]}
        raise
    finally:
        (out / f"rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(record), encoding="utf-8")


# --- What starts the stacks ---


def start(stack: str, gpus: list[str], action: str, model_folder: Path, out: Path) -> str:
    """Run one action in processes of `stack`, a rank for each of `gpus`; returns how it ended."""
    out.mkdir(parents=True)
    ranks, seconds = len(gpus), BUILD_SECONDS if action == "build" else TRAIN_SECONDS
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "benchmarks.old_stack", "--inside", action, model_folder, out]
    folders = [str(Path(folder).resolve()) for folder in stack.split(os.pathsep)]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "PYTHONPATH": os.pathsep.join([*folders, str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TRITON_CACHE_DIR": str(out / "triton"),
        # No network is asked, and packages of the host that the stack does not know are left alone.
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "USE_FLAX": "NO",
        "USE_TF": "NO",
    }
    with (out / "log").open("w") as log:
        code = processes.run(command, cwd=ROOT, env=environment, output=log, timeout=seconds)
    return f"no end after {seconds} s" if code is None else f"exit {code}"


def one_stack(stack: str, gpus: list[str], work: Path) -> list[dict[str, Any]]:
    """The records of one stack: its model first, then one GPU and the variants on two side by side."""
    model = work / "model"
    ended = {"build": start(stack, gpus[:1], "build", model, work / "build")}
    variants = (PUBLISHED, CLONED, PATCHED)
    with ThreadPoolExecutor() as pool:
        runs = {
            variant: pool.submit(start, stack, own, variant, model, work / variant.replace(" ", "_"))
            for variant, own in [(REFERENCE, gpus[:1]), *((variant, gpus) for variant in variants)]
        }
    ended |= {variant: run.result() for variant, run in runs.items()}
    reference = work / REFERENCE.replace(" ", "_")
    common = {"versions": versions(stack), "device": device()}
    one_gpu = {"ended": ended[REFERENCE]} | seen(reference)
    one_gpu |= compare(reference / "gradients.pt", reference / "by_hand.pt", "by_hand")
    records = [common | {"variant": REFERENCE} | one_gpu]
    for variant in variants:
        out = work / variant.replace(" ", "_")
        record = common | {"variant": variant, "ended": ended[variant]} | seen(out)
        record |= compare(out / "gradients.pt", reference / "gradients.pt", "one_gpu")
        record |= compare(out / "gradients.pt", reference / "by_hand.pt", "by_hand")
        records.append(record)
    if ended["build"] != "exit 0":
        records[0]["build"] = ended["build"]
    return records


def seen(out: Path) -> dict[str, Any]:
    """What the ranks of a training left: rank 0's record, or the first error."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank*.json"))]
    errors = [record for record in found if "error" in record]
    return (errors or found or [{"error": "no rank left a record; see the log"}])[0]


def compare(own: Path, right: Path, name: str) -> dict[str, float]:
    """The ratio of two gradients' norms and their cosine; nothing where one is missing."""
    if not own.is_file() or not right.is_file():
        return {}
    import torch

    first, second = (torch.load(path, weights_only=True) for path in (own, right))
    if first.keys() != second.keys():
        raise ValueError(f"{own} and {right} hold the gradients of different parameters")
    a, b = (torch.cat([part[key].flatten() for key in sorted(part)]).double() for part in (first, second))
    return {
        f"gradient_over_{name}": round(float(a.norm() / b.norm()), 5),
        f"cosine_to_{name}": round(float(a @ b / a.norm() / b.norm()), 6),
    }


def versions(stack: str) -> dict[str, str]:
    """The versions that a process of the stack finds."""
    search = [*stack.split(os.pathsep), *sys.path]
    names = "unsloth", "unsloth_zoo", "trl", "transformers", "peft", "accelerate", "datasets", "torch", "triton"
    found = {name: next(iter(importlib.metadata.distributions(name=name, path=search)), None) for name in names}
    return {name: package.version for name, package in found.items() if package}


def device() -> str:
    """The name of the GPU, asked of the driver's tool: this process keeps clear of the GPUs."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> int:
    """Measure the stacks given."""
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return 0
    import torch

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(number) for number in range(torch.cuda.device_count())]
    if len(sys.argv) < 3 or len(gpus) < WORLD_SIZE:
        sys.stderr.write(f"old_stack takes OUT and a stack or more, on {WORLD_SIZE} GPUs; here are {len(gpus)}.\n")
        return 2
    out, stacks = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    processes.end_with_this_one()
    pairs = [gpus[first : first + WORLD_SIZE] for first in range(0, len(gpus) - WORLD_SIZE + 1, WORLD_SIZE)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor() as pool,
        (out / "old_stack.jsonl").open("w") as file,
    ):
        runs = {
            pool.submit(one_stack, stack, pairs[number % len(pairs)], Path(folder) / str(number)): stack
            for number, stack in enumerate(stacks)
        }
        for run in as_completed(runs):
            error = run.exception()  # a stack that fails leaves the others alone
            records = [{"stack": runs[run], "error": repr(error)}] if error else run.result()
            lines = "".join(json.dumps(record) + "\n" for record in records)
            file.write(lines)
            file.flush()
            sys.stdout.write(lines)
        logs = [(path, path.read_text(errors="replace")) for path in sorted(Path(folder).glob("*/*/log"))]
    (out / "old_stack.log").write_text("".join(f"\n##### {path}\n{text[-30000:]}" for path, text in logs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
