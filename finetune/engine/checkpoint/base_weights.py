"""What identifies a base model: its configuration and a digest of samples of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.config import Config
from finetune.engine.preflight import adapter_files
from finetune.runtime import files
from finetune.runtime.types import JsonObject

# Keys of a model's config.json that do not affect what the model computes.
_NOT_SHAPE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "unsloth_version")


def base_model(config: Config) -> JsonObject:
    """{"model config": its config.json, "base weights": their digest}; a value is None if its file is not on this
    machine.

    Full fine-tuning has no base weights: all weights are in the checkpoint.
    """
    folder = adapter_files.base_folder(config)
    if folder is None:
        found: JsonObject = {"model config": None, "base weights": None}
    else:
        found = base_model_files(folder, weights=not config.model.full_finetuning)
    return {"model config": found["model config"]} if config.model.full_finetuning else found


def base_model_files(folder: Path, *, weights: bool = True) -> JsonObject:
    """{"model config": its config.json, "base weights": their digest} of a model folder; None for what cannot be read,
    or is not asked for."""
    try:
        shape = files.read_json(folder / "config.json")
    except (OSError, ValueError):
        shape = None
    if isinstance(shape, dict):
        shape = {name: value for name, value in shape.items() if name not in _NOT_SHAPE}
    found: JsonObject = {"model config": files.to_json_types(shape)}
    try:
        found["base weights"] = weights_digest(folder) if weights else None
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        found["base weights"] = None  # unreadable: loading the model reports it better
    return found


SAMPLE_BYTES = 1 << 15


def weights_digest(folder: Path) -> str | None:
    """Digest of samples of a model's weights; None if the folder does not hold all of them.

    For each safetensors tensor it covers the name, type, shape and three samples of 32 KiB: the first, middle and last
    bytes. It detects other weights, further training, merging, quantization, and added, removed or replaced tensors,
    and does not depend on how tensors are split into files. It misses an edit that lies entirely between the samples.
    Weights in other formats have none.
    """
    paths = [folder / name for name in files.safetensors_names(folder) or ()]
    paths = paths or sorted(folder.glob("*.safetensors"))
    if not paths or not all(path.is_file() for path in paths):
        return None
    pieces: list[list[object]] = []
    for path in paths:
        pieces += _sampled_tensors(path)
    return files.checksum_of_json(sorted(pieces))


def _sampled_tensors(path: Path) -> Iterator[list[object]]:
    """[name, type, shape, checksum of the samples] of each tensor in a safetensors file."""
    import xxhash

    with files.open_regular(path) as file:
        header, data = files.safetensors_header(file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            digest = xxhash.xxh3_128()
            for start in (begin, (begin + end) // 2, max(end - SAMPLE_BYTES, begin)):
                file.seek(data + start)
                digest.update(file.read(min(SAMPLE_BYTES, end - start)))
            yield [name, tensor["dtype"], tensor["shape"], digest.hexdigest()]
