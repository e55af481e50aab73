"""Look at each patch's defect, apply the patch where the defect is, and make sure that it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found and done about one defect."""

    name: str
    needed: bool
    applied: bool
    reason: str

    def to_dict(self) -> dict:
        """For run.json."""
        return asdict(self)


def run(patches: Iterable[ModuleType]) -> list[Verdict]:
    """Apply those of `patches` whose defect is present in this process.

    Raises:
        RuntimeError: a probe failed (the defect is then unknown, which is not "absent"), or a patch did not help.
    """
    verdicts = []
    for patch in patches:
        name = patch.__name__.rpartition(".")[2]
        try:
            needed = patch.needed()
        except Exception as error:
            raise RuntimeError(f"patch {name}: its probe failed, so the defect is unknown: {error!r}") from error
        if needed:
            patch.apply()
            if patch.needed():
                raise RuntimeError(f"patch {name}: applied, and the defect is still there (see {patch.UPSTREAM})")
        reason = "the defect is present" if needed else "the defect is absent from the installed versions"
        verdicts.append(Verdict(name=name, needed=needed, applied=needed, reason=reason))
    return verdicts
