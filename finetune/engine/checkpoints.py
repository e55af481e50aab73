"""Checkpoints and the final model: whole or absent, written by one rank, found again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from finetune.engine.record import FILE_NAME
from finetune.errors import UserError
from finetune.runtime import activity, disk, distributed, files
from finetune.runtime.files import remove, remove_whole
from finetune.runtime.files import staging as staging

MANIFEST = "checkpoint.json"  # names, sizes and checksums of the checkpoint's files; written last
FINAL_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
_NAME = re.compile(r"checkpoint-(\d+)")
# What a run that was killed can leave behind: only names that this package makes.
_LEFTOVER = re.compile(r"\.(checkpoint-\d+(\.replaced|\.removed)?|final|run\.json\.\d+)\.partial")
SPARE_BYTES = 16 * 2**20  # for run.json, TensorBoard events and a tokenizer


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of looking for a checkpoint to resume from.

    path:       the checkpoint, or None if there is none
    manifest:   its manifest; empty without a checkpoint
    skipped:    one sentence for each incomplete or damaged checkpoint that was passed over
    damaged:    their names
    """

    path: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """Optimizer steps that the checkpoint has behind it; 0 without one."""
        return int(self.manifest["step"]) if self.path is not None else 0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a run may delete.

    limit:      whole checkpoints that may stay; None keeps all
    protected:  names that stay in any case and count: the one resumed from
    damaged:    names known to be damaged from their checksums. Like those whose files are incomplete they neither count
                nor are deleted: somebody may want to look at them.
    """

    limit: int | None = None
    protected: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()


class Damaged(Exception):
    """A checkpoint cannot be used; the message completes "it is damaged: ..."."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders named checkpoint-N, oldest step first, whole or not."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """Those of `checkpoints` with all files in their recorded sizes; content is not read."""
    return [path for path in checkpoints(output_dir) if damage(path) is None]


# --- the manifest ---------------------------------------------------------------------------------------------------


