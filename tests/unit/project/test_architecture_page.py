"""ARCHITECTURE.md and the docstrings name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
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


def test_each_name_exists() -> None:
    assert not [name for name in NAMES if not is_defined(name)]


def test_each_floor_of_the_table_is_a_floor() -> None:
    floors = re.findall(r"\*\*(\w+)\*\*", PAGE.partition("| floor |")[2].partition("\n\n")[0])
    assert floors == ["advise", "train", "drop_in", "run", "measure", "engine", "data", "runtime", "config", "patches"]
    places = [ROOT / "finetune" / name for name in floors[:-1]] + [ROOT / "patches"]
    assert all(place.exists() or place.with_suffix(".py").exists() for place in places)


# --- docstrings -------------------------------------------------------------------------------------------------------

# Names in docstrings that no code of this package has: of other libraries, of files of weights, and examples.
ELSEWHERE = set(
    """
    OffloadActivations _root_post_backward_final_callback _torch_varlen_beats_segments
    compute_bucket_assignment_by_size entropy fix_4bit_weight_quant_state_from_module no_sync
    num_floating_point_operations posix_fadvise streamer use_experts_implementation
    Trainer.compute_loss Dataset.map experts.gate_up_proj mlp.experts.gate_up_proj shared_experts.up_proj
    Authorization X_SERVICE_KEY YOUR_HF_TOKEN answer_text_v2 auto disown eval_NAME_loss nohup none shelvesToUnstash_
    text_key user_question
    """.split()
)
PATHS = [path for folder in ("finetune", "patches") for path in sorted((ROOT / folder).rglob("*.py"))]


class Source:
    """What a file of the package names and defines.

    docstrings:  the nodes of all of them
    defined:     its functions, classes and methods, and what is assigned to its globals
    imported:    the first parts of the modules that it imports
    words:       those of its code and its strings, docstrings and comments excepted
    parts:       of its path, without the suffix
    """

    def __init__(self, path: Path) -> None:
        tree = parsed(path)
        self.parts = path.relative_to(ROOT).with_suffix("").parts
        self.docstrings: list[ast.Constant] = []
        self.defined: set[str] = set()
        self.imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                self.docstrings.append(node.body[0].value)  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.defined.add(node.name)
            elif isinstance(node, ast.Import):
                self.imported |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imported.add((node.module or "").partition(".")[0])
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self.defined |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in self.docstrings:
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
        self.words = set(re.findall(r"\w+", re.sub(r"(^|\s)#.*", "", "\n".join(lines))))


class Package:
    """The names of all files together."""

    def __init__(self) -> None:
        self.sources = {path: Source(path) for path in PATHS}
        sources = self.sources.values()
        self.every_word = set().union(*(one.words for one in sources))
        self.places = set().union(*(one.parts for one in sources))
        self.here = self.places.union(*(one.defined for one in sources))
        self.single = self.here | set(dir(builtins)) | set(keyword.kwlist) | {key.split(".")[1] for key in KEYS}
        self.libraries = set().union(*(one.imported for one in sources)) - {"finetune", "patches"}


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


def is_stale(name: str, path: Path, package: Package) -> bool:
    """Whether a name in the docstring of a file looks like one of this package and is none.

    A single word must be in the file's code, or be defined in the package, or, if it has an underscore or a capital, be
    in any code of it. The parts of a dotted name must be in the code of this file or of the one that its first part
    names; what begins with a library is the library's.
    """
    first, *rest = name.split(".")
    own = package.sources[path].words
    if name in KEYS or name in ELSEWHERE or first in package.libraries:
        return False
    if not rest:
        known = name in package.single or name in own
        return not known and not (re.search("[A-Z_]", name) and name in package.every_word)
    if first == "benchmarks" or rest[-1] in ("py", "json"):
        return False
    if first not in package.here and first not in own:
        return any(part in package.here for part in rest)
    owners = [one.words for one in package.sources.values() if first in one.defined or first in one.parts]
    return not package.places.union(own, *owners).issuperset(rest)


def test_the_docstrings_name_what_exists(package: Package) -> None:
    stale = [
        f"{path.relative_to(ROOT)}: `{name}`"
        for path, source in package.sources.items()
        if "convert" not in source.parts  # its docstrings quote the code of notebooks
        for text in source.docstrings
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`", str(text.value))
        if is_stale(name, path, package)
    ]
    assert not stale, "\n".join([*stale, "Name what exists. Names of other libraries go to ELSEWHERE."])


def test_a_name_of_nothing_is_found(package: Package) -> None:
    plan = ROOT / "finetune" / "data" / "plan.py"
    for name in ("managed_by", "plan.Plans", "callbacks.RunLogger.results", "fingerprinted", "Nowhere"):
        assert is_stale(name, plan, package), name
    for name in ("plan.Plan", "Plan.digest", "trl.SFTTrainer", "RankView"):
        assert not is_stale(name, plan, package), name
