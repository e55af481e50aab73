"""The witness: a notebook's own trainer against the converted script, both run confined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.convert.command import convert, steps
from finetune.convert.services import in_working_folder
from tests.helpers import ROOT
from tests.notebooks.oracle import compare as witness
from tests.notebooks.oracle.marks import confined
from tests.notebooks.oracle.stand_ins import ROWS
from tests.notebooks.probe import probes
from tests.unit.convert.test_convert import LOADER, TRAIN, document

ADAPTER = 'model = FastLanguageModel.get_peft_model(model, r = 8, lora_alpha = 16, target_modules = ["q_proj"])'
DATA = """from datasets import load_dataset
dataset = load_dataset("acme/chats", split = "train")
def to_text(rows):
    texts = [tokenizer.apply_chat_template(chat, tokenize = False) for chat in rows["messages"]]
    return {"text": texts, "note": ["See: " + text for text in texts]}
dataset = dataset.map(to_text, batched = True)"""
TRAINER = """from trl import SFTConfig, SFTTrainer
from unsloth.chat_templates import train_on_responses_only
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset, dataset_text_field = "text",
    args = SFTConfig(max_steps = 60, learning_rate = 2e-4, warmup_ratio = 0.25, output_dir = "outputs"),
)
trainer = train_on_responses_only(
    trainer, instruction_part = "<|im_start|>user\\n", response_part = "<|im_start|>assistant\\n",
)"""
IMPORTS = """try:
    import finetune.convert
except ImportError:
    pass
