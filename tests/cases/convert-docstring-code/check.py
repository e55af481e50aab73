import ast
from pathlib import Path


def check(folder: Path, output: str) -> None:
    tree = ast.parse((folder / "converted" / "nb.py").read_text(encoding="utf-8"))
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert "os.system" not in called
    assert ast.get_docstring(tree)
    # at the top level: docstring, imports, environment, functions, the call of main()
    others = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    assert [ast.unparse(node).split("\n")[0] for node in others] == ["if __name__ == '__main__':"]
    assert not list(folder.rglob("MARK*"))
