"""Prints docs/configuration.md: `python -m finetune.config.reference > docs/configuration.md`."""

import sys

from finetune.config import arguments
from finetune.config.help import COMMON, default_of, type_of
from finetune.config.rules import MANAGED_ARGUMENTS
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.values import show

INTRODUCTION = """\
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


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """The page: the common keys first, then every key of each section."""
    parts = [INTRODUCTION, "## Common settings\n", _table(COMMON, full_names=True)]
    for section, kind in SECTIONS.items():
        keys = [name for name in KEYS if name.startswith(f"{section}.")]
        parts += [f"## {section}\n", f"{(kind.__doc__ or '').splitlines()[0]}\n", _table(keys, full_names=False)]
        if section == "training":
            parts.append(OTHERS + _taken_over())
    parts.append(_managed())
    return "\n".join(parts)


def _table(names: tuple[str, ...] | list[str], *, full_names: bool) -> str:
    rows = ["| key | type and range | default | meaning |", "|---|---|---|---|"]
    for name in names:
        key = name if full_names else name.partition(".")[2]
        cells = (f"`{key}`", type_of(name), f"`{default_of(name)}`", KEYS[name].metadata["help"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _taken_over() -> str:
    """Names of SFTConfig that set one of our keys, and values that change nothing."""
    rows = ["| under `training:` | sets |", "|---|---|"]
    taken = {name: row for name, row in arguments.rows(arguments.CONFIG).items() if name in arguments.TAKEN}
    for name, row in taken.items():
        for value, (target, ours) in row.sets.items():
            given, result = ("N", "N") if value is arguments.ANY else (show(value), show(ours))
            rows.append(f"| `{name}: {given}` | `{target}: {result}` |")
    rows.append("| `chat_template_path: FILE.jinja` | `model.chat_template: FILE.jinja` |")
    kept = (f"`{name}: {show(value)}`" for name, row in taken.items() for value in row.kept[:1])
    former = (
        f"`{name}` (`{now}`)" for name, now in arguments.former_names().items() if now and now not in arguments.REFUSED
    )
    rows += ["", f"Former names are taken, with a note of today's: {', '.join(former)}."]
    return "\n".join(rows) + "\n\nThese describe what happens in every run and are accepted: " + ", ".join(kept) + ".\n"


def _managed() -> str:
    """Arguments that `loader_kwargs` and `adapter_kwargs` refuse."""
    parts = ["## Arguments that have a key\n", "`model.loader_kwargs` and `lora.adapter_kwargs` refuse these:\n"]
    rows = ["| under | argument | instead |", "|---|---|---|"]
    for name, table in MANAGED_ARGUMENTS.items():
        for keys, instead in table.items():
            shown = ", ".join(f"`{key}`" for key in keys.split())
            rows.append(f"| `{name}` | {shown} | {instead.format(name='NAME')} |")
    return "\n".join([*parts, *rows]) + "\n"


if __name__ == "__main__":
    main()