else:
    raise SystemExit("the converter can be imported")"""


def write(path: Path, *cells: str) -> Path:
    path.write_text(json.dumps(document(*cells)))
    return path


def planted(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} is not in the script once"
    return text.replace(old, new)


@confined
@pytest.mark.unsloth
def test_wrong_arguments_columns_and_masks_are_found_without_the_converter(tmp_path: Path) -> None:
    cells = [LOADER, ADAPTER, DATA, TRAINER, TRAIN]
    right = steps(write(tmp_path / "mine.ipynb", *cells))[1].script
    masked = right[
        right.index("    trainer = train_on_responses_only(") : right.index("    trainer_stats = trainer.train()")
    ]
    first = "def main() -> None:\n"
    scripts = {
        "right": right,
        "rate": planted(right, "learning_rate=2e-4", "learning_rate=3e-4"),
        "rank": planted(right, "r=8", "r=9"),
        "column": planted(right, 'dataset_text_field="text"', 'dataset_text_field="note"'),
        "mask": planted(right, masked, ""),
        "batch": planted(right, "global_batch_size=8", "global_batch_size=16"),
        "length": planted(right, "max_seq_length = 1024", "max_seq_length = 128"),
        "steps": planted(right, "max_steps=60", "max_steps=61"),
        "bits": planted(right, "load_in_4bit=True", "load_in_4bit=False"),
        "imports": planted(right, first, first + "    import finetune.convert.script.decide\n"),
    }
    files = {f"{name}.py": text for name, text in scripts.items()}

    theirs = witness.run_notebook(write(tmp_path / "checked.ipynb", IMPORTS, *cells))
    runs = witness.run_scripts(list(scripts), files, theirs)
    found = {name: witness.first_difference(theirs["runs"], one, unsloth=True) for name, one in runs.items()}

    assert found["right"] == ""
    assert "learning_rate: the notebook trains with 0.0002, the script with 0.0003" in found["rate"]
    assert "LoRA r: the notebook trains with 8, the script with 9" in found["rank"]
    assert "row 0 (rows with messages): token ids differ" in found["column"]
    assert "row 0 (rows with messages): labels differ from token" in found["mask"]
    for name in ("batch", "length", "steps", "bits"):
        assert "the notebook" in found[name], name
    assert [run["empty"] for run in theirs["runs"]] == [False, True]
    assert "ModuleNotFoundError: finetune.convert is blocked here" in found["imports"]
    assert theirs["runs"][0]["settings"]["weight_decay"] == 0.001, "Unsloth's default on a GPU"
    assert len(theirs["runs"][0]["rows"]) == ROWS - 2, "two rows are cut before their answers"


HUB = """from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
dataset = load_dataset("acme/chats", split = "train").map(lambda row: {"messages": row["messages"]})
trainer = SFTTrainer(
    model = model, processing_class = tokenizer, train_dataset = dataset,
    peft_config = LoraConfig(r = 8, target_modules = ["q_proj"], task_type = "CAUSAL_LM"),
    args = SFTConfig(max_steps = 5, assistant_only_loss = True, output_dir = "outputs"),
)"""


@confined
def test_a_flipped_assistant_mask_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", HUB, TRAIN)
    right = steps(path)[1].script
    files = {"mine.py": right}
    assert witness.check(path, files).status == "passed"
    files["mine.py"] = planted(right, "assistant_only_loss=True", "assistant_only_loss=False")
    found = witness.check(path, files)
    assert found.status == "differs" and "labels differ" in found.reason


@confined
def test_what_cannot_run_is_not_a_difference(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", "rows = open('rows.bin').read()", TRAIN)
    found = witness.check(path, {"mine.py": ""})
    assert found.status == "could-not-run" and "NameError" in found.reason


RAW = HUB.replace('.map(lambda row: {"messages": row["messages"]})', "").replace("assistant_only_loss = True, ", "%s")


@confined
def test_columns_that_the_notebook_does_not_name_are_tried(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", RAW % 'dataset_text_field = "text", ', TRAIN)
    right = steps(path)[1].script
    files = {"mine.py": right}
    found = witness.check(path, files)
    assert [list(columns) for columns in found.generated_columns] == [["text"], ["messages"], ["prompt", "completion"]]
    assert found.status == "passed"


PATCHES = {
    "the loss of the class": "SFTTrainer.compute_loss = lambda self, model, rows, **_: model(**rows).loss * 2",
    "a schedule": "trainer.create_optimizer_and_scheduler(num_training_steps=10)",
    "a method of the trainer": "trainer.training_step = lambda *_, **__: 0.0",
    "the loss function of torch": "import torch\ntorch.nn.functional.cross_entropy = lambda *_, **__: 0.0",
}


@confined
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES.keys())
def test_a_replaced_function_that_the_script_does_not_have_is_found(patch: str, tmp_path: Path) -> None:
    right = steps(write(tmp_path / "mine.ipynb", HUB, TRAIN))[1].script
    path = write(tmp_path / "patched.ipynb", HUB, patch, TRAIN)
    found = witness.check(path, {"mine.py": right})
    assert found.status == "differs" and found.reason.startswith("own functions: ")


FORMER = """from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTTrainer
model = AutoModelForCausalLM.from_pretrained("microsoft/Phi-3-mini-4k-instruct")
tokenizer = AutoTokenizer.from_pretrained("microsoft/Phi-3-mini-4k-instruct")
tokenizer.pad_token = tokenizer.unk_token
tokenizer.pad_token_id = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
dataset = load_dataset("acme/chats", split = "train").map(lambda row: {
    "messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
    "text": row["question"] + row["answer"],
})
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset, dataset_text_field = "text", max_seq_length = 256,
    peft_config = LoraConfig(r = 8, target_modules = ["q_proj"]), args = TrainingArguments("outputs", max_steps = 5),
)"""


@confined
def test_a_drop_in_script_trains_on_the_former_text_field_beside_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", FORMER, TRAIN)
    conversion = convert(path).conversion
    name = f"{conversion.name}.py"
    assert witness.check(path, {name: conversion.script}).status == "passed"
    wrong = planted(conversion.script, 'dataset_text_field="text"', "dataset_text_field=None")
    found = witness.check(path, {name: wrong})
    assert found.status == "differs" and "token ids differ" in found.reason


@confined
@pytest.mark.parametrize(
    "name",
    [
        "changed_arguments/longer_than_the_loader_drop_in",
        "styles/length_in_a_dict",
        "unknown_columns/unsloth_formatting_list_drop_in",
        "unknown_columns/unsloth_text_before_messages_drop_in",
    ],
)
def test_a_drop_in_script_reads_what_unsloths_trainer_reads(name: str, tmp_path: Path) -> None:
    """The script has the notebook's arguments as they are: its trainer decides what they mean."""
    (probe,) = (one for one in probes() if one.name == name)
    path = write(tmp_path / "mine.ipynb", *(text for _, text in probe.cells))
    assert witness.of_conversion(path).status == "passed"


FILTERED = """from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("acme/tiny")
tokenizer = AutoTokenizer.from_pretrained("acme/tiny")
names = {0: "no", 1: "yes"}
rows = load_dataset("acme/rows", split = "train").filter(lambda row: "python" in row["text"])
def prompts(rows):
    texts = []
    for i in range(len(rows["text"])):
        answer = names[rows["label"][i]] + rows["pair"][i]["en"]
        texts.append(f"### Question:\\n{rows['text'][i]}\\n### Answer:\\n{answer}")
    return texts
trainer = SFTTrainer(
    model, train_dataset = rows, peft_config = LoraConfig(r = 8), formatting_func = prompts,
    data_collator = DataCollatorForCompletionOnlyLM("### Answer:\\n", tokenizer = tokenizer),
    tokenizer = tokenizer, args = SFTConfig(output_dir = "o", max_steps = 5),
)"""


