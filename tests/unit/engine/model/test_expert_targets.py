"""Which weights of a mixture of experts an adapter trains: the same for each family, by names of the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import transformers_weight_conversion
from safetensors.torch import load_file, save_file

from finetune.config import load
from finetune.engine.model import adapter_coverage, adapter_targets, adapters, expert_targets
from finetune.errors import UserError
from patches import peft_moe_layer_targets
from tests.helpers import launch, tiny
from tests.helpers.tiny import EXPERTS, make_moe

ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"
SEVEN = (*"qkvo", "gate", "up", "down")
ROUTERS = ("router.weight", "mlp.gate.weight", "feed_forward.gate.weight")


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after the start of a run."""
    name = peft_moe_layer_targets.FUNCTION
    monkeypatch.setattr(transformers_weight_conversion, name, getattr(transformers_weight_conversion, name))
    peft_moe_layer_targets.apply()
    yield


def adapted(model: Any, *settings: str) -> set[str]:
    """The full names of the weights that have an adapter."""
    names = {id(one): name for name, one in model.named_parameters()}
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.r", "4", *settings]
    config = load(words)
    adapter_targets.check(model, config, adapters.adapter_target_modules(config), "transformers")
    model = adapters.add_adapter(model, config)
    return {
        names[id(getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight")))]
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
    }


def weights(family: str) -> dict[str, torch.Tensor]:
    """The weights that the layers of a model multiply by, routers and convolutions aside."""
    return {
        name: one
        for name, one in make_moe(family).named_parameters()
        if ".layers." in name and one.ndim > 1 and "bias" not in name and "conv.conv" not in name
        if not name.endswith(ROUTERS)
    }


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.FURTHER])
def test_names_mean_the_same_weights_in_each_family(family: str) -> None:
    """As PEFT takes the names, gpt-oss had no adapter on its experts, GLM-4 none beside them, Phi-MoE one on its
    router."""
    every = set(weights(family))
    stacked = {name for name in every if name.endswith(("gate_up_proj", "down_proj"))}
    assert len(stacked) in (2, 4)
    assert adapted(make_moe(family), "--lora.target_modules", "all-linear") == every
    by_name = {
        name
        for name in every - stacked
        if name.removesuffix(".weight").endswith(tuple(f".{one}_proj" for one in SEVEN))
    }
    assert adapted(make_moe(family)) == by_name | stacked
    named = [f"{one}_proj" for one in "qkvo" if any(f"{one}_proj" in name for name in by_name)]
    attention = {name for name in by_name if any(f".{one}." in name for one in named)}
    assert adapted(make_moe(family), "--lora.target_modules", f"[{', '.join(named)}]") == attention
    mlp = "mlp|feed_forward|block_sparse_moe"
    regex = adapted(make_moe(family), "--lora.target_modules", rf".*\.({mlp})\..*(gate|up|down)_proj")
    assert regex == {name for name in by_name - attention if "attn" not in name} | stacked


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("--lora.target_parameters [mlp.experts.down_proj] --lora.target_modules []", {"mlp.experts.down_proj"}),
        ("--lora.target_parameters [] --lora.target_modules [down_proj,o_proj]", {"self_attn.o_proj.weight"}),
        ("--lora.target_modules [w1,w2,w3]", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("--lora.target_modules [experts.gate_up_proj]", {"mlp.experts.gate_up_proj"}),
        ("--lora.target_modules .*experts\\.\\d+\\.w2", {"mlp.experts.down_proj"}),
        ("--lora.target_modules [o_proj,gate]", {"self_attn.o_proj.weight", "mlp.gate.weight"}),
        ("--lora.target_parameters [mlp.gate.weight] --lora.target_modules []", {"mlp.gate.weight"}),
    ],
)
@pytest.mark.filterwarnings("ignore:target_modules=:RuntimeWarning")
def test_settings_for_experts(settings: str, expected: set[str]) -> None:
    found = adapted(make_moe("Mixtral"), *settings.split())
    assert found == {f"model.layers.{layer}.{name}" for layer in range(2) for name in expected}


def test_vectors_of_three_dimensions_are_no_experts() -> None:
    assert not expert_targets.stacked_weights(tiny.make_text("Rwkv", {}))


@pytest.mark.parametrize("family", ["Glm4Moe", "Mixtral", "GptOss"])
def test_an_adapter_beside_experts_is_loaded(family: str, tmp_path: Path) -> None:
    """And what it was saved with is what PEFT loads: the same outputs."""
    from peft import PeftModel

    model = adapters.add_adapter(make_moe(family), load(["--model.model_name_or_path", "m", "--data.train_file", "x"]))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_()
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    outputs = [one.eval()(ids).logits for one in (model, PeftModel.from_pretrained(make_moe(family), tmp_path))]
    torch.testing.assert_close(*outputs)
    assert (outputs[0] - make_moe(family).eval()(ids).logits).abs().max() > 0.1


