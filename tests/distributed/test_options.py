"""Options of model and adapter reach the libraries, on both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import launch

pytestmark = pytest.mark.process


def train(model: Path, data: Path, tmp_path: Path, *extra: str) -> tuple[dict, dict]:
    """(run.json, adapter_config.json) of two steps."""
    arguments = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--training.max_steps", "2", "--training.global_batch_size", "4", "--logging.generate_samples", "0"),
    ]
    run = launch.train("1 rank", [*arguments, *extra], out=tmp_path / "out", cache=tmp_path)
    file = tmp_path / "out" / "adapter_config.json"
    return run, json.loads(file.read_text()) if file.is_file() else {}


@pytest.mark.parametrize("backend", [pytest.param("unsloth", marks=pytest.mark.unsloth), "transformers"])
def test_qlora(tiny_model: Path, tiny_data: Path, tmp_path: Path, backend: str) -> None:
    """4-bit weights are 4-bit (bitsandbytes has CPU kernels), and only the adapter is trained and saved."""
    run, adapter = train(tiny_model, tiny_data, tmp_path, "--model.backend", backend, "--model.load_in_4bit")
    assert adapter["r"] == 16
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert weights and all("lora_" in name for name in weights)
    assert len(run["losses"]) == 2 and all(loss > 0 for loss in run["losses"])


@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [pytest.param("unsloth", "false", marks=pytest.mark.unsloth), ("transformers", "true")],
)
def test_adapter_options_and_the_saved_model_in_plain_transformers(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, backend: str, checkpointing: str
) -> None:
    """Reload the final adapter outside the project, and compute the held-out loss by hand."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, adapter = train(
        tiny_model, tiny_data, tmp_path, "--model.backend", backend, "--lora.r", "4", "--lora.lora_alpha", "12",
        "--lora.use_rslora", "--lora.target_modules", "[q_proj, v_proj]", "--lora.modules_to_save", "[lm_head]",
        "--data.eval_file", str(tiny_data / "eval.jsonl"), "--training.gradient_checkpointing", checkpointing,
        "--training.learning_rate", "1e-2", "--training.max_steps", "5", "--logging.profile_steps", "1",
    )  # fmt: skip
    assert run["backend"] == backend
    assert (adapter["r"], adapter["lora_alpha"], adapter["use_rslora"]) == (4, 12, True)
    assert set(adapter["target_modules"]) == {"q_proj", "v_proj"}
    assert adapter["modules_to_save"] == ["lm_head"]
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any("lm_head" in name for name in weights)
    assert not any("k_proj" in name or "gate_proj" in name for name in weights)
    trace = json.loads((tmp_path / "out" / "runs" / "trace-rank-0.json").read_text())
    assert any("aten::linear" in event.get("name", "") for event in trace["traceEvents"])

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path / "out"
    )
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    total = count = 0.0
    for line in (tiny_data / "eval.jsonl").read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor(tokenizer(prompt + assistant["content"] + "<|im_end|>")["input_ids"])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[None]).logits[0], -1)
        for place in range(start, len(ids)):
            total -= float(scores[place - 1, ids[place]])
        count += len(ids) - start
    assert total / count == pytest.approx(run["eval_loss_after"], rel=1e-5)
    assert run["eval_loss_after"] != pytest.approx(run["eval_loss_before"], rel=1e-3)
