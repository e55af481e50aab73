"""Read a notebook into Python statements: .ipynb (formats 3 and 4) and .py exports of Jupyter, jupytext and Colab.

Shell lines and magics are removed line by line, without IPython or nbformat: a cell that parses as Python is unchanged;
in any other, a line that starts with `!` or `%` becomes `pass` at the same indentation.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune.convert.knowledge import named
from finetune.convert.source import in_strings, visible_comments
from finetune.errors import UserError
from finetune.redact import redact
from finetune.runtime import files
from finetune.runtime.types import JsonObject

MAX_BYTES = 64 * 2**20  # notebooks, with their images, stay below 20 MB
_MAX_HEADING = 1_000  # characters of a heading that are read


class Refusal(Exception):
    """The notebook is valid but cannot be converted. `code` is one of R0 to R6 or E-..., `cell` counts from 0."""

    def __init__(self, code: str, reason: str, cell: int | None = None):
        super().__init__(code, reason, cell)
        self.code, self.reason, self.cell = code, reason, cell


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A line or cell that is not Python: `text` without its `!`; for `%%file` cells, `writes` is the file name."""

    cell: int
    line: int
    text: str
    kind: str  # shell, magic, file
    writes: str | None = None


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement at the top level of a cell. `node` is parsed from `source`, so its positions refer to `source`."""

    id: int
    cell: int
    line: int  # in its cell, from 1
    node: ast.stmt
    source: str
    heading: str = ""  # the nearest above: of Markdown, or the first line of a text between statements

    @property
    def is_dead(self) -> bool:
        """Whether it does not run: `if False:`."""
        return is_dead(self.node)

    @property
    def head(self) -> str:
        """The first line that is not a comment, for reports."""
        lines = self.source.strip().splitlines()
        return next((line.strip() for line in lines if not line.lstrip().startswith("#")), lines[0])

    def reading(self, source: str) -> Statement:
        """The same place with this code, one statement."""
        return replace(self, source=source, node=ast.parse(source).body[0])


@dataclass(kw_only=True)
class Notebook:
    """A parsed notebook. `install` holds the indices of cells that install packages."""

    name: str
    sha256: str
    statements: list[Statement] = field(default_factory=list)
    shells: list[Shell] = field(default_factory=list)
    install: set[int] = field(default_factory=set)
    unparsed: list[tuple[int, str, str]] = field(default_factory=list)  # cell, parser error, text
    text: str = ""  # all code, unchanged

    @property
    def live(self) -> list[Statement]:
        return [statement for statement in self.statements if not statement.is_dead]


def read(path: Path) -> Notebook:
    """Read a notebook.

    Raises:
        UserError: the file is missing, not a regular file, empty, too large, binary, not JSON, or has no code.
        Refusal: another language (E-LANGUAGE) or an unknown magic (E-MAGIC).
    """
    raw = _bytes(path)
    text = _decode(path, raw)
    cells = _python_cells(text) if path.suffix == ".py" else _notebook_cells(path, text)
    if not any(kind == "code" and source.strip() for kind, source in cells):
        raise UserError(f"no code in {path}. Give a notebook that trains a model.")
    notebook = Notebook(name=path.name, sha256=hashlib.sha256(raw).hexdigest())
    heading = ""
    for index, (kind, source) in enumerate(cells):
        source = source.replace("\r\n", "\n").replace("\r", "\n")
        if kind == "markdown":
            heading = _heading(source) or heading
        elif kind == "code":
            notebook.text += source + "\n"
            heading = _read_cell(notebook, index, source, heading)
    _close_flags(notebook)
    return notebook


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"expected a notebook, got a folder: {path}. To try all notebooks in it, use --check {path}.")
    if not path.exists():
        raise UserError(f"{path} does not exist. Give the path of a notebook (.ipynb, or .py exported from one).")
    if path.suffix not in (".ipynb", ".py"):
        raise UserError(f"unsupported file type: {path}. Give a notebook (.ipynb, or .py exported from one).")
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise UserError(f"the file name is not UTF-8: {path}. Rename the notebook.") from None
    try:
        size, content = path.stat().st_size, files.read_bytes(path, at_most=MAX_BYTES + 1)
        if len(content) <= MAX_BYTES:
            return content
        raise UserError(
            f"{path} is too large: {size / 2**20:.0f} MiB, limit {MAX_BYTES // 2**20}. Clear its outputs and try again."
        )
    except files.NotRegular as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Give a notebook (.ipynb, or .py).") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Check the path and its permissions.") from None


def _decode(path: Path, raw: bytes) -> str:
    if not raw.strip():
        raise UserError(f"{path} is empty. Give a notebook with code.")
    if b"\0" in raw:
        raise UserError(f"{path} is binary, not text. Give a notebook saved by Jupyter or Colab.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}). Save it again from Jupyter or Colab.") from None


# --- cells ------------------------------------------------------------------------------------------------------------


def _notebook_cells(path: Path, text: str) -> list[tuple[str, str]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Give a notebook saved by Jupyter or Colab.") from None
    cells = data.get("cells") if isinstance(data, dict) else None
    if cells is None and isinstance(data, dict) and isinstance(data.get("worksheets"), list):  # format 3
        sheets = [sheet.get("cells", []) for sheet in data["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for one in sheets for cell in one] if all(isinstance(one, list) for one in sheets) else None
    if not isinstance(cells, list):
        raise UserError(f"{path} is not a notebook: it has no list `cells`. Give a notebook saved by Jupyter or Colab.")
    _check_language(data)
    found = []
    for index, cell in enumerate(cells):
        if not isinstance(cell, dict):
            raise UserError(f"{path} is damaged: cell {index} is not an object. Save it again from Jupyter or Colab.")
        source = cell.get("source", cell.get("input", ""))
        source = "".join(map(str, source)) if isinstance(source, list) else str(source)
        found.append((str(cell.get("cell_type", "code")), source))
    return found


def _check_language(data: JsonObject) -> None:
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        names = metadata.get(section)
        language = names.get(key) if isinstance(names, dict) else None
        if isinstance(language, str) and language and not language.lower().startswith(("python", "ipython")):
            raise Refusal("E-LANGUAGE", f"the notebook is in {language}; only Python is supported")


_PERCENT = re.compile(r"^# ?%%(.*)$|^# In\[[\d ]*\]:\s*$", re.MULTILINE)


def _python_cells(text: str) -> list[tuple[str, str]]:
    """Cells of a .py export, split at `# %%` or `# In[n]:`. Without these marks the whole file is one cell."""
    text = text.replace("\r\n", "\n")
    # Colab exports magics as comments under this line: drop it and leave them commented out.
    text = re.sub(r"^# Commented out IPython magic.*\n", "", text, flags=re.MULTILINE)
    inside = _starts_in_strings(text)
    marks = [mark for mark in _PERCENT.finditer(text) if mark.start() not in inside]
    if not marks:
        return [("code", text)]
    cells = [("code", text[: marks[0].start()])]
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        body = text[mark.end() : following.start() if following else len(text)]
        title = (mark.group(1) or "").strip()
        if title.startswith("%"):  # `# %%bash`: a cell magic that the export commented out
            cells.append(("raw", body))
        elif "[markdown]" in title or "[raw]" in title:
            cells.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE)))
        else:
            cells.append(("code", body))
    return cells


def _starts_in_strings(text: str) -> set[int]:
    """Positions of the lines that begin inside a string in triple quotes."""
    found: set[int] = set()
    position, quotes = 0, None
    for line in text.split("\n"):
        if quotes is not None:
            found.add(position)
        quotes = _open_quotes(line, quotes)
        position += len(line) + 1
    return found


_MARKUP = re.compile(r"<[^>]{0,999}>|!?\[([^\]]{0,999})\]\([^)]{0,999}\)|[*_`#]")
_DATA_URI = re.compile(r"\bdata:[\w/.+;=-]{1,99},[\w+/=%-]*")  # an image in the text


def _heading(markdown: str) -> str:
    """The first heading of a text, without markup and secrets. Nothing but lines of headings is searched."""
    for line in map(str.strip, markdown.splitlines()):
        if match := re.match(r"#{1,6}\s+(?=\S)", line):
            line = _DATA_URI.sub("", line[match.end() :])
            if len(line) > _MAX_HEADING:  # a secret that is cut in two would not be found
                line = line[:_MAX_HEADING].rpartition(" ")[0]
            title = _MARKUP.sub(r"\1", redact(line, "[removed]")).strip()
            if title:
                return title[:100]
    return ""


# --- one cell ---------------------------------------------------------------------------------------------------------

_HARMLESS_MAGICS = frozenset(
    "matplotlib load_ext reload_ext autoreload config pip conda uv pwd ls who whos time timeit cd env set_env capture"
    " tensorboard pylab precision xmode colors mkdir reset reset_selective history memit mprun lprun wandb pprint pdb"
    " debug ll ldir lsmagic cat less more man rmdir unload_ext psource pinfo pdoc".split()
)
_COMMAND_MAGICS = frozenset("run writefile store rm cp mv bash sx system".split())
# IPython runs `pip install x` and `ls folder` as magics if the line is not Python and no variable has that name.
_AUTOMAGIC = re.compile(
    r"(pip3?|conda|mamba|uv|ls|ll|cd|mkdir|rmdir|rm|cp|mv|cat|less|more|man|env|time|timeit|run|load_ext|matplotlib)"
    r"\s+(?!(in|is|if|and|or|not|else|for|as)\b)[\w./~$%*\"'-]"
)
_DISPLAY_CELLS = frozenset("html javascript js markdown latex svg".split())
_SHELL_CELLS = frozenset("bash sh script system cmd !".split())
_TRANSPARENT_CELLS = frozenset("capture time timeit prun memit".split())
_INSTALL = re.compile(
    r"\b(?:uv\s+)?(?:pip3?|conda|mamba|apt|apt-get)\s+(?:-\S+\s+)*(?:install|update|upgrade)\b|\buv pip\b"
)


def _read_cell(notebook: Notebook, index: int, source: str, heading: str) -> str:
    """Add the statements of a cell. Returns the heading that its end is under."""
    if not _parses(source):
        source = _without_magics(notebook, index, _without_indent(source))
    if any(shell.cell == index and _INSTALL.search(shell.text) for shell in notebook.shells):
        notebook.install.add(index)
    try:
        tree = ast.parse(source)
        ast.unparse(tree)  # fails for an integer of 5,000 digits or 500 nested operators
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) if isinstance(error, SyntaxError) else f"an expression or a number is too long ({error})"
        if isinstance(error, UnicodeError):
            why = "it has half of a character (a lone surrogate), which no file can hold. Delete it"
        notebook.unparsed.append((index, why, source))
        return heading
    return _add_all(notebook, index, 0, source, heading)


def _add_all(notebook: Notebook, cell: int, above: int, source: str, heading: str) -> str:
    """Add the statements of a text. `above`: the lines above it in its cell. Returns the heading that its end is
    under."""
    lines, body = source.split("\n"), ast.parse(source).body
    ends = 0
    for node, following in zip(body, [*body[1:], None], strict=False):
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
        last = node.end_lineno or node.lineno
        if first == ends or (following is not None and following.lineno == last):  # several on one line
            text = ast.unparse(node)
            parsed = ast.parse(text).body[0]
        else:
            text, parsed = _with_comments(lines, node, first, ends)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text_lines = node.value.value.strip().splitlines()
            heading = _heading(node.value.value) or (_heading(f"# {text_lines[0]}") if text_lines else heading)
        heading = _add(notebook, cell, above + first, text, parsed, heading)
        ends = last
    return heading


def _with_comments(lines: list[str], node: ast.stmt, first: int, ends: int) -> tuple[str, ast.stmt]:
    """The text of a statement with the comments directly above and after it, and the node parsed from that text."""
    above = first - 1
    while (
        above > ends
        and lines[above - 1].lstrip().startswith("#")
        and not lines[above - 1].lstrip().startswith(("# @", "#@"))
    ):
        above -= 1
    text = visible_comments("\n".join(lines[above : node.end_lineno or node.lineno]))
    (parsed,) = ast.parse(text).body
    return text, parsed


def _add(notebook: Notebook, cell: int, line: int, source: str, node: ast.stmt, heading: str) -> str:
    """Add a statement. The body of `if True:` or of the `__main__` guard is added statement by statement. Returns the
    heading that its end is under."""
    if isinstance(node, ast.Pass):
        return heading
    if (shell := _ipython_call(node) or _process(node)) is not None:
        _shell(notebook, cell, line, shell)
        return heading
    if isinstance(node, ast.If) and (
        _constant(node.test) is True or ast.unparse(node.test) == "__name__ == '__main__'"
    ):
        within, width = in_strings(node), node.body[0].col_offset
        numbered = enumerate(source.split("\n"), 1)
        shifted = [line if n in within else line[:width].lstrip() + line[width:] for n, line in numbered]
        text = "\n".join(shifted[node.lineno :])
        if not _parses(text) or ast.dump(ast.parse(text)) != ast.dump(ast.Module(node.body, [])):
            text = "\n".join(map(ast.unparse, node.body))
        return _add_all(notebook, cell, line, text, heading)
    notebook.statements.append(
        Statement(id=len(notebook.statements), cell=cell, line=line, node=node, source=source, heading=heading)
    )
    return heading


def _constant(test: ast.expr) -> bool | None:
    """The value of a constant condition: True, False, or None if it is only known at run time."""
    try:
        return bool(ast.literal_eval(test))
    except (ValueError, TypeError, SyntaxError):
        return None


def _close_flags(notebook: Notebook) -> None:
    """`if flag:` without an else is `if False:` where the one assignment of the flag, in a cell before, is False."""
    stores: dict[str, int] = {}
    for statement in notebook.statements:
        for node in ast.walk(statement.node):
            names = node.names if isinstance(node, ast.Global | ast.Nonlocal) else []
            names = [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else names
            for name in names:
                stores[name] = stores.get(name, 0) + 1
    flags: dict[str, bool] = {}
    for statement in notebook.statements:
        node = statement.node
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            name = node.targets[0].id
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool) and stores[name] == 1:
                flags[name] = node.value.value
        elif isinstance(node, ast.If) and not node.orelse and flags.get(ast.unparse(node.test)) is False:
            node.test = ast.copy_location(ast.Constant(False), node.test)


def is_dead(node: ast.stmt) -> bool:
    """`if False:` and `if 0:` without an else."""
    return isinstance(node, ast.If | ast.While) and _constant(node.test) is False and not node.orelse


def _ipython_call(node: ast.stmt) -> str | None:
    """The shell line or magic in `get_ipython().system("...")`, as nbconvert exports it."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and "get_ipython()" in ast.unparse(call)
    ):
        return None
    values = [item.value for item in call.args if isinstance(item, ast.Constant)]
    text = " ".join(str(value) for value in values)
    return text if call.func.attr in ("system", "getoutput") else f"%{text}"


