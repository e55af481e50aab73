"""Tests of finetune/drop_in/former.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.drop_in import TEXTS, WARNINGS, dataset

pytestmark = WARNINGS


def test_arguments_of_older_versions_and_unknown_ones(make: Callable[..., Any], model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [{"content": row["text"]} for row in TEXTS]
    trainer = make(rows, tokenizer=tokenizer, dataset_text_field="content", max_seq_length=8)
    assert max(map(len, trainer.train_dataset["input_ids"])) == 8
    assert trainer.processing_class is tokenizer
    with pytest.raises(TypeError, match="unexpected keyword argument 'datset'"):
        make(datset=1)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"evaluation_strategy": "steps", "eval_steps": 3}, "eval_strategy", "steps"),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"warmup_ratio": 0.25}, "warmup_steps", 0.25),
        ({"warmup_ratio": 0.25, "warmup_steps": 0}, "warmup_steps", 0.25),
        ({"warmup_ratio": 0.25, "warmup_steps": 7}, "warmup_steps", 7),
        ({"max_seq_length": 8}, "max_length", 8),
        ({"max_seq_length": None}, "max_length", 1024),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"group_by_length": True, "packing": True}, "train_sampling_strategy", "random"),
        ({"overwrite_output_dir": True, "save_safetensors": True}, "seed", 42),
    ],
)
def test_former_names_of_the_configuration_are_taken(
    given: dict[str, Any], name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """transformers 4 and TRL before 0.16 take these; the installed ones do not."""
    import trl

    from finetune import SFTConfig

    with pytest.raises(TypeError):
        trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    found = getattr(args, name)
    assert getattr(found, "value", found) == value and isinstance(args, trl.SFTConfig)
    printed = capsys.readouterr().out
    old = set(given) - {one.name for one in dataclasses.fields(trl.SFTConfig)}
    assert all(f"SFTConfig: `{one}` is " in printed for one in old) and printed.count("SFTConfig:") == len(old)
    assert dataclasses.replace(args, seed=5).seed == 5


def test_the_configurations_show_the_arguments_of_the_installed_release() -> None:
    """Scripts choose an argument's name by it: `"max_length" in inspect.signature(SFTConfig).parameters`."""
    import transformers
    import trl

    from finetune import SFTConfig, TrainingArguments

    for ours, theirs in ((SFTConfig, trl.SFTConfig), (TrainingArguments, transformers.TrainingArguments)):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize(
    ("name", "value"),
    [("deepspeed", "ds.json"), ("deepspeed", {"zero_optimization": {"stage": 3}}), ("fsdp", "full_shard")],
)
@pytest.mark.parametrize("kind", ["SFTConfig", "TrainingArguments"])
def test_another_way_to_launch_is_refused_before_its_package_is_looked_for(
    kind: str, name: str, value: Any, tmp_path: Path
) -> None:
    import finetune
    from finetune.drop_in.refusals import Refused

    with pytest.raises(Refused, match=f"^{kind}: `{name}=.*torchrun .* add --finetune training.strategy=shard"):
        getattr(finetune, kind)(str(tmp_path), **{name: value})


def test_unknown_names_of_the_configuration_are_refused_as_by_trl(tmp_path: Path) -> None:
    from finetune import SFTConfig

    with pytest.raises(TypeError, match="learnig_rate"):
        SFTConfig(str(tmp_path), learnig_rate=1e-4)


def test_the_saved_arguments_need_no_package_of_ours(make: Callable[..., Any]) -> None:
    import trl

    assert type(make().args) is trl.SFTConfig


