"""The longest row that fits with each way to keep activations, measured; and the way that a run takes.

Each mode runs on a document of SHORT_TOKENS, which nearly all can hold and are compared at, and on a longer one; a line
through both gives the rest (`activations`). Nothing is found by running out of memory. What is chosen is proven by the
passes on the longest rows that follow: those of the dry run, or of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from finetune.config.rules import LOADED_AS, OFFLOAD, Mode, activation_modes
from finetune.data.layout import Layout
from finetune.data.packs import MULTIPLE
from finetune.engine.job import AS_CONFIGURED, Choice, Job
from finetune.engine.model import positions
from finetune.engine.monitoring import peak_memory as process_memory
from finetune.engine.monitoring.metrics import ModelSize, training_flops
from finetune.engine.session.report import activations_line
from finetune.engine.training import recompute
from finetune.errors import RunError, UserError
from finetune.measure import activations, held, measurements, micro_batch, probe
from finetune.measure.activations import Measured, Point, Rows
from finetune.measure.probe import Passes
from finetune.runtime.command import console
from finetune.runtime.machine.hardware import free_host_bytes
from finetune.runtime.ranks import activity, distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer
    from finetune.measure.trial import Trial

SHORT_TOKENS = 2048  # or the job's longest row, if that is shorter: what cannot hold it, cannot hold the job
PROBE_TOKENS = 256  # of ranks that share a model or rows: if one ran out of memory, the others would wait for it
LONG_SECONDS = 8.0  # of a pass on the longer document
ROOM = 0.6  # part of the free memory that the longer document may need
LEAST_RATIO = 1.25  # of the longer document to the shorter one: peaks are exact, so little is enough
PASSES = 2  # at each length: the first compiles, the second runs while gradients are held, and is timed


# --- passes ---------------------------------------------------------------------------------------------------------


def measure(
    trainer: SFTTrainer,
    layout: Layout,
    size: ModelSize,
    modes: Sequence[Mode],
    memory: held.Memory,
    over: Callable[[], bool] = lambda: False,
) -> list[Measured]:
    """Measure each mode that the model can have, with what training will hold besides. Every rank calls it; what the
    fullest and the slowest of them has found counts. The last mode stays applied.

    Args:
        memory: with a limit.
        over: whether the time is up; asked before each mode but the first.
    """
    found: list[Measured] = []
    for mode in modes:
        if found and over():
            break
        with console().status(f"trying {mode.text}"):
            try:
                apply(trainer, mode)
            except UserError:  # the model cannot do it
                continue
            found.append(_measure_mode(trainer, layout, size, mode, memory))
    return found


def apply(trainer: SFTTrainer, mode: Mode) -> None:
    """Let the trainer's model keep its activations so."""
    wanted = replace(trainer.recomputation, kind=mode.gradient_checkpointing, tiled_mlp=mode.tiled_mlp)
    if wanted != trainer.recomputation:
        trainer.set_recomputation(wanted)