# `subprocess.run` is also `sp.run`, or `run` if it is imported by name.
_PROCESSES = frozenset(
    start + name.removeprefix("subprocess.") if name.startswith("subprocess.") else name
    for name in named("process")
    for start in ("subprocess.", "sp.", "")
)


def process_command(call: ast.Call) -> str | None:
    """The command given to `os.system` or `subprocess.run`, with `?` for words that are not literals.

    None if the call starts no process, or for several commands or redirected output."""
    if ast.unparse(call.func) not in _PROCESSES or not call.args:
        return None
    given = call.args[0]
    parts = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
    text = " ".join(_word(part) for part in parts)
    return None if re.search(r"[;&|>`\n]|\$\(", text) else text


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_word(part) for part in node.values)
    return "python" if ast.unparse(node) == "sys.executable" else "?"


def _process(node: ast.stmt) -> str | None:
    """Treat `subprocess.run(["wget", address])` as the shell line `!wget address`."""
    call = node.value if isinstance(node, ast.Expr) else None
    text = process_command(call) if isinstance(call, ast.Call) else None
    named = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and text and not text.startswith("?")
    return text if text and (named or _INSTALL.search(text)) else None


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_indent(source: str) -> str:
    """The cell without the indentation of its first line, as IPython reads it."""
    indent = re.match(r"(?:[ \t]*\n)*([ \t]*)", source)
    return re.sub(f"^{indent[1]}", "", source, flags=re.MULTILINE) if indent and indent[1] else source


