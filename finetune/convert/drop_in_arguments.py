"""Today's arguments for a notebook's SFTTrainer, SFTConfig and TrainingArguments, for the drop-in form."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Sequence

from finetune.config.arguments import CONFIG, DROP_IN, TRAINER, former, rows
from finetune.config.sft_fields import sft_fields
from finetune.convert.knowledge import named, not_in
from finetune.convert.names import Program, root, target_names
from finetune.convert.read import Refusal
from finetune.convert.source import expression

CONFIGS = ("SFTConfig", "TrainingArguments")
# What the script's SFTConfig and SFTTrainer refuse, or keep without need. What has no effect today, they leave out.
_LEFT_OUT = {
    name: row.drop_in for name, row in (rows(TRAINER) | rows(CONFIG)).items() if row.drop_in and row.now is None
}
_CHANGES_LOSS = {name for name, row in (rows(TRAINER) | rows(CONFIG)).items() if DROP_IN in row.refused}
# For the verification: arguments that may differ from the notebook's, and values that may be new.
CHANGED_ARGUMENTS = frozenset({*_LEFT_OUT, *_CHANGES_LOSS, "report_to"})
_DEFAULTS = [not_in("trl", "transformers"), not_in("trl", "unsloth"), not_in("unsloth", "transformers")]
WRITTEN_DEFAULTS = {
    name: tuple(defaults[name] for defaults in _DEFAULTS if name in defaults)
    for name in dict.fromkeys(name for defaults in _DEFAULTS for name in defaults)
}

_ROWS, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_BATCH = f"ARGS.{_ROWS} * ARGS.{_STEPS}"
_DEFAULT_BATCH = {_ROWS: 8, _STEPS: 1}  # TRL's; where the notebook's library has others, they are written out
_UNSLOTH_OUTPUT = "unsloth_training_checkpoints"


class Arguments:
    """New arguments for each SFTTrainer, SFTConfig and TrainingArguments of a notebook.

    Raises:
        Refusal: R4, for arguments that are unknown, only known at run time, or change the loss.
    """

    def __init__(self, program: Program, *, unsloth: bool) -> None:
        self.program, self.unsloth = program, unsloth
        self.reasons: dict[int, list[str]] = {}  # place -> what changed
        self.seed: int | None = None
        self.notes: list[str] = []
        self.keeps_batch = True  # whether every trainer is given the notebook's batch
        trainers = [(place, call) for place, call in self._calls("SFTTrainer")]
        if unsloth:
            for place, call in trainers:
                self._default_config(place, call)
        configs = [(place, call) for place, call in self._calls(*CONFIGS)]
        for place, call in [*configs, *trainers]:
            call.keywords = self._spread(place, call)
        self.evaluates = any(len(call.args) > 4 or _given(call, "eval_dataset") for _, call in trainers)
        for place, call in trainers:
            self._trainer(place, call)
        for place, call in configs:
            self._config(place, call)
        for place, call in trainers:
            self._keep_batch(place, call, [config for _, config in configs])

    def _default_config(self, place: int, call: ast.Call) -> None:
        """Unsloth's own configuration for a trainer without `args`, whose defaults are then written out."""
        if len(call.args) > 1 or any(item.arg in ("args", None) for item in call.keywords):
            return
        folder = ast.keyword(arg="output_dir", value=ast.Constant(_UNSLOTH_OUTPUT))
        config = ast.Call(func=ast.Name("SFTConfig", ast.Load()), args=[], keywords=[folder])
        call.keywords.append(ast.keyword(arg="args", value=config))
        self._say(place, "the trainer has no `args`; Unsloth's defaults are written out")

    def _calls(self, *names: str) -> list[tuple[int, ast.Call]]:
        return [
            (place, node)
            for place, statement in enumerate(self.program.statements)
            for node in ast.walk(statement.node)
            if isinstance(node, ast.Call) and self.program.dotted(node.func).rsplit(".", 1)[-1] in names
        ]

    def _say(self, place: int, text: str) -> None:
        self.reasons.setdefault(place, []).append(text)

    def _refuse(self, place: int, reason: str) -> Refusal:
        return Refusal("R4", reason, self.program.statements[place].cell)

    def _spread(self, place: int, call: ast.Call) -> list[ast.keyword]:
        """The keywords, with `**settings` written out if settings is a dict literal that nothing changes."""
        found: list[ast.keyword] = []
        for item in call.keywords:
            if item.arg is not None:
                found.append(item)
                continue
            found += self._of_dict(place, item.value)
            self._say(place, f"`**{ast.unparse(item.value)}` is written out")
        return found

    def _of_dict(self, place: int, value: ast.expr) -> list[ast.keyword]:
        if isinstance(value, ast.Name):
            bound = [
                statement.node.value
                for statement in self.program.statements
                if isinstance(statement.node, ast.Assign) and value.id in target_names(statement.node.targets[0])
            ]
            changed = any(value.id in e.changes for e in self.program.effects)
            if len(bound) == 1 and not changed:
                return self._of_dict(place, bound[0])
            if len(bound) == 1 and (stored := self._stored(value.id, place)) is not None:
                names = dict.fromkeys([str(item.arg) for item in self._of_dict(place, bound[0])] + stored)
                return [ast.keyword(arg=name, value=_item(value.id, name)) for name in names]
            if (given := self._of_caller(value)) is not None:
                return [ast.keyword(arg=name, value=_item(value.id, name)) for name in given]
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
            return value.keywords
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            pairs = zip(value.keys, value.values, strict=True)
            return [ast.keyword(arg=str(key.value), value=one) for key, one in pairs if isinstance(key, ast.Constant)]
        raise self._refuse(place, f"the arguments `**{ast.unparse(value)[:60]}` are not known; write them as keywords")

    def _stored(self, name: str, before: int) -> list[str] | None:
        """The keys that statements such as `given["args"] = config` add to a dict; None if others change it."""
        keys = []
        for place, statement in enumerate(self.program.statements):
            if name not in self.program.effects[place].changes:
                continue
            target = statement.node.targets[0] if isinstance(statement.node, ast.Assign) else None
            key = target.slice if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name else None
            if place > before or not isinstance(key, ast.Constant):
                return None
            keys.append(str(key.value))
        return keys

    def _of_caller(self, value: ast.Name) -> list[str] | None:
        """The names in a function's `**kwargs`, if it uses them once and its only call names all it gives."""
        nodes = [node for statement in self.program.statements for node in ast.walk(statement.node)]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and value in ast.walk(node)]
        function = functions[-1] if functions else None
        if function is None or function.args.kwarg is None or function.args.kwarg.arg != value.id:
            return None
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == value.id]
        sites = [node for node in nodes if isinstance(node, ast.Call) and _last(node.func) == function.name]
        if len(uses) != 1 or len(sites) != 1 or any(item.arg is None for item in sites[0].keywords):
            return None
        own = {item.arg for item in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]}
        return [str(item.arg) for item in sites[0].keywords if item.arg not in own]

    def _trainer(self, place: int, call: ast.Call) -> None:
        """Its arguments by former names stay: the script's trainer takes them."""
        keywords = []
        for item in call.keywords:
            name = str(item.arg)
            if self._has_adapter(place, name, call) or self._is_left_out(place, name, item.value):
                continue
            if name not in rows(TRAINER):
                raise self._refuse(place, f"SFTTrainer has no argument `{name}` in TRL 1.15; remove it")
            keywords.append(item)
        call.keywords = keywords

    def _keep_batch(self, place: int, call: ast.Call, configs: Sequence[ast.Call]) -> None:
        """Give the trainer the rows per step that the notebook has on its one GPU; TRL multiplies them by the ranks."""
        given = [*call.args[1:2], *(item.value for item in call.keywords if item.arg == "args")]
        args = given[0] if given else ast.Constant(None)
        if isinstance(args, ast.Call) and args not in configs:
            named_args = self._named(args)
            call.args = [named_args if one is args else one for one in call.args]
            for item in call.keywords:
                item.value = named_args if item.value is args else item.value
            args = named_args.target
            batch: ast.expr | None = expression(_BATCH, ARGS=ast.Name(args.id, ast.Load()))
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

    def _batch(self, args: ast.expr, configs: Sequence[ast.Call]) -> ast.expr | None:
        """Rows per step of a trainer with these `args`: as a number if the notebook has numbers; None if unknown."""
        if isinstance(args, ast.Constant) and args.value is None:
            return ast.Constant(math.prod(_DEFAULT_BATCH.values()))
        bound = self._only_value(args) if isinstance(args, ast.Name) else args
        config = next((one for one in configs if one is bound), None)
        if config is not None:
            given = {former().get(str(item.arg), str(item.arg)): item.value for item in config.keywords}
            factors = [given.get(name, ast.Constant(default)) for name, default in _DEFAULT_BATCH.items()]
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
        nodes = [node for one in self.program.statements for node in ast.walk(one.node)]
        taken = {getattr(node, "id", "") or getattr(node, "arg", "") or getattr(node, "name", "") for node in nodes}
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
        nodes = [node for one in self.program.statements for node in ast.walk(one.node)]
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

    def _has_adapter(self, place: int, name: str, call: ast.Call) -> bool:
        """`peft_config` for a model with an adapter, which TRL ignored once and refuses now."""
        given = [*call.args[:1], *(item.value for item in call.keywords if item.arg == "model")]
        if name != "peft_config" or not given or not isinstance(given[0], ast.Name):
            return False
        made = self._made_by(place, given[0].id, call)
        if made is None or self.program.dotted(made).rsplit(".", 1)[-1] != "get_peft_model":
            return False
        self._say(place, "`peft_config` is left out: the model has its adapter by get_peft_model")
        return True

    def _made_by(self, place: int, name: str, call: ast.Call) -> ast.expr | None:
        """The function whose result a name in a call holds; None if it holds none. In a function, a parameter is what
        its only call is given."""
        function = self.program.statements[place].node
        nodes: list[ast.AST] = [one.node for one in self.program.statements[:place]]
        if isinstance(function, ast.FunctionDef):
            inside = [one for one in ast.walk(function) if isinstance(one, ast.Assign) and one.lineno < call.lineno]
            if any(name in target_names(one.targets[0]) and one not in function.body for one in inside):
                return None  # in a branch
            parameters = [item.arg for item in [*function.args.posonlyargs, *function.args.args]]
            if name in parameters and not any(name in target_names(one.targets[0]) for one in inside):
                sites = [
                    (at, node)
                    for at, one in enumerate(self.program.statements)
                    for node in ast.walk(one.node)
                    if isinstance(node, ast.Call) and _last(node.func) == function.name
                ]
                if len(sites) != 1:
                    return None
                at, site = sites[0]
                passed = dict(zip(parameters, site.args, strict=False))
                passed |= {str(item.arg): item.value for item in site.keywords}
                if not isinstance(passed.get(name), ast.Name):
                    return None
                name = passed[name].id  # type: ignore[attr-defined]
                nodes = [one.node for one in self.program.statements[:at]]
            else:
                nodes += inside
        for node in reversed(nodes):
            if isinstance(node, ast.Assign) and name in target_names(node.targets[0]):
                made = node.value.func if isinstance(node.value, ast.Call) else node.value
                if isinstance(made, ast.Attribute) and made.attr in named("moves") and root(made) == name:
                    continue  # `model = model.to(device)`
                return made
        return None

    def _config(self, place: int, call: ast.Call) -> None:
        """Its arguments by former names stay: the script's SFTConfig takes them."""
        of_transformers = self.program.dotted(call.func).endswith("TrainingArguments")
        keywords = []
        for item in call.keywords:
            name = str(item.arg)
            if self._is_left_out(place, name, item.value):
                continue
            if not self.evaluates and name in ("eval_strategy", "evaluation_strategy") and not _is_no(item.value):
                self._say(place, f"`{name}` is left out: the trainer has no eval_dataset")
                continue
            if name not in sft_fields() and name not in former() and name not in rows(CONFIG):
                raise self._refuse(place, f"SFTConfig has no argument `{name}` in TRL 1.15; remove it")
            if name == "report_to" and self._reports_elsewhere(item.value):
                item.value = ast.Constant("none")
                self._say(place, "metrics go to TensorBoard, without an account")
            keywords.append(item)
        call.keywords = keywords
        given = {former().get(str(item.arg), item.arg) for item in keywords}
        defaults = not_in("trl", "unsloth") if self.unsloth else {}
        if of_transformers:  # Unsloth's SFTConfig has other defaults than TRL's
            defaults = not_in("trl", "transformers") | (not_in("unsloth", "transformers") if self.unsloth else {})
        for name, value in defaults.items():
            if name not in given:
                call.keywords.append(ast.keyword(arg=name, value=ast.Constant(value)))
                self._say(place, f"the notebook's default {name}={value!r} is written out")
        if of_transformers:
            self._say(place, "TrainingArguments became SFTConfig")
        for item in call.keywords:
            if item.arg == "seed" and isinstance(item.value, ast.Constant) and isinstance(item.value.value, int):
                self.seed = item.value.value

    def _is_left_out(self, place: int, name: str, value: ast.expr) -> bool:
        empty = isinstance(value, ast.Constant) and value.value in (None, False, 0, "", "nll")
        if name in _CHANGES_LOSS and not empty:
            raise self._refuse(place, f"`{name}` changes the loss, which must be exact on several GPUs; remove it")
        if name not in _LEFT_OUT and name not in _CHANGES_LOSS:
            return False
        if not empty and name in _LEFT_OUT:
            self._say(place, f"`{name}` is left out: {_LEFT_OUT[name]}")
        return True

    @staticmethod
    def _reports_elsewhere(value: ast.expr) -> bool:
        names = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}
        return not names <= {"none", "tensorboard", None}


def _last(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _item(name: str, key: str) -> ast.expr:
    return ast.Subscript(value=ast.Name(name, ast.Load()), slice=ast.Constant(key), ctx=ast.Load())


def _given(call: ast.Call, name: str) -> bool:
    return any(item.arg == name and not (isinstance(item.value, ast.Constant) and item.value.value is None)
               for item in call.keywords)  # fmt: skip


def _is_no(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in ("no", None, False)
