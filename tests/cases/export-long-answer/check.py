import json
from pathlib import Path
from unittest import mock

from finetune import cli
from finetune.export import verify

LONG = "runs<end_of_turn>" * 24
ANSWER = {"expected": LONG, "found": LONG, "tokens": 24, "outcome": "equal"}
FINDING = {"passed": True, "answers": [ANSWER]}


def check(folder: Path, output: str) -> None:
    """The answers are kept as they are, and generation stops at the template's end of turn as well."""
    with mock.patch.object(verify, "run", lambda job: FINDING):  # the check itself needs a process of its own
        assert cli.main(["export", "out", "--to", "merged", "--out", "merged"]) == 0
    kept = json.loads((folder / "merged" / "export.json").read_text())["verification"]
    assert kept.items() >= FINDING.items(), kept
    tokens = json.loads((folder / "merged" / "tokenizer.json").read_text())["added_tokens"]
    ids = {one["content"]: one["id"] for one in tokens}
    content = json.loads((folder / "merged" / "generation_config.json").read_text())
    assert content["eos_token_id"] == [ids["<eos>"], ids["<end_of_turn>"]]
