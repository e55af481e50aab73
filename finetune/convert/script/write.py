"""Write the script of a notebook: what `decide` keeps, in its order, made safe for any number of ranks."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from finetune.convert.analysis.names import DEFINITIONS, Program, is_import, lone_call
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook, Refusal
from finetune.convert.notebook.secrets import scrub
from finetune.convert.script import rewrite as code
from finetune.convert.script.arguments import Arguments
from finetune.convert.script.decide import decide
from finetune.convert.script.draft import AFTER, MAIN, TOP, Decision, Draft
from finetune.convert.script.edits import edited
from finetune.convert.script.leave_out import fetched_package, sets_up
from finetune.convert.script.outside import refuse_outside
from finetune.convert.script.report import Conversion, report, slug, title
from finetune.convert.script.rewrite import Rewriter
from finetune.convert.source import BLANK, Part, block, comment, own, script
from finetune.runtime.types import JsonObject


def write(notebook: Notebook, program: Program, notes: Sequence[str], own_modules: Set[str]) -> Conversion:
    """The script of a notebook that `classify.refuse_by_kind` accepts, and its report.

    Args:
        notes: about what was changed in the notebook before, for the report.
        own_modules: modules of the notebook's repository.

    Raises:
        Refusal: R0, R2 or R4, for what cannot run on several ranks.
    """
    draft = decide(notebook, program, own_modules)
    arguments = Arguments(program, unsloth=draft.unsloth)
    draft.notes += [*arguments.notes, *_checkpoints(draft)]
    _imports(draft)
    _rewrite(draft, arguments)
    refuse_outside(draft)
    name = slug(notebook.name, {dotted.split(".")[0] for dotted in program.imports.values()})
    statements = _statements(draft)
    text = _script(draft, arguments, title(notebook, name, statements, keeps_batch=arguments.keeps_batch))
    found = report(notebook, name, statements, [*notes, *draft.notes, *_foreign(draft, own_modules)])
    return Conversion(name=name, script=text, report=found)


def _checkpoints(draft: Draft) -> list[str]:
    """Notes on checkpoints that the notebook names by their step."""
    return [
        f"cell {statement.cell}: {node.value} is a step of the notebook's training; it exists only if the script takes"
        " and saves this step: with the same rows and the same batch"
        for statement in (draft.program.statements[place] for place in draft.kept(MAIN) + draft.kept(AFTER))
        for node in ast.walk(statement.node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CHECKPOINT.fullmatch(node.value)
    ]


_CHECKPOINT = re.compile(r"(?:[^\n]*[/\\])?checkpoint-\d+(?:[/\\]\S*)?")


# --- imports, rows, rewriting -----------------------------------------------------------------------------------------


def _imports(draft: Draft) -> None:
    """Imports whose names have one meaning move to the top; the others stay where they are."""
    bound: dict[str, set[str]] = {}
    for place, statement in enumerate(draft.program.statements):
        node = statement.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = "" if isinstance(node, ast.Import) else f"{node.module}."
                name = (alias.asname or alias.name).split(".")[0]
                what = module + (alias.name if alias.asname or module else alias.name.split(".")[0])
                bound.setdefault(name, set()).add(what)
        elif draft.decisions[place].outcome == "kept":
            for name in code.binds(node):
                bound.setdefault(name, set()).add("a variable")
    for place, statement in enumerate(draft.program.statements):
        node = statement.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            ambiguous = any(len(bound[name]) > 1 for name in names)
            before = place < draft.train or any(one > place for one in draft.kept(AFTER))
            where = MAIN if ambiguous and place < draft.train else AFTER if ambiguous and before else TOP
            draft.decisions[place] = Decision(outcome="kept", where=where)


def _rewrite(draft: Draft, arguments: Arguments) -> None:
    kept = [place for where in (TOP, MAIN, AFTER) for place in draft.kept(where)]
    nodes = {place: draft.program.statements[place].node for place in kept}
    bound = {name for place, node in nodes.items() if not is_import(node) for name in code.binds(node)}
    rewriter = Rewriter(draft.program, bound=bound)
    for place in kept:
        statement, decision = draft.program.statements[place], draft.decisions[place]
        on_main = decision.where == AFTER and place not in draft.together
        done = rewriter.statement(statement, main_rank=on_main)
        done.reasons = [*arguments.reasons.get(place, []), *done.reasons]
        same = [*map(ast.dump, done.nodes)] == [*map(ast.dump, ast.parse(statement.source).body)]
        if done.nodes and not done.reasons and not same:
            done.reasons = ["arguments are changed: see the notes"]
        draft.rewritten[place] = done
        draft.notes += [f"cell {statement.cell}: {note}" for note in done.notes]
        if not done.nodes:
            draft.decisions[place] = Decision(outcome="dropped", reason="; ".join(done.reasons) or code.FROM_FINETUNE)
        elif done.reasons:
            decision.outcome, decision.reason = "rewritten", "; ".join(done.reasons)
    needs = [one for place, node in nodes.items() if not is_import(node) for one in draft.rewritten[place].nodes]
    used = {name for node in needs for name in code.reads(node)}
    once: dict[str, set[str]] = {TOP: set(), MAIN: set(), AFTER: set()}
    for place, node in sorted(nodes.items()):
        if is_import(node) and draft.decisions[place].outcome != "dropped":
            _only_used(draft, place, used, once[draft.decisions[place].where])


def _only_used(draft: Draft, place: int, used: set[str], once: set[str]) -> None:
    """An import without the names that nothing uses, and without those that an earlier one in the same part of the
    script has (`once`, added to)."""
    done = draft.rewritten[place]
    for node in done.nodes:
        assert isinstance(node, ast.Import | ast.ImportFrom)
        names = []
        for alias in node.names:
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            key = f"{module} {alias.name} {alias.asname}"
            if (alias.asname or alias.name).split(".")[0] in used and key not in once:
                once.add(key)
                names.append(alias)
        node.names = names
    done.nodes = [node for node in done.nodes if node.names]  # type: ignore[attr-defined]
    if not done.nodes:
        draft.decisions[place] = Decision(outcome="dropped", reason="unused import")


# --- the script -------------------------------------------------------------------------------------------------------

_GUARDED = re.compile(r"\bload_dataset\(|\.(map|filter|from_generator|load_from_disk)\(|\bload_from_disk\(")


def _script(draft: Draft, arguments: Arguments, title: str) -> str:
    comments = _Comments(draft)
    body = [*_seed(draft, arguments), *_once(draft), *_main(draft, comments), *_exports(draft, comments)]
    nodes = [inner for part in body for node in part.nodes for inner in ast.walk(node)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    parts = [*_top(draft, used), BLANK, BLANK, block("def main() -> None:", body)]
    parts += [BLANK, BLANK, own('if __name__ == "__main__":\n    main()')]
    return script(title, parts)


def _top(draft: Draft, used: set[str]) -> list[Part]:
    """Environment variables, then finetune, Unsloth and the other imports."""
    environment, imports = [], []
    for place in draft.kept(TOP):
        if draft.decisions[place].outcome == "dropped":
            continue
        target = imports if is_import(draft.program.statements[place].node) else environment
        target += [line for node in draft.rewritten[place].nodes for line in _lines(node)]
    if draft.unsloth and not any(line.startswith(("from unsloth", "import unsloth")) for line in imports):
        imports.append("import unsloth")  # for its patches of other libraries
    if not draft.unsloth:
        environment.append('os.environ.setdefault("FINETUNE_BACKEND", "transformers")  # as in the notebook')
    if environment or "os" in used:
        imports = [line for line in imports if line != "import os"]
    head = "from finetune import "
    ours = sorted({*(code.PROVIDED & used), *(line[len(head) :] for line in imports if line.startswith(head))})
    imports = [line for line in imports if not line.startswith(head)]
    has_state = any(re.search(r"\bPartialState\b", line) for line in imports)
    more = ["from accelerate import PartialState"] if "PartialState" in used and not has_state else []
    own_seed = draft.program.definition("set_seed") is not None
    has_seed = any(re.search(r"\bset_seed\b", line) for line in imports)
    more += ["from contextlib import nullcontext"] if "nullcontext" in used - draft.program.imports.keys() else []
    more += ["from transformers import set_seed"] if "set_seed" in used and not (has_seed or own_seed) else []
    lines = [line for line in dict.fromkeys(imports) if line not in more]
    lines.sort(key=lambda line: not line.startswith(("from unsloth", "import unsloth")))
    first = (head + ", ".join(ours) if ours else "import finetune") + "  # first: it selects the device and the backend"
    return [
        *([own("import os"), BLANK] if environment or "os" in used else []),
        *map(own, environment),
        BLANK,
        *map(own, [first, *lines, *more]),
    ]


def _lines(node: ast.stmt) -> list[str]:
    """`import a, b` as two lines."""
    if isinstance(node, ast.Import):
        return [ast.unparse(ast.Import(names=[alias])) for alias in node.names]
    return [ast.unparse(node)]


def _seed(draft: Draft, arguments: Arguments) -> list[Part]:
    """Seed every rank alike before the model and the rows, unless the notebook does it at its top level."""
    for place in draft.kept(MAIN):
        node = draft.program.statements[place].node
        call = lone_call(node)
        name = draft.program.dotted(call.func) if call is not None else ""
        if name and any(name == key or name.endswith("." + key) for key in named("seeds") if key != "random.seed"):
            return []
    if "set_seed" in draft.program.imports and draft.program.imports["set_seed"] != "transformers.set_seed":
        return []
    if draft.program.definition("set_seed") is not None:
        return []
    seed = arguments.seed if arguments.seed is not None else 3407 if draft.unsloth else 42
    return [own(f"set_seed({seed})  # every rank starts from the same random state")]


def _once(draft: Draft) -> list[Part]:
    """Print on the main rank alone, unless the notebook has a `print` of its own or prints into files."""
    places = [place for where in (MAIN, AFTER) for place in draft.kept(where)]
    nodes = [inner for place in places for node in draft.rewritten[place].nodes for inner in ast.walk(node)]
    prints = [one for one in nodes if isinstance(one, ast.Call) and getattr(one.func, "id", "") == "print"]
    own_print = "print" in draft.program.imports or any("print" in e.all_binds for e in draft.program.effects)
    if not prints or own_print or any(item.arg == "file" for one in prints for item in one.keywords):
        return []
    return [own("print = PartialState().print  # once, on the main rank")]


class _Comments:
    """The comments that stand above a part of the script: the heading of its section, and what the notebook has above
    the imports before it, which are at the top of the script."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.heading = draft, ""

    def above(self, place: int) -> str:
        statements = self.draft.program.statements
        statement, found, before = statements[place], "", place
        while before and is_import(statements[before - 1].node) and statements[before - 1].cell == statement.cell:
            before -= 1
        for one in statements[before:place]:
            found += "".join(f"{line}\n" for line in one.source.splitlines() if line.startswith("#"))
        if statement.source.startswith("#") or re.search("import|librar", found, re.IGNORECASE):
            found = ""
        if statement.heading not in ("", self.heading):
            found = f"{comment(statement.heading)}\n{found}"
        self.heading = statement.heading
        return found


