"""Weights of a model that will be sharded, loaded unit by unit: no rank ever holds more than one unit whole.

The model is built without weights, gets its adapter, and each unit reads its weights just before it is sharded. Where
that is not possible (weights that transformers converts while loading, quantized ones, a script that changes the
model), the ranks of a machine take turns: one at a time loads the whole model on its host and keeps its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from finetune.config import Config
from finetune.engine import multimodal
from finetune.engine.checkpoint.tensor_files import TensorFiles
from finetune.engine.preflight import adapter_files
from finetune.engine.sharding import shard
from finetune.runtime.bootstrap import errors_only
from finetune.runtime.ranks import distributed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def loadable_files(config: Config) -> TensorFiles | None:
    """The model's files, if each unit of it can be loaded by itself; else None."""
    model, folder = config.model, adapter_files.base_folder(config)
    if not shard.is_requested(config) or folder is None:
        return None
    if model.load_in_4bit or model.load_in_8bit or model.trust_remote_code:
        return None
    try:
        stored = TensorFiles(folder, "model")
        with errors_only():
            empty = _on_meta(folder, torch.float32, {})
    except Exception:  # no safetensors, or a model that cannot be built without them: loading it whole reports why
        return None
    kept_in_float32 = [getattr(empty, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict")]
    tensors = _tensors(empty)
    fits = all(key in stored and stored.shape(key) == tuple(one.shape) for key, one in tensors.items())
    return stored if fits and not any(kept_in_float32) else None


def meta_model(config: Config, dtype: torch.dtype, attention: dict[str, str]) -> PreTrainedModel:
    """The model without memory for its weights: each is one number that is seen at all its places. PEFT can add an
    adapter to it as if the weights were there."""
    folder = adapter_files.base_folder(config)
    assert folder is not None
    model, stored = _on_meta(folder, dtype, attention), TensorFiles(folder, "model")
    model.unused_tensors = {*stored.keys()}.difference(model.state_dict())  # type: ignore[assignment]  # to be reported
    made: dict[int, nn.Parameter] = {}
    keys = {id(one): key for key, one in _tensors(model).items()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                made[id(parameter)].file_key = keys[id(parameter)]  # type: ignore[attr-defined]  # read by `fill`
            module._parameters[name] = made[id(parameter)]
    for key, buffer in _tensors(model).items():
        if not isinstance(buffer, nn.Parameter):
            buffer.copy_(stored.read_full(key))
    return model.eval()


def load_unit(module: nn.Module, stored: TensorFiles, device: torch.device) -> None:
    """Load the weights of a meta model's parameters below `module`, on `device`."""
    found: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            key = getattr(parameter, "file_key", None)
            if parameter is None or key is None:
                continue
            if id(parameter) not in found:
                weight = stored.read_full(key).to(device=device, dtype=parameter.dtype).contiguous()
                found[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
            owner._parameters[name] = found[id(parameter)]


def _on_meta(folder: Path, dtype: torch.dtype, attention: dict[str, str]) -> PreTrainedModel:
    """The model with real buffers, and parameters on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    shape = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = multimodal.auto_class(shape).from_config(shape, dtype=dtype, **attention)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters, tied ones once, and the buffers that are saved, by their names in the model's files."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    return found | {name: one for name, one in saved.items() if not isinstance(one, nn.Parameter)}


@contextlib.contextmanager
def one_rank_at_a_time(place: int, turns: int) -> Iterator[None]:
    """Run the block on one rank of each machine at a time.

    Args:
        place: of this rank, from 0.
        turns: of the machine with the most ranks. All ranks wait for the end of each turn.
    """
    for _ in range(place):
        distributed.barrier()
    yield
    for _ in range(turns - place):
        distributed.barrier()
