"""Three scripts as users of Unsloth, TRL and QLoRA have them, with one changed import, on one GPU and on two.

    python -m benchmarks.drop_in_gpus --train train.jsonl --work DIR --out drop-in.jsonl [--shape llama-1.2b]

The scripts are those of tests/dropin, with a Llama of random weights. Compared by the measure of `finetune parity`: the
gradient of the first step, the gradient norm and the loss of every step, and the trained weights. One JSON line per
script. With --cpu, two gloo ranks. Exit code 1 if a script failed or its runs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.processes import DUMP
from finetune.parity.command import compare
from finetune.runtime import bootstrap

ROOT = Path(__file__).parent.parent
STOCK, OURS = "from trl import SFTTrainer", "from benchmarks.drop_in_rank import SFTTrainer"
ROWS, STEPS, LIMIT = 512, 8, 500


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of tests/dropin and how it is run, with a global batch of 8 rows in 2 accumulated micro-batches."""

    file: str
    arguments: str
    backend: str = "auto"  # FINETUNE_BACKEND
    changed: tuple[str, str] | None = None  # a text of the script and what stands there instead


UNSLOTH = "--model {model} --data {data}/sets/train.jsonl --max_steps {steps} --batch_size {batch}"
TRL = (
    "--model_name_or_path {model} --dataset_name {data}/sets --max_steps {steps} --logging_steps 1 "
    "--report_to none --dtype bfloat16 --use_peft true --lora_dropout 0 --gradient_accumulation_steps 2 "
    "--learning_rate 2e-4 --per_device_train_batch_size {batch}"
)
QLORA = "--model {model} --data {data}/instructions.jsonl --max_steps {steps} --batch_size {batch}"
SCRIPTS = {
    "unsloth": Script(file="unsloth_docs.py", arguments=UNSLOTH),
    "trl": Script(file="trl_sft.py", arguments=TRL),
    "qlora": Script(file="qlora_formatting.py", arguments=QLORA),
    "unsloth 4-bit": Script(
        file="unsloth_docs.py", arguments=UNSLOTH, changed=("load_in_4bit=False", "load_in_4bit=True")
    ),
    "trl packed": Script(file="trl_sft.py", arguments=f"{TRL} --packing true --max_length 1024"),
    "trl plain": Script(file="trl_sft.py", arguments=TRL, backend="transformers"),
    "qlora plain": Script(file="qlora_formatting.py", arguments=QLORA, backend="transformers"),
}
ON_CPU = {"trl_sft.py": "--use_cpu true --bf16 false --dtype float32"}


def main() -> int:
    """Run the scripts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="JSON lines with question and answer, as GSM8K")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--out", type=Path, required=True, help="file to append the JSON lines to")
    parser.add_argument("--shape", default="llama-1.2b", choices=sorted(models.SHAPES))
    parser.add_argument("--only", default="", help="the names of the scripts to run, separated by commas; all if empty")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one", action="store_true", help="one GPU only: the scripts train, and nothing is compared")
    given = parser.parse_args()
    model = models.build(given.work / "model", given.shape, given.train)
    write_rows(given.train, given.work)
    equal = []
    for name in SCRIPTS:
        if not given.only or name in given.only.split(","):
            result = one_script(name, model, given) | {"shape": given.shape, "versions": bootstrap.versions()}
            equal.append(given.one and "error" not in result or result["equal"])
            with given.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0 if equal and all(equal) else 1


def write_rows(train: Path, work: Path) -> None:
    """The rows as the scripts read them: conversations, and instructions with outputs."""
    (work / "sets").mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()[:ROWS]]
    with (work / "sets" / "train.jsonl").open("w") as talks, (work / "instructions.jsonl").open("w") as instructions:
        for row in rows:
            talk = [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            talks.write(json.dumps({"messages": talk}) + "\n")
            instructions.write(json.dumps({"instruction": row["question"], "output": row["answer"]}) + "\n")


def one_script(name: str, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Its runs on one and on two ranks, and how far they are apart."""
    script = SCRIPTS[name]
    text = (ROOT / "tests" / "dropin" / script.file).read_text()
    for old, new in ((STOCK, OURS), *([script.changed] if script.changed else [])):
        if text.count(old) != 1:
            raise ValueError(f"{script.file} must have the text `{old}` once")
        text = text.replace(old, new)
    slug = name.replace(" ", "-")
    file = given.work / f"script-{slug}.py"  # not the name of a package that it imports
    file.write_text(text)
    dumps, seconds = [], {}
    for ranks in (1,) if given.one else (1, 2):
        dump = given.work / f"{slug}-{ranks}"
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir()
        began = time.perf_counter()
        error = run(file, script, ranks, model, dump, given)
        seconds[ranks] = time.perf_counter() - began
        if error is not None:
            return {"script": name, "equal": False, "ranks": ranks, "error": error}
        record = json.loads((dump / "out" / "run.json").read_text())
        (dump / "run.json").write_text(json.dumps(record | {"eval_loss_after": None}))
        dumps.append(dump)
    record = json.loads((dumps[-1] / "run.json").read_text())
    found = asdict(compare(*dumps, 2)) if len(dumps) > 1 else {}
    return {
        "script": name,
        "equal": not found["failures"] if found else None,
        "backend": record["backend"],
        "device": record["hardware"],
        "losses": record["losses"],
        "seconds": seconds,
        **{key: found.get(key) for key in ("ratio", "cosine", "norm", "loss", "weights", "failures")},
    }


def run(file: Path, script: Script, ranks: int, model: Path, dump: Path, given: argparse.Namespace) -> str | None:
    """Run the script with torchrun. None, or the end of its output if it failed."""
    words = script.arguments.format(model=model, data=given.work, steps=STEPS, batch=4 // ranks)
    words += f" {ON_CPU.get(script.file, '--use_cpu')}" if given.cpu else ""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*launcher, str(file), *words.split(), "--output_dir", str(dump / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {DUMP: str(dump), "PYTHONPATH": path, "FINETUNE_BACKEND": script.backend},
        timeout=LIMIT,
        check=False,
    )
    return None if done.returncode == 0 else done.stdout[-3000:]


if __name__ == "__main__":
    raise SystemExit(main())