def _main(draft: Draft, comments: _Comments) -> list[Part]:
    """The statements up to the training; runs of data preparation go first on one rank per machine."""
    found: list[Part] = []
    run: list[Part] = []
    tail: list[Part] = []
    writes: list[Part] = []
    cell = None
    nodes = [draft.program.statements[place].node for place in draft.kept(MAIN) + draft.kept(AFTER)]
    readers = Counter(name for node in nodes for name in code.reads(node))
    seen: set[str] = set()  # what the statements so far read
    for place in [one for one in draft.kept(MAIN) if draft.decisions[one].outcome != "dropped"]:
        if draft.program.statements[place].cell != cell and not run and not writes:
            found.append(BLANK)
        cell = draft.program.statements[place].cell
        part = _part(draft, place, comments)
        if _writes(draft, place, readers):
            _close(found, run, tail)
            if seen & draft.program.written(draft.program.statements[place].node):
                found += [] if writes else [own(f"{code.WAIT}  # until every rank has read the file")]
                _end_writes(found, writes)
            writes.append(part)
            continue
        _end_writes(found, writes)
        seen |= draft.program.effects[place].all_reads
        if _is_data(draft, place) and _may_wait(draft, place):
            run += [*tail, part]
            tail.clear()
        elif run and place != draft.train and _is_plain(draft, place):
            tail.append(part)
        else:
            _close(found, run, tail)
            found.append(part)
    _end_writes(found, writes)
    _close(found, run, tail)
    return found