@confined
def test_rows_that_a_filter_a_table_and_an_object_need_are_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", FILTERED, TRAIN)
    outcome = convert(path)
    files = {"mine.py": outcome.conversion.script}
    found = witness.check(path, files)
    assert (found.status, found.reason) == ("passed", "")
    kinds = {name: kind.partition(":")[0] for name, kind in found.generated_columns[0].items()}
    assert kinds == {"text": "text", "label": "number", "pair": "object"}
    for old, new in (('"python" in', '"python" not in'), ('0: "no"', '0: "yes"'), ('["en"]', '["fr"]')):
        wrong = files["mine.py"].replace(old, new).replace(old.replace('"', "'"), new)
        assert wrong != files["mine.py"], old
        assert witness.check(path, {"mine.py": wrong}).status == "differs", old


def test_rows_of_unsloth_are_compared_up_to_the_length_that_its_model_takes() -> None:
    def run(length: int) -> dict[str, Any]:
        row = [list(range(length)), [-100, *range(1, length)]]
        settings = {"max_length": 8}
        return {"columns": {}, "settings": settings, "model": {}, "lora": None, "given": {"output_dir": None},
                "rows": [row], "eos": 99}  # fmt: skip

    assert witness.first_difference([run(12)], [run(8)], unsloth=True) == ""
    assert "token ids differ" in witness.first_difference([run(12)], [run(7)], unsloth=True)
    assert "token ids differ" in witness.first_difference([run(12)], [run(8)])


@pytest.mark.parametrize(
    ("columns", "script", "same"),
    [
        (["prompt", "completion", "text"], [5, 6, 2], True),  # TRL gives the end token to the text, which it leaves out
        (["prompt", "text"], [5, 6, 2], False),
        (["prompt", "completion"], [5, 6, 7], False),
        (["prompt", "completion"], [5, 6, 2, 2], False),
    ],
)
def test_an_end_token_that_trl_adds_to_an_unread_text_does_not_count(
    columns: list[str], script: list[int], same: bool
) -> None:
    def run(ids: list[int]) -> dict[str, Any]:
        settings = {"max_length": 64}
        return {"columns": dict.fromkeys(columns, "text"), "settings": settings, "model": {}, "lora": None,
                "given": {"output_dir": None}, "eos": 2, "rows": [[ids, ids]]}  # fmt: skip

    assert (witness.first_difference([run([5, 6])], [run(script)]) == "") == same


@pytest.mark.parametrize(
    ("notebook", "script", "unsloth", "same"),
    [
        ([5], [7, 5], True, True),
        ([5], [5, 7], True, True),
        ([5, 8], [5, 7], True, False),
        ([5, 7], [5], True, False),
        ([5], [5, 7], False, False),
    ],
)
def test_a_row_that_only_an_added_end_token_trains_does_not_count(
    notebook: list[int], script: list[int], unsloth: bool, same: bool
) -> None:
    """7: a row without an answer, of which the notebook's trainer trains nothing if it adds no end token."""

    def run(rows: list[int]) -> dict[str, Any]:
        made = [[[row, 9, 2], [-100, -100 if row == 7 else 9, 2]] for row in rows]
        return {"columns": {}, "settings": {"max_length": 64}, "model": {}, "lora": None,
                "given": {"output_dir": None}, "eos": 2, "rows": made}  # fmt: skip

    assert (witness.first_difference([run(notebook)], [run(script)], unsloth=unsloth) == "") == same


@confined
def test_rows_without_an_answer_that_the_script_drops_are_found(tmp_path: Path) -> None:
    """By a filter with the notebook's names and constants, so that only rows without an answer show the fault."""
    notebook = tmp_path / "no_answer_rows.ipynb"
    source = (ROOT / "tests" / "cases" / "convert-no-answer-rows" / notebook.name).read_text()
    mapped = "rows.map(talk, remove_columns=rows.column_names)"
    filtered = f"{mapped}.filter(lambda row: len(row['messages'][-1]['content']) >= 0)"
    notebook.write_text(planted(source, mapped, filtered))
    right = convert(notebook).conversion
    name = f"{right.name}.py"
    assert witness.check(notebook, {name: right.script}).status == "passed"
    found = witness.check(notebook, {name: planted(right.script, ">= 0", "> 0")})
    assert found.status == "differs" and "(rows of which some values are empty)" in found.reason


