"""Mistakes of users and full disks end in one sentence, not in a traceback. All in this process."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from finetune import train
from finetune.config import load
from finetune.data import formats, sources
from finetune.doctor import checks
from finetune.engine import record
from finetune.engine.checkpoint import output_folder
from finetune.engine.model import adapter_coverage, adapter_targets, load_checks
from finetune.engine.preflight import config_checks, hub
from finetune.engine.session import opening
from finetune.errors import RunError, UserError
from finetune.runtime import command
from finetune.runtime.bootstrap import Stack, http_library
from finetune.runtime.machine import disk
from finetune.runtime.ranks import distributed, launcher
from tests.helpers import ROOT, tiny

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
# name: (bytes of the YAML file, what the message says)
YAML = {
    "list": (b"- a\n", "has no settings"),
    "scalar": (b"hello\n", "has no settings"),
    "binary": (b"\x00\x01\xff", "cannot be read as UTF-8"),
    "key twice": (b"training: {max_steps: 1}\ntraining: {max_steps: 2}\n", "given twice"),
    "aliases": (f"{ALIASES}lora: {{target_modules: *j}}\n".encode(), "aliases expand to more than"),
    "aliases in a circle": (b"training: &t {max_steps: *t}\n", "expected an integer"),
    "nested": (b"model: " + b"[" * 3000, "nested too deeply"),
    "hexadecimal": (b"training: {max_steps: 0x" + b"F" * 5000 + b"}", "an integer is too large"),
    "to the base of 60": (b"training: {learning_rate: " + b"1:" * 999 + b"1.5}", "does not fit its tag"),
    "no number": (b"training: {learning_rate: !!float ''}", "does not fit its tag"),
    "digits": (b"training: {max_steps: " + b"9" * 5000 + b"}", "not valid YAML"),
    "huge": (b"training: {max_steps: 99999999999999999999}", "smaller than 2^63"),
    "quoted": (b'training: {global_batch_size: "16"}', 'expected an integer or null, got the string "16"'),
    "nan": (b"training: {learning_rate: .nan}", "expected a number"),
    "infinity": (b"training: {learning_rate: .inf}", "expected a number"),
    "negative": (b"data: {max_length: -5}", "must be at least 2"),
    "NUL": (b'training: {output_dir: "a\\0b"}', "contains a NUL character"),
    "tag of a bool": (b'data: {packing: !!bool "x"}', "does not fit its tag"),
    "tag of a date": (b'a: !!timestamp "x"', "does not fit its tag"),
    "python tag": (b"model: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
}


def ends(capsys: pytest.CaptureFixture[str], run, code: int) -> str:
    """Run as a command does; its message, after asserting the exit code, one error and no traceback."""
    assert command.run_guarded(run) == code
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("error: ") and "Traceback" not in words, words
    return words


@pytest.mark.parametrize("name", YAML)
def test_configuration_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = YAML[name]
    (tmp_path / "c.yaml").write_bytes(content)
    assert expected in ends(capsys, lambda: bool(load(["--config", str(tmp_path / "c.yaml")])), 2)


@pytest.mark.parametrize("path", ["/", "a\0b", "x" * 5000])
def test_configuration_paths(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in ends(capsys, lambda: bool(load(["--config", path])), 2)


ESCAPES = "\x1b]0;pwned\x07\x1b[31m\x9b\u202e\ud800"
SHOWN = r"\x1b]0;pwned\x07\x1b[31m\x9b\u202e\ud800"


def test_no_control_character_of_a_file_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a section, of a column, of a file, and the text of an error that nobody expected."""
    (tmp_path / "c.yaml").write_text('"tr\\e[31maining": {a: 1}\n')
    said = ends(capsys, lambda: bool(load(["--config", str(tmp_path / "c.yaml")])), 2)
    assert r"tr\x1b[31maining" in said and "\x1b" not in said
    row = {"q" + ESCAPES: "a", "r": "b"}
    said = ends(capsys, lambda: bool(formats.detect(list(row), [row])), 2)
    assert SHOWN in said and "\x1b" not in said
    assert SHOWN in ends(capsys, lambda: bool(list(sources.expand([str(tmp_path / ESCAPES)]))), 2)

    def unexpected() -> int:
        raise ValueError(ESCAPES)

    assert command.run_guarded(unexpected) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and f"ValueError: {SHOWN}\n" in said and "\x1b" not in said


