"""`from finetune import SFTTrainer` in a process of its own rank: what it refuses, how it reads rows, what it leaves.

What TRL's own tests ask is in test_drop_in_trainer.py, several ranks are in tests/distributed/test_drop_in.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import importlib.util
import inspect
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from tests.cases import models
from tests.helpers import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

TEXTS = [{"text": f"row {number} " + "word " * (number % 7 + 1)} for number in range(24)]
PAIRS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A trainer: keywords that SFTConfig knows go there, the others to the trainer."""
    monkeypatch.setenv("FINETUNE_BACKEND", "transformers")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    from finetune import SFTConfig, SFTTrainer

    def make(rows: Any = TEXTS, trainer: type = SFTTrainer, path: Path = model, **given: Any) -> Any:
        settings: dict[str, Any] = dict(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            logging_steps=1,
            max_steps=4,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            learning_rate=1e-2,
        )
        settings |= {name: given.pop(name) for name in list(given) if name in SFTConfig.__dataclass_fields__}
        if settings["per_device_train_batch_size"] is None:  # not given
            del settings["per_device_train_batch_size"]
        return trainer(str(path), SFTConfig(**settings), train_dataset=dataset(rows), **given)

    return make


def dataset(rows: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows) if isinstance(rows, list) else rows


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def refusal(make: Callable[..., Any], *arguments: Any, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        make(*arguments, **given)
    assert isinstance(caught.value, ValueError)  # what TRL raises
    return str(caught.value)


# --- the constructor --------------------------------------------------------------------------------------------------


def test_the_constructor_is_that_of_the_installed_trl(make: Callable[..., Any]) -> None:
    import trl

    from finetune import SFTTrainer

    original = next(one for one in trl.SFTTrainer.__mro__ if one.__module__ == "trl.trainer.sft_trainer")
    theirs = inspect.signature(inspect.unwrap(original.__init__)).parameters
    if "model" not in theirs:  # Unsloth's class for CPUs hides it
        theirs = inspect.signature(original.__mro__[1].__init__).parameters
    ours = dict(inspect.signature(SFTTrainer.__init__).parameters)
    assert ours.pop("global_batch_size").kind is inspect.Parameter.KEYWORD_ONLY
    assert ours.pop("older").kind is inspect.Parameter.VAR_KEYWORD
    assert [(one.name, one.default, one.kind) for one in ours.values()] == [
        (one.name, one.default, one.kind) for one in theirs.values()
    ]


def test_the_fused_head_of_trl_is_found(make: Callable[..., Any]) -> None:
    """On a GPU the loss of a transformers model goes through it, unless Unsloth's version of the class left it out."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from finetune.engine.training.loss import has_fused_head

    trainer = make(peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert has_fused_head(trainer.model) and has_fused_head(make().model)
    assert not has_fused_head(AutoModelForCausalLM.from_config(trainer.model.config))


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


def test_unknown_names_of_the_configuration_are_refused_as_by_trl(tmp_path: Path) -> None:
    from finetune import SFTConfig

    with pytest.raises(TypeError, match="learnig_rate"):
        SFTConfig(str(tmp_path), learnig_rate=1e-4)


def test_the_saved_arguments_need_no_package_of_ours(make: Callable[..., Any]) -> None:
    import trl

    assert type(make().args) is trl.SFTConfig


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a loss of one's own": (dict(compute_loss_func=print), "`compute_loss_func`"),
    "metrics on logits": (dict(compute_metrics=print), "does not build the logits"),
    "logits in between": (dict(preprocess_logits_for_metrics=print), "`preprocess_logits_for_metrics`"),
    "another loss": (dict(loss_type="dft"), "`loss_type='dft'`"),
    "label smoothing": (dict(label_smoothing_factor=0.1), "`label_smoothing_factor=0.1`"),
    "a rank's own mean": (dict(average_tokens_across_devices=False), "`average_tokens_across_devices=False`"),
    "another order": (dict(data_seed=3), "Set `seed`"),
    "groups by length": (dict(train_sampling_strategy="group_by_length", packing=True), "one length"),
    "rows left out": (dict(dataloader_drop_last=True), "`dataloader_drop_last=True`"),
    "the batch that fits": (dict(auto_find_batch_size=True), "Set per_device_train_batch_size"),
    "pushes while training": (dict(push_to_hub=True), "trainer.push_to_hub()"),
    "packs without length": (dict(packing=True, max_length=None), "needs `max_length`"),
    "no turns": (dict(assistant_only_loss=True), "not conversational"),
    "kernels for a GPU": (dict(use_liger_kernel=True), "`use_liger_kernel=True`: there is no GPU. Remove it"),
    "a choice of kernels": (dict(liger_kernel_config={"rope": False}), "`liger_kernel_config={'rope': False}`"),
    "an end that is no token": (dict(eos_token="<nothing>"), "not found in the vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_with_the_remedy(make: Callable[..., Any], name: str) -> None:
    given, words = REFUSED[name]
    assert words in refusal(make, **given)


def test_ligers_kernels_are_installed_once_and_recorded(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the adapter is there. transformers' trainer would install them again when training begins."""
    from peft import LoraConfig

    from finetune.engine.kernels import liger

    installed: list[Any] = []
    monkeypatch.setattr(liger, "why_not", lambda stack, kind: None)
    monkeypatch.setattr(liger, "install", installed.append)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *given: pytest.fail("installed by others"))
    adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make(use_liger_kernel=True, peft_config=adapter, max_steps=1)
    trainer.train()
    assert installed == [trainer.model] and hasattr(trainer.model, "peft_config")
    assert trainer.job.layer_kernels.to_dict() == {"kernels": "Liger", "reason": "set by use_liger_kernel"}
    assert make().job.layer_kernels.kernels == "transformers" and len(installed) == 1


