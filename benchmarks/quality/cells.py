"""What is compared: a cell is one stack, one mode and one kind of rows of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PACK_LENGTH, PACKS = 4096, 8  # of a pack, and in a step
LONG_PACK = 16384
MAX_LENGTH = 1024  # tokens of a row
FULL_PACKS = 0.99  # share of a pack that random best-fit packing fills


@dataclass(frozen=True, kw_only=True)
class Model:
    """How a model is trained, by every stack. A text model has no chat template: its rows are raw text."""

    rates: dict[str, float]  # for adapters and for all weights
    micro: dict[str, int]  # rows of a padded micro-batch of each stack
    epochs: int = 3
    as_text: bool = False


MODELS = {
    "smollm2": Model(
        rates={"lora": 1e-3, "full": 1e-4},
        micro={"ours": 75, "trl": 50, "unsloth": 75},
    ),
    "qwen": Model(
        rates={"lora": 2e-4, "full": 2e-5},
        micro={"ours": 15, "trl": 15},
        epochs=1,
    ),
    "moe": Model(rates={"lora": 2e-4}, micro={"ours": 25, "trl": 25}, epochs=1),
    "gemma": Model(
        rates={"lora": 1e-3, "full": 1e-4},
        micro={"ours": 25, "trl": 25},
        as_text=True,
    ),
}


MODELS["qwen-fp8"] = MODELS["qwen"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training, repeated with several seeds."""

    name: str
    stack: str = "ours"  # ours, trl or unsloth; "" only judges the pretrained model
    mode: str = "lora"  # full, or how the frozen model is kept: lora (as it is), fp8, int8 or qlora
    packed: bool = False
    model: str = "smollm2"
    long: bool = False  # packs of LONG_PACK tokens, as many tokens per step, on the transformers backend
    context: bool = False  # two ranks share each pack; other cells of two are sharded
    ranks: int = 1
    master_weights: str = "auto"
    dtype: str = "auto"  # float32: nothing is rounded, the limit of what can be learned
    rate: float | None = None  # instead of the model's

    @property
    def served(self) -> bool:
        """Whether the ways to serve it are judged as well: the run's own evaluation, the merged export, `chat`."""
        return self.stack == "ours" and self.mode == "lora" and self.rate is not None and self.packed

    @property
    def reference(self) -> str:
        """The cell that this one is compared with: TRL on padded rows, in the same mode; without rounding for the modes
        that TRL lacks. Of packs that ranks share, the same packs on one."""
        if self.context:
            return self.name.removesuffix(" context")
        if self.model == "qwen-fp8":
            return "qwen-fp8 limit lora padded"
        mode = "lora" if self.mode in ("fp8", "int8") else self.mode
        words = ["trl", "" if self.model == "smollm2" else self.model, mode, "padded"]
        return " ".join(filter(None, [*words, f"at {self.name.split()[-1]}" if self.rate else ""]))


def _cell(name: str) -> Cell:
    words = name.split()
    model = next((word for word in words if word in MODELS), "smollm2")
    if words[-1] == "base":
        return Cell(name=name, stack="", model=model)
    return Cell(
        name=name,
        stack=words[0] if words[0] in ("trl", "unsloth") else "ours",
        mode=next(word for word in words if word in ("lora", "fp8", "int8", "qlora", "full")),
        packed="padded" not in words,
        model=model,
        long="long" in words,
        context="context" in words,
        ranks=2 if {"sharded", "context"} & set(words) else 1,
        master_weights="stochastic" if "stochastic" in words else "auto",
        dtype="float32" if "limit" in words else "auto",
        rate=float(words[-1]) if "at" in words else None,
    )


