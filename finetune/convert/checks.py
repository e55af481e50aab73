"""The checks that every script must pass before it is written.

V1 it parses on the oldest supported Python; V2 ruff finds no undefined name; V3 nothing in it misbehaves on several
ranks; V4 each kept statement is the notebook's, and every statement is in the report. V6, that a second conversion
produces the same bytes, is in `command`.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Mapping, Set

from finetune.config.arguments import CONFIG, TRAINER, former_names
from finetune.convert.analysis.classify import not_trainers, trainings
from finetune.convert.analysis.environment import MODEL_FLAGS
from finetune.convert.analysis.names import calls, dotted_imports, effects, method, root
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook, Refusal, Statement
from finetune.convert.script import rewrite as code
from finetune.convert.script.arguments import CHANGED_ARGUMENTS
from finetune.convert.script.report import Conversion
from finetune.convert.source import run_ruff
from finetune.runtime.types import JsonObject

OLDEST = (3, 11)


class NotVerified(Exception):
    """`check` (V1 to V6) failed; `reason` explains what and where."""

    def __init__(self, check: str, reason: str):
        super().__init__(check, reason)
        self.check, self.reason = check, reason


def verify(notebook: Notebook, conversion: Conversion) -> dict[str, str]:
    """Check a script, without running anything.

    Returns:
        The outcome of each check for the report.

    Raises:
        NotVerified: at the first check that fails.
    """
    parses(conversion.script)
    names_are_defined(notebook, conversion.script)
    safe_on_ranks(conversion.script)
    has_its_frame(conversion)
    if len(conversion.report["statements"]) != len(notebook.statements):
        raise NotVerified("V3", "a statement of the notebook is not in the report")
    has_every_statement(notebook, conversion)
    return dict.fromkeys(("V1", "V2", "V3", "V4"), "passed")


def parses(script: str) -> None:
    """V1: the script parses."""
    try:
        ast.parse(script, feature_version=OLDEST)
    except SyntaxError as error:
        raise NotVerified("V1", f"line {error.lineno}: {error.msg}") from None


def names_are_defined(notebook: Notebook, script: str) -> None:
    """V2: ruff finds no undefined name, and no statement outside of where it may stand."""
    done = run_ruff("check", script, *"--no-cache --select F82,F7,E9 --output-format concise".split())
    if done.returncode:
        found = [line for line in done.stdout.decode().splitlines() if line.startswith("script.py")]
        _refuse_undefined(notebook, found)
        raise NotVerified("V2", "; ".join(found) or done.stderr.decode()[:300])


def _refuse_undefined(notebook: Notebook, found: list[str]) -> None:
    """Refuse names that no cell defines: those of a cell which was deleted before the notebook was published."""
    missing = set(re.findall(r"F821 Undefined name `(\w+)`", "\n".join(found)))
    for statement in notebook.statements:
        e = effects(statement.node)
        missing -= e.all_binds
    users = [one.cell for one in notebook.statements if missing & effects(one.node).all_reads]
    if users:
        names = ", ".join(f"`{name}`" for name in sorted(missing))
        raise Refusal("R4", f"no cell defines {names}; define or import what is missing", users[0])


def has_every_statement(notebook: Notebook, conversion: Conversion) -> None:
    """V4: every kept statement is in the script, as the notebook has it, and every rewritten one as the report has it,
    with all that is the notebook's; what is left out is not needed. Raises NotVerified."""
    tree = ast.parse(conversion.script)
    present = Counter(_text(node) for node in ast.walk(tree) if isinstance(node, ast.stmt))
    imports = dotted_imports(one.node for one in notebook.statements)
    for statement, entry in zip(notebook.statements, conversion.report["statements"], strict=True):
        source = {"kept": statement.source, "rewritten": entry.get("becomes", "")}.get(entry["outcome"], "")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                continue  # V2 sees which names an import must still bind
            if not present[_text(node)]:
                raise NotVerified("V4", f"cell {statement.cell}: `{ast.unparse(node)[:80]}` is not in the script")
            present[_text(node)] -= 1
    for statement, entry in zip(notebook.statements, conversion.report["statements"], strict=True):
        if entry["outcome"] == "rewritten" and not _REPLACES.search(entry["reason"]):
            _lacks_nothing(statement, entry, imports)
    _binds_nothing_needed(notebook, conversion)


# Reasons to rewrite more than arguments.
_REPLACES = re.compile(
    "secrets come from|^display|model is not tried|packages are installed|the launcher |`tokenizer` is `proc"
)
_OF_DEVICES = re.compile(
    r"'(auto|balanced\w*|sequential|device_map|cpu|cuda(:\d+)?|\d+|CUDA_VISIBLE_DEVICES)'|\.(to|cuda|environ)|os"
)
_LOADER = {*"device_map max_memory token use_auth_token resume_download use_flash_attention_2".split(), *code.FORMER}
_RENAMED = frozenset({"TrainingArguments", ".TrainingArguments", "transformers"})


