"""One plan, any number of ranks: the same documents, gradients, evaluation and weights on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import launch, tiny
from tests.distributed.test_training import worst

STEPS = 20


@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
@pytest.mark.parametrize("documents", [1, 7, 40])
def test_packed_documents_are_as_if_alone(tiny_model: Path, tmp_path: Path, backend: str, documents: int) -> None:
    """Logits and gradients of a pack against each of its documents alone, fp32: 1e-5."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.packed_against_alone", str(tiny_model), backend, str(documents)],
        capture_output=True,
        text=True,
        env=launch.environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logits"] < 1e-5 and found["gradient"] < 1e-5 and found["loss"] < 1e-6, found


# Writes what each optimiser step was computed from (documents of each rank) and its synchronised gradient.
SPY = """
import os, sys
from pathlib import Path
import torch
from transformers import TrainerCallback
from finetune import distributed, train

folder = Path(os.environ["SPY"])
build = train.build_trainer


class Spy(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if distributed.ranks().is_main and state.global_step < 3:
            gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
            torch.save(torch.cat(gradients), folder / f"gradient-{state.global_step}.pt")


def build_spied(*arguments):
    trainer, telling, stop = build(*arguments)
    trainer.add_callback(Spy())
    fetch = trainer.get_batch_samples

    def get_batch_samples(iterator, count, device):
        batches, total = fetch(iterator, count, device)
        for batch in batches:
            name = folder / f"step-{trainer.state.global_step}-rank-{distributed.ranks().rank}.txt"
            with name.open("a") as file:
                file.writelines(repr(row.tolist()) + "\\n" for row in documents(batch))
        return batches, total

    trainer.get_batch_samples = get_batch_samples
    return trainer, telling, stop


def documents(batch):
    if "packed_seq_lengths" in batch:
        lengths = batch["packed_seq_lengths"].tolist()
        return [piece for piece in batch["input_ids"][0].split(lengths) if piece.any()]  # the filler is all padding, 0
    return [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"]) if ids.any()]


train.build_trainer = build_spied
sys.exit(train.main())
"""


