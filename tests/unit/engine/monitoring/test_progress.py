"""The lines of progress: what the times mean is written beside them, on a terminal and in a log file."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from finetune.engine.monitoring.progress import ProgressLines


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("finetune.engine.monitoring.progress.time", found)
    return found


def progress(*, terminal: bool, start_step: int = 0, lines: bool = False) -> tuple[ProgressLines, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, color_system=None)
    return ProgressLines(console, 100, start_step, lines=lines), file


def at(step: int) -> Any:
    return SimpleNamespace(global_step=step)


def test_a_log_file_has_the_estimate(clock: Clock) -> None:
    lines, file = progress(terminal=False)
    clock.now += 60  # the first step compiles
    lines.step(at(1))
    lines.log(at(1), 2.0, None, None)
    clock.now += 18
    lines.step(at(10))
    lines.log(at(10), 1.5, 0.25, 1234.0)
    lines.line(at(10), "held-out loss 1.6")
    assert file.getvalue().splitlines() == [
        "step 1/100: loss 2.0000, elapsed 0:01:00",
        "step 10/100: loss 1.5000, gradient norm 0.250, 1,234 tokens/s per device, elapsed 0:01:18, remaining 0:03:00",
        "step 10/100: held-out loss 1.6",
    ]


def test_a_resumed_run_counts_its_own_steps(clock: Clock) -> None:
    lines, _ = progress(terminal=False, start_step=50)
    clock.now += 30
    lines.step(at(51))
    assert lines.times() == "elapsed 0:00:30"
    clock.now += 10
    lines.step(at(61))
    assert lines.times() == "elapsed 0:00:40, remaining 0:00:39"


def test_a_terminal_labels_the_times_and_keeps_evaluations_as_lines(clock: Clock) -> None:
    lines, file = progress(terminal=True)
    lines.step(at(1))
    clock.now += 9
    lines.step(at(10))
    lines.log(at(10), 1.5, None, None)
    lines.line(at(10), "held-out loss 1.6")
    lines.line(at(20), "held-out loss 1.4")
    lines.close()
    shown = file.getvalue()
    assert "10/100 remaining 0:01:30" in shown
    assert "step 10/100: held-out loss 1.6" in shown and "step 20/100: held-out loss 1.4" in shown


@pytest.mark.parametrize("lines", [False, True])
def test_a_terminal_keeps_past_records_if_asked_for(clock: Clock, lines: bool) -> None:
    progress_lines, file = progress(terminal=True, lines=lines)
    for step, loss in ((10, 1.5), (20, 1.25)):
        progress_lines.step(at(step))
        progress_lines.log(at(step), loss, None, None)
    progress_lines.close()
    shown = file.getvalue()
    assert ("step 10/100: loss 1.5000, elapsed" in shown) is lines
    assert ("step 20/100: loss 1.2500, elapsed" in shown) is lines
    assert "loss 1.2500 ━" in shown  # the bar has the last one in any case


@pytest.mark.parametrize("width", [160, 100, 80, 60])
def test_a_usual_terminal_shows_the_whole_line(clock: Clock, width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    lines = ProgressLines(console, 24)
    lines.step(at(1))
    clock.now += 3
    lines.step(at(10))
    lines.log(at(10), 6.3299, 2.933, 1279.0)
    lines.close()
    shown = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", file.getvalue())) if line]
    assert all(len(line) <= width for line in shown)
    assert re.fullmatch(r"loss 6\.3299, 1,279 tok/s [━╸╺ ]+ 10/24 remaining 0:00:05 *", shown[-1])
