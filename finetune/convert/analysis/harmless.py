"""Which statements can be left out: those that only display, measure or compute what nothing needs."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from finetune.convert.analysis.names import (
    Program,
    casts_modules,
    changed_in_loop,
    effects,
    root,
    target_names,
)
from finetune.convert.analysis.roles import SAVES, Roles, calls_in, method_of, only_installs
from finetune.convert.knowledge import matches, named
from finetune.convert.notebook.read import Notebook, Statement, process_command
from finetune.convert.script.shells import INSTALLS, leaves_nothing


def _harmless(
    roles: Roles, call: ast.Call, seen: frozenset[str] = frozenset(), local: frozenset[str] = frozenset()
) -> bool:
    """Whether a call has no lasting effect. `local`: local names of the enclosing function."""
    import builtins

    name = roles.program.dotted(call.func)
    last = name.rsplit(".", 1)[-1] if name else getattr(call.func, "attr", "")
    if last in named("in place") or (last == "apply" and root(call.func) in roles.models):
        return False
    if name.startswith(("subprocess.", "os.")) and (command := process_command(call)):
        return bool(INSTALLS.match(command)) or leaves_nothing(command)
    if matches("acts", name) or name.split(".")[0] in roles.own_modules:
        return False
    if last == "open" or last in ("write", "dump", "write_text", "save"):
        return _reads_file(call)
    if last in named("displays") or matches("account", name) or last in named("looks"):
        return True
    if root(call.func) not in local and _on_scratch(roles, call):
        return True
    if name.startswith(("unsloth.", "peft.", "trl.", "torch.nn.")) and last[:1].islower() and last != "pipeline":
        if any(root(item) in roles.models for item in call.args):
            return False  # such as add_new_tokens(model, ...)
    if isinstance(call.func, ast.Name):
        if call.func.id in {*roles.tokenizers, *roles.models, *local}:
            return True
        definition = roles.program.definition(call.func.id)
        if definition is not None and call.func.id not in seen:
            seen = seen | {call.func.id}
            if isinstance(definition, ast.ClassDef):
                return all(_harmless_function(roles, one, seen, of_class=True) for one in _constructors(definition))
            return _harmless_function(_with_parameters(roles, definition, call), definition, seen)
        if call.func.id in roles.program.imports:
            return name.split(".")[0] in named("computes")
        return hasattr(builtins, call.func.id) and call.func.id not in (
            "exec",
            "eval",
            "compile",
            "__import__",
            "setattr",
            "exit",
            "quit",
        )
    if isinstance(call.func, ast.Lambda):
        return True
    if isinstance(call.func, ast.Call) and roles.program.dotted(call.func.func) == "numpy.vectorize":
        return all(isinstance(item, ast.Lambda) for item in call.func.args)  # what they call is judged as well
    if root(call.func) in local and last not in named("changes") - named("fills"):
        return True
    return bool(name) and name.split(".")[0] in named("computes") and root(call.func) in roles.program.imports


def _on_scratch(roles: Roles, call: ast.Call) -> bool:
    """A method of a display object, or one that fills a collection. If training needs the result, it is kept anyway."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, method = root(call.func), call.func.attr
    if name in roles.collections:
        return method in named("fills") and not isinstance(call.func.value, ast.Call | ast.Attribute)
    return name in roles.scratch and method not in SAVES


def _constructors(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    return [
        one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__post_init__")
    ]


def _with_parameters(roles: Roles, definition: ast.stmt, call: ast.Call) -> Roles:
    """The roles inside a function, where a parameter is the model that the call gives it."""
    if not isinstance(definition, ast.FunctionDef):
        return roles
    names = [item.arg for item in [*definition.args.posonlyargs, *definition.args.args]]
    given = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords)]
    return replace(roles, models=roles.models | {name for name, value in given if name and root(value) in roles.models})


def _harmless_function(roles: Roles, node: ast.stmt, seen: frozenset[str], *, of_class: bool = False) -> bool:
    """Whether a function of the notebook only computes: it calls nothing harmful and changes nothing outside.

    `of_class`: it may set what belongs to its object.
    """
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)]
    given = [inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)]
    made = {  # objects created by the function, which it may change
        name
        for inner in ast.walk(node)
        if isinstance(inner, ast.Assign) and not isinstance(inner.value, ast.Name | ast.Attribute | ast.Subscript)
        for name in target_names(inner.targets[0])
    }
    made |= {given[0]} if of_class and given else set()
    stores = [inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute | ast.Subscript)]
    if any(isinstance(inner.ctx, ast.Store) and root(inner) not in made for inner in stores):
        return False
    return all(_harmless(roles, inner, seen, frozenset([*names, *given])) for inner in calls_in(node))