def test_a_script_that_fails_on_empty_values_differs() -> None:
    run = {"columns": {}, "settings": {"max_length": 64}, "model": {}, "lora": None, "given": {"output_dir": None},
           "eos": 2, "rows": [[[5], [5]]]}  # fmt: skip
    found = witness.first_difference([run, run | {"empty": True}], [run, {"refused": "no rows"}])
    assert found.endswith("the script fails (rows of which some values are empty): no rows")
    assert witness.first_difference([run, run | {"empty": False}], [run, {"refused": "no rows"}]) == ""


SERVICES = [
    ('a("/content/rows.jsonl")', 'a("rows.jsonl")'),
    ("b('/kaggle/working/x')", "b('x')"),
    ('c("/content/drive/MyDrive/rows.csv")', 'c("rows.csv")'),
    ('d("/content", "/kaggle/working/", "/content/drive/My Drive")', 'd(".", "./", ".")'),
    ('e(f"/content/{name}.csv", "/content/*.csv", "/content/" + name)', 'e(f"{name}.csv", "*.csv", "./" + name)'),
    ("f: /content/model", "f: model"),
    ("g: /kaggle/working", "g: ."),
    ('i("my/content/x", "/contents", "/kaggle/input/x")', 'i("my/content/x", "/contents", "/kaggle/input/x")'),
]


@pytest.mark.parametrize(("text", "found"), SERVICES)
def test_a_services_folder_is_the_working_folder_on_both_sides(text: str, found: str, tmp_path: Path) -> None:
    """Only as the start of a path, so that no other folder of that name is meant."""
    notebook = tmp_path / "mine.py"
    notebook.write_text(f"# %%\n{text}\nlast\n")
    assert in_working_folder(text) == found
    assert found in "\n".join(witness._cells(notebook))


@confined
def test_a_written_file_that_is_left_out_makes_a_difference(tmp_path: Path) -> None:
    probes = ROOT / "tests" / "notebooks" / "probes" / "collators_and_files"
    notebook = probes / "hosted_name_of_a_written_file.py"
    right = convert(notebook).conversion
    name = f"{right.name}.py"
    assert witness.check(notebook, {name: right.script}).status == "passed"
    written = 'train_df.to_json("train.jsonl", orient="records", lines=True)'
    for script in (right.script, right.script.replace('"train.jsonl", split', '"/content/train.jsonl", split')):
        found = witness.check(notebook, {name: planted(script, written, "pass")})
        assert found.status == "differs" and "token ids differ" in found.reason


NOT_IN_ROWS = """import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, EarlyStoppingCallback
from trl import SFTConfig, SFTTrainer
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained("acme/tiny", quantization_config=four, cache_dir="weights")
model = prepare_model_for_kbit_training(model)
tokenizer = AutoTokenizer.from_pretrained("acme/tiny", padding_side="left")
rows = load_dataset("acme/texts", split="train").filter(lambda row: len(row["text"]) > 0)
held_out = load_dataset("acme/texts", split="test")
trainer = SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=rows, eval_dataset=held_out,
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"), callbacks=[EarlyStoppingCallback(3)],
    args=SFTConfig(output_dir="out", max_steps=9, logging_steps=3, eval_strategy="steps", eval_steps=3, save_steps=3,
                   load_best_model_at_end=True),
)"""
UNSEEN = {
    "steps of the rows": ('.filter(lambda row: len(row["text"]) > 0)', ""),
    "held-out rows": ('split="test"', 'split="validation"'),
    "callbacks": ("callbacks=[EarlyStoppingCallback(3)],", ""),
    "prepared for k-bit training": ("model = prepare_model_for_kbit_training(model)", ""),
    "tokenizer's arguments": (', padding_side="left"', ""),
    "loader's arguments": (', bnb_4bit_quant_type="nf4"', ""),
    "adapter's arguments": (', task_type="CAUSAL_LM"', ""),
    "output_dir": ('output_dir="out"', 'output_dir="other"'),
    "load_best_model_at_end": ("load_best_model_at_end=True,", ""),
    "logging_steps": ("logging_steps=3,", ""),
    "eval_steps": ("eval_steps=3,", "eval_steps=9,"),
}


@confined
def test_what_no_generated_row_shows_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.ipynb", NOT_IN_ROWS, TRAIN)
    right = convert(path).conversion.script
    files = {f"s{number}.py": planted(right, *change) for number, change in enumerate(UNSEEN.values())}
    theirs = witness.run_notebook(path)
    scripts = witness.run_scripts(
        ["right", *(f"s{n}" for n in range(len(UNSEEN)))], files | {"right.py": right}, theirs
    )
    assert witness.compare(theirs, scripts.pop("right")) == ("passed", "")
    for name, runs in zip(UNSEEN, scripts.values(), strict=True):
        status, reason = witness.compare(theirs, runs)
        assert status == "differs" and reason.startswith(f"{name}: the notebook trains with"), (name, reason)
