"""Each start-up check on facts as ranks would report them: None for a sound run, otherwise what is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from finetune.engine import invariants
from finetune.engine.invariants import CHECKS, Facts, problems
from finetune.engine.sharding.shard import Sharding
from finetune.engine.training.recompute import Recomputation
from finetune.errors import UserError


def facts(rank: int) -> Facts:
    return Facts(
        rank=rank,
        host="one",
        machine="one",
        local_rank=rank,
        parameter_devices=[f"cuda:{rank}"],
        current_device=f"cuda:{rank}",
        trainer_classes=[
            "finetune.engine.training.trainer.SFTTrainer",
            "UnslothSFTTrainer.UnslothSFTTrainer",
            "builtins.object",
        ],
        processes=2,
        timeout_seconds=1800.0,
        finds_unused=False,
        reentrant=True,
        patches=["torch_varlen_gqa"],
        writes=rank == 0,
        divisor="the model",
        averages_tokens=True,
        batch=(2, 3),
        context_parallel=1,
        global_batch_size=12,
        sharding=None,
        changed_weights=(),
    )


SHARDED = Sharding(
    units=3,
    sharded_fraction=1.0,
    local_elements=50,
    whole_matrices=(),
    param_dtypes=("bfloat16",),
    reduce_dtypes=("float32",),
    output_dtype="float32",
)
REDUCED = "sharded_gradients_are_reduced_in_float32"
SOUND = [facts(0), facts(1)]


def failed(ranks: list[Facts]) -> dict[str, str]:
    return {name: why for one in reversed(ranks) for name, why in problems(one, ranks, 1800).items()}


def test_a_sound_run_passes_all() -> None:
    assert not failed(SOUND) and not failed([replace(one, sharding=SHARDED) for one in SOUND])
    other_machine = replace(facts(1), machine="two", current_device="cuda:0", parameter_devices=["cuda:0"])
    assert not failed([facts(0), other_machine])


ONE_GPU = {"current_device": "cuda:0", "parameter_devices": ["cuda:0"]}
FALLBACK = {"trainer_classes": ["finetune.engine.training.trainer.SFTTrainer", "trl.SFTTrainer"]}
DIVISOR = "loss_normalized_globally"
UNUSED = "no_search_for_unused_parameters_under_reentrant_checkpointing"


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        ("one_device_per_rank", ONE_GPU, "ranks 0 and 1 share cuda:0"),
        ("one_device_per_rank", {"parameter_devices": ["cuda:0", "cuda:1"]}, "has weights on cuda:0, cuda:1"),
        ("same_trainer_on_all_ranks", FALLBACK, "rank 1 trains with trl"),
        ("as_many_processes_as_launched", {"processes": 1}, "a world size of 1 on rank 1, and 2 were launched"),
        ("timeout_as_configured", {"timeout_seconds": 600.0}, "a timeout of 600 s"),
        (UNUSED, {"finds_unused": True}, "ddp_find_unused_parameters"),
        ("same_patches_on_all_ranks", {"patches": []}, "rank 1 applied []"),
        ("one_writer", {"writes": True}, "ranks [0, 1] would write"),
        (DIVISOR, {"divisor": "this program"}, "on rank 1 this program divides the loss, on rank 0 the model"),
        (DIVISOR, {"averages_tokens": False}, "average_tokens_across_devices is off on rank 1"),
        ("every_matrix_is_sharded", {"sharding": replace(SHARDED, units=0)}, "rank 1 has sharded no module"),
        ("every_matrix_is_sharded", {"sharding": replace(SHARDED, whole_matrices=("a.weight",))}, "1 matrices whole"),
        (REDUCED, {"sharding": replace(SHARDED, reduce_dtypes=("bfloat16",))}, "reduces gradients in bfloat16"),
        (REDUCED, {"sharding": replace(SHARDED, output_dtype="none")}, "returns outputs in none"),
        ("gathered_weights_keep_their_bytes", {"changed_weights": ("a", "b")}, "2 frozen weights whose bytes differ"),
        ("ranks_hold_the_global_batch", {"batch": (2, 1)}, "2 ranks x 2 rows x 1 accumulated is not"),
    ],
)  # fmt: skip
def test_each_check_fails_alone(check: str, changes: dict, words: str) -> None:
    (found,) = failed([facts(0), replace(facts(1), **changes)]).items()
    assert found[0] == check in CHECKS and words in found[1]


def test_weights_without_a_gradient_are_named() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserError, match="unused.weight, unused.bias"):
        invariants.check_gradients(model)
    model["unused"].requires_grad_(False)
    invariants.check_gradients(model)


def test_checkpointing_that_is_reentrant() -> None:
    def trainer(backend: str, device: str, on: bool, **kwargs: bool) -> SimpleNamespace:
        recomputation = Recomputation(kind=on, options=kwargs)
        return SimpleNamespace(recomputation=recomputation, stack=SimpleNamespace(backend=backend, device=device))

    assert invariants.is_checkpointing_reentrant(
        trainer("unsloth", "cuda", True, use_reentrant=False)
    )  # Unsloth decides for itself
    assert invariants.is_checkpointing_reentrant(trainer("transformers", "cuda", True, use_reentrant=True))
    assert not invariants.is_checkpointing_reentrant(trainer("transformers", "cuda", True, use_reentrant=False))
    assert not invariants.is_checkpointing_reentrant(trainer("unsloth", "cuda", False))


def test_weights_that_no_row_reaches_are_named_with_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers for images inside of a text decoder (Mllama) cannot be left out by a setting."""
    from finetune.engine import multimodal

    for towers, remedy in (({}, "Remove them from lora.target_modules"), ({"vision": None}, "Use another model")):
        monkeypatch.setattr(multimodal, "towers", lambda model, found=towers: found)
        with pytest.raises(UserError, match=rf"without a gradient .*: weight, bias\..*{remedy}"):
            invariants.check_gradients(torch.nn.Linear(2, 2))
