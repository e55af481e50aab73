"""Fixtures that several tests share, and what the marks `process`, `unsloth` and `fp8` do. Runs of the shipped command
go through `tests.helpers.launch`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.runtime import command
from tests.helpers import tiny, warm

# Runs on a CPU compute in float32, so that results can be compared tightly on every machine.
os.environ["UNSLOTH_CPU_BF16"] = "0"
# Workers share the cores, and threads that wait for each other there cost four times the work. Read when torch is
# imported, and by each run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Millions of objects of the libraries live as long as a worker: collections leave out what it holds before the tests.
gc.disable()
# Files of tests are in memory where there is room for them: on a disk they wait for it half of their time.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
    if shutil.disk_usage(_MEMORY).free > 4 * 2**30:
        os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

OF_LIBRARIES = {"uname", "fc-list"}  # that a library asks once, when it is first used
STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_free = True  # to start processes


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _free and event in STARTS_A_PROCESS and not (arguments and arguments[0] in OF_LIBRARIES):
        raise RuntimeError(f"{event}{arguments[:2]}: a test that starts a process is marked with pytest.mark.process")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Only tests that are marked so start processes, and `make quick` runs all others."""
    global _free
    _free = item.get_closest_marker("process") is not None
    try:
        return (yield)
    finally:
        _free = True


def pytest_configure() -> None:
    """Its workers find the session's warm servers."""
    warm.session()


def pytest_collection_finish() -> None:
    gc.collect()  # garbage with an open file is a fault
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """The servers end with it."""
    warm.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs Unsloth where it is not installed, and FP8 where it cannot be computed."""
    if item.get_closest_marker("unsloth") and importlib.util.find_spec("unsloth") is None:
        pytest.skip("Unsloth is not installed: pip install 'finetune-multigpu[unsloth]', or `make install`")
    device = "cuda" if item.get_closest_marker("gpu") else "cpu"
    if item.get_closest_marker("fp8") and (why := _no_fp8(device)) is not None:
        pytest.skip(why)


@functools.cache
def _no_fp8(device: str) -> str | None:
    import torch

    from finetune.engine.kernels import fp8
    from finetune.errors import UserError

    try:
        fp8.check(device, torch.bfloat16 if device == "cuda" else torch.float32)
    except UserError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def a_console_of_its_own() -> None:
    """The console keeps what the terminal was like when it was first asked for."""
    command.console.cache_clear()


@pytest.fixture(autouse=True)
def environment_afterwards() -> Iterator[None]:
    """A run inside this process sets variables for the libraries that it imports."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium. FINETUNE_BROWSER=required turns the skip into a failure."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        why = "no Chromium: apt-get install -y --no-install-recommends chromium"
        pytest.fail(why) if os.environ.get("FINETUNE_BROWSER") == "required" else pytest.skip(why)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield chrome
        chrome.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of about 100,000 parameters, with tokenizer and chat template."""
    return tiny.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.jsonl (50 ragged conversations) and eval.jsonl (11)."""
    folder = tmp_path_factory.mktemp("data")
    tiny.make_rows(folder / "train.jsonl", 50)
    tiny.make_rows(folder / "eval.jsonl", 11, seed=1)
    return folder


@pytest.fixture
def evaluating_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Arguments of a run in this process, of 12 steps, that evaluates at every second one."""
    from tests.helpers.runs import in_this_process

    given = ["--model.model_name_or_path", str(tiny_model), "--model.backend", "transformers"]
    given += ["--data.train_file", str(tiny.make_rows(tmp_path / "train.jsonl", 24)), "--data.num_proc", "1"]
    given += ["--data.eval_file", str(tiny.make_rows(tmp_path / "eval.jsonl", 4, seed=1))]
    given += ["--training.output_dir", str(tmp_path / "out"), "--training.global_batch_size", "2"]
    given += ["--training.max_steps", "12", "--training.eval_steps", "2", "--logging.generate_samples", "0"]
    with in_this_process(monkeypatch, tmp_path):
        yield given