def _end_writes(found: list[Part], writes: list[Part]) -> None:
    """End a run of statements that write files: one rank per machine runs them, and the others wait."""
    if writes:
        head = f"if {code.LOCAL_MAIN_RANK}:  # files are written once per machine"
        found += [block(head, writes), own(code.WAIT)]
        writes.clear()


def _close(found: list[Part], run: list[Part], tail: list[Part]) -> None:
    """End a run of data preparation."""
    if run:
        found.append(block("with PartialState().local_main_process_first():  # the other ranks read its cache", run))
    found += tail
    run.clear()
    tail.clear()


def _is_data(draft: Draft, place: int) -> bool:
    node = draft.program.statements[place].node
    definition = isinstance(node, DEFINITIONS)
    return not definition and bool(_GUARDED.search(ast.unparse(node)))


def _may_wait(draft: Draft, place: int) -> bool:
    """Whether the statement has no collective inside: it neither trains nor sets up the trainer."""
    node = draft.program.statements[place].node
    nodes = [node, *draft.program.called(node)]
    texts = "\n".join(map(ast.unparse, nodes))
    together = any(name in texts for name in ("SFTTrainer", ".train()", "wait_for_everyone"))
    return place != draft.train and not together and not any(sets_up(draft, one) for one in nodes)


