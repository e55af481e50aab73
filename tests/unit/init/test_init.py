"""`finetune init`: what it writes loads and trains, and it replaces nothing unasked."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config import load
from finetune.init import command, detect
from finetune.runtime.machine.hardware import Hardware
from tests.helpers import launch, tiny

ROWS = {
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
}
H200 = Hardware(
    device="cuda",
    name="NVIDIA H200",
    count=2,
    memory_gib=139.8,
    peak_bf16_tflops=989.0,
    cpu_cores=16,
    ram_gib=128.0,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return tmp_path


def write_rows(path: Path, row: dict[str, Any], count: int = detect.ENOUGH_ROWS) -> Path:
    path.write_text((json.dumps(row) + "\n") * count)
    return path


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    keyboard = io.StringIO("".join(f"{line}\n" for line in lines))
    keyboard.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", keyboard)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("format", ROWS)
def test_what_it_writes_loads(tiny_model: Path, here: Path, format: str, method: str) -> None:
    write_rows(here / "rows.jsonl", ROWS[format])
    given = ["--model", str(tiny_model), "--data", "rows.jsonl", "--method", method, "--json", "found.json"]
    assert command.main([*given, "--output-dir", "runs/a: b"]) == 0
    config = load(["--config", "my.yaml"])
    assert config.model.model_name_or_path == str(tiny_model) and config.data.train_file == "rows.jsonl"
    assert config.training.output_dir == "runs/a: b" and config.data.eval_fraction == detect.HELD_OUT
    assert (config.model.load_in_4bit, config.model.full_finetuning) == (method == "qlora", method == "full")
    found = json.loads((here / "found.json").read_text())
    assert found["rows"]["format"] == format and found["model"]["has_template"]
    text = (here / "my.yaml").read_text()
    assert found["commands"]["train"] in text and found["rows"]["description"] in text
    assert all(
        "#" in line for line in text.splitlines() if ":" in line and not line.endswith(":") and "_file" not in line
    )


@pytest.mark.process
@pytest.mark.campaign
def test_what_it_writes_trains(tiny_model: Path, here: Path) -> None:
    tiny.make_rows(here / "rows.jsonl", detect.ENOUGH_ROWS)
    assert command.main(["--model", str(tiny_model), "--data", "rows.jsonl"]) == 0
    done = launch.run("1 rank", ["--config", str(here / "my.yaml"), "--training.max_steps", "2"], cache=here)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((here / "outputs" / "my" / "run.json").read_text())["status"] == "done"


def test_questions_are_asked_again_until_the_answer_is_valid(
    tiny_model: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(here / "qa.jsonl", {"question": "a", "answer": "b"}, 5)
    type_in(monkeypatch, "./nothing", str(tiny_model), "rows.jsonl", "qa.jsonl", "lorra", "", "")
    assert command.main(["--columns", "instruction=question,output=answer"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in ("no such model folder: ./nothing", "rows.jsonl does not exist", "unknown method: lorra"):
        assert text in said
    config = load(["--config", "my.yaml"])
    assert config.data.columns == {"instruction": "question", "output": "answer"}
    assert config.data.eval_fraction == 0 and config.training.output_dir == "outputs/my"


@pytest.mark.parametrize(
    # Steps of an epoch are rows / batch; 60 in all, or 5 epochs; of those 20 log lines, 5 evaluations, one checkpoint.
    ("rows", "batch", "epochs", "logging", "evaluation", "saving", "held_out"),
    [
        (16, 4, 5, 1, None, 10, 0.0),  # 4 steps an epoch
        (100, 4, 3, 3, 14, 35, 0.1),  # about 90 rows: 23 steps an epoch
        (500, 16, 2, 3, 13, 31, 0.02),  # about 490 rows: 31 steps an epoch
        (2000, 16, 1, 6, 25, 62, 0.02),  # about 1960 rows: 123 steps
        (21_000, 16, 1, 10, 100, 500, 0.02),  # not counted to the end
    ],
)
def test_the_length_fits_the_rows(
    tiny_model: Path,
    here: Path,
    rows: int,
    batch: int,
    epochs: int,
    logging: int,
    evaluation: int | None,
    saving: int,
    held_out: float,
) -> None:
    write_rows(here / "rows.jsonl", ROWS["messages"], rows)
    assert command.main(["--model", str(tiny_model), "--data", "rows.jsonl"]) == 0
    config = load(["--config", "my.yaml"])
    training = config.training
    assert (training.global_batch_size, training.num_train_epochs) == (batch, epochs)
    assert (config.logging.logging_steps, training.save_steps) == (logging, saving)
    assert training.learning_rate == (2e-4 if rows >= 2000 else 5e-4)
    assert (training.eval_steps or None, config.data.eval_fraction) == (evaluation, held_out)


def test_the_length_of_raw_text_is_counted_in_pieces(tiny_model: Path, here: Path) -> None:
    (here / "book.txt").write_text("word " * 64_000)  # 320,000 characters are 40 pieces of 4 x 2,048
    (here / "poems.txt").write_text("word " * 80 + "\n\n" + "word " * 40)  # 400 and 200 characters
    found = detect.rows("poems.txt")
    assert found.count == 2 and found.described == (
        "2 documents of raw text, divided by blank lines (data.format: document keeps a file whole), "
        "about 75 tokens each"
    )
    assert command.main(["--model", str(tiny_model), "--data", "book.txt"]) == 0
    config = load(["--config", "my.yaml"])
    assert (config.training.global_batch_size, config.training.num_train_epochs) == (4, 5)


def test_nothing_is_replaced_unasked(tiny_model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(here / "rows.jsonl", ROWS["text"])
    (here / "my.yaml").write_text("mine")
    given = ["--model", str(tiny_model), "--data", "rows.jsonl"]
    assert command.main(given) == 2
    assert "my.yaml exists" in capsys.readouterr().err and (here / "my.yaml").read_text() == "mine"
    assert command.main(["other.yaml", *given]) == 0
    assert command.main([*given, "--overwrite"]) == 0
    assert (here / "my.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--data", "rows.jsonl"], "--model is missing, and there is no terminal to ask"),
        (["--model", "org/name"], "--data is missing"),
        (["--model", "org/name", "--data", "row.jsonl"], "row.jsonl does not exist"),
        (["--model", "org/name", "--data", "qa.jsonl"], "--columns instruction=question,output=answer"),
        (["--model", "org/name", "--data", "rows.jsonl", "--method", "dpo"], "unknown method: dpo"),
        (["--model", "org/name", "--data", "rows.jsonl", "--columns", "text"], "expected FIELD=COLUMN"),
        (["--model", "empty", "--data", "rows.jsonl"], "a folder with neither config.json"),
        (["config.txt", "--model", "org/name"], "must end in .yaml"),
        (["--modl", "x"], "Nearest is --model"),
    ],
)
def test_mistakes(here: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str) -> None:
    write_rows(here / "rows.jsonl", ROWS["text"])
    write_rows(here / "qa.jsonl", {"question": "a", "answer": "b"})
    (here / "empty").mkdir()
    assert command.main(given) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (here / "my.yaml").exists()


def test_names_of_files_cannot_add_lines(tiny_model: Path, here: Path) -> None:
    odd = here / "rows\ntraining: {max_steps: 1}\n.jsonl"
    write_rows(odd, ROWS["text"])
    assert command.main(["--model", str(tiny_model), "--data", str(odd)]) == 0
    config = load(["--config", "my.yaml"])
    assert config.data.train_file == str(odd) and config.training.max_steps == -1


def test_gpus_found_choose_the_launch_line_and_the_method(
    tiny_model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: H200)
    write_rows(here / "rows.jsonl", ROWS["text"])
    assert command.main(["--model", str(tiny_model), "--data", "rows.jsonl"]) == 0
    text = (here / "my.yaml").read_text()
    assert "accelerate-launch --multi_gpu --num_processes 2 -m finetune.train --config my.yaml" in text
    assert "# Found here: 2 x NVIDIA H200, 140 GiB each" in text
    # 0.8 of 139.8 GiB hold 60.05e9 parameters of two bytes.
    for parameters, method in ((60_000_000_000, "lora"), (60_100_000_000, "qlora")):
        assert detect.method(detect.Model(name="m", parameters=parameters), H200)[0] == method


def test_a_base_model_without_a_template_gets_one(tiny_model: Path, here: Path) -> None:
    base = here / "base"
    shutil.copytree(tiny_model, base)
    for name in detect.TEMPLATE_FILES:
        (base / name).unlink(missing_ok=True)
    file = base / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))
    for format, template in (("messages", "chatml"), ("prompt_completion", None)):
        write_rows(here / "rows.jsonl", ROWS[format])
        assert command.main(["--model", str(base), "--data", "rows.jsonl", "--overwrite"]) == 0
        assert load(["--config", "my.yaml"]).model.chat_template == template


def test_a_name_of_the_hub_is_not_looked_up(here: Path) -> None:
    assert command.main(["--model", "org/name", "--data", "org/rows", "--json", "found.json"]) == 0
    config = load(["--config", "my.yaml"])
    assert (config.model.model_name_or_path, config.data.dataset_name) == ("org/name", "org/rows")
    assert detect.method(detect.Model(name="m"), SimpleNamespace(memory_gib=None))[0] == "lora"  # type: ignore[arg-type]
