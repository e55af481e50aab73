"""Tests of finetune/export/layout.py, and of what is merged by it: the experts of a layer. PEFT's and transformers' own
forward passes are the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.export import command
from finetune.export.adapter import Adapter
from finetune.export.layout import Layout
from finetune.export.merged import Merge
from tests.helpers import tiny
from tests.helpers.export import MOE, SIZES, WARNINGS, edit, load, make_adapter, make_base, make_run, merge, tensors

pytestmark = [
    *WARNINGS,
    # PEFT looks for the patterns of parameters among its modules.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

IDS = torch.tensor([[5, 9, 30, 77, 120, 8, 3, 200, 41]])
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def strong_adapter(folder: Path, base: Path, **lora: Any) -> Any:
    """An adapter whose change of each expert is large, and different. Returns PEFT's model."""
    peft = make_adapter(folder, base, r=2, **lora)
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad and ".experts." in name:
            parameter.data.mul_(4)
    peft.save_pretrained(folder)
    return peft


SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": TARGETS},
    "the outputs of experts only": {"target_parameters": TARGETS[1:]},
    "rsLoRA": {"target_parameters": TARGETS, "use_rslora": True},
    "patterns": {
        "target_parameters": TARGETS,
        "rank_pattern": {r".*\.gate_up_proj": 5},
        "alpha_pattern": {"experts.down_proj": 3},
    },
    "the router": {"target_parameters": ["gate.weight", *TARGETS]},
    "names that PEFT converts": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "experts in full": {"modules_to_save": ["experts"]},
    "biases": {"target_parameters": TARGETS, "bias": "all"},
}
QUICK = ("qwen3-moe", "gpt-oss", "glm4-moe")  # of these `make test` runs most, and `make test-full` all


def each(kinds: Iterable[str], *more: str) -> list[Any]:
    """Parameters of a test of each kind of model."""
    return [pytest.param(kind, *more, marks=[] if kind in QUICK else [pytest.mark.campaign]) for kind in kinds]


CASES = [
    *each(MOE, "both"),
    *(("qwen3-moe", name) for name in SETTINGS if name not in ("both", "biases")),
    *(("gpt-oss", name) for name in ("patterns", "experts in full", "biases")),
    ("mixtral", "the router"),
    ("mixtral", "experts in full"),
    ("glm4-moe", "names that PEFT converts"),
]


