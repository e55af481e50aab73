"""The configuration layer: `pytest tests/unit/config/test_config.py` on any machine, offline."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from finetune.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TrainingConfig,
    arguments,
    dump_yaml,
    fixed_batch_arguments,
    help_text,
    load,
    reference,
    resolve_batch,
    with_fixed_batch,
)
from finetune.config.help import COMMON, default_of
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.sft_fields import CHOICES, choices, sft_fields
from finetune.config.values import describe
from finetune.errors import UserError, cut, listed
from finetune.train import main as train_main
from tests.helpers import ROOT, launch

MODEL = ["--model.model_name_or_path", "some/model", "--data.train_file", "train.jsonl"]


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(argv))
    assert caught.value.exit_code == 2
    assert all(text in str(caught.value) for text in caught.value.problems)
    return caught.value.problems


def problem(*argv: str) -> str:
    found = problems(*argv)
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Values -------------------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_demo():
    config = load([])
    assert config == Config()
    assert config.demo and config.config_file is None and not config.dry_run and config.json is None


def test_command_line_over_yaml_over_default(write):
    path = write(
        "model: {model_name_or_path: a/b}\ndata: {train_file: t.jsonl}\ntraining: {learning_rate: 1e-5, seed: 7}\n"
    )
    config = load(["--training.seed", "9", "--config", path, "--dry-run", "--json", "out.json"])
    assert (config.training.seed, config.training.learning_rate, config.training.weight_decay) == (9, 1e-5, 0.0)
    assert (config.config_file, config.dry_run, config.json) == (path, True, Path("out.json"))
    assert not config.demo


@pytest.mark.parametrize("text", ["2e-4", "2E-4", "0.0002", '"2e-4"', "2.0e-04"])
def test_an_exponent_is_a_number_in_a_file_and_on_the_command_line(write, text):
    assert load(["--config", write(f"training: {{learning_rate: {text}}}\n")]).training.learning_rate == 2e-4
    assert load(["--training.learning_rate", text]).training.learning_rate == 2e-4
    nested = load(["--config", write("training: {lr_scheduler_kwargs: {min_lr: 1e-5}}\n")])
    assert nested.training.extra == {"lr_scheduler_kwargs": {"min_lr": 1e-5}}


def test_spellings_of_an_option():
    config = load(
        [*MODEL, "--lora.target-modules", "[q_proj, v_proj]", "--model.load-in-4bit", "--training.max_steps", "-1"]
        + [
            "--training.warmup_steps=5",
            "--data.columns={prompt: question}",
            "--training.seed",
            "1",
            "--training.seed=2",
        ]
    )
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.model.load_in_4bit is True
    assert config.data.columns == {"prompt": "question"}
    assert (config.training.max_steps, config.training.warmup_steps, config.training.seed) == (-1, 5.0, 2)
    assert type(config.training.warmup_steps) is float
    assert load(["--model.load_in_4bit", "false"]).model.load_in_4bit is False
    assert load(["--lora.target_modules", "all-linear"]).lora.target_modules == "all-linear"
    assert load(["--training.resume_from_checkpoint"]).training.resume_from_checkpoint is True
    assert load(["--training.resume_from_checkpoint", "out/checkpoint-3"]).training.resume_from_checkpoint.endswith("3")


@pytest.mark.parametrize("text", ["Answer: yes", "Be brief # really", "12e4567", "123", "{x", "[x", "- a: b", "# a"])
def test_text_on_the_command_line_stays_as_it_is(text):
    assert load([*MODEL, "--data.system_prompt", text]).data.system_prompt == text


def test_null_and_quotes_on_the_command_line(write):
    path = write("data: {train_file: a.jsonl, num_proc: 2}\n")
    config = load(["--config", path, *MODEL[:2], "--data.num_proc", "null", "--data.cache_dir", "'null'"])
    assert config.data.num_proc is None and config.data.cache_dir == "null"
    assert load(["--config", path, "--data.train_file", "null"]).data.train_file is None


def test_a_date_in_a_file_is_text(write):
    assert load(["--config", write("training: {output_dir: 2026-01-01}\n")]).training.output_dir == "2026-01-01"


def test_extra_fields_go_by_their_own_name(write):
    path = write("training: {neftune_noise_alpha: 5, adam_beta2: 1e-1, report_to: tensorboard}\n")
    config = load(["--config", path, "--training.torch_compile", "--training.include-num-input-tokens-seen", "all"])
    assert config.training.extra == {
        "neftune_noise_alpha": 5.0,
        "adam_beta2": 0.1,
        "torch_compile": True,
        "include_num_input_tokens_seen": "all",
    }


def test_sections_merge_and_may_be_empty(write):
    assert load(["--config", write("lora: {r: 8}\ntraining:\nlogging: {}\n")]).lora.r == 8
    path = write("data: {columns: {<<: {a: b, d: e}, a: c}}\n")  # a merge key, which is no duplicate
    assert load(["--config", path, *MODEL]).data.columns == {"a": "c", "d": "e"}


def test_the_transformers_backend_takes_stock_checkpointing():
    assert load(["--model.backend", "transformers"]).training.gradient_checkpointing is True
    assert load([]).training.gradient_checkpointing == "unsloth"


def test_length_on_the_command_line_outranks_the_file(write):
    steps = load(["--config", write("training: {num_train_epochs: 3}\n"), "--training.max_steps", "20"]).training
    assert (steps.max_steps, steps.num_train_epochs) == (20, 1.0)
    epochs = load(["--config", write("training: {max_steps: 20}\n"), "--training.num_train_epochs", "3"]).training
    assert (epochs.max_steps, epochs.num_train_epochs) == (-1, 3.0)


# Round trip ---------------------------------------------------------------------------------------------------------

CASES = {
    "demo": [],
    "full": [*MODEL, "--model.full_finetuning", "--training.max_steps", "5", "--training.adam_beta2", "0.9"],
    "converted": [*MODEL, "--model.loader", "FastModel", "--model.loader_kwargs", "{offload_embedding: true}"]
    + ["--lora.adapter_kwargs", "{loftq_config: {a: [1, 0.5]}}", "--lora.bias", "all", "--lora.random_state", "3407"]
    + ["--data.instruction_part", "'<user>\n'", "--data.response_part", '"<bot>\\n\\n"'],
    "transformers": [*MODEL, "--model.backend", "transformers", "--data.system_prompt", "1e5"],
    "lists": [*MODEL, "--lora.modules_to_save", "[embed_tokens]", "--data.eval_file", "[a, b]", "--lora.r", "4"],
    "text": [*MODEL, "--training.run_name", "1e-5", "--data.cache_dir", "2026-01-01"],
}


@pytest.mark.parametrize("argv", CASES.values(), ids=CASES)
def test_round_trip(argv, write):
    config = load(argv)
    for text in (json.dumps(config.to_dict()), yaml.safe_dump(config.to_dict())):
        assert Config.from_dict(yaml.safe_load(text)) == config
    again = load(["--config", write(dump_yaml(config))])
    assert again.to_dict() | {"config_file": None} == config.to_dict()


def test_from_dict_of_another_version():
    saved = Config().to_dict() | {"plugins": {}}
    saved["lora"]["rank"] = 3
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(saved)
    assert len(caught.value.problems) == 2 and "lora.rank" in str(caught.value) and "plugins" in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example(path, write):
    config = load(["--config", str(path)])
    assert not config.demo and config.data.train_file == "data/train.jsonl"
    assert config.model.full_finetuning == (path.name == "full.yaml")
    assert config.model.load_in_4bit == (path.name == "qlora.yaml")
    for world_size in (1, 2, 4, 8):
        assert resolve_batch(config.training, world_size).global_batch_size == config.training.global_batch_size
    assert load(["--config", write(dump_yaml(config))]).training == config.training


def test_all_three_examples_are_there():
    assert {path.name for path in (ROOT / "examples").glob("*.yaml")} >= {"lora.yaml", "qlora.yaml", "full.yaml"}


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_three_misspelt_keys_at_once(write):
    path = write(
        "model:\n  model_name_or_pth: a/b\ndata:\n  train_fil: t.jsonl\n  max_length: 64\n"
        "training:\n  learnin_rate: 1\n"
    )
    found = problems("--config", path)
    assert len(found) == 3  # and no rule complains that model or data is missing
    for text, line, shown, nearest in zip(
        found,
        (2, 4, 7),
        ("model_name_or_pth: a/b", "train_fil: t.jsonl", "learnin_rate: 1"),
        ("model.model_name_or_path", "data.train_file", "training.learning_rate"),
        strict=True,
    ):
        assert text.startswith(f"{path}:{line}: ") and shown in text and f"Nearest is {nearest} (" in text


def test_file_and_command_line_are_reported_together(write):
    path = write("lora: {r: high}\ntraining: {seed: -1}\n")
    found = problems(
        "--config", path, "--lora.use_rslora", "maybe", "--training.lr", "1", "stray", "--trainin.seed", "1"
    )
    assert len(found) == 6
    assert any(text.startswith(f"{path}:1: `lora.r: high`") and "expected an integer." in text for text in found)
    assert any(text.startswith(f"{path}:2: `training.seed: -1`") and "in [0, 2**32)" in text for text in found)
    assert any(
        text.startswith("command line: `--lora.use_rslora maybe`") and "expected true or false" in text
        for text in found
    )
    assert any("`stray`" in text and "not an option" in text for text in found)
    assert any("`--trainin.seed 1`" in text and "It belongs under `training:`" in text for text in found)


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("--lora.r=1.5", "an integer"),
        ("--lora.r=true", "an integer"),
        ("--lora.r=0", "at least 1"),
        ("--lora.r=", "an integer"),
        ("--lora.r=[1]", "an integer"),
        ("--lora.lora_dropout=1", "in [0, 1)"),
        ("--lora.lora_dropout=-0.1", "in [0, 1)"),
        ("--data.eval_fraction=1.0", "in [0, 1)"),
        ("--lora.target_modules=[]", "not empty"),
        ("--lora.modules_to_save=[1]", "a list of strings or null"),
        ("--data.columns=[a]", "a mapping of strings to strings"),
        ("--data.columns={a: 1}", "a mapping of strings to strings"),
        ("--data.columns={1: a}", "a mapping of strings to strings"),
        ("--data.max_length=0", "at least 1"),
        ("--data.num_proc=-2", "at least 1"),
        ("--model.backend=cuda", "one of auto, unsloth, transformers"),
        ("--model.dtype=bf16", "one of auto, bfloat16, float16, float32"),
        ("--training.learning_rate=fast", "a number"),
        ("--training.learning_rate=true", "a number"),
        ("--training.learning_rate=.nan", "a number"),
        ("--training.learning_rate=inf", "a number"),
        ("--training.learning_rate=0", "above 0"),
        ("--training.learning_rate={", "a number"),
        ("--training.num_train_epochs=0", "above 0"),
        ("--training.max_steps=0", "-1 (off) or at least 1"),
        ("--training.global_batch_size=-4", "at least 1"),
        ("--training.save_steps=-1", "at least 0"),
        ("--training.gradient_checkpointing=some", "unsloth or true or false"),
        ("--training.lr_scheduler_type=cosin", "Nearest is cosine"),
        ("--training.optim=adamw", "Nearest is adamw_torch."),
        ("--training.neftune_noise_alpha=loud", "a number or null"),
        ("--training.torch_compile=2", "true or false"),
        ("--training.logging_first_step=1", "true or false"),
        ("--logging.logging_steps=0", "at least 1"),
        ("--model.model_name_or_path=", "not empty"),
    ],
)
def test_wrong_value(argument, allowed):
    name = argument.partition("=")[0].removeprefix("--")
    text = problem(argument)
    assert name in text and allowed in text and argument.partition("=")[2] in text


def test_a_number_where_a_file_needs_text(write):
    assert "got a number. Put it in quotes." in problem("--config", write("model: {revision: 1234567}\n"))
    assert "a list of strings, a string or null" in problem("--config", write("lora: {target_modules: {a: b}}\n"))
    kwargs = "training: {lr_scheduler_kwargs: %s}\n"
    assert "a mapping of strings to values or null" in problem("--config", write(kwargs % "[1]"))
    assert problem("--config", write(kwargs % "'{num_cycles: 2}'")).endswith("got a string. Remove the quotes.")
    text = problem("--config", write("training: {learning_rate: }\n"))
    assert "`training.learning_rate: null`" in text and "expected a number." in text


def test_a_number_in_quotes(write):
    text = problem("--config", write('training: {global_batch_size: "16"}\n'))
    assert text.endswith('expected an integer or null, got the string "16". Remove the quotes.')
    assert load(["--config", write('training: {learning_rate: "1e-5"}\n')]).training.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("training.lr", "training.learning_rate"),
        ("training.micro_batch_size", "training.per_device_train_batch_size"),
        ("training.epochs", "training.num_train_epochs"),
        ("data.sequence_len", "data.max_length"),
        ("model.max_seq_len", "data.max_length"),
        ("model.lora_r", "lora.r"),
        ("lora.rnk", "lora.r"),
        ("data.sample_packing", "data.packing"),
        ("lora.lora_drop_out", "lora.lora_dropout"),
        ("data.max-lenght", "data.max_length"),
        ("training.neftune_noise_alfa", "training.neftune_noise_alpha"),
        ("trainig.learning_rat", "training.learning_rate"),
    ],
)
def test_nearest_name(name, nearest):
    text = problem(f"--{name}", "3")
    assert name.replace("-", "_") in text and f"Nearest is {nearest} (" in text


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("training.r", "lora"),
        ("training.max_length", "data"),
        ("training.packing", "data"),
        ("training.assistant_only_loss", "data"),
        ("training.logging_steps", "logging"),
        ("training.trust_remote_code", "model"),
        ("model.neftune_noise_alpha", "training"),
        ("learning_rate", "training"),
    ],
)
def test_a_key_of_another_section(name, section):
    assert f"It belongs under `{section}:`." in problem(f"--{name}", "3")


def test_a_key_like_no_other():
    assert "See --help lora." in problem("--lora.zzqqxx", "3")
    assert "Nearest is --dry-run." in problem("--dry-rum")
    assert "Nearest is --config." in problem("--confg", "run.yaml")
    assert "expected a value after it: an integer." in problem("--lora.r")
    assert "expected a value after it: an integer." in problem("--lora.r", "--training.seed", "3")
    assert "Write --config run.yaml." in problem("run.yaml")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("bf16_full_eval", "true", "model.dtype"),
        ("eval_strategy", "epoch", "training.eval_steps"),
        ("save_strategy", "best", "training.save_steps"),
        ("truncation_mode", "keep_end", "data.over_length"),
        ("chat_template_path", "org/model", "model.chat_template"),
        ("report_to", "none", "TensorBoard"),
        ("report_to", "all", "TensorBoard"),
        ("trackio_space_id", "x", "trackio sync"),
        ("push_to_hub", "true", "finetune export RUN --to hub"),
        ("hub_model_id", "me/model", "--repo USER/NAME --upload"),
        ("deepspeed", "ds.json", "training.strategy: shard"),
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


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="it is not a regular file. Give a YAML file"):
        load(["--config", str(tmp_path / "c.yaml")])


def test_packs_cannot_be_grouped_by_length():
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--data.packing", "true"]
    with pytest.raises(ConfigError, match="group_by_length reduces padding, and packs have none"):
        load([*words, "--training.train_sampling_strategy", "group_by_length"])


# Names of SFTConfig that are taken over -----------------------------------------------------------------------------


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


# Files that cannot be read ------------------------------------------------------------------------------------------


def test_missing_file(tmp_path):
    path = str(tmp_path / "none.yaml")
    text = problem("--config", path, "--data.train_file", "t.jsonl")  # and no complaint that the model is missing
    assert text.startswith(path) and "does not exist" in text
    assert "cannot be read" in problem("--config", str(tmp_path))
    assert "expected a path after it" in problem("--config")
    assert "given twice" in problem("--json", "a", "--json", "b")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("model:\n  dtype: auto\n backend: auto\n", 3, "not valid YAML"),
        ("model:\n\tdtype: auto\n", 2, "not valid YAML"),
        ("lora: {r: 8\n", 2, "not valid YAML"),
        ("lora: {r: !!python/object/apply:os.getcwd []}\n", 1, "not valid YAML"),
        ("lora: {r: 8}\n---\nlora: {r: 9}\n", 2, "not valid YAML"),
        ("lora:\n  r: 8\n  lora_alpha: 8\n  r: 9\n", 4, "`r` is given twice"),
        ("lora: {r: 8}\nmodel: {}\nlora: {r: 9}\n", 3, "`lora` is given twice"),
        ("lora:\n  - r\n", 1, "expected a mapping of keys"),
        ("lora: 3\n", 1, "expected a mapping of keys"),
        ("trainer: {learning_rate: 1e-4}\n", 1, "Nearest is training."),
        ("\nlearning_rate: 1e-4\n", 2, "It belongs under `training:`."),
        ('1: a\n"1": b\n', 2, "given twice"),
    ],
)
def test_broken_file(write, text, line, what):
    path = write(text)
    assert any(found.startswith(f"{path}:{line}: ") and what in found for found in problems("--config", path))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[1, 2]\n", "text\n", "{}\n"])
def test_file_without_settings(write, text):
    assert "has no settings" in problem("--config", write(text))


def test_file_of_another_encoding(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("data: {system_prompt: é}\n".encode("latin-1"))
    assert "UTF-8" in problem("--config", str(tmp_path / "latin.yaml"))


# Contradictions -----------------------------------------------------------------------------------------------------

NO_MODEL = ["--data.train_file", "t.jsonl"]


@pytest.mark.parametrize(
    ("argv", "about"),
    [
        ([*MODEL, "--model.full_finetuning", "--model.load_in_4bit"], "4-bit"),
        ([*MODEL, "--data.dataset_name", "a/b"], "both name the training data"),
        (MODEL[:2], "there is no training data"),
        (NO_MODEL, "embedded demo"),
        (["--data.dataset_name", "a/b"], "embedded demo"),
        (["--data.eval_file", "e.jsonl"], "embedded demo"),
        ([*MODEL, "--data.dataset_config", "main"], "Set data.dataset_name"),
        ([*MODEL, "--training.max_steps", "5", "--training.num_train_epochs", "1"], "length of the run"),
        ([*MODEL, "--data.pack_length", "4096"], "packing: true"),
        ([*MODEL, "--data.packing", "--data.pack_length", "512"], "below max_length 2048"),
        ([*MODEL, "--data.packing", "--data.max_length", "null"], "packing needs a length"),
        ([*MODEL, "--data.max_length", "null", "--data.over_length", "drop"], "max_length, which is null"),
        ([*MODEL, "--data.eval_file", "e.jsonl", "--data.eval_fraction", "0.1"], "held-out rows"),
        ([*MODEL, "--training.eval_steps", "5"], "no rows are held out"),
        ([*MODEL, "--data.last_turn_only", "--data.assistant_only_loss", "false"], "assistant_only_loss: true"),
        (["--model.backend", "transformers", "--training.gradient_checkpointing", "unsloth"], "Use true"),
        ([*MODEL, "--model.full_finetuning", "--lora.r", "16"], "no adapter"),
        (["--training.resume_from_checkpoint", "--training.overwrite_output_dir"], "Keep one"),
        ([*MODEL, "--model.load_in_8bit", "--model.load_in_4bit"], "exclude each other"),
        ([*MODEL, "--model.load_in_8bit", "--model.full_finetuning"], "exclude each other"),
        ([*MODEL, "--model.load_in_4bit", "--model.loader_kwargs", "{load_in_16bit: true}"], "load_in_16bit"),
        ([*MODEL, "--model.backend", "transformers", "--model.loader", "FastModel"], "Unsloth's classes"),
        ([*MODEL, "--model.backend", "transformers", "--model.loader_kwargs", "{a: 1}"], "Unsloth's classes"),
        ([*MODEL, "--data.instruction_part", "<user>"], "needs a response_part"),
        ([*MODEL, "--data.response_part", "<bot>", "--data.format", "messages"], "known without them"),
        ([*MODEL, "--data.response_part", "<bot>", "--data.assistant_only_loss", "false"], "Keep one"),
        (["--data.response_part", "<bot>"], "embedded demo"),
        (["--training.global_batch_size", "6", "--training.per_device_train_batch_size", "4"], "not a multiple"),
    ],
)
def test_contradiction(argv, about):
    text = problem(*argv)
    assert about in text and text.startswith("command line: `--")


@pytest.mark.parametrize(
    ("name", "argument", "remedy"),
    [
        ("model.loader_kwargs", "device_map: auto", "its own device"),
        ("model.loader_kwargs", "max_seq_length: 2048", "data.max_length"),
        ("model.loader_kwargs", "token: hf_secret", "HF_TOKEN"),
        ("model.loader_kwargs", "fast_inference: false", "vLLM"),
        ("lora.adapter_kwargs", "lora_alpha: 8", "use lora.lora_alpha"),
        ("lora.adapter_kwargs", "use_gradient_checkpointing: unsloth", "training.gradient_checkpointing"),
    ],
)
def test_arguments_that_have_a_key_of_their_own(name, argument, remedy):
    text = problem(*MODEL, f"--{name}", f"{{{argument}, another: 1}}")
    assert f"`{argument.partition(':')[0]}` cannot be set here" in text and remedy in text


def test_a_marker_on_the_command_line_may_hold_newlines():
    argv = [*MODEL, "--data.instruction_part", '"<user>\\n"', "--data.response_part", '"<bot>\\n\\n"']
    data = load(argv).data
    assert (data.instruction_part, data.response_part) == ("<user>\n", "<bot>\n\n")


def test_rows_of_a_script():
    config = load([*MODEL[:2], "--training.eval_steps", "5"], script="mine.py")
    assert config.rows_from_script and not load(MODEL, script="mine.py").rows_from_script
    with pytest.raises(ConfigError, match="no rows are held out"):
        load([*MODEL, "--training.eval_steps", "5"], script="mine.py")
    assert help_text("mine.py").startswith("usage: accelerate launch mine.py [--config")


def test_contradictions_all_at_once_with_the_place_of_each(write):
    path = write(
        "model: {model_name_or_path: a/b, full_finetuning: true, load_in_4bit: true}\n"
        "data: {train_file: t.jsonl, dataset_name: a/b, pack_length: 8}\n"
        "training: {max_steps: 5, num_train_epochs: 2}\n"
    )
    found = problems("--config", path, "--lora.r", "8", "--lora.zzqqxx", "8")
    assert len(found) == 6
    assert any(f"{path}:1: `model.full_finetuning: true`; command line: `--lora.r 8`" in text for text in found)


@pytest.mark.parametrize(
    "argv",
    [
        [*MODEL, "--data.packing", "--data.pack_length", "2048"],
        [*MODEL, "--training.max_steps", "-1", "--training.num_train_epochs", "2"],
        [*MODEL, "--training.eval_steps", "5", "--data.eval_fraction", "0.1"],
        ["--data.max_length", "64", "--data.packing", "--training.eval_steps", "5"],
        [*MODEL, "--lora.lora_dropout", "0.999"],
    ],
)
def test_no_contradiction(argv):
    load(argv)


# Batches ------------------------------------------------------------------------------------------------------------


def batch(world_size: int, **settings: int) -> tuple[int, int, int]:
    found = resolve_batch(TrainingConfig(**settings), world_size)
    return found.per_device, found.accumulation, found.global_batch_size


def test_batch():
    assert [batch(world) for world in (1, 2, 4, 16)] == [(8, 2, 16), (8, 1, 16), (4, 1, 16), (1, 1, 16)]
    assert batch(1, global_batch_size=14) == (7, 2, 14)
    assert batch(2, global_batch_size=26) == (1, 13, 26)
    assert batch(2, global_batch_size=32, per_device_train_batch_size=4) == (4, 4, 32)
    assert batch(2, global_batch_size=32, gradient_accumulation_steps=1) == (16, 1, 32)
    assert batch(2, gradient_accumulation_steps=3) == (8, 3, 48)
    assert batch(2, gradient_accumulation_steps=3, per_device_train_batch_size=2) == (2, 3, 12)
    assert batch(2, per_device_train_batch_size=4) == (4, 1, 8)  # as in TRL: it grows with the number of ranks
    assert batch(3, per_device_train_batch_size=5) == (5, 1, 15)


def test_a_batch_that_grows_is_the_same_on_every_world_size_once_it_is_fixed():
    training = TrainingConfig(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert with_fixed_batch(training, 4).global_batch_size == 24
    assert {resolve_batch(with_fixed_batch(training, 4), world).global_batch_size for world in (1, 2, 4)} == {24}
    given = load([*MODEL, "--training.per_device_train_batch_size", "2", *fixed_batch_arguments(training, 4)]).training
    assert resolve_batch(given, 1) == resolve_batch(with_fixed_batch(training, 4), 1)
    assert fixed_batch_arguments(TrainingConfig(global_batch_size=8), 2) == []


@given(st.integers(1, 300), st.integers(1, 64), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_batch_is_exact_or_refused(size, world, per_device, accumulation):
    training = TrainingConfig(
        global_batch_size=size, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation
    )
    possible = [
        (p, a)
        for p in ([per_device] if per_device else range(1, size + 1))
        for a in ([accumulation] if accumulation else range(1, size + 1))
        if p * a * world == size
    ]
    try:
        found = resolve_batch(training, world)
    except UserError:
        assert not possible
    else:
        assert (found.per_device, found.accumulation) in possible and found.global_batch_size == size
        if per_device is None and accumulation is None:
            assert found.per_device == max(p for p, _ in possible if p <= 8)


def test_batch_that_does_not_fit():
    with pytest.raises(UserError) as caught:
        batch(3, global_batch_size=16)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "global_batch_size 16" in text and "3 (processes)" in text
    assert "exactly: 1, 2, 4, 8, 16." in text and "to 15 or 18" in text

    with pytest.raises(UserError, match=r"exactly: 1, 2, 4\. .*size to 8\."):
        batch(8, global_batch_size=4)
    with pytest.raises(UserError, match=r"16 \(the default\) is not .* exactly: 1, 2, 4, 8, 16\. .*to 15 or 18"):
        batch(3)
    with pytest.raises(UserError, match=r"16 is not .* No world size .*to 15 or 20, or remove"):
        batch(1, global_batch_size=16, per_device_train_batch_size=5)
    with pytest.raises(UserError, match=r"32 is not 2 .* x 4 .* x 2 .* = 16\. .*exactly: 4\. .*to 16"):
        batch(2, global_batch_size=32, per_device_train_batch_size=4, gradient_accumulation_steps=2)


# The installed TRL, and what importing costs ------------------------------------------------------------------------


def in_subprocess(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_sft_fields_are_those_of_the_installed_class(tmp_path):
    code = """
