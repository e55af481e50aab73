"""Starts the ranks that run TRL's tests, follows them, and prints what came of each test."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance import assets, expectations

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "https://raw.githubusercontent.com/huggingface/trl/{tag}/tests/{name}"
FETCHED = ("test_sft_trainer.py", "testing_utils.py", "data/template.jinja")
OUTCOMES = ("failed", "refused", "skipped", "passed")  # worst first
SHOWN = {"passed": "passed", "refused": "refused in words", "failed": "failed", "skipped": "skipped"}
POLL_SECONDS = 0.2
GRACE_SECONDS = 30  # that other ranks have once one rank has ended a test without passing it
DETAIL_LINES = 30  # of a failed test's traceback


@dataclass
class Result:
    """What became of one test."""

    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    details: str = ""


@dataclass
class Session:
    """The results so far, and the tests that are left."""

    given: argparse.Namespace
    folder: Path
    results: dict[str, Result] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)

    def left(self) -> list[str]:
        """Tests without a result."""
        return [test for test in self.order if test not in self.results]


def main(given: argparse.Namespace) -> int:
    """Run the tests; the exit code."""
    if importlib.util.find_spec("trl") is None:
        return _give_up(f"TRL is not installed for {sys.executable}. Run this with the Python of the environment.")
    if given.trainer == "finetune" and not has_trainer():
        return _give_up("finetune has no SFTTrainer. Run a version that has it, or compare with --trainer trl.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as temporary:
        folder = Path(temporary)
        try:
            _write_package(given, folder / "trl_tests")
        except OSError as error:
            return _give_up(str(error))
        assets.copy(_stand_ins(), folder / "assets")
        session = Session(given, folder)
        attempt = 0
        while attempt == 0 or session.left():
            before = len(session.results)
            follower = run_ranks(session, attempt)
            if len(session.results) == before and (session.left() or not follower.collected):
                return _give_up(f"the tests could not be run:\n{follower.log(0)}")
            attempt += 1
    return report(session, time.monotonic() - started)


def has_trainer() -> bool:
    """Whether this version of finetune has the trainer. Asking for it would import the whole stack here."""
    import finetune

    return "SFTTrainer" in Path(finetune.__file__ or "").read_text(encoding="utf-8")


def _give_up(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


# --- what the ranks read ----------------------------------------------------------------------------------------------


def _write_package(given: argparse.Namespace, package: Path) -> None:
    """A package with TRL's test file and its siblings."""
    package.mkdir()
    (package / "__init__.py").touch()
    (package.parent / "pytest.ini").write_text("[pytest]\n")
    if given.fetch is not None:
        _fetch(given.fetch or f"v{importlib.metadata.version('trl')}", package)
        return
    for name in ("testing_utils.py", "testing_constants.py", "data"):
        source = given.path.parent / name
        if source.is_dir():
            shutil.copytree(source, package / name)
        elif source.is_file():
            shutil.copy(source, package / name)
    shutil.copy(given.path, package / "test_sft_trainer.py")


def _fetch(tag: str, package: Path) -> None:
    """Download TRL's files of a tag.

    Raises:
        OSError: the reason in words.
    """
    for name in FETCHED:
        address = SOURCE.format(tag=tag, name=name)
        target = package / name
        target.parent.mkdir(exist_ok=True)
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                target.write_bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise OSError(f"{address} could not be read: HTTP {error.code}. Is {tag} a tag of TRL?") from error
        except OSError as error:
            raise OSError(
                f"GitHub could not be reached: {error}. Give the path of TRL's tests/test_sft_trainer.py instead."
            ) from error


