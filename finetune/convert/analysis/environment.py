"""Environment variables that a notebook sets, and those that the launcher sets instead."""

from __future__ import annotations

import ast

from finetune.convert.analysis.names import lone_call

NO_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "the launcher chooses the devices",
    "CUDA_DEVICE_ORDER": "the launcher chooses the devices",
    "HF_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    "HUGGING_FACE_HUB_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    "HUGGINGFACE_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    **dict.fromkeys("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split(), "the launcher sets it"),
    "PYTHONHASHSEED": "Python reads it only at startup",
}
MODEL_FLAGS = ("is_parallelizable", "model_parallel")  # for one model on several devices, which ranks do not use


def is_token(name: str) -> bool:
    """Whether it is the variable of a token that `hf auth login` keeps as well."""
    return NO_ENVIRONMENT.get(name, "").startswith("tokens")


def of_launcher(node: ast.stmt) -> bool:
    """Whether it sets or removes a variable that the launcher sets for each rank."""
    name = environment_key(node)
    if (call := lone_call(node)) is not None and call.args:
        if ast.unparse(call.func) in ("os.environ.pop", "environ.pop", "os.unsetenv"):
            name = str(getattr(call.args[0], "value", ""))
    return NO_ENVIRONMENT.get(name or "", "").startswith("the launcher")


def environment_key(node: ast.stmt) -> str | None:
    """The variable that `os.environ["X"] = ...` or `os.environ.setdefault("X", ...)` sets."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        if ast.unparse(target.value) in ("os.environ", "environ") and isinstance(target.slice, ast.Constant):
            return str(target.slice.value)
    if (call := lone_call(node)) is not None:
        if ast.unparse(call.func) in ("os.environ.setdefault", "os.putenv", "environ.setdefault") and call.args:
            return str(getattr(call.args[0], "value", "?"))
        if ast.unparse(call.func) == "os.environ.update":
            return ast.unparse(call.args[0]) if call.args else "?"
    return None
