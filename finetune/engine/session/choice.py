"""What a run takes where its configuration leaves something open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from finetune.runtime.types import JsonObject

Value = TypeVar("Value")

AS_CONFIGURED = "as configured"


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[Value]):
    """A value, why, and the seconds that it took to find: how activations are kept (`config.rules.Mode`), or the rows
    of a micro-batch."""

    value: Value
    reason: str
    seconds: float = 0.0
    searches: bool = False  # whether the run still measures before its first step

    @property
    def made(self) -> bool:
        """Whether the configuration leaves it open, and it is known."""
        return not self.searches and self.reason != AS_CONFIGURED

    def to_dict(self, settings: JsonObject) -> JsonObject:
        """For run.json and checkpoints, with the value as they name it."""
        return {**settings, "reason": self.reason, "seconds": self.seconds}
