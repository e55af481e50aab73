"""Write the script, its YAML file and the report from a plan and the settings, deterministically."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import yaml

from finetune import __version__
from finetune.convert.knowledge import named
from finetune.convert.names import effects, free_names
from finetune.convert.read import Notebook
from finetune.convert.roles import Plan
from finetune.convert.secrets import scrub
from finetune.convert.values import Settings
from finetune.errors import UserError

FUNCTIONS = {
    "tokenizer": "prepare_tokenizer",
    "dataset": "build_dataset",
    "model": "prepare_model",
    "trainer": "prepare_trainer",
    "save": "export",
}
LINE = 120


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The files of a converted notebook. `name` is their stem; `infer` is "" unless requested."""

    name: str
    script: str
    config: str
    report: dict[str, Any]
    infer: str = ""


def emit(
    notebook: Notebook, plan: Plan, settings: Settings, notes: list[str], *, keep_inference: bool = False
) -> Conversion:
    """Write the script, the YAML file and the report, and the inference script if requested."""
    name = slug(notebook.name, {dotted.split(".")[0] for dotted in plan.program.imports.values()})
    script = formatted(_script(notebook, plan, settings, name))
    report = _report(notebook, plan, settings, notes, name)
    infer = formatted(_inference(notebook, plan, settings, name)) if keep_inference else ""
    return Conversion(name=name, script=script, config=_config(notebook, settings, name), report=report, infer=infer)


def slug(name: str, imported: Collection[str] = ()) -> str:
    """`Llama3.2_(1B)-Alpaca.ipynb` -> `llama3_2_1b_alpaca`.

    Python searches the script's folder first: a script named like an imported library (`imported`: those of the
    notebook) would shadow it everywhere, for example `import pandas` inside another library.
    """
    stem = re.sub(r"\.(ipynb|py)$", "", name)
    found = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "notebook"
    if found in sys.stdlib_module_names or found in named("installed") or found in imported:
        found = f"{found}_sft"
    return f"nb_{found}" if found[0].isdigit() else found


