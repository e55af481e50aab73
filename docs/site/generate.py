"""Writes what is generated in docs/ and README.md (`make docs`).

    python docs/site/generate.py [NAME]

With the name of a set of versions, as at the end of `make test-newest`, only the table of tested sets: that set becomes
what is installed here, with today's date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from finetune.config import arguments
from finetune.config.help import COMMON, default_of, type_of
from finetune.config.rules import MANAGED_ARGUMENTS
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.values import show
from finetune.convert import knowledge
from finetune.doctor.tested_sets import FILE, Sets, about, read
from finetune.errors import UserError
from finetune.review.rules import RULES
from finetune.runtime import bootstrap
from finetune.runtime.command import run_guarded
from finetune.runtime.files import write_json, write_text

ROOT = Path(__file__).parents[2]


def table(*rows: Iterable[str]) -> str:
    """A Markdown table. The first row is its header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    columns = lines[0].count(" | ") + 1
    return "\n".join([lines[0], f"|{'---|' * columns}", *lines[1:]]) + "\n"


# --- docs/configuration.md --------------------------------------------------------------------------------------------

CONFIGURATION = """\
# Configuration

<!-- Printed from finetune/config by `make docs`. Do not edit by hand. -->

Settings come from a YAML file with the sections below, and from the command line:

```yaml
model:
  model_name_or_path: unsloth/Qwen3-0.6B
data:
  train_file: data/train.jsonl
training:
  learning_rate: 2e-4
```

```bash
accelerate launch -m finetune.train --config my.yaml --training.learning_rate 1e-4
```

The command line overrides the file, and the file overrides the defaults. Values on the command line are YAML as well:
`2e-4`, `true`, `'[q_proj, v_proj]'`. A key of type `true | false` may stand alone for `true`. Unknown keys, wrong types
and contradictory settings are reported together, with file and line, before anything starts.
"""

OTHERS = """\
Any other field of TRL's `SFTConfig` is accepted under `training:` by its own name, such as `adam_beta2` or
`neftune_noise_alpha`. Fields that would break exact results on several GPUs are refused with the reason.

These names set another key, which the resolved configuration then shows; a contradiction with that key is an error.
`bf16: false` and `fp16: false` only rule out their dtype; they do not mean float32.

"""


def configuration() -> str:
    """The common keys first, then every key of each section."""
    parts = [CONFIGURATION, "## Common settings\n", keys(COMMON, full_names=True)]
    for section, kind in SECTIONS.items():
        names = [name for name in KEYS if name.startswith(f"{section}.")]
        parts += [f"## {section}\n", f"{(kind.__doc__ or '').splitlines()[0]}\n", keys(names, full_names=False)]
        if section == "training":
            parts.append(OTHERS + taken_over())
    parts += ["## Arguments that have a key\n", "`model.loader_kwargs` and `lora.adapter_kwargs` refuse these:\n"]
    managed = (
        (f"`{name}`", ", ".join(f"`{key}`" for key in names.split()), instead.format(name="NAME"))
        for name, refused in MANAGED_ARGUMENTS.items()
        for names, instead in refused.items()
    )
    return "\n".join([*parts, table(("under", "argument", "instead"), *managed)])


def keys(names: Iterable[str], *, full_names: bool) -> str:
    """A table of keys."""
    rows: list[tuple[str, ...]] = [("key", "type and range", "default", "meaning")]
    for name in names:
        key = name if full_names else name.partition(".")[2]
        cells = (f"`{key}`", type_of(name), f"`{default_of(name)}`", KEYS[name].metadata["help"])
        rows.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return table(*rows)


def taken_over() -> str:
    """Names of SFTConfig that set one of our keys, and values that change nothing."""
    taken = {name: row for name, row in arguments.rows(arguments.CONFIG).items() if name in arguments.TAKEN}
    rows = [("under `training:`", "sets")]
    for name, row in taken.items():
        for value, (target, ours) in row.sets.items():
            given, result = ("N", "N") if value is arguments.ANY else (show(value), show(ours))
            rows.append((f"`{name}: {given}`", f"`{target}: {result}`"))
    rows.append(("`chat_template_path: FILE.jinja`", "`model.chat_template: FILE.jinja`"))
    kept = ", ".join(f"`{name}: {show(value)}`" for name, row in taken.items() for value in row.kept[:1])
    former = ", ".join(
        f"`{name}` (`{now}`)" for name, now in arguments.former_names().items() if now and now not in arguments.REFUSED
    )
    return (
        f"{table(*rows)}\nFormer names are taken, with a note of today's: {former}.\n\n"
        f"These describe what happens in every run and are accepted: {kept}.\n"
    )


# --- docs/notebook-rules.md -------------------------------------------------------------------------------------------

NOTEBOOK_RULES = """\
# What the converter knows

The rules of [`finetune convert`](notebooks.md) for arguments and calls. `make docs` writes this page from
`finetune/config/arguments.py` and `finetune/convert/knowledge.py`: change those, not the page.
"""