def _is_plain(draft: Draft, place: int) -> bool:
    """A definition or a plain value between two statements that prepare data."""
    node = draft.program.statements[place].node
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return True
    return isinstance(node, ast.Assign) and "from_pretrained" not in ast.unparse(node) and _may_wait(draft, place)


def _writes(draft: Draft, place: int, readers: Mapping[str, int]) -> bool:
    """Whether a statement writes files, so that one rank per machine runs it. `readers`: how many kept statements
    read each name."""
    statement = draft.program.statements[place]
    node = statement.node
    writes = code.writes_files(draft.program, node) or fetched_package(draft.program, node) is not None
    if place >= draft.train or not writes or sets_up(draft, node):
        return False
    e = draft.program.effects[place]
    itself = code.reads(node)
    live = {one for one in e.all_binds if readers.get(one, 0) > (one in itself)}
    if live:
        raise Refusal(
            "R4",
            f"`{statement.head[:80]}` writes a file and computes {min(live)}, which every rank needs; compute it in"
            " a statement that writes nothing, or write the file once before the script starts and only read it here",
            statement.cell,
        )
    return True


def _exports(draft: Draft, comments: _Comments) -> list[Part]:
    """The statements after training: those of every rank, and all else on the main rank."""
    places = [place for place in draft.kept(AFTER) if draft.decisions[place].outcome != "dropped"]
    found = [own(code.WAIT)] if places else []
    together: list[Part] = []

    def flush() -> None:
        if together:
            found.append(block(f"if {code.MAIN_RANK}:", together))
            together.clear()

    for place in places:
        if place in draft.together:
            flush()
            found.append(_part(draft, place, comments))
        else:
            together.append(_part(draft, place, comments))
    flush()
    return found


def _part(draft: Draft, place: int, comments: _Comments) -> Part:
    """The statement's own text, with what changed in it; else its new code."""
    done, statement = draft.rewritten[place], draft.program.statements[place]
    text = edited(statement.source, done.nodes[0]) if len(done.nodes) == 1 else None
    text = "\n".join(ast.unparse(node) for node in done.nodes) if text is None else text
    return Part(text=comments.above(place) + text, nodes=done.nodes)


# --- the report -------------------------------------------------------------------------------------------------------


def _statements(draft: Draft) -> list[JsonObject]:
    """What became of each statement of the notebook."""
    live = {statement.id: place for place, statement in enumerate(draft.program.statements)}
    found = []
    for statement in draft.notebook.statements:
        entry: dict[str, str] = {"outcome": "dropped", "reason": "dead code: `if False:`"}
        if statement.id in live:
            one = draft.decisions[live[statement.id]]
            entry = {"outcome": one.outcome}
            entry |= {"in": one.where} if one.outcome != "dropped" else {}
            entry |= {"reason": one.reason} if one.outcome != "kept" else {}
            if one.outcome == "rewritten":
                entry["becomes"] = scrub("\n".join(map(ast.unparse, draft.rewritten[live[statement.id]].nodes)))
        else:
            assert statement.is_dead
        head = {"cell": statement.cell, "line": statement.line, "statement": scrub(statement.head[:200])}
        found.append(head | entry)
    return found


def _foreign(draft: Draft, own_modules: Set[str]) -> list[str]:
    """Notes on libraries that the script imports and this project does not install."""
    roots = {
        (getattr(node, "module", None) or node.names[0].name).split(".")[0]
        for place in draft.kept(TOP)
        for node in draft.rewritten[place].nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    unknown = roots - named("installed") - set(sys.stdlib_module_names) - {name.split(".")[0] for name in own_modules}
    return [f"the script imports {name}, which this project does not install" for name in sorted(unknown)]
