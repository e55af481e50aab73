"""What a sharded model needs on each GPU, computed from the headers of its files. Nothing is loaded.

    weights, gradients and optimizer state / GPUs  +  two layers, gathered  +  what is outside the layers, gathered

Two layers, because the next one is gathered while one computes. In full fine-tuning their gradients are in float32
while they are reduced. Activations are not included: they depend on rows and checkpointing, as on one GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune.config import Config
from finetune.config.rules import sharding

_LAYER = re.compile(r"(.*?\.\d+)\.")  # the layer that a tensor belongs to: `model.layers.3`


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of a model: all, of its largest layer, and outside of layers."""

    total: int
    layer: int
    outside: int


def sizes(folder: Path) -> Sizes | None:
    """The sizes of a model in safetensors files; None if there are none, or no layers in them."""
    from safetensors import safe_open

    layers: dict[str, int] = {}
    outside = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a mapping
                count = math.prod(tensors.get_slice(key).get_shape())
                if (layer := _LAYER.match(key)) is None:
                    outside += count
                else:
                    layers[layer[1]] = layers.get(layer[1], 0) + count
    if not layers:
        return None
    return Sizes(total=sum(layers.values()) + outside, layer=max(layers.values()), outside=outside)


def bytes_per_gpu(found: Sizes, world_size: int, *, element_bytes: int, full: bool) -> int:
    """Memory of a rank without activations, in bytes.

    Args:
        element_bytes: of one weight, as it is trained.
        full: all weights are trained, with Adam's two states in their own type. An adapter's are left out.
    """
    split = found.total * element_bytes * (4 if full else 1)
    gathered = (2 * found.layer + found.outside) * element_bytes
    reduced = 4 * max(found.layer, found.outside) if full else 0
    return math.ceil(split / world_size) + gathered + reduced


def smallest_world(
    found: Sizes, memory: float, world_sizes: Iterable[int], *, element_bytes: int, full: bool
) -> tuple[int, int] | None:
    """The first of `world_sizes` at which a rank needs at most `memory` bytes, and what it needs; None if none."""
    for world in world_sizes:
        needed = bytes_per_gpu(found, world, element_bytes=element_bytes, full=full)
        if world > 1 and needed <= memory:
            return world, needed
    return None


def why_not(config: Config) -> str | None:
    """Why this configuration cannot be sharded; None if it can."""
    from dataclasses import replace

    asked = replace(config, training=replace(config.training, strategy="shard"))
    return next((text for _, text in sharding(asked, config.given)), None)
