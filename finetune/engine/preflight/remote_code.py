"""Models that ship Python code or pickled weights, which run only with permission."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

from finetune.config import Config
from finetune.engine.preflight.model_files import local_file
from finetune.errors import UserError
from finetune.runtime.files import read_json, read_text


def check_code(config: Config) -> None:
    """A model without a class in transformers that ships Python code needs permission to run it."""
    if config.model.trust_remote_code:
        return
    try:
        file = local_file(config, "config.json")
        content = read_json(file) if file else {}
    except (OSError, ValueError):  # loading reports the error better
        return
    content = content if isinstance(content, dict) else {}
    code = content.get("auto_map")
    kind = str(content.get("model_type", ""))
    package = importlib.util.find_spec("transformers")
    models = Path(package.origin or "").parent / "models" if package else None
    if isinstance(code, dict) and code and models and not (kind and (models / kind.replace("-", "_")).is_dir()):
        raise _needs_code(str(config.model.model_name_or_path), "config.json", code)


def _needs_code(name: str, file: str, code: object) -> UserError:
    given = code.values() if isinstance(code, dict) else [code]
    texts = [text for item in given for text in (item if isinstance(item, list) else [item]) if text]
    modules = ", ".join(sorted({str(text) for text in texts})[:3])
    return UserError(
        f"model.model_name_or_path is {name}, whose {file} asks to run Python code that ships with the model"
        + (f" ({modules})" if modules else "")
        + ". Read that code, then set model.trust_remote_code: true, or use a model that transformers knows."
    )


def explain_refused_code(name: str, what: str, error: Exception) -> None:
    """Raise a UserError if loading failed because the model's files contain code; ignore other errors.

    Args:
        what: "model" or "tokenizer".
    """
    text = str(error)
    if "trust_remote_code" in text:
        files = ("tokenizer_config.json", "config.json") if what == "tokenizer" else ("config.json",)
        for file in files:
            path = Path(name) / file
            content = read_text(path, errors="replace") if path.is_file() else ""
            if "auto_map" in content:
                raise _needs_code(name, file, json.loads(content).get("auto_map")) from None
        file = "custom_generate" if (Path(name) / "custom_generate").is_dir() else files[0]
        raise _needs_code(name, file, "") from None
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text or "Weights only load failed" in text:
        files = sorted(path.name for path in Path(name).glob("*.bin")) if Path(name).is_dir() else []
        raise UserError(
            f"model.model_name_or_path is {name}, whose {', '.join(files[:3]) or 'pickled weights'} cannot be read as"
            " plain weights: loading pickled Python objects could run code, so it was refused. Use the model's"
            f" safetensors files (`hf download {name} --include '*.safetensors' '*.json'`), or, if you trust the file,"
            " load it with torch elsewhere and save the model with save_pretrained, which writes safetensors."
        ) from None
