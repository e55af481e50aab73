"""One of the runs that `finetune parity` compares: a short training run that also writes gradients and weights.

Started by `finetune.parity` on each world size. Writes run.json, gradient.safetensors (first step, summed over ranks,
before clipping) and weights.safetensors (after the last step) to OUT/.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from finetune.config import Config, load, with_fixed_batch
from finetune.parity.command import with_strategy
from finetune.runtime import scripts
from finetune.runtime.command import DONE, run_guarded
from finetune.runtime.ranks import distributed
from finetune.runtime.types import ScriptTrainer


def main() -> int:
    """`python -m finetune.parity.run OUT STEPS WITHOUT STRATEGY BACKEND MOST [configuration ... | SCRIPT ...]`

    WITHOUT names patches, comma-separated; STRATEGY is one of the command's; BACKEND is as model.backend, or empty for
    the script's; MOST is the number of ranks whose global batch all runs have.
    """
    out, steps, without, strategy, backend, most, *arguments = sys.argv[1:]
    left_out = [name for name in without.split(",") if name]

    def from_configuration(config: Config) -> int:
        # The ranks are already launched.
        training = with_fixed_batch(config.training, int(most), config.data)
        training = with_strategy(training, distributed.ranks().world_size, strategy)
        model = replace(config.model, backend=backend or config.model.backend)
        config = replace(config, training=training, model=model)
        return run(config, Path(out), int(steps), left_out)

    def from_trainer(trainer: ScriptTrainer) -> int:
        trainer.train_for_parity(Path(out), int(steps), int(most))
        return DONE

    def start() -> int:
        if not scripts.is_script(arguments[0] if arguments else ""):
            return from_configuration(load(arguments))
        kind = "shard" if "shard" in strategy else "ddp"
        chosen = {"training.strategy": kind, "model.backend": backend, "training.context_parallel": shared_by(strategy)}
        answer = scripts.Answer(
            trainer=from_trainer,
            without=tuple(left_out),
            overrides=tuple(f"{key}={value}" for key, value in chosen.items() if value),
        )
        return scripts.run(arguments, answer)

    return run_guarded(start)


def shared_by(strategy: str) -> str:
    """How many ranks share each row of a script's trainer; empty if the script decides."""
    world_size = distributed.ranks().world_size
    return str(world_size) if "cp" in strategy else "1" if world_size == 1 else ""


def run(config: Config, out: Path, steps: int, without: list[str]) -> int:
    """Train `steps` optimizer steps without gradient clipping or a learning-rate schedule."""
    from finetune import train

    training = replace(
        config.training,
        output_dir=str(out),
        max_steps=steps,
        save_steps=0,
        eval_steps=0,
        resume_from_checkpoint=False,
        overwrite_output_dir=False,
        max_grad_norm=0.0,  # clipping would hide a gradient that is wrong by a factor
        warmup_steps=0.0,
        lr_scheduler_type="constant",
    )
    logging = replace(config.logging, logging_steps=1, generate_samples=0, profile_steps=0)
    short = replace(config, training=training, logging=logging)
    return train.run(short, parity_dump=out, without=without)


if __name__ == "__main__":
    raise SystemExit(main())
