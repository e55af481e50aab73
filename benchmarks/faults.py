"""Kill training runs at random moments, resume them, and report what was lost. One JSON line per trial.

    python -m benchmarks.faults --kills 100 --work DIR --out kills.jsonl    # with a new seed, which is printed
    python -m benchmarks.faults --kills 100 --seed 1 --warm-share 0.6 --work DIR --out kills.jsonl
    python -m benchmarks.faults --crashes 40 --seed 1 --work DIR --out crashes.jsonl

`--kills` starts a run, sends one signal at a random moment, waits for every process of the run to end, resumes on a
random number of ranks and compares with the uninterrupted run. A cold trial starts the shipped command through its
launchers, as a user does. In a warm one the launcher (torch's agent, as in torchrun) and the ranks are forks of a
process that has imported everything, so that a trial takes seconds; transformers backend only. There a rank may also
strike by itself at a place in its work (PLACES), or fill the disk that the run writes to, which needs `mount`. Methods
are LoRA, full fine-tuning, sharded, with rows shared by ranks, a script on our SFTTrainer, and an export.
`--crashes` runs one rank in such a fork and kills it with SIGKILL at the n-th file operation in the output folder, so
that every window between two of them is reached.

A trial has a problem if the resume fails or does not start from the newest whole checkpoint, if more than `save_steps`
steps are lost after SIGKILL or any after SIGTERM or SIGINT, if a process is left PATIENCE seconds after the signal, if
an incomplete checkpoint has a checkpoint's name, if weights or losses differ, if the survivors do not name a rank that
was killed or a full disk, or if anything is left over at the end.

Needs Linux (/proc). Standard library only; torch, safetensors and the project are in the processes that it starts.
Only processes of a trial are ever signaled: they carry FAULTS_MARK in their environment or are of its session.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

STEPS, SAVE, BATCH, ROWS = 13, 3, 4, 40  # an epoch is 10 steps, and the end is not the end of one
PATIENCE = 60  # seconds after the signal in which all processes should have ended by themselves
ACTIONS = ("kill rank", "kill launcher", "kill tree", "term launcher", "int launcher", "term rank")
MOMENTS = {"start-up": 0.25, "training": 0.4, "writing": 0.25, "final": 0.1}
# Of forked ranks: how often a run comes there at least, and seconds after it that the strike may come.
PLACES = {"first step": (1, 0.05), "evaluation": (3, 0.02), "save": (5, 0.04), "rename": (5, 0.005)}
METHODS = ("lora", "full", "shard", "shared", "drop-in", "export")
PLACES_SHARE = 0.7  # of the trials of forked ranks
EXPORT_SECONDS = 2.0  # that an export takes, about
DISK_MIB = 24  # of a disk that fills
LAUNCHERS = {1: ("python", "single.yaml", "torchrun"), 2: ("cpu_2.yaml", "torchrun"), 4: ("torchrun",)}
MARK = "FAULTS_MARK"
RESUME = ["--training.resume_from_checkpoint", "true"]


# --- the job ----------------------------------------------------------------------------------------------------------


class Lab:
    """The project under test, a tiny model and data, and the uninterrupted runs that trials are compared with."""

    def __init__(self, project: Path, python: Path, work: Path):
        self.project, self.python, self.work = project, python, work
        self.base = work / "base"
        self.references: dict[tuple[str, str, int], dict] = {}
        self.start_up = 4.0  # seconds until a run writes run.json: the longest of those seen
        self.forks: Forks | None = None
        self.methods = list(METHODS)  # of the transformers backend's trials
        self.mount = [] if os.getuid() == 0 else ["sudo", "-n"]
        (work / "probe").mkdir(parents=True, exist_ok=True)
        try:
            with disk(self, work / "probe"):
                self.fills = True
        except (OSError, subprocess.CalledProcessError):
            self.fills = False  # this user may not mount
        if not (self.base / "train.jsonl").exists():
            self.helper(
                "from pathlib import Path; from tests.helpers import tiny; import sys; d = Path(sys.argv[1]);"
                "d.mkdir(parents=True, exist_ok=True); tiny.make_model(d / 'model', hidden=32, layers=1);"
                "tiny.make_rows(d / 'train.jsonl', int(sys.argv[2])); tiny.make_rows(d / 'eval.jsonl', 11, seed=1)",
                self.base, ROWS,
            )  # fmt: skip

    def helper(self, code: str, *arguments: object) -> str:
        """Run Python code with the project's interpreter; what it prints."""
        done = subprocess.run(
            [self.python, "-c", code, *map(str, arguments)], cwd=self.project, env=self.environment(), text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout

    def environment(self, mark: str = "", **extra: str) -> dict[str, str]:
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        own = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(self.work / "cache"),
            "PYTHONPATH": str(self.project), "COLUMNS": "200", MARK: mark,
        }  # fmt: skip
        return {name: value for name, value in os.environ.items() if name not in launcher} | own | extra

    def settings(self, backend: str, method: str, out: Path) -> list[str]:
        kinds = {
            "full": ("--model.full_finetuning", "true", "--training.learning_rate", "3e-3"),
            "lora": ("--lora.r", "8", "--lora.lora_dropout", "0.1", "--training.learning_rate", "2e-2"),
        }
        kinds["shard"] = (*kinds["full"], "--training.strategy", "shard")
        kinds["shared"] = (*kinds["lora"], "--training.context_parallel", "2")
        if method == "export":
            run = self.reference("transformers", "lora", 1)["out"]
            return [str(run), "--to", "merged", "--out", str(out)]
        if method == "drop-in":
            words = ("--model", self.base / "model", "--data", self.base / "train.jsonl", "--out", out)
            return [*map(str, words), "--max_steps", str(STEPS), "--save_steps", str(SAVE)]
        return [
            *("--model.model_name_or_path", str(self.base / "model"), "--model.backend", backend, *kinds[method]),
            *("--data.train_file", str(self.base / "train.jsonl"), "--logging.generate_samples", "0"),
            *("--data.eval_file", str(self.base / "eval.jsonl"), "--training.eval_steps", "4"),
            *("--training.max_steps", str(STEPS), "--training.save_steps", str(SAVE), "--logging.logging_steps", "1"),
            *("--training.global_batch_size", str(BATCH), "--training.per_device_train_batch_size", "1"),
            *("--training.gradient_checkpointing", "false", "--training.output_dir", str(out)),
        ]

    def command(self, how: str, world: int) -> list[str]:
        if how == "python":
            start = []
        elif how == "torchrun":
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        else:
            profile = self.project / "accelerate_configs" / how
            start = ["-m", "accelerate.commands.launch", "--config_file", str(profile), "--main_process_port", "0"]
        return [str(self.python), *start, "-m", "finetune.train"]

    def start(self, how: str, world: int, arguments: list[str], log: Path, **extra: str) -> Tree:
        mark = uuid.uuid4().hex
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*self.command(how, world), *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=self.project,
                env=self.environment(mark, **extra), start_new_session=True,
            )  # fmt: skip
        return Tree(process, mark, log)

    def job(self, method: str) -> dict:
        """What forked ranks run, beside its arguments."""
        script = str(self.project / "tests" / "dropin" / "own.py")
        return {"script": script} if method == "drop-in" else {"export": True} if method == "export" else {}

    def finish(
        self, backend: str, method: str, how: str, world: int, arguments: list[str], log: Path
    ) -> tuple[int | str, str]:
        """Run to the end, undisturbed: the exit code, and by which launcher. The transformers backend is imported
        already, so its ranks are forks with a launcher's variables."""
        if backend == "transformers":
            self.forks = self.forks or Forks(self)
            return self.forks.run(arguments, log, world=world, **self.job(method)), "forked ranks"
        tree = self.start(how, world, arguments, log)
        try:
            return tree.process.wait(300), how
        except subprocess.TimeoutExpired:
            return "hung", how
        finally:
            tree.end()

    def reference(self, backend: str, method: str, world: int) -> dict:
        """The uninterrupted run: its folder, its losses, and the names that it leaves."""
        key = (backend, method, world)
        if key not in self.references:
            out = self.work / "references" / "-".join(map(str, key))
            arguments = self.settings(backend, method, out)
            if not finished(out):
                shutil.rmtree(out, ignore_errors=True)
                out.parent.mkdir(parents=True, exist_ok=True)
                log = out.with_suffix(".log")
                code, _ = self.finish(backend, method, "torchrun", world, arguments, log)
                if code:
                    raise RuntimeError(log.read_text(errors="replace")[-3000:])
            names = {path.name for path in out.iterdir()}
            self.references[key] = {"out": out, "losses": read_json(out / "run.json").get("losses"), "names": names}
        return self.references[key]

    def difference(self, one: Path, other: Path) -> float | None:
        """|a - b| / |a| over the trained tensors of two models; 0.0 if the bits are equal, None if one is missing."""
        files = [weights_of(folder) for folder in (one, other)]
        if None in files:
            return None
        if files[0].read_bytes() == files[1].read_bytes():
            return 0.0
        code = (
            "import sys, torch; from safetensors.torch import load_file as load; a, b = map(load, sys.argv[1:]);"
            "assert a.keys() == b.keys();"
            "n = sum(((a[k].double() - b[k].double()) ** 2).sum() for k in a) ** .5;"
            "d = sum((a[k].double() ** 2).sum() for k in a) ** .5; print(float(n / d))"
        )
        return float(self.helper(code, *files))


