"""A rank of `finetune bench step`: trains the user's configuration with the real trainer and times its steps."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.bench.launch import REQUEST, RESULT
from finetune.config import Config, load, resolve_batch
from finetune.engine.session import building, opening, out_of_memory
from finetune.runtime.command import DONE, run_guarded
from finetune.runtime.files import write_json
from finetune.runtime.ranks import distributed, process_group
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.bench.windows import Windows


def main() -> int:
    """`python -m finetune.bench.step_rank FOLDER`, started by `launch.ranks`."""
    return run_guarded(lambda: run(Path(sys.argv[1])))


def run(folder: Path) -> int:
    """Train for as many steps as requested; rank 0 writes the result."""
    request = json.loads((folder / REQUEST).read_text())
    with tempfile.TemporaryDirectory(prefix="bench-step-") as out:
        config = shortened(load(request["arguments"], command="bench"), request, out)
        result = measure(config, request, Path(out))
    if distributed.ranks().is_main:
        write_json(folder / RESULT, result)
    process_group.finish()
    return DONE


def shortened(config: Config, request: JsonObject, out: str) -> Config:
    """The configuration limited to the measured steps: no checkpoints, evaluation or samples."""
    total = request["runs"] * (request["warm_up"] + request["steps"])
    training = replace(
        config.training,
        output_dir=out,
        max_steps=total,
        save_steps=0,
        eval_steps=0,
        resume_from_checkpoint=False,
        strategy=None,
    )
    # Logging costs a host-device sync: none before the end.
    logging = replace(config.logging, logging_steps=10 * total, generate_samples=0, profile_steps=0)
    return replace(config, training=training, logging=logging)


def measure(config: Config, request: JsonObject, out: Path) -> JsonObject:
    """Build the real trainer, train, and gather the figures of all ranks."""
    config, demo = opening.resolve_demo(config)
    batch = resolve_batch(config.training, distributed.ranks().world_size, config.data)
    job = opening.open_session(config, batch, demo=demo)
    from finetune.bench.windows import Windows
    from finetune.engine.monitoring import peak_memory

    built = building.build_trainer(job, out)
    trainer = built.trainer
    windows = Windows(trainer, runs=request["runs"], warm_up=request["warm_up"], steps=request["steps"])
    trainer.args.max_steps = windows.total
    with built.logger, out_of_memory.explain_out_of_memory(job):
        trainer.train()
    own = figures(windows)
    own |= {"peak_memory_gib": peak_memory.peak_gib(), "states": windows.states, "profile": windows.profile}
    ranks = distributed.gather_objects(own)
    return {
        "backend": job.stack.backend,
        "batch": asdict(batch),
        "trainable_parameters": job.size.trainable_parameters,
        "tokens_per_step": built.logger.run.tokens_seen / trainer.state.global_step,
        "ranks": ranks,
    }


def figures(windows: Windows) -> JsonObject:
    """Seconds on this rank: the step, each phase, and the communication inside the backward pass."""
    from finetune.bench.rank import figure
    from finetune.engine.monitoring.phases import PHASES

    found: JsonObject = {"step": figure([[sum(step.values()) for step in run] for run in windows.seconds])}
    found |= {name: figure([[step[name] for step in run] for run in windows.seconds]) for name in PHASES}
    for place, name in enumerate(("exposed", "hidden")):
        found[name] = figure([[one[place] for one in windows.communication]]) if windows.communication else None
    return {"seconds": found}


if __name__ == "__main__":
    raise SystemExit(main())
