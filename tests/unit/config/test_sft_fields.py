"""Tests of finetune/config/sft_fields.py."""

import json

import pytest

from finetune.config import (
    TrainingConfig,
    arguments,
)
from finetune.config.schema import KEYS
from finetune.config.sft_fields import choices, sft_fields
from tests.helpers import launch


@pytest.mark.process
def test_sft_fields_are_those_of_the_installed_class(tmp_path):
    code = """
import dataclasses, json
from transformers.training_args import OptimizerNames
from transformers.trainer_utils import SchedulerType
from trl import SFTConfig
fields = {field.name: str(field.type) for field in dataclasses.fields(SFTConfig)}
print(json.dumps([fields, [item.value for item in OptimizerNames], [item.value for item in SchedulerType]]))
"""
    done = launch.python(["-c", code], cache=tmp_path)
    assert done.returncode == 0, done.stderr
    real, optimizers, schedulers = json.loads(done.stdout.splitlines()[-1])
    assert set(sft_fields()) == set(real)
    assert sft_fields()["max_steps"] is int and sft_fields()["torch_compile"] is bool
    assert sft_fields()["bf16"] == bool | None  # overridden in TRL
    assert set(choices("optim")) == set(optimizers) and set(choices("lr_scheduler_type")) == set(schedulers)
    assert TrainingConfig().optim in optimizers and TrainingConfig().lr_scheduler_type in schedulers
    # Every field has its row or is one of our keys; every row is of a field that exists, existed or will exist.
    table = arguments.rows(arguments.CONFIG)
    ours = {name.partition(".")[2] for name in KEYS}
    assert set(real) <= set(table) | ours
    gone = {name for name, row in table.items() if row.now is not None}
    others = {"extra", "skip_prepare_dataset"}  # keys of ours, and of dataset_kwargs
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # from transformers 5.18 on
    assert not gone & set(real) and set(table) - set(real) - gone <= others | newer
    assert {row.now for row in table.values()} - {None, ""} <= set(real)
    assert {name for name, row in table.items() if row.passed} <= set(real) - set(arguments.REFUSED) - ours
