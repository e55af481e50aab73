"""One training of one stack: `python -m benchmarks.peers.rank REQUEST.json RESULT.json`, started by `benchmarks.peers`,
and on several ranks by `benchmarks.shard_gpu`.

The clock is the same for all stacks: a callback of transformers' trainer that records a CUDA event after every step
and never waits for the GPU, and a hook that counts the labels of every forward pass on the GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import stock

WARM_UP = 3  # steps of a trial that are not measured
SLOWER = 0.97  # a setting this much slower than the best so far ends the trials
LOGGING = 5  # steps


def main() -> int:
    """Train, and write what was measured."""
    request = json.loads(Path(sys.argv[1]).read_text())
    result = ours(request) if request["stack"] == "ours" else peer(request)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


class Gate:
    """Processes that compile side by side, and are measured one after another. BENCHMARK_GATE is FOLDER:NUMBER:NAME;
    whoever starts a process touches FOLDER/NAME when it has ended, in case it never came here."""

    def __init__(self) -> None:
        self.folder, self.number, self.name = os.environ.get("BENCHMARK_GATE", ":0:").split(":")
        self.lock: Any = None

    def enter(self) -> None:
        """Wait until all are here, and then for this one's turn."""
        if self.folder:
            Path(self.folder, self.name).touch()
            while len(os.listdir(self.folder)) < int(self.number):
                time.sleep(0.1)
            self.lock = Path(f"{self.folder}.lock").open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX)

    def leave(self) -> None:
        """The next one's turn."""
        if self.lock is not None:
            self.lock.close()


class Clock:
    """Times steps and counts their labels; to be registered with `watch`."""

    def __init__(self, started: float, warm: int) -> None:
        self.started = started  # seconds of time.time() at the shell's return key
        self.warm, self.gate = warm, Gate()  # steps before the gate
        self.first_step: float | None = None
        self.marks: list[Any] = []
        self.labels: list[list[Any]] = [[]]
        self.hook: Any = None

    def watch(self, trainer: Any) -> None:
        """Count in `trainer` from now on."""
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_end(self, *given: Any, **further: Any) -> None:
                clock.mark()

        trainer.add_callback(Callback())
        self.hook = trainer.model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, model: Any, given: Any, further: dict[str, Any]) -> None:
        """Add a micro-batch's labels to the running step."""
        # Of ranks that share a row, each has a part. Without labels the loss is computed elsewhere, here of all tokens.
        names = ("shift_labels", "labels", "input_ids")
        labels = next(further[name] for name in names if further.get(name) is not None)
        self.labels[-1].append((labels != -100).sum())

    def mark(self) -> None:
        """A step has ended."""
        import torch

        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            if not self.marks:
                torch.cuda.synchronize()
        else:
            event = time.perf_counter()
        if self.first_step is None:
            self.first_step = time.time() - self.started
        self.marks.append(event)
        self.labels.append([])
        if len(self.marks) == self.warm:
            self.gate.enter()

    def measured(self, skipped: int) -> dict[str, Any]:
        """Seconds and tokens of each step after the first `skipped`; counting ends."""
        import torch

        self.hook.remove()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        self.gate.leave()
        pairs = list(zip(self.marks[skipped - 1 :], self.marks[skipped:], strict=False))
        seconds = [one.elapsed_time(two) / 1000 if cuda else two - one for one, two in pairs]
        tokens = [int(sum(step)) for step in self.labels[skipped : len(self.marks)]]
        return {
            "step_seconds": seconds,
            "step_tokens": tokens,
            "tokens_per_second": sum(tokens) / sum(seconds),
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        }


def give_trainer_to(watch: Callable[[Any], object]) -> None:
    """Have each trainer of this process passed to `watch` after it is built."""
    from finetune.engine.session import building

    build = building.build_trainer

    def build_trainer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        watch(built.trainer)
        return built

    building.build_trainer = build_trainer


def ours(request: dict[str, Any]) -> dict[str, Any]:
    """The shipped command's function, in this process."""
    from finetune import train
    from finetune.config import load

    setting, out = request["settings"][0], Path(request["work"]) / "ours"
    clock, trainers = Clock(request["started"], request["skipped"] - 1), []

    def watch(trainer: Any) -> None:
        trainers.append(trainer)
        clock.watch(trainer)

    give_trainer_to(watch)
    code = train.run(load(arguments(request, out), command="train"))
    if code:
        raise SystemExit(code)
    record = json.loads((out / "run.json").read_text())
    measured = clock.measured(request["skipped"]) | {"peak_memory_gib": max(record["peak_memory_gib"], default=None)}
    return measured | {
        "setting": setting,
        "first_step_seconds": clock.first_step,
        "losses": [entry["loss"] for entry in trainers[0].state.log_history if "loss" in entry],
        "backend": record["backend"],
        "attention": record.get("attention"),
        "packs": record.get("packs"),
        "layer_kernels": record.get("layer_kernels"),
        "experts": record.get("experts"),
        "cuda_graphs": record.get("cuda_graphs"),
        "versions": record["versions"],
        "hardware": record["hardware"],
        "start_up": record.get("start_up"),
    }