def test_evaluation_before_training_computes_as_after_it(make: Callable[..., Any]) -> None:
    """In the run's precision: accelerate puts autocast around the model's forward only when training begins."""
    entered: list[bool] = []

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        entered.append(True)
        yield

    trainer = make(eval_dataset=dataset(TEXTS))
    trainer.accelerator.autocast = autocast
    trainer.evaluate()
    assert entered


def test_everything_is_refused_at_once(make: Callable[..., Any]) -> None:
    said = refusal(make, compute_metrics=print, data_seed=3)
    assert said.count("\n  - ") == 2 and "compute_metrics" in said and "data_seed" in said


@pytest.mark.parametrize("method", ["compute_loss", "_get_train_sampler", "get_train_dataloader"])
def test_a_subclass_with_its_own_loss_or_order_is_refused(make: Callable[..., Any], method: str) -> None:
    from finetune import SFTTrainer

    own = type("Mine", (SFTTrainer,), {method: lambda self, *given, **named: None})
    assert f"Mine overrides `{method}`" in refusal(make, trainer=own)


def test_what_is_changed_after_the_trainer_is_created_is_refused(make: Callable[..., Any]) -> None:
    from finetune.drop_in.refusals import Refused

    def by_alias(trainer: Any) -> None:
        trainer._created_with[0][0].max_steps = 1

    def own_method(trainer: Any) -> None:
        trainer.compute_loss = lambda *_, **__: 0.0

    def of_trainer(trainer: Any) -> None:
        trainer.args.learning_rate *= 2

    def as_a_whole(trainer: Any) -> None:
        trainer.args = copy.copy(trainer.args)

    for change, name in (
        (as_a_whole, "args"),
        (by_alias, "max_steps"),
        (of_trainer, "learning_rate"),
        (own_method, "compute_loss"),
    ):
        trainer = make(max_steps=2)
        change(trainer)
        with pytest.raises(Refused, match=f"^{name}: changed after the trainer was created"):
            trainer.train()


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
    found = former.arguments(args, loaded, dict(older), Overrides())
    assert settings.data(found).max_length == length
    assert ("Rows have up to 2,048 tokens" in capsys.readouterr().out) is printed
    args.max_seq_length = 4096  # type: ignore[attr-defined]  # the field of Unsloth's SFTConfig
    assert former.arguments(args, loaded, {}, Overrides()).max_length == 2048
    of_another_loader = type("Loaded", (), {"max_seq_length": 2048})()
    assert former.arguments(args, of_another_loader, {}, Overrides()).max_length == 4096


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
    found = former.arguments(ours, str(model), {}, Overrides())
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
    assert f"output_dir = '{former.arguments(None, loaded, {}, Overrides()).output_dir}'" in generator


def test_an_adapter_that_the_model_has_is_not_added_again(
    model: Path, make: Callable[..., Any], capsys: pytest.CaptureFixture
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
    args = SFTConfig("o", use_cpu=True, bf16=False, report_to="none")
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
    assert former.adapter(by_family, default) is None and former.adapter(trainer.model, default) is default


def test_tokenized_rows_longer_than_unsloth_loaded_the_model_for_are_refused(make: Callable[..., Any]) -> None:
    from finetune.drop_in import refusals

    rows = make().layout.rows
    refusals.row_length(rows, "train", None)
    refusals.row_length(rows, "train", int(rows.lengths.max()))
    with pytest.raises(UserError, match="was loaded with max_seq_length=8"):
        refusals.row_length(rows, "train", 8)


def test_arguments_that_only_unsloths_own_trainer_reads_are_refused(make: Callable[..., Any]) -> None:
    from finetune.drop_in import refusals

    trainer = make()
    given = {"train_dataset": dataset(TEXTS), "args": trainer.given}
    refusals.check(type(trainer), type(trainer), trainer.given, given)
    trainer.given.embedding_learning_rate = 1e-5
    with pytest.raises(UserError, match="`embedding_learning_rate=1e-05`: all weights are trained with one"):
        refusals.check(type(trainer), type(trainer), trainer.given, given)


def test_rows_that_are_streamed_or_pictures_are_refused(make: Callable[..., Any]) -> None:
    assert "IterableDataset" in refusal(make, dataset(TEXTS).to_iterable_dataset())
    assert "vision" in refusal(make, [{"text": "a", "image": 1}])
    assert "`eval_dataset['a']` is empty" in refusal(make, eval_dataset={"a": dataset(TEXTS).select([])})


def test_a_model_on_several_devices_is_refused() -> None:
    from finetune.drop_in import refusals

    with pytest.raises(refusals.Refused, match="spread over 0, 1"):
        refusals.model(SimpleNamespace(hf_device_map={"a": 0, "b": 1}), None)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_batch_means_what_it_means_to_trl_unless_it_is_fixed(make: Callable[..., Any]) -> None:
    trainer = make(gradient_accumulation_steps=3)
    assert trainer.plan.global_batch_size == 12
    fixed = make(global_batch_size=8, per_device_train_batch_size=2)
    assert fixed.plan.global_batch_size == 8 and fixed.args.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("ranks", "per_device", "expected"),
    [(1, 2, (2, 4)), (2, 2, (2, 2)), (4, 2, (2, 1)), (8, 2, (1, 1)), (1, 3, (2, 4)), (2, 8, (4, 1)), (1, 8, (8, 1))],
)
def test_a_fixed_batch_fits_every_number_of_ranks_that_divides_it(
    ranks: int, per_device: int, expected: tuple[int, int]
) -> None:
    """A rank holds at most `per_device_train_batch_size` rows at once."""
    from finetune.drop_in import settings

    batch = settings.batch(SimpleNamespace(per_device_train_batch_size=per_device), 8, ranks)
    assert (batch.per_device, batch.accumulation, batch.global_batch_size) == (*expected, 8)
    with pytest.raises(UserError, match="global_batch_size 8"):
        settings.batch(SimpleNamespace(per_device_train_batch_size=per_device), 8, 3 * ranks)


