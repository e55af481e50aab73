"""Write docs/quickstart.md: a session on a CPU, from `init` to the exported model, with what each command printed.

    python -m benchmarks.quickstart [--llama-cpp DIR]

The model and the rows are the demo's, so that the transcript needs no download. About 3 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from finetune.engine import demo

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"
MOST_LINES = 40  # of one command's output
SETTINGS = "--training.max_steps 260 --training.learning_rate 2e-3 --training.global_batch_size 64"
INIT = "finetune init my.yaml --model my-model --data rows.jsonl --method full --output-dir outputs/my-model"
INTRODUCTION = """# Quickstart

A session on a CPU, as `python -m benchmarks.quickstart` ran it: write a configuration, train, talk to the result,
export it, load it without this project. `my-model` is the demo's small model with random weights, and `rows.jsonl` the
demo's task; with your own, the commands are the same. It is trained in full, because an adapter on random weights
learns nothing.
"""
RELOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("exported")
tokenizer = AutoTokenizer.from_pretrained("exported")
for prompt in open("prompts.txt").read().splitlines():
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1]:]
    print(tokenizer.decode(answer, skip_special_tokens=True))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", help="folder of llama.cpp with convert_hf_to_gguf.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prompts = prepare(work)
        gguf = f" --llama-cpp {options.llama_cpp}" if options.llama_cpp else ""
        sections = [
            ("Write a configuration", INIT),
            ("Train", f"accelerate launch -m finetune.train --config my.yaml {SETTINGS}"),
            ("Talk to the result", "finetune chat outputs/my-model --prompts prompts.txt --json answers.json"),
            ("Export", "finetune export outputs/my-model --to merged --out exported"),
            ("Load it without this project", "python reload.py"),
            ("GGUF", f"finetune export outputs/my-model --to gguf --out exported-gguf{gguf}"),
        ]
        parts = [INTRODUCTION]
        for title, command in sections:
            parts += [f"## {title}\n", transcript(command, work, fails=title == "GGUF" and not gguf)]
        answers = [one["answer"]["text"] for one in json.loads((work / "answers.json").read_text())["answers"]]
        loaded = run("python reload.py", work).stdout.strip().splitlines()
        if answers != loaded:
            raise SystemExit(f"chat answered {answers}, the exported model {loaded}, to {prompts}")
        parts += ["The answers of `finetune chat` and of plain transformers with the exported model are equal.\n"]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


def prepare(work: Path) -> list[str]:
    """The model, the rows, three held-out prompts, and the program that loads the export. Returns the prompts."""
    paths = demo.materialize(work / "demo")
    shutil.copytree(paths.model_dir, work / "my-model")
    shutil.copy(paths.train_file, work / "rows.jsonl")
    rows = [json.loads(line) for line in paths.eval_file.read_text().splitlines()[:3]]
    prompts = [row["messages"][0]["content"] for row in rows]
    (work / "prompts.txt").write_text("\n".join(prompts) + "\n")
    (work / "reload.py").write_text(RELOAD)
    return prompts


def run(command: str, work: Path) -> subprocess.CompletedProcess[str]:
    """One command in the working folder, as typed in a shell with the project's environment active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "FINETUNE_CACHE": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
    env |= {"COLUMNS": "110", "TQDM_DISABLE": "1"}
    return subprocess.run(
        command, shell=True, cwd=work, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def transcript(command: str, work: Path, *, fails: bool = False) -> str:
    """The command and what it printed, as Markdown. Ends this program if it does not end as expected."""
    done = run(command, work)
    if (done.returncode != 0) is not fails:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{work}/", "").replace(str(work), ".")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"[{len(lines) - MOST_LINES} lines]", *lines[-half:]]
    return "\n".join(["```", f"$ {command}", *lines, "```", ""])


if __name__ == "__main__":
    sys.exit(main())
