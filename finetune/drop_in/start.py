"""What happens at `from finetune import SFTTrainer`: the device, the early patches, the backend."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import TracebackType

from finetune.config.schema import TrainingConfig
from finetune.drop_in import overrides
from finetune.errors import UserError
from finetune.runtime import bootstrap, command, scripts
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed, process_group

VARIABLE = "FINETUNE_BACKEND"
_BACKENDS = ("auto", "unsloth", "transformers")


def start() -> tuple[Stack, overrides.Overrides]:
    """Read what the command line overrides, select this rank's device and the backend that FINETUNE_BACKEND or
    `--finetune model.backend` names (auto, the default, unsloth or transformers), and join the other ranks.

    Raises:
        UserError: the variable has another value, an override is wrong, the backend cannot run here, or there are more
            ranks than GPUs.
    """
    command.keep_printing()
    sys.excepthook = _report_errors
    given = overrides.take_from_argv()
    backend = given.get("model.backend", os.environ.get(VARIABLE, "auto"))
    if backend not in _BACKENDS:
        raise UserError(f"{VARIABLE} is unknown: {backend!r}. Set it to {', '.join(_BACKENDS)}, or unset it.")
    trl_came_first = "trl" in sys.modules and "unsloth" not in sys.modules
    if trl_came_first and backend != "transformers" and importlib.util.find_spec("unsloth") is not None:
        if backend == "unsloth":
            raise UserError(
                f"{VARIABLE} is unsloth, but trl was imported before Unsloth, which must come first. Put `from "
                "finetune import SFTTrainer` above the import of trl."
            )
        _warn(
            "trl was imported before Unsloth, so this run trains without Unsloth. To train with it, put `from finetune "
            f"import SFTTrainer` above the other imports; to keep it so, set {VARIABLE}=transformers."
        )
        backend = "transformers"
    # The script may also use TRL's other trainers.
    left_out = ("unsloth_all_trl_trainers", *scripts.skipped_patches())
    stack = bootstrap.start(backend, log_level=None, without=left_out, setting=VARIABLE)
    if distributed.ranks().world_size > 1 and stack.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # SFTConfig would choose a device again, and see no GPU to share
    # Before SFTConfig does it. The timeout is that of the run from the time on when `train` is called.
    process_group.connect(cpu=stack.device == "cpu", timeout_seconds=TrainingConfig().ddp_timeout)
    for verdict in stack.patches:
        if verdict.missed:
            _warn(
                f"Unsloth was imported before finetune, too late for the patch {verdict.name} (see docs/defects.md). "
                "Training proceeds without it; put `from finetune import SFTTrainer` above the import of unsloth."
            )
    return stack, given


def _warn(text: str) -> None:
    if distributed.ranks().is_main:
        sys.stderr.write(f"warning: {text}\n")


def _report_errors(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter's last resort, instead of `sys.excepthook`: an error of the user's is a sentence and the line
    of the script that led to it, from one rank; any other error keeps its traceback."""
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and (line := scripts.error_line(error, main)) is not None:
        error.add_note(line)
    command.report(error)


STACK, OVERRIDES = start()
