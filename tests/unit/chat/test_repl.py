"""Tests of finetune/chat/repl.py."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.helpers.chat import PROMPTS, TEMPLATE, answered, asked, generator, reference


def test_a_turn_that_ends_in_plain_text(copy: Path) -> None:
    """A tokenizer without a token for the end of a turn: its text ends the answer, in a batch and while streaming."""
    from finetune.chat.repl import Streamer

    whole = generator(copy)
    ids = [whole.encode(whole.opening(prompt)) for prompt in PROMPTS]
    full = [one.text for one in whole.answer(ids)]
    (copy / "chat_template.jinja").write_text(TEMPLATE.replace("<|im_end|>", "</turn>"))
    found = generator(copy)
    assert found.stop_string == "</turn>" and found.stops == whole.stops
    found.stop_string = full[0][3:5]
    cut = [one.text for one in found.answer(ids)]
    assert cut == [text.partition(found.stop_string)[0] for text in full]
    shown: list[str] = []
    (answer,) = found.answer([ids[0]], streamer=Streamer(found, shown.append))
    assert answer.finished and shown[-1] == answer.text == full[0][:3]
    assert all(answer.text.startswith(text) for text in shown)


def test_a_conversation_remembers(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side has its own history; what is streamed is the answer; control characters do not reach the terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nsing\n/clear\nsing\n/exit\nnever\n"))
    turns = answered(tmp_path, run, "--compare")["turns"]
    assert [(turn["conversation"], turn["prompt"]) for turn in turns] == [(1, "the cat"), (1, "sing"), (2, "sing")]
    printed = capsys.readouterr().out
    for side, adapter in (("answer", run), ("base", None)):
        first = reference(tiny_model, adapter, asked("the cat"))
        second = [*asked("the cat"), {"role": "assistant", "content": first}, {"role": "user", "content": "sing"}]
        expected = [first, reference(tiny_model, adapter, second), reference(tiny_model, adapter, asked("sing"))]
        assert [turn[side]["text"] for turn in turns] == expected
        for text in expected:
            shown = "".join(one if ord(one) >= 32 or one in "\n\t" else f"\\x{ord(one):02x}" for one in text)
            assert f"{'base' if side == 'base' else 'trained'}: {shown}\n" in printed
    assert not any(ord(one) < 32 and one not in "\n\t" for one in printed)


def test_a_message_that_is_too_long_is_reported_and_forgotten(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("cat " * 2000 + "\nsing\n"))
    turns = answered(tmp_path, run)["turns"]
    assert [turn["prompt"] for turn in turns] == ["sing"]
    assert "the prompt is too long: " in capsys.readouterr().out