CELLS = {
    name: _cell(name)
    for name in (
        *("base", "lora packed", "lora padded", "trl lora padded", "trl lora packed"),
        *("full packed", "full padded", "trl full padded", "trl full packed"),
        *("full sharded", "lora sharded", "full packed stochastic"),
        *("int8 packed", "qwen fp8 packed", "qwen int8 packed", "qwen qlora packed"),
        *("qlora packed", "qlora padded", "trl qlora padded", "unsloth lora padded", "unsloth full padded"),
        *("lora long", "lora long context", "full long", "full long context"),
        *("qwen lora long", "qwen lora long context"),
        *("qwen base", "qwen lora packed", "trl qwen lora padded", "qwen full packed", "trl qwen full padded"),
        # Packs in float32 are slow: GPUs have no kernel for them that knows of documents.
        *("lora packed at 2e-4", "lora padded at 2e-4", "limit lora padded at 2e-4", "trl lora padded at 2e-4"),
        *("lora packed at 1e-3", "limit lora padded at 1e-3", "trl lora padded at 1e-3", "lora packed at 1e-5"),
        *("qlora packed at 2e-4", "qlora padded at 2e-4", "limit qlora padded at 2e-4", "trl qlora padded at 2e-4"),
        *("qlora packed at 1e-3", "limit qlora padded at 1e-3", "trl qlora padded at 1e-3"),
        *("qwen limit lora padded", "trl qwen qlora padded", "qwen limit qlora padded"),
        *("qwen lora packed at 1e-3", "qwen limit lora padded at 1e-3", "trl qwen lora padded at 1e-3"),
        # On the same rows as the limit.
        *("qwen lora padded", "qwen-fp8 fp8 padded"),
        *("qwen-fp8 fp8 packed", "qwen-fp8 limit lora padded"),
        *("moe base", "moe lora packed", "moe limit lora padded", "trl moe lora padded"),
        *("gemma base", "gemma lora packed", "trl gemma lora padded", "gemma full packed", "trl gemma full padded"),
    )
}
SMOKE = ("base", "lora packed", "lora padded", "full padded", "trl lora padded")


def rows_of_step(rows: int, tokens: int, micro: int) -> int:
    """Rows of a padded step for as many steps as with packs, of the possible numbers the one whose largest divisor up
    to `micro` is largest."""
    steps = -(-tokens // int(PACKS * PACK_LENGTH * FULL_PACKS))
    fewest, most = -(-rows // steps), -(-rows // (steps - 1)) - 1 if steps > 1 else rows
    return max(range(fewest, max(fewest, most) + 1), key=lambda count: (divisor(count, micro), -count))


def divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`."""
    return max(one for one in range(1, min(count, most) + 1) if count % one == 0)


def configuration(cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
    """The configuration file of a run of this package."""
    how = {"format": "text"} if request["as_text"] else {
        "format": "alpaca", "columns": {"instruction": "question", "output": "answer"}
    }  # fmt: skip
    return {
        "model": {
            "model_name_or_path": request["model"],
            "dtype": cell.dtype,
            "full_finetuning": cell.mode == "full",
            "load_in_4bit": cell.mode == "qlora",
            "load_in_8bit": cell.mode == "int8",
            "load_in_fp8": cell.mode == "fp8",
            "backend": request["backend"],
        },
        **({} if cell.mode == "full" else {"lora": {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0}}),
        "data": how | {
            "train_file": request["rows"],
            "max_length": request["max_length"],
            "packing": cell.packed,
            "pack_length": request["pack_length"] if cell.packed else None,
            **({"eval_file": request["held_out"]} if cell.served else {}),
            "cache_dir": request["cache"],
        },
        "training": {
            "output_dir": request["out"],
            "overwrite_output_dir": True,
            "global_batch_size": request["global_batch_size"],
            "per_device_train_batch_size": request["micro"],
            "num_train_epochs": request["epochs"],
            "learning_rate": request["learning_rate"],
            "lr_scheduler_type": "cosine",
            "warmup_steps": request["warmup_steps"],
            "weight_decay": 0.0,
            "master_weights": cell.master_weights,
            "seed": request["seed"],
            "gradient_checkpointing": False,
            "save_steps": 0,
            "strategy": "single" if cell.ranks == 1 else "ddp" if cell.context else "shard",
            **({"context_parallel": cell.ranks} if cell.context else {}),
        },
        "logging": {"generate_samples": 0},
    }  # fmt: skip