def test_a_batch_of_another_number_of_ranks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the arguments are those that it was launched with: 4 rows per rank, once per step."""
    from finetune.drop_in import settings

    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=1)

    def kept(ranks: int, rows: int, launched: int) -> tuple[int, ...] | None:
        monkeypatch.setattr(settings.distributed, "ranks", lambda: SimpleNamespace(world_size=ranks))
        had = {"per_device": 1, "global_batch_size": rows, "world_size": launched}
        found = settings.resumed_batch(args, {"batch": had})
        return found and (found.per_device, found.accumulation, found.global_batch_size)

    assert kept(2, 4, 1) == (2, 1, 4) and kept(1, 8, 2) == (4, 2, 8) and kept(2, 16, 4) == (4, 2, 16)
    assert kept(2, 8, 2) is None and kept(2, 6, 1) is None
    assert settings.resumed_batch(args, {}) is None
    with pytest.raises(UserError, match="global_batch_size 4"):
        kept(3, 4, 1)


def test_a_formatting_function_gives_the_text_of_a_row(make: Callable[..., Any]) -> None:
    trainer = make(PAIRS_AS_COLUMNS, formatting_func=lambda row: f"{row['question']} {row['answer']}")
    plain = make([{"text": f"{row['question']} {row['answer']}"} for row in PAIRS_AS_COLUMNS])
    assert trainer.train_dataset["input_ids"] == plain.train_dataset["input_ids"]
    assert "returned a list" in refusal(make, PAIRS_AS_COLUMNS, formatting_func=lambda row: [row["question"], 1])
    assert "failed on train_dataset:row 1: KeyError" in refusal(make, formatting_func=lambda row: row["no"])


def test_a_formatting_function_of_batches_gives_as_many_texts_as_it_returns(make: Callable[..., Any]) -> None:
    """As in TRL before 0.20: it gets columns of lists. Text of one row is what the others do not change."""

    def texts(batch: dict[str, list[str]]) -> list[str]:
        pairs = zip(batch["question"], batch["answer"], strict=True)
        return [text for question, answer in pairs for text in (question, f"{question} {answer}")]

    wanted = [
        {"text": text} for row in PAIRS_AS_COLUMNS for text in (row["question"], "{question} {answer}".format(**row))
    ]
    found = make(PAIRS_AS_COLUMNS, formatting_func=texts)
    assert found.train_dataset["input_ids"] == make(wanted).train_dataset["input_ids"]
    # A row's other columns do not count, though TRL would read messages first.
    beside = [row | {"messages": [{"role": "user", "content": "no"}]} for row in PAIRS_AS_COLUMNS]
    assert make(beside, formatting_func=texts).train_dataset["input_ids"] == found.train_dataset["input_ids"]
    text = refusal(make, PAIRS_AS_COLUMNS, formatting_func=lambda batch: [f"Q: {batch['question']}"])
    assert "returned a list with one text for train_dataset:rows 1 to 12" in text


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
    assert former.reading(args, model, function, given.get("dataset_text_field")).column(list(columns)) == read


def test_the_text_field_of_the_trainer_is_the_one_column(
    make: Callable[..., Any], capsys: pytest.CaptureFixture
) -> None:
    from finetune import SFTTrainer

    rows = [row | {"messages": [{"role": "user", "content": "no"}]} for row in TEXTS]
    trainer = make(rows, trainer=functools.partial(SFTTrainer, dataset_text_field="text"))
    assert trainer.train_dataset["input_ids"] == make(TEXTS).train_dataset["input_ids"]
    assert "only the column 'text' is read, as given to the trainer" in capsys.readouterr().out


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


PAIRS_AS_COLUMNS = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(12)]


@pytest.mark.parametrize("empty", [{"prompt": "0 + 1 =", "completion": ""}, {"text": ""}], ids=["completion", "text"])
def test_an_empty_answer_is_a_row_as_in_trl(make: Callable[..., Any], empty: dict[str, str]) -> None:
    """A completion trains its end; a text that is empty has no token to predict, so it is no row here."""
    others = [row for row in (*PAIRS, *TEXTS) if row.keys() == empty.keys()]
    trainer = make([*others[:7], empty])
    assert len(trainer.job.data.train) == (8 if "completion" in empty else 7)


def test_rows_that_are_set_later_replace_those_of_the_plan(make: Callable[..., Any]) -> None:
    """As Unsloth's `train_on_responses_only(trainer)` does: other labels on the same tokens."""
    trainer = make()
    before, plan = trainer.layout.label_tokens.sum(), trainer.plan.digest()

    def last_only(row: dict[str, Any]) -> dict[str, Any]:
        return {"labels": [-100] * (len(row["input_ids"]) - 1) + row["input_ids"][-1:]}

    trainer.train_dataset = trainer.train_dataset.map(last_only)
    assert trainer.layout.label_tokens.sum() == len(TEXTS) < before
    assert trainer.plan.digest() != plan
    trainer.train()
    end = trainer.processing_class.eos_token_id
    model = trainer.model.eval()
    assert len(losses(trainer)) == 4
    row = torch.tensor([trainer.train_dataset[0]["input_ids"]])
    assert row[0, -1] == end and losses(trainer)[-1] < losses(trainer)[0]
    assert torch.isfinite(model(row).logits).all()