class Tree:
    """The processes of one run, wherever they hang: all that carry its mark."""

    def __init__(self, process: subprocess.Popen, mark: str, log: Path):
        self.process, self.mark, self.log = process, mark, log

    def members(self) -> dict[int, str]:
        """pid -> "launcher", "rank N", or the end of its command line. Zombies do not count."""
        needle = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                if needle not in environment or (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            pid = int(entry.name)
            rank = next((v[5:].decode() for v in environment if v.startswith(b"RANK=")), None)
            of_train = any(word in ("finetune.train",) or word.endswith("finetune/train.py") for word in words)
            launches = any("accelerate" in word or word == "torch.distributed.run" for word in words)
            if pid == self.process.pid:
                found[pid] = "launcher"
            elif of_train and not launches:
                found[pid] = f"rank {rank or 0}"
            else:
                found[pid] = " ".join(words)[-60:]
        return found

    def tail(self, count: int) -> str:
        return self.log.read_text(errors="replace")[-count:]

    def wait(self, seconds: float) -> dict[int, str]:
        """Wait until every member has ended, or so long; those that are left."""
        until = time.monotonic() + seconds
        while True:
            self.process.poll()
            left = self.members()
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.1)

    def end(self) -> None:
        for pid in self.members():
            send(pid, signal.SIGKILL)
        self.process.wait()


