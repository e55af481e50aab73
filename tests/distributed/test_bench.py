"""`finetune bench` on two gloo ranks: the shipped commands, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.bench import launch as ranks
from finetune.errors import RunError
from finetune.measure import measurements
from tests.helpers import launch

pytestmark = pytest.mark.process


def bench(folder: Path, *words: str, module: str = "finetune.bench") -> dict[str, Any]:
    """Run the command and return its --json."""
    given = [*words, "--json", str(folder / "bench.json")]
    done = launch.command_with_ranks(module, given, cache=folder, kind="transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "bench.json").read_text()) | {"said": done.stdout}


def test_collectives(tmp_path: Path) -> None:
    found = bench(tmp_path, "comm", "--sizes", "4096,65536", "--runs", "2", "--steps", "4")
    assert (found["kind"], found["world_size"], found["backend"]) == ("comm", 2, "gloo")
    assert found["environment"] == {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    assert found["hardware"]["device"] == "cpu"
    assert list(found["collectives"]) == ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    for name, rows in found["collectives"].items():
        assert [row["bytes"] for row in rows] == [4096, 65536]
        for row in rows:
            seconds = row["seconds"]
            assert seconds["runs"] == 2 and seconds["n"] + seconds["removed"] == 8 and len(seconds["ci95"]) == 2
            assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / seconds["median"] / 1e9)
            factor = 1.0 if name in ("all_reduce", "broadcast") else 0.5  # of two ranks
            assert row["busbw_gb_s"] == pytest.approx(factor * row["algbw_gb_s"])
    assert "reduce-scatter" in found["said"] and "65,536" in found["said"] and "gloo" in found["said"]
    assert not list(tmp_path.rglob("comm-gloo-*"))  # two sizes are no curve to predict runs from


@pytest.mark.campaign
def test_a_whole_curve_is_kept_for_the_scores_of_runs(tmp_path: Path) -> None:
    bench(tmp_path, "comm", "--runs", "1", "--steps", "2")
    (kept,) = tmp_path.rglob("comm-gloo-*-2.json")
    assert measurements.read_comm(kept)[2].points[0][0] == 4096


DIES = """
import os, signal
from finetune.runtime.ranks import distributed
from finetune.bench import comm_rank

def measure(request):
    if distributed.ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm_rank.barrier()

raise SystemExit(comm_rank.run_rank(measure))
"""


@pytest.mark.campaign
def test_a_rank_that_dies_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    environment = launch.environment(tmp_path)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    with pytest.raises(RunError, match=r"^rank 1 of 2 died \(SIGKILL\); the others were stopped$"):
        ranks.ranks("dies", 2, {}, title="a rank that dies", environment=environment)
