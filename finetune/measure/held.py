"""What of a device training may fill, and what it holds besides activations: predicted from the shapes in a model's
files, without loading anything, or from a model that is loaded.

Of a model that is sharded, a rank holds

    weights, gradients and optimizer state / GPUs  +  two layers, gathered  +  what is outside the layers, gathered

Two layers, because the next one is gathered while one computes. In full fine-tuning each unit's gradients are copied
into float32 to be reduced: a layer's after its backward pass, those of what is outside the layers at the very end, when
no activations are left (`_root_post_backward_final_callback`, torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
Activations are not included: they depend on rows and checkpointing, as on one GPU (`probe`). Importing this does not
import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.engine.optimizer import state_bytes
from finetune.runtime import files

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer

MEMORY_MARGIN = 0.8  # usable share of a GPU's memory


# --- what fits --------------------------------------------------------------------------------------------------------


def limit_of(device_bytes: float, outside_bytes: float = 0.0) -> float:
    """What a job may hold of a device: the rest is for fragmentation.

    Args:
        outside_bytes: in use by others.
    """
    return MEMORY_MARGIN * device_bytes - outside_bytes


def fits(needed_bytes: float, limit_bytes: float | None, *, margin: bool = True) -> bool:
    """Whether so much fits a device; anything fits one without a limit.

    Args:
        limit_bytes: as `limit_of`.
        margin: whether a part is kept free.
    """
    return limit_bytes is None or needed_bytes <= (limit_bytes if margin else limit_bytes / MEMORY_MARGIN)


class Memory:
    """Memory of this rank's device.

    outside_bytes: in use by the CUDA context and other processes on the same GPU; None for a CPU run
    limit_bytes:   of torch's allocator, available to a job; None for a CPU run, which has no limit
    """

    def __init__(self, device: str) -> None:  # "cuda" or "cpu"
        from finetune.runtime.machine.hardware import memory_outside_torch

        self.outside_bytes: float | None = None
        self.limit_bytes: float | None = None
        if device == "cuda":
            self.outside_bytes, total = memory_outside_torch()
            self.limit_bytes = limit_of(total, self.outside_bytes)

    def reset(self) -> None:
        """Forget the peak; that of a host cannot be reset."""
        from finetune.engine.monitoring import peak_memory

        peak_memory.reset()

    def peak_bytes(self) -> float:
        """Peak memory of this process since the last `reset`."""
        from finetune.engine.monitoring import peak_memory

        return peak_memory.peak_gib() * 2**30


# --- of a loaded model ------------------------------------------------------------------------------------------------


def bytes_not_yet_allocated(trainer: SFTTrainer) -> float:
    """What a rank will hold in training and does not before it: the optimizer's state, and DDP's copy of gradients.
    Nothing once the optimizer has stepped."""
    from finetune.engine.sharding import memory_per_rank
    from finetune.runtime.ranks import distributed

    if trainer.optimizer is not None and trainer.optimizer.state:
        return 0.0
    trained = memory_per_rank.local(one for one in trainer.model.parameters() if one.requires_grad)
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    state = memory_per_rank.predicted_state_bytes(trained, 1, name, trainer.weights)
    views = getattr(trainer.accelerator.ddp_handler, "gradient_as_bucket_view", False)
    by_ddp = distributed.ranks().world_size > 1 and not trainer.sharded
    return state + (sum(one.nbytes for one in trained) if by_ddp and not views else 0)


# --- of a model in files ----------------------------------------------------------------------------------------------

_LAYER = re.compile(r"(.*?\.\d+)\.")  # the layer that a tensor belongs to: `model.layers.3`
# Scales and tables that files of 4-bit weights have next to each weight.
_BESIDE = re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of a model: all, of its largest layer, outside of layers, and in the root unit: those outside but for
    an embedding that is not the head, which is a unit of its own. A mixture of experts may begin with smaller, dense
    layers: their number, and their parameters together."""

    total: int
    layer: int
    outside: int
    root: int
    dense_layers: int = 0
    dense: int = 0

    def of_first(self, layers: int) -> int:
        """Parameters of the first layers, at least all dense ones, with what is outside of layers."""
        return self.dense + (layers - self.dense_layers) * self.layer + self.outside


