"""Inline functions that set up the training and are called once, at the top level.

Examples: `def load_model(): ... return model, tokenizer`, `def main(): ...`, `def seed_everything(seed): ...`.
Functions that prepare data stay functions. Data that is saved and loaded again stays in memory.
A function that is too complex to inline is left unchanged, and the notebook is refused later (R4). Inlining is undone
unless the recording stubs see the same events before and after.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from finetune.config.sft_fields import PARAMETERS_OF, parameters
from finetune.convert.knowledge import named
from finetune.convert.names import effects, free_names, target_names
from finetune.convert.read import Notebook, Statement
from finetune.convert.trace import Trace, trace_notebook

_SETS_LIBRARY = re.compile(
    r"(torch\.backends|os\.environ)\b(?:(?!torch\.b|os\.e)[^\n=])++(?<![!<>])=[^=]"
    r"|torch\.(set_float32_matmul_precision|use_deterministic)\w*\("
)


def inline_setup(notebook: Notebook) -> list[str]:
    """Inline such functions, in place. Returns notes for the report."""
    statements, notes = list(notebook.statements), []
    while (found := _next(statements)) is not None:
        place, definition, body = found
        cell, taken = statements[place].cell, max(statement.id for statement in statements) + 1
        line = definition.line - 1
        made = [
            Statement(id=taken + n, cell=definition.cell, line=line + at, source=source, node=ast.parse(source).body[0])
            for n, (at, source) in enumerate(body)
        ]
        statements[place : place + 1] = made
        statements.remove(definition)
        notes.append(f"cell {cell}: {_name(definition)}() is called once; its statements replace the call")
    if not notes or _events(notebook.statements) != _events(statements):
        return []
    notebook.statements = statements
    return notes


def data_in_memory(notebook: Notebook) -> list[str]:
    """Remove `data.save_to_disk("x")` followed by `data = load_from_disk("x")`, in place, if the notebook mentions the
    folder nowhere else. Returns notes for the report."""
    statements, notes = list(notebook.statements), []
    for loading in notebook.statements:
        path = _loaded_folder(loading.node)
        if path is None:
            continue
        place = statements.index(loading)
        saving = next((s for s in reversed(statements[:place]) if _saved_folder(s.node) == path), None)
        if saving is None or _mentions(notebook, path) != 2 or not _same_between(statements, saving, loading):
            continue
        assert isinstance(loading.node, ast.Assign)
        data, target = ast.unparse(saving.node).split(".save_to_disk")[0], ast.unparse(loading.node.targets[0])
        source = f"{target} = {data}"
        made = replace(loading, node=ast.parse(source).body[0], source=source)
        statements[place : place + 1] = [made] if target != data else []
        statements.remove(saving)
        notes.append(f"cell {saving.cell}: {data} stays in memory; it is not saved to {path} and loaded again")
    notebook.statements = statements
    return notes


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


def _loaded_folder(node: ast.stmt) -> str | None:
    call = node.value if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None
    named = isinstance(call, ast.Call) and re.search(r"\bload_from_disk$", ast.unparse(call.func))
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and named and len(call.args) == 1 else None


def _saved_folder(node: ast.stmt) -> str | None:
    call = node.value if isinstance(node, ast.Expr) else None
    named = isinstance(call, ast.Call) and re.fullmatch(r"\w+\.save_to_disk", ast.unparse(call.func))
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and named and len(call.args) == 1 else None


def _mentions(notebook: Notebook, path: str) -> int:
    """How many statements and shell lines mention a folder. More than two: something else may need the files."""
    wanted = ast.parse(path, mode="eval").body
    text = wanted.value if isinstance(wanted, ast.Constant) else path
    named = sum(any(ast.dump(node) == ast.dump(wanted) for node in ast.walk(s.node)) for s in notebook.statements)
    return named + sum(str(text) in shell.text for shell in notebook.shells)


def _same_between(statements: Sequence[Statement], saving: Statement, loading: Statement) -> bool:
    """Whether neither the data nor the folder's name changes between saving and loading."""
    between = statements[statements.index(saving) + 1 : statements.index(loading)]
    names = free_names(ast.parse(ast.unparse(saving.node)).body[0])
    return not any(names & (e.binds | e.may_bind | e.changes) for e in (effects(one.node) for one in between))


def _events(statements: Sequence[Statement]) -> list[list[Trace]]:
    traces = trace_notebook(statements)
    return [[{k: v for k, v in item.items() if k != "statement"} for item in trace["events"]] for trace in traces]


def _name(statement: Statement) -> str:
    return statement.node.name if isinstance(statement.node, ast.FunctionDef) else ""


def _next(statements: list[Statement]) -> tuple[int, Statement, list[tuple[int, str]]] | None:
    """The next call that can be inlined: its place, the definition, and the line and text of each replacement."""
    functions = _setting_up(statements)
    for place, statement in enumerate(statements):
        node = statement.node
        call = (
            node.value
            if isinstance(node, ast.Expr) or (isinstance(node, ast.Assign) and len(node.targets) == 1)
            else None
        )
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions:
            definition = functions[call.func.id]
            body = _in_place(node, call, definition)
            if body is not None and not _clashes(statements, place, definition, body):
                return place, definition, body
    return None