def _lacks_nothing(statement: Statement, entry: JsonObject, imports: Mapping[str, str]) -> None:
    """A rewritten statement has the notebook's names, constants and arguments, but for arguments that may change."""
    renamed = former_names(CONFIG) | former_names(TRAINER)
    free = {*CHANGED_ARGUMENTS, *_LOADER, *(name for name, now in renamed.items() if not now), None}
    free |= set(re.findall(r"`(\w+)` is left out", entry["reason"]))
    free -= set() if "quantization_config" in entry["becomes"] else {"load_in_4bit", "load_in_8bit"}
    tree = ast.parse(statement.source)
    accounts = _of_accounts(tree, imports) if "account or service" in entry["reason"] else frozenset[ast.AST]()
    parts = _parts(tree, free, accounts) - _parts(ast.parse(entry["becomes"]), free)
    missing = parts.keys() - _RENAMED
    if "each rank has its own device" in entry["reason"]:
        missing = {part for part in missing if not _OF_DEVICES.fullmatch(part)}
    if missing:
        raise NotVerified("V4", f"cell {statement.cell}: {min(missing)[:80]} is not in `{entry['becomes'][:80]}`")


def _of_accounts(tree: ast.AST, imports: Mapping[str, str]) -> set[ast.AST]:
    """The nodes of the statements inside that log in or track: `run = wandb.init()`, `run.log(values)`."""
    found = {
        one: one.value.func
        for one in ast.walk(tree)
        if isinstance(one, ast.Expr | ast.Assign) and isinstance(one.value, ast.Call)
    }
    logs = [one for one, func in found.items() if _LOGS.search(f"{imports.get(str(root(func)))} {ast.unparse(func)}")]
    made = tuple(f"{ast.unparse(target)}." for one in logs if isinstance(one, ast.Assign) for target in one.targets)
    logs += [one for one in found if ast.unparse(one).startswith(made)]
    return {inner for one in logs for inner in ast.walk(one)}


_LOGS = re.compile(r"\b(wandb|mlflow|comet_ml|trackio|neptune|\w*login)\b")


def _parts(tree: ast.AST, free: Set[str | None], skipped: Set[ast.AST] = frozenset()) -> Counter[str]:
    """Names, attributes, arguments by today's names, constants and operators, without these arguments and nodes."""
    renamed = former_names(CONFIG) | former_names(TRAINER)
    left_out = {inner for call in calls(tree) for item in call.keywords if item.arg in free for inner in ast.walk(item)}
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if node in left_out or node in skipped:
            continue
        if isinstance(node, ast.Name):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[f".{node.attr}"] += 1
        elif isinstance(node, ast.keyword):
            found[f"{renamed.get(str(node.arg)) or node.arg}="] += 1
        elif isinstance(node, ast.Constant):
            found[" ".join(repr(node.value).split())] += 1
        elif isinstance(node, ast.operator | ast.unaryop | ast.cmpop | ast.boolop):
            found[type(node).__name__] += 1
    return found


# Attributes that no kept statement can read for their own sake: set by the trainer, or of no effect on ranks.
_NOT_READ = "|".join(("tokenizer", "processing_class", *MODEL_FLAGS))


def _binds_nothing_needed(notebook: Notebook, conversion: Conversion) -> None:
    """No kept statement reads what a statement that was left out has assigned, and what a kept one made is saved."""
    live: dict[str, Statement] = {}
    gone: set[str] = set()
    for statement, entry in zip(notebook.statements, conversion.report["statements"], strict=True):
        if entry["outcome"] == "dropped":
            live |= dict.fromkeys(_assigned(statement, entry), statement)
            gone |= _assigned(statement, entry)
            noted = re.match("saved before training|.*publish", entry["reason"])
            saved = code.saves(statement.node) and not statement.is_dead and not noted
            if saved and not gone & effects(statement.node).all_reads:
                raise NotVerified("V4", f"cell {statement.cell}: `{statement.head[:80]}` saves, but was left out")
            continue
        for node in ast.parse(entry.get("becomes") or statement.source).body:
            found = effects(node)
            if needed := sorted(live.keys() & found.all_reads):
                head = f"`{live[needed[0]].head[:80]}`"
                raise NotVerified("V4", f"cell {statement.cell}: {needed[0]} is read, but {head} was left out")
            for name in found.binds:
                live.pop(name, None)


