"""Each planted fault in a correct conversion is found by the witness, which shares no code with the converter."""

from __future__ import annotations

import json
import sys

import pytest

from tests.helpers import ROOT
from tests.notebooks.oracle import faults as witness_faults
from tests.notebooks.oracle import sandbox
from tests.notebooks.oracle.marks import confined


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """For each pair: what the witness says to the correct conversion, and to each fault."""
    found = {}
    for name in witness_faults.PAIRS:
        command = [sys.executable, str(ROOT / "tests" / "notebooks" / "oracle" / "faults.py"), name]
        done = sandbox.run(command, seconds=500, output=2**20, environment={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.errors.decode()[-2000:]
        found[name] = json.loads(done.output)
    return found


@confined
@pytest.mark.parametrize("pair", witness_faults.PAIRS)
def test_the_correct_conversion_passes(pair: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[pair]["right"] == ""


@confined
@pytest.mark.parametrize("pair", witness_faults.PAIRS)
def test_each_fault_is_found(pair: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert not [name for name in witness_faults.PAIRS[pair].faults if not outcomes[pair][name]]
    assert set(outcomes[pair]) == {"right", *witness_faults.PAIRS[pair].faults}