def _stand_ins() -> Path:
    """Folder of the Hub's stand-ins, made on the first run."""
    cache = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune"))
    folder = cache / "conformance" / assets.key()
    if not folder.exists():
        sys.stderr.write("making stand-ins for the Hub's models and datasets ...\n")
        command = [sys.executable, "-m", "tests.conformance.assets", str(folder)]
        subprocess.run(command, check=True, env=_environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder


def _environment(**extra: str) -> dict[str, str]:
    """No hub, no progress bars, one thread per rank."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    quiet = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launcher} | own | quiet | extra


# --- ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(session: Session, attempt: int) -> Follower:
    """Run the tests that are left on fresh ranks, until all are done or a test leaves the ranks in different places."""
    folder = session.folder / f"attempt-{attempt}"
    folder.mkdir()
    ranks = [_start(session, folder, rank, port) for port in [_free_port()] for rank in range(session.given.ranks)]
    follower = Follower(session, folder, ranks)
    try:
        follower.follow()
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a process group of its own
            process.wait()
    return follower


def _start(session: Session, folder: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    given = session.given
    (folder / "shared").mkdir(exist_ok=True)
    home = session.folder / "assets"
    own = {
        **{"HF_HUB_CACHE": str(home / "hub"), "HF_DATASETS_CACHE": str(home / "datasets")},
        **{"HF_HOME": str(home / "home"), "FINETUNE_CACHE": str(session.folder / "cache")},
        **{"FINETUNE_BACKEND": given.backend, "CONFORMANCE_TRAINER": given.trainer},
        **{"CONFORMANCE_REPORT": str(folder / f"rank-{rank}.jsonl"), "CONFORMANCE_SHARED": str(folder / "shared")},
    }
    if given.ranks > 1:
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(given.ranks)}
        own |= {"LOCAL_WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if session.results:
        (folder / "left.json").write_text(json.dumps(session.left()))
        own["CONFORMANCE_LEFT"] = str(folder / "left.json")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conformance.plugin", "-p", "no:cacheprovider"]
    command += ["-c", str(session.folder / "pytest.ini"), "trl_tests/test_sft_trainer.py"]
    command += ["-k", given.k] if given.k else []
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(**own),
            cwd=session.folder,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Follower:
    """Reads what the ranks write down, and ends them when they no longer run the same test."""

    def __init__(self, session: Session, folder: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.session, self.folder, self.ranks = session, folder, ranks
        self.collected = False
        self._read = [0] * len(ranks)  # bytes of each rank's report
        self._started: list[dict[str, float]] = [{} for _ in ranks]
        self._ended: list[dict[str, dict[str, Any]]] = [{} for _ in ranks]

    def follow(self) -> None:
        """Return when all ranks have ended, or have to."""
        while True:
            ended = all(process.poll() is not None for process in self.ranks)
            for rank in range(len(self.ranks)):
                self._read_report(rank)
            if not self._merge():
                return
            if ended:
                self._blame_the_running("the process ended during the test")
                return
            if self._late():
                return
            time.sleep(POLL_SECONDS)

    def log(self, rank: int) -> str:
        """The end of what a rank printed."""
        return (self.folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:]

    def _read_report(self, rank: int) -> None:
        path = self.folder / f"rank-{rank}.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[rank])
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[rank] += len(whole) + len(newline)
        for line in whole.splitlines():
            event = json.loads(line)
            if event["event"] == "collected" and rank == 0:
                self.collected = True
                self.session.order = self.session.order or event["tests"]
                self.session.others = event["others"]
            elif event["event"] == "start":
                self._started[rank][event["test"]] = event["time"]
            elif event["event"] == "end":
                self._ended[rank][event["test"]] = event

    def _merge(self) -> bool:
        """Take over the tests that all ranks have ended; False if they ended one differently."""
        for test, first in self._ended[0].items():
            if test in self.session.results or not all(test in ended for ended in self._ended):
                continue
            events = [ended[test] for ended in self._ended]
            worst = min(events, key=lambda event: OUTCOMES.index(event["outcome"]))
            seconds = first["time"] - self._started[0][test]
            result = Result(test, worst["outcome"], worst["reason"], seconds, worst["details"])
            outcomes = [event["outcome"] for event in events]
            if len(set(outcomes)) > 1:
                result.outcome = "failed"
                result.reason = f"the ranks disagree: {', '.join(outcomes)}. {result.reason}"
            self.session.results[test] = result
            if len(set(outcomes)) > 1:
                return False
        return True

    def _late(self) -> bool:
        """Whether a test has run out of time, or waits for a rank that has left it."""
        now = time.time()
        for rank, started in enumerate(self._started):
            for test, since in started.items():
                if test in self._ended[rank] or test in self.session.results:
                    continue
                gone = [ended[test] for ended in self._ended if test in ended and ended[test]["outcome"] != "passed"]
                if gone and now > gone[0]["time"] + GRACE_SECONDS:
                    reason = f"rank {rank} waits for one that {gone[0]['outcome']} it: {gone[0]['reason']}"
                    self.session.results[test] = Result(test, "failed", reason, now - since, gone[0]["details"])
                    return True
                if now > since + self.session.given.timeout:
                    self._blame_the_running(f"not done after {self.session.given.timeout:.0f} s")
                    return True
        return False

    def _blame_the_running(self, reason: str) -> None:
        for rank, started in enumerate(self._started):
            for test, since in started.items():
                if test not in self._ended[rank] and test not in self.session.results:
                    self.session.results[test] = Result(test, "failed", reason, time.time() - since, self.log(rank))


# --- the table --------------------------------------------------------------------------------------------------------


def report(session: Session, seconds: float) -> int:
    """Print the table; the exit code."""
    given = session.given
    results = [session.results[test] for test in session.order]
    lines = [_heading(given, seconds), ""]
    width = max((len(result.outcome) for result in results), default=0)
    for result in results:
        lines.append(f"{result.outcome:{width}}  {result.test}")
        if result.reason:
            lines.append(f"{'':{width}}    {' '.join(result.reason.split())[:400]}")
    for result in results:
        if result.details:
            lines += ["", f"--- {result.test}", *result.details.splitlines()[-DETAIL_LINES:]]
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in SHOWN}
    lines += ["", ", ".join(f"{count} {SHOWN[outcome]}" for outcome, count in counts.items())]
    for name, count in session.others.items():
        lines.append(f"left out: {count} of {name} ({expectations.NOT_THE_TRAINER.get(name, 'not about the trainer')})")
    must = [result for result in results if expectations.required(result.test)]
    missed = [result.test for result in must if result.outcome in ("failed", "refused")]
    passed = sum(result.outcome == "passed" for result in must)
    lines.append(
        f"{passed} of {len(must)} that must pass have passed" + (f"; not: {', '.join(missed)}" if missed else "")
    )
    sys.stdout.write("\n".join(lines) + "\n")
    if given.json:
        _write_json(session, counts, missed)
    return int(bool(counts["failed"] or missed or not results))


def _heading(given: argparse.Namespace, seconds: float) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers", "torch"))
    ranks = f"{given.ranks} rank{'s' * (given.ranks > 1)}"
    trainer = given.trainer if ":" in given.trainer else f"{given.trainer}.SFTTrainer"
    return f"TRL's tests on {trainer}: {versions}, {ranks}, {seconds:.0f} s"


def _write_json(session: Session, counts: dict[str, int], missed: list[str]) -> None:
    rows = [vars(session.results[test]) for test in session.order]
    whole = {"trainer": session.given.trainer, "ranks": session.given.ranks, "counts": counts, "missed": missed}
    session.given.json.write_text(json.dumps(whole | {"tests": rows}, indent=1) + "\n", encoding="utf-8")