def test_an_adapter_that_peft_does_not_load_whole_is_refused(tmp_path: Path) -> None:
    """As it loads Laguna's shared experts: it warns, and they were as they had been initialized."""
    model = adapters.add_adapter(
        make_moe("Mixtral"), load(["--model.model_name_or_path", "m", "--data.train_file", "x"])
    )
    model.save_pretrained(tmp_path)
    assert adapters.load_adapter(make_moe("Mixtral"), str(tmp_path)).peft_config
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: one for name, one in tensors.items() if "experts.lora_B" not in name}, file)
    with pytest.raises(UserError, match=r"it has no tensors for .*layers\.0\.mlp\.experts\.lora_B.* and 1 more"):
        adapters.load_adapter(make_moe("Mixtral"), str(tmp_path))


DOWN = ("--lora.target_parameters", "[experts.down_proj]")
NAMES_EXPERTS = ("--lora.target_modules", "[q_proj, gate_proj, up_proj, down_proj]")


@pytest.mark.parametrize("targets", [NAMES_EXPERTS, (*NAMES_EXPERTS, *DOWN)], ids=["names", "names and parameters"])
@pytest.mark.parametrize(
    "given",
    [
        "{layers_to_transform: [1]}",
        "{layers_to_transform: 1, layers_pattern: [layers]}",
        r"{exclude_modules: '.*layers\.0\..*'}",
    ],
)
def test_layers_without_an_adapter_have_none_on_their_experts(targets: tuple[str, ...], given: str) -> None:
    """PEFT itself leaves out no parameter: experts that `lora.target_parameters` names were trained in each layer."""
    every = adapted(make_moe("Glm4Moe"), *targets)
    found = adapted(make_moe("Glm4Moe"), *targets, "--lora.adapter_kwargs", given)
    assert found == {name for name in every if ".layers.1." in name} < every


@pytest.mark.parametrize(
    ("excluded", "expected"),
    [
        ("[experts]", set()),
        ("[w1, w3]", {"down_proj"}),
        ("[experts.down_proj]", {"gate_up_proj"}),
        ("'.*experts.*'", set()),
    ],
)
def test_excluded_experts_have_no_adapter(excluded: str, expected: set[str]) -> None:
    found = adapted(make_moe("Mixtral"), "--lora.adapter_kwargs", f"{{exclude_modules: {excluded}}}")
    assert {name.rpartition(".")[2] for name in found if "experts" in name} == expected
    assert len(found) == 8 + 2 * len(expected)


@pytest.mark.parametrize(
    ("family", "router", "given"),
    [
        ("HunYuanMoEV1", "mlp.gate.wg", {"num_experts": 4, "moe_topk": 2}),
        ("Afmoe", "mlp.router.gate", {"num_experts": 4, "moe_intermediate_size": 16, "num_dense_layers": 0}),
    ],
)
def test_a_router_with_a_layer_inside(family: str, router: str, given: dict[str, Any]) -> None:
    """`all-linear` had an adapter on it."""
    found = adapted(make_moe(family, head_dim=16, **given), "--lora.target_modules", "all-linear")
    assert any("experts.down_proj" in name for name in found) and not any(f"{router}." in name for name in found)
    words = ["--lora.target_parameters", f"[{router}.weight]", "--lora.target_modules", "[]"]
    named = {f"model.layers.{layer}.{router}.weight" for layer in range(2)}
    assert adapted(make_moe(family, head_dim=16, **given), *words) == named
    if router.endswith("gate.wg"):
        words = ["--lora.target_modules", "[o_proj, gate]"]
        assert adapted(make_moe(family, head_dim=16, **given), *words) > named


def test_an_empty_list_of_layers_is_all_of_them() -> None:
    given = "{layers_to_transform: []}"
    assert len(adapted(make_moe("Mixtral"), "--lora.adapter_kwargs", given)) == 12


def test_patterns_are_of_experts_too() -> None:
    """PEFT applied them, and warned that they matched nothing."""
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.adapter_kwargs"]
    words.append("{rank_pattern: {layers.1.mlp.experts.down_proj: 32}, alpha_pattern: {gate_up_proj: 4}}")
    model = adapters.add_adapter(make_moe("Mixtral"), load(words))
    found = adapter_coverage.coverage(model)
    assert found is not None
    assert {name: one.rank for name, one in found.experts.items()} == {
        "mlp.experts.gate_up_proj": 16,
        "mlp.experts.down_proj": 32,
    }
    scalings = [
        (one.parameter_name, one.scaling["default"]) for one in model.modules() if hasattr(one, "parameter_name")
    ]
    assert sorted(scalings) == [("down_proj", 0.5), ("down_proj", 1.0), *[("gate_up_proj", 0.25)] * 2]