class WarmTree(Tree):
    """The same of a run whose processes are forks: all of one session. Ranks leave their ids in a folder."""

    def __init__(self, forks: Forks, job: dict):
        self.forks, self.job, self.log = forks, job, Path(job["log"])
        self.process = self  # it answers for the launcher
        self.returncode: int | None = None
        self.pid = json.loads(forks.process.stdout.readline())["launcher"]

    def poll(self) -> int | None:
        if self.returncode is None and Path(self.job["ended"]).exists():
            self.returncode = json.loads(self.forks.process.stdout.readline())["done"]
        return self.returncode

    def wait(self, seconds: float = 300) -> dict[int, str]:
        return super().wait(seconds)

    def members(self) -> dict[int, str]:
        ranks = {}
        for file in Path(self.job["pids"]).iterdir():
            ranks[int(file.read_text() or 0)] = f"rank {file.name}"
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:
                continue
            if int(session) == self.pid and state != "Z":
                pid = int(entry.name)
                found[pid] = "launcher" if pid == self.pid else ranks.get(pid, "other")
        return found

    def end(self) -> None:
        for pid in self.members():
            send(pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


# --- what lies in an output folder ------------------------------------------------------------------------------------


def weights_of(folder: Path) -> Path | None:
    """The file of a final adapter or model."""
    files = (folder / name for name in ("adapter_model.safetensors", "model.safetensors"))
    return next((file for file in files if file.exists()), None)


def finished(out: Path) -> bool:
    """Whether a run or an export has come to its end."""
    return read_json(out / "run.json").get("status") == "done" or (out / "export.json").exists()


def whole(checkpoint: Path) -> bool:
    """By this file's own judgement: a manifest, and all that it names with its size."""
    try:
        files = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def checkpoints(out: Path) -> dict[int, bool]:
    """Step -> whether it is whole."""
    found = [path for path in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return {int(path.name[11:]): whole(path) for path in sorted(found, key=lambda path: int(path.name[11:]))}


def junk(out: Path, expected: set[str]) -> list[str]:
    """What an uninterrupted run leaves nothing like: partial folders and files, at any depth."""
    if not out.exists():
        return []
    known = re.compile(r"(checkpoint|earlier-run)-\d+")  # the latter by a script that has nothing to resume
    top = [p.name for p in out.iterdir() if p.name not in expected and not known.fullmatch(p.name)]
    deep = [str(p.relative_to(out)) for p in out.rglob("*.partial*") if p.parent != out]
    return sorted(top + deep)


def last_step(log: Path) -> int:
    steps = re.findall(rf"step (\d+)/{STEPS}", log.read_text(errors="replace"))
    return int(steps[-1]) if steps else 0


def errors_in(text: str) -> list[str]:
    """The lines that a user would read as the cause."""
    pattern = (
        r"^(error: .*|\[rank \d+\] .*Error.*|error: \[rank.*|warning: .*|stopped by .*|Stopped by .*|\w*Error: .*)$"
    )
    return list(dict.fromkeys(line[:300] for line in re.findall(pattern, text, re.M)))[:6]


# --- A: random kills --------------------------------------------------------------------------------------------------


def choose_moment(rng: random.Random, start_up: float, method: str, warm: bool) -> dict:
    if method == "export":
        return {"kind": "export", "place": "start", "nth": 1, "after": rng.uniform(0.05, EXPORT_SECONDS)}
    if warm and rng.random() < PLACES_SHARE:
        place = rng.choice([one for one in PLACES if method != "drop-in" or one != "evaluation"])
        times, seconds = PLACES[place]
        after = rng.choice((0.0, rng.uniform(0, seconds)))
        return {"kind": place, "place": place, "nth": rng.randint(1, times), "after": after}
    kind = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    if kind == "start-up":
        return {"kind": kind, "after": rng.uniform(0, start_up)}
    if kind == "training":
        return {"kind": kind, "step": rng.randint(1, STEPS - 1), "after": rng.uniform(0, 0.1)}
    if kind == "writing":
        step = rng.randrange(SAVE, STEPS + 1, SAVE)
        return {"kind": kind, "since": f".checkpoint-{step}.partial", "after": rng.uniform(0, 0.04)}
    return {"kind": kind, "since": ".final.partial", "after": rng.uniform(0, 0.03)}


def wait_for_moment(lab: Lab, tree: Tree, out: Path, moment: dict) -> None:
    began = time.monotonic()
    if moment["kind"] != "start-up":
        name = out / moment.get("since", "run.json")
        done = name.with_name(name.name.removeprefix(".").removesuffix(".partial"))  # it may come and go unseen
        while not (name.exists() or done.exists()) and tree.process.poll() is None:
            time.sleep(0.0005)
        lab.start_up = max(lab.start_up, time.monotonic() - began) if "step" in moment else lab.start_up
    while last_step(tree.log) < moment.get("step", 0) and tree.process.poll() is None:
        time.sleep(0.005)
    until = time.monotonic() + moment["after"]
    while time.monotonic() < until and tree.process.poll() is None:
        time.sleep(min(0.002, max(until - time.monotonic(), 0)))


def strike(rng: random.Random, tree: Tree, action: str) -> str:
    """Send the signal; to whom."""
    verb, target = action.split()
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[verb]
    members = tree.members()
    if target == "tree":
        for pid in members:
            send(pid, number)
        return f"{len(members)} processes"
    ranks = sorted(pid for pid, name in members.items() if name.startswith("rank"))
    pid = rng.choice(ranks) if target == "rank" and ranks else tree.process.pid
    send(pid, number)
    return members.get(pid, "gone")


def kill_trial(lab: Lab, rng: random.Random, number: int, backends: list[str], warm: bool) -> dict:
    """Start, strike, resume, judge. The folder of a trial without a problem is removed."""
    backend = "transformers" if warm else rng.choice(backends)
    methods = [one for one in lab.methods if warm or one not in ("drop-in", "export")]
    method = rng.choice(methods) if backend == "transformers" else "lora"
    sizes = (0.45, 0.5, 0.05 if backend == "transformers" else 0)
    sizes = {"shared": (0, 0.9, 0.1), "export": (1, 0, 0)}.get(method, sizes)
    world = rng.choices((1, 2, 4), sizes)[0]
    how = rng.choice(("python", "torchrun")[world > 1 :] if warm else LAUNCHERS[world])
    how = "python" if method == "export" else how
    moment = choose_moment(rng, lab.start_up, method, warm)
    actions = ACTIONS if how != "python" else [one for one in ACTIONS if "tree" not in one]
    action = rng.choice((*actions, "fill disk") if "place" in moment and lab.fills else actions)
    again = rng.choices((1, 2, 4), sizes)[0]
    how_again = rng.choice(LAUNCHERS[again])
    lab.reference(backend, method, world)

    folder = lab.work / "trials" / f"{number:03d}"
    out = folder / "disk" / "out"
    shutil.rmtree(folder, ignore_errors=True)
    out.parent.mkdir(parents=True)
    arguments = lab.settings(backend, method, out)
    trial = {
        "trial": number,
        "backend": backend,
        "method": method,
        "launcher": f"{how} x{world}{' warm' if warm else ''}",
        "action": action,
        "moment": " ".join(f"{name}={value}" for name, value in moment.items() if name != "place"),
    }
    with disk(lab, out.parent) if action == "fill disk" else contextlib.nullcontext():
        if warm:
            rank = 0 if moment["kind"] == "rename" else rng.randrange(world)
            own = {"action": action, "how": how, "rank": rank, "file": str(folder / "struck"), "disk": str(out.parent)}
            lab.forks = lab.forks or Forks(lab)
            job = lab.job(method) | ({"strike": moment | own} if "place" in moment else {})
            tree: Tree = lab.forks.start(how, world, arguments, folder / "killed.log", **job)
        else:
            tree = lab.start(how, world, arguments, folder / "killed.log")
        trial |= struck(lab, rng, tree, out, action, moment)
        (out.parent / "filler").unlink(missing_ok=True)
        trial |= resumed(lab, out, backend, method, how_again, again, arguments)
        trial["problems"] = problems_of(trial, world, again)
    if not trial["problems"]:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


@contextlib.contextmanager
def disk(lab: Lab, folder: Path):
    """A small disk of its own in a folder. With a problem, what was on it is not kept."""
    options = f"size={DISK_MIB}m,uid={os.getuid()},mode=755"
    subprocess.run([*lab.mount, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*lab.mount, "umount", "--lazy", str(folder)], check=True)


def struck(lab: Lab, rng: random.Random, tree: Tree, out: Path, action: str, moment: dict) -> dict:
    """Wait for the moment, send the signal, wait for every process; what was found then."""
    began, folder = time.monotonic(), out.parent.parent
    if "place" in moment:  # a rank strikes
        while not (folder / "struck").exists() and tree.process.poll() is None:
            time.sleep(0.01)
        found: dict = {"struck": "by a rank" if (folder / "struck").exists() else "gone"}
    else:
        wait_for_moment(lab, tree, out, moment)
        found = {"struck": strike(rng, tree, action)}
    at = time.monotonic()
    found["at_s"] = round(at - began, 2)
    while tree.process.poll() is None and time.monotonic() - at < PATIENCE:
        time.sleep(0.02)
    found["launcher_ended_s"] = round(time.monotonic() - at, 2)
    left = tree.wait(PATIENCE)
    found["all_ended_s"] = round(time.monotonic() - at, 2)
    found["left"] = sorted(left.values())
    tree.end()
    found["code"] = tree.process.poll()
    found["printed"] = errors_in(tree.tail(20_000))
    kept, reached = checkpoints(out), last_step(folder / "killed.log")
    newest = max((step for step, good in kept.items() if good), default=0)
    found |= {"reached": reached, "checkpoints": list(kept), "newest_whole": newest, "lost": max(reached - newest, 0)}
    found["incomplete"] = [step for step, good in kept.items() if not good]
    record = read_json(out / "run.json")
    found |= {"status": record.get("status"), "cause": record.get("error") or record.get("interrupted_by")}
    return found


def resumed(lab: Lab, out: Path, backend: str, method: str, how: str, world: int, arguments: list[str]) -> dict:
    """Resume on `world` ranks and compare with the uninterrupted run of that size."""
    log = out.parent.parent / "again.log"
    other = lab.reference(backend, method, world)
    name = out / ("export.json" if method == "export" else "run.json")
    before = name.read_bytes() if name.exists() else b""
    done = finished(out)
    again = {"drop-in": ["--resume"], "export": ["--overwrite"]}.get(method, RESUME)
    began, code = time.monotonic(), 0
    if method == "export" and done:
        how = "not again"
    else:
        code, how = lab.finish(backend, method, how, world, [*arguments, *again], log)
    record = read_json(out / "run.json")
    if method == "export":
        record = {"status": "done" if finished(out) else None, "steps": STEPS}
    source = record.get("resumed_from") or ""
    start = int(re.search(r"(\d+)$", source).group(1)) if source else 0
    found: dict = {"resume": f"{how} x{world}", "resume_code": code, "resume_s": round(time.monotonic() - began, 1)}
    found |= {"finished_before": done, "resumed_from": start, "resume_status": record.get("status")}
    printed = log.read_text(errors="replace") if log.exists() else ""
    found |= {"steps": record.get("steps"), "resume_printed": errors_in(printed[-20_000:])}
    found["record_untouched"] = name.read_bytes() == before if done else None
    found["left_over"] = junk(out, other["names"]) + [one.name for one in out.parent.iterdir() if one != out]
    found["difference"] = lab.difference(other["out"], out)
    losses, expected = record.get("losses") or [], (other["losses"] or [])[start:]
    near = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)]
    same_count = len(losses) == len(expected)
    found["losses_off"] = max(near, default=None) if same_count else f"{len(losses)} of {len(expected)}"
    return found


