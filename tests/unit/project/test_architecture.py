"""The house has floors: a file imports from its own floor and those below, and no file imports itself in a circle.

Imports inside functions count like any other.
"""

from __future__ import annotations

import ast
import functools
import itertools
from pathlib import Path

import pytest

from tests.helpers import ROOT, parsed

PACKAGE = ROOT / "finetune"
# From the ground up. A name is a file or a folder of the package.
FLOORS = (
    {"errors", "text", "redact"},
    {"config"},
    {"runtime"},
    {"data"},
    {"engine"},
    {"measure"},
    {"dryrun", "bench", "doctor", "prepare", "export", "chat", "convert", "review", "dashboard", "init"},
    {"run"},
    {"train", "drop_in", "parity"},
    {"advise"},
    {"cli", "completion"},
)
MODULES = {
    ".".join(("finetune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported_names(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_modules(name: str) -> set[str]:
    """Modules of the package that a module imports: the longest part of each name that is a file."""
    found = set()
    for dotted in imported_names(MODULES[name]):
        parts = dotted.split(".")
        known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        module = next((one for one in known if one in MODULES), None)
        found |= {module} if module not in (None, name) else set()
    return found  # type: ignore[return-value]


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    return {name: imported_modules(name) for name in MODULES}


def floor_of(module: str) -> int:
    unit = module.split(".")[1]
    for number, units in enumerate(FLOORS):
        if unit in units:
            return number
    raise AssertionError(f"finetune.{unit} is on no floor: add it to FLOORS and to the README's tree")


def test_no_file_imports_from_a_floor_above() -> None:
    # The front doors, which open onto everything.
    public = ("finetune", "finetune.__main__")
    wrong = [
        f"{name} imports {imported}"
        for name, imports in graph().items()
        if name not in public
        for imported in sorted(imports - {"finetune"})
        if floor_of(imported) > floor_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    assert not cycles(graph())


def test_the_search_finds_a_planted_cycle() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which reaches all others of its set, by transitive closure."""
    reached = {name: set(imports) for name, imports in graph.items()}
    for middle, name in itertools.product(graph, graph):
        if middle in reached[name]:
            reached[name] |= reached[middle]
    circular = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(one) for one in circular if one]


def test_commands_are_imported_by_their_entry_points_alone() -> None:
    """They are a library for nobody: the story of a run is `run.story`."""
    allowed = {"finetune.cli", "finetune.parity.run"}
    assert {name for name, imports in graph().items() if "finetune.train" in imports} <= allowed


def test_the_package_needs_neither_tests_nor_benchmarks() -> None:
    for path in MODULES.values():
        assert not {"tests", "benchmarks"} & {name.split(".")[0] for name in imported_names(path)}, path


def test_patches_never_import_the_package() -> None:
    for path in (ROOT / "patches").glob("*.py"):
        assert not any(name.split(".")[0] == "finetune" for name in imported_names(path)), path


def test_only_one_file_reads_the_launchers_variables() -> None:
    for path in MODULES.values():
        if path == PACKAGE / "runtime" / "ranks" / "distributed.py":
            continue
        strings = {
            node.value
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}, path


# Who opens files other than through runtime/files, which neither waits for a FIFO nor follows a link out of the folder.
OPENS_ITSELF = {
    "the module that all others use": ["runtime.files"],
    "the user names the file and may give a pipe: --config <(...)": ["config.load"],
    "what is installed: this package, TRL, accelerate": [
        "config.sft_fields",
        "convert.script.decide:_trl_source",
        "doctor",
        "review.board.plugin",
        "review.page",
        "runtime.ranks.distributed",
    ],
    "/proc, /sys and /dev": [
        "data.templates.render:_limited_memory",
        "runtime.ranks.activity",
        "runtime.command:_lost",
        "runtime.command:keep_printing",
        "runtime.machine.cpu_threads",
        "runtime.machine.hardware:free_host_bytes",
        "runtime.ranks.interrupt",
        "runtime.ranks.machines",
    ],
    "a process without this package, after its parent has checked the folders": ["export.check"],
    "its own output, cache or temporary folder": [
        *("bench", "dryrun", "parity", "measure.measurements", "measure.slices", "measure.strategy"),
        *(
            "data.store",
            "engine.demo",
            "export.verify",
            "init.command",
            "runtime.machine.flash",
        ),
    ],
    "an object's own method `open`": [
        *("data.remote", "data.prepare:_build"),
        *("data.sources:_open", "data.sources:rows", "data.sources:_arrow_source"),
    ],
}


def opened_directly(module: str, tree: ast.AST, within: str = "") -> set[str]:
    """`module:function` of each call that opens, reads or writes a file without runtime/files."""
    names = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes"}
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            called = node.func
            direct = isinstance(called, ast.Name) and called.id == "open"
            method = isinstance(called, ast.Attribute) and called.attr in names and ast.unparse(called.value) != "files"
            found |= {f"{module}:{within}"} if direct or method else set()
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else within
        found |= opened_directly(module, node, inside)
    return found


def test_files_of_strangers_are_opened_in_one_way() -> None:
    allowed = {f"finetune.{name}" for names in OPENS_ITSELF.values() for name in names}
    used: set[str] = set()
    wrong = []
    for module, path in MODULES.items():
        for place in opened_directly(module, parsed(path)):
            match = {one for one in allowed if place == one or place.startswith((f"{one}:", f"{one}."))}
            used |= match
            wrong += [] if match else [place]
    assert not wrong, f"use finetune.runtime.files: {wrong}"
    assert used == allowed, f"remove from OPENS_ITSELF: {allowed - used}"


def test_the_search_finds_each_way_to_open_a_file() -> None:
    for call in ("open(p)", "p.open('w')", "os.open(p, 0)", "os.fdopen(1)", "p.read_text()", "q(p).write_bytes(b'')"):
        tree = ast.parse(f"def f():\n    with a(): {call}")
        assert opened_directly("m", tree) == {"m:f"}, call
    assert not opened_directly("m", ast.parse("files.read_text(p)\nfiles.write_bytes(p, b'')\nread_text(p)"))


def test_no_private_name_is_imported_from_another_module() -> None:
    private = [
        f"{module}: {name}"
        for module, path in MODULES.items()
        for name in imported_names(path)
        if name.startswith("finetune.") and name.rpartition(".")[2].startswith("_") and not name.endswith("__")
    ]
    assert not private, private


# Folders of inputs, not of modules: a file per case.
INPUTS = (ROOT / "tests" / "notebooks", ROOT / "tests" / "cases")


@pytest.mark.parametrize("top", ["finetune", "tests"])
def test_a_folder_shows_what_fits_on_a_screen(top: str) -> None:
    """14 modules in the package itself, 18 in any other folder; `__init__.py` does not count."""
    crowded = []
    for folder in (ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())):
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if count > (14 if folder == PACKAGE else 18) and not any(folder.is_relative_to(one) for one in INPUTS):
            crowded.append(f"{folder.relative_to(ROOT)}: {count} modules")
    assert not crowded, crowded


def test_rooms_of_a_folder_do_not_import_each_other() -> None:
    """A room is a file or a folder. What two rooms need of each other belongs in one of them, or in a third."""
    folders = {name.rpartition(".")[0] for name in MODULES} - {""}
    found = {frozenset(circle) for folder in sorted(folders) for circle in cycles(rooms(graph(), folder))}
    assert not found, [sorted(one) for one in found]


def rooms(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The graph of a folder's rooms, by dotted name."""

    def room(module: str) -> str:
        return f"{folder}.{module.removeprefix(folder + '.').split('.')[0]}"

    inside = {name for name in graph if name.startswith(f"{folder}.")}
    found: dict[str, set[str]] = {room(name): set() for name in inside}
    for name in inside:
        found[room(name)] |= {room(one) for one in graph[name] & inside} - {room(name)}
    return found


def test_the_search_finds_rooms_that_import_each_other() -> None:
    graph = {"p.a.x": {"p.b"}, "p.b": {"p.c.y"}, "p.c.y": {"p.a.z"}, "p.a.z": set(), "p.d": {"p.a.x"}}
    assert not cycles(graph)
    assert cycles(rooms(graph, "p")) == [{"p.a", "p.b", "p.c"}]
    assert rooms(graph, "p.a") == {"p.a.x": set(), "p.a.z": set()}


# Tests that have the name of no module, with the reason.
OF_NO_MODULE = {
    "a reference, or a corpus, that several modules are held against": [
        "data/test_rows_as_trl.py",
        "data/templates/test_masks_as_trl.py",
        "drop_in/test_trainer_against_trl.py",
        "test_redact_as_a_scanner.py",
    ],
    "one feature, through all modules that take part in it": [
        "convert/script/test_code.py",
        "data/templates/test_trained_messages.py",
        "data/test_tokenized_rows.py",
        "engine/model/test_families.py",
        "engine/model/test_untrusted_models.py",
        "engine/monitoring/test_progress.py",
        "engine/training/test_gradient_accumulation.py",
        "export/test_every_door.py",
        "run/test_golden.py",
        "test_bad_input.py",
        "test_user_errors.py",
    ],
    "two patches of one function": ["patches/test_unsloth_fused_loss.py"],
}


def test_a_test_has_the_name_of_its_module() -> None:
    """tests/unit mirrors the package: a module's tests are found by its name."""
    unit = ROOT / "tests" / "unit"
    listed = {name for names in OF_NO_MODULE.values() for name in names}
    nameless = []
    for path in sorted(unit.rglob("test_*.py")):
        inner = path.relative_to(unit)
        top = inner.parts[0] if inner.parts[0] in ("patches", "benchmarks") else "finetune"
        folder = ROOT / inner.parent if top != "finetune" else PACKAGE / inner.parent
        name = path.stem.removeprefix("test_")
        known = (folder / f"{name}.py").is_file() or (folder / name).is_dir() or name == folder.name
        if inner.parts[0] != "project" and not known and str(inner) not in listed:
            nameless.append(str(inner))
    assert not nameless, f"name them after a module, or add them to OF_NO_MODULE with the reason: {nameless}"


def test_no_function_is_longer_than_100_lines() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 100
    ]
    assert not long, "\n".join(long)


def test_no_module_shadows_the_standard_library() -> None:
    import sys

    shadows = [name for name in MODULES if name.rpartition(".")[2] in sys.stdlib_module_names - {"__main__"}]
    assert not [name for name in shadows if name.count(".") == 1], shadows