def _without_magics(notebook: Notebook, index: int, source: str) -> str:
    """The cell's Python, with `pass` in place of each shell line or magic."""
    lines = source.split("\n")
    first = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
    if first is not None and lines[first].lstrip().startswith("%%"):
        rest = _cell_magic(notebook, index, lines, first)
        if rest is None:
            return ""
        lines = rest
    kept: list[str] = []
    quotes: str | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        stripped = line.lstrip()
        indent = line[: len(line) - len(stripped)]
        automagic = _AUTOMAGIC.match(stripped) and not _parses(stripped)
        continues = bool(kept) and kept[-1].rstrip().endswith("\\")
        if quotes is None and (stripped.startswith(("!", "%")) or automagic) and not continues:
            text, number, blanks = _joined(lines, number)
            text = f"%{text}" if automagic else text
            kept.append(indent + (_line_magic(notebook, index, number, text) or "pass"))
            kept += [""] * blanks
        elif (
            quotes is None
            and (match := re.match(r"(\s*+[\w.\[\]'\", ]+?=\s*)([!%])(.*)$", line))
            and not _parses(stripped)
        ):
            _shell(notebook, index, number + 1, match.group(3))
            kept.append(f"{match.group(1)}__shell__({match.group(3).strip()!r})")
        elif quotes is None and re.match(r"\s*(\?{1,2}[\w.]+|[\w.]+\?{1,2})\s*$", line):
            kept.append(indent + "pass")
        else:
            kept.append(line)
            quotes = _open_quotes(line, quotes)
        number += 1
    return "\n".join(kept)


