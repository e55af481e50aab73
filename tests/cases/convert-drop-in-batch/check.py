import ast
from pathlib import Path


def check(folder: Path, output: str) -> None:
    text = (folder / "converted" / "drop_in_batch.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {
        name: {item.arg: ast.unparse(item.value) for item in calls[name].keywords}
        for name in ("SFTConfig", "SFTTrainer")
    }
    assert given["SFTTrainer"]["global_batch_size"] == "8"  # 2 x 4
    assert given["SFTConfig"]["per_device_train_batch_size"] == "2"
    assert given["SFTConfig"]["gradient_accumulation_steps"] == "4"
    assert "on any number of GPUs" in (ast.get_docstring(tree) or "").split("global_batch_size")[1]