def test_what_is_printed_is_filtered_whatever_it_is_part_of(capsys: pytest.CaptureFixture[str]) -> None:
    made = command.new_console(width=200)
    table = Table(ESCAPES, title=Text(ESCAPES))
    table.add_row(Panel(Text(ESCAPES)))
    for printed in (ESCAPES, Text(ESCAPES), table):
        made.print(printed, markup=False, highlight=False)
        said = capsys.readouterr().out
        assert (
            r"\x1b]0;pwned" in said
            and r"\x9b\u202e\ud800" in said
            and not any(letter in said for letter in "\x1b\x07\x9b\u202e")
        )
    assert command.printable("a\tb\nÄ 漢\u3000字 \u200d👩 \xa0") == "a\tb\nÄ 漢\u3000字 \u200d👩 \xa0"


# name: (the error that a write raises, the message)
DISKS = {
    "full": (errno.ENOSPC, "No space left on the disk"),
    "quota": (errno.EDQUOT, "disk quota of this user is used up"),
    "read-only": (errno.EROFS, "disk is read-only"),
    "broken": (errno.EIO, "input/output error"),
    "permission": (errno.EACCES, "Permission denied"),
}


@pytest.mark.parametrize("name", DISKS)
def test_any_file_on_a_disk_that_fails(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, expected = DISKS[name]

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    words = ends(capsys, lambda: record.write_json(tmp_path / "result.json", {}) or 0, 1)
    assert expected in words and "result.json" in words
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_socket_is_not_one_of_a_disk() -> None:
    assert disk.failure(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert disk.failure(PermissionError(errno.EACCES, "bind")) is None


def test_json_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ends(capsys, lambda: record.write_json(tmp_path / "file" / "x.json", {}) or 0, 1)
    assert "A file is in the place of a folder" in words and "x.json" in words


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(mounting, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.process
def test_tensorboard_on_a_full_disk_warns_once(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from finetune.engine.monitoring.event_file import EventFile

    events = EventFile(small_disk / "runs")
    assert not (small_disk / "runs").exists()  # made at the first write
    for step in range(100):
        events.add_text("text", "x" * 5000, step)
    events.close()
    words = capfd.readouterr().err
    assert words.count("No space left on the disk") == 1 and "Traceback" not in words
    assert events.warning is not None and "No space left" in events.warning


@pytest.mark.process
def test_run_json_on_a_full_disk_does_not_end_the_training(small_disk: Path, capsys) -> None:
    run = record.RunRecord(small_disk)
    run.update(status="running")
    run.try_update(losses="x" * 100_000)
    assert "No space left on the disk" in capsys.readouterr().err
    assert json.loads(run.path.read_text()) == {"status": "running"}
    run.content["losses"] = []
    run.update(status="done")
    assert "was not updated" in json.loads(run.path.read_text())["warnings"][0]


def config(*arguments: str, model: Path | str = "m"):
    return load(["--model.model_name_or_path", str(model), "--data.train_file", "rows.jsonl", *arguments])


STACK = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
# Values that a library takes and fails on later: arguments, what is said.
VALUES = [
    ("--training.debug 3", "expected underflow_overflow or null"),
    ("--training.log_level_replica nope", "expected one of debug, info, warning, error, critical, passive"),
    ("--training.include_num_input_tokens_seen maybe", "expected one of all, non_padding, no or true or false"),
    ("--training.dataloader_multiprocessing_context nope", "expected one of fork, spawn, forkserver or null"),
    ("--training.dataloader_num_workers 99999999", "must be at least 0 and below 1025"),
    ("--training.dataloader_prefetch_factor -1", "must be at least 1"),
    ("--training.ddp_bucket_cap_mb 0", "must be at least 1"),
    ("--training.router_aux_loss_coef -1", "must be at least 0"),
    ("--training.ddp_backend gloo", "NCCL connects GPUs"),
    ("--training.lr_scheduler_kwargs abc", "expected a mapping of strings to values or null"),
    ("--training.gradient_checkpointing_kwargs {context_fn: 3}", "expected a mapping of strings to true or false"),
    ("--training.gradient_checkpointing_kwargs {context_fn: true}", "unknown argument `context_fn`. It takes use_re"),
    ("--training.gradient_checkpointing_kwargs {debug: true}", "unknown argument `debug`. It takes use_reentrant"),
    ("--training.torch_dtype float16", "Nearest is model.dtype"),
    ("--lora.adapter_kwargs {use_dorra: true}", "no `use_dorra`. Nearest is use_dora"),
    ("--lora.adapter_kwargs {use_dora: abc}", "`use_dora: abc`: expected true or false"),
    # typing gives the members of a union the order in which the process has first seen them.
    ("--lora.adapter_kwargs {layers_to_transform: abc}", "a list of integers, an integer or null"),
    ("--lora.adapter_kwargs {rank_pattern: {q_proj: abc}}", "expected a mapping of strings to integers or null"),
    ("--lora.adapter_kwargs {trainable_token_indices: [-1]}", "must be at least 0"),
    ("--lora.adapter_kwargs {trainable_token_indices: {embed_tokens: [-1]}}", "must be at least 0"),
    ("--lora.adapter_kwargs {alora_invocation_tokens: [5]}", "PEFT looks for them once per row of a batch"),
    ("--lora.adapter_kwargs {target_parameters: [experts.down_proj]}", "use lora.target_parameters"),
    ("--lora.target_modules []", "must not be empty, unless lora.target_parameters names what has the adapter"),
    ("--lora.adapter_kwargs {init_lora_weights: corda}", "needs a pass over the data"),
]


@pytest.mark.parametrize(("given", "expected"), VALUES)
def test_values_that_a_library_would_fail_on(given: str, expected: str) -> None:
    """Known from the library's source, so before anything is imported."""
    with pytest.raises(UserError) as error:
        config(*given.split(" ", 1), "--model.backend", "transformers")
    assert expected in str(error.value), error.value


# The same, as far as only the library knows, on the model's architecture alone.
SHAPES = [
    ("--lora.adapter_kwargs {layers_to_transform: [9]}", "Target modules"),
    ("--lora.adapter_kwargs {layers_pattern: layers}", "`layers_to_transform` must also be specified"),
    ("--lora.adapter_kwargs {rank_pattern: {'(': 3}}", "(rank_pattern): missing ), unterminated subpattern"),
    ("--lora.adapter_kwargs {rank_pattern: {q_proj: 0}}", "should be a positive integer value"),
    ("--lora.adapter_kwargs {exclude_modules: '('}", "(exclude_modules): missing ), unterminated subpattern"),
    ("--lora.adapter_kwargs {exclude_modules: .*}", "All modules were excluded"),
    ("--lora.adapter_kwargs {init_lora_weights: nope}", "Unknown initialization"),
    ("--lora.adapter_kwargs {monteclora_config: {a: 1}}", "unexpected keyword argument 'a'"),
    (
        "--lora.target_parameters [q_proj.weight]",
        "the weight of a layer. Name the layer in lora.target_modules: q_proj",
    ),
    ("--lora.target_parameters [norm.weight]", "of 1 dimension: an adapter goes on stacked experts, which have 3"),
    ("--lora.target_parameters [experts.up]", "is the name of no parameter of the model. This model has none."),
    ("--lora.target_modules q_proj", "To name modules, give a list: [q_proj]"),
    ("--lora.target_modules q_proj,v_proj", "give a list: [q_proj, v_proj]"),
    ("--lora.target_modules [all-linear]", "Give it alone, as a string"),
    ("--model.attn_implementation nope", "model.attn_implementation is nope"),
    ("--model.attn_implementation kernels-community/nope", "model.attn_implementation is kernels-community/nope"),
]


@pytest.mark.parametrize(("given", "expected"), SHAPES)
def test_values_that_do_not_fit_the_architecture(given: str, expected: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())  # without weights
    with pytest.raises(UserError) as error:
        load_checks.check_on_meta_model(config(*given.split(" ", 1), model=tmp_path), STACK)
    assert expected in str(error.value), error.value


def test_an_adapter_that_fits_the_architecture(tiny_model: Path) -> None:
    """Also those that read the weights when they are made, which do not exist yet."""
    for value in ("{init_lora_weights: pissa}", "{init_lora_weights: orthogonal, use_dora: true}", "{lora_bias: true}"):
        load_checks.check_on_meta_model(config("--lora.adapter_kwargs", value, model=tiny_model), STACK)


def test_attention_that_cannot_train_on_a_cpu(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="flex_attention, which cannot train on a CPU"):
        load_checks.check(config("--model.attn_implementation", "flex_attention", model=tiny_model), STACK)


# arguments, what is said
TARGETS = {
    "one of two": (["--lora.target_modules", "[q_prj, v_proj]"], ["`q_prj` (nearest is q_proj). The", "down_proj"]),
    "two of two": (
        ["--lora.target_modules", "[q_prj, vproj]"],
        ["`q_prj` (nearest is q_proj), `vproj` (nearest is v_proj)"],
    ),
    "all": (["--lora.target_modules", "[query]"], ["`query`", "q_proj"]),
    "to save": (["--lora.modules_to_save", "[lm_hed]"], ["lora.modules_to_save", "nearest is lm_head"]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_adapter_targets_that_match_nothing(name: str, tiny_model: Path) -> None:
    given, expected = TARGETS[name]
    with pytest.raises(UserError) as error:
        load_checks.check_on_meta_model(config(*given, model=tiny_model), STACK)
    assert all(part in str(error.value) for part in expected), error.value


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, head_dim=16)
LINEAR_ATTENTION = {
    f"linear_{name}": 4 for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
}
SHARED_EXPERT = dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("kind", "shape", "targets", "bare"),
    [
        ("Phi3Config", ATTENTION, PROJECTIONS, "qkv_proj"),
        ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}, ["c_attn"], "c_fc"),
        ("GptOssConfig", ATTENTION | {"num_local_experts": 4}, PROJECTIONS, "experts.gate_up_proj"),
        ("Qwen3NextConfig", ATTENTION | LINEAR_ATTENTION | SHARED_EXPERT, PROJECTIONS, "shared_expert.up_proj.weight"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out:UserWarning", "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)
def test_the_line_that_a_warning_names_covers_the_rest(
    kind: str, shape: dict[str, Any], targets: list[str], bare: str
) -> None:
    """Stacked experts, and layers that PEFT takes for them, are not reached by the names of modules."""
    import transformers
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    sizes = shape if kind == "GPT2Config" else sizes | shape

    def covered(**given: Any) -> adapter_coverage.Coverage:
        config = getattr(transformers, kind)(**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert adapter_coverage.coverage(model) is None
        found = adapter_coverage.coverage(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given)))
        assert found is not None
        return found

    found = covered(target_modules=targets)
    assert found.warning is not None and found.share < 0.9 and bare in found.warning
    assert "set lora.target_modules: all-linear (in a script" in found.warning
    assert ("target_modules='all-linear'" in found.warning) is bool(found.layers)
    assert ("target_parameters=[" in found.warning) is bool(found.parameters)
    everything = covered(
        target_modules="all-linear" if found.layers else targets,
        target_parameters=list(found.parameters) or None,
    )
    assert everything.share == 1.0 and everything.warning is None


def test_adapter_targets_that_match(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    load_checks.check_on_meta_model(config("--lora.target_modules", "[q_proj, mlp.up_proj]", model=tiny_model), STACK)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for targets in ("all-linear", r".*\.q_proj", None, ["q_proj", "fused_qkv"]):  # the last as a default would be
        adapter_targets.check(model, config(), targets, "transformers")
    for broken in ("q_proj", "("):
        with pytest.raises(UserError, match="target_modules"):
            adapter_targets.check(model, config(), broken, "transformers")


def test_early_stopping_watches_the_held_out_loss() -> None:
    from transformers import EarlyStoppingCallback, TrainingArguments

    from finetune.engine.session.building import complete_early_stopping

    def trainer(**settings: object) -> SimpleNamespace:
        args = TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **settings)  # type: ignore[arg-type]
        callbacks = SimpleNamespace(callbacks=[EarlyStoppingCallback(2)])
        return SimpleNamespace(args=args, callback_handler=callbacks)

    evaluates = trainer(eval_strategy="steps", eval_steps=1)
    complete_early_stopping(evaluates)  # type: ignore[arg-type]
    assert (evaluates.args.metric_for_best_model, evaluates.args.greater_is_better) == ("eval_loss", False)
    with pytest.raises(UserError, match="Hold out rows and set eval_steps"):
        complete_early_stopping(trainer())  # type: ignore[arg-type]


# file, its bytes, what is said
MODEL_FILES = {
    "no JSON": ("config.json", b"{", "is not valid JSON"),
    "a list": ("config.json", b"[]", "must be a JSON object"),
    "binary": ("config.json", b"\xff\xfe", "is not valid JSON"),
    "header cut": ("model.safetensors", b"\xff" * 20, "too few for its header"),
    "empty": ("model.safetensors", b"", "too few for its header"),
    "header broken": ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "header is not valid"),
    "header deep": ("model.safetensors", (90_000).to_bytes(8, "little") + b"[" * 90_000, "header is not valid"),
    "no offsets": (
        "model.safetensors",
        (24).to_bytes(8, "little") + b'{"a": {"dtype": "F32" }}',
        "header is not valid",
    ),
    "cut": (
        "model.safetensors",
        (54).to_bytes(8, "little") + b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}} ' + b"123",
        "bytes instead of",
    ),
}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_files_that_are_damaged(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file, content, expected = MODEL_FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=expected):
        config_checks.check_model(config(model=tmp_path))


