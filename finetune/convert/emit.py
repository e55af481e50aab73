"""Write the script, its YAML file and the report from a plan and the settings, deterministically."""

from __future__ import annotations

import ast
import json
import re
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
from finetune.convert.source import BLANK, Part, block, comment, expression, is_visible, one_line, own, script
from finetune.convert.values import Settings
from finetune.errors import RunError

FUNCTIONS = {
    "tokenizer": "prepare_tokenizer",
    "dataset": "build_dataset",
    "model": "prepare_model",
    "trainer": "prepare_trainer",
    "save": "export",
}


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
    text = _script(notebook, plan, settings, name)
    report = _report(notebook, plan, settings, notes, name)
    infer = _inference(notebook, plan, settings, name) if keep_inference else ""
    return Conversion(name=name, script=text, config=config_text(settings, name), report=report, infer=infer)


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


# --- the script -------------------------------------------------------------------------------------------------------


def _script(notebook: Notebook, plan: Plan, settings: Settings, name: str) -> str:
    parts = [
        *_environment(plan),
        *_top_imports(plan),
        own("from finetune import script"),
        BLANK,
        *(_part(plan, place) for place in plan.hooks["module"]),
    ]
    calls = []
    for hook, function in FUNCTIONS.items():
        body = _function(notebook, plan, hook)
        if body is not None:
            parts += [BLANK, BLANK, body]
            calls.append(f"{hook}={function}")
    call = ", ".join(["__file__", *sorted(calls, key=lambda text: not text.startswith("dataset"))])
    parts += [BLANK, BLANK, block("def main() -> int:", [own(f"return script.run({call})")]), BLANK, BLANK, MAIN_GUARD]
    return script(_title(notebook, settings, name), parts)


MAIN_GUARD = own('if __name__ == "__main__":\n    raise SystemExit(main())')


def _title(notebook: Notebook, settings: Settings, name: str) -> str:
    model = settings.sections["model"]
    kind = "full fine-tuning" if model.get("full_finetuning") else "QLoRA" if model.get("load_in_4bit") else "LoRA"
    lines = [
        f"{kind} of {one_line(model['model_name_or_path'])}, converted from a notebook.",
        "",
        f"    accelerate launch {name}.py",
        f"    python {name}.py --dry-run",
        "",
        f"Settings: {name}.yaml, or on the command line as --section.key VALUE; --help lists them.",
        *origin(notebook, f"{_license(notebook)}. What was left out, and why: {name}.report.json"),
    ]
    return "\n".join(lines)


def origin(notebook: Notebook, more: str) -> list[str]:
    """Lines of the docstring: which notebook this script is made from. `more` follows "the notebook's license
    applies"."""
    text = (
        f"Generated from {one_line(notebook.name)} (sha256 {notebook.sha256[:16]}) by finetune convert {__version__}."
        f" This is a derived work, so the notebook's license applies{more}"
    )
    return [*textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False), ""]


def _license(notebook: Notebook) -> str:
    return (
        " (LGPL-3.0 for unslothai/notebooks)"
        if "unsloth" in notebook.text.lower() and "YOUR_HF_TOKEN" in notebook.text
        else ""
    )


def _environment(plan: Plan) -> list[Part]:
    lines = [comment(line) for line in plan.environment_comments]
    if lines:
        first = comment("Set in an installation branch of the notebook; uncomment if your platform needs it:")
        lines = [first, *lines, ""]
    comments = [Part(text=line) for line in lines]
    places = plan.hooks["environment"]
    if not places:
        return comments
    return [
        own("import os"),
        BLANK,
        Part(text=comment("Set before the imports, because libraries read these when they are imported.")),
        *(_part(plan, place) for place in places),
        BLANK,
        *comments,
    ]


def _part(plan: Plan, place: int) -> Part:
    if place in plan.replaced.keys():
        return own(ast.unparse(plan.replaced[place]))
    statement = plan.program.statements[place]
    return Part(text=statement.source, nodes=[statement.node])


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
    for one in _expressions(plan, hook):
        found |= free_names(one)
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


def _top_imports(plan: Plan) -> list[Part]:
    names = {name for hook in ("module", *FUNCTIONS) for name in _needed(plan, hook)}
    lines = [line for line, standard in _import_lines(plan, names) if standard]
    if plan.hooks["environment"]:
        lines = [line for line in lines if line != "import os"]
    ordered = sorted(_merged(lines), key=lambda line: (line.startswith("from"), line))
    return [*map(own, ordered), BLANK] if lines else []


