"""What TRL's own tests ask of `SFTTrainer`, restated briefly for ours. `tests/conformance/run` runs TRL's tests
themselves. With FINETUNE_TESTS_TRAINER=trl these tests run on `trl.SFTTrainer`, which shows that they are right."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny

WHOSE = os.environ.get("FINETUNE_TESTS_TRAINER", "finetune")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using packing, but the attention implementation is not:UserWarning"),
    pytest.mark.filterwarnings("ignore:Padding-free training is enabled, but the attention:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*chat template.*:UserWarning"),
    # A gradient that is not needed at the input of a reentrant block.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    # PEFT asks the Hub for the configuration of the model that it saves.
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]

ROWS = 10
MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)


# --- a small model, its rows, and the trainer -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of one layer and 16 dimensions."""
    return tiny.make_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def trainer_of(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a trainer: keywords that `SFTConfig` knows go there, the others to the trainer."""
    monkeypatch.setenv("FINETUNE_BACKEND", "transformers")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    trainer_class = importlib.import_module(WHOSE).SFTTrainer
    from trl import SFTConfig

    if WHOSE == "trl":
        from tests.conformance import trl_on_cpu

        trl_on_cpu.give_kernel()

    def make(rows: Any = None, **given: Any) -> Any:
        own = {name: given.pop(name) for name in list(given) if name not in SFTConfig.__dataclass_fields__}
        settings: dict[str, Any] = {"output_dir": str(tmp_path / "out"), "report_to": "none", "save_strategy": "no"}
        settings |= {"use_cpu": True, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 2}
        arguments = SFTConfig(**settings | {"disable_tqdm": True, "learning_rate": 0.01} | given)
        return trainer_class(**{"model": str(model), "args": arguments, "train_dataset": rows} | own)

    return make


def texts() -> Any:
    """Rows of plain text, of five lengths."""
    from datasets import Dataset

    return Dataset.from_dict({"text": [" ".join(tiny.WORDS[: 3 + number % 5]) for number in range(ROWS)]})


def prompts() -> Any:
    """Rows of a prompt and its completion."""
    from datasets import Dataset

    rows = [{"prompt": f"the {word}", "completion": " runs over a hill"} for word in tiny.WORDS[:ROWS]]
    return Dataset.from_list(rows)


def talks(**more: list[Any]) -> Any:
    """Conversations of one question and one answer, with further columns."""
    from datasets import Dataset

    messages = [
        [{"role": "user", "content": f"the {word}"}, {"role": "assistant", "content": "runs over a hill"}]
        for word in tiny.WORDS[:ROWS]
    ]
    return Dataset.from_dict({"messages": messages, **more})


def trains(trainer: Any) -> None:
    """All parameters that are to be trained change, no other does, and the loss is a number."""
    before = {name: (value.clone(), value.requires_grad) for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert trainer.state.global_step == 2
    for name, (value, trained) in before.items():
        assert trainer.model.get_parameter(name).equal(value) != trained, name


def labels_of(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of each prepared row."""
    rows = trainer.train_dataset
    return [(list(row["input_ids"]), list(row.get("labels") or row["input_ids"])) for row in rows]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_text_is_learned_with_its_end(trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    trainer = trainer_of(texts())
    expected = [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in texts()["text"]]
    assert labels_of(trainer) == [(ids, ids) for ids in expected]
    trains(trainer)


@pytest.mark.parametrize("only", [None, True, False])
def test_completion_is_learned_unless_all_is_asked(
    only: bool | None, trainer_of: Callable[..., Any], tokenizer: Any
) -> None:
    trainer = trainer_of(prompts(), completion_only_loss=only)
    for (ids, labels), row in zip(labels_of(trainer), prompts(), strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert ids == tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]
        masked = len(prompt) if only is not False else 0
        assert labels == [-100] * masked + ids[masked:]
    trains(trainer)


@pytest.mark.parametrize("shape", ["messages", "conversations"])
def test_conversation_is_learned_whole_by_default(shape: str, trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    rows = talks()
    if shape == "conversations":
        rename = {"role": "from", "content": "value"}
        foreign = [[{rename[key]: m[key] for key in rename} for m in row["messages"]] for row in rows]
        rows = rows.add_column("conversations", foreign).remove_columns("messages")
    trainer = trainer_of(rows)
    expected = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in talks()]
    assert labels_of(trainer) == [(ids, ids) for ids in expected]
    trains(trainer)


def test_conversational_prompt_and_completion(trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    rows = talks().map(lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]})
    trainer = trainer_of(rows.remove_columns("messages"))
    for (ids, labels), row in zip(labels_of(trainer), rows, strict=True):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
    trains(trainer)


def test_assistant_only_loss(trainer_of: Callable[..., Any], tokenizer: Any, model: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = MARKED_TEMPLATE
    trainer = trainer_of(talks(), assistant_only_loss=True, processing_class=own)
    answer = tokenizer("runs over a hill<|im_end|>")["input_ids"]
    for (ids, labels), messages in zip(labels_of(trainer), talks()["messages"], strict=True):
        assert ids == own.apply_chat_template(messages, return_dict=False)
        assert [label for label in labels if label != -100] == answer
    trains(trainer)


def test_known_templates_get_the_marks_of_trl(trainer_of: Callable[..., Any], model: Path) -> None:
    """As in TRL, the line break after the turn is trained, and the tokenizer that is saved keeps its template."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template, qwen2_5_training_chat_template

    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = qwen2_5_chat_template
    trainer = trainer_of(talks(), assistant_only_loss=True, processing_class=own)
    for (ids, labels), messages in zip(labels_of(trainer), talks()["messages"], strict=True):
        marked = own.apply_chat_template(
            messages,
            chat_template=qwen2_5_training_chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert ids == marked["input_ids"]
        masks = marked["assistant_masks"]
        assert labels == [id if mask else -100 for id, mask in zip(ids, masks, strict=True)]
    assert trainer.processing_class.chat_template == qwen2_5_chat_template
    trains(trainer)


def test_assistant_only_and_completion_only(trainer_of: Callable[..., Any], tokenizer: Any, model: Path) -> None:
    """A user's message in the completion is masked, and so is an assistant's in the prompt."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = MARKED_TEMPLATE
    earlier, later = talks()["messages"][0], talks()["messages"][1]
    rows = [{"prompt": [*earlier, later[0]], "completion": [later[1], *earlier]}] * 4
    from datasets import Dataset

    settings = {"assistant_only_loss": True, "completion_only_loss": True}
    trainer = trainer_of(Dataset.from_list(rows), **settings, processing_class=own)
    answer = tokenizer("runs over a hill<|im_end|>")["input_ids"]
    assert [label for label in labels_of(trainer)[0][1] if label != -100] == 2 * answer
    trains(trainer)


def test_tokenized_rows(trainer_of: Callable[..., Any]) -> None:
    """Labels are kept as they are; a mask makes them (that of the completion if asked); else all tokens are learned."""
    from datasets import Dataset

    ids, labels = [[5, 6, 7, 8], [9, 10, 11]], [[5, -100, 7, -100], [-100, 10, 11]]
    mask = [[0, 0, 1, 1], [0, 1, 0]]
    given = Dataset.from_dict({"input_ids": ids, "labels": labels, "assistant_masks": [[1] * 4, [1] * 3]})
    assert labels_of(trainer_of(given)) == list(zip(ids, labels, strict=True))
    masked = [[-100, -100, 7, 8], [-100, 10, -100]]
    for name, only in (("assistant_masks", None), ("completion_mask", True)):
        trainer = trainer_of(Dataset.from_dict({"input_ids": ids, name: mask}), completion_only_loss=only)
        assert labels_of(trainer) == list(zip(ids, masked, strict=True))
    plain = trainer_of(Dataset.from_dict({"input_ids": ids}))
    assert labels_of(plain) == list(zip(ids, ids, strict=True))
    trains(plain)


def test_truncation_drops_rows_without_labels(trainer_of: Callable[..., Any]) -> None:
    from datasets import Dataset

    rows = {"input_ids": [[5, 6, 7, 8, 9], [6, 7, 8]], "assistant_masks": [[0, 0, 0, 1, 1], [1, 1, 1]]}
    assert labels_of(trainer_of(Dataset.from_dict(rows), max_length=3)) == [([6, 7, 8], [6, 7, 8])]


def test_truncation_to_max_length(trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    expected = [tokenizer(text + tokenizer.eos_token)["input_ids"][:4] for text in texts()["text"]]
    assert [ids for ids, _ in labels_of(trainer_of(texts(), max_length=4))] == expected


def test_formatting_func(trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    rows = prompts().rename_columns({"prompt": "question", "completion": "answer"})
    trainer = trainer_of(rows, formatting_func=lambda row: f"{row['question']}:{row['answer']}")
    expected = [tokenizer(f"{row['question']}:{row['answer']}{tokenizer.eos_token}")["input_ids"] for row in rows]
    assert labels_of(trainer) == [(ids, ids) for ids in expected]
    trains(trainer)
    # Beside prompt and completion, which TRL refuses today: the text, as in TRL before 0.15.
    beside = trainer_of(prompts(), formatting_func=lambda row: f"{row['prompt']}:{row['completion']}")
    assert labels_of(beside) == labels_of(trainer)


def test_chat_template_kwargs_of_each_row(trainer_of: Callable[..., Any], model: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = "{{ 'LOUD ' if loud else 'soft ' }}" + tiny.CHAT_TEMPLATE
    trainer = trainer_of(
        talks(chat_template_kwargs=[{"loud": bool(number % 2)} for number in range(ROWS)]), processing_class=own
    )
    shown = [own.decode(ids)[:5] for ids, _ in labels_of(trainer)]
    assert shown == ["soft ", "LOUD "] * (ROWS // 2)
    assert trainer.processing_class.chat_template == own.chat_template


@pytest.mark.parametrize("tools_as", ["text", "list"])
def test_tool_calls(tools_as: str, trainer_of: Callable[..., Any], model: Path) -> None:
    """Tools as JSON text or as a list; the arguments differ between rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = TOOL_TEMPLATE
    rows = []
    for name, argument in (("sing", "birds"), ("run", "dogs")) * 3:
        tool = {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "seven"}}}
        messages = [{"role": "user", "content": name}, {"role": "assistant", "tool_calls": [call]}]
        rows.append({"messages": messages, "tools": json.dumps([tool]) if tools_as == "text" else [tool]})
    trainer = trainer_of(Dataset.from_list(rows), processing_class=own)
    shown = own.decode(labels_of(trainer)[1][0])
    assert shown.startswith("run\n<|im_start|>user\nrun") and '"dogs": "seven"}' in shown
    trains(trainer)


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packing_trains(strategy: str, trainer_of: Callable[..., Any]) -> None:
    trains(trainer_of(texts(), packing=True, packing_strategy=strategy, max_length=10))


@pytest.mark.parametrize("eval_packing", [None, False])
def test_packs_hold_whole_documents(eval_packing: bool | None, trainer_of: Callable[..., Any]) -> None:
    rows = texts()
    trainer = trainer_of(
        rows, eval_dataset=rows.select(range(3)), packing=True, eval_packing=eval_packing, max_length=32
    )
    packs = trainer.train_dataset["seq_lengths"]
    assert sum(len(pack) for pack in packs) == ROWS and len(packs) < ROWS
    assert all(sum(pack) <= 32 for pack in packs)
    evaluated = trainer.eval_dataset
    assert ("seq_lengths" in evaluated.column_names) == (eval_packing is None)
    assert len(evaluated) == (3 if eval_packing is False else 1)


def test_packing_carries_labels(trainer_of: Callable[..., Any], tokenizer: Any) -> None:
    trainer = trainer_of(prompts(), packing=True, max_length=64)
    assert "completion_mask" not in trainer.train_dataset.column_names
    learned = [label for _, labels in labels_of(trainer) for label in labels if label != -100]
    assert learned == ROWS * tokenizer(" runs over a hill" + tokenizer.eos_token)["input_ids"]


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "loss"),
    [("path", "nll"), ("model", None), ("peft_config", "nll"), ("peft_config", None), ("peft model", None)],
)
def test_model_as_it_is_given(how: str, loss: str | None, trainer_of: Callable[..., Any], model: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {"loss_type": loss} if loss else {}
    if how in ("model", "peft model"):
        given["model"] = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    if how == "peft model":
        given["model"] = get_peft_model(given["model"], LoraConfig(task_type="CAUSAL_LM"))
    if how == "peft_config":
        given["peft_config"] = LoraConfig(task_type="CAUSAL_LM")
    trainer = trainer_of(texts(), **given)
    names = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
    assert all("lora_" in name for name in names) == how.startswith("peft")
    # The first step moves only B of an adapter, because B starts at zero; the second one moves A.
    trains(trainer)


@pytest.mark.campaign
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("adapter", [False, True])
def test_gradient_checkpointing(reentrant: bool, adapter: bool, trainer_of: Callable[..., Any]) -> None:
    from peft import LoraConfig

    options = {"use_reentrant": reentrant}
    own = {"peft_config": LoraConfig(task_type="CAUSAL_LM")} if adapter else {}
    trains(trainer_of(texts(), gradient_checkpointing=True, gradient_checkpointing_kwargs=options, **own))


def test_model_dtype(trainer_of: Callable[..., Any]) -> None:
    import torch

    trainer = trainer_of(texts(), model_init_kwargs={"dtype": torch.bfloat16}, learning_rate=0.1)
    trains(trainer)
    assert {value.dtype for value in trainer.model.parameters()} == {torch.bfloat16}


def test_tags_and_default_arguments(
    trainer_of: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `args`, as in TRL's first example, and with plain `TrainingArguments`."""
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import SFTConfig

    monkeypatch.chdir(tmp_path)
    plain = TrainingArguments(output_dir=str(tmp_path / "plain"), report_to="none", use_cpu=True)
    assert isinstance(trainer_of(texts(), args=plain).args, SFTConfig)
    for own in ({}, {"peft_config": LoraConfig(task_type="CAUSAL_LM")}):
        assert {"sft", "trl"} <= set(trainer_of(texts(), **own).model.model_tags)


@pytest.mark.parametrize("source", ["file", "model"])
def test_chat_template_path(source: str, trainer_of: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    """The template of a file or of another model is used, and saved with each checkpoint."""
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(model)
    bare.chat_template = None
    file = tmp_path / "template.jinja"
    file.write_text("{{ 'own' }}" + tiny.CHAT_TEMPLATE)
    trainer = trainer_of(
        talks(),
        processing_class=bare,
        chat_template_path=str(file if source == "file" else model),
        save_strategy="steps",
        save_steps=2,
    )
    trains(trainer)
    expected = file.read_text() if source == "file" else tiny.CHAT_TEMPLATE
    assert (tmp_path / "out" / "checkpoint-2" / "chat_template.jinja").read_text() == expected


def test_train_dataset_is_required(trainer_of: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trainer_of(None)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_while_training(trainer_of: Callable[..., Any]) -> None:
    """One set or several, and a metric that only the trainer of TRL computes chooses the best model."""
    one = trainer_of(
        texts(),
        eval_dataset=texts().select(range(3)),
        **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_mean_token_accuracy"},
    )
    one.train()
    assert math.isfinite(one.state.log_history[0]["eval_loss"])
    assert one.state.best_metric is not None
    several = {"first": texts().select(range(3)), "second": texts().select(range(3, 6))}
    two = trainer_of(texts(), eval_dataset=several, eval_strategy="steps", eval_steps=2)
    two.train()
    assert math.isfinite(two.state.log_history[-3]["eval_first_loss"])
    assert math.isfinite(two.state.log_history[-2]["eval_second_loss"])


@pytest.mark.skipif(WHOSE == "trl", reason="replaces a method of this project")
def test_accuracy_and_entropy_count_every_step(trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a fused head for which every supervised token is right and has an entropy of 2."""
    trainer = trainer_of(texts(), logging_steps=2, max_steps=4)
    forward = trainer.model.forward

    def forward_as_fused(*args: Any, **inputs: Any) -> Any:
        outputs = forward(*args, **inputs)
        supervised = inputs["labels"][:, 1:] != -100
        outputs.is_top1, outputs.entropy = supervised, 2.0 * supervised
        return outputs

    monkeypatch.setattr(trainer.model, "forward", forward_as_fused)
    trainer.train()
    logged = [one for one in trainer.state.log_history if "loss" in one]
    assert [one["mean_token_accuracy"] for one in logged] == [1.0, 1.0]
    assert [one["entropy"] for one in logged] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["dataset", "dict", "dataset dict"])
def test_evaluate_prepares_what_it_is_given(kind: str, trainer_of: Callable[..., Any]) -> None:
    from datasets import DatasetDict

    rows = texts().select(range(4))
    several = {"first": rows, "second": rows}
    given = {"dataset": rows, "dict": several, "dataset dict": DatasetDict(several)}[kind]
    metrics = trainer_of(texts()).evaluate(eval_dataset=given)
    names = ["eval_loss"] if kind == "dataset" else ["eval_first_loss", "eval_second_loss"]
    assert all(math.isfinite(metrics[name]) for name in names)


def test_eval_dataset_is_prepared_at_once(trainer_of: Callable[..., Any]) -> None:
    rows = texts().select(range(2))
    assert "input_ids" in trainer_of(texts(), eval_dataset=rows).eval_dataset.column_names
    several = trainer_of(texts(), eval_dataset={"first": rows, "second": rows}).eval_dataset
    assert set(several) == {"first", "second"} and "input_ids" in several["second"].column_names
    assert trainer_of(texts()).eval_dataset is None


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_a_tracker_gets_the_names_of_trl_and_figures_of_this_project(
    trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`report_to` makes transformers' own callback, which is told the same as in a run from a configuration."""
    import transformers
    from transformers.integrations import integration_utils

    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[int] = []

    class StandIn(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.append((state.global_step, integration_utils.rewrite_logs(logs)))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(len(logged))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", StandIn)
    trainer = trainer_of(talks(), report_to=["tensorboard", "wandb"], logging_steps=1, eval_dataset=talks())
    trainer.train()
    trainer.evaluate()
    steps = [values for _, values in logged if "train/loss" in values]
    assert len(steps) == 2 and len(ended) == 1
    names = {"train/grad_norm", "train/learning_rate", "train/num_tokens", "train/epoch"}
    assert names <= set(steps[0])
    assert "eval/loss" in logged[-1][1] and "eval/mean_token_accuracy" in logged[-1][1]
    if WHOSE != "trl":
        assert {"train/step_seconds", "train/tokens_per_gpu"} <= set(steps[-1])
        assert "train/token_accuracy" not in steps[0]
