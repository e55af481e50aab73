"""The decisions on a notebook, and the parts of a script that statements go to."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.convert.analysis.names import Program
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
    train: int  # the place of the statement that trains
    unsloth: bool
    models: set[str] = field(default_factory=set)
    tokenizers: set[str] = field(default_factory=set)
    trainers: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)  # names of the model that is trained, and of what it is made from
    decisions: dict[int, Decision] = field(default_factory=dict)
    together: set[int] = field(default_factory=set)  # places after the training that every rank runs
    rewritten: dict[int, Rewritten] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def kept(self, where: str) -> list[int]:
        return [place for place, one in sorted(self.decisions.items()) if one.where == where]

    def note_left_out(self, place: int) -> None:
        """Note a statement that was decided to be dropped, and why."""
        statement, why = self.program.statements[place], self.decisions[place].reason
        self.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {why}")

    @property
    def roles(self) -> set[str]:
        """The names of models, tokenizers and trainers."""
        return self.models | self.tokenizers | self.trainers

    def installs(self, cell: int) -> bool:
        """Whether a cell installs packages and does not train."""
        return cell in self.notebook.install and self.program.statements[self.train].cell != cell
