"""Lines of a notebook that are not Python: left out, with a note where they may make what the training needs."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from finetune.convert.analysis.names import calls, written_path
from finetune.convert.notebook.read import Refusal
from finetune.convert.notebook.secrets import REMOVED
from finetune.convert.script.draft import MAIN, Draft

INSTALLS = re.compile(
    r"(?:^|&&\s*|;\s*)(?:sudo\s+)?(?:[^\s;&]*python3?\s+-m\s+)?(?:pip3?|uv|conda|mamba|apt|apt-get|npm|brew|poetry)\b|^%(?:pip|conda|uv)\b"
)
NO_TRACE = re.compile(
    r"^(?:sudo\s+)?(?:nvidia-smi|rocm-smi|rocminfo|amd-smi|ls|pwd|df|du|free|whoami|which|lscpu|nvcc|cat|head|tail|wc|uname|date|echo|export"
    r"|huggingface-cli|hf|wandb|kill|pkill|sleep|env|printenv|clear|mkdir|chmod|set|tree|python3?\s+--?V|git\s+(?:config|--version|lfs)"
    r"|ldconfig|export\s|source|unset|nproc|top|ps|test|accelerate\s+env|python3?\s+-m\s+(?:bitsandbytes|xformers\.info|torch\.utils\.collect_env))\b"
    r"|^\[\s|^(?:\w+=[\w.,:/=-]*+(?:\s+|$))+$"
)
_MAGICS = ("%run", "%cp", "%mv", "%rm", "%store", "%bash", "%sx", "%system")


def note_shells(draft: Draft) -> None:
    """Leave out shell lines, with a note on each up to the training that may make what the script needs. Raises Refusal
    (R4) for one that uses what the script makes."""
    text = "\n".join(statement.source for statement in draft.program.statements)
    made = [written_path(call) for place in draft.kept(MAIN) for call in calls(draft.program.statements[place].node)]
    written = {str(path.value) for path in made if isinstance(path, ast.Constant)}
    for shell in draft.notebook.shells:
        command, head = shell.text.replace(REMOVED, ""), shell.text.partition("\n")[0][:80]
        if shell.cell > draft.program.statements[draft.train].cell:
            continue
        if match := re.match(r"[%!]?cd\s+(\S+)\s*$", shell.text):
            draft.notes.append(f"cell {shell.cell}: paths are relative to {match[1]}; start the script there")
        elif shell.kind == "file":
            name = (shell.writes or "").rsplit("/", 1)[-1].removesuffix(".py")
            if name and re.search(rf"\b{re.escape(name)}\b", text):
                draft.notes.append(f"cell {shell.cell}: it writes {shell.writes}, which the script needs: run it first")
        elif shell.kind == "magic" and not shell.text.startswith(_MAGICS):
            continue
        elif not INSTALLS.search(command) and not (leaves_nothing(command) and ">" not in command):
            if used := written & set(re.findall(r"[\w./-]+", command)):
                reason = f"the script writes {min(used)}, which `{head}` then uses; write the command in Python"
                raise Refusal("R4", reason, shell.cell)
            draft.notes.append(
                f"cell {shell.cell}: `{head}` is left out: if the training needs what it makes, run it first, in the"
                " script's folder"
            )


def leaves_nothing(command: str) -> bool:
    """Whether a command, and each that follows it, makes no file of rows: it shows something or sets a variable."""
    commands = _commands(command)
    return bool(commands) and all(INSTALLS.match(one) or NO_TRACE.match(one) for one in commands)


def _commands(line: str) -> list[str]:
    """The commands of a line: `a && b; c`. Separators in quotes are none."""
    hidden = re.sub(r"\\.|\"(?:[^\"\\]|\\.)*+\"|'[^']*'", lambda quoted: "_" * len(quoted[0]), line)
    ends = [(0, 0), *(found.span() for found in re.finditer(r"&&|\|\||;|&(?!>)", hidden)), (len(line), len(line))]
    parts = [line[one[1] : two[0]].strip() for one, two in pairwise(ends)]
    return [part for part in parts if part]