def edit(file: str, **values: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return write


def name_a_template_as_a_path(folder: Path) -> None:
    """transformers loads it, and refuses to save it."""
    template = folder / "chat_template.jinja"
    named = [{"name": "default", "template": template.read_text()}, {"name": "a/b", "template": "x"}]
    template.unlink()
    edit("tokenizer_config.json", chat_template=named)(folder)


def add_tokens(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["hill", "green", "falls"])
    tokenizer.save_pretrained(folder)


# what is done to the model's folder, the message of a run
MODELS = {
    "unknown architecture": (edit("config.json", model_type="nosuch", architectures=["No"]), "does not have (The"),
    "images": (edit("config.json", model_type="vit", architectures=["ViTModel"]), "has no decoder for it that"),
    "wrong field": (edit("config.json", hidden_size="x"), "config.json is not valid"),
    "other shapes": (edit("config.json", hidden_size=128), "not have the shapes in its config.json"),
    "tokenizer cut": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json is not valid JSON"),
    "tokenizer list": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer.json must be a JSON"),
    "tokenizer empty": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
    "padding side": (edit("tokenizer_config.json", padding_side="up"), "tokenizer files are damaged (Padding side"),
    "tokenizer_config": (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "is not valid JSON"),
    "template that cannot be saved": (name_a_template_as_a_path, "cannot be saved: Invalid chat template name: 'a/b'"),
    "generation config": (edit("generation_config.json", max_new_tokens=-5), "generation_config.json is invalid: `max"),
    "larger tokenizer": (add_tokens, "(train) has the token id"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_trained(
    name: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    spoil, expected = MODELS[name]
    spoil(folder)
    rows = tiny.make_rows(tmp_path / "rows.jsonl", 8)
    arguments = ["--model.model_name_or_path", str(folder), "--model.backend", "transformers"]
    arguments += ["--data.train_file", str(rows), "--data.num_proc", "1", "--training.max_steps", "1"]
    arguments += ["--training.output_dir", str(tmp_path / "out"), "--training.global_batch_size", "2"]
    assert train.main(arguments) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert expected in shown and "Traceback" not in shown, shown


# accelerate's profile, its command line, what is said
PROFILES = {
    "no YAML": ("num_processes: [", (), "is not valid YAML"),
    "a list": ("- 1", (), "must be a mapping"),
    "none": ("num_processes: 0", (), "num_processes must be at least 1: 0"),
    "none on the command line": ("{}", ("--num_processes", "0"), "num_processes must be at least 1: 0"),
    "a word": ("num_processes: two", (), "num_processes must be at least 1: two"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_of_accelerate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, more, expected = PROFILES[name]
    (tmp_path / "profile.yaml").write_text(content)
    given = ["--config_file", str(tmp_path / "profile.yaml"), *more]
    monkeypatch.setattr(launcher, "accelerate_arguments", lambda: given)
    distributed.launcher_profile.cache_clear()
    with pytest.raises(UserError, match=expected):
        distributed.wants_cpu()
    distributed.launcher_profile.cache_clear()


def test_json_that_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, expected in ((tmp_path, "got a folder"), (tmp_path / "file" / "x.json", "is a file")):
        with pytest.raises(UserError, match=expected):
            command.load_config(["--demo", "--json", str(path)], command="train")


def test_model_files_that_are_whole(tiny_model: Path) -> None:
    config_checks.check_model(config(model=tiny_model))


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a host fails after two attempts; a slow network passes."""
    from huggingface_hub import constants, utils

    asked = []

    def head(error: Exception):
        def ask(*arguments: object, **more: object) -> None:
            asked.append(arguments)
            raise error

        return lambda: SimpleNamespace(head=ask)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(utils, "get_session", head(http_library().ConnectError("no such host")))
    with pytest.raises(UserError, match=r"^\S+ cannot be reached \(no such host\), and .*no-such/model.*spelling"):
        config_checks.check_model(config(model="no-such/model"))
    assert len(asked) == 2
    monkeypatch.setattr(utils, "get_session", head(http_library().ReadTimeout("slow")))
    config_checks.check_model(config(model="no-such/model"))
    monkeypatch.setattr(utils, "get_session", head(http_library().ConnectTimeout("")))
    with pytest.raises(UserError, match=r"cannot be reached \(the connection timed out\)"):
        config_checks.check_model(config(model="no-such/model"))

    monkeypatch.setattr(utils, "get_session", head(http_library().ConnectError("no such host")))
    hub_rows = load(["--model.model_name_or_path", "m", "--data.dataset_name", "no-such/rows"])
    with pytest.raises(UserError, match=r"cannot be reached.*data.dataset_name is no-such/rows"):
        config_checks.check_data(hub_rows)


def test_a_name_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from huggingface_hub import constants, utils

    answered = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.05)
    monkeypatch.setattr(utils, "get_session", lambda: SimpleNamespace(head=lambda *given, **more: answered.wait(30)))
    with pytest.raises(UserError, match=r"no connection within .*no-such/model"):
        config_checks.check_model(config(model="no-such/model"))
    answered.set()


def test_what_is_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question, then the libraries do not ask at all."""
    from huggingface_hub import constants, utils

    asked = []

    def ask(*arguments: object, **more: object) -> None:
        asked.append(arguments)
        raise http_library().ConnectError("no such host")

    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    (tmp_path / "datasets--org--rows").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(utils, "get_session", lambda: SimpleNamespace(head=ask))
    given = load(["--model.model_name_or_path", "org/name", "--data.dataset_name", "org/rows"])
    for check in (config_checks.check_model, config_checks.check_data):
        asked.clear()
        constants.HF_HUB_OFFLINE = False
        check(given)
        check(given)
        assert len(asked) == 1 and constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
        assert capsys.readouterr().err.count("using the files in the cache") == 1


def test_a_run_asks_for_its_data_set_first(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    asked = []
    monkeypatch.setattr(config_checks, "check_data", asked.append)
    given = load(["--model.model_name_or_path", str(tiny_model), "--data.dataset_name", "org/rows"])
    opening.check_present(given)
    assert asked == [given]


def test_data_that_is_not_for_this_program(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="preference data"):
        formats.detect(["prompt", "chosen", "rejected"], [])
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="FIFO"):
        sources.expand([str(pipe)])
    for number, content in enumerate((b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}")):
        for kind in ("json", "jsonl"):
            file = tmp_path / f"{number}.{kind}"
            file.write_bytes(content)
            with pytest.raises(UserError, match=file.name):
                list(sources.iter_rows([str(file)]))


def test_output_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    tiny.make_rows(tmp_path / "file", 1)
    for folder, expected in ((tmp_path / "link", "symbolic link"), (tmp_path / "file" / "out", "file is a file")):
        with pytest.raises(UserError, match=expected) as error:
            output_folder.check_output(folder, resuming=False, overwrite=False)
        assert not isinstance(error.value, RunError)


class Broken(io.StringIO):
    """A stream that nobody reads any more, on a terminal that is closed, or on a full disk."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "I/O"), OSError(errno.ENOSPC, "full"), ValueError("closed")]
)
def test_printing_never_ends_a_command(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(error))
    monkeypatch.setattr(sys, "stderr", Broken(error))
    made = command.new_console()
    made.print("step 1")
    with made.status("the bar"):
        made.print("step 2")
    command.warn("a warning")


def test_what_a_stream_cannot_encode_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    command.new_console(file=narrow).print("猫 café")
    assert narrow.buffer.getvalue().decode("cp1252").split() == ["?", "café"]  # type: ignore[attr-defined]
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    command.keep_printing()
    for stream in streams.values():
        stream.write("猫")
    monkeypatch.setattr(sys, "stdout", None)  # closed by whoever started the program
    command.keep_printing()
    sys.stdout.write("猫")
    sys.stdout.close()


def test_hints_name_no_launch_profile_of_the_checkout() -> None:
    """An installed wheel has no accelerate_configs/: torchrun needs no file."""
    found = []
    for file in (ROOT / "finetune").rglob("*.py"):
        constants = (
            node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
        )
        found += [(file.name, one.value) for one in constants if "accelerate_configs" in str(one.value)]
    assert found == []


def test_hints_install_this_project() -> None:
    """By the name and the extras of pyproject.toml: `finetune` on PyPI is another project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = "|".join(project["optional-dependencies"])
    hint = re.compile(r"\binstall (?:-\S+ )*(?:\S+\.txt )?['\"]?(finetune(?![\w./])[\w-]*(?:\[[\w,]+\])?)")
    ours = re.compile(rf"{project['name']}(\[(({extras}),?)+\])?")
    assert not any(map(ours.fullmatch, hint.findall("install -U 'finetune[flash]'; install finetune-multigpu[x]")))
    found = {
        one
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "finetune").rglob("*.py"))
        for one in hint.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 5 and all(map(ours.fullmatch, found)), found
    assert checks.DISTRIBUTION == project["name"]
