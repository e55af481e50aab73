"""The `--help` texts of the configuration: the common settings, all keys in one line each, or a section in full."""

import textwrap
from collections.abc import Iterator

from finetune.config.arguments import SCRIPT_KEYS
from finetune.config.schema import DEFAULTS, KEYS, SECTIONS
from finetune.config.values import describe, show

WIDTH = 110

# What every user sets, and what many set.
FIRST = (
    "model.model_name_or_path",
    "data.train_file",
    "training.output_dir",
    "training.global_batch_size",
    "training.learning_rate",
    "training.num_train_epochs",
)
COMMON = (
    *FIRST,
    "model.load_in_4bit",
    "model.full_finetuning",
    "lora.r",
    "data.max_length",
    "data.packing",
    "training.max_steps",
    "training.resume_from_checkpoint",
)

USAGE = """\
usage: finetune train [--config FILE.yaml] [--section.key VALUE ...]   on one device, or as set by training.strategy
       accelerate launch -m finetune.train ...                         on several GPUs"""
BEGINNINGS = f"""\
{USAGE}

Ways to begin:
  finetune train --demo       see a run without a model or data of your own: a minute or two, nothing is downloaded
  finetune init               write my.yaml for your model and data; then `finetune train my.yaml`
  finetune convert MINE.ipynb turn an Unsloth or TRL notebook into a script for several GPUs
  finetune train --model.model_name_or_path MODEL --data.train_file ROWS.jsonl --training.output_dir outputs/mine

`finetune train --help` lists all settings.
"""
OPTIONS = """\
  --config FILE.yaml    YAML file with settings; `--config` may be left out
  --section.key VALUE   one setting, overriding the file; VALUE is YAML: 2e-4, true, '[q_proj, v_proj]'
"""
DEMO = "  --demo                train a very small embedded model on embedded rows, in outputs/demo\n"
JSON = "  --json PATH           also write the result as JSON\n"
DRY_RUN = (
    "  --dry-run             measure the job on one device (memory, speed, duration) within 10 minutes; save nothing\n"
)
EXIT_CODES = "Exit code 0: done, 1: failed, or dry run NO-GO, 2: bad input, 130: interrupted, checkpoint saved."
HELP = "  -h, --help [SECTION]  this text, or all keys of a section: model, lora, data, training, logging\n"


def help_text() -> str:
    """The help of `finetune train`: options, common settings, then every other key."""
    lines = [
        USAGE,
        "",
        "Fine-tune a language model on one GPU or many.",
        "",
        (OPTIONS + DEMO + DRY_RUN + JSON + HELP).rstrip(),
        "",
        "Set these six first (`finetune init` writes them, with comments, for your model and data):",
        *(line for name in FIRST for line in _described(name, f"--{name}", width=35)),
        "Often set:",
        *(line for name in COMMON if name not in FIRST for line in _described(name, f"--{name}", width=35)),
        "",
        "All other settings (type, default); descriptions and rare settings: --help SECTION, or docs/configuration.md",
    ]
    for section, kind in SECTIONS.items():
        summary = (kind.__doc__ or "").splitlines()[0]
        lines.append(f" {section}: {summary}")
        listed = [name for name in KEYS if name not in COMMON]
        lines += _paired([_listed(name) for name in listed if name.startswith(f"{section}.")])
    lines += ["", EXIT_CODES]
    return "\n".join(lines) + "\n"


def section_help(section: str) -> str:
    """Every key of a section with type, range, default and meaning."""
    kind = SECTIONS[section]
    lines = [f"{section}: {(kind.__doc__ or '').splitlines()[0]}"]
    for name in KEYS:
        if name.startswith(f"{section}."):
            lines += ["", f"  --{name}  {type_of(name)}  (default: {default_of(name)})"]
            lines += textwrap.wrap(
                KEYS[name].metadata["help"], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines) + "\n"


def type_of(name: str) -> str:
    """Type and range of a key, such as `float, above 0`."""
    allowed = KEYS[name].metadata["allowed"]
    return describe(KEYS[name].type) + (f", {allowed[0]}" if allowed else "")


def default_of(name: str) -> str:
    """The default of a key as YAML writes it."""
    return show(DEFAULTS[name])


def _described(name: str, title: str, *, width: int) -> Iterator[str]:
    """Title, meaning and default: on one line, or wrapped under the meaning."""
    text = f"{KEYS[name].metadata['help']} [{default_of(name)}]"
    first, *rest = textwrap.wrap(text, WIDTH - width - 2, break_on_hyphens=False)
    yield f"  {title:{width - 1}} {first}"
    yield from (f"{'':{width + 2}}{line}" for line in rest)


def _paired(lines: list[str]) -> Iterator[str]:
    """The lines; two that follow each other share one if both are short."""
    left = ""
    for line in lines:
        if left and max(len(left), len(line)) * 2 <= WIDTH:
            yield f"{left:{WIDTH // 2}}{line}"
            left = ""
        else:
            if left:
                yield left
            left = line
    if left:
        yield left


def _listed(name: str) -> str:
    """Key, type and default on one line."""
    key = name.partition(".")[2]
    return f"  {key:27} {describe(KEYS[name].type)} ({default_of(name)})"


def script_help() -> str:
    """What `--finetune section.key=value` can change of a script that trains with `finetune.SFTTrainer`."""
    lines = [
        "usage: accelerate launch script.py [ITS ARGUMENTS] [--finetune section.key=value ...]",
        "",
        "Changes what the script gives to SFTConfig, SFTTrainer or its adapter. `from finetune import SFTTrainer`",
        "takes it out of sys.argv. Any other argument of SFTConfig is training.NAME.",
        "",
    ]
    lines += [line for name in SCRIPT_KEYS for line in _described(name, name, width=42)]
    return "\n".join(lines) + "\n"
