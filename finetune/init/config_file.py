"""The text of the configuration that `finetune init` writes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from finetune.config.load import dump_setting
from finetune.init.detect import CONVERSATIONS, Length, Model, Rows

COMMENT_COLUMN = 44
# Peak learning rates: the defaults of docs/configuration.md, a tenth for full fine-tuning. A run of few steps gets the
# upper end of the range that the review calls usual (review/rules/learning.py): benchmarks/results/LOG.md, few rows.
LEARNING_RATES = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
OF_FEW_STEPS = 2.5  # times as much


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the user chose, and what was found."""

    model: Model
    rows: Rows
    length: Length
    method: str
    output_dir: str
    machine: str  # in words


def commands(file: Path, launcher: list[str]) -> dict[str, str]:
    """The commands to go on with, by purpose.

    Args:
        launcher: what starts the ranks on this machine.
    """
    config = ["--config", str(file)]
    return {
        "dry_run": shlex.join(["python", "-m", "finetune.train", "--dry-run", *config]),
        "train": shlex.join([*launcher, "-m", "finetune.train", *config]),
    }


def text(answers: Answers, next_commands: dict[str, str]) -> str:
    """The YAML file, with a comment for each key that a user may want to change."""
    answered = "held-out prompts to answer before and after training"
    samples = (3, answered) if answers.rows.eval_fraction > 0 else (0, f"no rows are held out: no {answered}")
    lines = [
        "# Written by `finetune init`. `finetune train --help` lists all keys.",
        "#",
        _comment(f"  measure first   {next_commands['dry_run']}"),
        _comment(f"  train           {next_commands['train']}"),
        "#",
        _comment(f"Found here: {answers.machine}"),
        "",
        *_model(answers),
        *_lora(answers.method),
        *_data(answers.rows, uses_template=answers.model.has_template is not False),
        *_training(answers),
        "logging:",
        _line("logging_steps", answers.length.logging_steps, "optimizer steps between log lines"),
        _line("generate_samples", *samples),
    ]
    return "\n".join(lines) + "\n"


def _model(answers: Answers) -> list[str]:
    lines = ["model:", _line("model_name_or_path", answers.model.name, "Hub name or local folder")]
    if answers.method == "full":
        lines.append(_line("full_finetuning", True, "train all weights, without an adapter"))
    else:
        what = "QLoRA: true loads the frozen model in 4 bits and needs the least memory"
        lines.append(_line("load_in_4bit", answers.method == "qlora", what))
    format = answers.rows.format
    if answers.model.has_template is False and format is not None and format.name in CONVERSATIONS:
        lines.append(_line("chat_template", "chatml", "the tokenizer has no template of its own"))
    return [*lines, ""]


def _lora(method: str) -> list[str]:
    if method == "full":
        return []
    return [
        "lora:",
        _line("r", 16, "rank: a higher one has more capacity and needs more memory"),
        _line("lora_alpha", 16, "the adapter's output is scaled by lora_alpha / r"),
        "",
    ]


def _data(rows: Rows, *, uses_template: bool) -> list[str]:
    lines = ["data:", f"  {_comment(rows.described)}", _line(rows.key, rows.name, "")]
    if rows.format is not None and any(field != column for field, column in rows.format.columns.items()):
        lines.append(_line("columns", dict(rows.format.columns), "field: your column"))
    if rows.format is not None and rows.format.of_text and uses_template:
        columns = {"instruction": rows.format.columns["prompt"], "output": rows.format.columns["completion"]}
        lines.append("  # These prompts are trained as they are. In the model's chat template instead:")
        lines.append(f"  {_comment(dump_setting('columns', columns))}")
    if rows.eval_fraction:
        lines.append(_line("eval_fraction", rows.eval_fraction, "share of the rows held out; or name an eval_file"))
    else:
        lines.append("  # eval_file: held_out.jsonl                # too few rows to hold out a share of them")
    return [
        *lines,
        _line("max_length", 2048, "tokens; longer documents are cut off, raw text is split"),
        _line("packing", False, "true: fill rows of pack_length tokens with whole documents; faster"),
        "",
    ]


def _training(answers: Answers) -> list[str]:
    length, held_out = answers.length, answers.rows.eval_fraction > 0
    peak = LEARNING_RATES[answers.method] * (OF_FEW_STEPS if length.few_steps else 1)
    rate = "about a tenth of LoRA's" if answers.method == "full" else "use about a tenth for full fine-tuning"
    evaluations = (
        [_line("eval_steps", length.eval_steps, "steps between evaluations of the held-out rows")] if held_out else []
    )
    return [
        "training:",
        _line("output_dir", answers.output_dir, "checkpoints, the result, run.json and TensorBoard's files"),
        _line("global_batch_size", length.global_batch_size, "rows per optimizer step, over all GPUs"),
        _line("num_train_epochs", length.epochs, "passes over the data; or max_steps"),
        _line("learning_rate", round(peak, 6), rate),
        *evaluations,
        _line("save_steps", length.save_steps, "steps between checkpoints; 0 saves only at the end"),
        _line("seed", 42, "for the data order and the adapter's initial weights"),
        "",
    ]


def _comment(text: str) -> str:
    """A comment on one line, whatever the names in it contain."""
    return "# " + "".join(character if character.isprintable() else "?" for character in text)


def _line(key: str, value: object, comment: str) -> str:
    line = f"  {dump_setting(key, value)}"
    return f"{line:{COMMENT_COLUMN}} # {comment}" if comment else line
