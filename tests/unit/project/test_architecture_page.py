"""ARCHITECTURE.md and the docstrings name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.config.schema import KEYS
from tests.helpers import ROOT, parsed

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", PAGE)))


def is_defined(name: str) -> bool:
    """Whether `a.b.C.d` is a folder or file of the package, or is defined in the file that a part of it names."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = (ROOT / "finetune").joinpath(*parts[:end])
        if place.with_suffix(".py").is_file():
            tree: ast.AST = parsed(place.with_suffix(".py"))
            break
        if place.is_dir():
            return end == len(parts)
    else:
        return False
    for part in parts[end:]:
        found = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        if not found:
            return False
        tree = found[0]
    return True


def test_the_page_has_names_and_the_check_can_fail() -> None:
    assert len(NAMES) > 30
    assert is_defined("data.plan.Plan") and not is_defined("data.plan.Plans") and not is_defined("data.no.Plan")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists(name: str) -> None:
    assert is_defined(name)


def test_each_floor_of_the_table_is_a_floor() -> None:
    floors = re.findall(r"\*\*(\w+)\*\*", PAGE.partition("| floor |")[2].partition("\n\n")[0])
    assert floors == ["advise", "train", "drop_in", "run", "measure", "engine", "data", "runtime", "config", "patches"]
    places = [ROOT / "finetune" / name for name in floors[:-1]] + [ROOT / "patches"]
    assert all(place.exists() or place.with_suffix(".py").exists() for place in places)


# --- docstrings -------------------------------------------------------------------------------------------------------

# Names in docstrings that no code of this package has: of other libraries, of files of weights, and examples.
ELSEWHERE = set(
    """
    OffloadActivations _root_post_backward_final_callback _torch_varlen_beats_segments add_hparams
    compute_bucket_assignment_by_size entropy fix_4bit_weight_quant_state_from_module no_sync
    num_floating_point_operations posix_fadvise streamer use_experts_implementation
    Trainer.compute_loss Dataset.map experts.gate_up_proj mlp.experts.gate_up_proj shared_experts.up_proj
    Authorization X_SERVICE_KEY YOUR_HF_TOKEN answer_text_v2 auto disown eval_NAME_loss nohup none shelvesToUnstash_
    text_key user_question
    """.split()
)
TREES = {
    path.relative_to(ROOT): parsed(path)
    for folder in ("finetune", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            yield node.body[0].value  # type: ignore[attr-defined, misc]


def words(tree: ast.AST) -> set[str]:
    """Every identifier of a file's code, and every word of its strings, docstrings excepted."""
    prose = {id(node) for node in docstrings(tree)}
    text = " ".join(
        value
        for node in ast.walk(tree)
        if id(node) not in prose
        for _, found in ast.iter_fields(node)
        for value in (found if isinstance(found, list) else [found])
        if isinstance(value, str)
    )
    return set(re.findall(r"\w+", text))


def definitions(tree: ast.Module) -> set[str]:
    """Names of a file's functions, classes and methods, and of its global variables."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return found | {node.id for one in assigned for node in ast.walk(one) if isinstance(node, ast.Name)}


WORDS = {path: words(tree) for path, tree in TREES.items()}
EVERY_WORD = set().union(*WORDS.values())
DEFINED = {path: definitions(tree) for path, tree in TREES.items()}
PLACES = {part.removesuffix(".py") for path in TREES for part in path.parts}
HERE = PLACES.union(*DEFINED.values())
SINGLE = HERE | set(dir(builtins)) | set(keyword.kwlist) | {key.split(".")[1] for key in KEYS}
LIBRARIES = {
    name.partition(".")[0]
    for tree in TREES.values()
    for node in ast.walk(tree)
    for name in (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [node.module or ""]
        if isinstance(node, ast.ImportFrom)
        else []
    )
} - {"finetune", "patches"}


def is_stale(name: str, path: Path) -> bool:
    """Whether a name in the docstring of a file looks like one of this package and is none.

    A single word must be in the file's code, or be defined in the package, or, if it has an underscore or a capital, be
    in any code of it. The parts of a dotted name must be in the code of this file or of the one that its first part
    names; what begins with a library is the library's.
    """
    first, *rest = name.split(".")
    if (
        name in KEYS
        or name in ELSEWHERE
        or first in LIBRARIES
        or (rest and (first == "benchmarks" or rest[-1] in ("py", "json")))
    ):
        return False
    if not rest:
        return name not in SINGLE | WORDS[path] and not (re.search("[A-Z_]", name) and name in EVERY_WORD)
    if first not in HERE | WORDS[path]:
        return any(part in HERE for part in rest)
    owners = [one for one in TREES if first in DEFINED[one] or first in str(one.with_suffix("")).split("/")]
    return not PLACES.union(*(WORDS[one] for one in [path, *owners])).issuperset(rest)


def test_the_docstrings_name_what_exists() -> None:
    stale = [
        f"{path}: `{name}`"
        for path, tree in TREES.items()
        if "convert" not in path.parts  # its docstrings quote the code of notebooks
        for text in docstrings(tree)
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`", str(text.value))
        if is_stale(name, path)
    ]
    assert not stale, "\n".join([*stale, "Name what exists. Names of other libraries go to ELSEWHERE."])


@pytest.mark.parametrize(
    "name", ["managed_by", "plan.Plans", "callbacks.RunLogger.results", "fingerprinted", "Nowhere"]
)
def test_a_name_of_nothing_is_found(name: str) -> None:
    assert is_stale(name, Path("finetune/data/plan.py"))
    assert not is_stale("plan.Plan", Path("finetune/data/collate.py"))
    assert not is_stale("trl.SFTTrainer", Path("finetune/data/plan.py"))
