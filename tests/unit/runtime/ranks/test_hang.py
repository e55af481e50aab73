"""How the watches of the ranks agree on a stuck one. In this process: the watches are called in turn on one store, as
their threads would."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from finetune.runtime.ranks import activity, hang, rank_status
from finetune.runtime.ranks.hang_report import SLOW
from finetune.runtime.ranks.rank_status import RankStatus

LIMIT = 600.0


def at(rank: int, phase: str = "backward", step: int = 7, seconds: float = LIMIT, **others: Any) -> RankStatus:
    return RankStatus(rank=rank, step=step, phase=phase, seconds=seconds, **others)


def waits(rank: int, collective: str = "nccl:all_reduce", training: bool = True, **others: Any) -> RankStatus:
    return at(rank, collective=collective, waited=LIMIT, training=training, **others)


def test_a_phase_is_long_after_two_minutes_or_twenty_steps() -> None:
    assert hang.slow_phase_seconds([]) == hang.slow_phase_seconds([1.0] * 50) == 120
    assert hang.slow_phase_seconds([9.0, 10.0, 300.0]) == 200
    times = hang.StepTimes()
    for step, since in [(-1, 1.0), (2, 10.0), (2, 12.0), (4, 20.0)]:
        times.note(activity.Activity("data", step, since))
    assert times.seconds == [5.0]


class Shared:
    """Two watches of one run, what they are doing, and how the run ended."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.statuses, self.ended = HashStore(), {0: at(0), 1: at(1)}, []
        monkeypatch.setattr(hang, "ANSWER_SECONDS", 0.0)
        monkeypatch.setattr(hang.Watch, "status", lambda watch: self.statuses[watch.rank])
        self.watches = [self.watch(rank, folder) for rank in (0, 1)]

    def watch(self, rank: int, folder: Path) -> hang.Watch:
        watch = hang.Watch(
            rank=rank,
            world_size=2,
            store=self.store,
            limit=LIMIT,
            setting="training.ddp_timeout",
            read_activity=lambda other: None,
            fail=lambda *what: self.ended.append((rank, *what)),
        )
        watch.folder = folder
        return watch


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    activity.enter("data", 6)
    return Shared(tmp_path / "hang", monkeypatch)


def test_the_first_that_reaches_the_limit_requests_and_the_lowest_that_answers_ends_the_run(
    shared: Shared, tmp_path: Path
) -> None:
    """Rank 0 is stopped: rank 1 reports, with its own stack. What rank 0 said before is known."""
    shared.statuses = {0: at(0, "forward", seconds=0.1), 1: at(1, "forward", seconds=0.1)}
    shared.watches[0].poll()
    shared.watches[1].poll()
    assert not shared.ended and not (tmp_path / "hang").exists()
    shared.statuses[1] = waits(1)
    shared.watches[1].poll()
    (rank, message, silent), folder = shared.ended[0], tmp_path / "hang"
    assert (rank, silent) == (1, [0])
    assert message.startswith(
        "Rank 0 is missing at step 7: it does not answer and last reported step 7, phase forward;"
    )
    assert "rank 1 has waited 600 s" in message and "training.ddp_timeout" in message and "report.md" in message
    assert json.loads((folder / "report.json").read_text())["missing"][0]["rank"] == 0
    assert "test_hang.py" in (folder / "rank-1.txt").read_text() and not (folder / "rank-0.txt").exists()


def test_a_rank_answers_the_request_of_another(shared: Shared, tmp_path: Path) -> None:
    """Rank 0 is in its loader, and the lowest that answers: it ends the run and names itself."""
    shared.statuses = {0: at(0, "data"), 1: waits(1)}
    threads = [threading.Thread(target=watch.poll) for watch in reversed(shared.watches)]
    hang.ANSWER_SECONDS = 10.0  # until both have answered
    threads[0].start()
    while not shared.store.check([hang.REQUEST]):
        pass
    threads[1].start()
    for thread in threads:
        thread.join()
    assert [one[0] for one in shared.ended] == [0] and "Rank 0 is missing at step 7, phase data" in shared.ended[0][1]
    assert {path.name for path in (tmp_path / "hang").iterdir()} >= {"rank-0.txt", "rank-1.txt", "report.md"}


def test_a_slow_save_is_reported_again_only_after_the_limit(
    shared: Shared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared.statuses = {0: at(0, "saving", seconds=1), 1: waits(1, "barrier", training=False)}
    shared.store.set(f"{hang.ANSWER}/1/0", at(0, "saving", seconds=5000).to_json())
    other = shared.watches[1]
    other.poll()
    assert not shared.ended  # rank 0 has answered and is the one to report
    shared.watches[0].poll()
    assert not shared.ended
    assert "warning: rank 0 keeps the others waiting after step 7, phase saving" in capfd.readouterr().err
    request = shared.store.get(hang.REQUEST)
    shared.statuses[1] = at(1, collective="barrier", waited=1.9 * LIMIT)
    other.poll()
    assert shared.store.get(hang.REQUEST) == request
    shared.statuses[1] = at(1, collective="barrier", waited=2 * LIMIT)
    other.poll()
    assert shared.store.get(hang.REQUEST) != request


def test_a_long_phase_is_reported_once_and_ends_nothing(
    shared: Shared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared.statuses = {0: at(0, "data", seconds=121), 1: at(1, "data", seconds=1)}
    shared.watches[0].poll()
    assert json.loads((tmp_path / "hang" / "report.json").read_text())["kind"] == SLOW and not shared.ended
    assert "The run continues" in capfd.readouterr().err
    request = shared.store.get(hang.REQUEST)
    shared.watches[0].poll()
    assert shared.store.get(hang.REQUEST) == request and not capfd.readouterr().err
    activity.enter("data", 7)
    shared.watches[0].poll()
    assert shared.store.get(hang.REQUEST) != request


def test_a_single_rank_is_followed_while_it_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(hang, "SLOW_SECONDS", 0.0)
    with hang.reporting(tmp_path / "hang"):
        while not (tmp_path / "hang" / "report.md").exists():
            pass
    assert "test_hang.py" in (tmp_path / "hang" / "rank-0.txt").read_text()


def test_a_host_collective_is_seen_while_it_waits() -> None:
    watch = hang.Watch(
        rank=0,
        world_size=1,
        store=HashStore(),
        limit=LIMIT,
        setting=None,
        read_activity=lambda rank: None,
        fail=lambda *what: None,
    )
    activity.enter("saving", 3)
    with rank_status.waiting("barrier"):
        inside = watch.status()
    assert (inside.collective, inside.phase, inside.step, inside.training) == ("barrier", "saving", 3, False)
    assert watch.status().collective is None


def test_the_flight_recorder_writes_beside_the_report_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/")
    hang.send_flight_records_to(tmp_path)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    hang.send_flight_records_to(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "x")
