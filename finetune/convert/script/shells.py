"""Lines of a notebook that are not Python: left out, unless the training needs a file that they make."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from finetune.convert.analysis.names import calls, lone_call, method
from finetune.convert.knowledge import matches
from finetune.convert.notebook.read import Refusal
from finetune.convert.notebook.secrets import REMOVED
from finetune.convert.script.draft import Draft

INSTALLS = re.compile(
    r"(?:^|&&\s*|;\s*)(?:sudo\s+)?(?:[^\s;&]*python3?\s+-m\s+)?(?:pip3?|uv|conda|mamba|apt|apt-get|npm|brew|poetry)\b|^%(?:pip|conda|uv)\b"
)
NO_TRACE = re.compile(
    r"^(?:sudo\s+)?(?:nvidia-smi|rocm-smi|rocminfo|amd-smi|ls|pwd|df|du|free|whoami|which|lscpu|nvcc|cat|head|tail|wc|uname|date|echo|export"
    r"|huggingface-cli|hf|wandb|kill|pkill|sleep|env|printenv|clear|mkdir|chmod|set|tree|python3?\s+--?V|git\s+(?:config|--version|lfs)"
    r"|ldconfig|export\s|source|unset|nproc|top|ps|accelerate\s+env|python3?\s+-m\s+(?:bitsandbytes|xformers\.info|torch\.utils\.collect_env))\b"
    r"|^(?:\w+=[\w.,:/=-]*+(?:\s+|$))+$"
)
_READS_LOCAL = re.compile(
    r"data_files|read_csv|read_json|read_parquet|read_excel|from_csv|from_json|load_from_disk|data_dir|open\(|/content/|\.jsonl|\.csv|\.parquet"
)


def refuse_shells(draft: Draft, kept: Sequence[int]) -> None:
    """Leave out shell lines, unless a statement that is kept up to the training (`kept`) needs a file they create."""
    notebook, statements = draft.notebook, draft.program.statements
    text = "\n".join(statements[place].source for place in kept)
    literals = _literals(draft)
    trained = statements[draft.train].cell
    local = bool(_READS_LOCAL.search(text))
    for shell in notebook.shells:
        if shell.cell > trained:
            continue
        if match := re.match(r"[%!]?cd\s+(\S+)\s*$", shell.text):
            if local:
                draft.notes.append(f"cell {shell.cell}: paths are relative to {match[1]}; start the script there")
            continue
        if shell.kind == "file":
            if shell.writes and (
                shell.writes.rsplit("/", 1)[-1] in text
                or re.search(
                    rf"\b(import|from) {re.escape(shell.writes.rsplit('/', 1)[-1].removesuffix('.py'))}\b", text
                )
            ):
                raise Refusal("R4", f"training uses {shell.writes}, which a cell writes", shell.cell)
            continue
        command = shell.text.replace(REMOVED, "")
        if INSTALLS.search(command) or (leaves_nothing(command) and ">" not in command):
            continue
        if shell.kind == "magic" and not shell.text.startswith(
            ("%run", "%cp", "%mv", "%rm", "%cd", "%writefile", "%store", "%bash", "%sx", "%system")
        ):
            continue
        if (file := _made_file(command)) is not None:
            if file in text or any(file in literal for literal in literals):
                raise Refusal(
                    "R4",
                    f"training needs {file}, which a shell command creates (`{shell.text[:80]}`); run it first, then"
                    " delete the line",
                    shell.cell,
                )
            continue
        named = any(word in literal for word in _words(shell.text) for literal in literals)
        if draft.installs(shell.cell) and not named:
            continue
        if local or named:
            raise Refusal(
                "R4",
                f"training reads files that a shell command may create (`{shell.text[:80]}`); run it first, then delete"
                " the line",
                shell.cell,
            )
        if re.search(r"&\s*$|\b(serve|server|ollama|vllm|synthetic-data-kit|docker)\b", shell.text):
            reason = f"a shell command starts a service or creates data (`{shell.text[:80]}`); run it first, and load"
            raise Refusal("R4", f"{reason} what it makes from a file", shell.cell)


def leaves_nothing(command: str) -> bool:
    """Whether a command, and each that follows it, makes no file of rows: it shows something, sets a variable or logs
    in."""
    commands = _commands(command)
    return bool(commands) and all(INSTALLS.match(one) or NO_TRACE.match(one) or _only_shows(one) for one in commands)


def _commands(line: str) -> list[str]:
    """The commands of a line: `a && b; c`. Separators in quotes are none."""
    hidden = re.sub(r"\\.|\"(?:[^\"\\]|\\.)*+\"|'[^']*'", lambda quoted: "_" * len(quoted[0]), line)
    ends = [(0, 0), *(found.span() for found in re.finditer(r"&&|\|\||;|&(?!>)", hidden)), (len(line), len(line))]
    parts = [line[one[1] : two[0]].strip() for one, two in pairwise(ends)]
    return [part for part in parts if part]


def _only_shows(command: str) -> bool:
    """`test -d x`, `[ ! -d x ]`, and Python that imports, prints and logs in: `python -c "print(1)"`."""
    if re.match(r"(?:test|\[)\s", command):
        return True
    try:
        words = shlex.split(command)
        python = len(words) == 3 and re.fullmatch(r"python3? -c", " ".join(words[:2])) is not None
        nodes = ast.parse(words[2]).body if python else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return bool(nodes) and all(isinstance(node, ast.Import | ast.ImportFrom) or _shows(node) for node in nodes)


_SHOWN = re.compile(r"print|str|len|is_\w+|device_count|get_device_\w+|version|get_\w*info")


def _shows(node: ast.stmt) -> bool:
    """`print(torch.__version__)`, `login()`, `HfFolder.save_token("...")`"""
    if (call := lone_call(node)) is None:
        return False
    name = ast.unparse(call.func)
    if matches("account", name) or matches("account", f"huggingface_hub.{name}"):
        return True
    names = [method(one) or getattr(one.func, "id", "") for one in calls(call)]
    return name == "print" and all(_SHOWN.fullmatch(one) for one in names)


def _literals(draft: Draft) -> list[str]:
    """Strings in kept statements."""
    places = [place for place, decision in draft.decisions.items() if decision.outcome == "kept"]
    return [
        node.value
        for place in places
        for node in ast.walk(draft.program.statements[place].node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 300
    ]


def _made_file(command: str) -> str | None:
    """The name of the file that a download creates."""
    makes = ">" in command or re.match(r"\S*(?:wget|curl|gdown|aria2c|hf|huggingface-cli)\b", command)
    output = r"(?:-O|-o|--output|--output-document|>)\s*=?\s*([^\s;&|>-][^\s;&|]*)"
    if makes and (match := re.search(output, command)):
        name = match.group(1).strip("'\"").rsplit("/", 1)[-1]
        return None if match.group(1).startswith(("/dev/", "&")) else name or None
    if match := re.match(r"(?:wget|curl|gdown)\b.*?(https?://\S+)", command):
        name = match.group(1).strip("'\"").split("?")[0].rstrip("/").rsplit("/", 1)[-1]
        return name if "." in name else None
    return None


def _words(text: str) -> list[str]:
    return [
        word.strip("'\"").rstrip("/").rsplit("/", 1)[-1]
        for word in text.split()[1:]
        if len(word) > 5 and not word.startswith("-")
    ]
