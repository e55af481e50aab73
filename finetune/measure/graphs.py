"""Whether a run replays its passes as CUDA graphs: decided before the first step by trying them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune.engine.training import decoder_graphs
from finetune.engine.training.decoder_graphs import DecoderGraphs
from finetune.measure import measurements, probe
from finetune.runtime.ranks import activity, distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer

WON_BACK_STEPS = 50  # fewer do not win back the seconds of recording
HOST_SHARE = 0.6  # of a pass, that the host needs to launch it: with less the GPU has enough to do meanwhile
FASTER = 0.97  # of a pass as launched; a smaller gain is noise
# Attention's backward pass adds in another order each time: 0.2 to 0.6 % of the norm of gradients in bfloat16 on an
# H100 (benchmarks/results/LOG.md). What two launched passes differ by is allowed four times.
LARGEST_DIFFERENCE, OF_NOISE = 0.01, 4
# A model may amplify that, as a Gemma 4 with random weights does, until four times the noise admits anything. So the
# gradients that differ less from launched pass to launched pass, in norm, are also compared by themselves, and at least
# this share of all must be such.
MOST_NOISE, FEWEST = 0.05, 0.1
CHANGE = 1e-3  # of the weights, between the two micro-batches that are compared
ROOM = 0.15  # of the device's memory that must stay free beside the graphs, for evaluations


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What was found, for run.json."""

    used: bool
    reason: str
    launched_seconds: float | None = None  # of a pass as launched, and as replayed
    replayed_seconds: float | None = None
    difference: float | None = None  # the largest of losses and gradients, in norm
    gib: float | None = None  # that the graphs hold
    seconds: float = 0.0  # that it took to find

    @property
    def line(self) -> str:
        """For the terminal."""
        if not self.used:
            return f"CUDA graphs: not used, {self.reason}"
        assert self.launched_seconds is not None and self.replayed_seconds is not None
        return (
            f"CUDA graphs: a pass takes {1000 * self.replayed_seconds:.0f} ms, not "
            f"{1000 * self.launched_seconds:.0f} ms ({self.seconds:.1f} s to record)"
        )


def record(trainer: SFTTrainer, steps: int, facts: JsonObject) -> Recording:
    """Record the passes of a trainer, and have it train with them if they are right and faster on all ranks. What an
    earlier start of this job has found right and faster is compared with one launched pass. Every rank calls it, after
    `train` has begun and before the model is wrapped.

    Args:
        steps: of the run, which win the time of recording back.
        facts: of the job (`measurements.facts`), with its micro-batch and training.cuda_graphs: "auto", True (also
            where they are not faster) or False.
    """
    wanted = facts["training.cuda_graphs"]
    if wanted is False:
        return Recording(used=False, reason="training.cuda_graphs is false")
    began = time.perf_counter()
    why = _first(decoder_graphs.why_not(trainer))
    if why is not None:
        return Recording(used=False, reason=why)
    if wanted == "auto" and steps < WON_BACK_STEPS:
        return Recording(used=False, reason=f"{counted(steps, 'step')} do not win the recording back")
    with activity.during("recording CUDA graphs"):
        own, found, known = None, None, measurements.find_graphs(facts)
        if _first(None if known else "unknown") is None and known:
            own, found = _on_all_ranks(trainer, wanted, known)
        if own is None or found is None:
            with probe.same_random_numbers(trainer):
                launched, host = _seconds(trainer)
            probe.free_gradients(trainer)
            if wanted == "auto" and _first(None if host > HOST_SHARE * launched else "host") is not None:
                reason = f"the host launches a pass in {host / launched:.0%} of its time: the GPU has enough to do"
                return Recording(used=False, reason=reason, launched_seconds=launched)
            own, found = _on_all_ranks(trainer, wanted, {"launched_seconds": launched})
            if found is not None and (own.difference or 0.0) <= LARGEST_DIFFERENCE:
                measurements.save_graphs(facts, own.launched_seconds, own.replayed_seconds)
    if found is None:
        return own
    trainer.until_end.enter_context(found.installed())
    return replace(own, seconds=time.perf_counter() - began)


def _first(why: str | None) -> str | None:
    """The first rank's reason that has one. Every rank calls it."""
    return next((one for one in distributed.gather_objects(why) if one is not None), None)


def _on_all_ranks(trainer: SFTTrainer, wanted: str | bool, known: JsonObject) -> tuple[Recording, DecoderGraphs | None]:
    """What this rank finds, with the graphs; without them if a rank has found that they are wrong or slower."""
    own, found = _tried(trainer, wanted, known)
    why = _first(None if own.used else own.reason)
    if why is None:
        return own, found
    if found is not None:
        found.remove()
    del found
    probe.free_gradients(trainer)
    return replace(own, used=False, reason=str(why)), None