def test_what_is_trained_in_full_has_no_adapter() -> None:
    """Dense layers beside experts were named for one, and PEFT took those names of an exported adapter for
    parameters."""
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.modules_to_save", "[mlp]"]
    config, model = load(words), make_moe("Glm4Moe")
    found = expert_targets.resolve(model, config, adapters.adapter_target_modules(config))
    assert found == {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": []}
    covered = adapter_coverage.coverage(adapters.add_adapter(model, config))
    assert covered is not None and "gate_up_proj of 4 experts in 1 layer (in full)" in covered.summary


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("Qwen3Moe", "--lora.target_modules [up_proj]", "names up_proj without gate_proj, but the experts"),
        ("Qwen3Moe", "--lora.target_modules [q_proj,w4]", "`w4`"),
        ("Qwen3Moe", "--lora.target_parameters [experts.gate_up]", "Nearest is mlp.experts.gate_up_proj."),
        ("Qwen3Moe", "--lora.target_parameters [q_proj.weight]", "Name the layer in lora.target_modules: q_proj."),
        ("GptOss", "--lora.target_parameters [experts.down_proj_bias]", "of 2 dimensions: an adapter goes on stacked"),
        (
            "Qwen3Moe",
            "--lora.lora_dropout 0.1",
            "does not support lora.lora_dropout: 0.1. Remove it, or leave out the experts",
        ),
        (
            "Qwen3Moe",
            "--lora.adapter_kwargs {use_dora: true}",
            "does not support lora.adapter_kwargs: {use_dora: True}",
        ),
        (
            "Qwen3Moe",
            "--lora.adapter_kwargs {lora_bias: true}",
            "does not support lora.adapter_kwargs: {lora_bias: True}",
        ),
        ("Qwen3Moe", "--lora.adapter_kwargs {init_lora_weights: pissa}", "{init_lora_weights: pissa}"),
        (
            "Qwen3Moe",
            "--lora.adapter_kwargs {rank_pattern: {up_proj: 8}}",
            "matches no layer with an adapter: `up_proj`",
        ),
        ("Qwen3Moe", "--lora.adapter_kwargs {exclude_modules: [w4]}", "matches no module of the model: `w4`"),
        (
            "Mixtral",
            "--lora.adapter_kwargs {exclude_modules: [w1]}",
            "exclude_modules of lora.adapter_kwargs names w1 without",
        ),
        (
            "Mixtral",
            "--lora.target_parameters [experts.down_proj] --lora.modules_to_save [experts]",
            "leaves out all of lora.target_parameters: experts.down_proj",
        ),
    ],
)
def test_what_stacked_experts_do_not_take_is_refused(family: str, settings: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        adapted(make_moe(family), *settings.split(" ", 1 if "kwargs" in settings else -1))
    assert said in str(refused.value), refused.value


def test_the_same_options_beside_experts_without_an_adapter() -> None:
    for given in (("--lora.target_modules", ATTENTION), ("--lora.target_parameters", "[]")):
        found = adapted(make_moe("Qwen3Moe"), "--lora.lora_dropout", "0.1", *given)
        assert len(found) == 8


def test_what_is_trained_is_printed_and_recorded() -> None:
    from peft import LoraConfig, get_peft_model

    def covered(**given: Any) -> adapter_coverage.Coverage:
        model: Any = get_peft_model(make_moe("GptOss"), LoraConfig(r=4, task_type="CAUSAL_LM", **given))
        found = adapter_coverage.coverage(model)
        assert found is not None
        return found

    every = weights("GptOss")
    experts = {"mlp.experts.gate_up_proj": 64, "mlp.experts.down_proj": 32}
    both = covered(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=list(experts))
    assert both.to_dict() == {
        "share": 1.0,
        "experts": {
            name: {"experts": EXPERTS, "layers": 2, "parameters": 2 * EXPERTS * 32 * width, "rank": 4}
            for name, width in experts.items()
        },
    }
    assert "100% of the linear weights, with mlp.experts.gate_up_proj of 4 experts in 2 layers (rank 4)" in both.summary
    json.dumps(both.to_dict())
    less = covered(target_modules=["q_proj"])
    size = sum(one.numel() for name, one in every.items() if "q_proj" in name)
    assert less.share == pytest.approx(size / sum(one.numel() for one in every.values()))
    assert not less.experts and less.warning is not None and "experts.gate_up_proj" in less.warning
    wrong = covered(target_modules="all-linear", target_parameters=[*experts, "mlp.experts.gate_proj"])
    assert wrong.share == 1 and wrong.warning == (
        "target_parameters has names that match no parameter: mlp.experts.gate_proj. Correct them."
    )


@pytest.mark.process  # Unsloth changes the libraries of its process
@pytest.mark.unsloth
def test_unsloth_trains_the_same_weights(tmp_path: Path) -> None:
    """Left to itself, it has no adapter on the experts by all-linear."""
    families = ("Qwen3Moe", "Mixtral", "GptOss", "Glm4Moe", "GraniteMoe")
    folders = [str(tiny.save_moe(family, tmp_path / family)) for family in families]
    done = launch.python(
        [str(launch.SPIES / "adapted_weights.py"), "unsloth", *folders], cache=tmp_path, kind="unsloth"
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 3 * len(families), done.stdout[-3000:] + done.stderr[-3000:]
    for folder, targets, covered, shapes in found:
        words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.target_modules", targets]
        model = adapters.add_adapter(transformers.AutoModelForCausalLM.from_pretrained(folder), load(words))
        assert shapes == {name: list(one.shape) for name, one in model.named_parameters() if one.requires_grad}
        by_transformers = adapter_coverage.coverage(model)
        assert by_transformers is not None and covered == by_transformers.to_dict()
