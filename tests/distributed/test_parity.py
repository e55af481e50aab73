"""`finetune parity` proves what is equal, and catches by figure or by name what is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from finetune.parity import command as parity
from tests.helpers import launch, tiny

pytestmark = pytest.mark.process

PLAIN = ("--model.backend", "transformers", "--training.gradient_checkpointing", "true")
# A coefficient with which the load-balancing loss is a large part of the gradient.
EXPERTS = ("--model.model_name_or_path", "EXPERTS", "--training.router_aux_loss_coef", "0.5")


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a mixture of four experts, two for each token, with a layer that carries a state."""
    return tiny.save_text("GraniteMoeHybrid", tmp_path_factory.mktemp("experts") / "hybrid")


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model whose heads no two ranks can divide."""
    folder = tmp_path_factory.mktemp("uneven") / "uneven"
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    return tiny.save_moe("Llama", folder, **heads)


def arguments(model: Path, data: Path, *extra: str) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_file", str(data / "eval.jsonl"), "--training.learning_rate", "1e-3", *extra),
    ]


def prove(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return launch.command_with_ranks("finetune.parity", list(words), cache=cache)


@pytest.mark.parametrize(
    ("worlds", "extra"),
    [
        ("1,2", ("--training.global_batch_size", "6", "--training.per_device_train_batch_size", "1", "--data.packing",
                 "--data.max_length", "128", "--data.pack_length", "200", "--lora.modules_to_save", "[lm_head]")),
        # 13 rows: the second step holds one row and eleven without a label, which are all that three of four ranks get.
        pytest.param("1,4", ("--training.global_batch_size", "12", "--model.full_finetuning", "--model.backend",
                             "transformers", "--training.per_device_train_batch_size", "3", "--data.train_file",
                             "THIRTEEN"), marks=pytest.mark.campaign),
        pytest.param("1,2", ("--training.global_batch_size", "4", "--model.load_in_4bit",
                             "--training.gradient_checkpointing", "false"), marks=pytest.mark.unsloth),
        pytest.param("1,2", ("--training.global_batch_size", "4", "--training.per_device_train_batch_size", "1",
                             "--data.packing", "--data.max_length", "128", "--model.load_in_fp8",
                             "--model.backend", "transformers"), marks=[pytest.mark.fp8, pytest.mark.campaign]),
        ("1,2", ("--training.global_batch_size", "4", "--training.per_device_train_batch_size", "1", "--data.packing",
                 "--data.max_length", "128", "--data.pack_length", "150", "--model.full_finetuning",
                 "--model.backend", "transformers", "--strategies", "ddp,shard", *EXPERTS)),
        # 3 query heads and 1 key/value head on 2 ranks.
        ("1,2", ("--training.global_batch_size", "4", "--training.per_device_train_batch_size", "1", "--data.packing",
                 "--data.max_length", "128", "--data.pack_length", "150", "--strategies", "cp",
                 "--model.model_name_or_path", "UNEVEN", *PLAIN)),
        pytest.param("1,4", ("--training.global_batch_size", "12", "--training.per_device_train_batch_size", "3",
                             "--model.full_finetuning", "--data.train_file", "THIRTEEN", "--strategies",
                             "ddp,shard,cp,shard+cp", "--training.context_parallel", "2", "--model.model_name_or_path",
                             "UNEVEN", *PLAIN), marks=pytest.mark.campaign),
        pytest.param("1,2", ("--training.global_batch_size", "4", "--model.load_in_4bit", "--strategies", "cp,shard+cp",
                             *PLAIN), marks=pytest.mark.campaign),
        pytest.param("1,2", ("--training.global_batch_size", "12", "--training.per_device_train_batch_size", "3",
                             "--data.train_file", "THIRTEEN", "--model.backend", "unsloth", *EXPERTS),
                     marks=[pytest.mark.unsloth, pytest.mark.campaign]),
    ],
    ids=["LoRA packed accumulated modules_to_save", "full padded masked", "QLoRA", "FP8", "experts packed sharded",
         "LoRA packed shared", "full padded shared", "QLoRA shared", "experts LoRA padded"],
)  # fmt: skip
def test_world_sizes_are_equal(
    tiny_model: Path, experts: Path, uneven: Path, tiny_data: Path, tmp_path: Path, worlds: str, extra: tuple
) -> None:
    report, few = tmp_path / "parity.json", tmp_path / "few.jsonl"
    few.write_text("".join((tiny_data / "train.jsonl").read_text().splitlines(keepends=True)[:13]))
    files = {"THIRTEEN": str(few), "EXPERTS": str(experts), "UNEVEN": str(uneven)}
    extra = tuple(files.get(word, word) for word in extra)
    words = arguments(tiny_model, tiny_data, *extra, "--json", str(report))
    done = prove(tmp_path, "--world-sizes", worlds, "--steps", "3", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    ways = extra[extra.index("--strategies") + 1].split(",") if "--strategies" in extra else ["ddp"]
    pairs = [(one["world_size"], one["strategy"]) for one in found["found"]]
    assert found["proven"] and pairs == [(int(worlds.split(",")[1]), way) for way in ways]
    for one in found["found"]:
        assert len(one["tensors"]) > 4
        assert abs(one["ratio"] - 1) < 1e-4 and one["cosine"] > 0.99999 and one["loss"] < 1e-5
        assert one["norm"] < 1e-4 and all(abs(r - 1) < 1e-3 and c > 0.9999 for _, r, c in one["tensors"])


def faulty(
    kind: str, ranks: int, out: Path, cache: Path, words: list[str], strategy: str = "ddp", backend: str = "auto"
) -> subprocess.CompletedProcess[str]:
    out.mkdir()
    how = {1: "1 rank", 2: "2 ranks"}[ranks]
    return launch.run(
        how,
        [str(out), "3", "", strategy, backend, "2", *words],
        cache=cache,
        script=launch.SPIES / "parity_fault.py",
        FAULT=kind,
    )


@pytest.mark.unsloth  # a loss without the count is TRL's own, which has no kernel for a CPU
def test_a_wrong_loss_is_not_proven(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The two mistakes of guides for several GPUs, against one rank; the logged loss alone would pass for right."""
    batch = ("--training.global_batch_size", "8", "--training.per_device_train_batch_size", "2")
    words = arguments(tiny_model, tiny_data, *batch)
    found = {}
    for kind, ranks in (("healthy", 1), ("scales by W", 2), ("drops the count", 2)):
        done = faulty(kind, ranks, tmp_path / kind, tmp_path, words)
        assert done.returncode == 0, done.stdout[-3000:]
        found[kind] = parity.compare(tmp_path / "healthy", tmp_path / kind, ranks)
    assert not found["healthy"].failures
    assert found["scales by W"].ratio == pytest.approx(2.0, rel=1e-3)
    assert "gradient is 2.0" in found["scales by W"].failures[0]
    assert found["drops the count"].failures and found["drops the count"].tensors


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("other trainer", "same trainer on all ranks", marks=pytest.mark.campaign),
        pytest.param("early group", "timeout as configured", marks=pytest.mark.campaign),
        ("one device", "ranks 0 and 1 share cuda:0"),
    ],
    ids=["other trainer", "early group", "one device"],
)
def test_an_invariant_stops_all_ranks_by_name(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, kind: str, name: str
) -> None:
    words = arguments(tiny_model, tiny_data, "--training.global_batch_size", "4", "--training.ddp_timeout", "777")
    done = faulty(kind, 2, tmp_path / "out", tmp_path, words)
    assert done.returncode != 0
    said = done.stdout
    assert said.count("error: ") == 1 and name in said, said[-4000:]


