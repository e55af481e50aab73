"""Caches library bytecode when site-packages is read-only, so that not every start compiles thousands of files.

Python keeps it next to the sources, unless their folder is read-only or PYTHONDONTWRITEBYTECODE is set, as in many
container images. On an H200 host a start compiled 2,863 modules, in 7.6 s (benchmarks/results/LOG.md).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from finetune.runtime.files import private_folder

FOLDER = "bytecode"
LIBRARIES = ("torch", "transformers", "unsloth")  # the first three that a run imports, and the largest


def enable(cache: Path) -> bool:
    """Make this process and those it starts keep bytecode in a folder of `cache`, if some library has none.

    Call it before the libraries are imported. Python compares each file's time and size with its source's.

    Returns:
        Whether the folder is in use.
    """
    if sys.pycache_prefix is not None or not any(map(_has_no_bytecode, LIBRARIES)):
        return False
    folder = private_folder(cache / FOLDER)
    if folder is None:
        return False
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return True


def _has_no_bytecode(package: str) -> bool:
    """Whether an installed package was never kept as bytecode, and cannot be: a first import would otherwise do it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.cached is None or package in sys.modules or Path(spec.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.cached).parent.parent, os.W_OK)
