"""What a sharded run needs, measured on one device with a few of the model's layers.

Layers are alike, so time and memory are a line over their number: two slices of the model give its slope (a layer) and
its intercept (embedding, head, loss and what a step costs anyway). The whole model never has to fit.

A rank then computes all layers, holds its part of the weights, gradients and optimizer state, and gathers one unit
after the other (FSDP2: Zhao et al. 2023, arXiv 2304.11277):

    forward    all-gather of each layer, in the type of the weights
    backward   the same again, then reduce-scatter of its gradients in float32

A ring takes half of an all-reduce's time for either of them (NCCL-tests, PERFORMANCE.md), and the next layer is
gathered while one computes. Not modeled: ranks that share a CPU or its memory.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from finetune.config import Config
from finetune.engine.optimizer import state_bytes
from finetune.measure import held, measurements
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve, Prediction, Work
from finetune.runtime.files import read_json, write_json
from finetune.runtime.types import JsonObject

VARIABLE = "FINETUNE_SLICE"  # set in a dry run that measures a slice
GRADIENT_BYTES = 4  # gradients are reduced in float32
_PER_LAYER = ("layer_types", "mlp_layer_types")  # lists in a config with an entry per layer


def slice_layers(layers: int, dense: int = 0) -> tuple[int, int] | None:
    """Layers of the two slices of a model; None if it has too few to be worth cutting.

    Args:
        dense: layers at the beginning that are not like the others: both slices have them all, so that the slices
            differ by layers of which the rest of the model consists.
    """
    few, more = (max(2, dense + 1), max(2, dense + 1) + 2) if layers > 4 else (1, 2)
    return (few, more) if more < layers and few > dense else None


def layer_count(folder: Path) -> int | None:
    """The number of layers in a model's config.json; None if it does not say."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    found = config.get("num_hidden_layers") if isinstance(config, dict) else None
    return found if isinstance(found, int) else None


def write_slice(source: Path, layers: int, folder: Path) -> Path:
    """A model with only the first `layers` layers of `source`: its config, and links to its files. What the files have
    beyond is not read by transformers."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = read_json(source / "config.json")
    config["num_hidden_layers"] = layers
    for name in _PER_LAYER:
        if isinstance(config.get(name), list):
            config[name] = config[name][:layers]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A job measured in slices.

    whole:              the job on one device, extrapolated to all layers; its peak memory is that of an imaginary
                        device on which everything fits
    layers:             number of layers
    sizes, stored:      parameters of the model, and how they are stored
    activation_bytes:   of all layers, on the longest rows
    fixed_bytes:        activations outside the layers, the loss among them, or what a layer's backward pass needs for
                        a moment if that is more
    adapter_bytes:      of an adapter's weights, gradients and optimizer state, of all layers; 0 without one
    layer_bytes:        activations of one layer if nothing is recomputed; None if not known
    reduces_once:       whether accumulated gradients are reduced in a step's last pass only
    """

    whole: Measurement
    layers: int
    sizes: held.Sizes
    stored: held.Storage
    activation_bytes: float
    fixed_bytes: float
    adapter_bytes: float
    layer_bytes: float | None
    reduces_once: bool

    def to_dict(self) -> JsonObject:
        """The measurement as JSON."""
        return {"kind": "sharded", **asdict(self), "whole": self.whole.to_dict()}

    @classmethod
    def from_dict(cls, content: JsonObject) -> Sharded:
        """The inverse of `to_dict`. Raises TypeError or KeyError for the file of another version."""
        names = ("layers", "activation_bytes", "fixed_bytes", "adapter_bytes", "layer_bytes", "reduces_once")
        return cls(
            whole=Measurement.from_dict(content["whole"]),
            sizes=held.Sizes(**content["sizes"]),
            stored=held.Storage(**content["stored"]),
            **{k: content[k] for k in names},
        )

    def peak_bytes(self, world_size: int) -> float:
        """Peak memory of one of `world_size` ranks: what it holds throughout a step, its accumulated gradients
        included, and the most that a moment needs in addition. The moments are the loss, with the activations of all
        layers; the backward pass of the last layer, with what it recomputes and gradients of about the same size; and
        the reduction of the root, when there are no activations left."""
        own = held.rank_bytes(self.sizes, world_size, self.stored)
        kept = own.kept + self.adapter_bytes / world_size
        accumulates = self.whole.work(world_size, 0.0).accumulation > 1
        if self.stored.full and self.reduces_once and accumulates:  # each rank keeps its own gradients, unsharded
            kept += GRADIENT_BYTES * self.sizes.total
        in_a_layer = self.fixed_bytes if self.layer_bytes is None else min(self.fixed_bytes, 2 * self.layer_bytes)
        return kept + max(
            own.gathered + (self.activation_bytes + self.fixed_bytes),
            own.reducing_layer + (self.activation_bytes + in_a_layer),
            own.reducing_root,
        )


# --- from slices to the whole -----------------------------------------------------------------------------------------