@pytest.mark.parametrize(("kind", "setting"), CASES)
def test_a_merged_mixture_computes_what_the_adapter_did(kind: str, setting: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", kind, torch.float32)
    lora = {"target_modules": ["q_proj", "v_proj"]} | SETTINGS[setting]
    if kind == "deepseek-v3":
        lora["target_modules"] = ["o_proj"]
    peft = strong_adapter(tmp_path / "adapter", base, **lora)
    wanted, before = logits(peft), logits(load(base))
    merge(tmp_path / "adapter", base, tmp_path / "out", shard=60_000)
    own = tensors(tmp_path / "out")
    assert own.keys() == tensors(base).keys()
    change = float((wanted - before).abs().max())
    assert float((logits(load(tmp_path / "out")) - wanted).abs().max()) < 1e-4 < 1e-2 * change


EXCHANGED = {
    "qwen3-moe": ("model.layers.1.mlp.experts.{}.up_proj.weight", "model.layers.1.mlp.experts.{}.down_proj.weight"),
    "mixtral": ("model.layers.0.block_sparse_moe.experts.{}.w3.weight",),
    "gpt-oss": ("model.layers.1.mlp.experts.gate_up_proj",),
    "granite-moe": ("model.layers.1.block_sparse_moe.output_linear.weight",),
    "glm4-moe": ("model.layers.1.mlp.experts.{}.gate_proj.weight",),
}


@pytest.mark.parametrize("kind", each(EXCHANGED))
def test_an_adapter_in_the_wrong_expert_is_found(kind: str, tmp_path: Path, check: ModuleType) -> None:
    """Two experts get the change of each other."""
    base = make_base(tmp_path / "base", kind, torch.float32)
    strong_adapter(tmp_path / "adapter", base, target_modules=["o_proj"], target_parameters=TARGETS)
    merge(tmp_path / "adapter", base, tmp_path / "out")
    for file in base.glob("*token*"):
        shutil.copyfile(file, tmp_path / "out" / file.name)
    shutil.copyfile(base / "chat_template.jinja", tmp_path / "out" / "chat_template.jinja")
    job: dict[str, Any] = {"base": base, "adapter": tmp_path / "adapter", "exported": tmp_path / "out"}
    job |= {"tokenizer": base, "prompts": ["seven small birds"], "max_new_tokens": 2}
    found = check.check(job)
    assert found["passed"] and found["tensors"]["not_compared"] == [], found["why"]

    (file,) = (tmp_path / "out").glob("*.safetensors")
    old, new = tensors(base), load_file(file)
    for name in EXCHANGED[kind]:
        if "{}" in name:
            one, two = name.format(0), name.format(2)
            changes = {one: new[two] - old[two], two: new[one] - old[one]}
            new |= {part: old[part] + change for part, change in changes.items()}
        else:
            new[name] = old[name] + (new[name] - old[name])[[2, 1, 0]]
    save_file(new, file, {"format": "pt"})
    found = check.check(job)
    assert any(EXCHANGED[kind][0].format(0) in one for one in found["tensors"]["wrong"])


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", each(["qwen3-moe", "mixtral", "gpt-oss"]))
def test_a_fully_trained_mixture_has_the_files_of_its_base(kind: str, tmp_path: Path) -> None:
    """A checkpoint, whose weights are float32, with updates that rounding to nearest would lose."""
    full = make_base(tmp_path / "full", kind)
    old = tensors(full)
    trained = {name: one.float() * (1 + 2**-11) for name, one in old.items()}
    save_file(trained, full / "model.safetensors", {"format": "pt"})
    (full / "run.json").write_text(json.dumps({"status": "done", "config": {"model": {}}}))
    assert command.main([str(full), "--to", "merged", "--out", str(tmp_path / "out")]) == 0
    own = tensors(tmp_path / "out")
    assert {name: one.shape for name, one in own.items()} == {name: one.shape for name, one in old.items()}
    assert {one.dtype for one in own.values()} == {torch.bfloat16}


def test_a_text_model_of_files_with_a_vision_tower(tmp_path: Path) -> None:
    """Names in the files have another prefix, and the other tower stays as it is."""
    from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig

    base = tmp_path / "base"
    tokenizer = tiny.make_tokenizer(base)
    experts = MOE["qwen3-moe"][1] | {"shared_expert_intermediate_size": 24, "layer_types": ["full_attention"] * 2}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    text = SIZES | experts | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(base)
    peft = strong_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], target_parameters=TARGETS)
    merge(tmp_path / "adapter", base, tmp_path / "out")
    one, two = tensors(base), tensors(tmp_path / "out")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one if ".visual." in name)
    assert torch.allclose(logits(load(tmp_path / "out")), logits(peft), atol=1e-4)


def per_expert(folder: Path, base: Path, **config: Any) -> dict[str, torch.Tensor]:
    """An adapter with A and B for each expert's projection, as transformers 4 had them as layers. Returns the merged
    weights."""
    torch.manual_seed(2)
    stored, content = tensors(base), {}
    merged = dict(stored)
    for name, weight in stored.items():
        if ".experts." in name:
            a, b = 0.3 * torch.randn(2, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 2)
            path = f"base_model.model.{name.removesuffix('.weight')}"
            content |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            merged[name] = weight + 2 * b @ a
    folder.mkdir()
    save_file(content, folder / "adapter_model.safetensors")
    last = sorted({name.split(".")[-2] for name in stored if ".experts." in name})
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": last}
    (folder / "adapter_config.json").write_text(json.dumps(given | {"base_model_name_or_path": str(base)} | config))
    return merged


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_adapters_of_single_experts(kind: str, tmp_path: Path, check: ModuleType) -> None:
    base = make_base(tmp_path / "base", kind, torch.float32)
    wanted = Path(shutil.copytree(base, tmp_path / "wanted"))
    merged = per_expert(tmp_path / "adapter", base)
    save_file(merged, wanted / "model.safetensors", {"format": "pt"})
    merge(tmp_path / "adapter", base, tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(base).keys()
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(wanted)))

    job = {"base": base, "adapter": tmp_path / "adapter", "exported": tmp_path / "out"}
    found = check.compare_tensors(check.load_with_adapter(job, job["adapter"], torch.float32), {}, tmp_path / "out")
    assert found["wrong"] == found["not_compared"] == [] and found["changed"] == 18

    load(base).save_pretrained(base, save_original_format=False)  # the experts of a layer in one tensor
    with pytest.raises(UserError, match="does not fit the base model .* the base has no tensor"):
        merge(tmp_path / "adapter", base, tmp_path / "other")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", each(["glm4-moe", "deepseek-v3"]))