def test_packs_are_shown_as_trl_shows_them(make: Callable[..., Any]) -> None:
    trainer = make(packing=True, max_length=64, eval_dataset=dataset(TEXTS[:5]), eval_packing=False)
    packs = trainer.train_dataset
    assert sum(map(len, packs["seq_lengths"])) == len(TEXTS) and len(packs) < len(TEXTS)
    assert packs.column_names == ("input_ids", "labels", "seq_lengths") and len(packs[1:3]["input_ids"]) == 2
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) <= 64 for row in packs)
    assert packs.map(lambda row: row).num_rows == len(packs)  # whatever else a Dataset can do
    assert len(trainer.eval_dataset) == 5 and "seq_lengths" not in trainer.eval_dataset.column_names


def test_wrapped_rows_are_one_sequence_cut_to_length(make: Callable[..., Any]) -> None:
    whole, rows = make().train_dataset, make(packing=True, packing_strategy="wrapped", max_length=20).train_dataset
    assert [token for row in rows["input_ids"] for token in row] == [t for row in whole["input_ids"] for t in row]
    assert {len(row) for row in rows["input_ids"][:-1]} == {20} and "seq_lengths" not in rows.column_names


def test_a_digest_follows_the_content_and_not_the_storage() -> None:
    from datasets import concatenate_datasets

    from finetune.drop_in.rows import content_digest

    rows = dataset([{"a": f"row {number}", "b": [number, None]} for number in range(3000)])
    part = rows.select(range(500, 2500))
    assert content_digest(part) == content_digest(dataset(part.to_list()))
    assert content_digest(part) == content_digest(
        concatenate_datasets([rows.select(range(500, 900)), rows.select(range(900, 2500))])
    )
    others = [part.shuffle(seed=1), part.select(range(1999)), part.rename_column("a", "c"), rows]
    assert len({content_digest(one) for one in [part, *others]}) == 5


# --- a data collator of one's own -------------------------------------------------------------------------------------


def test_a_collator_that_makes_labels_is_followed(make: Callable[..., Any]) -> None:
    """transformers' collator for language modeling masks every padding token, the end of the text among them."""
    from transformers import DataCollatorForLanguageModeling

    plain = make(PAIRS)
    collator = DataCollatorForLanguageModeling(plain.processing_class, mlm=False)
    trainer = make(PAIRS, data_collator=collator)
    padding = plain.processing_class.pad_token_id
    for row, before in zip(trainer.train_dataset, plain.train_dataset, strict=True):
        assert row["input_ids"] == before["input_ids"]
        assert row["labels"] == [-100 if token == padding else token for token in row["input_ids"]]