def _measure_mode(trainer: SFTTrainer, layout: Layout, size: ModelSize, mode: Mode, memory: held.Memory) -> Measured:
    table = positions.limit(trainer.model)
    most = None if table is None else max(table // MULTIPLE * MULTIPLE, MULTIPLE)
    longest = int(layout.tokens.max()) if most is None else min(int(layout.tokens.max()), most // 2)
    short = min(SHORT_TOKENS, max(longest // MULTIPLE * MULTIPLE, MULTIPLE))
    limit = least(memory.limit_bytes)
    probe.free_gradients(trainer)
    memory.reset()
    to_come = held.bytes_not_yet_allocated(trainer)
    before = max(distributed.gather_objects(memory.peak_bytes() + to_come))

    def passes(tokens: int) -> Point | None:
        return _everywhere(probe.on_document(trainer, layout, tokens, memory, PASSES), tokens, to_come)

    def measured(*points: Point | None, host: int | None = None) -> Measured:
        found = tuple(one for one in points if one is not None)
        cost = training_flops(size, tokens=0, squared_lengths=1) / training_flops(size, tokens=1, squared_lengths=0)
        return Measured(mode=mode, held_bytes=before, points=found, square_cost=cost, host_tokens=host)

    if trainer.sharded or trainer.context.processes > 1:
        first = passes(PROBE_TOKENS)
        if first is None or before + (first.peak_bytes - before) * short / PROBE_TOKENS > limit:
            return measured(first)
    first = passes(short)
    if first is None:
        return measured()
    host = host_tokens(trainer, size, mode)
    most = min((one for one in (most, host) if one is not None), default=None)
    tokens = longer_document(first, before, limit, size, most)
    return measured(first, None if tokens is None else passes(tokens), host=host)


def host_tokens(trainer: SFTTrainer, size: ModelSize, mode: Mode) -> int | None:
    """Tokens of a micro-batch whose layers' inputs fit the host's memory, of which each rank of a machine has a part;
    None if the mode keeps none there. Every rank calls it."""
    if mode.gradient_checkpointing not in (OFFLOAD, "unsloth"):
        return None
    each = size.layers * size.hidden * trainer.model.get_input_embeddings().weight.element_size()
    shared, processes = trainer.context.size, trainer.context.processes
    ranks = distributed.ranks().local_world_size * shared // processes  # a stand-in shares the host with the others
    available = held.MEMORY_MARGIN * free_host_bytes() / ranks
    return int(min(distributed.gather_objects(available)) / each * shared)


def longer_document(first: Point, held: float, limit: float, size: ModelSize, most: int | None) -> int | None:
    """Tokens of the longer document: as many as fit a part of the free memory and LONG_SECONDS. None if that is hardly
    longer than the first, or memory does not grow with the tokens.

    Args:
        most: that the model has positions for, and the host memory; None if any number.
    """
    each = (first.peak_bytes - held) / first.tokens
    if each <= 0:
        return None

    def seconds(tokens: int) -> float:
        return first.seconds * _flops(size, tokens) / _flops(size, first.tokens)

    tokens = int(ROOM * (limit - held) / each)
    while tokens > first.tokens and seconds(tokens) > LONG_SECONDS:
        tokens = int(tokens * 0.8)
    tokens = min(tokens, most or tokens) // MULTIPLE * MULTIPLE
    return tokens if tokens >= LEAST_RATIO * first.tokens else None


def _flops(size: ModelSize, tokens: int) -> float:
    return training_flops(size, tokens=tokens, squared_lengths=tokens**2)


def _everywhere(passed: Passes | None, tokens: int, to_come: float) -> Point | None:
    """Passes of all ranks on so many tokens: the fullest and the slowest. None if memory ran out on any."""
    everyone = distributed.gather_objects(passed)
    if None in everyone:
        return None
    return Point(
        tokens=tokens,
        peak_bytes=max(one.peak_bytes for one in everyone) + to_come,
        seconds=max(one.seconds for one in everyone),
        first_seconds=max(one.first_seconds for one in everyone),
    )


def least(limit_bytes: float | None) -> float:
    """The limit that holds on every rank."""
    assert limit_bytes is not None
    return min(distributed.gather_objects(limit_bytes))


# --- a job ----------------------------------------------------------------------------------------------------------


def rows(job: Job) -> Rows:
    """What of the job's rows decides memory and speed."""
    longest = probe.longest_rows(job.layout, job.batch.per_device)
    return Rows(
        most=int(job.layout.micro_batch_tokens(longest, job.context.size)),
        tokens=int(job.layout.tokens.sum()),
        squares=int(job.layout.squared_lengths.sum()),
        shared_by=job.config.training.context_parallel,
    )


def own_mode(job: Job) -> Mode:
    """The mode of a job whose configuration leaves nothing open."""
    kind = recompute.resolve(job.config.training.gradient_checkpointing, job.stack.backend)
    return Mode(gradient_checkpointing=kind, tiled_mlp=job.config.model.tiled_mlp)


def ladder(job: Job) -> list[Mode]:
    """The modes that this backend has, from the one that recomputes nothing to the one that needs the least memory;
    only those with the `model.tiled_mlp` that is configured, if it is."""
    found = activation_modes(job.stack.backend)
    if "model.tiled_mlp" in job.config.given:
        found = list(dict.fromkeys(replace(one, tiled_mlp=job.config.model.tiled_mlp) for one in found))
    return found


# --- in a run -------------------------------------------------------------------------------------------------------


def choose(job: Job, kept: JsonObject | None) -> Choice[Mode]:
    """The mode that is known before the model runs: the configured one, that of the checkpoint, or what an earlier
    measurement of this job gives. Every rank calls it.

    Args:
        kept: `Choice.to_dict` of the checkpoint that the run resumes from.
    """
    config = job.config
    if not config.training.leaves_activations_open:
        return Choice(value=own_mode(job), reason=AS_CONFIGURED)
    modes = ladder(job)
    for mode in modes:
        if kept is not None and vars(mode).items() <= kept.items():
            return Choice(value=mode, reason="as in the checkpoint")
    loaded = recompute.resolve(LOADED_AS, job.stack.backend)
    plain = next(one for one in modes if one.gradient_checkpointing == loaded)
    limit = held.Memory(job.stack.device).limit_bytes
    if limit is None:
        return Choice(value=plain, reason="as on any CPU, which has no memory of its own to fill")
    earlier, wanted = find(job), rows(job)
    chosen = None if earlier is None else activations.fastest(earlier, wanted, limit)
    everywhere = distributed.gather_objects(None if chosen is None else vars(chosen.mode))
    if chosen is not None and all(one == everywhere[0] for one in everywhere):  # machines have their own caches
        return Choice(value=chosen.mode, reason=f"{_why(chosen, wanted, limit)}, by an earlier measurement")
    return Choice(value=plain, reason="to be measured", searches=True)


def search_before_first_step(job: Job, trainer: SFTTrainer) -> Choice[Mode]:
    """Measure all modes before the first step, and apply the fastest that holds the job. Every rank calls it.

    Raises:
        RunError: none holds it.
    """
    began = time.perf_counter()
    memory = held.Memory(job.stack.device)
    with activity.during("measuring how activations are kept"):
        found = measure(trainer, job.layout, job.size, ladder(job), memory)
    process_memory.reset()
    save(job, found)
    chosen = decide(rows(job), found, least(memory.limit_bytes))
    apply(trainer, chosen.value)
    return replace(chosen, seconds=time.perf_counter() - began)


def decide(wanted: Rows, found: Sequence[Measured], limit: float) -> Choice[Mode]:
    """The fastest mode that holds the job's rows.

    Raises:
        RunError: none holds them, even without a margin.
    """
    if (chosen := activations.fastest(found, wanted, limit)) is not None:
        return Choice(value=chosen.mode, reason=_why(chosen, wanted, limit))
    frugal = activations.most_frugal(found, limit)
    if frugal is None or not frugal.fits(wanted.most, limit, margin=False):
        raise RunError(refusal(found, wanted, limit))
    why = (
        f"the one that needs the least memory: {_need(frugal, wanted, limit)}, above the margin of {held.MEMORY_MARGIN}"
    )
    return Choice(value=frugal.mode, reason=why)


def _why(chosen: Measured, wanted: Rows, limit: float) -> str:
    return f"the fastest that holds {_need(chosen, wanted, limit)}"


def _need(one: Measured, wanted: Rows, limit: float) -> str:
    assert one.line is not None
    gib = one.line.peak_bytes(wanted.most) / 2**30
    return f"{counted(wanted.most, 'token')} in {gib:.1f} GiB of {limit / held.MEMORY_MARGIN / 2**30:.1f}"


def refusal(found: Sequence[Measured], wanted: Rows, limit: float) -> str:
    """Why the largest micro-batch does not fit, and the settings that are predicted to hold it."""
    frugal = activations.most_frugal(found, limit)
    longest = 0 if frugal is None else frugal.longest(limit) or 0
    where = "this GPU" if wanted.shared_by == 1 else f"{wanted.shared_by} GPUs that share it"
    text = f"A micro-batch of {counted(wanted.most, 'token')} does not fit {where}"
    if (settings := activations.remedy(found, wanted, limit)) is not None:
        return f"{text}. It is predicted to fit with {settings}."
    if frugal is None or not longest:
        return f"{text}, however its activations are kept. Lower data.max_length."
    return f"{text}: at most {longest:,} fit, with {frugal.mode.text}. Lower data.max_length."


def known_remedy(job: Job) -> str | None:
    """The settings that hold the job in place of its own, if all modes were measured earlier."""
    limit, found = held.Memory(job.stack.device).limit_bytes, find(job)
    others = [one for one in found or () if one.mode != own_mode(job)]
    return None if limit is None else activations.remedy(others, rows(job), limit)


# --- the cache ------------------------------------------------------------------------------------------------------


def save(job: Job, found: Sequence[Measured]) -> None:
    """Write the measured modes of a job to the cache."""
    tried = [vars(one) for one in ladder(job)]
    content = {"kind": "activation modes", "tried": tried, "modes": [asdict(one) for one in found]}
    measurements.note(measurements.modes_file(measurements.facts(job)), content)


def find(job: Job) -> list[Measured] | None:
    """The modes that were measured for this job, at any batch; None without a measurement of all of them."""
    content, modes = measurements.read(measurements.modes_file(measurements.facts(job)), dict), ladder(job)
    try:
        if content is None or not all(vars(one) in content["tried"] for one in modes):
            return None
        found = [Measured.from_dict(one) for one in content["modes"]]
    except (TypeError, KeyError, ValueError):  # of another version
        return None
    return [one for one in found if one.mode in modes]


# --- in a dry run ---------------------------------------------------------------------------------------------------


class DoesNotFit(RunError):
    """The longest row does not fit the device, which is known without trying it."""


@dataclass(kw_only=True)
class TrialModes:
    """The modes of a trial.

    rows:    of the job, of which the trial has a sample
    settle:  the job with how its activations are kept
    every:   measure all modes, not only that one
    seconds: that the measurement before the first step took, without what a run needs as well
    """

    trial: Trial
    rows: Rows
    settle: Callable[[Job, Choice[Mode]], Job]
    every: bool = False
    found: list[Measured] = field(default_factory=list)
    proof: JsonObject | None = None
    seconds: float = 0.0

    @property
    def choice(self) -> Choice[Mode]:
        """How the job keeps its activations; measured first if it `searches`."""
        assert self.trial.job.activations is not None
        return self.trial.job.activations

    def measure(self) -> None:
        """Before the first step: measure, and take the fastest mode if the job leaves it open.

        Raises:
            DoesNotFit: the longest row is predicted not to fit.
        """
        trial, limit = self.trial, self.trial.memory.limit_bytes
        if limit is None:
            return
        began = time.perf_counter()
        every = self.every or self.choice.searches
        self._measure(ladder(trial.job) if every else [self.choice.value])
        if self.choice.searches:
            try:
                decided = decide(self.rows, self.found, limit)
            except RunError as error:
                raise DoesNotFit(str(error)) from None
            trial.job = self.settle(trial.job, decided)
        apply(trial.trainer, self.choice.value)
        own = self.of(self.choice.value)
        points = own.points if own is not None else ()
        compiling = sum((one.first_seconds or one.seconds) - one.seconds for one in points)  # as a run will, too
        elapsed = time.perf_counter() - began
        self.seconds = elapsed - max(compiling, 0.0)
        trial.budget.postpone(elapsed)
        # A line through one point may be too high, and without any the trial finds out what fills the device.
        if own is not None and len(own.points) == 2 and not own.fits(self.rows.most, limit, margin=False):
            raise DoesNotFit(self._fewer_rows(own, limit) or self.remedy())

    def _measure(self, modes: Sequence[Mode]) -> None:
        trial = self.trial
        missing = [mode for mode in modes if self.of(mode) is None]
        self.found += measure(
            trial.trainer, trial.job.layout, trial.job.size, missing, trial.memory, lambda: trial.budget.over
        )
        if len(modes) > 1 and not trial.budget.over:
            save(trial.job, self.found)
        trial.memory.reset()

    def of(self, mode: Mode) -> Measured | None:
        """The measurement of a mode."""
        return next((one for one in self.found if one.mode == mode), None)

    def may_fit(self, per_device: int) -> bool:
        """Whether a micro-batch of so many rows may fit, by the line of the job's mode."""
        own, limit = self.of(self.choice.value), self.trial.memory.limit_bytes
        if own is None or own.line is None or limit is None:
            return True
        return own.fits(self.rows.most / self.trial.job.batch.per_device * per_device, limit, margin=False)

    def _fewer_rows(self, own: Measured, limit: float) -> str | None:
        """Why the micro-batch does not fit, and the largest that is predicted to; None if not even one row is."""
        job, rows = self.trial.job, self.trial.job.batch.per_device
        sizes = [size for size in micro_batch.allowed_sizes(job, 1) if size < rows]
        fitting = [size for size in sizes if own.fits(-(-self.rows.most * size // rows), limit)]
        if not fitting:
            return None
        return (
            f"A micro-batch of {counted(rows, 'row')} ({self.rows.most:,} tokens) does not fit. The largest "
            f"that is predicted to fit has {counted(max(fitting), 'row')}: set training.per_device_train_batch_size to "
            f"{max(fitting)} (same global batch, same result)."
        )

    def remedy(self) -> str:
        """Why the longest micro-batch does not fit, and the settings that are predicted to hold it."""
        trial, limit = self.trial, self.trial.memory.limit_bytes
        assert limit is not None
        self._measure(ladder(trial.job))
        return refusal(self.found, self.rows, limit)

    def note_proof(self, one: Measured, peak_bytes: float) -> None:
        """Compare the prediction with a real pass on the longest micro-batch."""
        predicted = None if one.line is None else one.line.peak_bytes(self.rows.most)
        self.proof = {
            "mode": vars(one.mode),
            "tokens": self.rows.most,
            "predicted_peak_bytes": predicted,
            "measured_peak_bytes": peak_bytes,
            "error": None if predicted is None else predicted / peak_bytes - 1,
        }

    def to_dict(self) -> JsonObject | None:
        """For the report; None on a device without a limit."""
        limit = self.trial.memory.limit_bytes
        if limit is None or not self.found:
            return None
        order = ladder(self.trial.job)
        found = sorted(self.found, key=lambda one: order.index(one.mode) if one.mode in order else -1)
        own = {
            "own": self.choice.to_dict(vars(self.choice.value)),
            "line": activations_line(self.choice),
            "proof": self.proof,
        }
        return activations.to_dict(found, self.rows, limit) | own
