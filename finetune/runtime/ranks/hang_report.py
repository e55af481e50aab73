"""What is known about ranks that make no progress: who is missing, and what the others wait in."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finetune.runtime.ranks.rank_status import RankStatus
from finetune.runtime.types import JsonObject

TIMEOUT, SLOW = "timeout", "slow"
# One rank alone may be in these phases for any time, while the others wait in a host collective.
PATIENT = frozenset({"saving", "loading the model", "reading the checkpoint"})


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known about ranks that make no progress.

    kind:      TIMEOUT if a collective has reached its limit, SLOW if a phase is long
    world_size: number of ranks
    answered:  statuses of the ranks that answered, in rank order
    silent:    last statuses of those that did not; None for a rank that never reported one
    limit:     training.ddp_timeout, in seconds
    """

    kind: str
    world_size: int
    answered: tuple[RankStatus, ...]
    silent: Mapping[int, RankStatus | None]
    limit: float

    @property
    def waiting(self) -> list[RankStatus]:
        """The ranks that wait in a collective, longest first."""
        return sorted((one for one in self.answered if one.collective), key=lambda one: (-one.waited, one.rank))

    @property
    def absent(self) -> list[RankStatus]:
        """The ranks that answered and for which others wait."""
        return [one for one in self.answered if not one.collective] if self.waiting else []

    @property
    def missing(self) -> list[int]:
        """The ranks that the others wait for."""
        return sorted([*self.silent, *(one.rank for one in self.absent)])

    @property
    def working(self) -> bool:
        """Whether the wait has a good reason: work of one rank alone, progress, or a last rank that has just come."""
        if not self.missing:
            return any(one.waited < self.limit / 2 for one in self.waiting)
        if self.silent or not self.absent or any(one.training for one in self.waiting):
            return False
        return all(one.phase in PATIENT or one.seconds < self.limit for one in self.absent)

    def to_dict(self) -> JsonObject:
        """For report.json. A rank with only an old status has reached the step in which the others wait for it."""
        waiting, reached = self.waiting, self._step()
        missing = []
        for rank in self.missing:
            one = self.silent[rank] if rank in self.silent else next(one for one in self.absent if one.rank == rank)
            step = reached if one is None else max(one.step, reached) if one.old else one.step
            about = {"phase": one.phase if one else None, "seconds": round(one.seconds, 1) if one else None}
            missing.append({"rank": rank, "step": step, **about, "answered": rank not in self.silent})
        return {
            "kind": self.kind,
            "time": time.time(),
            "world_size": self.world_size,
            "missing": missing,
            "answered": [dataclasses.asdict(one) for one in self.answered],
            "step": reached,
            "collective": waiting[0].collective if waiting else None,
            "waited_seconds": round(waiting[0].waited, 1) if waiting else None,
            "limit_seconds": self.limit,
        }

    def _step(self) -> int:
        """The step in which the ranks wait, or in which the slowest of those that answered is."""
        return min((one.step for one in self.waiting or self.answered), default=0)

    def sentence(self) -> str:
        """What is wrong, in one sentence without a full stop."""
        waiting = self.waiting
        if not self.missing and len(waiting) == self.world_size > 1:
            return self._all_wait()
        if not self.missing:
            longest = max(self.answered, key=lambda one: one.seconds)
            return f"rank {longest.rank} has been in one phase for {longest.seconds:.0f} s ({longest.position()})"
        who = "; ".join(self._describe_missing(rank) for rank in self.missing)
        if not waiting:
            return who
        first = waiting[0]
        where = f"{first.collective} {first.at_position()}"
        return f"{who}; {_ranks_have(waiting)} waited {first.waited:.0f} s for it in {where}"

    def _all_wait(self) -> str:
        waiting = self.waiting
        if len({(one.step, one.collective) for one in waiting}) == 1:
            first = waiting[0]
            return (
                f"all ranks have waited {first.waited:.0f} s in {first.collective} ({first.position()}), which does "
                "not complete: a GPU or the network between the ranks may have failed"
            )
        where = "; ".join(f"rank {one.rank} in {one.collective} ({one.position()})" for one in self.answered)
        return f"the ranks wait for each other in different collectives: {where}"

    def _describe_missing(self, rank: int) -> str:
        verb = "keeps the others waiting" if self.working else "is missing"
        if rank not in self.silent:
            one = next(one for one in self.absent if one.rank == rank)
            return f"rank {rank} {verb} {one.at_position()}, where it has been for {one.seconds:.0f} s"
        last, waiting = self.silent[rank], self.waiting
        if last and not last.old:
            since = f"where it has been for {last.seconds:.0f} s"
            return f"rank {rank} {verb} {last.at_position()}, {since}: it does not answer"
        at = f" at step {self._step()}" if waiting and waiting[0].step > 0 else ""
        heard = f"last reported {last.position()}" if last else "never reported where it is"
        return f"rank {rank} {verb}{at}: it does not answer and {heard}"

    def markdown(self) -> str:
        """report.md."""
        rows = [
            f"| {one.rank} | yes | {one.step} | {one.phase} | {one.seconds:.0f} | "
            + (f"{one.collective}, {one.waited:.0f} s |" if one.collective else "|")
            for one in self.answered
        ]
        for rank, last in self.silent.items():
            where = f"{last.step} | {last.phase}" if last else " | "
            seconds = " (last report) | " if last and last.old else f" | {last.seconds:.0f}" if last else " | "
            rows.append(f"| {rank} | **no** | {where}{seconds} | |")
        sentence = self.sentence()
        return "\n".join(
            [
                "# A rank makes no progress" if self.kind == TIMEOUT else "# A long phase",
                "",
                f"{sentence[0].upper()}{sentence[1:]}.",
                "",
                f"Limit of a collective (training.ddp_timeout): {self.limit:.0f} s.",
                "",
                "| rank | answered | step | phase | seconds in it | waits in |",
                "|---|---|---|---|---|---|",
                *rows,
                "",
                "`rank-N.txt` next to this file has the Python stacks of rank N, if it could answer. `nccl-rank-N` and",
                "`gloo-rank-N` are torch's flight records; `torchfrtrace` reads them.",
                "",
            ]
        )


def _ranks_have(statuses: Iterable[RankStatus]) -> str:
    """Such as "rank 0 has" or "ranks 0, 2 have"."""
    ranks = sorted(one.rank for one in statuses)
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
