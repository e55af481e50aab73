"""Which statements can be left out: those that only display, measure or compute what nothing needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

from finetune.convert.files import Mentioned, is_named
from finetune.convert.knowledge import explained, matches, named
from finetune.convert.names import (
    Program,
    casts_modules,
    changed_in_loop,
    effects,
    free_names,
    root,
    target_names,
    written_path,
)
from finetune.convert.read import Notebook, Refusal, Statement, process_command
from finetune.convert.roles import (
    HOOKS,
    SAVES,
    Disposition,
    Plan,
    calls_in,
    fetched_package,
    last_name,
    method_of,
    only_installs,
)
from finetune.convert.shells import INSTALLS, leaves_nothing


def _harmless(
    plan: Plan, call: ast.Call, seen: frozenset[str] = frozenset(), local: frozenset[str] = frozenset()
) -> bool:
    """Whether a call has no lasting effect. `local`: local names of the enclosing function."""
    import builtins

    name = plan.program.dotted(call.func)
    last = name.rsplit(".", 1)[-1] if name else getattr(call.func, "attr", "")
    if last in named("in place") or (last == "apply" and root(call.func) in plan.models):
        return False
    if name.startswith(("subprocess.", "os.")) and (command := process_command(call)):
        return bool(INSTALLS.match(command)) or leaves_nothing(command)
    if matches("acts", name) or name.split(".")[0] in plan.own_modules:
        return False
    if last == "open" or last in ("write", "dump", "write_text", "save"):
        return _reads_file(call)
    if last in named("displays") or matches("account", name) or last in named("looks"):
        return True
    if root(call.func) not in local and _on_scratch(plan, call):
        return True
    if name.startswith(("unsloth.", "peft.", "trl.", "torch.nn.")) and last[:1].islower() and last != "pipeline":
        if any(root(item) in plan.models for item in call.args):
            return False  # such as add_new_tokens(model, ...)
    if isinstance(call.func, ast.Name):
        if call.func.id in {*plan.tokenizers, *plan.models, *local}:
            return True
        definition = plan.program.definition(call.func.id)
        if definition is not None and call.func.id not in seen:
            seen = seen | {call.func.id}
            if isinstance(definition, ast.ClassDef):
                return all(_harmless_function(plan, one, seen, of_class=True) for one in _constructors(definition))
            return _harmless_function(_with_parameters(plan, definition, call), definition, seen)
        if call.func.id in plan.program.imports:
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
    if isinstance(call.func, ast.Call) and plan.program.dotted(call.func.func) == "numpy.vectorize":
        return all(isinstance(item, ast.Lambda) for item in call.func.args)  # what they call is judged as well
    if root(call.func) in local and last not in named("changes") - named("fills"):
        return True
    return bool(name) and name.split(".")[0] in named("computes") and root(call.func) in plan.program.imports


def _on_scratch(plan: Plan, call: ast.Call) -> bool:
    """A method of a display object, or one that fills a collection. If training needs the result, it is kept anyway."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, method = root(call.func), call.func.attr
    if name in plan.collections:
        return method in named("fills") and not isinstance(call.func.value, ast.Call | ast.Attribute)
    return name in plan.scratch and method not in SAVES


def _constructors(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    return [
        one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__post_init__")
    ]


def _with_parameters(plan: Plan, definition: ast.stmt, call: ast.Call) -> Plan:
    """The plan inside a function, where a parameter is the model that the call gives it."""
    if not isinstance(definition, ast.FunctionDef):
        return plan
    names = [item.arg for item in [*definition.args.posonlyargs, *definition.args.args]]
    given = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords)]
    return replace(plan, models=plan.models | {name for name, value in given if name and root(value) in plan.models})


def _harmless_function(plan: Plan, node: ast.stmt, seen: frozenset[str], *, of_class: bool = False) -> bool:
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
    return all(_harmless(plan, inner, seen, frozenset([*names, *given])) for inner in calls_in(node))


def _reads_file(call: ast.Call) -> bool:
    mode = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "mode"), None)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "open" and (
        mode is None or (isinstance(mode, ast.Constant) and not set(str(mode.value)) & set("wax+"))
    )


