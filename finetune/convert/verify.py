"""The checks that every conversion must pass before it is written.

V1 it parses on the oldest supported Python; V2 ruff finds no undefined, unused or redefined name; V3 nothing in it
misbehaves on several ranks; V4 each kept statement is the notebook's, and every statement is either kept or left out;
V5 under the recording stubs, script and notebook train the same; V6 a second conversion produces the same bytes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.config import Config, ConfigError, load
from finetune.convert.emit import FUNCTIONS, Conversion, is_import, kept_node
from finetune.convert.hooks import MODEL_FLAGS, NO_ENVIRONMENT, refuse_tokenizer_changed_after_data
from finetune.convert.knowledge import named
from finetune.convert.names import dotted_imports, effects
from finetune.convert.read import Notebook, Refusal
from finetune.convert.roles import Plan
from finetune.convert.source import ruff
from finetune.convert.trace import ASSUMPTIONS, Trace, trace_script
from finetune.runtime import files

OLDEST = (3, 11)


class NotVerified(Exception):
    """`check` (V1 to V6) failed; `reason` explains what and where."""

    def __init__(self, check: str, reason: str):
        super().__init__(check, reason)
        self.check, self.reason = check, reason

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}"


def verify(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V1 to V5. Raises NotVerified at the first failure."""
    for check in CHECKS.values():
        check(notebook, plan, conversion, traces)


def parses(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V1: the script parses."""
    for text in (conversion.script, conversion.infer):
        try:
            ast.parse(text, feature_version=OLDEST)
        except SyntaxError as error:
            raise NotVerified("V1", f"line {error.lineno}: {error.msg}") from None


def names_are_defined(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V2: ruff finds no undefined, unused or redefined name."""
    done = subprocess.run(
        [
            ruff(),
            "check",
            "--isolated",
            "--no-cache",
            "--select",
            "F,E9",
            "--ignore",
            "F541",
            "--target-version",
            "py311",
            "--output-format",
            "concise",
            "--stdin-filename",
            "script.py",
            "-",
        ],
        input=conversion.script.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        own = _own_imports(notebook, conversion.script)
        found = [line for line in done.stdout.decode().splitlines() if not _was_there(line, notebook, own)]
        found = [line for line in found if line.startswith("script.py")]
        _refuse_undefined(notebook, found)
        if found or done.returncode > 1:
            raise NotVerified("V2", "; ".join(found) or done.stderr.decode()[:300])


def _refuse_undefined(notebook: Notebook, found: list[str]) -> None:
    """Refuse names that no cell defines: those of a cell which was deleted before the notebook was published."""
    missing = set(re.findall(r"F821 Undefined name `(\w+)`", "\n".join(found)))
    for statement in notebook.statements:
        e = effects(statement.node)
        missing -= e.binds | e.may_bind
    users = [one.cell for one in notebook.statements if missing & effects(one.node).all_reads]
    if users:
        names = ", ".join(f"`{name}`" for name in sorted(missing))
        raise Refusal("R4", f"no cell defines {names}; define or import what is missing", users[0])


def _was_there(line: str, notebook: Notebook, own_imports: set[int]) -> bool:
    """Whether the notebook's author is responsible: an unused local, a repeated key, a name that is defined or imported
    twice, an import in `try:` that only tests for a package, or an unused import in a function."""
    number = re.match(r"script\.py:(\d+)", line)
    unused = " F401 " in line
    tests = unused and "importlib.util.find_spec" in line
    own = unused and number is not None and int(number[1]) in own_imports
    twice = re.search(r"`(\w+)` redefined", line) if " F811 " in line else None
    again = twice is not None and _bindings(notebook, twice[1]) > 1
    return tests or own or again or " F841 " in line or " F601 " in line


def _bindings(notebook: Notebook, name: str) -> int:
    """How often the notebook imports or defines a name."""
    nodes = [node for statement in notebook.statements for node in ast.walk(statement.node)]
    imported = [(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)]
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return [*imported, *defined].count(name)


def _own_imports(notebook: Notebook, script: str) -> set[int]:
    """Lines of the script with an import that is inside a function or class of the notebook."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    own = {
        ast.unparse(inner)
        for statement in notebook.statements
        if isinstance(statement.node, kinds)
        for inner in ast.walk(statement.node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    tree = ast.parse(script)
    top = {node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in top]
    return {
        line for node in imports if ast.unparse(node) in own for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


# --- V3 ---------------------------------------------------------------------------------------------------------------


def safe_on_ranks(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V3: nothing misbehaves on several ranks."""
    tree = ast.parse(conversion.script)
    export = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == FUNCTIONS["save"]), None)
    inside = set(ast.walk(export)) if export is not None else set()
    runs = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("get_ipython", "__shell__"):
            raise NotVerified("V3", f"line {node.lineno}: a shell command or magic remains")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda:"):
            raise NotVerified("V3", f"line {node.lineno}: a device is hard-coded ({node.value})")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        runs += name == "script.run"
        if last in named("exports") | {"save_pretrained", "save_model"} and node not in inside:
            raise NotVerified("V3", f"line {node.lineno}: {last} is called on every rank")
        if last == "train" and isinstance(node.func, ast.Attribute) and not node.args:
            raise NotVerified("V3", f"line {node.lineno}: train() is called in addition to script.run")
        if last == "from_pretrained" and any(
            word in name for word in ("FastLanguageModel", "FastModel", "AutoModelFor")
        ):
            raise NotVerified("V3", f"line {node.lineno}: a model is loaded in addition to script.run")
    if runs != 1:
        raise NotVerified("V3", f"script.run is called {runs} times")
    if "if __name__ == '__main__':" not in {
        ast.unparse(node).splitlines()[0] for node in tree.body if isinstance(node, ast.If)
    }:
        raise NotVerified("V3", "the __main__ guard is missing")


