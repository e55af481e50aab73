"""How much the verification of `finetune convert` sees: every statement of every converted script, left out in turn.

    python benchmarks/convert_mutations.py FOLDER [--json PATH]

FOLDER holds notebooks. Those that convert are converted, in memory; then each single statement of the script
(docstrings aside) is deleted, and V1 to V5 are asked. A deletion that none of them sees is a survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.convert.checks import NotVerified, verify
from finetune.convert.command import steps
from finetune.convert.notebook.read import Refusal, read
from finetune.convert.notebook.secrets import remove_secrets
from finetune.errors import UserError


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """The text of each statement, and the script without it."""
    tree = ast.parse(source)
    places = [
        (path, field, index)
        for path, node in _nodes(tree)
        for field, value in ast.iter_fields(node)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt)
        for index, statement in enumerate(value)
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    for path, field, index in places:
        changed = copy.deepcopy(tree)
        body = getattr(_at(changed, path), field)
        gone = body.pop(index)
        if not body and field == "body":
            body.append(ast.Pass())
        yield ast.unparse(gone).splitlines()[0], ast.unparse(ast.fix_missing_locations(changed)) + "\n"


def _nodes(tree: ast.AST) -> Iterator[tuple[tuple[tuple[str, int], ...], ast.AST]]:
    """Every node that holds statements, with the way to it."""

    def walk(node: ast.AST, path: tuple[tuple[str, int], ...]) -> Iterator[tuple[tuple[tuple[str, int], ...], ast.AST]]:
        yield path, node
        for field, value in ast.iter_fields(node):
            for index, item in enumerate(value if isinstance(value, list) else []):
                if isinstance(item, ast.stmt | ast.ExceptHandler):
                    yield from walk(item, (*path, (field, index)))

    yield from walk(tree, ())


def _at(tree: ast.AST, path: tuple[tuple[str, int], ...]) -> Any:
    for field, index in path:
        tree = getattr(tree, field)[index]
    return tree


def is_seen(check: Callable[[], Any]) -> bool:
    try:
        check()
    except (NotVerified, Refusal):
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only every n-th notebook")
    options = parser.parse_args()
    total, scripts, survivors, start = 0, 0, [], time.perf_counter()
    for path in sorted(options.folder.rglob("*.ipynb"))[:: options.every]:
        try:
            notebook, conversion = steps(path)
        except (Refusal, UserError, NotVerified):
            continue
        scripts += 1
        original = read(path)
        remove_secrets(original)
        for gone, script in mutants(conversion.script):
            total += 1
            mutant = replace(conversion, script=script)
            if not is_seen(functools.partial(verify, notebook, mutant, original)):
                survivors.append({"notebook": path.name, "statement": gone})
    caught = total - len(survivors)
    result = {
        "scripts": scripts,
        "mutants": total,
        "caught": caught,
        "share": round(caught / max(1, total), 4),
        "survivors": survivors,
        "seconds": round(time.perf_counter() - start, 1),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