def _joined(lines: list[str], number: int) -> tuple[str, int, int]:
    """A line joined with its `\\` continuations; the number of its last line; how many lines were joined."""
    parts, start = [lines[number].strip()], number
    while parts[-1].endswith("\\") and number + 1 < len(lines):
        parts[-1] = parts[-1][:-1]
        number += 1
        parts.append(lines[number].strip())
    return " ".join(parts), number, number - start


# What is left of a string; an escaped quote does not end it, in a raw string neither.
_TO_QUOTES = {mark: re.compile(rf"(?:\\.|(?!{mark})[^\\])*+{mark}") for mark in ('"""', "'''")}


def _open_quotes(line: str, quotes: str | None) -> str | None:
    """Which triple quotes are open after this line."""
    position = 0
    while position < len(line):
        if quotes is not None:
            end = _TO_QUOTES[quotes].match(line, position)
            if end is None:
                return quotes
            position, quotes = end.end(), None
        elif line[position] == "#":
            return None
        elif line.startswith(('"""', "'''"), position):
            quotes = line[position : position + 3]
            position += 3
        elif line[position] in "\"'":
            end = re.compile(rf"(?:\\.|[^\\{line[position]}])*{line[position]}").match(line, position + 1)
            position = end.end() if end else len(line)
        else:
            position += 1
    return quotes


