"""Tests of finetune/config/rules.py."""

import pytest

from finetune.config import (
    ConfigError,
    load,
)
from tests.helpers.config import MODEL, problem, problems


def test_packs_cannot_be_grouped_by_length():
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--data.packing", "true"]
    with pytest.raises(ConfigError, match="group_by_length reduces padding, and packs have none"):
        load([*words, "--training.train_sampling_strategy", "group_by_length"])


SHARED = ["--training.context_parallel", "2"]


INVOKED = ["--lora.adapter_kwargs", "{alora_invocation_tokens: [5]}"]
REENTRANT = "{use_reentrant: true}"


@pytest.mark.parametrize(
    ("argv", "about"),
    [
        ([*MODEL, "--model.full_finetuning", "--model.load_in_4bit"], "load_in_4bit and full_finetuning exclude"),
        ([*MODEL, "--data.dataset_name", "a/b"], "both name the training data"),
        (MODEL[:2], "there is no training data"),
        (["--demo", "--data.train_file", "t.jsonl"], "--demo brings its own model and data"),
        (["--demo", "--model.model_name_or_path", "a/b"], "--demo brings its own model and data"),
        ([*MODEL, "--data.dataset_config", "main"], "Set data.dataset_name"),
        ([*MODEL, "--data.split", "train[:20]"], "data.split applies to a Hub dataset. Set data.dataset_name"),
        ([*MODEL, "--training.max_steps", "5", "--training.num_train_epochs", "1"], "length of the run"),
        ([*MODEL, "--data.pack_length", "4096"], "packing: true"),
        ([*MODEL, "--data.packing", "--data.pack_length", "512"], "below max_length 2048"),
        ([*MODEL, "--data.packing", "--data.max_length", "null"], "packing needs a length"),
        ([*MODEL, "--data.max_length", "null", "--data.over_length", "drop"], "max_length, which is null"),
        ([*MODEL, "--data.eval_file", "e.jsonl", "--data.eval_fraction", "0.1"], "held-out rows"),
        ([*MODEL, "--training.eval_steps", "5"], "no rows are held out"),
        ([*MODEL, "--data.last_turn_only", "--data.assistant_only_loss", "false"], "assistant_only_loss: true"),
        (["--model.backend", "transformers", "--training.gradient_checkpointing", "unsloth"], "Use true"),
        (
            ["--model.backend", "unsloth", "--training.gradient_checkpointing", "offload"],
            "needs the transformers backend",
        ),
        (
            ["--training.gradient_checkpointing_kwargs", "{selective: true}"],
            "use training.gradient_checkpointing: selec",
        ),
        (
            ["--training.gradient_checkpointing", "offload", "--training.gradient_checkpointing_kwargs", REENTRANT],
            "needs use_reentrant: false",
        ),
        ([*MODEL, "--model.full_finetuning", "--lora.r", "16"], "no adapter"),
        (["--training.resume_from_checkpoint", "--training.overwrite_output_dir"], "Keep one"),
        ([*MODEL, "--model.load_in_8bit", "--model.load_in_4bit"], "exclude each other"),
        ([*MODEL, "--model.load_in_8bit", "--model.full_finetuning"], "exclude each other"),
        ([*MODEL, "--model.load_in_8bit", "--lora.adapter_kwargs", "{use_dora: true}"], "Set load_in_4bit instead"),
        ([*MODEL, "--model.backend", "transformers", "--model.loader", "FastModel"], "Unsloth's classes"),
        ([*MODEL, "--model.backend", "transformers", "--model.loader_kwargs", "{a: 1}"], "Unsloth's classes"),
        ([*MODEL, "--data.instruction_part", "<user>"], "needs a response_part"),
        ([*MODEL, "--data.response_part", "<bot>", "--data.format", "messages"], "known without them"),
        ([*MODEL, "--data.response_part", "<bot>", "--data.assistant_only_loss", "false"], "Keep one"),
        ([*MODEL, *SHARED, "--model.backend", "unsloth"], "with the transformers backend"),
        ([*MODEL, *INVOKED], "PEFT looks for them once per row of a batch"),
        ([*MODEL, *SHARED, "--training.gradient_checkpointing", "unsloth"], "Set gradient_checkpointing to offload"),
        ([*MODEL, *SHARED, "--training.strategy", "auto"], "strategy auto places whole rows"),
        ([*MODEL, *SHARED, "--model.attn_implementation", "eager"], "replaces the model's attention implementation"),
        ([*MODEL, *SHARED, "--training.torch_compile", "true"], "the exchange between GPUs is not compiled"),
        ([*MODEL, *SHARED, "--training.neftune_noise_alpha", "5"], "the noise depends on the length"),
        (["--training.global_batch_size", "6", "--training.per_device_train_batch_size", "4"], "not a multiple"),
    ],
)
def test_contradiction(argv, about):
    text = problem(*argv)
    assert about in text and text.startswith("command line: `--")


@pytest.mark.parametrize(
    ("name", "argument", "remedy"),
    [
        ("model.loader_kwargs", "device_map: auto", "training.strategy: shard"),
        ("model.loader_kwargs", "max_seq_length: 2048", "data.max_length"),
        ("model.loader_kwargs", "unsloth_tiled_mlp: true", "model.tiled_mlp"),
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
        ["--demo", "--data.max_length", "64", "--data.packing", "--training.eval_steps", "5"],
        [*MODEL, "--lora.lora_dropout", "0.999"],
    ],
)
def test_no_contradiction(argv):
    load(argv)
