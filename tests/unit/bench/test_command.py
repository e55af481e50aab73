"""Tests of finetune/bench/command.py."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.bench.command import own_options


def test_options() -> None:
    options, _ = own_options().split(["--runs", "3", "--json", "x.json", "--sizes=4096,65536"])
    assert isinstance(options, argparse.Namespace)
    assert (options.runs, options.steps, options.sizes, options.json) == (3, 100, [4096, 65536], Path("x.json"))


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from finetune.cli import main; main(['bench', 'comm', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--sizes" in done.stdout