def _assigned(statement: Statement, entry: JsonObject) -> set[str]:
    """The names that a statement which was left out binds, or assigns attributes and items of."""
    node = statement.node
    if statement.is_dead or isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    if entry["reason"].startswith(("the trainer sets", "each rank has its own device")):
        return set()  # `model = model.to("cuda")`
    found = effects(node)
    targets = [one for one in ast.walk(node) if isinstance(one, ast.Attribute | ast.Subscript)]
    stored = {
        root(one)
        for one in targets
        if isinstance(one.ctx, ast.Store) and not re.match(rf"os\.environ|\w+\.({_NOT_READ})$", ast.unparse(one))
    }
    return found.all_binds | {name for name in stored if name}


def _text(node: ast.stmt) -> str:
    """The statement as text. A variable of the notebook is global there and nonlocal in the script, and docstrings are
    indented by where they stand."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant) and isinstance(inner.value.value, str):
            inner.value = ast.Constant(" ".join(inner.value.value.split()))
    return re.sub(r"^([^\S\n]*)global ", r"\1nonlocal ", ast.unparse(node), flags=re.MULTILINE)


def has_its_frame(conversion: Conversion) -> None:
    """V3: what the script has besides the notebook's statements. Raises NotVerified."""
    tree = ast.parse(conversion.script)
    last = tree.body[-1]
    if ast.unparse(last) != "if __name__ == '__main__':\n    main()":
        raise NotVerified("V3", "main() is not called at the end")
    if not re.search(r"^[^\S\n]*(from|import) unsloth", conversion.script, re.M) and not any(
        "FINETUNE_BACKEND" in ast.unparse(node) for node in tree.body
    ):
        raise NotVerified("V3", "the notebook does not use Unsloth, and the script does not say so")
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    _bound_on_every_rank(main)
    texts = [ast.unparse(node) for node in main.body]
    guards = sum(text.startswith(f"if {code.LOCAL_MAIN_RANK}:") for text in texts)
    exports = any(
        entry.get("in", "").endswith("after training") and entry["outcome"] != "dropped"
        for entry in conversion.report["statements"]
        if not entry["statement"].startswith(("import ", "from "))
    )
    if texts.count(code.WAIT) < guards + exports:
        raise NotVerified("V3", "a rank does not wait for files that another writes")
    called = [ast.unparse(node.func).rpartition(".")[2] for node in calls(tree)]
    if not {name.rpartition(".")[2] for name in named("seeds")} & set(called):
        raise NotVerified("V3", "nothing sets a seed, so ranks may draw other rows")
    arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    if "`global_batch_size`" in (ast.get_docstring(tree) or "") and "global_batch_size" not in arguments:
        raise NotVerified("V3", "global_batch_size is not given to the trainer, so the batch grows with the ranks")


def _bound_on_every_rank(main: ast.FunctionDef) -> None:
    """V3: every rank has bound what it reads."""
    elsewhere: set[str] = set()  # names that some ranks have not bound
    for node in main.body:
        e = effects(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) in (code.MAIN_RANK, code.LOCAL_MAIN_RANK):
            elsewhere |= e.all_binds
        elif missing := elsewhere & e.all_reads:
            raise NotVerified("V3", f"line {node.lineno}: {min(missing)} is bound on one rank and read on all")
        elsewhere -= e.binds


def safe_on_ranks(script: str) -> None:
    """V3: nothing in the script misbehaves on several ranks. Raises NotVerified."""
    tree = ast.parse(script)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in (code.MAIN_RANK, code.LOCAL_MAIN_RANK)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("get_ipython", "__shell__"):
            raise NotVerified("V3", f"line {node.lineno}: a shell command or magic remains")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"cuda:\d", node.value):
            raise NotVerified("V3", f"line {node.lineno}: a device is hard-coded ({node.value})")
        if not isinstance(node, ast.Call):
            continue
        name, last = ast.unparse(node.func), method(node)
        if last.startswith("push_to_hub"):
            raise NotVerified("V3", f"line {node.lineno}: {last} is called")
        merges = last == "merge_and_unload"  # which changes only memory
        saves = name == "torch.save" or last in named("saves") | named("exports") and not merges
        if saves and node not in guarded and last not in named("on every rank"):
            raise NotVerified("V3", f"line {node.lineno}: {name} is called on every rank")
        if last in named("on every rank") and node in guarded:
            raise NotVerified("V3", f"line {node.lineno}: {last} must be called on every rank")
        if last == "wait_for_everyone" and node in guarded:
            raise NotVerified("V3", f"line {node.lineno}: one rank waits for the others, which do not")
    if (trains := trainings(tree, not_trainers((0, node) for node in ast.walk(tree)))) != 1:
        raise NotVerified("V3", f"train() is called {trains} times")
