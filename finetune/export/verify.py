"""Starts the check of an export in a separate process, and reads its finding."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from finetune.errors import RunError
from finetune.runtime import subprocesses
from finetune.runtime.types import JsonObject, Tokenizer
from finetune.text import counted

PROGRAM = Path(__file__).with_name("check.py")
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "Name three colors.")
MAX_NEW_TOKENS = 24
ROWS = 64  # of the run's data, on which losses are compared
ROW_TOKENS = 2048  # that are read of one of them


def run(job: JsonObject) -> JsonObject:
    """The finding of `check.py` about a job.

    Raises:
        RunError: the process ended without one.
    """
    job = {"max_new_tokens": MAX_NEW_TOKENS} | {
        name: str(value) if isinstance(value, Path) else value for name, value in job.items()
    }
    with tempfile.TemporaryDirectory(prefix="finetune-check-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocesses.run([sys.executable, "-P", str(PROGRAM), str(path)], env=env)
    found = _answer(done.stdout)
    if "passed" not in found:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(
            f"The {'server' if 'sequences' in job else 'export'} could not be verified: the check ended early "
            f"({found.get('error') or lines[-1][:300]}). Nothing was written. Run it again, on a machine with more "
            "memory if it was killed, or skip the check of an export with --no-verify."
        )
    return found


def _answer(output: str) -> JsonObject:
    """The last line that is a JSON object; empty if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else {}
    return {}


def prompts(tokenizer: Tokenizer, *, raw: bool = False, kwargs: JsonObject | None = None) -> list[str]:
    """The questions as text, by the tokenizer's chat template if it has one. Templates are rendered with bounds.

    Args:
        raw: without the template, as in training.
        kwargs: the template's own arguments.
    """
    if raw:
        return list(QUESTIONS)
    from jinja2 import TemplateError

    from finetune.data.templates.chat_templates import load_template
    from finetune.data.templates.render import render

    template = load_template(tokenizer)
    if template is None:
        return list(QUESTIONS)
    special: JsonObject = {name: str(one) for name, one in tokenizer.special_tokens_map.items() if isinstance(one, str)}
    special |= kwargs or {}
    try:
        return [
            render(template, [{"role": "user", "content": one}], add_generation_prompt=True, **special)[0]
            for one in QUESTIONS
        ]
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return list(QUESTIONS)


def rows(record: JsonObject) -> tuple[str, list[list[list[int]]]]:
    """The split and evenly spaced rows of a run's data, as [input_ids, labels]: held-out rows if it has any. Empty if
    they are not in the data cache."""
    from finetune.data.prepare import cached_rows

    folder, splits = record.get("data_folder"), record.get("ledger")
    if not isinstance(folder, str) or not isinstance(splits, dict):
        return "", []
    try:
        for split in sorted(splits, key=lambda name: name == "train"):
            found = cached_rows(Path(folder), split)
            if found is not None and len(found):
                places = sorted({place * len(found) // ROWS for place in range(ROWS)})
                return split, [[part[:ROW_TOKENS].tolist() for part in found[place]] for place in places]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # run.json names some other folder
        pass
    return "", []


def sentence(found: JsonObject) -> str:
    """A finding that passed, in a sentence."""
    if "tensors" not in found:  # of a GGUF file
        answers = found["answers"]
        ties = sum(one["outcome"] == "tie" for one in answers)
        near = f" ({ties} up to a tie)" if ties else ""
        tokens = counted(sum(one["tokens"] for one in answers), "token")
        return f"llama.cpp gives {len(answers)} equal greedy answers{near} over {tokens}"
    loss = found["loss"]
    base = f", base model {loss['base']:.4f}" if "base" in loss else ""
    return (
        f"{counted(found['tensors']['compared'], 'tensor')} equal up to one rounding, loss on {found['rows']} "
        f"{loss['export']:.4f} (run {loss['run']:.4f}{base})"
    )
