"""Records the fixtures of `finetune review`: runs of the real trainer, healthy ones and ones with a planted fault.

    python -m tests.review.record [NAME ...]

All run on ranks forked from one process that has imported the stack. What is kept of a run is what `review` reads: the
scalars of its events, ranks.jsonl and run.json, without names of this machine.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.review import events
from tests.helpers import ROOT, launch, tiny, warm

FIXTURES = Path(__file__).parent / "fixtures"
SCRIPT = launch.SPIES / "review_fault.py"
MOST_BYTES = 200_000
MODELS: dict[str, dict[str, int]] = {"small": {"hidden": 192, "layers": 4}, "wide": {"hidden": 512, "layers": 1}}
FULL = {"model.full_finetuning": "true", "training.optim": "adamw_torch"}


@dataclass(frozen=True)
class Fixture:
    """A run to record.

    Attributes:
        rule: the rule that is to fire, and no other; None for a healthy run.
        settings: over those of every run.
        rows: writes train.jsonl and, if the run evaluates, eval.jsonl.
        fault: what tests/spies/review_fault.py plants, by environment variables.
        code: exit code of the run.
    """

    rule: str | None
    settings: dict[str, str] = field(default_factory=dict)
    ranks: int = 2
    rows: Callable[[Path], None] | None = None
    fault: dict[str, str] = field(default_factory=dict)
    model: str = "small"
    code: int = 0


# --- data -------------------------------------------------------------------------------------------------------------


def ragged(folder: Path) -> None:
    """Conversations of similar lengths, and as many held out as a short evaluation takes."""
    conversation_file(folder / "train.jsonl", 400, seed=0, words=(20, 28))
    conversation_file(folder / "eval.jsonl", 16, seed=1, words=(20, 28))


def training_only(folder: Path) -> None:
    """As `ragged`, with nothing held out."""
    conversation_file(folder / "train.jsonl", 400, seed=0, words=(20, 28))


def very_ragged(folder: Path) -> None:
    """Short and long rows, too few of them to form batches of similar ones."""
    conversation_file(folder / "train.jsonl", 32, seed=0, words=(2, 90))


def short(folder: Path) -> None:
    """Rows of a few words, which leave little to compute."""
    conversation_file(folder / "train.jsonl", 400, seed=0, words=(2, 4))


def leaked(folder: Path) -> None:
    """Five of the held-out rows are training rows."""
    ragged(folder)
    train, held_out = (folder / name for name in ("train.jsonl", "eval.jsonl"))
    lines = train.read_text().splitlines(keepends=True)
    held_out.write_text(held_out.read_text() + "".join(lines[3:8]))


def without_answers(folder: Path) -> None:
    """Every sixth row has an empty answer."""
    training_only(folder)
    path = folder / "train.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[::6]:
        line["messages"][1]["content"] = ""
        line["messages"].pop()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def few_rows(folder: Path) -> None:
    """So few that the model learns them by heart."""
    conversation_file(folder / "train.jsonl", 16, seed=0, words=(20, 28))
    conversation_file(folder / "eval.jsonl", 16, seed=1, words=(20, 28))


def much_held_out(folder: Path) -> None:
    """An evaluation that takes longer than the steps before it."""
    conversation_file(folder / "train.jsonl", 400, seed=0, words=(20, 28))
    conversation_file(folder / "eval.jsonl", 160, seed=1, words=(20, 28))


def conversation_file(path: Path, count: int, *, seed: int, words: tuple[int, int]) -> None:
    """Rows of a question and an answer that repeats it, each of so many words."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            said = " ".join(rng.choices(tiny.WORDS, k=rng.randint(*words)))
            messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")


def make_experts(folder: Path) -> None:
    """A mixture of 16 experts, two for each token."""
    import torch
    import transformers

    tokenizer = tiny.make_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "num_experts": 16, "num_experts_per_tok": 2, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