import dataclasses, json
from transformers.training_args import OptimizerNames
from transformers.trainer_utils import SchedulerType
from trl import SFTConfig
fields = {field.name: str(field.type) for field in dataclasses.fields(SFTConfig)}
print(json.dumps([fields, [item.value for item in OptimizerNames], [item.value for item in SchedulerType]]))
"""
    done = launch.python(["-c", code], cache=tmp_path)
    assert done.returncode == 0, done.stderr
    real, optimizers, schedulers = json.loads(done.stdout.splitlines()[-1])
    assert set(sft_fields()) == set(real)
    assert sft_fields()["max_steps"] is int and sft_fields()["torch_compile"] is bool
    assert sft_fields()["bf16"] == bool | None  # overridden in TRL
    assert set(choices("optim")) == set(optimizers) and set(choices("lr_scheduler_type")) == set(schedulers)
    assert TrainingConfig().optim in optimizers and TrainingConfig().lr_scheduler_type in schedulers
    # Every field has its row or is one of our keys; every row is of a field that exists, existed or will exist.
    table = arguments.rows(arguments.CONFIG)
    ours = {name.partition(".")[2] for name in KEYS}
    assert set(real) <= set(table) | ours
    gone = {name for name, row in table.items() if row.now is not None}
    others = {"extra", "skip_prepare_dataset"}  # keys of ours, and of dataset_kwargs
    newer = {"activation_checkpointing"}  # from transformers 5.18 on
    assert not gone & set(real) and set(table) - set(real) - gone <= others | newer
    assert {row.now for row in table.values()} - {None, ""} <= set(real)
    assert {name for name, row in table.items() if row.passed} <= set(real) - set(arguments.REFUSED) - ours


def test_tables_name_what_exists():
    own = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)}
    keys = {name.split(".")[1] for name in own} - {"extra"}
    table = arguments.rows(arguments.CONFIG)
    assert set(arguments.FOREIGN.values()) <= own
    assert not set(arguments.FOREIGN) & {*keys, *table}
    targets = {target for row in table.values() for target, _ in (*row.sets.values(), *row.excludes.values())}
    assert arguments.TAKEN <= set(arguments.REFUSED) | keys and targets <= own
    assert set(CHOICES) <= keys


def test_help_of_train_has_the_common_keys_first_and_fits_two_screens():
    text = help_text()
    common, others = text.split("Set these six first")[1].split("All other settings")
    for name in COMMON:
        assert f"  --{name} " in common
    sections = dict(re.findall(r"^ (\w+): .*\n((?:  .*\n)+)", others, re.MULTILINE))
    assert list(sections) == list(SECTIONS)
    for name, field in KEYS.items():
        section, key = name.split(".")
        entry = f"  {key:28} {describe(field.type)} ({default_of(name)})"  # one of two on a line if both are short
        shown = bool(re.search(rf"{re.escape(entry)}(  |$)", sections[section], re.MULTILINE))
        assert shown == (name not in COMMON), name
    assert "  seed                         int (42)" in others
    assert "Peak learning rate. Use about a tenth for full fine-tuning. [0.0002]" in " ".join(common.split())
    assert text.startswith("usage: accelerate launch -m finetune.train [--config FILE.yaml]")
    assert len(text.splitlines()) <= 100 and max(map(len, text.splitlines())) <= 112


@pytest.mark.parametrize("section", SECTIONS)
def test_help_of_a_section_has_every_key_with_type_default_and_meaning(section, capsys):
    assert train_main(["--help", section]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for field in fields(SECTIONS[section]):
        if field.name != "extra":
            assert f"--{section}.{field.name}  " in text and " ".join(field.metadata["help"].split()) in flat
    if section == "training":
        assert "--training.learning_rate  float, above 0  (default: 0.0002)" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_comes_before_any_mistake(capsys, flag):
    assert train_main(["--config", "none.yaml", "--training.lr", "1", flag]) == 0
    assert capsys.readouterr().out == help_text()


def test_the_reference_page_is_what_is_printed(capsys):
    reference.main()
    page = capsys.readouterr().out
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page, "run `make docs`"
    first, *sections = page.split("\n## ")[1:]
    assert first.startswith("Common settings") and all(f"| `{name}` |" in first for name in COMMON)
    for name, field in KEYS.items():
        section, key = name.split(".")
        table = next(text for text in sections if text.startswith(f"{section}\n"))
        row = next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
        assert field.metadata["help"].replace("|", "\\|") in row and f"| `{default_of(name)}` |" in row


def test_dry_run_belongs_to_train():
    with pytest.raises(ConfigError, match="only `train` has --dry-run"):
        load(["--dry-run"], command="prepare")
    assert "takes no value" in problem("--dry-run=yes")


@pytest.mark.process
def test_no_heavy_import():
    code = """
