"""The output folder of a run: checks, an earlier run's files, free space, and the final model's files."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from finetune.engine.checkpoint.checkpoints import checkpoints, complete_checkpoints, step_of
from finetune.engine.record import CONFIGURATION, FILE_NAME
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.command import print_line
from finetune.runtime.files import remove, remove_atomically
from finetune.runtime.machine import disk
from finetune.runtime.ranks import activity, distributed

FINAL_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")

# What a killed run can leave behind. Matches only names that this package creates.
_LEFTOVER = re.compile(r"\.(checkpoint-\d+(\.replaced|\.removed)?|final|run\.json\.\d+)\.partial")
SHARED_SECONDS = 15.0  # for a new file to be seen on another machine; NFS remembers what it found for up to a minute
SPARE_BYTES = 16 * 2**20  # for run.json, TensorBoard events and a tokenizer


def check_output(output_dir: Path, *, resuming: bool, overwrite: bool) -> None:
    """Check that the output folder holds no other run, is writable and has free space. Writes nothing.

    Raises:
        UserError: one of these is not so.
    """
    files.check_name(output_dir, "training.output_dir")
    parent = files.nearest_folder(output_dir, "training.output_dir")
    existing = run_files(output_dir)
    if existing and not resuming and not overwrite:
        raise UserError(output_taken_message(output_dir, existing))
    for name in ("runs", "hang"):
        if (output_dir / name).is_symlink():
            raise UserError(
                f"{output_dir / name} is a symbolic link, and the run would write where it points. Remove it, or give "
                "another training.output_dir."
            )
    if not os.access(parent, os.W_OK):
        raise UserError(
            f"training.output_dir is {output_dir}: {parent} is not writable for this user. Give another folder."
        )
    check_space(output_dir, SPARE_BYTES, "the run's records")


def check_shared(output_dir: Path) -> None:
    """If the run has several machines, check that each sees what rank 0 writes into the output folder: every rank
    writes its part of a checkpoint there. Every rank calls it; leaves nothing behind.

    Raises:
        UserError: on every rank: a machine has no such folder, another one, or cannot write there.
    """
    me = distributed.ranks()
    if not me.on_several_machines:
        return
    marker = output_dir / f".finetune-{distributed.gather_objects(uuid.uuid4().hex)[0]}"
    why = None
    try:
        if me.is_main:
            try:
                marker.touch(exist_ok=False)
            except OSError as error:
                why = f"cannot write into it ({error.strerror})"
        distributed.barrier()
        if me.is_local_main and not me.is_main:
            if not _wait_for_file(marker):
                why = "has another folder under that path, or none"
            elif not os.access(output_dir, os.W_OK):
                why = "cannot write into it"
        machines = distributed.gather_objects((socket.gethostname(), why))
    finally:
        if me.is_main:
            marker.unlink(missing_ok=True)
    if wrong := [f"{name} (rank {rank}) {why}" for rank, (name, why) in enumerate(machines) if why is not None]:
        raise UserError(
            f"training.output_dir is {output_dir}, which is not on a disk that all machines share: {'; '.join(wrong)}. "
            "Each rank writes its part of a checkpoint there: give a folder on a shared file system (NFS, Lustre, a "
            "shared volume) that is mounted under the same path on all machines."
        )


def _wait_for_file(path: Path) -> bool:
    """Whether a file of another machine is there. Network file systems may take some time; reading the folders above it
    has them look again."""
    until = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
        if time.monotonic() > until:
            return False
        threading.Event().wait(0.2)
    return True


def run_files(output_dir: Path) -> list[str]:
    """Names of what a run has left in its output folder; empty if there is none."""
    found = [name for name in (FILE_NAME, *FINAL_WEIGHTS) if (output_dir / name).exists()]
    return found + [path.name for path in checkpoints(output_dir)]


def output_taken_message(output_dir: Path | str, existing: list[str]) -> str:
    """What is wrong with an output folder that holds another run, and what to do."""
    return (
        f"training.output_dir is {output_dir}, which holds another run ({', '.join(existing[:4])}). To resume it, set "
        "training.resume_from_checkpoint: true; for a new run give another folder, or set "
        "training.overwrite_output_dir: true to replace it."
    )


def archive_earlier_run(output_dir: Path) -> Path | None:
    """Move an earlier run's checkpoints, records and final files to `earlier-run-N`. Every rank calls it. Returns that
    folder; None if there is nothing to move."""
    moved: Path | None = None
    if distributed.ranks().is_main:
        found = [path for path in (*checkpoints(output_dir), *_records_and_final_files(output_dir)) if path.exists()]
        moved = _archive(output_dir, found) if found else None
    return distributed.gather_objects(moved)[0]


def archive_later_checkpoints(output_dir: Path, step: int, damaged: Collection[str]) -> None:
    """Move complete checkpoints beyond the step that was just saved to `earlier-run-N`: a run has gone back to one
    before them. Else `resume_from_checkpoint: true` would take what was given up.

    Args:
        damaged: names of those that stay, like incomplete ones.
    """
    beyond = [path for path in complete_checkpoints(output_dir) if step_of(path) > step]
    if found := [path for path in beyond if path.name not in damaged]:
        names = ", ".join(path.name for path in found)
        print_line(f"Moved {names} to {_archive(output_dir, found)}: this run resumed from an earlier step.")


def _archive(output_dir: Path, found: Iterable[Path]) -> Path:
    numbers = (number for number in itertools.count(1) if not (output_dir / f"earlier-run-{number}").exists())
    folder = output_dir / f"earlier-run-{next(numbers)}"
    folder.mkdir()
    for path in found:
        path.rename(folder / path.name)
    files.sync_folder(output_dir)
    return folder


def _records_and_final_files(output_dir: Path) -> list[Path]:
    names = ("runs", "hang", FILE_NAME, CONFIGURATION, "adapter_config.json", *FINAL_WEIGHTS)
    return [*output_dir.glob("model-*-of-*.safetensors"), *(output_dir / name for name in names)]


def remove_leftovers(output_dir: Path) -> None:
    """Remove partial files of killed runs. Only for the run that owns the folder: the partial files of a live run
    look the same."""
    if output_dir.is_dir():
        for path in list(output_dir.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                remove(path)


def prepare_output(output_dir: Path, *, overwrite: bool) -> None:
    """Remove partial files of earlier runs and, with `overwrite`, all their files. Every rank calls it."""
    if distributed.ranks().is_main:
        remove_leftovers(output_dir)
        for path in checkpoints(output_dir) if overwrite else ():
            remove_atomically(path)
        for path in _records_and_final_files(output_dir) if overwrite else ():
            if not path.is_symlink():
                remove(path)
    distributed.barrier()


def check_space(output_dir: Path, needed: int, what: str, *, option: str = "training.output_dir") -> None:
    """Raise UserError, naming the option, if the disk of `output_dir` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(files.nearest_existing(output_dir)).free
    if free < needed:
        raise UserError(
            f"{option} is {output_dir}, whose disk has {free / 2**20:,.0f} MiB free; {what} needs "
            f"{needed / 2**20:,.0f} MiB. Free some space or give a folder on another disk."
        )


def explain_full_disk(output_dir: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """`disk.disk_errors`, which then names the newest complete checkpoint."""
    return disk.disk_errors(
        output_dir, what, lambda: next((path.name for path in reversed(complete_checkpoints(output_dir))), None)
    )


@contextlib.contextmanager
def final_files(output_dir: Path, *, main: bool = True) -> Iterator[Path]:
    """A temporary folder for the final model. If the block succeeds, its files are synced and moved into `output_dir`,
    weights first, so that a reader who sees the config finds the weights. Otherwise they are removed.

    Args:
        main: False on ranks that only add files to the folder.
    """
    folder = output_dir / ".final.partial"
    if not main:
        with activity.during("saving"):
            yield folder
        return
    remove(folder)
    folder.mkdir(parents=True)
    try:
        with activity.during("saving"):
            yield folder
            files.sync_tree(folder)
        for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".json"):
            if path.is_dir():  # such as further chat templates
                remove(output_dir / path.name)
            os.replace(path, output_dir / path.name)
        files.sync_folder(output_dir)
    finally:
        remove(folder)