def test_adapters_of_shared_experts_load_without_this_project(kind: str, tmp_path: Path) -> None:
    """A run names the layers, which PEFT would take for the experts; as parameters they have the same tensors."""
    base = make_base(tmp_path / "base", kind, torch.float32)
    layers = ["shared_experts.up_proj", "shared_experts.down_proj"]
    lora = {"target_modules": ["o_proj"], "alpha_pattern": {r"shared_experts.up_proj(\.weight)?": 3}}
    named = [*TARGETS, *(f"{layer}.weight" for layer in layers)]
    wanted = logits(make_run(tmp_path / "run", base, target_parameters=named, **lora))
    file = tmp_path / "run" / "adapter_config.json"
    edit(file, target_modules=["o_proj", *layers], target_parameters=TARGETS, alpha_pattern={layers[0]: 3})
    for form in ("merged", "adapter"):
        assert command.main([str(tmp_path / "run"), "--to", form, "--out", str(tmp_path / form)]) == 0
    assert torch.allclose(logits(load(tmp_path / "merged")), wanted, atol=1e-4)
    model = PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    assert torch.allclose(logits(model), wanted, atol=1e-4)


def test_the_check_does_not_compare_with_half_of_an_adapter(tmp_path: Path, check: ModuleType) -> None:
    """PEFT drops the experts of Phi-MoE's older adapters, and says nothing."""
    base = make_base(tmp_path / "base", "phimoe", torch.float32)
    per_expert(tmp_path / "adapter", base, target_modules=["q_proj", "w1", "w2", "w3"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    make_adapter(tmp_path / "other", base, r=2, target_modules=["q_proj"])
    save_file(load_file(file) | load_file(tmp_path / "other" / file.name), file)
    job = {"base": base, "adapter": tmp_path / "adapter", "exported": tmp_path}
    with pytest.raises(ValueError, match=r"PEFT loads .* of the adapter's .* numbers"):
        check.load_with_adapter(job, job["adapter"], torch.float32)


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3-moe", torch.float32)
    make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], target_parameters=TARGETS)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    with pytest.raises(UserError, match="_proj` is .3, .* in the base, and A and B are"):
        merge(tmp_path / "adapter", make_base(tmp_path / "wide", "qwen3-moe", moe_intermediate_size=32), tmp_path / "a")
    dense = make_base(tmp_path / "dense")
    with pytest.raises(UserError, match="class of the model has none of target_parameters"):
        merge(tmp_path / "adapter", dense, tmp_path / "b")
    with pytest.raises(UserError, match="no A and B for the target_parameters `.*gate.weight`"):
        Merge(base, Adapter(tmp_path / "adapter", config | {"target_parameters": [*TARGETS, "mlp.gate.weight"]}))


def test_conversions_that_are_not_followed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    make_adapter(
        tmp_path / "adapter",
        make_base(tmp_path / "base", "gpt-oss"),
        target_modules=["q_proj"],
        target_parameters=TARGETS,
    )
    converter = WeightConverter("mlp.experts.gate_up_proj$", "mlp.experts.gate_up_proj", [Interleave(dim=2)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    with pytest.raises(UserError, match="gate_up_proj` of the base's files by Interleave. Use --to adapter"):
        merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")


def test_a_parameter_that_is_transposed_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Qwen3-VL-MoE: its files have the inputs of an expert before its outputs, or the other way around."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    base = make_base(tmp_path / "base", "granite-moe", torch.float32)
    model = load(base)
    converter = WeightConverter("experts.down_proj", "experts.down_proj", [Transpose(1, 2, check_dims=True)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    name = "model.layers.0.block_sparse_moe.experts.down_proj"
    for shape, swapped in (((3, 64, 96), None), ((3, 96, 64), (1, 2))):
        place = Layout(model, {name: shape}).places[name]
        whole = torch.arange(3 * 64 * 96).view(3, 64, 96)
        assert place.swapped == swapped and place.of(whole).shape == shape
        assert torch.equal(place.of(whole).sum(0), whole.sum(0) if swapped is None else whole.sum(0).t())
