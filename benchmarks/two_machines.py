"""Two machines on one host: whole runs over a real link, and everything that can go wrong between them.

    sudo python -m benchmarks.two_machines [--cells accelerate-1+1 link-down ...] [--out FILE.json] [--work DIR]

Each node is a network namespace with an address, a host name, processes and disks of its own
(benchmarks/namespaces.py). Runs are started as docs/two-machines.md says, on CPUs over gloo. A cell that fails lists
its problems. The record keeps the cells that are not run again. Needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.namespaces import ADDRESSES, NAMES, Node, Started, two_nodes, why_not

ROOT = Path(__file__).parent.parent
STEPS, SAVE, BATCH = 60, 10, 12  # 12 rows a step: held by 1, 2, 3 and 4 ranks
PATIENCE = 150.0  # seconds until a run counts as hung
BOUND = 90.0  # seconds within which all ranks have to end after a node or the link is gone (docs/two-machines.md)
PORT = 29500
# Notes each cache entry that a process completes: the renaming of a folder in the cache.
AUDIT = """
import os, socket, sys
def hook(event, args):
    if event == "os.rename" and os.environ["FINETUNE_CACHE"] + "/data/" in str(args[1]) and os.path.isdir(args[0]):
        with open(os.environ["PREPARED"], "a") as file:
            file.write(f"{socket.gethostname()} rank {os.environ.get('RANK')} {args[1]}\\n")
sys.addaudithook(hook)
"""


@dataclass
class Run:
    """A run on two nodes, and how it ended."""

    started: list[Started]
    out: Path
    codes: list[int | str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from `since` to the end of each node's launcher
    ranks_seconds: list[float | None] = field(default_factory=list)  # to the end of its last rank

    def wait(self, *, since: float, patience: float = PATIENCE) -> None:
        """Wait for both launchers and all their processes; end what is left after `patience` seconds."""
        ended: dict[int, tuple[int | str, float]] = {}
        ranks: dict[int, float] = {}
        while len(ended) < len(self.started) and time.monotonic() - since < patience:
            for place, one in enumerate(self.started):
                if place not in ended and one.process.poll() is not None:
                    ended[place] = one.process.returncode, time.monotonic() - since
                if one.ranks():
                    ranks.pop(place, None)
                else:
                    ranks.setdefault(place, time.monotonic() - since)
            time.sleep(0.1)
        self.ranks_seconds = [round(ranks[place], 1) if place in ranks else None for place in range(len(self.started))]
        for place, one in enumerate(self.started):
            code, seconds = ended.get(place, ("still running", time.monotonic() - since))
            self.codes.append(code)
            self.seconds.append(round(seconds, 1))
            one.end()

    @property
    def record(self) -> dict[str, Any]:
        """run.json, or nothing."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.out / "run.json").read_text())
        return {}

    def printed(self) -> dict[str, list[str]]:
        """What each node's user reads of the failure: our own lines, else the last ones."""
        found = {}
        for one in self.started:
            lines = [line for line in one.text.splitlines() if line.strip()]
            own = [line for line in lines if re.match(r"(error|warning|stopped)\b", line)]
            found[one.node.name] = [line[:700] for line in own or lines[-3:]]
        return found

    def tracebacks(self) -> int:
        """How many the ranks have printed; those of torch's and accelerate's launchers are theirs."""
        return sum(
            "/finetune/" in block.partition("\n\n")[0]
            for one in self.started
            for block in one.text.split("Traceback (most recent call last)")[1:]
        )


