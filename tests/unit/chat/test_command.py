"""Tests of finetune/chat/command.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune import chat


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--prompts cannot be read: "),
        (b"", "--prompts has no prompt: "),
        (b" \n\n", "--prompts has no prompt: "),
        (b"good\nbad \xff\n", "not UTF-8: .*, line 2"),
        (("cat " * 2000).encode(), r"--prompts, prompt 1: the prompt is too long: .* has 1,024"),
    ],
)
def test_prompts_that_cannot_be_answered(
    run: Path, tmp_path: Path, content: bytes | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.txt"
    if content is not None:
        file.write_bytes(content)
    assert chat.main([str(run), "--prompts", str(file)]) == 2
    printed = capsys.readouterr().err
    assert re.search(expected, printed) and printed.count("\n") == 1, printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--raw", "--template"], "--raw and --template"),
        (["--raw", "--system", "x"], "--raw and --system"),
        (["--temperature", "-1"], "expected a number of at least 0"),
        (["--max-new-tokens", "0"], "at least 1"),
        (["--promts", "x"], "Nearest is --prompts"),
        (["--prompts", "x", "--score", "y"], "--prompts and --score are both given"),
        (["--metric", "own:f"], "--metric is for --score"),
        (["--score", "y", "--metric", "own.py"], "--metric must be MODULE:FUNCTION"),
        (["--score", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_options_that_are_wrong(run: Path, arguments: list[str], expected: str, capsys: Any) -> None:
    assert chat.main([str(run), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_the_commands_that_serve_an_adapter(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is loaded. vLLM takes the chat template and the end tokens of the base unless it is given the run's."""
    edit = run / "adapter_config.json"
    content = edit.read_text()
    edit.write_text(json.dumps(json.loads(content) | {"r": 17}))
    try:
        assert chat.main([str(run), "--serve"]) == 0
    finally:
        edit.write_text(content)
    beside, merged, loses, check = capsys.readouterr().out.splitlines()
    base = json.loads(content)["base_model_name_or_path"]
    assert f"vllm serve {base} --enable-lora --max-lora-rank 32 --lora-modules NAME={run}" in beside
    assert beside.endswith(f"--chat-template {run}/chat_template.jinja --generation-config {run}")
    assert f"finetune export {run} --to merged" in merged and "two fifths" in loses and "--check-server" in check
