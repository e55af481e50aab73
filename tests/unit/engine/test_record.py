"""run.json: written whole, and not before a run has begun."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.engine.record import RunRecord


def test_a_run_that_failed_before_it_began_leaves_no_record(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.fail("too early")
    assert list(tmp_path.iterdir()) == []
    record.update(status="running")
    record.fail("boom")
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "failed", "error": "boom"}
