import ast
from pathlib import Path


def check(folder: Path, output: str) -> None:
    tree = ast.parse((folder / "no_answer_rows.py").read_text(encoding="utf-8"))
    (talk,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "talk")
    assert "found[0] if len(found) > 0 else ''" in ast.unparse(talk)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "filter"]
