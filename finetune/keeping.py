"""Checkpoints and the final model: whole or absent, written by one rank, found again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RunError, UserError
from finetune.record import FILE_NAME, write_json

MANIFEST = "checkpoint.json"  # names and sizes of the checkpoint's files: written last, so its absence means torn
_NAME = re.compile(r"checkpoint-(\d+)")
SPARE_BYTES = 16 * 2**20  # for run.json, TensorBoard events and a tokenizer


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of looking for a checkpoint to resume from."""

    path: Path | None
    skipped: tuple[str, ...]  # one sentence for each torn checkpoint that was passed over


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders named checkpoint-N, oldest step first, whole or not."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimiser step in the name of a checkpoint folder."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named checkpoint-N")
    return int(match.group(1))


def seal(checkpoint: Path, about: dict) -> None:
    """Write the manifest of a finished checkpoint folder: file sizes in bytes, and `about` (step, plan, batch)."""
    files = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    write_json(checkpoint / MANIFEST, {**about, "files": files})


def manifest(checkpoint: Path) -> dict:
    """The manifest of a whole checkpoint."""
    return json.loads((checkpoint / MANIFEST).read_text())


def why_torn(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None where it is whole."""
    try:
        files = manifest(checkpoint)["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
        return f"its {MANIFEST} cannot be read"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def find(output_dir: Path, resume: bool | str) -> Found:
    """The checkpoint that `resume_from_checkpoint` means: False none, True the newest whole one, a path that one.

    Raises:
        UserError: a path that is not there or is torn.
    """
    if resume is False:
        return Found(path=None, skipped=())
    if isinstance(resume, str):
        path = Path(resume)
        torn = why_torn(path) if path.is_dir() else "there is no such folder"
        if torn:
            others = [p.name for p in checkpoints(output_dir) if why_torn(p) is None]
            raise UserError(
                f"training.resume_from_checkpoint is {resume}: {torn}. Whole checkpoints in {output_dir}: "
                f"{', '.join(others) or 'none'}. Give one of them, or true for the newest."
            )
        return Found(path=path, skipped=())
    skipped = []
    for path in reversed(checkpoints(output_dir)):
        torn = why_torn(path)
        if torn is None:
            return Found(path=path, skipped=tuple(skipped))
        skipped.append(f"{path} is torn ({torn}); it is passed over")
    return Found(path=None, skipped=tuple(skipped))


def check_output(output_dir: Path, *, resuming: bool, overwrite: bool) -> None:
    """Refuse an output folder that holds another run, that cannot be written, or that has no room. Writes nothing.

    Raises:
        UserError: with what to do about it.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"training.output_dir is {output_dir}, which is a file. Give a folder.")
    held = [
        name for name in (FILE_NAME, "adapter_model.safetensors", "model.safetensors") if (output_dir / name).exists()
    ]
    held += [path.name for path in checkpoints(output_dir)]
    if held and not resuming and not overwrite:
        raise UserError(
            f"training.output_dir is {output_dir}, which holds another run ({', '.join(held[:4])}). To go on with it "
            "set training.resume_from_checkpoint: true; for a new run give another folder, or set "
            "training.overwrite_output_dir: true to replace it."
        )
    parent = output_dir
    while not parent.exists():
        if parent.is_symlink():
            raise UserError(
                f"training.output_dir is {output_dir}: {parent} is a symbolic link to {parent.readlink()}, which does "
                "not exist. Create that folder or give another one."
            )
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(f"training.output_dir is {output_dir}: {parent} is a file. Give a folder.")
    if not os.access(parent, os.W_OK):
        raise UserError(
            f"training.output_dir is {output_dir}: {parent} cannot be written by this user. Give another folder."
        )
    check_space(output_dir, SPARE_BYTES, "the run's records")


def clear(output_dir: Path) -> None:
    """Remove an earlier run's checkpoints, records and final files, and nothing else that lies in the folder."""
    for path in (*checkpoints(output_dir), output_dir / "runs"):
        shutil.rmtree(path, ignore_errors=True)
    for name in (FILE_NAME, "adapter_model.safetensors", "adapter_config.json", "model.safetensors"):
        (output_dir / name).unlink(missing_ok=True)


def check_space(output_dir: Path, needed: int, what: str) -> None:
    """Raise UserError where the disk of `output_dir` has fewer than `needed` bytes free."""
    folder = output_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"training.output_dir is {output_dir}, whose disk has {free / 2**20:,.0f} MiB free; {what} needs "
            f"{needed / 2**20:,.0f} MiB. Free some space or give a folder on another disk."
        )


@contextlib.contextmanager
def no_space(output_dir: Path, what: str) -> Iterator[None]:
    """Turn the many ways in which libraries report a full disk into one message.

    Raises:
        RunError: the disk filled up while `what` was being written.
    """
    try:
        yield
    except Exception as error:
        # safetensors and torch.save wrap the operating system's error in their own; its text is what remains.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error) and shutil.disk_usage(output_dir).free > 2**20:
            raise
        whole = [path.name for path in checkpoints(output_dir) if why_torn(path) is None]
        raise RunError(
            f"No space left on the disk of {output_dir} while writing {what}; it was not written. "
            + (
                f"The newest whole checkpoint is {whole[-1]}: free some space and set "
                if whole
                else "Free some space and "
            )
            + ("training.resume_from_checkpoint: true." if whole else "run again.")
        ) from error


@contextlib.contextmanager
def staging(target: Path, *, main: bool = True) -> Iterator[Path]:
    """A folder beside `target` to write into. Where the block ends well it takes the name of `target`, in place of what
    had it; otherwise it vanishes.

    Args:
        main: False on ranks that add their files to the folder of another one: they neither make nor rename it.
    """
    folder = target.with_name(f".{target.name}.partial")
    if not main:
        yield folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, output_dir: Path) -> None:
    """Move the files of `folder` into `output_dir`, weights first: a reader that sees the config finds the weights."""
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.suffix == ".json")
    for path in files:
        os.replace(path, output_dir / path.name)
    shutil.rmtree(folder)


def rotate(output_dir: Path, limit: int | None, keep: str | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`, never the one named `keep`."""
    if not limit or limit < 0:
        return
    old = checkpoints(output_dir)[:-limit]
    for path in old:
        if keep is None or path.name != Path(keep).name:
            shutil.rmtree(path, ignore_errors=True)
