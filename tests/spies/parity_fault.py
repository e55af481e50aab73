"""A run of `parity_run` whose loss, trainer, process group or device is broken in the way that $FAULT says."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from finetune.engine import invariants
from finetune.parity import run as parity_run
from tests.spies import give_trainer_to


def break_loss(kind: str, trainer: Any) -> None:
    """The two mistakes of guides for several GPUs."""
    healthy = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if kind == "drops the count":
            return healthy(model, inputs, return_outputs=return_outputs)
        loss = healthy(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        return loss * trainer.args.world_size if kind == "scales by W" else loss

    trainer.compute_loss = compute_loss


def main() -> int:
    """As `parity_run.main`."""
    kind = os.environ["FAULT"]

    def spoil(trainer: Any) -> None:
        break_loss(kind, trainer)
        if kind == "other trainer" and os.environ.get("RANK") == "1":
            type(trainer).__bases__ = (type("Fallback", type(trainer).__bases__, {}),)

    if kind == "one device":  # as two ranks of a GPU host would say it
        healthy = invariants.own_facts
        place = {"current_device": "cuda:0", "parameter_devices": ["cuda:0"]}
        invariants.own_facts = lambda trainer: replace(healthy(trainer), **place)
    if kind == "not sharded":
        from finetune.engine.sharding import shard

        shard.fully_shard = lambda module, **_: module
    if kind == "embedding left out":
        from finetune.engine.sharding import shard

        healthy_units = shard.fully_shard
        shard.fully_shard = lambda module, **how: (
            healthy_units(module, **how, ignored_params=set(module.get_input_embeddings().parameters()))
            if hasattr(module, "get_input_embeddings")
            else healthy_units(module, **how)
        )
    if kind == "early group":
        from accelerate import PartialState

        PartialState(cpu=True)
    give_trainer_to(spoil)
    return parity_run.main()


if __name__ == "__main__":
    sys.exit(main())