@functools.lru_cache(maxsize=4)  # V6 converts a second time, with the same texts to format
def formatted(source: str) -> str:
    """The source, formatted by `ruff format`, so that editors leave it unchanged."""
    done = subprocess.run(
        [
            ruff(),
            "format",
            "--isolated",
            "--line-length",
            str(LINE),
            "--target-version",
            "py311",
            "--stdin-filename",
            "script.py",
            "-",
        ],
        input=source.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise UserError(
            f"cannot format the converted script: {done.stderr.decode()[:300]}. Please report this notebook."
        )
    return done.stdout.decode()


def ruff() -> str:
    try:
        from ruff import find_ruff_bin
    except ImportError:
        raise UserError(
            "ruff, which formats and checks converted scripts, is not installed. Install it with "
            "`pip install 'finetune[convert]'`."
        ) from None
    return find_ruff_bin()


# --- the script -------------------------------------------------------------------------------------------------------


def _script(notebook: Notebook, plan: Plan, settings: Settings, name: str) -> str:
    parts = [
        _docstring(notebook, plan, settings, name),
        *_environment(plan),
        *_top_imports(plan),
        "from finetune import script",
    ]
    parts += ["", *(_text(plan, place) for place in plan.hooks["module"])]
    calls = []
    for hook, function in FUNCTIONS.items():
        body = _function(notebook, plan, hook)
        if body:
            parts += ["", "", body]
            calls.append(f"{hook}={function}")
    call = ", ".join(["__file__", *sorted(calls, key=lambda text: not text.startswith("dataset"))])
    parts += [
        "",
        "",
        "def main() -> int:",
        f"    return script.run({call})",
        "",
        "",
        'if __name__ == "__main__":',
        "    raise SystemExit(main())",
        "",
    ]
    return "\n".join(parts)


def _docstring(notebook: Notebook, plan: Plan, settings: Settings, name: str) -> str:
    model = settings.sections["model"]
    kind = "full fine-tuning" if model.get("full_finetuning") else "QLoRA" if model.get("load_in_4bit") else "LoRA"
    what = f"{kind} of {model['model_name_or_path']}"
    origin = (
        f"Generated from {notebook.name} (sha256 {notebook.sha256[:16]}) by finetune convert {__version__}. This is a "
        f"derived work, so the notebook's license applies{_license(notebook)}. What was left out, and why: "
        f"{name}.report.json"
    )
    lines = [
        f'"""{what}, converted from a notebook.',
        "",
        f"    accelerate launch {name}.py",
        f"    python {name}.py --dry-run",
        "",
        f"Settings: {name}.yaml, or on the command line as --section.key VALUE; --help lists them.",
        *textwrap.wrap(origin, 110, break_long_words=False, break_on_hyphens=False),
        '"""',
        "",
    ]
    return "\n".join(line.replace("\\", "/") for line in lines)


def _license(notebook: Notebook) -> str:
    return (
        " (LGPL-3.0 for unslothai/notebooks)"
        if "unsloth" in notebook.text.lower() and "YOUR_HF_TOKEN" in notebook.text
        else ""
    )


def _environment(plan: Plan) -> list[str]:
    comments = [f"# {line}" for line in plan.environment_comments]
    if comments:
        comments = [
            "# Set in an installation branch of the notebook; uncomment if your platform needs it:",
            *comments,
            "",
        ]
    places = plan.hooks["environment"]
    if not places:
        return comments
    return [
        "import os",
        "",
        "# Set before the imports, because libraries read these when they are imported.",
        *(_text(plan, place) for place in places),
        "",
        *comments,
    ]


def _text(plan: Plan, place: int) -> str:
    if place in plan.replaced.keys():
        return ast.unparse(plan.replaced[place])
    return plan.program.statements[place].source


def kept_node(plan: Plan, place: int) -> ast.stmt:
    return plan.replaced.get(place, plan.program.statements[place].node)


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _needed(plan: Plan, hook: str) -> set[str]:
    """Names that a function of the script reads."""
    found: set[str] = set()
    for place in plan.hooks[hook]:
        if not is_import(kept_node(plan, place)):
            found |= effects(kept_node(plan, place)).all_reads
            found |= effects(kept_node(plan, place)).changes
    for expression in _expressions(plan, hook):
        found |= free_names(expression)
    return found


def _expressions(plan: Plan, hook: str) -> list[ast.expr]:
    of = {"dataset": (plan.train_expression, plan.eval_expression, plan.formatting), "trainer": (plan.callbacks,)}
    return [item for item in of.get(hook, ()) if item is not None]


def _import_lines(plan: Plan, names: set[str]) -> list[tuple[str, bool]]:
    """One import line per name and statement, in the notebook's order, and whether it is from the standard library.

    `import a.b` and `import a.c` bind the same name; both are kept."""
    lines: dict[str, tuple[bool, str]] = {}
    taken: set[str] = set()
    for statement in plan.program.statements:
        node = statement.node
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = "" if isinstance(node, ast.Import) else node.module or ""
        for alias in node.names:
            bound = (alias.asname or alias.name).split(".")[0]
            submodule = isinstance(node, ast.Import) and "." in alias.name and not alias.asname
            if bound not in names or (bound in taken and not submodule):
                continue
            taken.add(bound)
            shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
            line = f"from {module} import {shown}" if module else f"import {shown}"
            root = (module or alias.name).split(".")[0]
            lines.setdefault(line, (root in sys.stdlib_module_names, root))
    if "os" in names and "os" not in taken:
        lines.setdefault("import os", (True, "os"))
    ordered = sorted(lines.items(), key=lambda item: item[1][1] != "unsloth")
    return [(line, standard) for line, (standard, _) in ordered]


def _merged(lines: list[str]) -> list[str]:
    """`from a import b` and `from a import c` as one line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        module, _, name = line.partition(" import ")
        found.setdefault(module if name else line, []).extend([name] if name else [])
    return [f"{module} import {', '.join(names)}" if names else module for module, names in found.items()]


def _top_imports(plan: Plan) -> list[str]:
    names = {name for hook in ("module", *FUNCTIONS) for name in _needed(plan, hook)}
    lines = [line for line, standard in _import_lines(plan, names) if standard]
    if plan.hooks["environment"]:
        lines = [line for line in lines if line != "import os"]
    return [*sorted(_merged(lines), key=lambda line: (line.startswith("from"), line)), ""] if lines else []


def _function(notebook: Notebook, plan: Plan, hook: str) -> str:
    """One hook as a function, or "" if the notebook does not need it."""
    places = [place for place in plan.hooks[hook] if not is_import(kept_node(plan, place))]
    if not places and not _expressions(plan, hook):
        return ""
    imports = [line for line, standard in _import_lines(plan, _needed(plan, hook)) if not standard]
    aliases, parameters = _parameters(plan, hook, places)
    body = [*_merged(imports), *([""] if imports else []), *aliases]
    last_heading = ""
    for place in places:
        statement = plan.program.statements[place]
        heading = notebook.headings.get(statement.cell, "")
        if heading != last_heading and not statement.source.lstrip().startswith("#") and _is_informative(heading):
            body.append(f"# {heading}")
            last_heading = heading
        body.append(_text(plan, place))
    body += _ending(plan, hook)
    return f"def {FUNCTIONS[hook]}({', '.join(parameters)}):\n" + "\n".join(indented(text) for text in body)


def _is_informative(heading: str) -> bool:
    """Whether a heading of the notebook is useful as a comment in the script."""
    return not re.search(r"news|installation|unsloth|train the model|inference|<|http", heading, re.IGNORECASE)


def _parameters(plan: Plan, hook: str, places: list[int]) -> tuple[list[str], list[str]]:
    """The parameters, and lines that assign their other names in the notebook."""
    read: list[str] = []
    bound: set[str] = set()
    for place in places:
        e = effects(kept_node(plan, place))
        read += sorted((e.all_reads | e.changes) - bound)
        bound |= e.binds
    for expression in _expressions(plan, hook):
        read += sorted(free_names(expression) - bound)
    tokenizers = [name for name in plan.tokenizers if name in read]
    models = [name for name in sorted(plan.models) if name in read]
    trainers = [name for name in sorted(plan.trainers) if name in read]
    tokenizer, model, trainer = (
        names[0] if names else default
        for names, default in ((tokenizers, "tokenizer"), (models, "model"), (trainers, "trainer"))
    )
    lines = [f"{other} = {names[0]}" for names in (tokenizers, models, trainers) for other in names[1:]]
    if hook == "trainer":
        lines = (
            [f"{tokenizer} = {trainer}.processing_class"] * bool(tokenizers)
            + [f"{model} = {trainer}.model"] * bool(models)
            + lines
        )
        return lines, [trainer]
    if hook in ("model", "save"):
        return lines, [model, tokenizer]
    return lines, [tokenizer]


def _ending(plan: Plan, hook: str) -> list[str]:
    if hook == "tokenizer":
        changed = [
            name
            for place in plan.hooks[hook]
            for name in sorted(effects(kept_node(plan, place)).binds)
            if name in plan.tokenizers
        ]
        parameter = _parameters(plan, hook, [p for p in plan.hooks[hook] if not is_import(kept_node(plan, p))])[1][0]
        return [f"return {changed[-1] if changed else parameter}"]
    if hook == "dataset":
        train = ast.unparse(plan.train_expression) if plan.train_expression is not None else "None"
        held_out = ast.unparse(plan.eval_expression) if plan.eval_expression is not None else ""
        if plan.formatting is None:
            return [f"return {train}, {held_out}" if held_out else f"return {train}"]
        one, many = ast.unparse(plan.formatting), _formats_many(plan)
        row = "rows" if many else "row"
        called = f"({one})({row})" if isinstance(plan.formatting, ast.Lambda) else f"{one}({row})"
        convert = f'lambda {row}: {{"text": {called}}}'
        # A batched function may return a different number of rows, which the other columns would not match.
        more = ", batched=True, remove_columns={0}.column_names" if many else ""
        given = [(item, f"{item}.map({convert}{more.format(item)})") for item in (train, held_out) if item]
        if plan.read_first is not None:
            given = [(item, _unless_read(item, plan.read_first, made)) for item, made in given]
        return ["return " + ", ".join(made for _, made in given)]
    if hook == "trainer":
        return _callback_lines(plan)
    return []


def _unless_read(rows: str, field: str, made: str) -> str:
    """Rows made by `formatting_func`, which Unsloth's trainer ignores if they have the text field."""
    as_they_are = rows if field == "text" else f'{rows}.map(lambda row: {{"text": row[{field!r}]}})'
    return f"{as_they_are} if {field!r} in {rows}.column_names else {made}"


def _formats_many(plan: Plan) -> bool:
    """Whether `formatting_func` is batched, that is, returns a list."""
    event = next(item for item in plan.trace["events"] if item["kind"] == "trainer")
    form = event["forms"].get("formatting_func")
    return isinstance(form, list) and len(form) > 2 and isinstance(form[2], list) and form[2][:1] == ["list"]


def _callback_lines(plan: Plan) -> list[str]:
    trainer = _parameters(plan, "trainer", [p for p in plan.hooks["trainer"] if not is_import(kept_node(plan, p))])[1][
        0
    ]
    given = [] if plan.callbacks is None else [plan.callbacks]
    texts = [ast.unparse(kept_node(plan, place)) for place in plan.hooks["trainer"]] + [
        ast.unparse(one) for one in given
    ]
    lines = []
    if any("EarlyStopping" in text for text in texts):
        lines += [f'{trainer}.args.metric_for_best_model = "eval_loss"', f"{trainer}.args.greater_is_better = False"]
    for one in given:
        if isinstance(one, ast.List | ast.Tuple):
            lines += [f"{trainer}.add_callback({ast.unparse(item)})" for item in one.elts]
        else:
            lines += [f"for callback in {ast.unparse(one)}:", f"    {trainer}.add_callback(callback)"]
    return lines


def indented(text: str) -> str:
    """Indent each line that does not begin inside a string by four spaces."""
    inside: set[int] = set()
    try:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
                if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
                    inside |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    except SyntaxError:  # `return ...`
        pass
    lines = text.split("\n")
    return "\n".join(
        line if not line.strip() or number in inside else f"    {line}" for number, line in enumerate(lines, 1)
    )


# --- the settings -----------------------------------------------------------------------------------------------------


def _config(notebook: Notebook, settings: Settings, name: str) -> str:
    lines = [f"# Settings of {name}.py. All keys and what they mean: python {name}.py --help"]
    for section, values in settings.sections.items():
        if not values:
            continue
        lines += ["", f"{section}:"]
        for key, value in values.items():
            dotted = f"{section}.{key}"
            if settings.comments.get(dotted) == "demo":
                lines.append(
                    f"  {key}: {_yaml(value)}  # demo: the notebook stops early. For full epochs, use instead:"
                )
                lines.append("  # num_train_epochs: 1")
                continue
            comment = settings.comments.get(dotted, "")
            lines.append(f"  {key}: {_yaml(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, str) and re.search(r"[\n\t]", value):
        return json.dumps(value, ensure_ascii=False)  # valid YAML, on one line
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        text = f"{value:.12g}"
        return text if "." in text else text.replace("e", ".0e")  # without a decimal point, YAML reads a string
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("...\n").strip()
    )


# --- the report -------------------------------------------------------------------------------------------------------


def _report(notebook: Notebook, plan: Plan, settings: Settings, notes: list[str], name: str) -> dict[str, Any]:
    statements = []
    live = {statement.id: place for place, statement in enumerate(plan.program.statements)}
    for statement in notebook.statements:
        disposition = plan.dispositions[live[statement.id]] if statement.id in live else None
        if disposition is None:
            assert statement.is_dead
            entry = {"outcome": "dropped", "reason": statement.left_out or "dead code: `if False:`"}
        elif disposition.what == "kept":
            entry = {"outcome": "kept", "in": FUNCTIONS.get(disposition.where, "top of the script")}
            if live[statement.id] in plan.replaced:
                entry = {
                    "outcome": "rewritten",
                    "in": entry["in"],
                    "reason": "the trainer sets the model's token ids",
                }
        elif disposition.what == "settings":
            entry = {"outcome": "rewritten", "in": f"{name}.yaml or the package", "reason": disposition.why}
        else:
            entry = {"outcome": "dropped", "reason": disposition.why}
        statements.append(
            {"cell": statement.cell, "line": statement.line, "statement": scrub(_head(statement.source)), **entry}
        )
    shells = [
        {"cell": shell.cell, "line": shell.line, "text": scrub(shell.text.splitlines()[0][:200]), "outcome": "dropped"}
        for shell in notebook.shells
    ]
    return {
        "notebook": notebook.name,
        "sha256": notebook.sha256,
        "converter": __version__,
        "outcome": "converted",
        "form": "settings",
        "notes": [scrub(note) for note in dict.fromkeys([*notes, *plan.notes, *settings.notes, *_not_installed(plan)])],
        "requirements": requirements(notebook),
        "statements": statements,
        "not_python": shells,
    }


def _not_installed(plan: Plan) -> list[str]:
    """Notes on libraries that the script imports and this project does not install."""
    names = {name for hook in ("module", *FUNCTIONS) for name in _needed(plan, hook)}
    roots = {line.split()[1].split(".")[0] for line, standard in _import_lines(plan, names) if not standard}
    return [
        f"the script imports {root}, which this project does not install" for root in sorted(roots - named("installed"))
    ]


def _head(source: str) -> str:
    for line in source.strip().splitlines():
        if line.strip() and not line.strip().startswith("#"):
            return line.strip()[:200]
    return source.strip()[:200]


def requirements(notebook: Notebook) -> list[str]:
    """Package versions pinned by the notebook's installation."""
    found = set()
    for shell in notebook.shells:
        if "install" in shell.text:
            found |= set(
                re.findall(r"(?<![\w/=.-])([A-Za-z][\w.-]*(?:\[[\w,]+\])?(?:==|>=|<=|~=|<|>)[\w.*,<>=!]+)", shell.text)
            )
    return sorted(found)


# --- inference, on request --------------------------------------------------------------------------------------------


def _inference(notebook: Notebook, plan: Plan, settings: Settings, name: str) -> str:
    """The notebook's inference after training, as a separate script for one process."""
    program = plan.program
    stop = frozenset(plan.models | set(plan.tokenizers) | plan.trainers)
    chosen: set[int] = set()
    for place in range(plan.key["train"] + 1, len(program.statements)):
        why = plan.dispositions[place].why
        if why == "inference" or ("display" in why and "decode" in program.statements[place].source):
            needed, given = program.slice(effects(program.statements[place].node).all_reads - stop, place, stop)
            if not given & plan.trainers and not any("trainer" in plan.dispositions[p].why for p in needed):
                chosen |= {place} | needed
    places = [p for p in sorted(chosen) if not is_import(program.statements[p].node)]
    names = {n for p in places for n in effects(program.statements[p].node).all_reads}
    tokenizer = (plan.tokenizers or ["tokenizer"])[0]
    model = (sorted(plan.models) or ["model"])[0]
    loader = settings.sections["model"].get("loader") or "FastLanguageModel"
    aliases = [f"{other} = {tokenizer}" for other in plan.tokenizers[1:]]
    loading = {loader, "AutoModelForCausalLM", "AutoTokenizer"}
    body = [
        *_loading(settings, model, tokenizer, loader),
        *aliases,
        *(program.statements[p].source for p in places),
    ]
    imports = _merged([line for line, _ in _import_lines(plan, names - loading)])
    body = [body[0], *imports, "", *body[1:]]
    head = f'"""Inference with the model trained by {name}.py, from {notebook.name}. For one process."""\n'
    return (
        head
        + "\n\ndef main() -> None:\n"
        + "\n".join(indented(text) for text in body)
        + '\n\n\nif __name__ == "__main__":\n    main()\n'
    )


def _loading(settings: Settings, model: str, tokenizer: str, loader: str) -> list[str]:
    """Lines that load the trained model."""
    folder, section = settings.sections["training"]["output_dir"], settings.sections["model"]
    if section["backend"] == "transformers":
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'{model} = AutoModelForCausalLM.from_pretrained("{folder}", device_map={{"": 0}})',
            f'{tokenizer} = AutoTokenizer.from_pretrained("{folder}")',
        ]
    length, four = settings.sections["data"]["max_length"], section["load_in_4bit"]
    return [
        f"from unsloth import {loader}",
        f'{model}, {tokenizer} = {loader}.from_pretrained("{folder}", max_seq_length={length}, load_in_4bit={four})',
        f"{loader}.for_inference({model})",
    ]