# --- V4 ---------------------------------------------------------------------------------------------------------------


def statements_are_the_notebooks(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V4: each kept statement is the notebook's, in order, and no statement is unaccounted for."""
    tree = ast.parse(conversion.script)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for hook, name in FUNCTIONS.items():
        wanted = [_dump(kept_node(plan, place)) for place in plan.hooks[hook] if not is_import(kept_node(plan, place))]
        body = functions[name].body if name in functions else []
        _in_order(name, wanted, [_dump(node) for node in body], plan, hook)
        if len(body) > len(wanted) and hook in ("model", "save"):
            extra = [node for node in body if _dump(node) not in wanted and not _glue(node)]
            if extra:
                raise NotVerified("V4", f"{name} has a statement not in the notebook: {ast.unparse(extra[0])[:80]}")
    top = [_dump(node) for node in tree.body]
    for hook in ("environment", "module"):
        _in_order(
            "top of the script",
            [_dump(kept_node(plan, p)) for p in plan.hooks[hook] if not is_import(kept_node(plan, p))],
            top,
            plan,
            hook,
        )
    known, found = plan.program.imports, dotted_imports(tree.body)
    wrong = [
        name
        for name, dotted in found.items()
        if dotted != "finetune.script"
        and known.get(name, name) != dotted
        and not dotted.startswith(known.get(name, name) + ".")
    ]
    if wrong:
        raise NotVerified("V4", f"`{wrong[0]}` is not imported from the same module as in the notebook")
    missing = [s for s in plan.program.statements if plan.program.position(s.id) not in plan.dispositions]
    if missing or len(conversion.report["statements"]) != len(notebook.statements):
        raise NotVerified("V4", "a statement of the notebook is neither kept nor in the report")


def _in_order(name: str, wanted: list[str], found: list[str], plan: Plan, hook: str) -> None:
    place = 0
    for number, item in enumerate(wanted):
        try:
            place = found.index(item, place) + 1
        except ValueError:
            kept = [p for p in plan.hooks[hook] if not is_import(kept_node(plan, p))]
            statement = plan.program.statements[kept[number]]
            raise NotVerified(
                "V4",
                f"{name}: the statement of cell {statement.cell}, line {statement.line} was changed or is missing:"
                f" {statement.head[:80]}",
            ) from None


def _glue(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Return) or (
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute)
    )


class _NoDocstrings(ast.NodeTransformer):
    """Removes docstrings, whose layout the formatter changes."""

    def _strip(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _strip  # noqa: N815


def _dump(node: ast.stmt) -> str:
    return ast.dump(_NoDocstrings().visit(ast.parse(ast.unparse(node)).body[0]))


# --- V5 ---------------------------------------------------------------------------------------------------------------


def trains_the_same(notebook: Notebook, plan: Plan, conversion: Conversion, traces: list[Trace]) -> None:
    """V5: script and notebook train the same under the recording stubs."""
    load_config(conversion)
    script = conversion.script if plan.read_first is None else _always_formatted(conversion.script)
    scripts = trace_script(script, own_tokenizer=plan.own_tokenizer)
    for assumed, trace in zip(ASSUMPTIONS, traces, strict=True):
        for rank in (0, 1):
            found = scripts[assumed, rank]
            if found["failed"]:
                raise NotVerified("V5", f"the script fails under the stubs: {next(iter(found['failed'].values()))}")
            mine, theirs = normal(plan, trace, notebook_side=True), normal(plan, found, notebook_side=False)
            try:
                _same("notebook", mine, theirs, trace, found, rank)
            except NotVerified:
                refuse_tokenizer_changed_after_data(plan)
                raise


def _always_formatted(script: str) -> str:
    """The script without the condition that the rows have the text field: the stubs know no columns, and apply the
    notebook's formatting_func always."""
    tree = ast.parse(script)
    build = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == FUNCTIONS["dataset"])
    returned = build.body[-1]
    assert isinstance(returned, ast.Return) and returned.value is not None
    values = returned.value.elts if isinstance(returned.value, ast.Tuple) else [returned.value]
    made = [one.orelse if isinstance(one, ast.IfExp) else one for one in values]
    returned.value = ast.Tuple(made, ast.Load()) if isinstance(returned.value, ast.Tuple) else made[0]
    return ast.unparse(tree)


