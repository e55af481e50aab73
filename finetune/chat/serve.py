"""The commands that export a trained model and serve it. Nothing is loaded, and nothing is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from finetune.engine.checkpoint.run_artifacts import TrainedModel
from finetune.engine.preflight import model_files
from finetune.runtime import files
from finetune.runtime.types import JsonObject


def commands(found: TrainedModel) -> JsonObject:
    """{vllm, llama.cpp, ask}: the steps of each, as shell commands. A full model needs no export for vLLM."""
    source, name = str(found.given), found.given.resolve().name
    if found.folder != found.given:
        source, name = str(found.folder), f"{found.folder.resolve().parent.name}-{found.folder.name}"
    beside = found.given.resolve().parent if found.folder == found.given else found.folder.resolve().parent.parent
    merged, gguf = beside / f"{name}-merged", beside / f"{name}-gguf"
    length = _context(found)
    served = Path(source) if found.adapter is None else merged
    limit = [] if length is None else ["--max-model-len", str(length)]
    vllm = [["vllm", "serve", str(served), "--served-model-name", name, "--port", "8000", *limit]]
    if found.adapter is not None:
        vllm = [["finetune", "export", source, "--to", "merged", "--out", str(merged)], *vllm]
    size = [] if length is None else ["--ctx-size", str(length)]
    llama = [["finetune", "export", source, "--to", "gguf", "--out", str(gguf)]]
    raw = found.templated is False  # as in training
    llama_server = shlex.join(["llama-server", "--alias", name, *([] if raw else ["--jinja"]), "--port", "8000", *size])
    asked = {"prompt": "Hello"} if raw else {"messages": [{"role": "user", "content": "Hello"}]}
    path = "completions" if raw else "chat/completions"
    body = json.dumps({"model": name, **asked})
    ask = ["curl", f"http://localhost:8000/v1/{path}", "-H", "Content-Type: application/json", "-d", body]
    return {
        "run": source,
        "vllm": [shlex.join(step) for step in vllm],
        # The name of the file depends on the type that it is exported in.
        "llama.cpp": [*(shlex.join(step) for step in llama), f"{llama_server} --model {shlex.quote(str(gguf))}/*.gguf"],
        "ask": shlex.join(ask),
    }


def text(found: JsonObject) -> str:
    """The commands as a script with headings."""
    parts = []
    for tool in ("vllm", "llama.cpp"):
        parts += [f"# {tool}", *found[tool], ""]
    return "\n".join([*parts, "# then, in another terminal", found["ask"]])


def _context(found: TrainedModel) -> int | None:
    """Tokens of the model's context, from config.json of the model or of a local base; None if it is not known here."""
    folder = found.folder if found.adapter is None else Path(found.base or "")
    try:
        shape = files.read_json(folder / model_files.SHAPES[0])
    except (OSError, ValueError):
        return None
    inner = shape.get("text_config", shape) if isinstance(shape, dict) else {}
    length = inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    return length if type(length) is int and length > 0 else None
