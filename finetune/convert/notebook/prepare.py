"""Write some of a notebook's code in the way that the converter reads, with the same meaning."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace

from finetune.config.sft_fields import PARAMETERS_OF, parameters
from finetune.convert.analysis.names import effects
from finetune.convert.notebook.read import Notebook, Statement


def settle_globals(notebook: Notebook) -> None:
    """Decide conditions on names in place: `if "name" not in globals():`, where the cells above always or never bind
    the name, and `if "name" in inspect.signature(SFTTrainer).parameters:`, by the installed release. Also write
    `os.environ.update({...})` as one assignment per variable."""
    known: set[str] = set()
    perhaps: set[str] = set()
    statements: list[Statement] = []
    aliases = _aliases(notebook)
    for statement in notebook.statements:
        body = _settled(statement.node, known, perhaps, aliases)
        body = _variables(statement.node) if body is None else body
        if body is None:
            statements.append(statement)
        else:
            texts = [ast.unparse(one) for one in body]
            statements += [replace(statement, node=ast.parse(text).body[0], source=text) for text in texts]
        for one in [statement.node] if body is None else body:
            found = effects(one)
            known |= found.binds
            perhaps |= found.may_bind
            gone = {
                inner.id for inner in ast.walk(one) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Del)
            }
            known -= gone
            perhaps |= gone
    notebook.statements = [replace(statement, id=number) for number, statement in enumerate(statements)]


def _variables(node: ast.stmt) -> list[ast.stmt] | None:
    """The assignments of `os.environ.update({"A": "1"}, B="2")`; None for any other statement."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    if call is None or ast.unparse(call.func) not in ("os.environ.update", "environ.update"):
        return None
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    for given in call.args:
        if not isinstance(given, ast.Dict):
            return None
        pairs += zip(given.keys, given.values, strict=True)
    pairs += [(ast.Constant(item.arg) if item.arg else None, item.value) for item in call.keywords]
    if any(key is None for key, _ in pairs):
        return None
    owner = ast.unparse(call.func).removesuffix(".update")
    texts = [f"{owner}[{ast.unparse(key)}] = {ast.unparse(value)}" for key, value in pairs if key is not None]
    return [ast.parse(text).body[0] for text in texts] or None


def _settled(node: ast.stmt, known: set[str], perhaps: set[str], aliases: dict[str, str]) -> list[ast.stmt] | None:
    """The branch that runs; None for any other statement, or if either may run."""
    test = node.test if isinstance(node, ast.If) else None
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Constant) and len(test.ops) == 1):
        return None
    name, place = test.left.value, ast.unparse(test.comparators[0])
    if not isinstance(test.ops[0], ast.In | ast.NotIn):
        return None
    names = _installed(place, aliases)
    if names is None:
        if place not in ("globals()", "locals()", "vars()", "dir()") or (name in perhaps and name not in known):
            return None
        names = known
    assert isinstance(node, ast.If)
    taken = node.body if (name in names) == isinstance(test.ops[0], ast.In) else node.orelse
    inner = [(one, _settled(one, known, perhaps, aliases)) for one in taken]
    return [part for one, parts in inner for part in ([one] if parts is None else parts)]


def _aliases(notebook: Notebook) -> dict[str, str]:
    """Name -> the expression that it stands for: `known = inspect.signature(SFTTrainer).parameters`."""
    nodes = [statement.node for statement in notebook.statements]
    stored = Counter(
        one.id
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    )
    return {
        node.targets[0].id: ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and stored[node.targets[0].id] == 1
    }


_SIGNATURE = re.compile(r"(?:inspect\.)?signature\((?:\w+\.)*?(\w+?)(?:\.__init__)?\)\.parameters(?:\.keys\(\))?")


def _installed(text: str, aliases: dict[str, str]) -> frozenset[str] | None:
    """What the installed trainer or configuration takes, if the expression stands for its parameters."""
    for _ in range(3):  # `signature = inspect.signature(SFTTrainer)`, `known = set(signature.parameters)`
        text = re.sub(r"^(set|list|tuple|dict)\((.*)\)$", r"\2", text)
        name = re.match(r"\w+", text)
        text = aliases.get(name[0], name[0]) + text[name.end() :] if name else text
    match = _SIGNATURE.fullmatch(text)
    return parameters(match[1]) if match and match[1] in PARAMETERS_OF else None


def train_by_method(notebook: Notebook) -> None:
    """Write Unsloth's `unsloth_train(trainer)` as `trainer.train()`, which it is on today's versions, in place."""
    for place, statement in enumerate(notebook.statements):
        calls = [node for node in ast.walk(statement.node) if isinstance(node, ast.Call) and node.args]
        found = [node for node in calls if getattr(node.func, "id", "") == "unsloth_train"]
        for call in found:
            call.func, call.args = ast.Attribute(call.args[0], "train", ast.Load()), call.args[1:]
        if found:
            text = ast.unparse(statement.node)
            notebook.statements[place] = replace(statement, node=ast.parse(text).body[0], source=text)


_INT8, _KBIT = "prepare_model_for_int8_training", "prepare_model_for_kbit_training"


def prepare_by_todays_name(notebook: Notebook) -> list[str]:
    """Write PEFT's `prepare_model_for_int8_training(model)` by its name today, in place, unless another argument than
    `use_gradient_checkpointing` is given. Returns notes for the report."""
    used = [one for one in notebook.statements if re.search(rf"\b{_INT8}\b", one.source)]
    calls = [
        node
        for one in used
        for node in ast.walk(one.node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] == _INT8
    ]
    if any(len(call.args) > 1 or {k.arg for k in call.keywords} - {"use_gradient_checkpointing"} for call in calls):
        return []
    for one in used:
        source = re.sub(rf"\b{_INT8}\b", _KBIT, one.source)
        node = ast.parse(source).body[0]
        if isinstance(node, ast.ImportFrom):
            names = {ast.unparse(alias): alias for alias in node.names}
            node.names = list(names.values())
            source = ast.unparse(node)
        notebook.statements[notebook.statements.index(one)] = replace(one, source=source, node=node)
    return [f"cell {used[-1].cell}: {_INT8} is {_KBIT} today"] if calls else []


def name_the_trainer(notebook: Notebook) -> None:
    """Write `SFTTrainer(...).train()` as two statements, so that the trainer has a name."""
    used = {node.id for one in notebook.statements for node in ast.walk(one.node) if isinstance(node, ast.Name)}
    name = next(name for name in ("trainer", "the_trainer", "sft_trainer_") if name not in used)
    for place, statement in enumerate(notebook.statements):
        call = getattr(statement.node, "value", None) if isinstance(statement.node, ast.Expr | ast.Assign) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "train"):
            continue
        made = call.func.value
        if not isinstance(made, ast.Call) or not ast.unparse(made.func).endswith("Trainer"):
            continue
        call.func.value = ast.Name(name, ast.Load())
        texts = f"{name} = {ast.unparse(made)}", ast.unparse(statement.node)
        ids = max(one.id for one in notebook.statements) + 1, statement.id
        notebook.statements[place : place + 1] = [
            replace(statement, id=number, node=ast.parse(text).body[0], source=text)
            for number, text in zip(ids, texts, strict=True)
        ]
        return