def only_looks(plan: Plan, node: ast.stmt) -> bool:
    """Whether a statement only displays, measures or generates, so that training is unaffected."""
    if isinstance(node, ast.Expr):
        calls = calls_in(node)
        return all(_harmless(plan, call) for call in calls) and not _changes_role(plan, node)
    if _sets_elements(node) & {*plan.models, *plan.tokenizers, *plan.trainers}:
        return False
    if isinstance(node, ast.For | ast.If | ast.With | ast.While | ast.Try | ast.AsyncFor | ast.AsyncWith):
        inner = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt)]
        inner += [item for handler in getattr(node, "handlers", []) for item in handler.body]
        heads = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr | ast.withitem)]
        return all(_harmless(plan, call) for head in heads for call in calls_in(head)) and all(
            isinstance(item, ast.Pass | ast.Break | ast.Continue | ast.Raise | ast.Import | ast.ImportFrom)
            or (isinstance(item, ast.Assign | ast.AugAssign | ast.AnnAssign) and _changes_no_role(plan, item))
            or only_looks(plan, item)
            for item in inner
        )
    if isinstance(node, ast.Delete):
        kept = {*plan.models, *plan.tokenizers, *plan.trainers}
        return all(isinstance(item, ast.Name) or root(item) not in kept for item in node.targets)
    return isinstance(node, ast.Assert | ast.Pass | ast.Raise)


def _sets_elements(node: ast.stmt) -> set[str]:
    """Names that a loop changes by assigning to attributes of their elements or by casting modules."""
    stores = [
        n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript) and isinstance(n.ctx, ast.Store)
    ]
    return changed_in_loop(node) if stores or casts_modules(node) else set()


def _changes_no_role(plan: Plan, node: ast.stmt) -> bool:
    e = effects(node)
    roles = plan.models | plan.trainers | set(plan.tokenizers)
    return not (e.binds | e.may_bind | e.changes) & roles and all(_harmless(plan, call) for call in calls_in(node))


def _changes_role(plan: Plan, node: ast.Expr) -> bool:
    return any(method_of(call) in named("changes") and not _on_scratch(plan, call) for call in calls_in(node))


def is_pure(plan: Plan, place: int) -> bool:
    """Whether a statement only computes a value from constants and other pure values."""
    node = plan.program.statements[place].node
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        reads = effects(node).all_reads
        return not reads & (plan.models | plan.trainers | set(plan.tokenizers))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        import builtins

        safe = all(
            (
                isinstance(call.func, ast.Name)
                and (hasattr(builtins, call.func.id) or plan.program.definition(call.func.id) is not None)
            )
            or (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in named("looks")
                and root(call.func) not in plan.program.imports
            )
            or plan.program.dotted(call.func).split(".")[0] in named("makes")
            for call in calls_in(node)
        )
        return safe and not effects(node).all_reads & (plan.models | plan.trainers | set(plan.tokenizers))
    return False


def drop_the_rest(plan: Plan, notebook: Notebook) -> None:
    """Give each remaining statement a reason to be dropped, or refuse the notebook."""
    program = plan.program
    kept = [program.statements[place].node for hook in HOOKS for place in plan.hooks[hook]]
    read = {name for node in kept for name in effects(node).all_reads} - program.imports.keys()
    mentioned = Mentioned(kept)

    def is_kept(path: ast.expr) -> bool:
        return bool(free_names(path) & read) or is_named(path, program, mentioned)

    for place, statement in enumerate(program.statements):
        if place in plan.dispositions:
            continue
        after = place > plan.key["train"]
        why = _why_dropped(plan, place, statement, is_kept)
        if why is None and installs(plan, notebook, statement):
            why = "installation"
        if why is None and after:
            why = "after training, so not part of it"
        if why is None:
            raise Refusal(
                "R4",
                f"a script cannot reproduce this statement before training: `{statement.head[:120]}`",
                statement.cell,
            )
        plan.dispositions[place] = Disposition(what="dropped", why=why)
        for call in calls_in(statement.node):
            remedy = None if after else explained("left to you").get(program.dotted(call.func))
            if after and method_of(call) in SAVES and method_of(call) != "save_state":
                remedy = "do this from training.output_dir, where the trained model and its tokenizer are"
            if after and method_of(call).startswith("upload_"):
                remedy = "publish the finished folder with `hf upload`"
            if remedy is not None:
                plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {remedy}")


def installs(plan: Plan, notebook: Notebook, statement: Statement) -> bool:
    """Whether it is a branch in an installation cell, or a branch with shell lines in a cell that also installs."""
    node = statement.node
    if not isinstance(node, ast.If | ast.Try) or statement.cell not in notebook.install:
        return False
    last = statement.line + (node.end_lineno or node.lineno) - node.lineno
    return only_installs(plan, notebook, statement.cell) or any(
        shell.cell == statement.cell and statement.line <= shell.line <= last for shell in notebook.shells
    )