def seal(checkpoint: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a finished checkpoint folder: `about` (step, plan, settings), the size in bytes of each
    file (`files`), its checksum (`xxh3_128`), and a checksum of the manifest itself (`checksum`)."""
    paths = {path.relative_to(checkpoint).as_posix(): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    sums = files.checksums(paths.values())
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    content = files.plain({**about, "files": sizes, "xxh3_128": dict(zip(paths, sums, strict=True))})
    files.write_json(checkpoint / MANIFEST, {**content, "checksum": files.checksum_of_json(content)})


def manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked for what this module relies on. In those of older versions `xxh3_128` is
    empty.

    Raises:
        Damaged: it is missing or is not such a manifest.
    """
    try:
        content = files.read_json(checkpoint / MANIFEST)
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except (OSError, ValueError):
        raise Damaged(f"its {MANIFEST} cannot be read") from None
    if not isinstance(content, dict):
        raise Damaged(f"its {MANIFEST} is not a list of files")
    own = content.pop("checksum", None)
    if own is not None and own != files.checksum_of_json(content):
        raise Damaged(f"its {MANIFEST} does not match its checksum")
    sizes, sums, step = content.get("files"), content.setdefault("xxh3_128", {}), content.get("step")
    if not isinstance(sizes, dict) or not sizes or not all(_is_below(name) for name in sizes):
        raise Damaged(f"its {MANIFEST} is not a list of files")
    if not isinstance(sums, dict) or not (sums.keys() == sizes.keys() or own is None and not sums):
        raise Damaged(f"its {MANIFEST} does not have a checksum of each file")
    if type(step) is not int or step < 0:
        raise Damaged(f"its {MANIFEST} has no step")
    return content


def _is_below(name: str) -> bool:
    """Whether a file name from a manifest stays inside the checkpoint's folder."""
    path = PureWindowsPath(name)  # knows both separators, and drives
    return bool(path.parts) and not path.anchor and not path.drive and ".." not in path.parts and "\0" not in name


def damage(checkpoint: Path, *, verify: bool = False) -> str | None:
    """What is wrong with a checkpoint folder, or None if it is whole.

    Args:
        verify: read every file and compare its checksum, not only sizes.
    """
    try:
        content = manifest(checkpoint)
    except Damaged as error:
        return str(error)
    for name, size in content["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if verify:
        expected = content["xxh3_128"]
        try:
            found = files.checksums(checkpoint / name for name in expected)
        except OSError as error:
            return f"it cannot be read ({error})"
        for name, digest in zip(expected, found, strict=True):
            if digest != expected[name]:
                return f"{name} does not match its checksum"
    return None


# --- finding one ----------------------------------------------------------------------------------------------------


def find(output_dir: Path, resume: bool | str, *, verify: bool = True) -> Found:
    """The checkpoint that `resume_from_checkpoint` means: False none, True the newest whole one, a path that one.

    Args:
        verify: compare checksums too, which reads the whole checkpoint.

    Raises:
        UserError: a path that is not there, is incomplete or is damaged.
    """
    if resume is False:
        return Found()
    if isinstance(resume, str):
        path = Path(resume)
        wrong = f"it is damaged: {why}" if path.is_dir() and (why := damage(path, verify=verify)) else None
        if not path.is_dir():
            wrong = "there is no such folder"
        if wrong:
            others = [found.name for found in whole_checkpoints(output_dir) if found.resolve() != path.resolve()]
            raise UserError(
                f"training.resume_from_checkpoint is {resume}: {wrong}. Give a whole checkpoint (in {output_dir}: "
                f"{', '.join(others) or 'none'}), or true for the newest of them."
            )
        return Found(path=path, manifest=manifest(path))
    skipped: dict[str, str] = {}
    for path in reversed(checkpoints(output_dir)):
        why = damage(path, verify=verify)
        if why is None:
            return Found(
                path=path, manifest=manifest(path), skipped=tuple(skipped.values()), damaged=frozenset(skipped)
            )
        skipped[path.name] = f"{path} is damaged ({why}); it is skipped"
    return Found(skipped=tuple(skipped.values()), damaged=frozenset(skipped))


# --- the output folder ----------------------------------------------------------------------------------------------


def check_output(output_dir: Path, *, resuming: bool, overwrite: bool) -> None:
    """Refuse an output folder that holds another run, that cannot be written, or that has no room. Writes nothing.

    Raises:
        UserError: with what to do about it.
    """
    parent = _existing(output_dir)
    held = [name for name in (FILE_NAME, *FINAL_WEIGHTS) if (output_dir / name).exists()]
    held += [path.name for path in checkpoints(output_dir)]
    if held and not resuming and not overwrite:
        raise UserError(
            f"training.output_dir is {output_dir}, which holds another run ({', '.join(held[:4])}). To resume it, "
            "set training.resume_from_checkpoint: true; for a new run give another folder, or set "
            "training.overwrite_output_dir: true to replace it."
        )
    if not os.access(parent, os.W_OK):
        raise UserError(
            f"training.output_dir is {output_dir}: {parent} cannot be written by this user. Give another folder."
        )
    check_space(output_dir, SPARE_BYTES, "the run's records")


def _existing(output_dir: Path) -> Path:
    """The output folder, or the nearest folder above it that exists.

    Raises:
        UserError: a file or a broken link is in the way.
    """
    for path in (output_dir, *output_dir.absolute().parents):
        if path.is_dir():
            return path
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"training.output_dir is {output_dir}: {path} is a symbolic link to {os.readlink(path)}, which does "
                "not exist. Create that folder, or give another one."
            )
        if path.exists():
            where = "which is a file" if path == output_dir else f"which is below {path}, a file"
            raise UserError(f"training.output_dir is {output_dir}, {where}. Give a folder.")
    raise UserError(f"training.output_dir is {output_dir}: no folder above it exists. Give another folder.")


def clear(output_dir: Path) -> None:
    """Remove an earlier run's checkpoints, records and final files, and nothing else that lies in the folder."""
    for path in checkpoints(output_dir):
        remove_whole(path)
    for folder in ("runs", "hang"):
        if not (output_dir / folder).is_symlink():
            remove(output_dir / folder)
    shards = output_dir.glob("model-*-of-*.safetensors")
    for path in (*shards, *(output_dir / name for name in (FILE_NAME, "adapter_config.json", *FINAL_WEIGHTS))):
        remove(path)


def remove_leftovers(output_dir: Path) -> None:
    """Remove the partial files of runs that were killed. Only for the run that owns the folder: those of a run that
    is alive look the same."""
    if output_dir.is_dir():
        for path in list(output_dir.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                remove(path)


def take_over(output_dir: Path, *, overwrite: bool) -> None:
    """Remove what earlier runs left behind: partial files, and with `overwrite` the whole run. All ranks call it."""
    if distributed.ranks().is_main:
        remove_leftovers(output_dir)
        if overwrite:
            clear(output_dir)
    distributed.barrier()


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


def no_space(output_dir: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """`disk.no_space`, with the checkpoint to resume from."""
    return disk.no_space(
        output_dir, what, lambda: next((path.name for path in reversed(whole_checkpoints(output_dir))), None)
    )


# --- the final model, and old checkpoints ---------------------------------------------------------------------------


@contextlib.contextmanager
def final_files(output_dir: Path) -> Iterator[Path]:
    """A folder to write the final model into. If the block ends well its files are synced to the disk and moved into
    `output_dir`, weights first: a reader that sees the config finds the weights. Otherwise they vanish."""
    folder = output_dir / ".final.partial"
    remove(folder)
    folder.mkdir(parents=True)
    try:
        with activity.during("saving"):
            yield folder
            files.sync_tree(folder)
        written = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.suffix == ".json")
        for path in written:
            os.replace(path, output_dir / path.name)
        files.sync_folder(output_dir)
    finally:
        remove(folder)


def rotate(output_dir: Path, retention: Retention, *newest: str) -> None:
    """Delete the oldest whole checkpoints beyond the limit, never those named `newest`: the one just written, and the
    best one. Whole is judged by sizes; a checkpoint is not read again."""
    if retention.limit is None:
        return
    whole = [path for path in whole_checkpoints(output_dir) if path.name not in retention.damaged]
    free = [path for path in whole if path.name not in retention.protected.union(newest)]
    for path in free[: max(len(whole) - retention.limit, 0)]:
        remove_whole(path)