def _cell_magic(notebook: Notebook, index: int, lines: list[str], first: int) -> list[str] | None:
    """The lines of a cell without its cell magic; None if the cell is not Python."""
    words = lines[first].strip()[2:].split()
    name, body = (words[0] if words else ""), "\n".join(lines[first + 1 :])
    if name in _TRANSPARENT_CELLS:
        return [*lines[:first], "", *lines[first + 1 :]]
    if name in ("writefile", "file"):
        target = words[-1] if len(words) > 1 else ""
        notebook.shells.append(
            Shell(cell=index, line=first + 1, text=lines[first].strip() + "\n" + body, kind="file", writes=target)
        )
    elif name in _SHELL_CELLS:
        for number, line in enumerate(lines[first + 1 :], first + 2):
            if line.strip() and not line.lstrip().startswith("#"):
                _shell(notebook, index, number, line.strip())
    elif name not in _DISPLAY_CELLS:
        raise Refusal("E-MAGIC", f"unknown cell magic: %%{name}", index)
    return None


def _line_magic(notebook: Notebook, index: int, number: int, text: str) -> str | None:
    """Python that replaces a `!` or `%` line, or None."""
    if text.startswith("!"):
        _shell(notebook, index, number + 1, text.lstrip("!").strip())
        return None
    words = text.lstrip("%").split(None, 1)
    name, rest = (words[0] if words else ""), (words[1] if len(words) > 1 else "")
    if name in ("env", "set_env") and (match := re.match(r"(\w+)\s*[= ]\s*(.*)$", rest)):
        value = re.sub(r"(?<!\s)\s+#.*$", "", match.group(2)).strip()
        return f"os.environ[{match.group(1)!r}] = {value!r}"
    if name in ("time", "timeit") and rest and _parses(rest):
        return rest
    if name not in _HARMLESS_MAGICS | _COMMAND_MAGICS and not name.startswith(("pip-", "conda-")):
        raise Refusal("E-MAGIC", f"unknown magic: %{name}", index)
    _shell(notebook, index, number + 1, f"%{name} {rest}".strip())
    return None


def _shell(notebook: Notebook, cell: int, line: int, text: str) -> None:
    kind = "magic" if text.startswith("%") else "shell"
    notebook.shells.append(Shell(cell=cell, line=line, text=text, kind=kind))
