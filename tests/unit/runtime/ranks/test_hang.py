"""What a hang report says of the ranks, and how their watches agree on it. In this process: the watches are called in
turn on one store, as their threads would."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from finetune.runtime.ranks import activity, hang
from finetune.runtime.ranks.hang import SLOW, TIMEOUT, Report, Standing

LIMIT = 600.0


def at(rank: int, phase: str = "backward", step: int = 7, seconds: float = LIMIT, **others: Any) -> Standing:
    return Standing(rank=rank, step=step, phase=phase, seconds=seconds, **others)


def waits(rank: int, collective: str = "nccl:all_reduce", training: bool = True, **others: Any) -> Standing:
    return at(rank, collective=collective, waited=LIMIT, training=training, **others)


def report(*answered: Standing, silent: dict[int, Standing | None] | None = None, kind: str = TIMEOUT) -> Report:
    silent = silent or {}
    return Report(kind=kind, world_size=len(answered) + len(silent), answered=answered, silent=silent, limit=LIMIT)


def test_the_rank_that_the_others_wait_for_is_missing() -> None:
    found = report(waits(0), at(1, "data"), waits(2))
    assert found.missing == [1] and not found.working
    assert found.sentence() == (
        "rank 1 is missing at step 7, phase data, where it has been for 600 s; ranks 0, 2 have waited 600 s for it in "
        "nccl:all_reduce at step 7, phase backward"
    )
    content = found.to_dict()
    assert content["missing"] == [{"rank": 1, "step": 7, "phase": "data", "seconds": 600.0, "answered": True}]
    assert (content["step"], content["collective"]) == (7, "nccl:all_reduce")
    assert [one["rank"] for one in content["answered"]] == [0, 1, 2]


def test_a_rank_that_does_not_answer_is_missing() -> None:
    """Its last report is older than what the wait of the others shows: it has come to their step."""
    found = report(waits(0), silent={1: at(1, "forward", step=5, old=True), 2: None})
    assert found.missing == [1, 2]
    assert [(one["rank"], one["step"], one["phase"]) for one in found.to_dict()["missing"]] == [
        (1, 7, "forward"),
        (2, 7, None),
    ]
    assert "rank 1 is missing at step 7: it does not answer and last reported step 5, phase forward" in found.sentence()
    assert "rank 2 is missing at step 7: it does not answer and never reported" in found.sentence()
    page = found.markdown()
    assert "| 1 | **no** | 5 | forward (last report) |" in page and "| 0 | yes | 7 | backward | 600 |" in page


@pytest.mark.parametrize(
    ("answered", "silent", "working"),
    [
        ([at(0, "saving", seconds=5000), waits(1, "barrier", training=False)], {}, True),
        ([at(0, "loading the model", seconds=5000), waits(1, "barrier", training=False)], {}, True),
        ([at(0, "evaluation", seconds=3), waits(1, "all_reduce", training=False)], {}, True),
        ([at(0, "evaluation", seconds=LIMIT), waits(1, "all_reduce", training=False)], {}, False),
        ([waits(1, "barrier", training=False)], {0: at(0, "saving", seconds=5000)}, False),
        ([at(0, "saving", seconds=5000), waits(1)], {}, False),
        ([waits(0, "barrier", training=False), waits(1, "barrier", training=False)], {}, False),
    ],
    ids=["saves", "loads", "gets on", "is stuck", "saves, silent", "training waits", "all wait"],
)
def test_who_may_be_waited_for(answered: list[Standing], silent: dict[int, Any], working: bool) -> None:
    assert report(*answered, silent=silent).working is working


def test_ranks_in_different_collectives_and_in_one_that_does_not_complete() -> None:
    crossed = report(waits(0, "barrier", phase="saving", step=6, training=False), waits(1))
    assert crossed.missing == []
    assert crossed.sentence() == (
        "the ranks wait for each other in different collectives: rank 0 in barrier (after step 6, phase saving); "
        "rank 1 in nccl:all_reduce (step 7, phase backward)"
    )
    assert "all ranks have waited 600 s in nccl:all_reduce" in report(waits(0), waits(1)).sentence()


def test_a_phase_is_long_after_two_minutes_or_twenty_steps() -> None:
    assert hang.slow_after([]) == hang.slow_after([1.0] * 50) == 120
    assert hang.slow_after([9.0, 10.0, 300.0]) == 200
    times = hang._StepTimes()
    for step, since in [(-1, 1.0), (2, 10.0), (2, 12.0), (4, 20.0)]:
        times.note(activity.Activity("data", step, since))
    assert times.seconds == [5.0]


# --- the protocol ---------------------------------------------------------------------------------------------------


class Shared:
    """Two watches of one run, what they are doing, and how the run ended."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.standings, self.ended = hang._OwnStore(), {0: at(0), 1: at(1)}, []
        monkeypatch.setattr(hang, "ANSWER_SECONDS", 0.0)
        monkeypatch.setattr(hang.Watch, "standing", lambda watch: self.standings[watch.rank])
        self.watches = [self.watch(rank, folder) for rank in (0, 1)]

    def watch(self, rank: int, folder: Path) -> hang.Watch:
        watch = hang.Watch(
            rank=rank,
            world_size=2,
            store=self.store,
            limit=LIMIT,
            setting="training.ddp_timeout",
            store_rank=0,
            look=lambda other: None,
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
    shared.standings = {0: at(0, "forward", seconds=0.1), 1: at(1, "forward", seconds=0.1)}
    shared.watches[0].round()
    shared.watches[1].round()
    assert not shared.ended and not (tmp_path / "hang").exists()
    shared.standings[1] = waits(1)
    shared.watches[1].round()
    (rank, message, silent, reachable), folder = shared.ended[0], tmp_path / "hang"
    assert (rank, silent, reachable) == (1, [0], True)
    assert message.startswith(
        "Rank 0 is missing at step 7: it does not answer and last reported step 7, phase forward;"
    )
    assert "rank 1 has waited 600 s" in message and "training.ddp_timeout" in message and "report.md" in message
    assert json.loads((folder / "report.json").read_text())["missing"][0]["rank"] == 0
    assert "test_hang.py" in (folder / "rank-1.txt").read_text() and not (folder / "rank-0.txt").exists()


def test_a_rank_answers_the_request_of_another(shared: Shared, tmp_path: Path) -> None:
    """Rank 0 is in its loader, and the lowest that answers: it ends the run and names itself."""
    shared.standings = {0: at(0, "data"), 1: waits(1)}
    threads = [threading.Thread(target=watch.round) for watch in reversed(shared.watches)]
    hang.ANSWER_SECONDS = 10.0  # until both have answered
    threads[0].start()
    while not shared.store.check([hang._REQUEST]):
        pass
    threads[1].start()
    for thread in threads:
        thread.join()
    assert [one[0] for one in shared.ended] == [0] and "Rank 0 is missing at step 7, phase data" in shared.ended[0][1]
    assert {path.name for path in (tmp_path / "hang").iterdir()} >= {"rank-0.txt", "rank-1.txt", "report.md"}


def test_a_slow_save_is_reported_again_only_after_the_limit(
    shared: Shared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared.standings = {0: at(0, "saving", seconds=1), 1: waits(1, "barrier", training=False)}
    shared.store.set(f"{hang._ANSWER}/1/0", at(0, "saving", seconds=5000).to_json())
    other = shared.watches[1]
    other.round()
    assert not shared.ended and other._next_limit == 2 * LIMIT  # rank 0 has answered and is the one to report
    shared.watches[0].round()
    assert not shared.ended
    assert "warning: rank 0 keeps the others waiting after step 7, phase saving" in capfd.readouterr().err
    request = shared.store.get(hang._REQUEST)
    other.round()
    assert shared.store.get(hang._REQUEST) == request


def test_a_long_phase_is_reported_once_and_ends_nothing(
    shared: Shared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared.standings = {0: at(0, "data", seconds=121), 1: at(1, "data", seconds=1)}
    shared.watches[0].round()
    assert json.loads((tmp_path / "hang" / "report.json").read_text())["kind"] == SLOW and not shared.ended
    assert "The run continues" in capfd.readouterr().err
    request = shared.store.get(hang._REQUEST)
    shared.watches[0].round()
    assert shared.store.get(hang._REQUEST) == request and not capfd.readouterr().err
    activity.enter("data", 7)
    shared.watches[0].round()
    assert shared.store.get(hang._REQUEST) != request


def test_a_single_rank_is_followed_while_it_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(hang, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(hang, "_watch", None)
    with hang.reporting(tmp_path / "hang"):
        while not (tmp_path / "hang" / "report.md").exists():
            pass
    assert "test_hang.py" in (tmp_path / "hang" / "rank-0.txt").read_text()


# --- where a rank is --------------------------------------------------------------------------------------------------


def test_a_host_collective_is_seen_while_it_waits() -> None:
    watch = hang.Watch(
        rank=0,
        world_size=1,
        store=hang._OwnStore(),
        limit=LIMIT,
        setting=None,
        store_rank=None,
        look=lambda rank: None,
        fail=lambda *what: None,
    )
    activity.enter("saving", 3)
    with hang.waiting("barrier"):
        inside = watch.standing()
    assert (inside.collective, inside.phase, inside.step, inside.training) == ("barrier", "saving", 3, False)
    assert watch.standing().collective is None


def test_the_oldest_collective_of_the_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other groups, nor those that have completed; by this process's clock."""

    def entry(number: int, group: str = "default_pg", retired: bool = False) -> dict[str, Any]:
        return {
            "record_id": number,
            "profiling_name": f"nccl:{number}",
            "process_group": ["0", group],
            "retired": retired,
            "state": "scheduled",
        }

    entries = [entry(1, retired=True), entry(2, "undefined"), entry(3), entry(4)]
    monkeypatch.setattr(hang, "_recorded", lambda: entries)
    clock = [100.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: clock[0])
    pending = hang.PendingCollectives()
    assert pending.oldest() == ("nccl:3", 0.0)
    clock[0] = 130.0
    entries.append(entry(5))
    assert pending.oldest() == ("nccl:3", 30.0)
    entries[2] = entry(3, retired=True)
    entries[3] = entry(4, retired=True)
    assert pending.oldest() == ("nccl:5", 0.0)


def test_the_activity_of_a_process_can_be_read_without_its_help() -> None:
    descriptor = activity.share()
    if descriptor is None:
        pytest.skip("this system has no such memory")
    activity.enter("forward", 12)
    found = activity.of_process(os.getpid(), descriptor)
    assert found is not None and found == activity.current() and (found.phase, found.step) == ("forward", 12)
    assert activity.of_process(os.getpid(), 10**6) is None
    activity._shared = None
    os.close(descriptor)


def test_the_flight_recorder_writes_beside_the_report_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/")
    hang._send_flight_records_to(tmp_path)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    hang._send_flight_records_to(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "x")
