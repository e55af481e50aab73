"""TRL's training arguments as the engine needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl

from finetune.config import Batch
from finetune.config.arguments import FIXED
from finetune.engine.training.arguments import training_arguments


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_what_the_engine_does_itself_is_off(tmp_path: Path, name: str) -> None:
    """By the name that transformers has for recomputation up to 5.17, and from 5.18 on."""
    given = trl.SFTConfig(str(tmp_path), packing=True, report_to=["tensorboard"], use_cpu=True, bf16=False)
    setattr(given, name, True)
    before = dict(vars(given))
    args = training_arguments(given, Batch(per_device=2, accumulation=3, global_batch_size=6), timeout=7)
    assert vars(given) == before  # the argument is not changed
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.ddp_timeout) == (2, 3, 7)
    assert (getattr(args, name), args.report_to, args.ddp_find_unused_parameters) == (False, [], False)
    assert {field: getattr(args, field) for field in FIXED} == FIXED