def notebook_rules() -> str:
    """What the converter does with arguments and calls."""
    alike: dict[tuple[str, str], str] = {}
    for one in arguments.ARGUMENTS:
        if one.of != arguments.UNSLOTH and (text := becomes(one)):
            alike[one.of, text] = f"{alike.get((one.of, text), '')} {one.names}"
    given = ((of, code(names.split()), text) for (of, text), names in alike.items())
    calls = ((kind, meaning, code(sorted(knowledge.named(kind)))) for kind, (_, meaning) in knowledge.KINDS.items())
    return "\n".join(
        [
            NOTEBOOK_RULES,
            "## Arguments\n\nAn argument that is not listed is kept if TRL has it.\n",
            table(("of", "arguments", "in the script"), *given),
            "## Calls\n",
            table(("kind", "meaning", "names"), *calls),
        ]
    )


def becomes(one: arguments.Argument) -> str:
    """What becomes of an argument of the trainer, if it does not stay as it is."""
    if one.changes_loss:
        return "refused: it changes the loss"
    if one.now is not None:
        return f"stays: SFTConfig or SFTTrainer takes it as `{one.now}`" if one.now else "stays: it has no effect"
    if one.moved:
        return "stays: SFTTrainer gives it to SFTConfig"
    return f"left out: {one.left_out}" if one.left_out else ""


def code(words: Iterable[str]) -> str:
    """Words as code."""
    return " ".join(f"`{word}`" for word in words)


# --- docs/review-rules.md ---------------------------------------------------------------------------------------------

REVIEW_RULES = """\
# The rules of the review

<!-- Printed from finetune/review/rules/explanations.md by `make docs`. Do not edit by hand. -->

`finetune review RUN` and the [Review tab](dashboard.md) judge a run by the rules below. `finetune review --explain
RULE` prints one of them. Figures in examples are of real runs; the file in parentheses has the record.
"""


def review_rules() -> str:
    """All rules of the review, by the question that they belong to."""
    page = (ROOT / "finetune/review/rules/explanations.md").read_text(encoding="utf-8")
    contents = []
    for question, rules in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE):
        names = re.findall(r"^### (.+)$", rules, re.MULTILINE)
        contents.append((question, ", ".join(f"[{name}](#{name})" for name in names)))
    return "\n".join((REVIEW_RULES, table(("question", "rules"), *contents), page))


# --- the sets of versions that were tested ----------------------------------------------------------------------------

BEGIN, END = "<!-- tested sets: begin; written by `make docs` -->", "<!-- tested sets: end -->"
SHOWN = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth")  # columns of the README


def updated(readme: str, sets: Sets) -> str:
    """The README with the table of today, between its marks, and the number of rules of the review."""
    rows = ((name, about(one), *(one["versions"].get(each, "-") for each in SHOWN)) for name, one in sets.items())
    page = f"{BEGIN}\n\n{table(('set', 'of', *SHOWN), *rows)}\n{END}"
    readme = re.sub(r"`review` applies \d+ rules", f"`review` applies {len(RULES)} rules", readme)
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: page, readme, flags=re.DOTALL)


def pins(file: Path) -> dict[str, str]:
    """The versions that a file of constraints gives to the libraries that decide what a run computes."""
    pinned = dict(line.split("==") for line in file.read_text(encoding="utf-8").split() if "==" in line)
    return {name: pinned[name] for name in bootstrap.LIBRARIES if name in pinned}


def write_tested_sets(names: Iterable[str]) -> None:
    """Write the table and the README of this checkout. Sets that are a file of constraints are taken from that.

    Args:
        names: of the sets that become what is installed here.

    Raises:
        UserError: there is no such set with a date.
    """
    sets = read()
    for one in sets.values():
        if "from" in one:
            one["versions"] = pins(ROOT / one["from"])
    for name in names:
        if "date" not in sets.get(name, {}):
            dated = ", ".join(f"`{known}`" for known, one in sets.items() if "date" in one)
            raise UserError(f"unknown set of versions: `{name}`. Give one of {dated}.")
        here = {library: bootstrap.versions()[library] for library in bootstrap.LIBRARIES}
        versions = {library: text.partition("+")[0] for library, text in here.items() if text is not None}
        sets[name] |= {"date": datetime.now(UTC).date().isoformat(), "versions": versions}
    write_json(FILE, sets)
    readme = ROOT / "README.md"
    write_text(readme, updated(readme.read_text(encoding="utf-8"), sets))


PAGES = {"configuration": configuration, "notebook-rules": notebook_rules, "review-rules": review_rules}


def main(names: list[str]) -> int:
    """Write the pages, unless sets of versions are named, and the tested sets."""
    for name, page in () if names else PAGES.items():
        write_text(ROOT / "docs" / f"{name}.md", page())
    write_tested_sets(names)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda: main(sys.argv[1:])))
