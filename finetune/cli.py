"""`finetune VERB ...`, the same as `python -m finetune.VERB ...`."""

from __future__ import annotations

import difflib
import importlib
import sys

from finetune import __version__
from finetune.verb import BAD_INPUT, DONE

VERBS = {
    "train": "train a model; --dry-run tries and measures everything on one device first",
    "prepare": "tokenise, mask and pack the data ahead of time; prints what happened to each row",
    "parity": "prove on your own configuration that the number of GPUs does not change what is computed",
    "convert": "turn an Unsloth notebook into a script that is safe on any number of GPUs, or say why not",
    "doctor": "report on this machine and its software, and what would stop a run; text for a bug report",
    "advise": "how many GPUs pay for your configuration, and which settings: measured, predicted, decided",
    "bench": "measure this machine: communication, ceilings, the parts of a training step, a published study again",
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:10} {about}" for name, about in VERBS.items()]
        sys.stdout.write("usage: finetune VERB [--help] ...\n\n" + "\n".join(lines) + "\n")
        return DONE if argv else BAD_INPUT
    if argv[0] == "--version":
        sys.stdout.write(f"{__version__}\n")
        return DONE
    if argv[0] not in VERBS:
        near = difflib.get_close_matches(argv[0], VERBS, n=1)
        hint = f"; the nearest is `{near[0]}`" if near else ""
        sys.stderr.write(f"error: no verb `{argv[0]}`; there are {', '.join(VERBS)}{hint}\n")
        return BAD_INPUT
    return importlib.import_module(f"finetune.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
