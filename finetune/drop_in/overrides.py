"""`accelerate launch script.py ITS-ARGUMENTS --finetune section.key=value ...`: settings that outrank the script's.

Our import takes them out of `sys.argv`, so the script's own parser does not see them.
"""

from __future__ import annotations

import copy
import enum
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.config.arguments import SCRIPT_KEYS
from finetune.config.help import script_help
from finetune.config.load import FINETUNE, overrides
from finetune.drop_in.refusals import Refused
from finetune.runtime import scripts
from finetune.runtime.command import print_line
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    import trl
    from peft import PeftConfig

_DTYPES = {"bfloat16": (True, False), "float16": (False, True), "float32": (False, False)}  # bf16, fp16


@dataclass(frozen=True)
class Overrides:
    """Values by our keys."""

    values: JsonObject = field(default_factory=dict)

    def get(self, key: str, otherwise: object) -> Any:
        """The value of a key, or what the script has."""
        return self.values.get(key, otherwise)

    def section(self, section: str) -> JsonObject:
        """The values of a section that are no arguments of SFTConfig, by their names there."""
        own = {key: value for key, value in self.values.items() if SCRIPT_KEYS.get(key, key) == ""}
        return {key.partition(".")[2]: value for key, value in own.items() if key.startswith(f"{section}.")}

    def set_arguments(self, args: trl.SFTConfig) -> None:
        """Change the user's SFTConfig, in place: a script may read its output_dir again."""
        for key, value in self.values.items():
            name = SCRIPT_KEYS.get(key) if key in SCRIPT_KEYS else key.partition(".")[2]
            if name:
                self._set(args, name, value)
        if (dtype := self.values.get("model.dtype", "auto")) != "auto":
            args.bf16, args.fp16 = _DTYPES[dtype]

    @staticmethod
    def _set(args: Any, name: str, value: Any) -> None:
        if name in ("eval_steps", "save_steps"):  # 0 is never, as in a configuration
            strategy = f"{name.partition('_')[0]}_strategy"
            setattr(args, strategy, type(getattr(args, strategy))("steps" if value else "no"))
            value = value or None if name == "eval_steps" else value or args.save_steps
        if name == "num_train_epochs":
            args.max_steps = -1
        if name == "max_length":
            args.length_given = True
        if name == "per_device_train_batch_size":
            args.size_given = True
        if name == "report_to":
            value = [one for one in ([value] if isinstance(value, str) else value) if one != "none"]
        now = getattr(args, name)
        setattr(args, name, type(now)(value) if isinstance(now, enum.Enum) else value)

    def adapter(self, peft_config: PeftConfig | None) -> PeftConfig | None:
        """The adapter with the values of `lora.`.

        Raises:
            Refused: the trainer is given none, or one that is no LoRA.
        """
        changed = self.section("lora")
        if not changed:
            return peft_config
        if not hasattr(peft_config, "lora_alpha"):
            raise Refused(
                f"{FINETUNE} lora.{min(changed)}: the script gives SFTTrainer no LoraConfig as `peft_config`. Change "
                "the adapter where the script makes it."
            )
        peft_config = copy.copy(peft_config)
        for name, value in changed.items():
            setattr(peft_config, name, set(value) if isinstance(value, list) else value)
        return peft_config


def take_from_argv() -> Overrides:
    """The overrides on this script's command line, taken out of `sys.argv`, over those of a command that runs it.

    Raises:
        ConfigError: unknown keys, wrong values, or what the script decides in code.
        SystemExit: after the list, for `--finetune help`.
    """
    kept, pairs = [], [*scripts.overrides()]
    rest = iter(sys.argv[1:])
    for one in rest:
        if one == FINETUNE:
            pairs.append(next(rest, ""))
        elif one.startswith(f"{FINETUNE}="):
            pairs.append(one.removeprefix(f"{FINETUNE}="))
        else:
            kept.append(one)
    if "help" in pairs:
        if distributed.ranks().is_main:
            sys.stdout.write(script_help())
        raise SystemExit(0)
    values, notes = overrides(pairs)
    sys.argv[1:] = kept
    for note in notes:
        print_line(note)
    return Overrides(values)