class Lab:
    """A tiny model, its rows, and the two nodes."""

    def __init__(self, work: Path, python: Path):
        self.work, self.python = work, python
        self.shared, self.own = work / "shared", work / "own"  # the same disk on both nodes; a disk of each node
        self.disks = [work / f"disk-{name}" for name in NAMES]
        for folder in (self.shared, self.own, *self.disks):
            folder.mkdir(parents=True, exist_ok=True)
        self.model, self.rows = self.shared / "model", self.shared / "train.jsonl"
        if not self.rows.exists():
            code = (
                "import sys; from pathlib import Path; from tests.helpers import tiny;"
                "tiny.make_model(Path(sys.argv[1]), hidden=32, layers=2); tiny.make_rows(Path(sys.argv[2]), 240)"
            )
            command = [python, "-c", code, self.model, self.rows]
            subprocess.run(command, cwd=ROOT, env=self.environment("setup"), check=True)
        (self.shared / "audit").mkdir(exist_ok=True)
        (self.shared / "audit" / "sitecustomize.py").write_text(AUDIT)
        self.nodes: tuple[Node, Node] | None = None
        self.cell = ""

    def environment(self, cell: str, *, shared_cache: bool = False, **extra: str) -> dict[str, str]:
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        own = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "",
            "FINETUNE_CACHE": str((self.shared if shared_cache else self.own) / f"cache-{cell}"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.shared / 'audit'}", "PREPARED": str(self.prepared(cell)),
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        return {name: value for name, value in os.environ.items() if name not in launcher} | own | extra

    def prepared(self, cell: str) -> Path:
        return self.shared / f"prepared-{cell}.txt"

    def settings(self, out: Path, world: int, *extra: str) -> list[str]:
        batch = ("--training.per_device_train_batch_size", str(BATCH // world))
        return [
            *("--model.model_name_or_path", str(self.model), "--model.backend", "transformers"),
            *("--model.full_finetuning", "true", "--training.learning_rate", "3e-3"),
            *("--data.train_file", str(self.rows), "--logging.generate_samples", "0"),
            *("--training.max_steps", str(STEPS), "--training.save_steps", str(SAVE), "--logging.logging_steps", "1"),
            *("--training.global_batch_size", str(BATCH), *batch),
            *("--training.gradient_checkpointing", "false", "--training.output_dir", str(out), *extra),
        ]

    def profile(self, rank: int, ranks: Sequence[int], address: str, port: int) -> Path:
        """The shipped profile with the addresses and counts of this run, for one machine."""
        text = (ROOT / "accelerate_configs" / "two_nodes.yaml").read_text()
        wanted = {"num_processes": sum(ranks), "machine_rank": rank, "main_process_ip": address}
        for name, value in (wanted | {"main_process_port": port, "use_cpu": "true"}).items():
            text, count = re.subn(rf"(?m)^{name}:.*$", f"{name}: {value}", text)
            assert count == 1, name
        assert yaml.safe_load(text)["num_machines"] == 2
        path = self.shared / f"{self.cell}-{rank}.yaml"
        path.write_text(text)
        return path

    def launcher(self, how: str, rank: int, ranks: Sequence[int], more: Sequence[str]) -> list[str]:
        """The command in front of `-m finetune.train` on one machine."""
        address, port = ADDRESSES[0], PORT
        if how == "accelerate":
            file = self.profile(rank, ranks, address, port)
            return ["accelerate", "launch", "--config_file", str(file), *more]
        if how == "ranks":  # one on each machine, started by no launcher that waits for the others
            given = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
            given |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            return ["env", *(f"{name}={value}" for name, value in given.items()), "python"]
        count = ["--nnodes", "2", "--nproc_per_node", str(ranks[rank])]
        if how == "torchrun":
            meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{address}:{port}", "--rdzv_id", "run"]
        else:  # "torchrun static"
            meet = ["--node_rank", str(rank), "--master_addr", address, "--master_port", str(port)]
        return ["torchrun", *count, *meet, *more]

    def start(
        self, rank: int, how: str, ranks: Sequence[int], arguments: Sequence[str], *,
        env: dict[str, str] | None = None, module: str = "finetune.train", more=(),
    ) -> Started:  # fmt: skip
        """Start one machine's part of a run."""
        node = self.nodes[rank]
        log = self.work / "logs" / f"{self.cell}-{node.name}.log"
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
        command = [*self.launcher(how, rank, ranks, more), "-m", module, *arguments]
        return node.start(command, env=env or self.environment(self.cell), cwd=self.shared, log=log)

    def run(
        self, how: str, ranks: Sequence[int], *extra: str, out: Path | None = None, env: dict | None = None, more=(),
    ) -> Run:  # fmt: skip
        """Start a run on both machines."""
        out = out or self.shared / "out" / self.cell
        arguments = self.settings(out, sum(ranks), *extra)
        started = [self.start(rank, how, ranks, arguments, env=env, more=more) for rank in (0, 1)]
        return Run(started, out)

    def one_process(self, name: str, *extra: str) -> Path:
        """The output folder of the same run in one process, without a launcher."""
        out = self.work / "one" / name
        if not (out / "model.safetensors").exists():
            shutil.rmtree(out, ignore_errors=True)
            command = [self.python, "-m", "finetune.train", *self.settings(out, 1, *extra)]
            subprocess.run(command, cwd=ROOT, env=self.environment("one"), check=True, capture_output=True)
        return out


def reached(run: Run, step: int, patience: float = 120.0) -> None:
    """Wait until rank 0 reports that step."""
    until = time.monotonic() + patience
    while not any(f"step {step}/" in one.text for one in run.started):
        if time.monotonic() > until or all(one.process.poll() is not None for one in run.started):
            raise RuntimeError("the run did not get that far: " + run.started[0].text[-1500:])
        time.sleep(0.01)


def difference(one: Path, other: Path) -> float | None:
    """|a - b| / |a| over all tensors of two saved models, read with NumPy; None if one is missing."""
    import numpy as np
    from safetensors.numpy import load_file

    files = [folder / "model.safetensors" for folder in (one, other)]
    if not all(file.exists() for file in files):
        return None
    a, b = map(load_file, files)
    assert a.keys() == b.keys()
    apart = sum(np.square(a[name].astype(float) - b[name]).sum() for name in a)
    return float(np.sqrt(apart / sum(np.square(a[name].astype(float)).sum() for name in a)))


def losses_apart(one: Path, other: Path) -> float | None:
    """The largest relative difference between the losses of the same steps."""
    a, b = (json.loads((folder / "run.json").read_text()).get("losses") or [] for folder in (one, other))
    return max((abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)), default=None) if len(a) == len(b) else None


# --- cells ------------------------------------------------------------------------------------------------------------

CELLS: dict[str, Callable[[Lab], dict[str, Any]]] = {}


def cell(*names: str, **fixed: Any) -> Callable:
    """Register a function as a cell, or as several with the arguments that follow from their names."""

    def register(function: Callable) -> Callable:
        for name in names:
            CELLS[name] = lambda lab, name=name: function(lab, name, **fixed)
        return function

    return register


def ended(run: Run, **more: Any) -> dict[str, Any]:
    """What every cell records."""
    return {
        "codes": run.codes,
        "seconds": run.seconds,
        "ranks_seconds": run.ranks_seconds,
        "tracebacks": run.tracebacks(),
        "printed": run.printed(),
        "status": run.record.get("status"),
        "error": run.record.get("error"),
        **more,
    }


def of_healthy(found: dict[str, Any], *, losses: float = 1e-5, weights: float = 1e-4) -> list[str]:
    """Problems of a run that should be as good as one process."""
    wrong = {
        "exit codes other than 0": found["codes"] != [0, 0],
        "losses differ from one process": found["losses_apart"] is None or found["losses_apart"] > losses,
        "weights differ from one process": found["weights_apart"] is None or found["weights_apart"] > weights,
        "run.json does not list both hosts with their ranks": found["hosts"] != found["expected_hosts"],
        f"data was prepared by {found['prepared']}": len(found["prepared"]) != found["machines_that_prepare"],
    }
    return [words for words, is_so in wrong.items() if is_so]


@cell(
    "accelerate-1+1",
    "accelerate-2+2",
    "torchrun-1+2",
    "torchrun-static-2+1",
    "torchrun-2+2-shard",
    "torchrun-1+1-own-store",
    "ranks-1+1",
)
def healthy(lab: Lab, name: str) -> dict[str, Any]:
    return equal_to_one_process(lab, name, shared_cache=False)


@cell("accelerate-1+1-shared-cache")
def healthy_on_one_disk(lab: Lab, name: str) -> dict[str, Any]:
    return equal_to_one_process(lab, name, shared_cache=True)


def equal_to_one_process(lab: Lab, name: str, *, shared_cache: bool) -> dict[str, Any]:
    """Losses, weights and records of a whole run; how often the data was prepared."""
    how = "torchrun static" if "static" in name else name.split("-")[0]
    ranks = [int(count) for count in re.search(r"(\d)\+(\d)", name).groups()]
    extra = ("--training.strategy", "shard") if name.endswith("shard") else ()
    env = lab.environment(lab.cell, shared_cache=shared_cache)
    if name.endswith("own-store"):  # rank 0 hosts the store, not torch's launcher
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    lab.prepared(lab.cell).unlink(missing_ok=True)
    began = time.monotonic()
    run = lab.run(how, ranks, *extra, env=env)
    run.wait(since=began, patience=2 * PATIENCE)
    one, prepared = lab.one_process("plain"), lab.prepared(lab.cell)
    done = run.codes == [0, 0]
    hosts = [{"host": one["host"], "ranks": one["ranks"]} for one in run.record.get("hosts") or []]
    found = ended(
        run,
        losses_apart=losses_apart(one, run.out) if done else None,
        weights_apart=difference(one, run.out),
        prepared=[line.rsplit(" ", 1)[0] for line in prepared.read_text().splitlines()] if prepared.exists() else [],
        machines_that_prepare=1 if shared_cache else 2,
        hosts=sorted(hosts, key=lambda one: one["host"]),
        step_seconds_median=run.record.get("step_seconds_median"),
    )
    spans = [list(range(ranks[0])), list(range(ranks[0], sum(ranks)))]
    if how == "torchrun" and [one["ranks"] for one in found["hosts"]] != spans:  # c10d may number either node first
        spans = [list(range(ranks[1], sum(ranks))), list(range(ranks[1]))]
    found["expected_hosts"] = [{"host": host, "ranks": span} for host, span in zip(NAMES, spans, strict=True)]
    return found | {"problems": of_healthy(found)}


@cell("accelerate-1+2")
def uneven_accelerate(lab: Lab, name: str) -> dict[str, Any]:
    """accelerate's profile has a total alone: it cannot start 1 and 2 ranks."""
    began = time.monotonic()
    run = lab.run("accelerate", [1, 2])
    run.wait(since=began)
    return ended(run, problems=of_refusal(run, "3 processes on 2 machines and started 2", "torchrun", within=None))


def of_refusal(run: Run, *words: str, within: float | None = BOUND, codes: Sequence[int] = (1, 2)) -> list[str]:
    """Problems of a run that should end soon, on both nodes, with words that say why."""
    text = {one.node.name: "\n".join(run.printed()[one.node.name]) for one in run.started}
    everything = "\n".join(text.values()) + str(run.record.get("error"))
    wrong = {
        f"{run.codes} instead of an error on both nodes": not all(code in codes for code in run.codes),
        f"took {max(run.seconds)} s": within is not None and max(run.seconds) > within,
        "a rank printed a traceback": run.tracebacks() > 0,
    }
    missing = {f"{word!r} is in no message": word not in everything for word in words}
    return [sentence for sentence, is_so in (wrong | missing).items() if is_so]


def fault(lab: Lab, how: str, ranks: Sequence[int], act: Callable[[Run], None], *extra: str, step: int = 25) -> Run:
    """Start a run, do something to it after a step, and wait for its end; seconds count from there."""
    run = lab.run(how, ranks, *extra)
    try:
        reached(run, step)
        began = time.monotonic()
        act(run)
        run.wait(since=began)
    finally:
        for one in run.started:
            one.end()
    return run


LONG = ("--training.max_steps", "3000", "--training.save_steps", "20")


@cell("killed-second-accelerate", "killed-second-torchrun", "killed-first-accelerate", "killed-first-torchrun")
def killed(lab: Lab, name: str) -> dict[str, Any]:
    """Everything on one node ends with SIGKILL in training. The other one names it."""
    _, which, how = name.split("-")
    gone = 1 if which == "second" else 0
    run = fault(lab, how, [1, 2] if how == "torchrun" else [1, 1], lambda run: run.started[gone].kill(), *LONG)
    other = Run([run.started[1 - gone]], run.out, [run.codes[1 - gone]], [run.seconds[1 - gone]])
    return ended(run, problems=of_refusal(other, NAMES[gone]))


@cell("link-down-accelerate", "link-down-torchrun", "link-down-torchrun-shard")
def link_down(lab: Lab, name: str) -> dict[str, Any]:
    """The link goes down in training and stays down: each node names the other."""
    how = name.split("-")[2]
    extra = ("--training.strategy", "shard") if name.endswith("shard") else ()
    try:
        ranks = [1, 2] if how == "torchrun" else [1, 1]
        run = fault(lab, how, ranks, lambda run: lab.nodes[1].link("down"), *LONG, *extra)
    finally:
        lab.nodes[1].link("up")
    problems = of_refusal(run, *NAMES)
    if None not in run.ranks_seconds and max(run.ranks_seconds) <= BOUND and run.codes[0] == 1:
        # torchrun's own process on the machine without the store waits for it: not a rank of ours.
        problems = [one for one in problems if "instead of an error" not in one and "took" not in one]
    return ended(run, problems=problems)


@cell("link-flap")
def link_flap(lab: Lab, name: str) -> dict[str, Any]:
    """The link is down for 8 s: the run goes on."""

    def flap(run: Run) -> None:
        lab.nodes[1].link("down")
        time.sleep(8)
        lab.nodes[1].link("up")

    run = fault(lab, "accelerate", [1, 1], flap, "--training.max_steps", "200")
    return ended(run, problems=[] if run.codes == [0, 0] else ["the run failed"])


@cell("terminated-second")
def terminated(lab: Lab, name: str) -> dict[str, Any]:
    """SIGTERM to the launcher of one node, as a cluster does before it takes the machine: all save a checkpoint."""
    act = lambda run: os.kill(run.started[1].first(), signal.SIGTERM)  # noqa: E731
    run = fault(lab, "torchrun", [1, 1], act, *LONG)
    newest = max((int(path.name.split("-")[1]) for path in run.out.glob("checkpoint-*")), default=0)
    steps = run.record.get("steps")
    problems = [] if run.record.get("status") == "interrupted" and newest == steps else [f"{newest} of {steps} saved"]
    return ended(run, newest_checkpoint=newest, steps=steps, problems=problems)


@cell("slurm-1+1")
def slurm(lab: Lab, name: str) -> dict[str, Any]:
    """examples/cluster/slurm.sh with Slurm's variables and stand-ins for its two commands: `srun` starts what follows
    on each node. Slurm itself is not here."""
    venv = lab.shared / "venv" / "bin"
    venv.mkdir(parents=True, exist_ok=True)
    commands = {"scontrol": "echo node-a; echo node-b\n", "srun": 'shift; exec "$@"\n'}
    (venv / "activate").write_text(f"PATH={venv}:$PATH\n")
    for command, text in commands.items():
        (venv / command).write_text(f"#!/bin/bash\n{text}")
        (venv / command).chmod(0o755)
    given = {
        "SUBMIT_DIR": lab.shared,
        "JOB_NODELIST": "node-[a-b]",
        "JOB_ID": 77,
        "JOB_NUM_NODES": 2,
        "GPUS_ON_NODE": 1,
    }
    env = lab.environment(lab.cell) | {f"SLURM_{key}": str(value) for key, value in given.items()}
    env["FINETUNE_VENV"] = str(venv.parent)
    (lab.shared / "my.yaml").write_text("logging: {logging_steps: 1}\n")
    out = lab.shared / "out" / lab.cell
    script = ["bash", ROOT / "examples" / "cluster" / "slurm.sh", lab.shared / "my.yaml", *lab.settings(out, 2)]
    logs = [lab.work / f"{lab.cell}-{node.name}.log" for node in lab.nodes]
    for log in logs:
        log.unlink(missing_ok=True)
    began = time.monotonic()
    pairs = zip(lab.nodes, logs, strict=True)
    run = Run([node.start(script, env=env, cwd=lab.shared, log=log) for node, log in pairs], out)
    run.wait(since=began)
    hosts = [(one["host"], one["ranks"]) for one in run.record.get("hosts") or []]
    good = run.codes == [0, 0] and sorted(host for host, _ in hosts) == list(NAMES)
    return ended(run, hosts=hosts, problems=[] if good else ["the run failed"])


@cell("rank-killed-restart")
def restarted(lab: Lab, name: str) -> dict[str, Any]:
    """`--max-restarts 1`: a killed rank of the second node is started again with all others."""

    def kill_a_rank(run: Run) -> None:
        (rank,) = run.started[1].ranks()
        os.kill(rank, signal.SIGKILL)

    run = lab.run("torchrun", [1, 1], more=("--max-restarts", "1"))
    reached(run, 25)
    began = time.monotonic()
    kill_a_rank(run)
    run.wait(since=began)
    problems = [] if run.codes == [0, 0] else ["the run failed"]
    source = str(run.record.get("resumed_from"))
    problems += [] if "checkpoint-" in source else [f"resumed from {source}"]
    return ended(run, resumed_from=Path(source).name, problems=problems)


@cell("resume-after-kill", "resume-after-kill-shard")
def resume(lab: Lab, name: str) -> dict[str, Any]:
    """After a killed node, the run resumes and ends with the bits of an uninterrupted one."""
    extra = ("--training.strategy", "shard") if name.endswith("shard") else ()
    whole = lab.run("torchrun", [1, 1], *extra, out=lab.shared / "out" / f"{lab.cell}-whole")
    whole.wait(since=time.monotonic())
    run = fault(lab, "torchrun", [1, 1], lambda run: run.started[1].kill(), *extra)
    newest = max((int(path.name.split("-")[1]) for path in run.out.glob("checkpoint-*")), default=0)
    began = time.monotonic()
    again = lab.run("torchrun", [1, 1], *extra, "--training.resume_from_checkpoint", "true")
    again.wait(since=began)
    source = int(str(again.record.get("resumed_from") or "-0").rsplit("-", 1)[1])
    found = ended(
        again,
        killed_codes=run.codes,
        killed_seconds=run.seconds,
        newest_checkpoint=newest,
        resumed_from=source,
        steps_lost_at_most=SAVE,
        weights_apart=difference(whole.out, again.out),
        losses_equal=again.record.get("losses") == (whole.record.get("losses") or [])[source:],
    )
    wrong = {
        "the resumed run failed": again.codes != [0, 0],
        f"resumed from {source}, newest is {newest}": source != newest or newest < 20,
        "weights differ from the uninterrupted run": found["weights_apart"] != 0.0,
        "losses differ from the uninterrupted run": not found["losses_equal"],
    }
    return found | {"problems": [words for words, is_so in wrong.items() if is_so]}


@cell("output-not-shared", "output-not-shared-shard", "output-unwritable", "data-missing", "model-missing")
def disk_missing(lab: Lab, name: str) -> dict[str, Any]:
    """The second node lacks a folder that the first one has, or has another one under the same path."""
    extra: tuple[str, ...] = ()
    out = lab.shared / "out" / lab.cell
    if name.startswith("output-not-shared"):
        out = lab.own / lab.cell
        extra = ("--training.strategy", "shard") if name.endswith("shard") else ()
        words = (NAMES[1], "training.output_dir")
    elif name == "output-unwritable":
        out = lab.own / lab.cell / "out"
        (lab.disks[1] / lab.cell).write_text("a file where the other machine has a folder")
        words = (NAMES[1], "training.output_dir")
    elif name == "data-missing":
        shutil.copy(lab.rows, lab.disks[0] / "rows.jsonl")
        extra, words = ("--data.train_file", str(lab.own / "rows.jsonl")), (NAMES[1], "rows.jsonl")
    else:
        shutil.copytree(lab.model, lab.disks[0] / "model", dirs_exist_ok=True)
        extra, words = ("--model.model_name_or_path", str(lab.own / "model")), (NAMES[1], str(lab.own / "model"))
    began = time.monotonic()
    run = lab.run("accelerate", [1, 1], *extra, out=out)
    run.wait(since=began)
    return ended(run, problems=of_refusal(run, *words, codes=(1, 2)))


@cell("name-of-loopback")
def loopback(lab: Lab, name: str) -> dict[str, Any]:
    """Each node's own name resolves to 127.0.1.1, as Debian and Ubuntu install it."""
    files = [Path("/etc/netns", node.namespace, "hosts") for node in lab.nodes]
    before = [file.read_text() for file in files]
    try:
        for file, node, text in zip(files, lab.nodes, before, strict=True):
            file.write_text(re.sub(rf"(?m)^\S+ {node.name}$", f"127.0.1.1 {node.name}", text))
        began = time.monotonic()
        run = lab.run("accelerate", [1, 1])
        run.wait(since=began)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    return ended(run, problems=[] if run.codes == [0, 0] else ["the run failed"])


@cell("bandwidth")
def bandwidth(lab: Lab, name: str) -> dict[str, Any]:
    """The link limited by `tc`: `bench comm` over both machines, a dry run on one, and the run that they predict."""
    model = lab.work / "larger"
    if not model.exists():
        code = "import sys; from pathlib import Path; from tests.helpers import tiny; " + (
            "tiny.make_model(Path(sys.argv[1]), hidden=128, layers=4)"
        )
        subprocess.run([lab.python, "-c", code, model], cwd=ROOT, env=lab.environment("setup"), check=True)
    steps = ("--model.model_name_or_path", str(model), "--training.max_steps", "30", "--training.save_steps", "30")
    env = lab.environment(lab.cell, shared_cache=True)
    dry = [lab.python, "-m", "finetune.train", *lab.settings(lab.shared / "dry", 2, *steps), "--dry-run"]
    done = subprocess.run(dry, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"dry_run_code": done.returncode, "limits": []}
    problems = [] if done.returncode == 0 else ["the dry run failed: " + done.stdout[-500:]]
    for limit in (None, 400):
        for node in lab.nodes:
            node.limit(limit)
        result = lab.shared / "comm.json"
        command = ["comm", "--runs", "2", "--steps", "2", "--json", str(result)]
        started = [lab.start(rank, "torchrun", [1, 1], command, env=env, module="finetune.bench") for rank in (0, 1)]
        comm = Run(started, result)
        comm.wait(since=time.monotonic())
        run = lab.run("torchrun", [1, 1], *steps, out=lab.shared / "out" / f"limit-{limit}", env=env)
        run.wait(since=time.monotonic())
        if comm.codes + run.codes != [0] * 4:
            problems.append(f"{limit} Mbit/s: exit codes {comm.codes + run.codes}")
            found["printed"] = comm.printed() | run.printed()
            continue
        rows = json.loads(result.read_text())["collectives"]["all_reduce"]
        step = (run.record.get("prediction") or {}).get("step_seconds") or {}
        one = {
            "mbit_per_s": limit,
            "all_reduce_4_mib_seconds": next(row["seconds"]["median"] for row in rows if row["bytes"] >= 4 << 20),
            "step_seconds": step,
            "exposed_communication_fraction": run.record.get("exposed_communication_fraction"),
            "reason": (run.record.get("prediction") or {}).get("reason"),
        }
        found["limits"].append(one)
        if not step:
            problems.append(f"{limit} Mbit/s: no prediction: {one['reason']}")
    for node in lab.nodes:
        node.limit(None)
    if not problems:
        # What the limit adds to the predicted step against the communication that the limited run measured. The rest of
        # the step is that of two ranks on two busy cores, which one process does not foresee.
        free, limited = found["limits"]
        added = limited["step_seconds"]["predicted"] - free["step_seconds"]["predicted"]
        exposed = limited["exposed_communication_fraction"] * limited["step_seconds"]["measured"]
        found |= {"predicted_added_seconds": added, "measured_exposed_seconds": exposed}
        if abs(added - exposed) > 0.25 * exposed:
            problems.append(f"communication was predicted with an error of {added / exposed - 1:+.0%}")
    return found | {"problems": problems}


# --- main -------------------------------------------------------------------------------------------------------------


def measure(lab: Lab, name: str) -> dict[str, Any]:
    """One cell, with fresh nodes and folders."""
    lab.cell = name
    for disk in lab.disks:
        shutil.rmtree(disk)
        disk.mkdir()
    shutil.rmtree(lab.shared / "out", ignore_errors=True)
    disks = [{disk: lab.own} for disk in lab.disks]
    began = time.monotonic()
    with two_nodes(f"two-machines-{os.getpid()}", disks) as lab.nodes:
        try:
            found = CELLS[name](lab)
        except Exception as error:  # of this script, or a run that did not begin: the others go on
            found = {"problems": [f"{type(error).__name__}: {error}"]}
    return {"cell": name, "ok": not found["problems"], **found, "cell_seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="NAME", help=", ".join(CELLS))
    parser.add_argument("--work", type=Path, help="scratch folder, kept; a temporary one by default")
    parser.add_argument("--out", type=Path, help="record; default: benchmarks/results/DATE-two-machines-cpu.json")
    given = parser.parse_args()
    if (why := why_not()) is not None:
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the nodes are removed on the way
    today = datetime.date.today().isoformat()
    path = given.out or ROOT / "benchmarks" / "results" / f"{today}-two-machines-cpu.json"
    known = json.loads(path.read_text())["cells"] if path.exists() else []
    cells = {one["cell"]: one for one in known}
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-machines-")))
        lab = Lab(work.absolute(), Path(sys.executable).absolute())
        for name in given.cells:
            cells[name] = found = measure(lab, name)
            shown = f"{'ok  ' if found['ok'] else 'FAIL'} {name:28} {found['cell_seconds']:6.1f} s  "
            sys.stdout.write(shown + "; ".join(found["problems"]) + "\n")
            sys.stdout.flush()
            about = {"python": sys.version.split()[0], "cores": os.cpu_count(), "kernel": os.uname().release}
            ordered = [cells[name] for name in CELLS if name in cells]
            text = json.dumps({"date": today, "machine": about, "bound_seconds": BOUND, "cells": ordered}, indent=1)
            for place, word in ((work.absolute(), "WORK"), (ROOT, "PROJECT"), (Path(yaml.__file__).parents[1], "SITE")):
                text = text.replace(str(place), word)
            path.write_text(text + "\n")
    return 0 if all(cells[name]["ok"] for name in given.cells) else 1


if __name__ == "__main__":
    sys.exit(main())
