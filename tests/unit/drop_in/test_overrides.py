"""`--finetune section.key=value` on the command line of a script."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.arguments import SCRIPT_KEYS
from finetune.config.load import overrides
from finetune.config.schema import KEYS, ConfigError
from finetune.errors import UserError
from tests.helpers import tiny
from tests.helpers.drop_in import losses


def given(monkeypatch: pytest.MonkeyPatch, *pairs: str) -> None:
    """As if the script had been started with them."""
    from finetune.drop_in import overrides, trainer

    words = [word for pair in pairs for word in ("--finetune", pair)]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    monkeypatch.setattr(trainer, "OVERRIDES", overrides.take_from_argv())


def test_they_are_taken_out_of_the_command_line(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:  # noqa: F811
    from finetune.drop_in.overrides import take_from_argv

    words = ["--rank", "8", "--finetune", "training.learning_rate=1e-4", "x", "--finetune=data.max_length=7"]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    assert take_from_argv().values == {"training.learning_rate": 1e-4, "data.max_length": 7}
    assert sys.argv == ["script.py", "--rank", "8", "x"]


def test_help_lists_every_key(monkeypatch: pytest.MonkeyPatch, capsys: Any, make: Callable[..., Any]) -> None:  # noqa: F811
    from finetune.drop_in.overrides import take_from_argv

    monkeypatch.setattr(sys, "argv", ["script.py", "--finetune", "help"])
    with pytest.raises(SystemExit) as ended:
        take_from_argv()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {key} " in shown for key in SCRIPT_KEYS)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("training.learning_rat=1", "Nearest is training.learning_rate"),
        ("lr=1", "Nearest is training.learning_rate"),
        ("training.learning_rate=fast", "expected a number"),
        ("training.learning_rate=", "expected section.key=value"),
        ("", "expected section.key=value"),
        ("model.load_in_4bit=true", "the script loads the model"),
        ("data.train_file=rows.jsonl", "the script reads its rows"),
        ("lora.bias=all", "the script makes the adapter"),
        ("logging.generate_samples=3", "only a run from a configuration has it"),
        ("training.optim=adamw", "unknown value"),
        ("training.strategy=auto", "`finetune advise SCRIPT` measures which"),
        ("training.fp16=true", "cannot be set here: use model.dtype"),
    ],
)
def test_what_a_script_cannot_be_given_is_refused(pair: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides([pair])
    assert message in str(refused.value)


def test_every_key_is_one_of_ours_and_names_a_field_of_sft_config() -> None:
    import trl

    fields = {one.name for one in dataclasses.fields(trl.SFTConfig)}
    assert SCRIPT_KEYS.keys() <= KEYS.keys()
    assert {name for name in SCRIPT_KEYS.values() if name} <= fields


# A value of each key that sets an argument of SFTConfig, as text, and what the argument becomes.
VALUES: dict[str, tuple[str, Any]] = {
    "training.per_device_train_batch_size": ("2", 2),
    "training.gradient_accumulation_steps": ("3", 3),
    "training.per_device_eval_batch_size": ("5", 5),
    "training.num_train_epochs": ("2", 2.0),
    "training.max_steps": ("3", 3),
    "training.learning_rate": ("1e-4", 1e-4),
    "training.lr_scheduler_type": ("cosine", "cosine"),
    "training.warmup_steps": ("2", 2),
    "training.weight_decay": ("0.5", 0.5),
    "training.optim": ("adafactor", "adafactor"),
    "training.max_grad_norm": ("0.3", 0.3),
    "training.seed": ("7", 7),
    "training.train_sampling_strategy": ("group_by_length", "group_by_length"),
    "training.gradient_checkpointing": ("true", True),
    "training.save_steps": ("2", 2),
    "training.save_total_limit": ("1", 1),
    "training.eval_steps": ("0", None),
    "training.ddp_timeout": ("99", 99),
    "training.adam_beta2": ("0.5", 0.5),
    "data.max_length": ("9", 9),
    "data.packing": ("true", True),
    "data.dataset_text_field": ("text", "text"),
    "data.completion_only_loss": ("false", False),
    "data.num_proc": ("1", 1),
    "logging.logging_steps": ("2", 2),
    "model.dtype": ("float32", None),
}


@pytest.mark.parametrize("key", VALUES)
def test_a_value_is_that_of_sft_config(
    key: str,
    make: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, value = VALUES[key]
    given(monkeypatch, f"{key}={text}")
    found = make().given
    name = SCRIPT_KEYS.get(key) or key.partition(".")[2]
    if name != "dtype":
        assert getattr(found, name) == value
    assert key != "training.num_train_epochs" or found.max_steps == -1
    assert key != "training.save_steps" or found.save_strategy == "steps"


def test_a_run_takes_them(
    make: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from peft import LoraConfig

    other = tmp_path / "other"
    given(
        monkeypatch,
        "training.global_batch_size=8",
        "training.max_steps=2",
        "lora.r=3",
        "lora.target_modules=[q_proj]",
        f"training.output_dir={other}",
        "logging.report_to=none",
    )
    trainer = make(peft_config=LoraConfig(r=2, task_type="CAUSAL_LM"))
    trainer.train()
    trainer.save_model()
    assert len(losses(trainer)) == 2
    assert trainer.job.batch.global_batch_size == 8
    adapter = trainer.model.peft_config["default"]
    assert (adapter.r, adapter.target_modules) == (3, {"q_proj"})
    assert (other / "run.json").is_file() and (other / "adapter_model.safetensors").is_file()
    given(monkeypatch, "training.max_steps=3", f"training.output_dir={other}", "training.resume_from_checkpoint=true")
    with pytest.raises(UserError, match="holds a finished run, and no checkpoint"):  # it resumes, as asked
        make(peft_config=LoraConfig(r=2, task_type="CAUSAL_LM")).train()


def test_an_adapter_that_the_script_makes_cannot_be_changed(make: Callable[..., Any], monkeypatch: Any) -> None:  # noqa: F811
    given(monkeypatch, "lora.r=3")
    with pytest.raises(UserError, match=r"^--finetune lora\.r: .* Change the adapter where the script makes it"):
        make()


def test_only_a_model_that_is_named_is_sharded(make: Callable[..., Any], monkeypatch: Any, model: Path) -> None:  # noqa: F811
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM

    from finetune.drop_in import backbone, trainer

    given(monkeypatch, "training.strategy=shard")
    monkeypatch.setattr(trainer.distributed, "ranks", lambda: SimpleNamespace(world_size=2, is_main=True))
    with pytest.raises(UserError, match="Pass its name or folder to SFTTrainer instead"):
        backbone.load_sharded(AutoModelForCausalLM.from_pretrained(model), None, None, None, None)
    for arguments, reason in (
        ({"model_init_kwargs": {"device_map": "auto"}}, "does not know these `model_init_kwargs`: device_map"),
        ({"chat_template_path": "some/tokenizer"}, "Give a .jinja file"),
        ({"optim": "adafactor"}, "optim adafactor is not supported on a sharded model"),
    ):
        with pytest.raises(UserError, match=reason):
            make(**arguments)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # PEFT's own
def test_the_adapter_of_a_sharded_model_is_that_of_peft(model: Path, tmp_path: Path) -> None:  # noqa: F811
    """The engine's own settings make the same adapter as PEFT by the script's, of a mixture of experts as well."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from finetune.config import Config
    from finetune.config.schema import ModelConfig
    from finetune.drop_in.backbone import engine_lora_config
    from finetune.engine.model.adapters import add_adapter

    experts, projections = tiny.save_moe("Glm4Moe", tmp_path / "experts"), ["q_proj", "gate_proj", "up_proj"]
    for base, chosen in (
        (model, LoraConfig()),
        (model, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_rslora=True, bias="lora_only")),
        (
            model,
            LoraConfig(
                target_modules={"q_proj"}, rank_pattern={"q_proj": 2}, init_lora_weights="gaussian", use_dora=True
            ),
        ),
        (experts, LoraConfig(target_modules="all-linear")),
        (experts, LoraConfig(target_modules=projections)),
        (experts, LoraConfig(target_modules=["o_proj"], target_parameters=["experts.down_proj"])),
    ):
        chosen.task_type = "CAUSAL_LM"
        settings = Config(model=ModelConfig(model_name_or_path=str(base)), lora=engine_lora_config(chosen, str(base)))
        weights = []
        for make_adapter, how in ((get_peft_model, chosen), (add_adapter, settings)):
            torch.manual_seed(0)
            weights.append(make_adapter(AutoModelForCausalLM.from_pretrained(base), how).state_dict())
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
