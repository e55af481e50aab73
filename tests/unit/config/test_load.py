"""Tests of finetune/config/load.py."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from finetune.config import (
    Config,
    ConfigError,
    dump_yaml,
    load,
    resolve_batch,
)
from finetune.errors import UserError, cut, listed
from tests.helpers import ROOT
from tests.helpers.config import MODEL, problem, problems


def test_the_defaults_and_the_demo():
    config = load([])
    assert config == Config()
    assert config.config_file is None and not config.demo and not config.dry_run and config.json is None
    assert load(["--demo"]).demo and "takes no value" in problem("--demo=yes")


def test_command_line_over_yaml_over_default(write):
    path = write(
        "model: {model_name_or_path: a/b}\ndata: {train_file: t.jsonl}\ntraining: {learning_rate: 1e-5, seed: 7}\n"
    )
    config = load(["--training.seed", "9", "--config", path, "--dry-run", "--json", "out.json"])
    assert (config.training.seed, config.training.learning_rate, config.training.weight_decay) == (9, 1e-5, 0.0)
    assert (config.config_file, config.dry_run, config.json) == (path, True, Path("out.json"))
    assert load([path]) == load(["--config", path])
    assert "given twice" in problem(path, "--config", path)


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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example(path, write):
    config = load(["--config", str(path)])
    assert config.data.train_file == "data/train.jsonl"
    assert config.model.full_finetuning == (path.name == "full.yaml")
    assert config.model.load_in_4bit == (path.name == "qlora.yaml")
    for world_size in (1, 2, 4, 8):
        assert resolve_batch(config.training, world_size).global_batch_size == config.training.global_batch_size
    assert load(["--config", write(dump_yaml(config))]).training == config.training


def test_the_short_answers_are_configurations(write):
    page = (ROOT / "docs" / "how-do-i.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"finetune (?:train|prepare) my\.yaml ([^#`>\n]*)", page)
    texts = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    texts += re.findall(r"`((?:lora|data|training): \{.*?\})`", page)
    assert len(commands) > 6 and len(texts) > 4
    for command in commands:
        load([*MODEL, *shlex.split(command)])
    for text in texts:
        load([write(text), *(MODEL[2:] if "model:" in text else [])])


def test_all_three_examples_are_there():
    assert {path.name for path in (ROOT / "examples").glob("*.yaml")} >= {"lora.yaml", "qlora.yaml", "full.yaml"}


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
        ("--data.train_on_roles=[]", "not empty"),
        ("--lora.modules_to_save=[1]", "a list of strings or null"),
        ("--data.columns=[a]", "a mapping of strings to strings"),
        ("--data.columns={a: 1}", "a mapping of strings to strings"),
        ("--data.columns={1: a}", "a mapping of strings to strings"),
        ("--data.max_length=1", "at least 2"),
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
        ("--training.gradient_checkpointing=some", "one of unsloth, offload, selective, auto or true or false"),
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


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="it is not a regular file. Give a YAML file"):
        load(["--config", str(tmp_path / "c.yaml")])


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