def test_bad_options(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    for words, expected in (
        (["--world-sizes", "two"], "expected integers of at least 1"),
        (["--world-sizes", "1"], "expected two or more to compare"),
        (["--world-sizes", "1,5"], "1, 2, 4, 8"),
        (["--strategies", "ddp,tp"], "unknown strategy 'tp'. Use some of ddp, shard, cp, shard+cp."),
        (
            ["--strategies", "cp", "--training.context_parallel", "3"],
            "context_parallel 3 does not divide 2 (processes)",
        ),
        (["--strategies", "cp", "--model.backend", "unsloth"], "rows are shared with the transformers backend"),
        (["--training.learing_rate", "1"], "learning_rate"),
    ):
        done = prove(tmp_path, *words, *arguments(tiny_model, tiny_data, "--training.global_batch_size", "8"))
        assert done.returncode == 2 and expected in done.stderr, done.stderr
    done = prove(tmp_path, "--help")
    assert done.returncode == 0 and "--world-sizes" in done.stdout


SCRIPT = """
import os, sys
os.environ["FINETUNE_BACKEND"] = "transformers"
from finetune import SFTConfig, SFTTrainer
from datasets import load_dataset
from pathlib import Path
from transformers import AutoModelForCausalLM, TrainerCallback

model, data, fault = sys.argv[1:]


class Marks(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        Path(f"trained-{args.world_size}").touch()


def scale(module, args, output):
    output["loss"] = output["loss"] * (1 + int(os.environ.get("RANK", "0")))
    return output


if fault != "none":
    model = AutoModelForCausalLM.from_pretrained(model)
if fault == "rank":
    model.register_forward_hook(scale)
trainer = SFTTrainer(
    model,
    SFTConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=50,
        warmup_steps=10,
        max_grad_norm=0.01,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        report_to="none",
        bf16=False,
        use_cpu=True,
    ),
    train_dataset=load_dataset("json", data_files=data + "/train.jsonl", split="train"),
    eval_dataset=load_dataset("json", data_files=data + "/eval.jsonl", split="train"),
    callbacks=[Marks()],
)
trainer.train()
Path("marker").touch()
"""


@pytest.mark.campaign
@pytest.mark.parametrize(("fault", "code"), [("none", 0), ("rank", 1)])
def test_a_script_is_compared_with_itself(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, fault: str, code: int
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = ["mine.py", str(tiny_model), str(tiny_data), fault, "--world-sizes", "1,2", "--steps", "3"]
    words += ["--strategies", "ddp,shard,cp"] if fault == "none" else []  # it gives the trainer the model's name
    done = launch.command_with_ranks(
        "finetune.parity", [*words, "--json", "parity.json"], cache=tmp_path, kind="transformers"
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["proven"] is (code == 0) and found["steps"] == 3
    assert [one["strategy"] for one in found["found"]] == (["ddp", "shard", "cp"] if code == 0 else ["ddp"])
    for one in found["found"]:
        assert one["world_size"] == 2
        if code == 0:
            assert abs(one["ratio"] - 1) < 1e-4 and one["norm"] < 1e-4
            assert one["loss"] < 1e-5 and one["eval_loss"] < 1e-5
    if code:  # rank 1 counts its half of the tokens twice
        assert one["ratio"] > 1.2 and "the gradient is 1." in one["failures"][0]
    assert (tmp_path / "trained-2").exists()
    assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


@pytest.mark.campaign
def test_a_script_that_cannot_be_compared(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "theirs.py").write_text("from trl import SFTTrainer\n")
    given = [str(tiny_model), str(tiny_data), "none"]
    for words, expected in (
        (["theirs.py"], "Change `from trl import SFTTrainer`"),
        (["mine.py", *given, "--world-sizes", "2"], "expected two or more to compare"),
        (["mine.py", *given[:2], "loaded", "--strategies", "shard"], "Pass its name or folder to SFTTrainer instead"),
    ):
        done = launch.command_with_ranks("finetune.parity", words, cache=tmp_path, kind="transformers")
        assert done.returncode == 2 and expected in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