# --- runs -------------------------------------------------------------------------------------------------------------

EVERY_RUN = {
    "model.model_name_or_path": "model",
    "model.backend": "transformers",
    "data.train_file": "train.jsonl",
    "data.max_length": "512",
    "training.output_dir": "out",
    "training.max_steps": "80",
    "training.global_batch_size": "16",
    "training.per_device_train_batch_size": "4",
    "training.learning_rate": "3e-3",
    "training.gradient_checkpointing": "false",
    "training.save_steps": "0",
    "training.warmup_steps": "5",
    "logging.logging_steps": "5",
    "logging.generate_samples": "0",
}
EVALUATED = {"data.eval_file": "eval.jsonl", "training.eval_steps": "40"}
BFLOAT16 = FULL | {"model.dtype": "bfloat16", "training.learning_rate": "2e-4"}
SINGLE_ROWS = {"training.global_batch_size": "2", "training.per_device_train_batch_size": "1"}


def of_rank(kind: str, rank: int, seconds: float) -> dict[str, str]:
    """A fault of one rank."""
    return {"FAULT": kind, "FAULT_RANK": str(rank), "FAULT_SECONDS": str(seconds)}


RUNS: dict[str, Fixture] = {
    "healthy-lora": Fixture(
        None,
        rows=ragged,
        settings=EVALUATED
        | {"training.max_steps": "60", "training.eval_steps": "30", "training.global_batch_size": "48"},
    ),
    "healthy-packed": Fixture(
        None,
        rows=training_only,
        settings={"data.packing": "true", "data.pack_length": "512"}
        | {"training.global_batch_size": "4", "training.per_device_train_batch_size": "1"},
    ),
    "healthy-one-rank": Fixture(
        None, ranks=1, rows=ragged, settings=FULL | EVALUATED | {"training.learning_rate": "1e-3"}
    ),
    "healthy-full": Fixture(None, ranks=1, rows=training_only, settings=BFLOAT16),
    "updates-lost": Fixture(
        "updates-lost", ranks=1, rows=training_only, settings=BFLOAT16 | {"training.master_weights": "none"}
    ),
    "slow-loader": Fixture("data-wait", rows=training_only, fault={"FAULT": "slow loader", "FAULT_SECONDS": "0.15"}),
    "slow-rank-compute": Fixture("straggler", rows=ragged, settings=EVALUATED, fault=of_rank("slow compute", 1, 0.15)),
    "slow-rank-loader": Fixture("straggler", rows=training_only, fault=of_rank("slow loader", 0, 0.15)),
    "padding": Fixture("padding", rows=very_ragged, settings={"training.per_device_train_batch_size": "8"}),
    "communication": Fixture(
        "communication", rows=short, model="wide", settings=FULL | SINGLE_ROWS | {"training.optim": "sgd"}
    ),
    "evaluation-too-often": Fixture(
        "evaluation-share", rows=much_held_out, settings=EVALUATED | {"training.eval_steps": "4"}
    ),
    "diverging": Fixture(
        "diverging",
        rows=training_only,
        settings=FULL
        | {"training.learning_rate": "1", "training.max_steps": "60", "training.warmup_steps": "60"}
        | {"training.lr_scheduler_type": "constant_with_warmup"},
    ),
    "nan": Fixture("not-finite", rows=training_only, fault={"FAULT": "not finite", "FAULT_STEPS": "47"}, code=1),
    "spikes": Fixture("spikes", rows=training_only, fault={"FAULT": "spikes", "FAULT_STEPS": "43,58,66"}),
    "frozen": Fixture("frozen", rows=training_only, fault={"FAULT": "frozen"}),
    "healthy-experts": Fixture(
        None,
        ranks=1,
        model="experts",
        rows=training_only,
        settings=FULL | {"training.learning_rate": "1e-3", "training.router_aux_loss_coef": "0.1"},
    ),
    "collapsed-routing": Fixture(
        "collapsed-routing",
        ranks=1,
        model="experts",
        rows=training_only,
        settings=FULL | {"training.learning_rate": "5e-2", "training.router_aux_loss_coef": "0"},
    ),
    "rate-too-low": Fixture(
        "frozen", ranks=1, rows=ragged, settings=FULL | EVALUATED | {"training.learning_rate": "1e-7"}
    ),
    "leak": Fixture("leak", rows=leaked, settings=EVALUATED),
    "rows-lost": Fixture("rows-lost", rows=without_answers),
    "overfitting": Fixture(
        "overfitting",
        rows=few_rows,
        settings=FULL | EVALUATED | {"training.eval_steps": "10", "training.global_batch_size": "8"},
    ),
}


