"""Checkpoints and the final model: written atomically by one rank, verified before they are used."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.files import remove_atomically
from finetune.runtime.files import staging as staging
from finetune.runtime.types import JsonObject

MANIFEST = "checkpoint.json"  # names, sizes and checksums of the checkpoint's files; written last
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The result of looking for a checkpoint to resume from.

    path:       the checkpoint, or None if there is none
    manifest:   its manifest; empty without a checkpoint
    skipped:    one sentence per incomplete or damaged checkpoint that was skipped
    damaged:    their names
    """

    path: Path | None = None
    manifest: JsonObject = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """Optimizer steps done at the checkpoint; 0 without one."""
        return int(self.manifest["step"]) if self.path is not None else 0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a run may delete.

    limit:      number of complete checkpoints to keep; None keeps all
    protected:  names that are never deleted but count towards the limit: the one resumed from
    damaged:    names whose checksums do not match. Like incomplete checkpoints, they neither count nor are deleted, so
                that they can be inspected.
    """

    limit: int | None = None
    protected: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be used; the message completes "it is damaged: ..."."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders named checkpoint-N, oldest step first, complete or not."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path | str) -> int:
    """N of checkpoint-N."""
    return int(str(checkpoint).rpartition("-")[2])


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """The `checkpoints` whose files all have their recorded sizes; contents are not read."""
    return [path for path in checkpoints(output_dir) if damage(path) is None]


# --- the manifest ---------------------------------------------------------------------------------------------------


def seal(checkpoint: Path, fields: JsonObject) -> None:
    """Write the manifest of a finished checkpoint folder: `fields` (step, plan, settings), the size of each file in
    bytes (`files`), its checksum (`xxh3_128`), and a checksum of the manifest itself (`checksum`)."""
    paths = {path.relative_to(checkpoint).as_posix(): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    sums = files.checksums(paths.values())
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    content = files.to_json_types({**fields, "files": sizes, "xxh3_128": dict(zip(paths, sums, strict=True))})
    files.write_json(checkpoint / MANIFEST, {**content, "checksum": files.checksum_of_json(content)})


def manifest(checkpoint: Path) -> JsonObject:
    """Read a checkpoint's manifest and check the fields that this module needs.

    Raises:
        Damaged: it is missing or invalid.
    """
    try:
        content = files.read_json(checkpoint / MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST}") from None
    except (OSError, ValueError):
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"its {MANIFEST} is not a list of files")
    if content.pop("checksum", None) != files.checksum_of_json(content):
        raise DamagedCheckpoint(f"its {MANIFEST} does not match its checksum")
    sizes, sums, step = content.get("files"), content.get("xxh3_128"), content.get("step")
    if not isinstance(sizes, dict) or not sizes or not all(_is_below(name) for name in sizes):
        raise DamagedCheckpoint(f"its {MANIFEST} is not a list of files")
    if not isinstance(sums, dict) or sums.keys() != sizes.keys():
        raise DamagedCheckpoint(f"its {MANIFEST} does not have a checksum of each file")
    if type(step) is not int or step < 0:
        raise DamagedCheckpoint(f"its {MANIFEST} has no step")
    return content


def _is_below(name: str) -> bool:
    """Whether a file name from a manifest stays inside the checkpoint's folder."""
    path = PureWindowsPath(name)  # handles both separators, and drives
    return bool(path.parts) and not path.anchor and not path.drive and ".." not in path.parts and "\0" not in name


def damage(checkpoint: Path, *, verify: bool = False, unread: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a checkpoint folder, or None if it is complete.

    Args:
        verify: read every file and compare checksums, not only sizes.
        unread: endings of names of files that are not read for it.
    """
    try:
        content = manifest(checkpoint)
    except DamagedCheckpoint as error:
        return str(error)
    if found := files.special_entry(checkpoint):
        return f"{found}, not a regular file"
    for name, size in content["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if verify:
        expected = {name: digest for name, digest in content["xxh3_128"].items() if not name.endswith(unread)}
        try:
            found = files.checksums(checkpoint / name for name in expected)
        except OSError as error:
            return f"it cannot be read ({error})"
        for name, digest in zip(expected, found, strict=True):
            if digest != expected[name]:
                return f"{name} does not match its checksum"
    return None


# --- finding a checkpoint ---------------------------------------------------------------------------------------------


def find(output_dir: Path, resume: bool | str, *, verify: bool = True) -> ResumePoint:
    """The checkpoint that `resume_from_checkpoint` selects: False = none, True = the newest complete one, or a path.

    Args:
        verify: compare checksums as well, which reads every file.

    Raises:
        UserError: the path does not exist, or its checkpoint is incomplete or damaged.
    """
    if resume is False:
        return ResumePoint()
    if isinstance(resume, str):
        path = Path(resume)
        wrong = f"it is damaged: {why}" if path.is_dir() and (why := damage(path, verify=verify)) else None
        if not path.is_dir():
            wrong = "the folder does not exist"
        if wrong:
            others = [found.name for found in complete_checkpoints(output_dir) if found.resolve() != path.resolve()]
            raise UserError(
                f"training.resume_from_checkpoint is {resume}: {wrong}. Give a complete checkpoint (in {output_dir}: "
                f"{', '.join(others) or 'none'}), or true for the newest one."
            )
        return ResumePoint(path=path, manifest=manifest(path))
    skipped: dict[str, str] = {}
    for path in reversed(checkpoints(output_dir)):
        why = damage(path, verify=verify)
        if why is None:
            return ResumePoint(
                path=path, manifest=manifest(path), skipped=tuple(skipped.values()), damaged=frozenset(skipped)
            )
        skipped[path.name] = f"{path} is damaged ({why}); skipping it"
    return ResumePoint(skipped=tuple(skipped.values()), damaged=frozenset(skipped))


def rotate(output_dir: Path, retention: Retention, written: str, best: str | None = None) -> None:
    """Delete the oldest complete checkpoints beyond the limit, but never the one just written and the best one. Those
    of later steps are the oldest: the run has gone back. Completeness is judged by file sizes; nothing is read again.
    """
    if retention.limit is None:
        return
    complete = [path for path in complete_checkpoints(output_dir) if path.name not in retention.damaged]
    complete.sort(key=lambda path: step_of(path) <= step_of(written))
    free = [path for path in complete if path.name not in {*retention.protected, written, best}]
    for path in free[: max(len(complete) - retention.limit, 0)]:
        remove_atomically(path)
