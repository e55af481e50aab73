"""Scripts as users of Unsloth, TRL and QLoRA have them, with one line changed: the same losses on one rank and on two.

With FINETUNE_TESTS_TRAINER=trl they run unchanged.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.helpers import ROOT, launch, tiny, warm

STOCK = "from trl import SFTTrainer"
OURS = "from finetune import SFTTrainer"
ON_CPU = "from tests.conformance import trl_on_cpu; trl_on_cpu.give_kernel(); " + STOCK
WHOSE = os.environ.get("FINETUNE_TESTS_TRAINER", "finetune")
STEPS = 3
SCRIPTS = {
    "unsloth_docs.py": "--model {model} --data {data}/train.jsonl --max_steps 3 --use_cpu --batch_size {batch}",
    "trl_sft.py": (
        "--model_name_or_path {model} --dataset_name {data} --max_steps 3 --logging_steps 1 --report_to none --use_cpu "
        "true --bf16 false --eval_strategy steps --eval_steps 3 --use_peft true --lora_dropout 0 "
        "--gradient_accumulation_steps 2 --learning_rate 2e-4 --per_device_train_batch_size {batch}"
    ),
    "qlora_formatting.py": (
        "--model {model} --data {data}/instructions.jsonl --max_steps 3 --use_cpu --batch_size {batch}"
    ),
}
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of train.jsonl, test.jsonl, and the former as instructions."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "sets").mkdir()
    lines = tiny.make_rows(folder / "sets" / "train.jsonl", 24).read_text().splitlines()
    tiny.make_rows(folder / "sets" / "test.jsonl", 6, seed=1)
    with (folder / "instructions.jsonl").open("w") as file:
        for line in lines:
            user, assistant = json.loads(line)["messages"]
            row = {"instruction": user["content"], "output": assistant["content"]}
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unsloth_docs.py", marks=pytest.mark.unsloth),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in list(SCRIPTS)[1:]),
    ],
)
def test_one_changed_line(name: str, tiny_model: Path, data: Path, tmp_path: Path) -> None:
    stock = (ROOT / "tests" / "dropin" / name).read_text()
    assert stock.count(STOCK) == 1
    script = tmp_path / name
    script.write_text(stock.replace(STOCK, OURS if WHOSE == "finetune" else ON_CPU))
    losses = {ranks: run(script, ranks, tiny_model, data, tmp_path / f"{ranks}-ranks") for ranks in (1, 2)}
    assert len(losses[1]) == STEPS and all(math.isfinite(loss) for loss in losses[1])
    assert losses[2] == pytest.approx(losses[1], abs=2e-4)  # as Trainer rounds what it logs


def run(script: Path, ranks: int, model: Path, data: Path, out: Path) -> list[float]:
    """The logged losses of a run with a global batch of 4 rows."""
    folder = data / "sets" if script.name != "qlora_formatting.py" else data
    words = SCRIPTS[script.name].format(model=model, data=folder, batch=2 // ranks).split()
    backend = "unsloth" if "unsloth" in script.name else "transformers"
    env = launch.environment(out.parent, FINETUNE_BACKEND=backend)
    argv = [str(script), *words, "--output_dir", str(out)]
    server = warm.server(backend)
    done = server.run(argv, ranks=ranks, env=env, cwd=out.parent, timeout=launch.TIMEOUT, merged=True)
    assert done.returncode == 0, done.stdout[-4000:]
    state = json.loads((out / "trainer_state.json").read_text())
    assert (out / "adapter_model.safetensors").is_file()
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
