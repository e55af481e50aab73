"""Tests of finetune/config/arguments.py."""

from dataclasses import fields

import pytest

from finetune.config import (
    ConfigError,
    arguments,
    dump_yaml,
    load,
)
from finetune.config.schema import SECTIONS
from finetune.config.sft_fields import CHOICES
from tests.helpers.config import problem


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("bf16_full_eval", "true", "model.dtype"),
        ("eval_strategy", "epoch", "training.eval_steps"),
        ("save_strategy", "best", "training.save_steps"),
        ("truncation_mode", "keep_end", "data.over_length"),
        ("chat_template_path", "org/model", "model.chat_template"),
        ("report_to", "all", "must name each service"),
        ("trackio_space_id", "x", "trackio sync"),
        ("push_to_hub", "true", "finetune export RUN --to adapter"),
        ("embedding_learning_rate", "1e-5", "all weights are trained with one learning rate"),
        ("context_parallel_size", "2", "use training.context_parallel"),
        ("hub_model_id", "me/model", "hf upload USER/NAME DIR"),
        ("deepspeed", "ds.json", "training.strategy: shard"),
        ("compute_metrics", "mine:f", "Name a function that scores generated answers as logging.metric"),
        ("preprocess_logits_for_metrics", "mine:f", "as logging.metric"),
        ("fsdp", "full_shard", "training.strategy: shard"),
        ("length_column_name", "x", "`seed` alone"),
        ("logging_dir", "x", "TensorBoard"),
        ("average_tokens_across_devices", "false", "supervised tokens"),
        ("dataset_kwargs", "{skip_prepare_dataset: true}", "`data:`"),
        ("do_train", "false", "this command always trains"),
        ("extra", "{}", "by its own name"),
    ],
)
def test_managed_fields_are_refused_with_the_reason(name, value, remedy):
    text = problem(f"--training.{name}", value)
    assert f"--training.{name} {value}" in text and remedy in text


@pytest.mark.parametrize(("given", "kept"), [("true", "group_by_length"), ("false", "random")])
def test_group_by_length_is_the_former_name_of_the_sampling_strategy(given, kept):
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--training.group_by_length", given])
    assert config.training.train_sampling_strategy == kept


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bf16": "true"}, {"model.dtype": "bfloat16"}),
        ({"fp16": "true", "bf16": "false"}, {"model.dtype": "float16"}),
        ({"fp16": "false", "bf16": "false"}, {"model.dtype": "auto"}),
        ({"dataset_num_proc": "3"}, {"data.num_proc": 3}),
        ({"use_liger_kernel": "true"}, {"model.layer_kernels": "liger"}),
        ({"use_liger_kernel": "false"}, {"model.layer_kernels": "torch"}),
        ({"dataset_text_field": "content"}, {"data.dataset_text_field": "content"}),
        ({"truncation_mode": "keep_start"}, {"data.over_length": "truncate"}),
        ({"activation_checkpointing": "false"}, {"training.gradient_checkpointing": False}),
        ({"chat_template_path": "x.jinja"}, {"model.chat_template": "x.jinja"}),
        ({"eval_strategy": '"no"'}, {"training.eval_steps": 0}),
        ({"save_strategy": "no"}, {"training.save_steps": 0}),
        ({"save_strategy": "steps", "save_steps": "7"}, {"training.save_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": "7"}, {"training.eval_steps": 7}),
        ({"report_to": "wandb"}, {"logging.report_to": "wandb"}),
        ({"report_to": "none"}, {"logging.report_to": "none"}),
        ({"report_to": "[tensorboard, mlflow]"}, {"logging.report_to": ["tensorboard", "mlflow"]}),
        ({"do_train": "true", "logging_strategy": "steps", "loss_type": "nll"}, {}),
        ({"label_smoothing_factor": "0", "push_to_hub": "false", "eval_on_start": "true"}, {}),
    ],
)
def test_names_of_sft_config_set_our_keys(write, given, expected):
    """On the command line and in a file alike; the resolved configuration has our name alone."""
    own = ["--model.model_name_or_path", "m", "--data.train_file", "t.jsonl", "--data.eval_file", "e.jsonl"]
    flags = [word for name, value in given.items() for word in (f"--training.{name}", value)]
    path = write("training: {" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}\n")
    for config in (load([*own, *flags]), load([*own, "--config", str(path)])):
        resolved = config.to_dict()
        for name, value in expected.items():
            section, key = name.split(".")
            assert resolved[section][key] == value
            assert name in config.given or value in ("auto", {})
        foreign = set(given) - {"eval_steps", "save_steps"}
        assert not config.training.extra and not foreign & set(resolved["training"])