@pytest.mark.parametrize(
    ("given", "older", "length", "printed"),
    [
        ({}, {}, 2048, True),  # TRL's default of 1,024 is nobody's choice
        ({"max_length": None}, {}, 2048, True),
        ({"max_length": 512}, {}, 512, False),
        ({"max_length": 4096}, {}, 2048, True),
        ({}, {"max_seq_length": 1024}, 1024, False),
        ({}, {"max_seq_length": 4096}, 2048, True),
        ({"max_seq_length": 1024}, {}, 1024, False),
        ({"max_seq_length": None}, {}, 2048, True),
    ],
)
def test_rows_have_the_length_that_unsloth_loaded_the_model_with(
    given: dict[str, Any],
    older: dict[str, Any],
    length: int,
    printed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """As in the constructor of Unsloth's rewritten trainer (unsloth/models/rl.py, `max_length_check`)."""
    from finetune import SFTConfig
    from finetune.drop_in import former, settings
    from finetune.drop_in.overrides import Overrides

    loaded = type("Loaded", (), {"max_seq_length": 2048, "for_training": None})()
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    found = former.complete_arguments(args, loaded, dict(older), Overrides())
    assert settings.data_config(found).max_length == length
    assert ("Rows have up to 2,048 tokens" in capsys.readouterr().out) is printed
    args.max_seq_length = 4096  # type: ignore[attr-defined]  # the field of Unsloth's SFTConfig
    assert former.complete_arguments(args, loaded, {}, Overrides()).max_length == 2048
    of_another_loader = type("Loaded", (), {"max_seq_length": 2048})()
    assert former.complete_arguments(args, of_another_loader, {}, Overrides()).max_length == 4096


def test_training_arguments_are_completed_as_by_trls_trainer(
    model: Path, make: Callable[..., Any], tmp_path: Path
) -> None:
    """The reference is trl.SFTTrainer, given the arguments by their names today."""
    import transformers
    import trl

    from finetune import TrainingArguments
    from finetune.drop_in import former
    from finetune.drop_in.overrides import Overrides

    given = {"output_dir": str(tmp_path / "t"), "use_cpu": True, "max_steps": 3, "report_to": "none"}
    today = transformers.TrainingArguments(**given, warmup_steps=0.25, eval_strategy="no")
    theirs = trl.SFTTrainer(str(model), today, train_dataset=dataset(TEXTS)).args
    ours = TrainingArguments(**given, warmup_ratio=0.25, evaluation_strategy="no", overwrite_output_dir=True)
    found = former.complete_arguments(ours, str(model), {}, Overrides())
    assert type(found) is trl.SFTConfig
    for field in dataclasses.fields(trl.SFTConfig):
        if field.name not in ("model_init_kwargs", "gradient_checkpointing_kwargs"):  # TRL fills in while it loads
            assert getattr(found, field.name) == getattr(theirs, field.name), field.name
    assert (found.learning_rate, found.gradient_checkpointing) == (5e-5, False)  # of transformers, unlike TRL's


@pytest.mark.unsloth
def test_the_defaults_are_those_of_the_class_that_is_trls_now(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsloth puts its own SFTConfig in the place of TRL's when it is imported on a GPU, which happens first. Its
    generator is the reference for the folder of a trainer without `args`."""
    import trl

    from finetune import SFTConfig
    from finetune.drop_in import former
    from finetune.drop_in.overrides import Overrides

    assert SFTConfig.__mro__[1] is trl.SFTConfig
    assert SFTConfig.__dataclass_fields__ == trl.SFTConfig.__dataclass_fields__
    spec = importlib.util.find_spec("unsloth")
    assert spec is not None and spec.origin is not None
    generator = (Path(spec.origin).parent / "models" / "rl.py").read_text(encoding="utf-8")
    loaded = type("Loaded", (), {"for_training": None, "max_seq_length": 8, "config": SimpleNamespace()})()

    class OnCpu(SFTConfig):
        def __init__(self, folder: str) -> None:
            super().__init__(folder, use_cpu=True, bf16=False)

    monkeypatch.setattr(former, "SFTConfig", OnCpu)
    assert f"output_dir = '{former.complete_arguments(None, loaded, {}, Overrides()).output_dir}'" in generator


def test_an_adapter_that_the_model_has_is_not_added_again(
    model: Path, make: Callable[..., Any], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """TRL refuses both together; before 0.20 it ignored `peft_config`, as scripts of that time expect."""
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from finetune import SFTConfig, SFTTrainer
    from finetune.drop_in import former

    def config(**given: Any) -> LoraConfig:
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **given)

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config())
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="PeftModel"):
        trl.SFTTrainer(adapted, args, train_dataset=dataset(TEXTS), peft_config=config())
    with pytest.raises(ValueError, match="PeftModel"):
        SFTTrainer(adapted, args, train_dataset=dataset(TEXTS), peft_config=config(lora_alpha=9))
    names = set(adapted.state_dict())
    trainer = SFTTrainer(adapted, args, train_dataset=dataset(TEXTS), peft_config=config())
    assert set(trainer.model.state_dict()) == names and list(trainer.model.peft_config) == ["default"]
    assert "`peft_config` is left out: the model has this adapter" in capsys.readouterr().out
    default = LoraConfig(task_type="CAUSAL_LM")
    by_family = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM"))
    assert (
        former.adapter_to_add(by_family, default) is None and former.adapter_to_add(trainer.model, default) is default
    )


@pytest.mark.parametrize(
    ("columns", "given", "unsloth", "read"),
    [
        (("text", "messages"), {}, False, None),
        (("text", "messages"), {"dataset_text_field": "text"}, False, "text"),
        (("text", "prompt", "completion"), {"dataset_text_field": "text"}, False, "text"),
        (("text", "messages"), {}, True, "text"),
        (("text", "prompt", "completion"), {}, True, None),
        (("text",), {"formatting_func": print}, True, "text"),
        (("text",), {"formatting_func": print}, False, None),
        (("body",), {"formatting_func": print}, True, None),
        (("text", "messages"), {"assistant_only_loss": True}, True, None),
        (("text",), {"formatting_func": print, "dataset_text_field": "text"}, False, "text"),
        (("text",), {"formatting_func": print, "dataset_text_field": "text", "packing": True}, False, None),
    ],
)
def test_which_column_older_versions_read(
    columns: tuple[str, ...], given: dict[str, Any], unsloth: bool, read: str | None
) -> None:
    """Unsloth: `sft_prepare_dataset` of unsloth_zoo/dataset_utils.py. TRL 0.12: `_prepare_non_packed_dataloader` takes
    formatting_func only without a dataset_text_field, `_prepare_packed_dataloader` before it."""
    from finetune.drop_in import former

    args = SimpleNamespace(
        dataset_text_field="text", packing=False, assistant_only_loss=False, completion_only_loss=None
    )
    vars(args).update({name: value for name, value in given.items() if name != "formatting_func"})
    model = SimpleNamespace(for_training=None) if unsloth else SimpleNamespace()
    function = given.get("formatting_func")
    assert former.row_reader(args, model, function, given.get("dataset_text_field")).column(list(columns)) == read


class Words:
    """A tokenizer of single letters."""

    pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("templates", "text", "trained"),
    [
        (("A:",), "Q:xA:yes", "yes"),
        (("A:",), "Q:xA:yA:z", "z"),
        (("A:",), "nothing", ""),
        (("A:", "Q:"), "Q:xA:yQ:vA:w", "yw"),
        (("A:", "Q:"), "xA:y", ""),
        ((([65, 58]),), "Q:xA:yes", "yes"),
    ],
)
def test_the_completion_collator(templates: tuple[Any, ...], text: str, trained: str) -> None:
    """As TRL's former class: after the last response template, or after each up to the next instruction."""
    from finetune import DataCollatorForCompletionOnlyLM

    collator = DataCollatorForCompletionOnlyLM(*templates, tokenizer=Words())
    ids = [ord(letter) for letter in text]
    batch = collator([{"input_ids": ids}, {"input_ids": ids + [7, 7]}])
    assert "".join(chr(one) for one in batch["labels"][0].tolist() if one != -100) == trained
    assert batch["input_ids"].shape == batch["labels"].shape == (2, len(ids) + 2)


def test_setup_chat_format_gives_chatml_and_its_tokens(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune import setup_chat_format

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ValueError, match="has a chat template"):
        tokenizer.chat_template = "x"
        setup_chat_format(loaded, tokenizer)
    tokenizer.chat_template = None
    loaded, tokenizer = setup_chat_format(loaded, tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>" and loaded.config.eos_token_id == tokenizer.eos_token_id
    assert loaded.get_input_embeddings().weight.shape[0] >= len(tokenizer)


def test_former_names_are_read_back(tmp_path: Path) -> None:
    from finetune import SFTConfig, TrainingArguments

    given: dict[str, Any] = dict(max_seq_length=8, warmup_ratio=0.25, group_by_length=True)
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    assert {name: getattr(args, name) for name in given} == given
    assert TrainingArguments(str(tmp_path), use_cpu=True, evaluation_strategy="no").evaluation_strategy == "no"
    with pytest.raises(AttributeError, match="no attribute 'max_sequence_length'"):
        _ = args.max_sequence_length


def test_arguments_that_trl_ignores_are_reported(make: Callable[..., Any], capsys: pytest.CaptureFixture) -> None:
    make([{"input_ids": [3, 4, 5]}] * 8, dataset_kwargs={"add_special_tokens": False}, formatting_func=str)
    printed = capsys.readouterr().out
    assert "SFTTrainer: `add_special_tokens` in `dataset_kwargs` has no effect: TRL ignores it since 0.13." in printed
    assert "train_dataset: `formatting_func` is not used, as in TRL: the rows have token ids already." in printed
