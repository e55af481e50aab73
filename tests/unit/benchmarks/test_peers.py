"""Tests of benchmarks/peers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest


def test_processes_behind_a_gate_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None before all are there, of which one has ended before it came, and one at a time."""
    from benchmarks.peers.rank import Gate

    folder, inside, most = tmp_path / "gate", [0], [0]
    folder.mkdir()
    gates = []
    for name in ("one", "two"):
        monkeypatch.setenv("BENCHMARK_GATE", f"{folder}:3:{name}")
        gates.append(Gate())

    def measure(gate: Gate) -> None:
        gate.enter()
        inside[0] += 1
        most[0] = max(most[0], inside[0], 9 * (len(list(folder.iterdir())) < 3))
        inside[0] -= 1
        gate.leave()

    threads = [threading.Thread(target=measure, args=(gate,)) for gate in gates]
    for one in threads:
        one.start()
    assert most == [0]
    (folder / "three").touch()
    for one in threads:
        one.join(timeout=60)
    assert most == [1]
    monkeypatch.delenv("BENCHMARK_GATE")
    Gate().enter()  # without one, nothing waits