@pytest.mark.parametrize(
    ("given", "expected", "now"),
    [
        ("training.warmup_ratio: 0.1", ("training", "warmup_steps", 0.1), "training.warmup_steps"),
        ("training.per_gpu_train_batch_size: 2", ("training", "per_device_train_batch_size", 2), "per_device_train_"),
        ("training.max_seq_length: 64", ("data", "max_length", 64), "data.max_length"),
        ("data.max_seq_length: 64", ("data", "max_length", 64), "data.max_length"),
        ("model.max_seq_length: 64", ("data", "max_length", 64), "data.max_length"),
        ("training.evaluation_strategy: steps", ("training", "eval_steps", 5), "training.eval_strategy"),
        ("training.no_cuda: true", ("training", "extra", {"use_cpu": True}), "training.use_cpu"),
        ("training.save_safetensors: true", ("training", "extra", {}), "no effect on the result"),
    ],
)
def test_former_names_are_taken_with_a_note(write, given, expected, now):
    name, _, value = given.partition(": ")
    section, key = name.split(".")
    own = ["--model.model_name_or_path", "m", "--data.train_file", "t.jsonl", "--data.eval_file", "e.jsonl"]
    own += ["--training.eval_steps", "5"]
    path = str(write(f"{section}: {{{key}: {value}}}\n"))
    for config in (load([*own, f"--{name}", value]), load([*own, "--config", path])):
        assert getattr(getattr(config, expected[0]), expected[1]) == expected[2]
        (note,) = config.notes
        assert key in note and now in note
        assert key not in dump_yaml(config)


def test_a_former_name_is_checked_like_todays():
    assert "`--training.warmup_ratio x`: expected a number" in problem("--training.warmup_ratio", "x")
    text = problem("--training.evaluation_strategy", "epoch")
    assert "--training.evaluation_strategy epoch" in text and "training.eval_steps" in text
    assert "overwrite_output_dir" not in str(load(["--training.overwrite_output_dir"]).notes)  # a key of ours


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("evaluation_strategy: steps", "use training.eval_steps, such as training.eval_steps: 100;"),
        ("eval_strategy: steps", "use training.eval_steps, such as training.eval_steps: 100;"),
        ("training: {evaluation_strategy: steps}", "Set training.eval_steps, such as training.eval_steps: 100."),
        ("training: {evaluation_strategy: epoch}", "Use training.eval_steps, such as training.eval_steps: 100;"),
        ("warmup_ratio: 0.1", "It is training.warmup_steps now (float, default 0.0)."),
        ("max_seq_length: 512", "It is data.max_length now (int | null, default 2048)."),
        ("no_cuda: true", "It is training.use_cpu now"),
    ],
)
def test_a_former_name_gets_the_key_to_write(write, given, expected):
    assert expected in problem("--config", write(f"{given}\n"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--training.bf16", "true", "--training.fp16", "true"], ("training.bf16 true", "training.fp16 true")),
        (["--training.bf16", "--model.dtype", "float32"], ("training.bf16", "model.dtype float32")),
        (["--training.bf16", "false", "--model.dtype", "bfloat16"], ("training.bf16 false", "model.dtype bfloat16")),
        (["--training.eval_strategy", "steps"], ("training.eval_strategy steps", "training.eval_steps is 0")),
        (["--training.eval_strategy", "no", "--training.eval_steps", "2"], ("eval_strategy no", "eval_steps 2")),
        (["--training.save_strategy", "no", "--training.save_steps", "2"], ("save_strategy no", "save_steps 2")),
        (["--training.dataset_num_proc", "0"], ("dataset_num_proc 0", "at least 1")),
        (["--training.dataset_num_proc", "a"], ("dataset_num_proc a", "an integer or null")),
    ],
)
def test_names_that_contradict_are_both_named(given, words):
    with pytest.raises(ConfigError) as refusal:
        load(given)
    (text,) = refusal.value.problems
    assert all(word in text for word in words), text


def test_the_command_line_outranks_the_file_by_any_name(write):
    path = str(write("model: {dtype: float32}\ntraining: {fp16: true, dataset_num_proc: 2}\n"))
    own = ["--model.model_name_or_path", "m", "--data.train_file", "t.jsonl"]
    with pytest.raises(ConfigError, match="contradict"):
        load([*own, "--config", path])
    path = str(write("training: {fp16: true, dataset_num_proc: 2, bf16: false}\n"))
    config = load([*own, "--config", path, "--training.bf16", "--data.num_proc", "5"])
    assert (config.model.dtype, config.data.num_proc) == ("bfloat16", 5)
    path = str(write("data: {dataset_text_field: a}\n"))
    config = load([*own, "--training.dataset_text_field", "b", "--config", path])
    assert config.data.dataset_text_field == "b"


def test_tables_name_what_exists():
    own = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)}
    keys = {name.split(".")[1] for name in own} - {"extra"}
    table = arguments.rows(arguments.CONFIG)
    assert set(arguments.FOREIGN.values()) <= own
    assert not set(arguments.FOREIGN) & {*keys, *table}
    targets = {target for row in table.values() for target, _ in (*row.sets.values(), *row.excludes.values())}
    assert arguments.TAKEN <= set(arguments.REFUSED) | keys and targets <= own
    assert set(CHOICES) <= keys


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("group_by_length maybe", "must be true or false here. Use training.train_sampling_strategy: group_by_length."),
        ("bf16 maybe", "must be true or false here. Use model.dtype: bfloat16."),
        ("eval_strategy epoch", "must be no or steps here. Use training.eval_steps"),
        ("average_tokens_across_devices maybe", "must be true here: the loss is the mean"),
        ("fsdp full_shard", "must be null or false here. Use training.strategy: shard"),
        ("full_determinism maybe", "expected true or false."),
    ],
)
def test_a_value_that_is_not_taken_names_those_that_are(argument, expected):
    name, _, value = argument.partition(" ")
    assert expected in problem(f"--training.{name}", value)