def extrapolate(few: Measurement, more: Measurement, slices: tuple[int, int], layers: int, model: str) -> Measurement:
    """The measurement of all layers from those of two slices.

    Args:
        slices: layers of `few` and of `more`.
        model: what the configuration calls the whole model.
    """
    share = (layers - slices[0]) / (slices[1] - slices[0])

    def line(one: float, other: float) -> float:
        return max(one + share * (other - one), 0.0)

    a, b = few.to_dict(), more.to_dict()
    lines = ("seconds_per_micro_batch", "seconds_per_token", "optimizer_seconds", "peak_memory_bytes")
    exact = ("parameters", "active_parameters", "trainable_parameters")
    added = Counter(more.gradient_bytes) - Counter(few.gradient_bytes)
    repeats = (layers - slices[1]) / (slices[1] - slices[0])
    gradients = [*more.gradient_bytes, *(size for size, count in added.items() for _ in range(round(count * repeats)))]
    facts = more.facts | {
        "model.model_name_or_path": model,
        "the size of the model": [
            round(line(x, y))
            for x, y in zip(few.facts["the size of the model"], more.facts["the size of the model"], strict=True)
        ],
    }
    return replace(
        more,
        facts=facts,
        **{name: line(a[name], b[name]) for name in lines},
        **{name: round(line(a[name], b[name])) for name in exact},
        # Times of single micro-batches vary in proportion to their length.
        residual_seconds=[one * layers / slices[1] for one in more.residual_seconds],
        compute_seconds={
            world: line(few.compute_seconds.get(world, seconds), seconds)
            for world, seconds in more.compute_seconds.items()
        },
        gradient_bytes=gradients,
    )


def from_slices(
    few: Measurement,
    more: Measurement,
    saved: Sequence[int],
    all_saved: Sequence[int | None],
    slices: tuple[int, int],
    layers: int,
    config: Config,
    sizes: held.Sizes,
    reduces_once: bool,
) -> Sharded:
    """The job in shards, from its slices.

    Args:
        saved: bytes that the forward pass of each slice keeps for the backward pass (`probe.saved_bytes`). Their
            difference is the activations of layers; what a peak has beyond them and beyond weights, gradients and
            optimizer state is outside the layers: the loss, and what is allocated for a moment.
        all_saved: the same without checkpointing (`probe.saved_bytes_without_checkpointing`).
    """
    stored = held.storage(config)
    layer = max(saved[1] - saved[0], 0) / (slices[1] - slices[0])
    all_known = [one for one in all_saved if one is not None]
    of_a_layer = max(all_known[1] - all_known[0], 0) / (slices[1] - slices[0]) if len(all_known) == 2 else None
    weights = sizes.of_first(slices[1])
    kept = stored.kept(weights - sizes.outside, sizes.outside)
    if stored.gathered is not None:  # on one device autocast also keeps all weights in that type
        kept += stored.gathered * weights
    whole = extrapolate(few, more, slices, layers, str(config.model.model_name_or_path))
    # Adapters are trained in float32, on any base.
    state = state_bytes.state_bytes_per_weight(config.training.optim, 4)
    adapter = 0.0 if stored.full else state_bytes.held_per_weight(4, state)
    kept += more.trainable_parameters * adapter
    return Sharded(
        whole=whole,
        layers=layers,
        sizes=sizes,
        stored=stored,
        activation_bytes=layers * layer,
        fixed_bytes=max(more.peak_memory_bytes - kept - slices[1] * layer, 0.0),
        adapter_bytes=whole.trainable_parameters * adapter,
        layer_bytes=of_a_layer,
        reduces_once=reduces_once,
    )


# --- prediction -------------------------------------------------------------------------------------------------------


def predict(found: Sharded, work: Work, world_size: int, curve: Curve | None) -> Prediction:
    """A sharded run at one world size.

    Args:
        work: one rank's share of the computation.
        curve: of an all-reduce at that world size; None predicts the step without communication.
    """
    exposed = 0.0 if curve is None or world_size == 1 else exposed_seconds(found, work, curve)
    optimizer = work.optimizer_seconds / world_size  # each rank updates its part
    step = work.compute_seconds + work.data_seconds + exposed + optimizer + work.other_seconds
    return Prediction(
        world_size=world_size,
        step_seconds=step,
        exposed_seconds=exposed,
        tokens_per_second=work.tokens / step if step > 0 else 0.0,
        peak_memory_bytes=found.peak_bytes(world_size),
        steps=work.steps,
        start_up_seconds=work.start_up_seconds,
    )


def exposed_seconds(found: Sharded, work: Work, curve: Curve) -> float:
    """Seconds of a step in which a rank only communicates.

    The first all-gather of a pass and the last reduce-scatter have nothing to hide behind; the others take longer than
    a layer's computation, or cost nothing. What is outside the layers is gathered once per micro-batch and stays.
    """
    layers, sizes, stored = found.layers, found.sizes, found.stored
    in_layers = sizes.layer if stored.full else found.whole.trainable_parameters / layers

    def half(size: float) -> float:
        return curve.seconds(size) / 2

    gather, outside = half(sizes.layer * stored.layer), half(sizes.outside * stored.outside)
    reduce = half(in_layers * GRADIENT_BYTES)
    reduce_outside = half(sizes.outside * GRADIENT_BYTES) if stored.full else 0.0
    micro = work.compute_seconds / work.accumulation / layers  # of a layer, forward and backward
    forward, backward = micro * (1 - work.backward_share), micro * work.backward_share
    exposed = 0.0
    for place in range(work.accumulation):
        reduces = not found.reduces_once or place == work.accumulation - 1
        back = gather + (reduce if reduces else 0.0)
        last = (reduce + reduce_outside) if reduces else 0.0
        exposed += outside + gather + (layers - 1) * max(gather - forward, 0.0)
        exposed += gather + (layers - 1) * max(back - backward, 0.0) + last
    return exposed


# --- the cache --------------------------------------------------------------------------------------------------------


def save(found: Sharded) -> Path:
    """Write to the cache, replacing an older one of the same job."""
    path = measurements.folder() / f"shard-{measurements.digest(found.whole.facts)}.json"
    write_json(path, found.to_dict())
    return path


def find(facts: JsonObject) -> tuple[Sharded | None, str]:
    """The measurement of this job in slices and its file; or None and the reason."""
    return measurements.look_up("shard", facts, Sharded.from_dict, lambda one: one.whole.facts)


def is_slice() -> bool:
    """Whether this process is a dry run of a slice."""
    return VARIABLE in os.environ
