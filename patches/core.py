"""Probes for each patch's defect, applies the patch if the defect is present, and verifies that it worked. Patches may
change modules that are imported later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

Change = Callable[[ModuleType], None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the probe for one defect, and whether its patch was applied."""

    name: str
    needed: bool | None  # None if the probe of a patch that was left out failed
    left_out: bool = False
    missed: bool = False  # needed, but the library was imported before the patch could be applied

    @property
    def applied(self) -> bool:
        return bool(self.needed) and not self.left_out and not self.missed

    @property
    def reason(self) -> str:
        if self.left_out:
            return "left out"
        if self.missed:
            return "the defect is present, but Unsloth was imported before this patch could be applied"
        return "the defect is present" if self.needed else "the defect is absent from the installed versions"

    def to_dict(self) -> dict[str, str | bool | None]:
        """For run.json."""
        return {"name": self.name, "needed": self.needed, "applied": self.applied, "reason": self.reason}


def run(patches: Iterable[ModuleType], without: Collection[str] = (), *, too_late: bool = False) -> list[Verdict]:
    """Apply each patch whose defect is present in this process. Patches named in `without` ("all" for every patch) are
    only probed; with `too_late`, all are.

    Raises:
        RuntimeError: a probe failed, so it is unknown whether the defect is present; or a patch did not work.
    """
    verdicts = []
    for patch in patches:
        name = patch.__name__.rpartition(".")[2]
        left_out = name in without or "all" in without
        try:
            needed = patch.needed()
        except Exception as error:
            if left_out:
                verdicts.append(Verdict(name=name, needed=None, left_out=True))
                continue
            raise RuntimeError(
                f"patch {name}: its probe failed, so it is unknown whether the defect is present: {error!r}"
            ) from error
        if needed and not left_out and not too_late:
            patch.apply()
            if patch.needed():
                raise RuntimeError(f"patch {name}: applied, but the defect is still present (see {patch.UPSTREAM})")
        missed = bool(needed) and too_late and not left_out
        verdicts.append(Verdict(name=name, needed=needed, left_out=left_out, missed=missed))
    return verdicts


def change_on_import(changes: Mapping[str, Change]) -> None:
    """Have modules changed when they are imported: once they have been executed, before anything uses them."""
    sys.meta_path.insert(0, _ChangedModules(changes))


def is_changed(*modules: str) -> bool:
    """Whether `change_on_import` changes all of these modules."""
    changed = {name for one in sys.meta_path if isinstance(one, _ChangedModules) for name in one.changes}
    return changed >= set(modules)


class _ChangedModules(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = changes

    def find_spec(self, fullname, path, target=None):
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.changes[fullname](module)

        spec.loader.exec_module = exec_module
        return spec
