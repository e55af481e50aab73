"""Tests of finetune/chat/batch.py."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.chat import score
from tests.helpers import tiny
from tests.helpers.chat import LONGEST, PROMPTS, answered, asked, reference


def test_answers_equal_those_of_the_merged_model(run: Path, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    """Greedy, of the trained and of the base model; together and one at a time; with the system message of the run."""
    together = answered(tmp_path, run, "--prompts", str(prompts), "--compare", "--batch-size", "3")
    alone = answered(tmp_path, run, "--prompts", str(prompts), "--compare", "--batch-size", "1")
    assert together["answers"] == alone["answers"]
    assert [one["prompt"] for one in together["answers"]] == PROMPTS
    assert together["system"] == "Be brief." and together["sampling"] is None
    for one in together["answers"]:
        assert one["answer"]["text"] == reference(tiny_model, run, asked(one["prompt"]))
        assert one["base"]["text"] == reference(tiny_model, None, asked(one["prompt"]))
        assert one["answer"]["text"] != one["base"]["text"]
    assert len({one["answer"]["text"] for one in together["answers"]}) == len(PROMPTS)


def test_an_adapter_that_trains_biases_is_compared_with_the_untouched_base(
    copy: Path, tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    """PEFT cannot switch such an adapter off: the base model is loaded beside it."""
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"bias": "lora_only"}))
    found = answered(tmp_path, copy, "--prompts", str(prompts), "--compare")["answers"][0]
    assert found["base"]["text"] == reference(tiny_model, None, asked(PROMPTS[0]))
    assert found["answer"]["text"] == reference(tiny_model, copy, asked(PROMPTS[0]))


def test_a_full_model_is_compared_with_the_model_it_was_trained_from(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    after = tiny.make_model(tmp_path / "full", seed=3)
    record = {"status": "done", "dtype": "float32", "config": {"model": {"model_name_or_path": str(tiny_model)}}}
    (after / "run.json").write_text(json.dumps(record))
    found = answered(tmp_path, after, "--prompts", str(prompts), "--compare")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    assert found["kind"] == "model" and found["system"] is None
    assert found["answers"][0]["answer"]["text"] == reference(after, None, messages, tiny.CHAT_TEMPLATE)
    assert found["answers"][0]["base"]["text"] == reference(tiny_model, None, messages, tiny.CHAT_TEMPLATE)


def test_a_prompt_from_stdin_without_template_is_continued_as_it_is(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat ")))
    found = answered(tmp_path, run, "--prompts", "-", "--raw")
    assert found["answers"][0]["answer"]["text"] == reference(
        tiny_model, run, [{"role": "user", "content": "the cat "}], "{{ messages[0]['content'] }}"
    )
    assert found["chat_template"] is False and found["system"] is None


def test_rows_are_scored_as_plain_transformers_would(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two of three right answers are the trained model's, and one is the base's; rows without answers are left out."""
    monkeypatch.chdir(tmp_path)
    right = [reference(tiny_model, run, asked(one)) for one in PROMPTS[:2]]
    right.append(reference(tiny_model, None, asked(PROMPTS[2])))
    own = "def length(given, right): return {'characters': sum(map(len, given)) / len(given)}\n"
    (tmp_path / "own.py").write_text(own + "def pairs(given, right): return max(len(given) - 1, 1)\n")
    pairs = zip([*PROMPTS, PROMPTS[0]], [*right, ""], strict=True)
    rows = [{"messages": [asked(prompt)[1], {"role": "assistant", "content": one}]} for prompt, one in pairs]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--score", "rows.jsonl", "--compare", "--metric")
    found = answered(tmp_path, run, *given, "own:length")
    exact, own = found["scores"]["exact match"], found["scores"]["characters"]
    assert [one["reference"] for one in found["answers"]] == right
    assert (exact["score"], exact["base"], exact["rows"]) == (2 / 3, 1 / 3, 3)
    assert exact["interval"] == pytest.approx([0.2077, 0.9385], abs=1e-4)  # of Wilson, 1927
    assert own["score"] == pytest.approx(sum(len(one["answer"]["text"]) for one in found["answers"]) / 3)
    printed = capsys.readouterr().out
    assert "exact match 0.6667 [0.208, 0.939], base model 0.3333" in printed and "Left out: 1 row" in printed
    assert answered(tmp_path, run, *given, "own:pairs")["scores"]["pairs"]["interval"] is None  # no mean of the rows'


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Of 1,000 samples, 95 %, within what chance allows."""
    draw, covered = random.Random(0), Counter[str]()
    for _ in range(1000):
        known = [(draw.random(), draw.random(), draw.random() < 0.5) for _ in range(40)]
        rows = [float(one < 0.8) for one, _, _ in known]
        base = [float((one if same else other) < 0.6) for one, other, same in known]
        found = {"share": (score.interval(rows), 0.8), "difference": (score.difference(rows, base), 0.2)}
        found["mean"] = (score.interval([draw.gauss(3, 1) for _ in range(8)]), 3)
        covered.update(name for name, (bounds, truth) in found.items() if bounds and bounds[0] <= truth <= bounds[1])
    assert len(covered) == 3 and all(930 <= one <= 975 for one in covered.values()), covered
    assert score.interval([0.0] * 10)[0] == 0 and score.difference([1.0] * 10, [0.0] * 10)[1] == 1  # type: ignore[index]


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.campaign
def test_unsloth_gives_the_same_answers(run: Path, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    """In a process of its own: Unsloth must be imported before transformers."""
    target = tmp_path / "answers.json"
    words = [sys.executable, "-m", "finetune", "chat", str(run), "--prompts", str(prompts), "--compare"]
    words += ["--backend", "unsloth", "--max-new-tokens", str(LONGEST), "--json", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for one in json.loads(target.read_text())["answers"]:
        assert one["answer"]["text"] == reference(tiny_model, run, asked(one["prompt"]))
        assert one["base"]["text"] == reference(tiny_model, None, asked(one["prompt"]))