def _function(notebook: Notebook, plan: Plan, hook: str) -> Part | None:
    """One hook as a function, or None if the notebook does not need it."""
    places = [place for place in plan.hooks[hook] if not is_import(kept_node(plan, place))]
    if not places and not _expressions(plan, hook):
        return None
    imports = [line for line, standard in _import_lines(plan, _needed(plan, hook)) if not standard]
    aliases, parameters = _parameters(plan, hook, places)
    body = [*map(own, _merged(imports)), *([BLANK] if imports else []), *map(own, aliases)]
    last_heading = ""
    for place in places:
        statement = plan.program.statements[place]
        heading = notebook.headings.get(statement.cell, "")
        if heading != last_heading and not statement.source.lstrip().startswith("#") and _is_informative(heading):
            body.append(Part(text=comment(heading)))
            last_heading = heading
        body.append(_part(plan, place))
    body += map(own, _ending(plan, hook))
    return block(f"def {FUNCTIONS[hook]}({', '.join(parameters)}):", body)


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
    for one in _expressions(plan, hook):
        read += sorted(free_names(one) - bound)
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
        train = plan.train_expression if plan.train_expression is not None else ast.Constant(None)
        given = [train] if plan.eval_expression is None else [train, plan.eval_expression]
        if plan.formatting is not None:
            given = [_texts_of(plan, plan.formatting, rows) for rows in given]
        return ["return " + ", ".join(map(ast.unparse, given))]
    if hook == "trainer":
        return _callback_lines(plan)
    return []


def _texts_of(plan: Plan, formatting: ast.expr, rows: ast.expr) -> ast.expr:
    """Rows with the texts that `formatting_func` makes; Unsloth's trainer ignores it if they have the text field."""
    if _formats_many(plan):  # it may return a different number of rows, which the other columns would not match
        template = 'ROWS.map(lambda rows: {"text": F(rows)}, batched=True, remove_columns=ROWS.column_names)'
    else:
        template = 'ROWS.map(lambda row: {"text": F(row)})'
    made = expression(template, ROWS=rows, F=formatting)
    if plan.read_first is None:
        return made
    field = ast.Constant(plan.read_first)
    as_they_are = rows
    if plan.read_first != "text":
        as_they_are = expression('ROWS.map(lambda row: {"text": row[FIELD]})', ROWS=rows, FIELD=field)
    return expression(
        "GIVEN if FIELD in ROWS.column_names else MADE", GIVEN=as_they_are, FIELD=field, ROWS=rows, MADE=made
    )


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
            lines.append(f"for callback in {ast.unparse(one)}:\n    {trainer}.add_callback(callback)")
    return lines


# --- the settings -----------------------------------------------------------------------------------------------------


def config_text(settings: Settings, name: str) -> str:
    """The YAML file.

    Raises:
        RunError: it is read as other settings.
    """
    lines = [comment(f"Settings of {name}.py. All keys and what they mean: python {name}.py --help")]
    for section, values in settings.sections.items():
        if not values:
            continue
        lines += ["", f"{section}:"]
        for key, value in values.items():
            remark, more = settings.comments.get(f"{section}.{key}", ""), []
            if remark == "demo":
                remark = "demo: the notebook stops early. For full epochs, use instead:"
                more = [f"  {comment('num_train_epochs: 1')}"]
            lines += [f"  {key}: {yaml_value(value)}" + (f"  {comment(remark)}" if remark else ""), *more]
    text = "\n".join(lines) + "\n"
    given = {section: values for section, values in settings.sections.items() if values}
    if _rounded(yaml.safe_load(text)) != _rounded(given):
        raise RunError(
            "the YAML file has other settings than the notebook; it was not written. Please report this notebook."
        )
    return text


def _rounded(values: Any) -> Any:
    """Settings as `yaml_value` writes them: lists for tuples, 12 digits."""
    return json.loads(json.dumps(values), parse_float=lambda text: f"{float(text):.12g}")


class _Dumper(yaml.SafeDumper):
    """Texts with characters that are not visible are in double quotes, where these have escapes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if all(map(is_visible, text)) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_value(value: Any) -> str:
    """The value on one line."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        text = f"{value:.12g}"
        return text if "." in text else text.replace("e", ".0e")  # without a decimal point, YAML reads a string
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return "".join(one if is_visible(one) else f"\\U{ord(one):08x}" for one in text)


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
        {
            "cell": shell.cell,
            "line": shell.line,
            "text": scrub(shell.text.partition("\n")[0][:200]),
            "outcome": "dropped",
        }
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
    loading_lines = _loading(settings, model, tokenizer, loader)
    imports = _merged([line for line, _ in _import_lines(plan, names - loading)])
    body = [
        own(loading_lines[0]),
        *map(own, imports),
        BLANK,
        *map(own, [*loading_lines[1:], *aliases]),
        *(Part(text=program.statements[p].source, nodes=[program.statements[p].node]) for p in places),
    ]
    title = f"Inference with the model trained by {name}.py, from {one_line(notebook.name)}. For one process."
    main = block("def main() -> None:", body)
    return script(title, [BLANK, BLANK, main, BLANK, BLANK, own('if __name__ == "__main__":\n    main()')])


def _loading(settings: Settings, model: str, tokenizer: str, loader: str) -> list[str]:
    """Lines that load the trained model."""
    folder, section = settings.sections["training"]["output_dir"], settings.sections["model"]
    if section["backend"] == "transformers":
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'{model} = AutoModelForCausalLM.from_pretrained({folder!r}, device_map={{"": 0}})',
            f"{tokenizer} = AutoTokenizer.from_pretrained({folder!r})",
        ]
    length, four = repr(settings.sections["data"]["max_length"]), repr(section["load_in_4bit"])
    return [
        f"from unsloth import {loader}",
        f"{model}, {tokenizer} = {loader}.from_pretrained({folder!r}, max_seq_length={length}, load_in_4bit={four})",
        f"{loader}.for_inference({model})",
    ]
