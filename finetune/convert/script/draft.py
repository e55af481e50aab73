"""The decisions on a notebook, and the parts of a script that statements go to."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.convert.analysis.names import Program
from finetune.convert.analysis.roles import Roles
from finetune.convert.notebook.read import Notebook
from finetune.convert.script.rewrite import Rewritten

TOP, MAIN, AFTER = "top of the script", "main()", "main(), after training"


@dataclass(kw_only=True)
class Decision:
    """What becomes of a statement: kept or rewritten in a part of the script, or dropped."""

    outcome: str
    where: str = ""
    reason: str = ""


@dataclass(kw_only=True)
class Draft:
    """The decisions on a notebook, by the place of each statement, and what replaces those that are rewritten."""

    notebook: Notebook
    program: Program
    roles: Roles
    train: int
    unsloth: bool
    trained: set[str] = field(default_factory=set)  # names of the model that is trained, and of what it is made from
    generated: set[int] = field(default_factory=set)  # statements before training that need what is left out
    decisions: dict[int, Decision] = field(default_factory=dict)
    rewritten: dict[int, Rewritten] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def kept(self, where: str) -> list[int]:
        return [place for place, one in sorted(self.decisions.items()) if one.where == where]
