"""Imports point one way, as the layout says."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Each layer may import from itself and from those above it in this list.
LAYERS = (
    {"errors", "record", "keeping", "config", "distributed", "interrupt", "children", "verb", "invariants", "hooks"}
    | {"options", "disk", "files", "launcher", "runlock", "restart", "redact"},
    {"hardware", "nccl", "statistics", "predict", "rules"},
    {
        "bootstrap",
        "data",
        "model",
        "model_files",
        "adapter_targets",
        "optimizers",
        "metrics",
        "communication",
        "samples",
        "job",
        "measurements",
    },
    {"trainer", "callbacks", "scoring", "resume"},
    {
        "train",
        "script",
        "strategy",
        "demo",
        "dryrun",
        "trial",
        "advise",
        "prepare",
        "parity",
        "parity_run",
        "doctor",
        "bench",
        "convert",
    },
    {"cli", "__main__"},
)


def layer_of(module: str) -> int:
    for level, names in enumerate(LAYERS):
        if module in names:
            return level
    raise AssertionError(f"finetune.{module} stands in no layer: add it to LAYERS and to the README's tree")


def imports(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_modules(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("finetune.")}
    return {name for name in names if not name.startswith("__")}


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        module = path.relative_to(ROOT / "finetune").parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        for imported in own_modules(path):
            if layer_of(imported) > layer_of(module):
                wrong.append(f"{path.relative_to(ROOT)} imports finetune.{imported} from a later layer")
    assert not wrong, "\n".join(wrong)


def test_patches_never_import_the_package() -> None:
    for path in (ROOT / "patches").glob("*.py"):
        assert not any(name.split(".")[0] == "finetune" for name in imports(path)), path


def test_only_one_file_reads_the_launchers_variables() -> None:
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        if path.name == "distributed.py":
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}, path


def test_every_module_stands_in_a_layer() -> None:
    for path in (ROOT / "finetune").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            layer_of(path.stem)