def _tried(trainer: SFTTrainer, wanted: str | bool, known: JsonObject) -> tuple[Recording, DecoderGraphs | None]:
    """What this rank finds, with the graphs.

    Args:
        known: seconds of a pass: `launched_seconds`, and `replayed_seconds` if an earlier start has found them.
    """
    launched, earlier = known["launched_seconds"], "replayed_seconds" in known
    own = Recording(used=False, reason="", launched_seconds=launched)
    graphs = None
    with probe.same_random_numbers(trainer):
        try:
            expected = _results(trainer, earlier)
            noise = _squares(expected if earlier else _results(trainer), expected)
            stable = noise[..., 0] <= MOST_NOISE**2 * noise[..., 1]
            if not bool(stable[:, 0].all()) or stable.double().mean() < FEWEST:
                return replace(own, reason="launched passes differ too much from each other to compare them"), None
            probe.free_gradients(trainer)
            graphs = DecoderGraphs(trainer)
            squares = _squares(_results(trainer)[earlier:], expected)  # recorded with the weights of the first
            if not graphs.replays:
                raise NotImplementedError("the decoder is called in another way than it was recorded")
            replayed = known["replayed_seconds"] if earlier else _seconds(trainer)[0]
        except Exception as error:  # a model may launch whatever it likes
            text = " ".join(str(error).split())[:200]
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"recording fails in {where.name} of {Path(where.filename).name}: {type(error).__name__}: {text}"
            return replace(own, reason=why), graphs
    graphs.gradients.zero()
    trainer.statistics.forget()
    apart = _differences(squares, stable)
    bounds = (OF_NOISE * _differences(noise, stable)).clamp(min=LARGEST_DIFFERENCE)
    difference = float(apart.max())
    own = replace(own, replayed_seconds=replayed, difference=difference, gib=graphs.bytes / 2**30)
    if not bool((apart <= bounds).all()):
        reason = f"its results differ by {difference:.1e} from those of the launched pass"
    elif trainer.args.device.type == "cuda" and (free := torch.cuda.mem_get_info())[0] < ROOM * free[1]:
        reason = f"the recorded passes leave only {free[0] / 2**30:.1f} GiB free"
    elif wanted == "auto" and replayed > FASTER * launched:
        reason = f"a pass takes {1000 * replayed:.0f} ms, and {1000 * launched:.0f} ms as launched"
    else:
        return replace(own, used=True, reason="faster, with the same results"), graphs
    return replace(own, reason=reason), graphs


def _unlike_rows(trainer: SFTTrainer) -> list[np.ndarray]:
    """The rows of two micro-batches: of the most documents, and of the fewest."""
    packs, count = trainer.layout.packs, trainer.args.per_device_train_batch_size
    order = np.argsort(np.diff(packs.offsets), kind="stable")
    return [np.resize(order[::-1], count), np.resize(order, count)]


def _results(trainer: SFTTrainer, second: bool = False) -> list[list[torch.Tensor]]:
    """Loss and gradients of two micro-batches, or of the second alone, whose weights are others: a replay sees them."""
    weights = [one for one in trainer.model.parameters() if one.requires_grad]
    kept = [one.detach().clone() for one in weights]
    found = []
    try:
        for change, rows in list(zip((0.0, CHANGE), _unlike_rows(trainer), strict=True))[second:]:
            for weight, before in zip(weights, kept, strict=True):
                weight.data.copy_(before + change)
                if weight.grad is not None:
                    weight.grad.zero_()
            loss = trainer.training_step(trainer.model, *probe.batch_of(trainer, trainer.layout, rows))
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad.detach().clone() for one in weights]
            found.append([loss.detach(), *gradients])
    finally:
        for one, before in zip(weights, kept, strict=True):
            one.data.copy_(before)
    return found


def _squares(found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """|one - other|^2 and |other|^2 of each tensor, float64 [micro-batches, 1 + gradients, 2]."""

    def of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack([(one.float() - other.float()).square().sum(), other.float().square().sum()])

    pairs = [zip(*both, strict=True) for both in zip(found, expected, strict=True)]
    return torch.stack([torch.stack([of(*pair) for pair in both]) for both in pairs]).cpu().double()


def _differences(squares: torch.Tensor, stable: torch.Tensor) -> torch.Tensor:
    """The largest, in norm, of losses, of all gradients together, and of those together that are `stable`."""
    gradients = squares[:, 1:]
    kinds = [squares[:, 0], gradients.sum(1), gradients.masked_fill(~stable[:, 1:, None], 0).sum(1)]
    ratios = torch.stack([one[:, 0] / one[:, 1] for one in kinds])
    return ratios.masked_fill(torch.stack([one[:, 0] == 0 for one in kinds]), 0).sqrt().amax(1)


def _seconds(trainer: SFTTrainer) -> tuple[float, float]:
    """Seconds of a pass, and those after which the host has launched it; of two passes the last."""
    batch, count = probe.batch_of(trainer, trainer.layout, _unlike_rows(trainer)[0])
    host = whole = 0.0
    for _ in range(2):
        probe.synchronize(trainer)
        began = time.perf_counter()
        trainer.training_step(trainer.model, dict(batch), count)
        host = time.perf_counter() - began
        probe.synchronize(trainer)
        whole = time.perf_counter() - began
    return whole, host
