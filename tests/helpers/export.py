"""What the tests of export share."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.engine.checkpoint import base_weights
from finetune.export import command, verify
from finetune.export.adapter import Adapter
from finetune.export.merged import Merge
from tests.helpers import tiny

WARNINGS = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]  # marks of every test

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}


_EXPERTS = {"num_experts": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
_ROUTED = {"n_routed_experts": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
# Mixtures of experts, of which a token uses all, so that no expert can be exchanged without a difference.
MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "qwen2-moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "olmoe": ("Olmoe", _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "phimoe": ("Phimoe", {"num_local_experts": 3, "num_experts_per_tok": 2}),  # its router is for two of them
    "gpt-oss": ("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 3, "layer_types": ["full_attention"] * 2}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "deepseek-v3": ("DeepseekV3", _ROUTED | _GROUPS | _LATENT | {"num_key_value_heads": 4}),
    "glm4-moe": ("Glm4Moe", _ROUTED | _GROUPS),
}


def make_base(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """A tiny model of an architecture, with its tokenizer."""
    import transformers

    tokenizer = tiny.make_tokenizer(folder)
    names = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma", "gpt2": "GPT2"}
    name, own = MOE[kind] if kind in MOE else (names[kind], {})
    sizes = SIZES | own if kind != "gpt2" else {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tied = {"tie_word_embeddings": False} if kind == "llama" else {}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **sizes | tied | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base: Path, *, resize: int = 0, **lora: Any) -> Any:
    """An adapter with random weights, saved by PEFT. Returns PEFT's model in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | lora
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    peft.save_pretrained(folder)
    return peft.eval()


def make_run(folder: Path, base: Path, **lora: Any) -> Any:
    """The output folder of a finished run, as training leaves it."""
    peft = make_adapter(folder, base, **lora)
    for file in base.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(base / "chat_template.jinja", folder / "chat_template.jinja")
    model = {"model_name_or_path": str(base), "chat_template": None}
    content = {"status": "done", "steps": 7, "settings": base_weights.base_model_files(base), "eval_loss_after": 1.25}
    content["config"] = {"model": model, "data": {"train_file": "/home/me/secret project/rows.jsonl"}}
    (folder / "run.json").write_text(json.dumps(content))
    return peft


def merge(folder: Path, base: Path, out: Path, shard: int = 10**9) -> Merge:
    out.mkdir()
    found = Merge(base, Adapter(folder, json.loads((folder / "adapter_config.json").read_text())))
    found.write(out, shard)
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an export, which has a process of its own."""
    spec = importlib.util.spec_from_file_location("export_check", verify.PROGRAM)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(check := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(verify, "run", lambda job: check.check({"max_new_tokens": 4} | job))


def shrink(folder: Path, factor: float) -> None:
    """Make the update of an adapter, B A, smaller."""
    file = folder / "adapter_model.safetensors"
    content = load_file(file)
    save_file({name: one * factor if "lora_B" in name else one for name, one in content.items()}, file)


def ends(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    """Run the command; its message, after asserting the exit code, one error and no traceback."""
    assert command.main(arguments) == code
    words = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in words and words.count("error: ") == (code != 0), words
    return words


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(folder: Path, name: str, bit: int = 0) -> None:
    """Flip one bit in the middle of a tensor of bfloat16."""
    (file,) = folder.glob("*.safetensors")
    content = load_file(file)
    raw = content[name].view(torch.int16).reshape(-1)
    raw[raw.numel() // 2] ^= 1 << bit
    save_file(content, file, {"format": "pt"})


TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3h"
