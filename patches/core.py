"""Probe for each patch's defect, apply the patch if the defect is present, and verify that it is gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found and done about one defect."""

    name: str
    needed: bool | None  # None: the probe of a patch that was left out failed
    left_out: bool = False

    @property
    def applied(self) -> bool:
        return bool(self.needed) and not self.left_out

    @property
    def reason(self) -> str:
        if self.left_out:
            return "left out by --without"
        return "the defect is present" if self.needed else "the defect is absent from the installed versions"

    def to_dict(self) -> dict[str, str | bool | None]:
        """For run.json."""
        return {"name": self.name, "needed": self.needed, "applied": self.applied, "reason": self.reason}


def run(patches: Iterable[ModuleType], without: Collection[str] = ()) -> list[Verdict]:
    """Apply each patch whose defect is present in this process. Those named in `without` ("all" for every one) are
    only probed.

    Raises:
        RuntimeError: a probe failed (the defect is then unknown, which is not "absent"), or a patch did not help.
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
            raise RuntimeError(f"patch {name}: its probe failed, so the defect is unknown: {error!r}") from error
        if needed and not left_out:
            patch.apply()
            if patch.needed():
                raise RuntimeError(f"patch {name}: applied, and the defect is still there (see {patch.UPSTREAM})")
        verdicts.append(Verdict(name=name, needed=needed, left_out=left_out))
    return verdicts
