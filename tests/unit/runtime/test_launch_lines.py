"""Command lines that start ranks."""

from __future__ import annotations

import importlib
import importlib.util
import types
from importlib import metadata

import pytest

from finetune.runtime import launch_lines


@pytest.mark.parametrize(
    ("world_size", "on_cpu", "expected"),
    [
        (1, False, "python"),
        (1, True, "python"),
        (2, False, "accelerate-launch --multi_gpu --num_processes 2"),
        (4, True, "torchrun --standalone --nproc_per_node 4"),
    ],
)
def test_the_launcher_of_a_printed_command(world_size: int, on_cpu: bool, expected: str) -> None:
    assert " ".join(launch_lines.user_command(world_size, on_cpu=on_cpu)) == expected


def test_accelerates_own_script_is_the_command_without_the_others() -> None:
    """`accelerate-launch` takes the options of `accelerate launch`: both parse with the same function."""
    scripts = {one.name: one.value for one in metadata.entry_points(group="console_scripts")}
    assert scripts["accelerate-launch"] == "accelerate.commands.launch:main"
    command = importlib.import_module("accelerate.commands.accelerate_cli")
    assert isinstance(command, types.ModuleType)
    assert command.launch_command_parser.__module__ == "accelerate.commands.launch"