def _reads_file(call: ast.Call) -> bool:
    mode = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "mode"), None)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "open" and (
        mode is None or (isinstance(mode, ast.Constant) and not set(str(mode.value)) & set("wax+"))
    )


def only_looks(roles: Roles, node: ast.stmt) -> bool:
    """Whether a statement only displays, measures or generates, so that training is unaffected."""
    if isinstance(node, ast.Expr):
        calls = calls_in(node)
        return all(_harmless(roles, call) for call in calls) and not _changes_role(roles, node)
    if _sets_elements(node) & {*roles.models, *roles.tokenizers, *roles.trainers}:
        return False
    if isinstance(node, ast.For | ast.If | ast.With | ast.While | ast.Try | ast.AsyncFor | ast.AsyncWith):
        inner = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt)]
        inner += [item for handler in getattr(node, "handlers", []) for item in handler.body]
        heads = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr | ast.withitem)]
        return all(_harmless(roles, call) for head in heads for call in calls_in(head)) and all(
            isinstance(item, ast.Pass | ast.Break | ast.Continue | ast.Raise | ast.Import | ast.ImportFrom)
            or (isinstance(item, ast.Assign | ast.AugAssign | ast.AnnAssign) and _changes_no_role(roles, item))
            or only_looks(roles, item)
            for item in inner
        )
    if isinstance(node, ast.Delete):
        kept = {*roles.models, *roles.tokenizers, *roles.trainers}
        return all(isinstance(item, ast.Name) or root(item) not in kept for item in node.targets)
    return isinstance(node, ast.Assert | ast.Pass | ast.Raise)


def _sets_elements(node: ast.stmt) -> set[str]:
    """Names that a loop changes by assigning to attributes of their elements or by casting modules."""
    stores = [
        n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript) and isinstance(n.ctx, ast.Store)
    ]
    return changed_in_loop(node) if stores or casts_modules(node) else set()


def _changes_no_role(roles: Roles, node: ast.stmt) -> bool:
    e = effects(node)
    names = roles.models | roles.trainers | set(roles.tokenizers)
    return not (e.binds | e.may_bind | e.changes) & names and all(_harmless(roles, call) for call in calls_in(node))


def _changes_role(roles: Roles, node: ast.Expr) -> bool:
    return any(method_of(call) in named("changes") and not _on_scratch(roles, call) for call in calls_in(node))


def installs(roles: Roles, notebook: Notebook, statement: Statement) -> bool:
    """Whether it is a branch in an installation cell, or a branch with shell lines in a cell that also installs."""
    node = statement.node
    if not isinstance(node, ast.If | ast.Try) or statement.cell not in notebook.install:
        return False
    last = statement.line + (node.end_lineno or node.lineno) - node.lineno
    return only_installs(roles, notebook, statement.cell) or any(
        shell.cell == statement.cell and statement.line <= shell.line <= last for shell in notebook.shells
    )


_TRACKER = re.compile(r"\b(?>\w*?(?:Wandb|Comet|MLflow|Neptune|ClearML|DVCLive|Dagshub|AzureML|SwanLab))\w*Callback")


def is_tracker(program: Program, node: ast.stmt) -> bool:
    """Whether it makes or adds a tracker's callback, which logs to an account: `trainer.add_callback(Samples(...))`."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call) or (isinstance(node, ast.Expr) and method_of(call) != "add_callback"):
        return False
    given = call.args if isinstance(node, ast.Expr) else [call]
    values = [program.assigned.get(one.id, one) if isinstance(one, ast.Name) else one for one in given]
    classes = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in values]
    return any(_TRACKER.search(_bases(program, name)) for name in classes)


def _bases(program: Program, name: str) -> str:
    """The base classes of a class of the notebook, else the name itself."""
    definition = program.definition(name)
    return "".join(map(ast.unparse, definition.bases)) if isinstance(definition, ast.ClassDef) else name


def adds_path(program: Program, node: ast.stmt) -> bool:
    """`sys.path.append(folder)`, also under an `if`. `modules.refuse_missing` finds what is imported from there."""
    if isinstance(node, ast.If) and not node.orelse:
        return all(adds_path(program, one) for one in node.body)
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and re.fullmatch(r"sys\.path\.(append|insert|extend)", program.dotted(call.func)) is not None
    )


def leaves(roles: Roles, node: ast.stmt) -> bool:
    return all(_harmless(roles, call) for call in calls_in(node))
