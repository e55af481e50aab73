"""Tests of finetune/engine/model/mergeable.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from finetune import cli
from finetune.engine.preflight import mergeable
from tests.helpers import tiny


def test_settings_with_and_without_a_merged_export() -> None:
    plain = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], lora_dropout=0.1, bias="all", use_rslora=True)
    assert mergeable.warning(plain.to_dict(), {}) is None
    experts = LoraConfig(target_parameters=["experts.down_proj"], rank_pattern={"down_proj": 4})
    assert mergeable.warning(experts.to_dict(), {"quantization_config": None}) is None
    recorded = {"lora_B_layout": "rank_major", "unsloth_fused_expert_lora": {"lora_A_layout": "grouped_by_expert"}}
    assert mergeable.warning(experts.to_dict() | recorded, {}) is None  # what Unsloth adds
    shifted = mergeable.warning(LoraConfig(init_lora_weights="pissa").to_dict(), {})
    assert shifted is not None and "init_lora_weights: pissa" in shifted and "--to adapter` works" in shifted
    stored = mergeable.warning(plain.to_dict(), {"quantization_config": {"quant_method": "mxfp4"}})
    assert stored is not None and "stored as mxfp4" in stored and "--base" in stored
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert mergeable.warning(plain.to_dict(), {"quantization_config": four_bits}) is None


def test_a_run_warns_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model.backend", "transformers", "--training.max_steps", "1", "--data.max_length", "32"]
    arguments += ["--model.model_name_or_path", str(tiny.make_model(tmp_path / "m", layers=1))]
    arguments += ["--data.train_file", str(tiny.make_rows(tmp_path / "rows.jsonl", 4))]
    arguments += ["--training.output_dir", str(tmp_path / "run")]
    given = ["--lora.adapter_kwargs", "{init_lora_weights: pissa}"]
    assert cli.main(["train", *arguments, *given]) == 0
    words = " ".join(capsys.readouterr().out.split())
    warned = words.index("warning: This adapter cannot be exported as a merged model")
    assert "init_lora_weights: pissa" in words[warned:] and warned < words.index("step 1/1")