def record(name: str, out: Path, **settings: str) -> Path:
    """Make a run and keep what `review` reads of it in `out`. `settings` are over the fixture's."""
    fixture = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="review-") as scratch:
        folder = Path(scratch)
        if fixture.model == "experts":
            make_experts(folder / "model")
        else:
            tiny.make_model(folder / "model", **MODELS[fixture.model])
        assert fixture.rows is not None
        fixture.rows(folder)
        given = EVERY_RUN | fixture.settings | settings
        how = f"{fixture.ranks} rank{'s' if fixture.ranks > 1 else ''}"
        fault = {"FAULT": "none"} | fixture.fault
        arguments = [word for key, value in given.items() for word in (f"--{key}", value)]
        done = launch.run(how, arguments, cache=folder, script=SCRIPT, **fault)
        assert done.returncode == fixture.code, done.stdout[-4000:]
        keep(folder / "out", out, folder)
    return out


def keep(source: Path, out: Path, scratch: Path) -> None:
    """Copy run.json, ranks.jsonl and the scalars of the events; names of this machine are replaced."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "runs" / out.name).mkdir(parents=True)
    words = {str(scratch): "scratch", str(ROOT): "project", sys.prefix: "python"}

    def plain(text: str) -> str:
        for word, instead in words.items():
            text = text.replace(word, instead)
        return text.replace(f'"{socket.gethostname()}"', '"host"').replace(f"@{socket.gethostname()}:", "@host:")

    (out / "run.json").write_text(plain((source / "run.json").read_text()))
    (out / "runs" / "ranks.jsonl").write_text(plain((source / "runs" / "ranks.jsonl").read_text()))
    for file in (source / "runs").rglob(events.PATTERN):
        stamp = file.name.split(".")[3]
        (out / "runs" / out.name / f"events.out.tfevents.{stamp}.host").write_bytes(scalars_only(file))
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert size < MOST_BYTES, f"{out.name}: {size} bytes"


def scalars_only(file: Path) -> bytes:
    """The records of an event file without those of text, pictures and histograms."""
    from tensorboard.compat.proto.event_pb2 import Event

    kept, content, place = [], file.read_bytes(), 0
    while place < len(content):
        length = struct.unpack_from("<Q", content, place)[0]
        whole = content[place : place + 16 + length]
        event = Event.FromString(whole[12:-4])
        other = any(not value.HasField("simple_value") for value in event.summary.value)
        kept += [] if other else [whole]
        place += 16 + length
    return b"".join(kept)


def main(names: Sequence[str]) -> int:
    """Record these fixtures, or all."""
    from finetune.review.assemble import review

    failed = []
    try:
        for name in names or RUNS:
            one: dict[str, Any] = review([record(name, FIXTURES / name)]).to_dict()["runs"][0]
            found = [finding["rule"] for finding in one["findings"]]
            good = found == ([RUNS[name].rule] if RUNS[name].rule else [])
            failed += [] if good else [name]
            sys.stdout.write(f"{'ok ' if good else 'BAD'} {name}: {found}; {one['verdict']}\n")
            sys.stdout.flush()
    finally:
        warm.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
