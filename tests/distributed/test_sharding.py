"""`training.strategy: shard` on gloo ranks against one process: results, checkpoints in both directions, invariants."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.runtime.tags import tag
from tests.cases import models
from tests.distributed.test_parity import arguments, faulty, prove
from tests.distributed.test_run_records import events_of
from tests.helpers import launch, tiny

pytestmark = pytest.mark.process

STEPS = 6
SHARD = ("--training.strategy", "shard")
PLAIN = ("--model.backend", "transformers", "--training.gradient_checkpointing", "true")


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head is its embedding, with sizes that neither 2 nor 4 ranks divide."""
    heads: Any = dict(num_attention_heads=2, num_key_value_heads=1)
    sizes: Any = dict(vocab_size=321, hidden=36, intermediate_size=61, layers=3)
    return tiny.make_model(tmp_path_factory.mktemp("tied"), **sizes, **heads, tie_word_embeddings=True)


def settings(model: Path, data: Path, *extra: str) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_file", str(data / "eval.jsonl"), "--training.max_steps", str(STEPS)),
        *("--training.save_steps", "3", "--training.per_device_eval_batch_size", "1", *PLAIN, *extra),
    ]


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model's or adapter's tensors, from one file or several."""
    return {key: value for file in folder.glob("*model*.safetensors") for key, value in load_file(file).items()}


def apart(one: Path, other: Path) -> float:
    """Largest difference of the weights in two folders, which hold the same names and shapes."""
    first, second = weights(one), weights(other)
    assert {key: value.shape for key, value in first.items()} == {key: value.shape for key, value in second.items()}
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def resumed(how: str, arguments: list[str], whole: Path, again: Path, cache: Path, script: Path | None = None) -> dict:
    """The second half of the run in `whole`, in a copy of its folder."""
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-6")
    for file in again.glob("*model*.safetensors*"):
        file.unlink()
    words = [*arguments, "--training.resume_from_checkpoint", "true"]
    return launch.train(how, words, out=again, cache=cache, script=script)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["ddp", "shard"])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("offload", ("--model.full_finetuning", "--training.learning_rate", "1e-3")),
        ("selective", ("--data.packing", "--data.max_length", "128")),
    ],
    ids=["full, padded rows, offload", "LoRA, packs, selective"],
)
def test_rows_in_less_memory_train_the_same_model(
    strategy: str, kind: str, extra: tuple[str, ...], tied_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """On two ranks, with tiled MLPs and accumulation, against one rank that keeps everything."""
    words = settings(tied_model, tiny_data, *extra, "--logging.generate_samples", "0")
    words += ["--training.global_batch_size", "8", "--training.per_device_train_batch_size", "2"]
    words += ["--training.save_steps", "0", "--training.gradient_checkpointing"]
    one, two = tmp_path / "one", tmp_path / "two"
    whole = launch.train("1 rank", [*words, "false"], out=one, cache=tmp_path)
    less = [*words, kind, "--model.tiled_mlp", "true", "--training.strategy", strategy]
    tiles = launch.SPIES / "short_tiles.py"
    parts = launch.train("2 ranks", less, out=two, cache=tmp_path, script=tiles)
    assert worst(whole["losses"], parts["losses"]) < 1e-5
    assert parts["eval_loss_after"] == pytest.approx(whole["eval_loss_after"], rel=1e-6)
    assert apart(one, two) < 2e-5


@pytest.mark.campaign
def test_full_fine_tuning_and_its_checkpoints_do_not_depend_on_sharding(
    tied_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Ragged rows, three accumulated, tied embeddings, uneven parts; eleven rows to evaluate on two ranks; sampled
    answers; files so small that both ranks write several. Resumed from sharded on one process, and the other way."""
    full = ("--model.full_finetuning", "--training.learning_rate", "1e-3", "--logging.generate_samples", "3")
    batch = ("--training.global_batch_size", "12", "--training.per_device_train_batch_size")
    words = settings(tied_model, tiny_data, *full, *batch)
    one, two = tmp_path / "one", tmp_path / "two"
    single = launch.train("1 rank", [*words, "4"], out=one, cache=tmp_path)
    small = launch.SPIES / "small_files.py"
    sharded = launch.train("2 ranks", [*words, "2", *SHARD], out=two, cache=tmp_path, script=small)
    assert (single["world_size"], sharded["world_size"], sharded["batch"]["accumulation"]) == (1, 2, 3)
    assert sharded["backend_reason"] == "set by model.backend"
    assert worst(single["losses"], sharded["losses"]) < 1e-5
    for name in ("eval_loss_before", "eval_loss_after"):
        assert sharded[name] == pytest.approx(single[name], rel=1e-6)
    assert apart(one, two) < 2e-5
    assert json.loads((two / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    found = sharded["sharding"]
    assert single["sharding"] is None
    assert found["units"] == 3 + 1 and found["sharded_fraction"] == 1.0  # the tied embedding is in the root
    assert found["reduce_dtypes"] == ["float32"] and found["output_dtype"] == "float32"
    total = sum(value.numel() for value in weights(two).values())
    assert sum(found["local_elements"]) == total and max(found["local_elements"]) < 0.53 * total
    parts = sum(math.ceil(len(value) / 2) * value[0].nbytes for value in weights(two).values())
    assert found["parameter_bytes"] == [parts, parts]  # of weights, which the last rank pads; gradients were checked
    assert found["predicted_bytes_per_rank"] == {"parameters": parts, "gradients": parts, "optimizer": 2 * parts}
    assert {"every_matrix_is_sharded", "sharded_gradients_are_reduced_in_float32"} <= set(sharded["invariants"])

    kept = {file.name for file in (two / "checkpoint-3").iterdir()}
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json", "optimizer.json"} <= kept
    assert "optimizer.pt" not in kept and sum(name.startswith("optimizer-0000") for name in kept) > 4
    back = resumed("1 rank", [*words, "4"], two, tmp_path / "shard to one", tmp_path)
    forth = resumed("2 ranks", [*words, "2", *SHARD], one, tmp_path / "one to shard", tmp_path)
    for run, folder in ((back, "shard to one"), (forth, "one to shard")):
        assert run["resumed_from"].endswith("checkpoint-3")
        assert worst(single["losses"][3:], run["losses"]) < 1e-5
        assert apart(one, tmp_path / folder) < 2e-5


@pytest.mark.campaign
def test_checkpoints_do_not_depend_on_ranks_that_share_rows(tied_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """An adapter on packs, whose batch grows with the launch: from two ranks that share each row to one rank, and from
    one to shared and sharded. All figures of a run are those of one rank."""
    words = settings(tied_model, tiny_data, "--data.packing", "--data.max_length", "128", "--data.pack_length", "150")
    words += ["--training.per_device_train_batch_size", "2", "--training.gradient_accumulation_steps", "2"]
    words += ["--logging.generate_samples", "3", "--training.eval_steps", "3"]
    shared = ("--training.context_parallel", "2")
    one, two = tmp_path / "one", tmp_path / "two"
    single = launch.train("1 rank", words, out=one, cache=tmp_path)
    together = launch.train("2 ranks", [*words, *shared], out=two, cache=tmp_path)
    assert together["backend_reason"] == "set by model.backend" and together["plan"] == single["plan"]
    assert together["batch"] == single["batch"] == {"per_device": 2, "accumulation": 2, "global_batch_size": 4}
    assert worst(single["losses"], together["losses"]) < 1e-5 and apart(one, two) < 2e-5
    for name in ("eval_loss_before", "eval_loss_after"):
        assert together[name] == pytest.approx(single[name], rel=1e-6)
    for name in ("eval_token_accuracy", "eval_entropy", "gradient_norm"):
        events = [events_of(out).Scalars(tag(name)) for out in (one, two)]
        assert [found.value for found in events[0]] == pytest.approx([found.value for found in events[1]], rel=1e-5)
    # A step's 2 x 300 positions become 304; the tokens are the same.
    assert (1 - together["padding_fraction"]) * 304 == pytest.approx((1 - single["padding_fraction"]) * 300)
    back = resumed("1 rank", words, two, tmp_path / "shared to one", tmp_path)
    forth = resumed("2 ranks", [*words, *shared, *SHARD], one, tmp_path / "one to shared", tmp_path)
    for run, folder in ((back, "shared to one"), (forth, "one to shared")):
        assert run["resumed_from"].endswith("checkpoint-3") and run["batch"]["global_batch_size"] == 4
        assert worst(single["losses"][3:], run["losses"]) < 1e-5
        assert apart(one, tmp_path / folder) < 2e-5


@pytest.mark.campaign
def test_a_fully_trained_mixture_of_experts_resumes_sharded_and_whole(tiny_data: Path, tmp_path: Path) -> None:
    """Its files have a tensor for each expert, the model a stack of them. The experts' tokens are counted alike."""
    model = models.make("moe", tmp_path / "moe")
    full = ("--model.full_finetuning", "--training.learning_rate", "1e-3", "--training.router_aux_loss_coef", "0")
    words = settings(model, tiny_data, *full, "--training.global_batch_size", "4", "--logging.logging_steps", "6")
    words += ["--training.per_device_train_batch_size", "2"]
    one, two = tmp_path / "one", tmp_path / "two"
    single = launch.train("1 rank", words, out=one, cache=tmp_path)
    sharded = launch.train("2 ranks", [*words, *SHARD], out=two, cache=tmp_path)
    assert worst(single["losses"], sharded["losses"]) < 1e-4 and apart(one, two) < 1e-4
    load = [events_of(out).Scalars(tag("expert_load_max"))[0].value for out in (one, two)]
    assert load[0] == pytest.approx(load[1], rel=0.05) and load[0] > 1
    back = resumed("1 rank", words, two, tmp_path / "shard to one", tmp_path)
    forth = resumed("2 ranks", [*words, *SHARD], two, tmp_path / "shard to shard", tmp_path)
    for run, folder in ((back, "shard to one"), (forth, "shard to shard")):
        assert worst(sharded["losses"][3:], run["losses"]) < 1e-4
        assert apart(two, tmp_path / folder) < 1e-4


@pytest.mark.campaign
def test_a_run_goes_on_from_sharded_to_ddp_and_back(tied_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """On two ranks both times; the losses are those of the runs that were not interrupted."""
    full = ("--model.full_finetuning", "--training.learning_rate", "1e-3", "--logging.generate_samples", "0")
    batch = ("--training.global_batch_size", "12", "--training.per_device_train_batch_size", "2")
    words = settings(tied_model, tiny_data, *full, *batch)
    ddp, sharded = tmp_path / "ddp", tmp_path / "shard"
    copied = launch.train("2 ranks", words, out=ddp, cache=tmp_path)
    split = launch.train("2 ranks", [*words, *SHARD], out=sharded, cache=tmp_path)
    assert copied["sharding"] is None and split["sharding"]["units"] == 4
    assert worst(copied["losses"], split["losses"]) < 1e-5
    to_ddp = resumed("2 ranks", words, sharded, tmp_path / "to ddp", tmp_path)
    to_shard = resumed("2 ranks", [*words, *SHARD], ddp, tmp_path / "to shard", tmp_path)
    assert to_ddp["sharding"] is None and to_shard["sharding"]["sharded_fraction"] == 1.0
    for run, folder in ((to_ddp, "to ddp"), (to_shard, "to shard")):
        assert run["world_size"] == 2 and run["resumed_from"].endswith("checkpoint-3")
        assert worst(copied["losses"][3:], run["losses"]) < 1e-5
        assert apart(ddp, tmp_path / folder) < 2e-5


@pytest.fixture(scope="session")
def blocks_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with rows of 256 numbers, so that 8-bit states have the same blocks on any number of ranks."""
    heads: Any = dict(num_attention_heads=2, num_key_value_heads=2)
    return tiny.make_model(tmp_path_factory.mktemp("blocks"), hidden=256, intermediate_size=256, **heads)


@pytest.mark.campaign
def test_adam_in_8_bits_does_not_depend_on_sharding(blocks_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """One process, DDP and sharded; resumed on other ranks and with the other strategy. Not compiled."""
    pytest.importorskip("torchao")
    full = ("--model.full_finetuning", "--training.learning_rate", "1e-3", "--logging.generate_samples", "0")
    batch = ("--training.optim", "adamw_torch_8bit", "--training.global_batch_size", "8")
    words = settings(blocks_model, tiny_data, *full, *batch, "--training.per_device_train_batch_size", "2")
    eager: Any = {"cache": tmp_path, "script": launch.SPIES / "eager_adam.py"}
    one, ddp, split = tmp_path / "one", tmp_path / "ddp", tmp_path / "shard"
    single = launch.train("1 rank", words, out=one, **eager)
    copied = launch.train("2 ranks", words, out=ddp, **eager)
    sharded = launch.train("2 ranks", [*words, *SHARD], out=split, **eager)
    assert worst(single["losses"], copied["losses"]) < 1e-6 and worst(single["losses"], sharded["losses"]) < 1e-6
    assert apart(one, ddp) < 2e-4 and apart(one, split) < 2e-4  # a rounded sum can change a code
    held = sharded["sharding"]["predicted_bytes_per_rank"]
    assert held["optimizer"] < 0.6 * held["parameters"]  # float32: a quarter of it for each state, with the tables
    names = set(load_file(split / "checkpoint-3" / "optimizer.safetensors"))
    assert "0.exp_avg.codes" in names and "0.exp_avg.scales" in names
    again = {
        "shard to one": ("1 rank", words, split),
        "shard to four": ("4 ranks", [*words, *SHARD], split),
        "ddp to shard": ("2 ranks", [*words, *SHARD], ddp),
        "shard to ddp": ("2 ranks", words, split),
    }
    for name, (how, given, whole) in again.items():
        run = resumed(how, given, whole, tmp_path / name, tmp_path, eager["script"])
        assert run["resumed_from"].endswith("checkpoint-3")
        assert worst(single["losses"][3:], run["losses"]) < 1e-6, name
        assert apart(one, tmp_path / name) < 2e-4, name


@pytest.mark.campaign
def test_lora_and_its_checkpoints_do_not_depend_on_sharding(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """With the best model at the end, and gradients reduced in every pass, which an adapter does not do by default."""
    best = ("--training.eval_steps", "2", "--training.load_best_model_at_end", "true", "--training.greater_is_better")
    batch = ("--training.global_batch_size", "8", "--training.per_device_train_batch_size", "2")
    words = settings(tiny_model, tiny_data, "--training.learning_rate", "1e-3", *batch, *best, "true")
    words += ["--logging.generate_samples", "0"]
    one, two = tmp_path / "one", tmp_path / "two"
    single = launch.train("1 rank", words, out=one, cache=tmp_path)
    every = ("--training.shard_reduce", "every_pass")
    sharded = launch.train("2 ranks", [*words, *SHARD, *every], out=two, cache=tmp_path)
    assert single["best"]["step"] == sharded["best"]["step"] == 2 and sharded["best"]["loaded"]
    assert worst(single["losses"], sharded["losses"]) < 1e-5 and apart(one, two) < 1e-6
    assert sharded["eval_loss_after"] == pytest.approx(sharded["best"]["value"], rel=1e-6)
    assert sharded["sharding"]["units"] == 2 + 2 and sharded["sharding"]["sharded_fraction"] == 1.0
    adapter = load_file(two / "checkpoint-6" / "adapter_model.safetensors")
    assert all(bool(value.abs().sum(-1).all()) for key, value in adapter.items() if "lora_B" in key)
    again = resumed("2 ranks", [*words, *SHARD, *every], two, tmp_path / "again", tmp_path)
    assert again["losses"] == sharded["losses"][3:] and apart(two, tmp_path / "again") < 1e-6


# Experts of `mixture`: one for the tokens "Z", which a single row has, and one for no token.
RARE, IDLE, EXPERTS = 1, 3, 8


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss of eight experts, with its rows in rows.jsonl."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer: Any = tiny.make_tokenizer(folder)
    model = tiny.make_moe("GptOss", vocab_size=len(tokenizer), num_local_experts=EXPERTS)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("Z"), 0] = 50
        for layer in model.model.layers:
            layer.mlp.router.weight[:, 0] = 0
            layer.mlp.router.weight[RARE] = 10 * torch.eye(32)[0]
            layer.mlp.router.bias[RARE] = -5
            layer.mlp.router.bias[IDLE] = -1000
    model.save_pretrained(folder)
    rows = tiny.make_rows(folder / "rows.jsonl", 12, longest=12).read_text().splitlines()
    rows[4] = rows[4].replace('"role": "assistant", "content": "', '"role": "assistant", "content": "ZZZ ')
    (folder / "rows.jsonl").write_text("\n".join(rows))
    for number, row in enumerate(rows):
        ids = tokenizer.apply_chat_template(json.loads(row)["messages"], return_tensors="pt", return_dict=False)
        chosen: set[int] = set()
        with torch.no_grad():
            for logits in model(ids, output_router_logits=True).router_logits:
                chosen.update(logits.topk(tiny.CHOSEN).indices.flatten().tolist())
        assert (RARE in chosen, IDLE in chosen) == (number == 4, False)
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["LoRA", "full"])
def test_experts_without_a_token(mixture: Path, tmp_path: Path, kind: str) -> None:
    """One expert has tokens on one rank in one step, another none at all: no rank waits, the first is trained as on one
    rank, the second stays as it was to the bit. Also where DDP is resumed sharded, and the other way."""
    words = ["--model.model_name_or_path", str(mixture), "--data.train_file", str(mixture / "rows.jsonl"), *PLAIN]
    words += [
        "--training.global_batch_size",
        "4",
        "--training.per_device_train_batch_size",
        "1",
        "--training.max_steps",
    ]
    words += [str(STEPS), "--training.save_steps", "3", "--training.learning_rate", "1e-2", "--training.warmup_steps"]
    words += ["0", "--training.weight_decay", "0", "--logging.generate_samples", "0"]
    words += ["--model.full_finetuning"] if kind == "full" else []
    one, two, again = tmp_path / "one", tmp_path / "two", tmp_path / "again"
    strategies = ((), SHARD) if kind == "LoRA" else (SHARD, ())
    single = launch.train("1 rank", words, out=one, cache=tmp_path)
    whole = launch.train("2 ranks", [*words, *strategies[0]], out=two, cache=tmp_path)
    half = resumed("2 ranks", [*words, *strategies[1]], two, again, tmp_path)
    assert half["resumed_from"].endswith("checkpoint-3")
    assert [one["sharding"] is not None for one in (whole, half)] == [kind == "full", kind == "LoRA"]
    assert worst(single["losses"], whole["losses"]) < 1e-5 and worst(single["losses"][3:], half["losses"]) < 1e-5
    before = weights(mixture) if kind == "full" else weights(one / "checkpoint-3")
    for folder in (one, two, again):
        assert apart(one, folder) < 1e-5
        stacked = {name: value for name, value in weights(folder).items() if "experts" in name and "bias" not in name}
        assert len(stacked) == (4 if kind == "full" else 8)
        for name, value in stacked.items():
            after, was = by_expert(name, value), by_expert(name, before[name])
            assert torch.equal(after[IDLE], was[IDLE]), name
            assert not torch.equal(after[RARE], was[RARE]) or "lora_A" in name, name
            changed = [not torch.equal(*pair) for pair in zip(after, was, strict=True)]
            assert sum(changed) == EXPERTS - 1 or "lora" in name, name
            if "lora_B" in name:  # from zero
                assert [bool(part.any()) for part in after] == [expert != IDLE for expert in range(EXPERTS)]


def by_expert(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """The part of each expert: PEFT has A as [experts x rank, in], and B as [out, rank x experts]."""
    if "lora_A" in name:
        return list(value.unflatten(0, (EXPERTS, -1)))
    return list(value.unflatten(1, (-1, EXPERTS)).movedim(2, 0)) if "lora_B" in name else list(value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not sharded", "rank 0 has sharded no module"),
        pytest.param("embedding left out", "rank 0 holds 1 matrices whole", marks=pytest.mark.campaign),
    ],
)
def test_what_is_not_sharded_is_refused_on_all_ranks(
    tiny_model: Path, tied_model: Path, tiny_data: Path, tmp_path: Path, kind: str, said: str
) -> None:
    model = tied_model if kind == "embedding left out" else tiny_model
    words = arguments(model, tiny_data, "--training.global_batch_size", "4", *PLAIN)
    done = faulty(kind, 2, tmp_path / "out", tmp_path, words, "shard", "transformers")
    assert done.returncode != 0
    said = f"training.strategy is shard and {said}"
    assert done.stdout.count("error: ") == 1 and said in " ".join(done.stdout.split()), done.stdout[-4000:]


@pytest.mark.campaign
@pytest.mark.parametrize("accumulated", ["1", "3"])
@pytest.mark.parametrize("kind", ["full", "LoRA", "QLoRA"])
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_parity_of_strategies(
    tied_model: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path, accumulated: str, kind: str, rows: str
) -> None:
    """One, two and four ranks, DDP and sharded: gradients, norms, losses, held-out loss and weights."""
    report = tmp_path / "parity.json"
    batch = str(4 * int(accumulated))
    extra = ["--training.global_batch_size", batch, "--training.per_device_train_batch_size", "1", *PLAIN]
    extra += {"full": ["--model.full_finetuning"], "LoRA": [], "QLoRA": ["--model.load_in_4bit"]}[kind]
    model = tiny_model if kind == "QLoRA" else tied_model  # whose 4-bit weights fill whole numbers
    extra += ["--data.packing", "--data.max_length", "128", "--data.pack_length", "150"] if rows == "packed" else []
    words = ["--world-sizes", "1,2,4", "--strategies", "ddp,shard", "--steps", "3", "--json", str(report)]
    done = prove(tmp_path, *words, *arguments(model, tiny_data, *extra))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())["found"]
    assert [(one["world_size"], one["strategy"]) for one in found] == [
        (2, "ddp"), (2, "shard"), (4, "ddp"), (4, "shard")
    ]  # fmt: skip
    for one in found:
        assert abs(one["ratio"] - 1) < 1e-4 and one["cosine"] > 0.99999 and one["loss"] < 1e-5, one


def test_parity_of_strategies_needs_a_configuration_that_both_can_run(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    words = arguments(tiny_model, tiny_data, "--model.load_in_8bit", *PLAIN)
    done = prove(tmp_path, "--strategies", "ddp,shard", *words)
    assert done.returncode == 2 and "load_in_8bit" in done.stderr, done.stderr
    done = prove(tmp_path, "--strategies", "fsdp", *words)
    assert done.returncode == 2 and "unknown strategy 'fsdp'" in done.stderr, done.stderr
