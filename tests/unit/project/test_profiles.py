"""The shipped accelerate profiles are what accelerate reads them as."""

from __future__ import annotations

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.helpers import launch


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [
        ("single.yaml", 1, 1),
        ("ddp_2.yaml", 2, 1),
        ("ddp_4.yaml", 4, 1),
        ("ddp_8.yaml", 8, 1),
        ("cpu_2.yaml", 2, 1),
        ("two_nodes.yaml", 16, 2),
    ],
)
def test_profile(name: str, processes: int, machines: int) -> None:
    profile = load_config_from_file(str(launch.PROFILES / name))
    assert (profile.num_processes, profile.num_machines) == (processes, machines)
    assert (profile.distributed_type.value == "MULTI_GPU") == (processes > 1)
    assert profile.use_cpu is (name == "cpu_2.yaml")
    assert "--config_file accelerate_configs/" + name in (launch.PROFILES / name).read_text()


def test_every_profile_is_listed_here() -> None:
    listed = {mark.args[1][index][0] for mark in test_profile.pytestmark for index in range(len(mark.args[1]))}
    assert listed == {path.name for path in launch.PROFILES.glob("*.yaml")}