def spied(ranks: int, arguments: list[str], out: Path, cache: Path) -> dict:
    """Train on so many ranks; run.json, with the documents and gradients of its steps under out/../spy-NAME."""
    spy = cache / f"spy-{out.name}"
    spy.mkdir()
    script = cache / "spy.py"
    script.write_text(SPY)
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), str(script)]
    done = subprocess.run(
        [*how, *arguments, "--training.output_dir", str(out)],
        capture_output=True,
        text=True,
        env=launch.environment(cache, SPY=str(spy)),
        timeout=launch.TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return launch.read(out)


def step_documents(spy: Path, step: int) -> list[str]:
    return sorted(line for file in spy.glob(f"step-{step}-rank-*.txt") for line in file.read_text().splitlines())


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_world_size_does_not_matter(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """20 ragged steps on 1, 2 and 4 ranks; then from step 7 of the one-rank run on 2, and packed also on 4."""
    tiny.make_rows(tmp_path / "train.jsonl", 150)
    tiny.make_rows(tmp_path / "eval.jsonl", 11, seed=1)
    arguments = [
        *("--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "train.jsonl")),
        *("--data.eval_file", str(tmp_path / "eval.jsonl"), "--training.max_steps", str(STEPS)),
        *("--training.global_batch_size", "4" if packing else "12", "--training.save_steps", "7"),
        *("--training.per_device_train_batch_size", "1", "--logging.generate_samples", "0"),
        *("--training.learning_rate", "1e-3", "--training.save_total_limit", "9"),
        *(["--data.packing", "--data.max_length", "128", "--data.pack_length", "200"] if packing else []),
    ]
    runs = {ranks: spied(ranks, arguments, tmp_path / str(ranks), tmp_path) for ranks in (1, 2, 4)}
    one = runs[1]
    assert one["ledger"]["train"]["layout"]["pack_length"] == (200 if packing else None)
    per_epoch = -(-one["ledger"]["train"]["layout"]["rows"] // one["batch"]["global_size"])
    assert per_epoch < STEPS, "the test should cross the end of an epoch, whose last step is not full"
    whole_epoch = [text for step in range(per_epoch) for text in step_documents(tmp_path / "spy-1", step)]
    assert len(whole_epoch) == one["ledger"]["train"]["rows_kept"]  # each document once
    for ranks in (2, 4):
        run = runs[ranks]
        assert run["plan"] == one["plan"]
        for step in range(STEPS):
            assert step_documents(tmp_path / f"spy-{ranks}", step) == step_documents(tmp_path / "spy-1", step), step
        for step in range(3):
            mine, ref = (torch.load(tmp_path / f"spy-{r}" / f"gradient-{step}.pt").double() for r in (ranks, 1))
            assert torch.nn.functional.cosine_similarity(mine, ref, dim=0) > 0.99999
            assert abs(mine.norm() / ref.norm() - 1) < 1e-4
        assert worst(one["losses"], run["losses"]) < 1e-5
        assert worst([one["eval_loss_after"]], [run["eval_loss_after"]]) < 1e-6
        assert_same_weights(tmp_path / "1", tmp_path / str(ranks))

    for ranks in (2, 4) if packing else (2,):
        again = tmp_path / f"again-{ranks}"
        shutil.copytree(tmp_path / "1", again)
        for later in (14, STEPS):
            shutil.rmtree(again / f"checkpoint-{later}")
        resumed = spied(ranks, [*arguments, "--training.resume_from_checkpoint", "true"], again, tmp_path)
        assert resumed["resumed_from"].endswith("checkpoint-7")
        assert worst(one["losses"][7:], resumed["losses"]) < 1e-5
        assert not list((tmp_path / f"spy-again-{ranks}").glob("step-6-*"))
        assert step_documents(tmp_path / f"spy-again-{ranks}", 7) == step_documents(tmp_path / "spy-1", 7)
        assert_same_weights(tmp_path / "1", again)


def assert_same_weights(one: Path, other: Path) -> None:
    """Final adapters, each tensor to 1e-5 of its norm (and of a typical weight where it is nearly zero)."""
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= 1e-5 * max(float(tensor.norm()), 1.0), name


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_evaluation_does_not_depend_on_ranks_or_batch(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """11 held-out rows, on one rank and on two, in batches of 1, 3 and 8: the same number to 1e-6."""
    tiny.make_rows(tmp_path / "train.jsonl", 8)
    tiny.make_rows(tmp_path / "eval.jsonl", 11, seed=1)
    found = []
    for how, size in (("python", 1), ("python", 8), ("cpu_2.yaml", 3)):
        arguments = [
            *("--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "train.jsonl")),
            *("--data.eval_file", str(tmp_path / "eval.jsonl"), "--training.max_steps", "1"),
            *("--training.global_batch_size", "2", "--training.per_device_eval_batch_size", str(size)),
            *("--logging.generate_samples", "0"),
            *(["--data.packing", "--data.max_length", "128", "--data.pack_length", "160"] if packing else []),
        ]
        found.append(launch.train(how, arguments, out=tmp_path / f"{how}-{size}", cache=tmp_path)["eval_loss_before"])
    assert worst([found[0]] * 2, found[1:]) < 1e-6


def test_a_rank_with_other_data_refuses_to_start(tiny_model: Path, tmp_path: Path) -> None:
    """Each rank reads a file of its own name, as two machines with different copies would."""
    for rank in (0, 1):
        tiny.make_rows(tmp_path / f"rank-{rank}.jsonl", 20, seed=rank)
    script = tmp_path / "own_data.py"
    script.write_text(
        "import os, sys\nfrom finetune import train\n"
        "place = sys.argv.index('--data.train_file') + 1\n"
        "sys.argv[place] = sys.argv[place].replace('RANK', os.environ['RANK'])\nsys.exit(train.main())\n"
    )
    arguments = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "rank-RANK.jsonl")]
    done = launch.run(
        "cpu_2.yaml", [*arguments, "--training.output_dir", str(tmp_path / "out")], cache=tmp_path, script=script
    )
    assert done.returncode != 0
    assert "same data and versions on all ranks: rank 1 differs from rank 0 in the data's fingerprint" in done.stdout
    assert done.stdout.count("error: ") == 1
    assert not (tmp_path / "out").exists()


def test_four_ranks_tokenise_each_row_once(tiny_model: Path, tmp_path: Path) -> None:
    tiny.make_rows(tmp_path / "train.jsonl", 40)
    script = tmp_path / "counting.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom finetune import train\n"
        "from finetune.data import template\n"
        "encode = template.Encoder.encode_batch\n"
        "def counted(self, rows):\n"
        "    with open(Path(os.environ['COUNT']), 'a') as file:\n"
        "        file.write(f'{len(rows)}\\n')\n"
        "    return encode(self, rows)\n"
        "template.Encoder.encode_batch = counted\nsys.exit(train.main())\n"
    )
    count = tmp_path / "count.txt"
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", str(script)]
    arguments = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "train.jsonl")]
    arguments += ["--training.max_steps", "1", "--training.output_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [*how, *arguments],
        capture_output=True,
        text=True,
        env=launch.environment(tmp_path, COUNT=str(count)),
        timeout=launch.TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sum(map(int, count.read_text().split())) == 40
