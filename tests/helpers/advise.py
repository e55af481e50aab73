"""What the tests of advise share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finetune.advise import candidates, verdict
from finetune.advise.candidates import DryRunner, DryRunResult
from finetune.advise.verdict import Row
from finetune.config import Config
from finetune.config.schema import ModelConfig, TrainingConfig
from finetune.measure.measurements import Measurement
from finetune.measure.predict import MIB, Curve, Gradients, Work
from finetune.runtime.machine.hardware import Gpu, Hardware, Link

FAST = Curve(points=((1024, 1e-5), (1024 * MIB, 0.01)))  # NVLink-like
SLOW = Curve(points=((1024, 1e-3), (1024 * MIB, 1.0)))


def of(world: int, *, step: float = 1.0, steps: float = 1000, memory: float | None = 80e9, peak: float = 20e9, **kw):
    """Work whose compute is shared by `world` ranks."""
    return Work(
        per_device=8 // world,
        compute_seconds=0.9 * step / world,
        accumulation=1,
        backward_share=2 / 3,
        data_seconds=0.0,
        optimizer_seconds=0.1 * step,
        other_seconds=0.0,
        tokens=1000.0,
        steps=steps,
        start_up_seconds=30.0,
        gradients=Gradients(sizes=(kw.get("gradients", 20 * MIB),)),
        peak_memory_bytes=peak,
        memory_bytes=memory,
    )


def table(
    curve: Curve, worlds: tuple[int, ...] = (1, 2, 4), here: int = 8, extra: float = 10.0, price=2.0, **kw
) -> list[Row]:
    return verdict.rows(
        {world: of(world, **kw) for world in worlds},
        {world: (curve, "measured") for world in worlds},
        here=here,
        extra_start_up_seconds=extra,
        price_per_gpu_hour=price,
    )


def configuration(folder: Path, *extra: str) -> list[str]:
    return ["--model.model_name_or_path", "m", "--data.train_file", str(folder / "t.jsonl"), *extra]


def host(*gpus: Gpu, **kw: Any) -> Hardware:
    links = tuple(
        Link(gpus=(a.index, b.index), kind="PHB", peer_access=False) for a in gpus for b in gpus if a.index < b.index
    )
    return Hardware(
        device="cuda" if gpus else "cpu",
        name=gpus[0].name if gpus else "x86_64",
        count=len(gpus),
        memory_gib=gpus[0].memory_gib if gpus else None,
        peak_bf16_tflops=None,
        cpu_cores=kw.pop("cpu_cores", 2),
        ram_gib=8.0,
        gpus=gpus,
        links=links,
        **kw,
    )


def card(index: int, name: str = "NVIDIA L4", **kw: Any) -> Gpu:
    return Gpu(index=index, name=name, compute_capability="8.9", multiprocessors=58, memory_gib=22.0, **kw)


def measurement(*, step: float = 1.0, per_device: int = 8, full: bool = False, packed: bool = False) -> Measurement:
    return Measurement(
        facts={"tokens per pack": 64 if packed else None},
        when="2026-01-01T00:00:00+00:00",
        per_device=per_device,
        global_batch_size=16,
        seconds_per_micro_batch=step / (16 / per_device),
        seconds_per_token=0.0,
        residual_seconds=[],
        backward_share=0.6,
        data_seconds=0.0,
        optimizer_seconds=0.0,
        other_seconds=0.0,
        start_up_seconds=10.0,
        compute_seconds={str(world): step / world for world in (1, 2, 4, 8) if 16 % (world * per_device) == 0},
        tokens_per_step=1000.0,
        steps=100.0,
        peak_memory_bytes=1e9,
        memory_bytes=80e9,
        parameters=1_000_000_000,
        active_parameters=1_000_000_000,
        trainable_parameters=10_000_000,
        gradient_bytes=[40_000_000],
        gradient_dtype="float32",
        as_bucket_view=full,
        gradients_in_peak=True,
        bucket_cap_bytes=25 * MIB,
        first_bucket_bytes=MIB,
    )


FULL = DryRunResult(measured=None, reason="CUDA ran out of memory", full=True)


class FakeBench(DryRunner):
    """Dry runs by their extra arguments; what is not listed does not fit."""

    def __init__(self, results: dict[str, DryRunResult]) -> None:
        super().__init__(arguments=[])
        self.results, self.asked, self.otherwise = results, [], FULL

    def try_out(self, extra: Any, ranks: int = 1) -> DryRunResult:
        key = " ".join(extra)
        self.asked.append(key)
        return self.results.get(key, self.otherwise)


SIZE = "--training.per_device_train_batch_size"


def all_reduce(world: int, sizes: Any = None, *args: Any, **kw: Any) -> dict[str, Any]:
    rows = [{"bytes": size, "seconds": {"median": 1e-5 + size / 2e10}} for size in sizes]
    about = {"kind": "comm", "world_size": world, "backend": "nccl", "environment": kw.get("environment") or {}}
    return about | {"collectives": {"all_reduce": rows}}


class DryRuns:
    """Dry runs of a script on two GPUs, made up; `asked` has their command lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, memory: int = 64) -> None:
        self.asked: list[str] = []
        self.memory = memory  # rows at a time that fit
        monkeypatch.setattr(candidates.subprocess_dry_run, "run", self.report)
        monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
        monkeypatch.setattr(candidates.comm, "measure", all_reduce)
        monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        monkeypatch.chdir(folder)
        Path("mine.py").write_text("from finetune import SFTTrainer\n")

    def report(self, target: list[str], arguments: list[str], **_: Any) -> dict[str, Any]:
        said = " ".join([*target, *arguments])
        self.asked.append(said)
        given = re.search(rf"{SIZE[2:]}=(\d+)", said)
        rows = int(given[1]) if given else 4
        batch: dict[str, Any] = {
            "global_batch_size": 16,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
        settings = Config(model=ModelConfig(model_name_or_path="m"), training=TrainingConfig(**batch)).to_dict()
        about = {"config": settings}
        if rows > self.memory:
            return {"go": False, "reason": "CUDA ran out of memory", "out_of_memory": True, "state_fits": True, **about}
        sizes = {"recommended": 8}
        found = measurement(step=4 / rows, per_device=rows).to_dict()
        return {"go": True, "measurement": found, "micro_batch_search": sizes, **about}