def problems_of(trial: dict, world: int, again: int) -> list[str]:
    """What is wrong with a trial, in words; nothing is the promise kept."""
    promised = 0 if trial["action"].startswith(("term", "int")) else SAVE
    # Full fine-tuning under accumulation on several ranks: a new process reduces its first micro-batch by itself, which
    # changes the last bits. Dropout is drawn anew on another number of ranks, so LoRA weights compare at one size only.
    full = trial["method"] in ("full", "shard", "drop-in")
    if again == world:
        limit = 1e-6 if full and world > 1 else 0.0
    else:
        limit = 1e-5 if full else None
    off = trial["difference"]
    wrong = {
        "resume failed": trial["resume_code"] != 0 or trial["resume_status"] != "done",
        f"{trial['steps']} steps of {STEPS}": trial["resume_code"] == 0 and trial["steps"] != STEPS,
        "a finished run was changed": trial["record_untouched"] is False and trial["method"] != "drop-in",
        "not from the newest whole checkpoint": not trial["finished_before"]
        and trial["resumed_from"] != trial["newest_whole"],
        "other weights": (limit is not None and (off is None or off > limit)) and not trial["finished_before"],
        f"{trial['lost']} steps lost": trial["lost"] > promised,
        "incomplete checkpoint under its own name": bool(trial["incomplete"]),
        "processes left": bool(trial["left"]),
        "left over": bool(trial["left_over"]),
        "cause not named": not names_cause(trial, world),
    }
    return [words for words, found in wrong.items() if found]


