"""pytest plugin of the ranks that `tests/conformance/run` starts: puts the trainer in, leaves out what cannot be asked,
and appends what each test did to a file."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from tests.conformance import assets, expectations, trl_on_cpu

TRAINER = os.environ["CONFORMANCE_TRAINER"]  # a module, or module:class
REPORT = Path(os.environ["CONFORMANCE_REPORT"])  # JSON lines, one file per rank
SHARED = Path(os.environ["CONFORMANCE_SHARED"])  # of all ranks
LEFT = os.environ.get("CONFORMANCE_LEFT")  # a file with the names of the tests that are left to run; without it, all
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
HUB_NAME = re.compile(r"[\"']([A-Za-z0-9-]+/[A-Za-z][\w.-]+)[\"']")


def _write(**event: Any) -> None:
    with REPORT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """The trainer comes first: it may have to import its backend before anything else does."""
    for mark in ("slow", "low_priority"):
        config.addinivalue_line("markers", f"{mark}: of TRL")
    module, _, name = TRAINER.partition(":")
    config.stash[_CLASS] = getattr(importlib.import_module(module), name or "SFTTrainer")
    if TRAINER == "trl":
        trl_on_cpu.give_kernel()
    for path in Path(config.invocation_params.dir).rglob("*.py"):
        _fill_in(path)


_CLASS = pytest.StashKey[type]()


def _fill_in(path: Path) -> None:
    """Give TRL's modules the names that `path` imports and that the installed version lacks; using one skips a test."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("trl"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, _absent(f"{node.module}.{alias.name}"))


def _absent(name: str) -> Any:
    def absent(*_: Any, **__: Any) -> None:
        pytest.skip(f"the installed TRL has no {name}")

    return absent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the trainer, and replace it in their module."""
    left = set(json.loads(Path(LEFT).read_text())) if LEFT else None
    kept, others = [], {}
    for item in items:
        assert isinstance(item, pytest.Function)
        item.module.SFTTrainer = config.stash[_CLASS]
        owner = item.cls.__name__ if item.cls else ""
        if owner != expectations.TRAINER_TESTS:
            others[owner] = others.get(owner, 0) + 1
        elif left is None or item.name in left:
            kept.append(item)
            if reason := _why_not(item):
                item.add_marker(pytest.mark.skip(reason=reason))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    _write(event="collected", tests=[item.name for item in kept], others=others)


def _why_not(item: pytest.Function) -> str | None:
    """Why this test cannot be asked here: an asset without a stand-in, no GPU, or a number of ranks."""
    import torch

    known = assets.known()
    source = "\n".join(line.partition("#")[0] for line in inspect.getsource(item.function).splitlines())
    body = source[source.index(f"def {item.originalname}") :]  # its decorators name the parameters of its siblings
    names = set(HUB_NAME.findall(body))
    if hasattr(item, "callspec"):
        names |= {value for value in item.callspec.params.values() if isinstance(value, str) and "/" in value}
    for name in sorted(names):
        if name not in known and not name.startswith("kernels-community/"):
            return f"no stand-in for {name}"
        loads = TRAINER == "trl" or item.originalname in expectations.TEXT_ONLY
        if known.get(name) == "configuration" and loads:
            return expectations.NEEDS_WEIGHTS
    if item.originalname in expectations.NEEDS_GPU and not torch.cuda.is_available():
        return expectations.NEEDS_GPU[item.originalname]
    if RANKS > 1 and item.originalname in expectations.ONE_RANK:
        return expectations.ONE_RANK[item.originalname]
    return expectations.ONE_RANK_OF_TRL.get(item.name) if RANKS > 1 and TRAINER == "trl" else None


# --- what TRL's own conftest and its plugins provide ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cpu_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SFTConfig` asks for bfloat16 by default, which it refuses on a CPU that was not chosen by name."""
    from transformers.testing_utils import torch_device
    from trl import SFTConfig

    if torch_device not in (None, "cpu"):
        return
    original = SFTConfig.__post_init__

    def on_the_cpu(self: Any) -> None:
        self.use_cpu = True
        original(self)

    monkeypatch.setattr(SFTConfig, "__post_init__", on_the_cpu)


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """TRL's `tests/data`, or one with the template that a test asks for."""
    given = request.path.parent / "data"
    if given.is_dir():
        return given
    folder = SHARED / "data"
    folder.mkdir(exist_ok=True)
    (folder / "template.jinja").write_text(assets.chat_template("qwen3"), encoding="utf-8")
    return folder


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Path:
    """One folder per test, the same on all ranks."""
    folder = SHARED / re.sub(r"\W+", "-", request.node.name)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def freed_afterwards() -> Iterator[None]:
    """Models of earlier tests are gone before the next one starts."""
    yield
    gc.collect()


# --- what a test did --------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write down that a test starts, and when it has ended."""
    _write(event="start", test=item.name, time=time.time())
    item.stash[_OUTCOME] = {"outcome": "passed", "reason": "", "details": ""}
    try:
        return (yield)
    finally:
        _write(event="end", test=item.name, time=time.time(), **item.stash[_OUTCOME])


_OUTCOME = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Passed, skipped, refused in words, or failed."""
    report = yield
    if call.excinfo is not None and item.stash[_OUTCOME]["outcome"] == "passed":
        error = call.excinfo.value
        reason, details = str(error), ""
        if isinstance(error, UserError):
            outcome = "refused"
        elif report.skipped:
            outcome = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else reason
        else:
            outcome, reason, details = "failed", f"{type(error).__name__}: {error}", report.longreprtext
        item.stash[_OUTCOME] = {"outcome": outcome, "reason": reason.removeprefix("Skipped: "), "details": details}
    return report
