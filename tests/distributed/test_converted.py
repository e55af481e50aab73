"""Converted notebooks and scripts of one's own, launched as users do: on one process and on two gloo ranks."""

# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from finetune.convert.command import convert
from tests.helpers import ROOT, launch, tiny

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
QUICK = "qlora_alpaca"  # of these `make test` converts and runs one on two ranks
CONVERTED = ROOT / "notebooks_converted"
KINDS = (".py", ".report.json")


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def test_there_is_a_script_for_each_notebook() -> None:
    assert len(NOTEBOOKS) >= 4
    expected = {path.stem + kind for path in NOTEBOOKS for kind in KINDS}
    assert {path.name for path in CONVERTED.iterdir() if path.is_file()} == expected | {"README.md"}


@pytest.mark.process
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_converted_scripts_are_up_to_date(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.convert import main

    monkeypatch.chdir(ROOT)
    assert main([str(notebook.relative_to(ROOT)), "--no-witness", "--out", str(tmp_path)]) == 0
    for kind in KINDS:
        name = notebook.stem + kind
        assert (tmp_path / name).read_bytes() == (CONVERTED / name).read_bytes(), f"{name}: run `make notebooks`"


# What each script needs to train on this machine: the model and the rows by other names, and a few steps.
LOCAL = {
    "model": r'(model_name=)"[^"]*"',
    "rows": r"load_dataset\([^()]*\)",
    "steps": r"(max_steps|num_train_epochs)=\d+",
    "optimizer": r'optim="[^"]*"',
    "folder": r'output_dir="[^"]*"',
    "bits": r"load_in_4bit=True",
}
_MESSAGES = [{"role": "user", "content": "how many? {n}"}, {"role": "assistant", "content": "{n} birds"}]
ROWS = {
    "full_text": {"text": "one bird sings {n} times in the morning"},
    "lora_messages": {"conversations": [{"from": "human", "value": "how? {n}"}, {"from": "gpt", "value": "{n} birds"}]},
    "multi_turn_responses": {"messages": _MESSAGES},
    "qlora_alpaca": {"instruction": "count {n}", "input": "", "output": "{n} birds"},
}


def local(stem: str, model: Path, folder: Path) -> Path:
    """The converted script with a local model, local rows and four steps; the text of its rows differs."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROWS[stem]).replace("{n}", str(n)) + "\n" for n in range(64)))
    new = {
        "model": rf'\1"{model}"',
        "rows": f'load_dataset("json", data_files="{rows}", split="train")',
        "steps": "max_steps=4",
        "optimizer": 'optim="adamw_torch"',
        "folder": 'output_dir="outputs"',
        "bits": "load_in_4bit=False",
    }
    text = (CONVERTED / f"{stem}.py").read_text(encoding="utf-8")
    for name, pattern in LOCAL.items():
        text, count = re.subn(pattern, new[name], text)
        assert count == 1 or name == "bits", (name, count)
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(one, marks=[] if one.stem == QUICK else [pytest.mark.campaign]) for one in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_converted_script_on_two_ranks_trains_as_on_one(notebook: Path, tiny_model: Path, tmp_path: Path) -> None:
    runs = []
    for how in ("1 rank", "2 ranks"):
        folder = tmp_path / how
        folder.mkdir()
        script = local(notebook.stem, tiny_model, folder)
        done = launch.run(how, [], cache=folder, script=script)
        assert done.returncode == 0, done.stdout[-8000:]
        runs.append(launch.read(folder / "outputs"))
    one, two = runs
    assert [run["world_size"] for run in runs] == [1, 2]
    assert one["batch"]["global_batch_size"] == two["batch"]["global_batch_size"]
    assert len(one["losses"]) == 4 and worst(one["losses"], two["losses"]) < 1e-5


SCRIPT = '''
"""Every function that a script may have. Each notes that it ran, and on which rank."""
import os
from pathlib import Path

from finetune import script

NOTES = Path(__file__).parent / "notes"


def note(what):
    with NOTES.open("a") as file:
        file.write(f"{what} {os.environ.get('RANK', '0')}\\n")


def change_tokenizer(tokenizer):
    note("tokenizer")
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_start|>'", "'<|im_start|>the '")


def build_dataset(tokenizer):
    import datasets

    note("dataset")
    rows = datasets.load_dataset("json", data_files=os.environ["ROWS"], split="train")

    def render(batch):
        return {"text": [tokenizer.apply_chat_template(one, tokenize=False) for one in batch["messages"]]}

    halves = rows.map(render, batched=True).train_test_split(0.2, seed=1)
    return halves["train"], halves["test"]


def change_model(model, tokenizer):
    note("model")
    model.config.motto = tokenizer.eos_token
    if os.environ.get("RANK", "none") == os.environ.get("FAILS"):
        raise KeyError("this rank alone")


def change_trainer(trainer):
    note("trainer")
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            note(f"step-{state.global_step}")

    trainer.add_callback(Watch())


def save(model, tokenizer):
    import time

    import psutil

    others = [one for one in psutil.Process().parent().children() if one.pid != os.getpid()]
    while "RANK" in os.environ and any(one.is_running() and one.status() != "zombie" for one in others):
        time.sleep(0.05)  # the test ends in its time limit where the other rank waits for this one
    note("save")
    model.save_pretrained(NOTES.parent / f"exported-{model.config.motto}")


if __name__ == "__main__":
    hooks = {"tokenizer": change_tokenizer, "dataset": build_dataset, "model": change_model}
    raise SystemExit(script.run(__file__, **hooks, trainer=change_trainer, save=save))
'''
SETTINGS = """
data:
  format: text
  instruction_part: "<|im_start|>the user\\n"
  response_part: "<|im_start|>the assistant\\n"
training: {max_steps: 3, global_batch_size: 4, eval_steps: 2}
logging: {generate_samples: 0}
"""


def run_script(how: str, model: Path, rows: Path, folder: Path, code: int = 0, **extra: str) -> tuple[str, list[str]]:
    """The output and the notes of SCRIPT, sorted."""
    folder.mkdir()
    (folder / "mine.py").write_text(SCRIPT)
    (folder / "mine.yaml").write_text(SETTINGS)
    arguments = ["--model.model_name_or_path", str(model), "--training.output_dir", str(folder / "out")]
    environment = {"ROWS": str(rows), "HF_DATASETS_CACHE": str(folder / "datasets"), **extra}
    done = launch.run(how, arguments, cache=folder, script=folder / "mine.py", **environment)
    assert (done.returncode != 0) == (code != 0), done.stdout[-8000:]
    return done.stdout, sorted((folder / "notes").read_text().splitlines())


@pytest.mark.process
def test_every_function_of_a_script_runs_in_its_place(tiny_model: Path, tmp_path: Path) -> None:
    rows = tiny.make_rows(tmp_path / "rows.jsonl", 40)
    _, one = run_script("1 rank", tiny_model, rows, tmp_path / "one")
    assert one == sorted(["tokenizer 0", "dataset 0", "model 0", "trainer 0", "step-3 0", "save 0"])
    _, two = run_script("2 ranks", tiny_model, rows, tmp_path / "two")
    (made_by,) = [note for note in two if note.startswith("dataset ")]
    on_each = [f"{what} {rank}" for what in ("tokenizer", "model", "trainer", "step-3") for rank in (0, 1)]
    assert two == sorted([*on_each, made_by, "save 0"])
    runs = [launch.read(tmp_path / name / "out") for name in ("one", "two")]
    assert worst(runs[0]["losses"], runs[1]["losses"]) < 1e-5
    assert abs(runs[0]["eval_loss_after"] / runs[1]["eval_loss_after"] - 1) < 1e-6
    assert runs[0]["data_fingerprint"] == runs[1]["data_fingerprint"]
    assert runs[1]["ledger"]["train"]["rows_read"] == 32 and runs[1]["ledger"]["eval"]["rows_read"] == 8
    entry = json.loads(next((tmp_path / "two" / "data").glob("*/entry.json")).read_text())["about"]
    assert 0 < entry["ledgers"]["train"]["supervised_tokens"] < entry["ledgers"]["train"]["tokens"]
    exported = load_file(tmp_path / "two" / "exported-<|im_end|>" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "two" / "out" / "adapter_model.safetensors")
    assert exported.keys() == saved.keys() and all((exported[name] == saved[name]).all() for name in saved)


@pytest.mark.process
def test_a_function_that_fails_on_one_rank_ends_all(tiny_model: Path, tmp_path: Path) -> None:
    rows = tiny.make_rows(tmp_path / "rows.jsonl", 20)
    output, notes = run_script("2 ranks", tiny_model, rows, tmp_path / "failing", code=1, FAILS="1")
    line = SCRIPT.splitlines().index('        raise KeyError("this rank alone")') + 1
    expected = f"error: [rank 1] change_model(), the script's `model` function, failed at mine.py:{line}: KeyError"
    assert expected in output
    assert 'raise KeyError("this rank alone")' in output and "finetune/job.py" not in output
    assert not any(note.startswith(("trainer", "save")) for note in notes)


# --- a notebook for each kind of rows -----------------------------------------------------------------------------------

CELL_LOAD = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("MODEL")
tokenizer = AutoTokenizer.from_pretrained("MODEL")
rows = load_dataset("json", data_files="ROWS", split="train")
"""
CELL_MAP = """def change(row):
    question, answer = row["messages"][-2]["content"], row["messages"][-1]["content"]
    return {}
rows = rows.map(change, remove_columns=rows.column_names)
"""
CELL_TRAIN = """trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(r=4), MORE)
trainer.train()
trainer.save_model("OUT/final")
"""
CELL_ARGS = """args = SFTConfig(output_dir="OUT", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4, learning_rate=1e-3,
                 bf16=False, logging_steps=1, max_length=128, seed=7, MORE)
"""
BY_ROWS = {
    # name: statements about the rows, arguments of SFTConfig, arguments of the trainer
    "text": (CELL_MAP.replace("{}", '{"text": question + answer + tokenizer.eos_token}'), 'warmup_steps=1', ""),
    "messages": ("", 'lr_scheduler_type="cosine"', ""),
    "completions": (CELL_MAP.replace("{}", '{"prompt": question, "completion": " " + answer}'), "weight_decay=0.1", ""),
    "formatting": ('def form(row):\n    return row["messages"][-1]["content"] + tokenizer.eos_token\n', "max_grad_norm=0.3", "formatting_func=form"),
    "packed": (CELL_MAP.replace("{}", '{"text": answer + tokenizer.eos_token}'), "packing=True", ""),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("name", BY_ROWS)
def test_losses_of_each_kind_of_rows_do_not_depend_on_the_ranks(
    name: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    data, arguments, more = BY_ROWS[name]
    text = CELL_LOAD + data + CELL_ARGS.replace("MORE", arguments) + CELL_TRAIN.replace("MORE", more)
    text = text.replace("MODEL", str(tiny_model)).replace("ROWS", str(tiny_data / "train.jsonl"))
    notebook = tmp_path / "mine.py"
    notebook.write_text("# %%\n" + text.replace("OUT", str(tmp_path / "out")))
    outcome = convert(notebook)
    assert outcome.result == "converted", outcome.reason
    conversion = outcome.conversion
    losses = []
    for ranks, how in ((1, "1 rank"), (2, "2 ranks")):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        out = folder / "out"
        (folder / f"{conversion.name}.py").write_text(conversion.script.replace(str(tmp_path / "out"), str(out)))
        done = launch.run(
            how, [], cache=folder, script=folder / f"{conversion.name}.py", HF_DATASETS_CACHE=str(folder / "datasets"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        found = next(folder.rglob("run.json"))
        record = json.loads(found.read_text())
        assert record["world_size"] == ranks and record["batch"]["global_batch_size"] == 8
        losses.append(record["losses"])
    assert len(losses[0]) == 4
    assert worst(*losses) < 1e-5, losses
