"""Progress on the terminal: a bar, or one line per record."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from transformers import TrainerState

from finetune.runtime.command import printable


class ProgressLines:
    """A progress bar on a terminal, one line per record elsewhere or if asked for. Both have the time so far and an
    estimate of the time left. For rank 0."""

    def __init__(self, console: Console, total: int, start_step: int = 0, *, lines: bool = False) -> None:
        """
        Args:
            total: optimizer steps of the whole run.
            start_step: those that an earlier run has done.
            lines: on a terminal, too, a line per record.
        """
        self.console = console
        self._bar: Progress | None = None
        self._total = total
        self._lines = lines or not console.is_terminal
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step done here, which compiles, and when it ended
        self._done = start_step
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(
                "training", total=total, completed=start_step, steps=f"{start_step}/{total}"
            )
            self._bar.start()

    def step(self, state: TrainerState) -> None:
        """One optimizer step is done."""
        self._done = state.global_step
        if self._first is None:
            self._first = state.global_step, time.monotonic()
        if self._bar:
            left = self.times().rpartition(", ")[2]
            steps = f"{state.global_step}/{self._total} {left}"
            self._bar.update(self._task, completed=state.global_step, steps=steps)

    def times(self) -> str:
        """`elapsed 0:01:10, remaining 0:05:00`: evaluations and checkpoints so far are part of the pace. Without an
        estimate after the first step, which compiles."""
        now = time.monotonic()
        elapsed = f"elapsed {_clock(now - self._began)}"
        if self._first is None or self._done <= self._first[0]:
            return elapsed
        pace = (now - self._first[1]) / (self._done - self._first[0])
        return f"{elapsed}, remaining {_clock(pace * (self._total - self._done))}"

    def log(self, state: TrainerState, loss: float, grad_norm: float | None, per_gpu: float | None) -> None:
        """Show the figures of a record."""
        parts = [f"loss {loss:.4f}"]
        if grad_norm is not None:
            parts.append(f"gradient norm {grad_norm:.3f}")
        if per_gpu is not None:
            parts.append(f"{per_gpu:,.0f} tokens/s per device")
        if self._bar:
            speed = [] if per_gpu is None else [f"{per_gpu:,.0f} tok/s"]
            self._bar.update(self._task, description=", ".join([parts[0], *speed]))
        if self._lines:
            self.line(state, f"{', '.join(parts)}, {self.times()}")

    def line(self, state: TrainerState, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        self._print(f"step {state.global_step}/{self._total}: {text}")

    def sample(self, prompt: str, answer: str, reference: str) -> None:
        """An answer of the current model, on one line each for answer and reference."""
        self._print(f"  {_one_line(prompt, 60)} -> {_one_line(answer, 120)}")
        self._print(f"  expected: {_one_line(reference, 120)}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()
            self._bar = None


_LONGEST = 86_400 * 999_999_999  # seconds of a timedelta


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(min(seconds, _LONGEST))))


def _one_line(text: str, longest: int) -> str:
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
