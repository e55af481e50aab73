"""What a script gives to SFTTrainer, SFTConfig and TrainingArguments. Former names and defaults stay as they are: the
script's own classes (`finetune.drop_in.former`) decide them on their values."""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Sequence

from finetune.config.arguments import CONFIG, TRAINER, former_names, rows
from finetune.config.rules import TRACKERS
from finetune.config.sft_fields import sft_fields
from finetune.convert.analysis.names import Program, calls, passed
from finetune.convert.notebook.read import Refusal
from finetune.convert.source import expression

CONFIGS = ("SFTConfig", "TrainingArguments")
# What the script's SFTConfig and SFTTrainer refuse, or keep without need. What has no effect today, they leave out.
_LEFT_OUT = {
    name: row.left_out for name, row in (rows(TRAINER) | rows(CONFIG)).items() if row.left_out and row.now is None
}
_CHANGES_LOSS = {name for name, row in (rows(TRAINER) | rows(CONFIG)).items() if row.changes_loss}
# For the verification: arguments that may differ from the notebook's.
CHANGED_ARGUMENTS = frozenset({*_LEFT_OUT, *_CHANGES_LOSS, "report_to"})

_ROWS, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_BATCH = f"ARGS.{_ROWS} * ARGS.{_STEPS}"
_DEFAULT_BATCH = {_ROWS: 8, _STEPS: 1}  # of TRL's SFTConfig and of TrainingArguments
_DEFAULT_OF_UNSLOTH = {_ROWS: 4, _STEPS: 2}  # of the SFTConfig that Unsloth puts in place of TRL's


