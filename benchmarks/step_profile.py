"""Where the time of a training step goes, on the GPU by operation and shape and on the host by operation.

    python -m benchmarks.step_profile --train train.jsonl --work DIR --out FILE.jsonl --cells "8b lora 4096"
        [--words "--data.max_length 8192 --training.gradient_checkpointing true"]
    python -m torch.distributed.run --nproc_per_node 2 -m benchmarks.step_profile ...   # once the first has run

Cells are those of `benchmarks.peers`; each appends one JSON line, of rank 0. The profiler slows down the host, so the
time of a step is not that of a run, and the host's times are good for shares only; the times of kernels are right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.peers import cells, rank, rows
from benchmarks.peers.__main__ import LEARNING_RATE
from benchmarks.processes import say
from finetune.runtime.ranks import distributed

BEFORE, STEPS = 8, 3  # steps that are not profiled, and that are


def main() -> int:
    """Profile each cell. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines whose text is cut into rows")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--cells", required=True, help="separated by commas")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--words", default="", help="further arguments of the run")
    parser.add_argument("--most", type=int, default=40, help="operations and kernels to keep, longest first")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.cells.split(","):
        found = {"cell": name, "fp8": given.fp8, "words": given.words} | profile(cells.cell(name.strip()), given)
        if not distributed.ranks().is_main:
            continue
        with given.out.open("a") as out:
            out.write(json.dumps(found) + "\n")
        kernels = f"{found['kernel_ms']:.1f} ms and {found['kernels']:.0f} kernels a step"
        say(f"{name}: {kernels}, host {found['host_ms']:.1f} ms")
        for one in [*found["operations"], *found["by_kernel"], *found["on_host"]]:
            say(f"  {one['ms']:8.2f} ms {one['count']:6.0f}  {one['name']} {one.get('shapes', '')}")
    return 0


def profile(cell: cells.Cell, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and calls per step of the longest operations (of torch), of kernels, and of the host's operations
    without what they call, on all threads."""
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    from finetune import train
    from finetune.config import load

    model = models.build(given.work / cell.size, cells.SIZES[cell.size], given.train)
    file = given.work / f"rows-{cell.lengths}.jsonl"
    rows.build(file, cell.lengths, cell.longest, AutoTokenizer.from_pretrained(model), given.train)
    variant = cells.variants(cell)["ours_fp8" if given.fp8 else "ours"]
    request = {
        "model": str(model.resolve()),
        "rows": str(file.resolve()),
        "settings": [vars(setting) for setting in variant.settings],
        "steps": BEFORE + STEPS + 1,
        "learning_rate": LEARNING_RATE[cell.method],
        "method": cell.method,
        "options": variant.options | {"words": given.words.split()},
        "started": time.time(),
    }
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)

    class Profile(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *given: Any, **further: Any) -> None:
            if state.global_step == BEFORE:
                profiler.start()
            if state.global_step == BEFORE + STEPS:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                profiler.stop()

    rank.give_trainer_to(lambda trainer: trainer.add_callback(Profile()))
    code = train.run(load(rank.arguments(request, given.work / "out"), command="train"))
    if code:
        raise SystemExit(code)
    operations = [
        {"name": one.key, "shapes": str(one.input_shapes)[:120], "ms": one.self_device_time_total / 1000 / STEPS,
         "count": one.count / STEPS}
        for one in profiler.key_averages(group_by_input_shape=True)
        if one.self_device_time_total and one.key.startswith("aten::")
    ]  # fmt: skip
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:100]].append(event.device_time / 1000)
    by_kernel = [{"name": name, "ms": sum(ms) / STEPS, "count": len(ms) / STEPS} for name, ms in times.items()]
    on_host = [
        {"name": one.key, "ms": one.self_cpu_time_total / 1000 / STEPS, "count": one.count / STEPS}
        for one in profiler.key_averages()
        if one.self_cpu_time_total
    ]
    kinds = (operations, by_kernel, on_host)
    first = [sorted(kind, key=lambda one: -one["ms"])[: given.most] for kind in kinds]
    return {
        "kernel_ms": sum(one["ms"] for one in by_kernel),
        "kernels": sum(one["count"] for one in by_kernel),
        "operations": first[0],
        "by_kernel": first[1],
        "host_ms": sum(one["ms"] for one in on_host),
        "on_host": first[2],
    }


if __name__ == "__main__":
    raise SystemExit(main())