def load_config(conversion: Conversion) -> Config:
    """The YAML, read by the loader that the script uses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{conversion.name}.yaml"
        files.write_text(path, conversion.config)
        try:
            return load(["--config", str(path)], script=f"{conversion.name}.py")
        except ConfigError as error:
            raise NotVerified("V5", f"the settings are invalid: {'; '.join(error.problems)}") from None


def _same(name: str, one: dict[str, Any], two: dict[str, Any], trace: Trace, other: Trace, rank: int) -> None:
    for key in one:
        mine, theirs = one[key], two[key]
        if key == "saves" and rank:
            mine = []
        if key == "tokenizer" and mine is None:
            continue  # the notebook leaves the tokenizer to the trainer
        if mine != theirs:
            words = trace["words"] | other["words"]
            raise NotVerified(
                "V5", f"rank {rank}: {key} differ: notebook {_readable(mine, words)}; script {_readable(theirs, words)}"
            )


def _readable(form: Any, words: dict[str, str]) -> str:
    if isinstance(form, list) and len(form) == 2 and form[0] == "sym":
        return words.get(form[1], str(form[1]))[:300]
    if isinstance(form, list):
        return "[" + ", ".join(_readable(item, words) for item in form)[:300] + "]"
    return repr(form)[:300]


def normal(plan: Plan, trace: Trace, *, notebook_side: bool) -> dict[str, Any]:
    """What a trace would train with, in the same form for notebooks and scripts."""
    found: dict[str, Any] = {
        "environment": [],
        "tokenizer": None,
        "tokenizer's origin": None,
        "changes of the tokenizer": [],
        "training data": None,
        "held-out data": None,
        "changes of the model": [],
        "changes of the trainer": [],
        "saves": [],
    }
    trained = False
    for item in trace["events"]:
        kind, detail, role = item["kind"], item["detail"], item.get("role")
        if kind == "train":
            trained = True
        elif kind == "load_tokenizer" and plan.own_tokenizer:
            found["tokenizer's origin"] = detail
        elif (
            kind == "env"
            and not trained
            and not _left_out(detail[0])
            and not (notebook_side and _in_installation(plan, item))
        ):
            found["environment"].append(detail)
        elif kind == "trainer" and not trained:
            found["tokenizer"] = item["forms"].get("processing_class")
        elif kind == "dataset" and not trained:
            found["training data" if detail[0] == "train_dataset" else "held-out data"] = detail[1]
        elif kind == "change":
            if not (trained and role == "model") or _is_kept(plan, item, notebook_side):
                _note_change(found, item, trained)
        elif kind == "call" and not trained and role == "trainer" and item["method"] not in named("on the trainer"):
            found["changes of the trainer"].append([item["method"], *detail[1:]])
        elif (
            kind == "call"
            and trained
            and role in ("model", "tokenizer")
            and item["method"] in named("exports")
            and _is_kept(plan, item, notebook_side)
        ):
            found["saves"].append([role, item["method"], *detail[1:]])
    found["changes of the tokenizer"].sort(key=str)
    found["environment"] = [list(pair) for pair in dict((str(k), v) for k, v in found["environment"]).items()]
    return found


def _in_installation(plan: Plan, item: dict[str, Any]) -> bool:
    """Whether it is set in an installation branch, which the script has as a comment."""
    disposition = plan.dispositions[plan.program.position(item["statement"])]
    return disposition.what == "dropped" and disposition.why.startswith("installation")


def _left_out(key: Any) -> bool:
    return str(key) in NO_ENVIRONMENT or str(key).startswith(("WANDB_", "KAGGLE_", "COMET_"))


def _is_kept(plan: Plan, item: dict[str, Any], notebook_side: bool) -> bool:
    if not notebook_side:
        return True
    return plan.dispositions[plan.program.position(item["statement"])].what == "kept"


def _note_change(found: dict[str, Any], item: dict[str, Any], trained: bool) -> None:
    detail, role = item["detail"], item.get("role")
    attribute = detail[3] if len(detail) > 3 and detail[2] == "setattr" else None
    if role == "tokenizer" and not trained:
        found["changes of the tokenizer"].append(detail)
    elif role == "model" and trained and detail[2] == "called":
        found["saves"].append(["change", *detail[3:]])
    elif role == "model" and not trained:
        if detail[2] == "called" and str(detail[3]).rsplit(".", 1)[-1] in named("by the package"):
            return
        if attribute in ("pad_token_id", "eos_token_id", "bos_token_id", *MODEL_FLAGS):
            return
        found["changes of the model"].append(detail)
    elif (
        role == "trainer"
        and not trained
        and attribute not in ("metric_for_best_model", "greater_is_better")
        and detail[2] != "called"
    ):
        found["changes of the trainer"].append(detail)
    elif (
        role is None
        and not trained
        and str(item.get("name") or "").startswith(("torch.", "transformers.", "unsloth", "bitsandbytes."))
        and detail[2] == "setattr"
    ):
        found["changes of the model"].append([item["name"], *detail[2:]])


CHECKS: dict[str, Callable[[Notebook, Plan, Conversion, list[Trace]], None]] = {
    "V1": parses,
    "V2": names_are_defined,
    "V3": safe_on_ranks,
    "V4": statements_are_the_notebooks,
    "V5": trains_the_same,
}