def test_collators_of_chance_or_of_several_rows_are_refused(make: Callable[..., Any]) -> None:
    import random

    def padded(rows: list[Any], change: Callable[[list[int], int], list[int]]) -> dict[str, Any]:
        width = max(len(row["input_ids"]) for row in rows)
        filled = [row["input_ids"] + [2] * (width - len(row["input_ids"])) for row in rows]
        labels = [change(row["labels"], len(rows)) + [-100] * (width - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(filled), "labels": torch.tensor(labels)}

    def chance(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: [one if random.random() < 0.5 else -100 for one in labels])

    def neighbors(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, count: labels if count == 1 else [-100] * len(labels))

    def further(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: labels) | {"weights": torch.ones(len(rows))}

    def joined(rows: list[Any]) -> Any:
        whole = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        return {"input_ids": whole, "labels": whole}

    def fine(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: labels)

    assert "other labels each time" in refusal(make, data_collator=chance)
    assert "beside another row" in refusal(make, data_collator=neighbors)
    assert "also returns weights" in refusal(make, data_collator=further)
    assert "joins them" in refusal(make, data_collator=joined)
    assert make(data_collator=fine).train_dataset["labels"] == make().train_dataset["labels"]


# --- training, evaluation, files --------------------------------------------------------------------------------------


def test_an_evaluation_is_the_mean_over_the_tokens_of_each_set(make: Callable[..., Any]) -> None:
    held_out = {"short": dataset(TEXTS[:3]), "long": dataset(TEXTS[3:10])}
    trainer = make(eval_dataset=held_out, per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    for name in held_out:
        total = count = 0.0
        for row in trainer.eval_dataset[name]:
            ids = torch.tensor(row["input_ids"])
            with torch.no_grad():
                logits = trainer.model(ids[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
        assert metrics[f"eval_{name}_loss"] == pytest.approx(total / count, rel=1e-5)
        assert 0 <= metrics[f"eval_{name}_mean_token_accuracy"] <= 1
    other = trainer.evaluate(dataset(TEXTS[:3]), metric_key_prefix="test")
    assert other["test_loss"] == pytest.approx(metrics["eval_short_loss"], rel=1e-6)
    with pytest.raises(UserError, match="predict"):
        trainer.predict(dataset(TEXTS))


def test_a_run_resumes_on_another_number_of_ranks_with_its_batch(make: Callable[..., Any], tmp_path: Path) -> None:
    """A checkpoint as 2 ranks with 4 rows each write it, resumed on one rank by the same script."""
    out = tmp_path / "out"
    whole = make(gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
    whole.train()
    manifest = out / "checkpoint-2" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    assert content["batch"] == {"per_device": 4, "global_batch_size": 8, "world_size": 1}
    manifest.write_text(json.dumps(content | {"batch": content["batch"] | {"world_size": 2}}))
    resumed = make()
    assert resumed.plan.global_batch_size == 4
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    record = json.loads((out / "run.json").read_text())
    assert record["batch"] == {"per_device": 4, "accumulation": 2, "global_batch_size": 8}
    assert record["config"]["training"]["global_batch_size"] == 8
    text = (out / "run.yaml").read_text()
    assert text.startswith("# The rows came from a script") and "global_batch_size: 8" in text


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(make: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = make(max_steps=1)
    first.train(resume_from_checkpoint=True)  # nothing to resume: as the first line of a script that is restarted
    make(max_steps=1).train(resume_from_checkpoint=True)  # its weights are nowhere
    assert (out / "earlier-run-1" / "run.json").is_file()
    first.save_model()
    before = (out / "run.json").read_bytes()
    with pytest.raises(UserError, match="holds a finished run, and no checkpoint. Load its model"):
        make(max_steps=1).train(resume_from_checkpoint=True)
    assert (out / "run.json").read_bytes() == before
    make(max_steps=1).train()
    assert (out / "earlier-run-2" / "model.safetensors").is_file()


def test_messages_name_the_arguments_of_a_script(make: Callable[..., Any], tmp_path: Path) -> None:
    from finetune.drop_in.names import in_script

    make(save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(UserError) as error:
        make(learning_rate=1e-3).train(resume_from_checkpoint=checkpoint)
    assert "- learning_rate: was 0.01, now 0.001" in str(error.value)
    assert "apply them with train(resume_with_changes=True)" in str(error.value)
    with pytest.raises(UserError, match=r"^max_steps is 1, .* earlier checkpoint as resume_from_checkpoint.$"):
        make(max_steps=1).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(UserError, match=r"^resume_from_checkpoint is nowhere: the folder does not exist"):
        make().train(resume_from_checkpoint="nowhere")
    with pytest.raises(UserError, match=r"^global_batch_size 7 is not a multiple of|^The global batch"):
        make(global_batch_size=2**21)
    for text, expected in {
        "set training.seed and data.max_length": "set seed and max_length",
        "set training.gradient_checkpointing: true, or model.load_in_4bit: true": (
            "set gradient_checkpointing=True, or load_in_4bit=True"
        ),
        "lora.r: was 8, now 16": "LoraConfig's r: was 8, now 16",
        "Set data.eval_file or data.eval_fraction.": "Set eval_dataset.",
        "see data.md and training.py": "see data.md and training.py",
    }.items():
        assert in_script(text) == expected


def test_rows_of_text_are_read_by_a_processors_tokenizer(make: Callable[..., Any], model: Path) -> None:
    from transformers import AutoTokenizer, ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
            super().__init__(tokenizer, chat_template=chat_template)

    tokenizer = AutoTokenizer.from_pretrained(model)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "red"}]}] * 8
    trainer = make(talk, processing_class=Processor(tokenizer, template))
    assert trainer.processing_class is tokenizer and trainer.processing_class.chat_template == template
    assert trainer.train_dataset["input_ids"][0] == make(talk).train_dataset["input_ids"][0]
    with pytest.raises(UserError, match="appears to be vision-related"):
        make([row | {"images": [""]} for row in talk], processing_class=Processor(tokenizer, template))


def test_a_run_resumes_and_a_new_run_moves_the_old_one_aside(make: Callable[..., Any], tmp_path: Path) -> None:
    whole = make(save_strategy="steps", save_steps=2)
    whole.train()
    out = tmp_path / "out"
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}

    resumed = make(save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name

    with pytest.raises(UserError, match="learning_rate"):
        make(learning_rate=1e-3).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    make(learning_rate=1e-3).train(resume_from_checkpoint=str(out / "checkpoint-2"), resume_with_changes=True)

    assert not list(out.glob("earlier-run-*"))
    again = make()
    callbacks = list(again.callback_handler.callbacks)
    again.train()
    # Nothing of the run's own stays, which a second call would find.
    assert again.callback_handler.callbacks == callbacks
    assert not {"evaluate", "compute_loss", "get_batch_samples", "_save_checkpoint"} & set(vars(again))
    assert not {"backward", "clip_grad_norm_"} & set(vars(again.accelerator))
    assert (out / "earlier-run-1" / "checkpoint-4").is_dir() and not list(out.glob("checkpoint-*"))
    assert losses(again) == losses(whole)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done" and record["losses"] == pytest.approx(losses(whole), rel=1e-6)
    assert record["config"]["training"]["global_batch_size"] == 4 and record["backend"] == "transformers"


def test_both_front_doors_record_the_same(
    make: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job, as a script and as a configuration: the same fields of run.json, losses, evaluations and weights.
    A step is the whole epoch, because the two order their rows by different names of the data."""
    from finetune import train
    from tests.helpers.runs import in_this_process

    tokenized = make(TEXTS).train_dataset["input_ids"]
    rows = [{"input_ids": list(ids), "labels": list(ids)} for ids in tokenized]
    both = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "adamw_torch", "max_steps": 3}
    both |= {"eval_steps": 2, "gradient_checkpointing": False}
    script = make(rows[:8], eval_dataset=dataset(rows[8:12]), eval_strategy="steps", **both, global_batch_size=8)
    script.train()
    script.save_model()

    for name, some in (("train", rows[:8]), ("eval", rows[8:12])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    settings = {f"training.{name}": value for name, value in both.items()} | {
        "model.model_name_or_path": model,
        "model.backend": "transformers",
        "model.full_finetuning": True,
        "model.dtype": "float32",
        "data.train_file": tmp_path / "train.jsonl",
        "data.eval_file": tmp_path / "eval.jsonl",
        "data.packing": False,
        "data.num_proc": 1,
        "training.output_dir": tmp_path / "configured",
        "training.global_batch_size": 8,
        "training.per_device_train_batch_size": 4,
        "logging.logging_steps": 1,
        "logging.generate_samples": 0,
    }
    with in_this_process(monkeypatch, tmp_path):
        assert train.main([word for key, value in settings.items() for word in (f"--{key}", str(value))]) == 0

    code, configured = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("out", "configured"))
    assert code.keys() == configured.keys()
    assert code["batch"] == configured["batch"]
    for field in ("losses", "eval_loss_before", "eval_loss_after"):
        assert code[field] == pytest.approx(configured[field], rel=1e-5), field
    steps = [[one["step"] for one in record["evaluations"]] for record in (code, configured)]
    assert steps == [[0, 2, 3]] * 2
    for field in ("status", "steps", "tokens", "total_steps", "attention", "loss_normalized_by", "best", "sharding"):
        assert code[field] == configured[field], field
    assert code["final_files"].keys() == {"model.safetensors"} <= configured["final_files"].keys()


def test_an_evaluation_that_the_script_does_not_ask_for_is_not_made(make: Callable[..., Any], tmp_path: Path) -> None:
    """One that it does, before and after training, is none that its callbacks and its log know of."""
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        def __init__(self) -> None:
            self.evaluated: list[int] = []

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.evaluated.append(state.global_step)

    def record(**given: Any) -> dict[str, Any]:
        trainer = make(eval_dataset=held_out, callbacks=[seen], **given)
        trainer.train()
        logged = [
            entry["step"] for entry in trainer.state.log_history if {"eval_short_loss", "eval_long_loss"} & entry.keys()
        ]
        assert logged == seen.evaluated
        return json.loads((tmp_path / "out" / "run.json").read_text())

    seen, held_out = Seen(), {"short": dataset(TEXTS[:3]), "long": dataset(TEXTS[3:10])}
    without = record()
    assert seen.evaluated == [] and without["evaluations"] == []
    assert without["eval_loss_before"] is None and without["eval_loss_after"] is None

    found = record(eval_strategy="steps", eval_steps=3)
    assert seen.evaluated == [3, 3, 4, 4]  # transformers evaluates after the last step
    assert found["eval_loss_before"].keys() == found["eval_loss_after"].keys() == held_out.keys()
    assert all(found["eval_loss_after"][name] < found["eval_loss_before"][name] for name in held_out)
    assert [one["step"] for one in found["evaluations"]] == [0, 0, 3, 3, 4, 4]


def test_the_scores_after_training_are_those_of_the_best_weights(make: Callable[..., Any], tmp_path: Path) -> None:
    """Which `load_best_model_at_end` has loaded; here the highest loss is the best."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "greater_is_better": True}
    trainer = make(eval_dataset=dataset(TEXTS[:6]), **best, **often)
    trainer.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    by_step = {one["step"]: one["loss"] for one in record["evaluations"]}
    assert record["best"] == {"step": 1, "metric": "loss", "value": by_step[1], "loaded": True}
    assert record["eval_loss_after"] == by_step[1] > by_step[4]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(record["eval_loss_after"], rel=1e-5)


def test_final_files_are_those_that_the_script_saves(make: Callable[..., Any], tmp_path: Path) -> None:
    """In run.json until the next run of the folder; a finished run that is resumed stays as it is."""
    from finetune.runtime.files import checksum

    def recorded() -> dict[str, Any]:
        return json.loads((tmp_path / "out" / "run.json").read_text())

    trainer = make(save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert recorded()["status"] == "done" and recorded()["final_files"] is None
    trainer.save_model()
    done = recorded()
    assert done["final_files"] == {"model.safetensors": checksum(tmp_path / "out" / "model.safetensors")}

    again = make(save_strategy="steps", save_steps=4)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert recorded() == done
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name


def test_a_full_disk_is_a_sentence_and_does_not_cost_the_model(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.engine import record
    from finetune.errors import RunError

    write, full = record.write_json, {"done"}

    def write_until(path: Path, content: dict[str, Any]) -> None:
        if content.get("status") in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(record, "write_json", write_until)
    trainer = make()
    trainer.train()
    assert "No space left on the disk" in capsys.readouterr().err
    trainer.save_model()
    assert (tmp_path / "out" / "model.safetensors").is_file()

    full.add("running")
    with pytest.raises(RunError, match="No space left on the disk"):
        make().train()


def test_a_signal_after_the_last_step_does_not_cost_the_model(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a configuration saves its model, then ends with 130; a script has yet to save it."""
    from transformers import TrainerCallback

    from finetune.runtime.ranks import interrupt

    class Signal(TrainerCallback):
        def on_train_end(self, *given: Any, **named: Any) -> None:
            monkeypatch.setattr(interrupt, "requested", lambda: True)

    trainer = make(callbacks=[Signal()])
    assert trainer.train().global_step == 4
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "done"


@pytest.mark.parametrize("fault", ["memory", "divergence"])
def test_a_script_ends_as_a_configured_run_does(
    fault: str, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence with the remedy, and a record that says that the run failed."""
    from transformers import TrainerCallback

    from finetune import review
    from finetune.errors import RunError

    class Full(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            if fault == "memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    trainer = make(callbacks=[Full()])
    training = dataclasses.replace(trainer.job.config.training, stop_on_divergence=True)
    trainer.job.config = dataclasses.replace(trainer.job.config, training=training)
    monkeypatch.setattr(review, "divergence", lambda losses: "loss 9" if len(losses) > 1 else None)
    expected = {"memory": "per_device_train_batch_size to 2", "divergence": "The run diverges at step 2: loss 9"}[fault]
    with pytest.raises(RunError, match=expected):
        trainer.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "failed" and expected in record["error"]
    assert (tmp_path / "out" / "checkpoint-2").is_dir() == (fault == "divergence")


def test_a_script_that_leaves_the_micro_batch_open_gets_the_fastest(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a configuration does: searched before the first step and known in the next run; a size that is set is kept."""
    from finetune.measure import micro_batch

    asked: list[int] = []

    def try_size(trainer: Any, layout: Any, per_device: int, memory: Any) -> micro_batch.Attempt:
        asked.append(per_device)
        speed = {1: 100, 2: 1000, 4: 700, 8: 600}[per_device]
        return micro_batch.Attempt(per_device=per_device, fits=True, peak_bytes=1.0, tokens_per_second=speed)

    memory = types.SimpleNamespace(limit_bytes=1e12, reset=lambda: None, peak_bytes=lambda: 1e6)
    monkeypatch.setattr(micro_batch, "try_size", try_size)
    monkeypatch.setattr(micro_batch, "memory_of", lambda device: memory)
    monkeypatch.setattr(micro_batch, "WON_BACK_STEPS", 3)
    monkeypatch.setattr("finetune.config.batch.LARGEST_DEFAULT_PER_DEVICE", 1)

    def trained(per_device: int | None, **given: Any) -> tuple[Any, dict[str, Any]]:
        trainer = make(global_batch_size=8, per_device_train_batch_size=per_device, **given)
        trainer.train()
        return trainer, json.loads((tmp_path / "out" / "run.json").read_text())

    kept, record = trained(4)
    assert asked == [] and record["micro_batch"]["reason"] == "as configured"
    assert record["config"]["training"]["per_device_train_batch_size"] == 4

    kept, record = trained(8)  # TRL's default, but given
    assert asked == [] and record["micro_batch"]["reason"] == "as configured" and record["batch"]["per_device"] == 8

    found, record = trained(None, save_strategy="steps", save_steps=2)
    assert asked and record["batch"] == {"per_device": 2, "accumulation": 4, "global_batch_size": 8}
    assert record["micro_batch"]["per_device"] == found.args.per_device_train_batch_size == 2
    assert losses(found) == pytest.approx(losses(kept), rel=1e-5)

    asked.clear()
    found.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert asked == [] and record["micro_batch"]["reason"].endswith("from an earlier search of this job")
    resumed = make(global_batch_size=8, per_device_train_batch_size=None)
    resumed.train(resume_from_checkpoint=tmp_path / "out" / "checkpoint-2")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert asked == [] and record["micro_batch"]["reason"] == "as in the checkpoint"


def test_what_is_saved_loads_without_running_code(make: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make()
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    files = {path.suffix for path in (tmp_path / "final").iterdir()}
    assert files <= {".json", ".safetensors", ".jinja"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_callbacks_see_every_step_and_what_trl_logs(make: Callable[..., Any]) -> None:
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        steps = 0
        logs: list[dict[str, Any]] = []

        def on_step_end(self, *given: Any, **named: Any) -> None:
            self.steps += 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            self.logs.append(logs)

    seen = Seen()
    trainer = make(callbacks=[seen], logging_steps=0.5)  # of 4 steps
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 4, 4]  # and the summary of the run
    rows = [int(row) for step in (0, 1) for row in trainer.plan.step_rows(0, step)]
    counted = sum(len(trainer.train_dataset[row]["input_ids"]) for row in rows)
    assert seen.steps == 4
    assert seen.logs[0]["num_tokens"] == counted
    assert {"loss", "grad_norm", "learning_rate"} <= set(trainer.state.log_history[0])


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "LoRA"])
def test_losses_are_those_of_trl_on_the_rows_of_the_plan(
    make: Callable[..., Any], model: Path, tmp_path: Path, adapter: bool
) -> None:
    """The reference is trl.SFTTrainer itself, fed the plan's rows in the plan's order."""
    import trl
    from peft import LoraConfig

    from finetune import SFTConfig
    from tests.conformance import trl_on_cpu

    peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    own = make(PAIRS, peft_config=peft_config, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    own.train()
    order = [int(row) for step in range(4) for row in own.plan.step_rows(0, step)]

    trl_on_cpu.give_kernel()
    reference = trl.SFTTrainer(
        str(model),
        SFTConfig(
            output_dir=str(tmp_path / "reference"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            logging_steps=1,
            max_steps=4,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            learning_rate=1e-2,
        ),
        train_dataset=dataset([PAIRS[row] for row in order]),
        peft_config=peft_config,
    )
    reference.train()
    assert losses(own) == pytest.approx(losses(reference), rel=1e-5)
    for name, parameter in reference.model.named_parameters():
        assert torch.allclose(parameter, own.model.get_parameter(name), rtol=1e-3, atol=2e-5), name


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return models.make("moe", tmp_path_factory.mktemp("experts") / "moe")


@pytest.mark.parametrize("coefficient", [0.5, 0.0, None], ids=["given", "off", "the model's"])
def test_by_single_rows_a_mixture_of_experts_trains_as_with_trl(
    make: Callable[..., Any], experts: Path, tmp_path: Path, coefficient: float | None
) -> None:
    """The load-balancing loss of a row is then that of TRL's batch. The reference is trl.SFTTrainer itself."""
    import trl

    from finetune import SFTConfig
    from tests.conformance import trl_on_cpu

    given: dict[str, Any] = dict(
        per_device_train_batch_size=1,
        router_aux_loss_coef=coefficient,
        logging_steps=1,
        max_steps=3,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
    )
    own = make(PAIRS, path=experts, eval_dataset=dataset(PAIRS), **given)
    before = own.evaluate()
    own.train()
    order = [int(row) for step in range(3) for row in own.plan.step_rows(0, step)]
    trl_on_cpu.give_kernel()
    reference = trl.SFTTrainer(
        str(experts),
        SFTConfig(output_dir=str(tmp_path / "reference"), train_sampling_strategy="sequential", **given),
        train_dataset=dataset([PAIRS[row] for row in order]),
    )
    reference.train()
    for name, parameter in reference.model.named_parameters():
        assert torch.allclose(parameter, own.model.get_parameter(name), rtol=1e-4, atol=1e-6), name
    logged = [entry for entry in own.state.log_history if "loss" in entry]
    theirs = [entry for entry in reference.state.log_history if "loss" in entry]
    if coefficient == 0.0:
        assert losses(own) == pytest.approx(losses(reference), rel=1e-5) and "aux_loss" not in logged[0] | theirs[0]
        return
    weight = 0.001 if coefficient is None else coefficient
    terms = [entry["aux_loss"] for entry in logged]
    assert terms == pytest.approx([entry["aux_loss"] for entry in theirs], rel=1e-5)
    # TRL's loss contains the term. Ours, of training and evaluation, is that of the tokens, as of a dense model.
    with_term = [loss + weight * term for loss, term in zip(losses(own), terms, strict=True)]
    assert with_term == pytest.approx(losses(reference), rel=1e-5)
    dense = make(PAIRS, path=experts, eval_dataset=dataset(PAIRS), **given | {"router_aux_loss_coef": 0.0})
    assert before["eval_loss"] == dense.evaluate()["eval_loss"]


def test_a_mixture_of_experts_trains_alike_by_any_micro_batch(make: Callable[..., Any], experts: Path) -> None:
    found: list[Any] = []
    for size, accumulation in ((1, 4), (4, 1)):
        batch: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        batch |= {"max_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
        trainer = make(PAIRS, path=experts, router_aux_loss_coef=0.5, **batch)
        trainer.train()
        router = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").detach()
        found.append((losses(trainer), [entry.get("aux_loss") for entry in trainer.state.log_history[:-1]], router))
    one, other = found
    assert other[0] == pytest.approx(one[0], rel=1e-5) and other[1] == pytest.approx(one[1], rel=1e-5)
    torch.testing.assert_close(other[2], one[2], rtol=1e-4, atol=1e-6)


def test_the_fused_head_keeps_the_load_balancing_loss(make: Callable[..., Any], experts: Path) -> None:
    """TRL's fused head, by which a GPU computes the loss, against that of transformers: one micro-batch."""
    from tests.conformance import trl_on_cpu

    trl_on_cpu.give_kernel()
    trainer, found = make(PAIRS, path=experts, router_aux_loss_coef=0.5), []
    for device in ("cpu", "cuda"):
        trainer.stack = dataclasses.replace(trainer.stack, device=device)
        trainer.model.zero_grad()
        batch = trainer.collate_rows(trainer.layout.__getitems__([0, 1, 2]))
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))
        loss.backward()
        router = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").grad.clone()
        found.append((loss.detach(), router, trainer.statistics.take_load_balancing()))
    torch.testing.assert_close(found[1], found[0])
    trainer.load_balancing.coefficient = 0.0
    trainer.model.zero_grad()
    batch = trainer.collate_rows(trainer.layout.__getitems__([0, 1, 2]))
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9)).backward()
    without = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert (without - found[1][1]).norm() > 0.1 * without.norm()  # the term is a large part of the gradient


def test_a_coefficient_for_experts_that_a_model_lacks_is_refused(make: Callable[..., Any]) -> None:
    assert "LlamaForCausalLM is no mixture of experts" in refusal(make, router_aux_loss_coef=0.1)


# --- order ------------------------------------------------------------------------------------------------------------


def test_rows_of_similar_length_are_grouped_if_asked_for(make: Callable[..., Any]) -> None:
    random, grouped = (make(train_sampling_strategy=strategy) for strategy in ("random", "group_by_length"))
    assert not random.plan.group_by_length and grouped.plan.group_by_length
    assert grouped.job.config.training.train_sampling_strategy == "group_by_length"
    spread = [
        max(one.layout.tokens[one.plan.step_rows(0, 0)]) - min(one.layout.tokens[one.plan.step_rows(0, 0)])
        for one in (random, grouped)
    ]
    assert spread[0] > spread[1]


# --- trained weights --------------------------------------------------------------------------------------------------


def test_a_script_keeps_weights_as_it_loads_the_model() -> None:
    from finetune.drop_in import settings
    from finetune.engine.optimizer import master_weights

    half, whole = torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 3)
    assert settings.kept_weights(half).kind == "none" and settings.kept_weights(whole).kind == "float32"
    text = master_weights.lost_updates_warning(half, settings.kept_weights(half), 2e-5)
    assert text is not None and "12 trained weights have 16 bits" in text and "dtype=torch.float32" in text
    assert master_weights.lost_updates_warning(whole, settings.kept_weights(whole), 2e-5) is None
    half.requires_grad_(False)  # a frozen base under an adapter
    assert settings.kept_weights(half).kind == "float32"


class TwoPoints(torch.optim.SGD):
    """As schedule-free optimizers: the weights that training sees are not the ones it promises."""

    OFFSET = 0.25
    trains = False

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def _move(self, trains: bool) -> None:
        for parameter in [one for group in self.param_groups for one in group["params"]]:
            parameter += self.OFFSET * (trains - self.trains)
        self.trains = trains


def test_an_optimizer_with_two_sets_of_weights_is_evaluated_and_saved_with_the_right_one(
    make: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """Its `eval` comes before evaluations, checkpoints and the final model, its `train` before each step."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, TrainerCallback

    at_first = AutoModelForCausalLM.from_pretrained(model)
    optimizer = TwoPoints(at_first.parameters(), lr=0.0)
    trained_at = []

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trained_at.append(optimizer.trains)

    from finetune import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        at_first,
        SFTConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            report_to="none",
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=dataset(TEXTS),
        eval_dataset=dataset(TEXTS[:8]),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[Watch()],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[-2:] == pytest.approx([before, before]) and trained_at == [True] * 4
    trainer.save_model(str(tmp_path / "saved"))
    right = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for folder in ("out/checkpoint-2", "out/checkpoint-4", "saved"):
        for name, value in load_file(tmp_path / folder / "model.safetensors").items():
            torch.testing.assert_close(value, right[name])