def _why_dropped(plan: Plan, place: int, statement: Statement, is_kept: Callable[[ast.expr], bool]) -> str | None:
    """Why nothing kept needs a statement, or None. `is_kept`: whether something kept mentions a file or folder."""
    node = statement.node
    text = ast.unparse(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "unused import"
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return "unused definition"
    calls = calls_in(node)
    if adds_path(plan.program, node):
        return "the script imports no module of the repository"
    if is_tracker(plan.program, node):
        return "account or service"
    if any(matches("account", plan.program.dotted(call.func)) for call in calls):
        return "account or service: a script does not log in (set HF_TOKEN, or run `hf auth login`)"
    if fetched_package(plan.program, node):
        return "a download that nothing kept uses"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        service = plan.program.dotted(node.value.func)
        if (
            matches("service", service)
            and service.rsplit(".", 1)[-1][:1].isupper()
            and _leaves_arguments(plan, node.value)
        ):
            return "client of a service that the training does not use"
    if re.search(r"\b(set_seed|manual_seed\w*|seed_everything|\w+\.seed)\(", text) and isinstance(node, ast.Expr):
        return "training.seed seeds every rank"
    statistics = r"torch\.(cuda|backends)|max_memory|gpu_stats|used_memory|trainer_stats|start_gpu"
    if re.search(statistics, text) and leaves(plan, node):
        return "memory and time statistics"
    if place < plan.key["trainer"] and makes(plan, node, "SFTTrainer", "get_peft_model", "from_pretrained"):
        return "repeated later"
    if re.search(r"\.generate\(|for_inference|TextStreamer|TextIteratorStreamer|pipeline\(|_inference\(", text):
        return "inference" if leaves(plan, node) or place > plan.key["train"] else None
    if isinstance(node, ast.Expr) and not calls:
        return "display"
    writing = _writing(node)
    path = None if writing is None else written_path(writing)
    if path is not None and not is_kept(path):
        if all(_harmless(plan, call) or _fills_file(node, call) for call in calls if call is not writing):
            return "file that no kept statement reads"
    if only_looks(plan, node):
        return "display" if isinstance(node, ast.Expr | ast.For | ast.While) else "check or display"
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and leaves(plan, node):
        if _patches(plan, node):
            return None
        return "unused value" if calls else "unused literal"
    return None


def _writing(node: ast.stmt) -> ast.Call | None:
    """The call that writes a file: `rows.to_json(path)`, `with open(path, "w") as file:`"""
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(node, ast.With) and len(node.items) == 1:
        value = node.items[0].context_expr
    return value if isinstance(value, ast.Call) else None


def _fills_file(node: ast.stmt, call: ast.Call) -> bool:
    """Whether a call writes into the file that the statement opens: `json.dump(rows, file)`, `file.write(text)`"""
    opened = {name for item in getattr(node, "items", []) for name in target_names(item.optional_vars or ast.Pass())}
    given = {one.id for one in call.args if isinstance(one, ast.Name)} | {root(call.func)}
    return bool(opened & given) and method_of(call) in ("dump", "write", "writelines", "writerow", "writerows")


_PATCHED = named("shows") | {"locale", "warnings", "pandas", "os", "sys", "tqdm", "IPython"}


def _patches(plan: Plan, node: ast.stmt) -> bool:
    """Whether it sets an attribute of a library that the rows or the training may use."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    owners = [one for one in targets if isinstance(one, ast.Attribute) and root(one) in plan.program.imports]
    return any(plan.program.dotted(one).split(".")[0] not in _PATCHED for one in owners)


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


def _leaves_arguments(plan: Plan, call: ast.Call) -> bool:
    """Whether the arguments of a call only compute."""
    given = [*call.args, *(item.value for item in call.keywords)]
    return all(_harmless(plan, inner) for value in given for inner in calls_in(value))


def makes(plan: Plan, node: ast.stmt, *names: str) -> bool:
    """Whether it assigns the result of one of these calls, such as a trainer that a later cell creates again."""
    return (
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and last_name(plan, node.value.func) in names
    )


def leaves(plan: Plan, node: ast.stmt) -> bool:
    return all(_harmless(plan, call) for call in calls_in(node))