import sys
from finetune.config import ConfigError, help_text, load, dump_yaml
help_text(), dump_yaml(load(["--training.adam_beta2", "0.9", "--training.optim", "sgd"]))
try:
    load(["--training.learnin_rate", "1"])
except ConfigError:
    pass
heavy = {"torch", "transformers", "trl", "accelerate", "datasets", "unsloth", "peft", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    assert in_subprocess(code).strip() == "[]"


def test_sections_are_frozen():
    for section in (Config(), ModelConfig(), DataConfig()):
        with pytest.raises(AttributeError):
            section.r = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ModelConfig("positional")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("group_by_length maybe", "must be true or false here. Use training.train_sampling_strategy: group_by_length."),
        ("bf16 maybe", "must be true or false here. Use model.dtype."),
        ("eval_strategy epoch", "must be no or steps here. Use training.eval_steps"),
        ("average_tokens_across_devices maybe", "must be true here: the loss is the mean"),
        ("fsdp full_shard", "must be null or false here. Use training.strategy: shard"),
        ("full_determinism maybe", "expected true or false."),
    ],
)
def test_a_value_that_is_not_taken_names_those_that_are(argument, expected):
    name, _, value = argument.partition(" ")
    assert expected in problem(f"--training.{name}", value)


def test_what_a_user_gave_is_cut():
    long = "x" * 100_000
    for argv in ([f"--{long}"], [f"--training.{long}", "1"], ["--training.optim", long], [long], [f"--{long}.a", "1"]):
        assert len(problem(*argv)) < 1500
    assert listed(["a", "b", long, *range(30)], 4) == f"a, b, {'x' * 76} ..., 0 and 29 more"
    assert cut("a\n  b") == "a b" and cut("x" * 80) == "x" * 80
    assert len(str(UserError(f"{long}: unknown. Remove it."))) < 120


def test_many_problems_are_counted(write):
    path = write("training: {" + ", ".join(f"qq{n}zz: 1" for n in range(100)) + "}\n")
    with pytest.raises(ConfigError) as caught:
        load(["--config", path])
    assert len(caught.value.problems) == 100
    lines = str(caught.value).splitlines()
    assert len(lines) == 32 and "100 problems" in lines[0] and lines[-1] == "  - and 70 more"
