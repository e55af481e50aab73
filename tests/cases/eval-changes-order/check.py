import json
from pathlib import Path


def check(folder: Path, output: str) -> None:
    resumed, evaluated = (json.loads((folder / name / "run.json").read_text()) for name in ("alone", "evaluated"))
    first = json.loads((folder / "alone" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in first if "loss" in entry] == evaluated["losses"]
    assert resumed["plan"] == evaluated["plan"] and resumed["steps"] == 5 and resumed["eval_loss_after"] is not None