def arguments(request: dict[str, Any], out: Path) -> list[str]:
    """The command line of this package's run."""
    setting = request["settings"][0]
    return [
        *("--model.model_name_or_path", request["model"], "--data.train_file", request["rows"]),
        *("--data.packing", str(request["packing"]).lower(), "--data.max_length", str(setting["length"])),
        *("--training.output_dir", str(out), "--training.overwrite_output_dir", "true"),
        *("--training.save_steps", "0", "--logging.generate_samples", "0"),
        *("--logging.logging_steps", str(min(LOGGING, request["steps"]))),
        *("--training.max_steps", str(request["steps"])),
        *("--training.per_device_train_batch_size", str(setting["batch"])),
        *("--training.gradient_accumulation_steps", str(setting["accumulation"])),
        *("--training.gradient_checkpointing", str(setting["checkpointing"]).lower()),
        *("--training.learning_rate", str(request["learning_rate"])),
        *("--training.lr_scheduler_type", "constant"),
        *(["--model.full_finetuning", "true"] if request["method"] == "full" else ["--lora.r", "16"]),
        *(["--model.load_in_4bit", "true"] if request["method"] == "qlora" else []),
        *(["--model.load_in_fp8", "true"] if request["options"].get("fp8") else []),
        *(["--model.packed_attention", "torch"] if request["options"].get("flash_2") else []),
        *request["options"]["words"],
    ]


def peer(request: dict[str, Any]) -> dict[str, Any]:
    """Unsloth or TRL as their users write it; the fastest of the settings is measured."""
    if request["stack"] == "unsloth":
        import unsloth  # noqa: F401  (before the libraries that it changes)
    import torch
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    options = request["options"]
    model, tokenizer, adapters = stock.load(
        request,
        request["method"],
        length=max(setting["length"] for setting in request["settings"]),
        checkpointing=request["settings"][0]["checkpointing"],
        seed=3407,
        dtype=torch.bfloat16,
        **({"unsloth_tiled_mlp": True} if options.get("tiled_mlp") else {}),
    )
    cuda = torch.cuda.is_available()
    rows = load_dataset("json", data_files=request["rows"], split="train", cache_dir=request["cache"])

    def train(setting: dict[str, Any], steps: int) -> tuple[Clock, Any]:
        config = SFTConfig(
            output_dir=str(Path(request["work"]) / request["stack"]),
            per_device_train_batch_size=setting["batch"],
            gradient_accumulation_steps=setting["accumulation"],
            max_steps=steps,
            max_length=setting["length"],
            packing=request["packing"],
            learning_rate=request["learning_rate"],
            warmup_steps=0,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
            logging_steps=min(LOGGING, steps),
            report_to="none",
            save_strategy="no",
            seed=1,
            bf16=options.get("mixed", True),
            use_cpu=not cuda,
            gradient_checkpointing=bool(setting["checkpointing"]),
            use_liger_kernel=bool(options.get("liger")),
            liger_kernel_config=options.get("liger_config"),
            dataset_text_field="text",
            pad_to_multiple_of=options.get("pad_to_multiple_of"),
            dataset_num_proc=4 if cuda else None,
            dataloader_num_workers=4 if cuda else 0,
        )
        own = adapters if not hasattr(model, "peft_config") else None
        trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=config, peft_config=own)
        clock = Clock(request["started"], request["skipped"] - 1)
        clock.watch(trainer)
        trainer.train()
        return clock, trainer

    trials, best, first = [], request["settings"][0], None
    for setting in request["settings"] if len(request["settings"]) > 1 else []:
        try:
            clock, trainer = train(setting, WARM_UP + request["trial_steps"])
        except torch.OutOfMemoryError:
            trials.append({"setting": setting, "tokens_per_second": None, "error": "out of memory"})
            break
        finally:
            torch.cuda.empty_cache()
        first = first or clock.first_step
        model = trainer.model  # with its adapters
        speed = clock.measured(WARM_UP)["tokens_per_second"]
        fastest = max((trial["tokens_per_second"] for trial in trials), default=0)
        trials.append({"setting": setting, "tokens_per_second": speed})
        del trainer, clock
        if speed > fastest:
            best = setting
        if speed < SLOWER * fastest:
            break
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, trainer = train(best, request["steps"])
    return clock.measured(request["skipped"]) | {
        "setting": best,
        "trials": trials,
        "first_step_seconds": first or clock.first_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