def names_cause(trial: dict, world: int) -> bool:
    """Whether what is left of a run names the rank that was killed, or the disk that was full."""
    words = f"{trial['printed']} {trial['cause']}"
    if trial["action"] == "fill disk":
        return trial["finished_before"] or not trial["code"] or "No space left" in words
    # Forked ranks have no environment of their own in /proc, by which the others find out who is missing.
    killed = trial["action"] == "kill rank" and world > 1 and "warm" not in trial["launcher"]
    # Without rank 0, or before run.json is written, there is nobody to name it.
    return not killed or trial["status"] in (None, "running", "done") or "which was killed" in words


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


# --- crash points -----------------------------------------------------------------------------------------------------


class Forks:
    """A process that has imported everything, and forks the ranks of one run after the other."""

    def __init__(self, lab: Lab):
        script = Path(__file__).with_name("forked_ranks.py")
        self.process = subprocess.Popen(
            [str(lab.python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=lab.project, env=lab.environment("forks"),
        )  # fmt: skip

    def run(self, arguments: list[str], log: Path, *, world: int = 1, **watched: object) -> int:
        """The exit code that is furthest from 0. `watched`: `out`, and `at` which operation there to kill the run, with
        what was under way into `facts`; at 0 none is killed, and their list goes there."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"arguments": arguments, "log": str(log), "world": world, "port": port, **watched}
        self.process.stdin.write(json.dumps(job, default=str) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith('{"done'):
            if not line:
                raise RuntimeError("the forking process ended")
        return json.loads(line)["done"]

    def start(self, how: str, world: int, arguments: list[str], log: Path, **more: object) -> WarmTree:
        pids = log.with_suffix(".pids")
        pids.mkdir()
        job = {"how": how, "world": world, "arguments": arguments, "log": str(log), "pids": str(pids), **more}
        job["ended"] = str(log.with_suffix(".ended"))
        log.touch()
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return WarmTree(self, job)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def crash_trial(lab: Lab, forks: Forks, folder: Path, arguments, at: int, expected: set[str]) -> dict:
    out, facts = folder / "out", folder / "facts.json"
    shutil.rmtree(out, ignore_errors=True)
    facts.unlink(missing_ok=True)
    log = folder / "out.log"
    log.unlink(missing_ok=True)
    forks.run(arguments(out), log, out=out, facts=facts, at=at)
    trial = {"crash": at, **read_json(facts)}
    kept, reached = checkpoints(out), re.findall(r"step (\d+)/12", log.read_text(errors="replace"))
    newest = max((step for step, good in kept.items() if good), default=0)
    trial |= {"reached": int(reached[-1]) if reached else 0, "newest_whole": newest}
    trial["incomplete"] = [step for step, good in kept.items() if not good]
    trial["junk_after_kill"] = junk(out, expected)
    trial["final_model_there"] = (out / "model.safetensors").exists()
    trial["finished_before"] = read_json(out / "run.json").get("status") == "done"
    forks.run([*arguments(out), *RESUME], log)
    record = read_json(out / "run.json")
    source = record.get("resumed_from") or "0"
    trial["resumed_from"] = int(re.search(r"(\d+)$", source).group(1))
    trial["resume_status"] = record.get("status")
    trial["difference"] = lab.difference(folder / "reference", out)
    trial["junk_at_end"] = junk(out, expected)
    problems = []
    if record.get("status") != "done":
        problems.append("resume failed")
        trial["printed"] = log.read_text(errors="replace")[-600:]
    if record.get("steps") != 12:
        problems.append(f"{record.get('steps')} steps of 12")
    if trial["resumed_from"] != newest and not trial["finished_before"]:  # a finished run stays as it is
        problems.append("not from the newest whole checkpoint")
    if trial["difference"] != 0.0:
        problems.append("other weights")
    if trial["incomplete"]:
        problems.append("incomplete checkpoint under its own name")
    if trial["junk_at_end"]:
        problems.append("junk")
    if trial["reached"] - newest > SAVE:
        problems.append(f"{trial['reached'] - newest} steps lost")
    trial["problems"] = problems
    return trial


def crash_trials(lab: Lab, count: int, rng: random.Random, out_of_time, write) -> None:
    """SIGKILL at the n-th operation on files, for n over the whole run, evenly; the run is a shorter one."""
    forks = Forks(lab)
    folder = lab.work / "crashes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changes = ["--training.max_steps", "12", "--training.save_total_limit", "2"]
    arguments = lambda out: [*lab.settings("transformers", "full", out), *changes]  # noqa: E731
    reference = folder / "reference"
    watched = {"out": reference, "facts": folder / "names.json", "at": 0}
    forks.run(arguments(reference), folder / "reference.log", **watched)
    names = json.loads((folder / "names.json").read_text())
    (expected,) = ({path.name for path in reference.iterdir()},)
    places = rng.sample(range(1, len(names) + 1), min(count, len(names)))  # in any order: the series may be cut short
    write({"crash_points": len(names), "tried": len(places)})
    for at in places:
        if out_of_time():
            break
        write(crash_trial(lab, forks, folder, arguments, at, expected))
    forks.close()


# --- main -------------------------------------------------------------------------------------------------------------


def summary(trials: list[dict]) -> dict:
    """Counts over all trials, and the largest figures by action."""
    by_action: dict[str, dict] = {}
    for trial in trials:
        one = by_action.setdefault(trial["action"], {"trials": 0, "lost_max": 0, "all_ended_s_max": 0.0})
        one["trials"] += 1
        one["lost_max"] = max(one["lost_max"], trial["lost"])
        one["all_ended_s_max"] = max(one["all_ended_s_max"], trial["all_ended_s"])
    failed = [trial["trial"] for trial in trials if trial["problems"]]
    return {"trials": len(trials), "with_problems": failed, "by_action": by_action}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(__file__).parent.parent, help="the checkout under test")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter that runs it")
    parser.add_argument("--kills", type=int, default=0, help="trials with one signal at a random moment")
    parser.add_argument(
        "--crashes", type=int, default=0, help="trials with SIGKILL at one of the run's file operations"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="of transformers runs, drawn from (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a new one")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial: to continue a series")
    parser.add_argument("--backends", default="transformers,unsloth,unsloth", help="drawn from, one per cold trial")
    parser.add_argument("--warm-share", type=float, default=0.6, help="share of trials forked from a warm process")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, help="file to append the JSON lines to; default: standard output")
    parser.add_argument("--until", help="HH:MM, local: start no trial after it")
    given = parser.parse_args()
    until = datetime.time.fromisoformat(given.until) if given.until else None
    out_of_time = lambda: until is not None and datetime.datetime.now().time() > until  # noqa: E731
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored, and passes that on
    # Not resolved: a virtual environment's interpreter is a link, and what it points to lacks the packages.
    lab = Lab(given.project.absolute(), given.python.absolute(), given.work.absolute())
    lab.methods = given.methods.split(",")
    with given.out.open("a") if given.out else contextlib.nullcontext(sys.stdout) as out:
        write = lambda line: print(json.dumps(line), file=out, flush=True)  # noqa: E731
        write({"about": "benchmarks.faults", "seed": given.seed, "methods": lab.methods, "disks": lab.fills})
        if given.crashes:
            crash_trials(lab, given.crashes, random.Random(given.seed), out_of_time, write)
        trials = []
        for number in range(given.first, given.first + given.kills):
            if out_of_time():
                break
            rng = random.Random(given.seed * 10_000 + number)
            try:
                trial = kill_trial(lab, rng, number, given.backends.split(","), rng.random() < given.warm_share)
            except Exception as error:  # a fault of this script: the series continues
                trial = {"trial": number, "harness": f"{type(error).__name__}: {error}"}
            trials.append(trial)
            write(trial)
        if trials:
            write(summary([one for one in trials if "harness" not in one]))
    if lab.forks:
        lab.forks.close()
    return int(any(one.get("problems") or "harness" in one for one in trials))


if __name__ == "__main__":
    sys.exit(main())