class Arguments:
    """New arguments for each SFTTrainer, SFTConfig and TrainingArguments of a notebook.

    Raises:
        Refusal: R4, for arguments that are unknown or change the loss.
    """

    def __init__(self, program: Program, *, unsloth: bool) -> None:
        self.program, self.unsloth = program, unsloth
        self.reasons: dict[int, list[str]] = {}  # place -> what changed
        self.seed: int | None = None
        self.notes: list[str] = []
        self.keeps_batch = True  # whether every trainer is given the notebook's batch
        trainers, configs = list(self._calls("SFTTrainer")), list(self._calls(*CONFIGS))
        self.evaluates = any(len(call.args) > 4 or _given(call, "eval_dataset") for _, call in trainers)
        for place, call in [*trainers, *configs]:
            of = TRAINER if (place, call) in trainers else CONFIG
            call.keywords = [item for item in call.keywords if item.arg is None or self._stays(place, item, of)]
        for place, call in configs:
            for value in passed(call, "output_dir"):
                folder = str(getattr(self._only_value(value) if isinstance(value, ast.Name) else value, "value", ""))
                if re.match(r"[/~]|\w:\\|(.*/)?\.\.(/|$)", folder):
                    cell = self.program.statements[place].cell
                    self.notes.append(f"cell {cell}: output_dir is {folder}, outside of the folder of the script")
        if self.seed is None and any(self.program.dotted(call.func).endswith(CONFIGS[1]) for _, call in configs):
            self.seed = 42  # of TrainingArguments; Unsloth's SFTConfig has another
        for place, call in trainers:
            self._keep_batch(place, call, [config for _, config in configs])

    def _calls(self, *names: str) -> list[tuple[int, ast.Call]]:
        found = [(place, call) for place, one in enumerate(self.program.statements) for call in calls(one.node)]
        return [(place, call) for place, call in found if self.program.dotted(call.func).rsplit(".", 1)[-1] in names]

    def _say(self, place: int, text: str) -> None:
        self.reasons.setdefault(place, []).append(text)

    def _refuse(self, place: int, reason: str) -> Refusal:
        return Refusal("R4", reason, self.program.statements[place].cell)

    def _stays(self, place: int, item: ast.keyword, of: str) -> bool:
        """Whether an argument stays; its value may change."""
        name, value = str(item.arg), item.value
        empty = isinstance(value, ast.Constant) and value.value in (None, False, 0, "", "nll")
        if name in _CHANGES_LOSS and not empty:
            raise self._refuse(place, f"`{name}` changes the loss, which must be exact on several GPUs; remove it")
        if name in _LEFT_OUT or name in _CHANGES_LOSS:
            if not empty:
                self._say(place, f"`{name}` is left out: {_LEFT_OUT[name]}")
            return False
        known = rows(TRAINER) if of == TRAINER else sft_fields() | rows(CONFIG).keys()
        if name not in known:
            raise self._refuse(place, f"{of} has no argument `{name}` in TRL 1.15; remove it")
        if of == TRAINER:
            return True
        no = isinstance(value, ast.Constant) and value.value in ("no", None, False)
        if not self.evaluates and name in ("eval_strategy", "evaluation_strategy") and not no:
            self._say(place, f"`{name}` is left out: the trainer has no eval_dataset")
            return False
        if name == "report_to":
            self._report_to(place, item)
        if name == "seed" and isinstance(value, ast.Constant) and isinstance(value.value, int):
            self.seed = value.value
        return True

    def _report_to(self, place: int, item: ast.keyword) -> None:
        """Trackers that are named stay; metrics go to TensorBoard anyway."""
        names = {node.value for node in ast.walk(item.value) if isinstance(node, ast.Constant)}
        trackers = sorted(str(name) for name in names - {"none", "tensorboard", None})
        if set(trackers) <= TRACKERS.keys():
            self.notes += [
                f"cell {self.program.statements[place].cell}: metrics also go to {name}: log in on this machine before"
                ' the start, or set report_to="none"'
                for name in trackers
            ]
        else:
            item.value = ast.Constant("none")
            self._say(place, "metrics go to TensorBoard, without an account")

    # --- the batch ----------------------------------------------------------------------------------------------------

    def _keep_batch(self, place: int, call: ast.Call, configs: Sequence[ast.Call]) -> None:
        """Give the trainer the rows per step that the notebook has on its one GPU; TRL multiplies them by the ranks."""
        args = self._args(call)
        if isinstance(args, ast.Call) and (args not in configs or _spreads(args)):
            named_args = self._named(args)
            call.args = [named_args if one is args else one for one in call.args]
            for item in call.keywords:
                item.value = named_args if item.value is args else item.value
            batch: ast.expr | None = expression(_BATCH, ARGS=ast.Name(named_args.target.id, ast.Load()))
        else:
            batch = self._batch(args, configs)
        cell = self.program.statements[place].cell
        if batch is None:
            self.keeps_batch = False
            self.notes.append(
                f"cell {cell}: the batch is not known before the run, so on N GPUs a step has N times the notebook's"
                " rows at the same learning rate; give SFTTrainer a global_batch_size"
            )
            return
        call.keywords.append(ast.keyword(arg="global_batch_size", value=batch))
        self._say(place, "the batch is the notebook's on any number of GPUs")
        self.notes.append(
            f"cell {cell}: global_batch_size={ast.unparse(batch)} is the notebook's batch (rows per device x"
            " accumulation), the same on any number of GPUs that divides it: accumulation follows from it"
        )

    def _args(self, call: ast.Call) -> ast.expr:
        """The configuration that a trainer is given; `given["args"]` of `**given`, if a dict of the notebook has it."""
        given = [*call.args[1:2], *(item.value for item in call.keywords if item.arg == "args")]
        spread = [item.value for item in call.keywords if item.arg is None and isinstance(item.value, ast.Name)]
        if given or not spread or not any(map(_names_args, self._nodes())):
            return given[0] if given else ast.Constant(None)
        return ast.Subscript(spread[0], ast.Constant("args"), ast.Load())

    def _nodes(self) -> list[ast.AST]:
        return [node for one in self.program.statements for node in ast.walk(one.node)]

    def _batch(self, args: ast.expr, configs: Sequence[ast.Call]) -> ast.expr | None:
        """Rows per step of a trainer with these `args`: as a number if the notebook has numbers; None if unknown."""
        if isinstance(args, ast.Constant) and args.value is None:
            return ast.Constant(math.prod(_DEFAULT_BATCH.values()))  # Unsloth's is the same
        bound = self._only_value(args) if isinstance(args, ast.Name) else args
        config = next((one for one in configs if one is bound), None)
        if config is not None and not _spreads(config):
            given = {former_names().get(str(item.arg), str(item.arg)): item.value for item in config.keywords}
            of_unsloth = self.unsloth and self.program.dotted(config.func).endswith("SFTConfig")
            defaults = _DEFAULT_OF_UNSLOTH if of_unsloth else _DEFAULT_BATCH
            factors = [given.get(name, ast.Constant(default)) for name, default in defaults.items()]
            numbers = [self._number(one) for one in factors]
            if None not in numbers:
                return ast.Constant(math.prod(numbers))  # type: ignore[arg-type]
            if config is args:
                return ast.BinOp(copy.deepcopy(factors[0]), ast.Mult(), copy.deepcopy(factors[1]))
        known = configs or isinstance(bound, ast.Call)  # else it may be None
        if not known or not isinstance(args, ast.Name | ast.Attribute | ast.Subscript):
            return None
        return expression(_BATCH, ARGS=args)

    def _named(self, made: ast.expr) -> ast.NamedExpr:
        """What a function of the notebook makes, by a name of its own, because it may be made only once."""
        taken = {
            getattr(node, "id", "") or getattr(node, "arg", "") or getattr(node, "name", "") for node in self._nodes()
        }
        name = "sft_args"
        while name in taken:
            name += "_"
        return ast.NamedExpr(ast.Name(name, ast.Store()), made)

    def _number(self, value: ast.expr) -> int | None:
        if isinstance(value, ast.Name):
            bound = self._only_value(value)
            return None if bound is None else self._number(bound)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.FloorDiv):
            left, right = self._number(value.left), self._number(value.right)
            if left is None or not right:
                return None
            return left * right if isinstance(value.op, ast.Mult) else left // right
        number = value.value if isinstance(value, ast.Constant) else None
        return number if isinstance(number, int) else None

    def _only_value(self, name: ast.Name) -> ast.expr | None:
        """The value of a name that the notebook binds once, and whose value nothing changes."""
        nodes = self._nodes()
        binds = [
            node
            for node in nodes
            if isinstance(node, ast.arg)
            and node.arg == name.id
            or isinstance(node, ast.Name)
            and node.id == name.id
            and not isinstance(node.ctx, ast.Load)
        ]
        changed = any(name.id in effect.changes for effect in self.program.effects)
        values = [
            one.value
            for one in nodes
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id == name.id
        ]
        return values[0] if len(binds) == len(values) == 1 and not changed else None


def _spreads(call: ast.Call) -> bool:
    return any(item.arg is None for item in call.keywords)


def _names_args(node: ast.AST) -> bool:
    """`{"args": ...}`, `given["args"] = ...` and `dict(args=...)`, and a call that gives it to `**given`."""
    keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
    return any(getattr(key, "value", None) == "args" for key in keys) or getattr(node, "arg", None) == "args"


def _given(call: ast.Call, name: str) -> bool:
    """Whether an argument may be given."""
    return any(
        item.arg is None or item.arg == name and not (isinstance(item.value, ast.Constant) and item.value.value is None)
        for item in call.keywords
    )