def read_sizes(folder: Path) -> Sizes | None:
    """The sizes of a model in safetensors files; None if there are none, or no layers in them."""
    layers: dict[str, int] = {}
    outside: list[tuple[int, list[int]]] = []  # numbers and shape of each tensor
    for file in sorted(folder.glob("*.safetensors")):
        for key, (count, shape) in files.tensor_sizes(file).items():
            if _BESIDE.search(key):
                continue
            if (layer := _LAYER.match(key)) is None:
                outside.append((count, shape))
            else:
                layers[layer[1]] = layers.get(layer[1], 0) + count
    if not layers:
        return None
    rest = sum(count for count, _ in outside)
    largest = max(outside, default=(0, []))
    embedding = largest[0] if outside.count(largest) > 1 else 0  # and a head of the same shape
    first = _first_dense_layers(layers)
    return Sizes(
        total=sum(layers.values()) + rest,
        layer=max(layers.values()),
        outside=rest,
        root=rest - embedding,
        dense_layers=len(first),
        dense=sum(first),
    )


def _first_dense_layers(layers: Mapping[str, int]) -> list[int]:
    """The sizes of the layers before the first of the largest; none if these are not a few at the beginning."""
    stack = max(layers, key=lambda name: layers[name]).rpartition(".")[0]
    numbers = {int(name.rpartition(".")[2]): size for name, size in layers.items() if name.rpartition(".")[0] == stack}
    sizes = [numbers[number] for number in sorted(numbers)]
    first = sizes.index(max(sizes))
    return sizes[:first] if first < len(sizes) / 2 else []


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a configuration stores weights: bytes of one in a layer and outside of layers; whether all are trained, and
    then the bytes of an optimizer's state per weight; and the bytes of a weight that is gathered, if it is gathered in
    another type than it is stored in. An adapter is left out."""

    layer: float
    outside: float
    full: bool
    state: float
    gathered: float | None = None

    def kept(self, in_layers: float, outside: float) -> float:
        """Bytes of that many weights, with their gradients and optimizer state."""
        in_a_layer, elsewhere = (
            state_bytes.held_per_weight(each, self.state, trained=self.full) for each in (self.layer, self.outside)
        )
        return in_layers * in_a_layer + outside * elsewhere


def storage(config: Config) -> Storage:
    """Of a GPU that has bfloat16, once `training.master_weights` is decided.

    The scales of 4-bit blocks are 0.127 bits per weight (QLoRA, arXiv 2305.14314).
    """
    model, training = config.model, config.training
    computed = 4 if model.dtype == "float32" else 2
    if model.load_in_4bit:
        return Storage(layer=(4 + 0.127) / 8, outside=computed, full=False, state=0)
    each = 4 if model.full_finetuning and training.master_weights == "float32" else computed
    state = state_bytes.bytes_per_number(training.optim, each, training.master_weights)
    return Storage(
        layer=each,
        outside=each,
        full=model.full_finetuning,
        state=state_bytes.state_bytes_per_weight(training.optim, state),
        gathered=None if computed == each else computed,
    )


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes on one rank of a sharded model, other than activations.

    kept:           its parts of weights, gradients and optimizer state; the others are held beside it
    gathered:       two layers, and what is outside the layers
    reducing_layer: while a layer's gradients are reduced: what is gathered, the gradients of the layer and of the root,
                    and the layer's in float32, whole and this rank's part; the latter also in the weights' type. The
                    layer before has freed its copy
    reducing_root:  at the end of the backward pass, while the root's gradients are reduced: all gradients outside of
                    layers, an untied embedding that is still gathered, and the root's gradients in float32, alike
    """

    kept: int
    gathered: float
    reducing_layer: float
    reducing_root: float


def rank_bytes(found: Sizes, world_size: int, stored: Storage) -> RankBytes:
    """What one of `world_size` ranks holds."""
    layer, outside = (each if stored.gathered is None else stored.gathered for each in (stored.layer, stored.outside))
    gathered = 2 * found.layer * layer + found.outside * outside
    in_layer = in_root = 0.0
    if stored.full:
        parts = [(4 if each == 4 else 4 + each) / world_size for each in (stored.layer, stored.outside)]
        in_layer = found.layer * (layer + 4 + parts[0]) + found.root * outside
        in_root = (2 * found.outside - found.root) * outside + found.root * (4 + parts[1])
    kept = math.ceil(stored.kept(found.total - found.outside, found.outside) / world_size)
    return RankBytes(kept=kept, gathered=gathered, reducing_layer=gathered + in_layer, reducing_root=in_root)