def _setting_up(statements: Sequence[Statement]) -> dict[str, Statement]:
    """Functions that are defined and mentioned once, and that load, adapt or train the model, configure a library or
    the environment, or call a function that does."""
    names = [node.id for s in statements for node in ast.walk(s.node) if isinstance(node, ast.Name)]
    defined = [_name(s) for s in statements]
    once = {name: s for s in statements if (name := _name(s)) and names.count(name) == defined.count(name) == 1}
    found = {name: s for name, s in once.items() if _SETS_LIBRARY.search(ast.unparse(s.node))}
    while more := {
        n: s for n, s in once.items() if n not in found and _called(s.node) & (named("sets up") | found.keys())
    }:
        found |= more
    return found


def _called(node: ast.AST) -> set[str]:
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}


def _in_place(statement: ast.stmt, call: ast.Call, definition: Statement) -> list[tuple[int, str]] | None:
    """What replaces the call: parameters, body and result. None if the function is too complex to inline."""
    function = definition.node
    assert isinstance(function, ast.FunctionDef)
    given = _parameters(call, function)
    body = function.body[1:] if ast.get_docstring(function) is not None else list(function.body)
    last = body.pop() if body and isinstance(body[-1], ast.Return) else None
    result = _result(statement, last.value if isinstance(last, ast.Return) else None)
    refused = ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal
    if given is None or result is None or function.decorator_list:
        return None
    if any(isinstance(inner, refused) for node in body for inner in _own(node)):
        return None
    made = [f"{name} = {ast.unparse(value)}" for name, value in given.items() if ast.unparse(value) != name]
    texts, ends = [], body[0].lineno - 1 if body else 0
    for node in body:
        texts.append((node.lineno, _moved(definition.source.split("\n")[ends : node.end_lineno], node)))
        ends = node.end_lineno or node.lineno
    first = function.lineno
    return [*((first, text) for text in made), *texts, *((first, text) for text in result)]


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside the functions that the body defines."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for inner in ast.iter_child_nodes(node):
            yield from _own(inner)


def _parameters(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr] | None:
    """Each parameter with its argument; None if name and position alone do not determine it."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    names = [item.arg for item in [*named, *arguments.kwonlyargs]]
    defaults = [*[None] * (len(named) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    given = {n: d for n, d in zip(names, defaults, strict=True) if isinstance(d, ast.Constant | ast.Name)}
    given |= dict(zip(names, call.args, strict=False)) | {item.arg: item.value for item in call.keywords if item.arg}
    spread = any(item.arg is None for item in call.keywords) or any(isinstance(item, ast.Starred) for item in call.args)
    bound = not (spread or arguments.vararg or arguments.kwarg) and given.keys() == set(names)
    return {name: given[name] for name in names} if bound else None


def _result(statement: ast.stmt, value: ast.expr | None) -> list[str] | None:
    """Statements that assign the function's result to the targets of the call."""
    if isinstance(statement, ast.Expr):
        return [ast.unparse(value)] if isinstance(value, ast.Call) else []
    if value is None or not isinstance(statement, ast.Assign):
        return None
    target = statement.targets[0]
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    texts = [(ast.unparse(one), ast.unparse(other)) for one, other in pairs]
    return [f"{one} = {other}" for one, other in texts if one != other]


def _moved(lines: list[str], node: ast.stmt) -> str:
    """A statement and the comments above it, dedented; without comments if dedenting would change a string."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    try:
        same = [ast.dump(one) for one in ast.parse(text).body] == [ast.dump(node)]
    except SyntaxError:
        same = False
    return text if same else ast.unparse(node)


def _clashes(statements: Sequence[Statement], place: int, definition: Statement, body: list[tuple[int, str]]) -> bool:
    """Whether inlining would overwrite a top-level name that is read later."""
    nodes = [ast.parse(text).body[0] for _, text in body]
    local = {name for node in nodes for name in effects(node).binds | effects(node).may_bind}
    others = [(n, s.node, effects(s.node)) for n, s in enumerate(statements) if s is not definition and n != place]
    before = {name for n, _, e in others if n < place for name in e.binds | e.may_bind}
    call = statements[place].node
    bound = set(target_names(call.targets[0])) if isinstance(call, ast.Assign) else set()
    bound |= _imports(node for n, node, _ in others if n < place) & _imports(nodes)
    read = {name for _, _, e in others for name in e.late} - bound
    for n, _, e in others:
        if n > place:
            read |= e.reads - bound
            bound |= e.binds
    return bool(local & before & read)


def _imports(nodes: Iterable[ast.stmt]) -> set[str]:
    return {name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in effects(node).binds}


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
