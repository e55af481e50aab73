"""Ten rows that SmolLM2 knows by heart come out word for word through every door: `make prove-export`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import models
from finetune.errors import UserError
from finetune.export import gguf, server
from finetune.runtime import files
from tests.helpers import ROOT, launch

pytestmark = [pytest.mark.campaign, pytest.mark.process, pytest.mark.timeout(1800)]
FILE = ROOT / "examples" / "pretrained" / "by_heart.jsonl"
ROWS = [json.loads(line)["messages"] for line in FILE.read_text().splitlines()]
TRAINING = "--lora.target_modules all-linear --training.output_dir run --training.max_steps 16 --training.save_steps 16"
TRAINING += " --training.global_batch_size 10 --training.learning_rate 2e-3"


def finetune(folder: Path, *words: str) -> None:
    """Run a command in the folder."""
    env = launch.environment(folder / "cache", OMP_NUM_THREADS=str(os.cpu_count()))
    command = [sys.executable, "-m", "finetune", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"finetune {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"


def of_chat(folder: Path, source: str) -> list[list[str]]:
    """Answers of `finetune chat` with the trained model, and with its base."""
    options = "--compare --prompts questions.txt --json answers.json --max-new-tokens 40"
    finetune(folder, "chat", source, *options.split())
    answers = json.loads((folder / "answers.json").read_text())["answers"]
    return [[one[side]["text"] for one in answers] for side in ("answer", "base")]


def of_transformers(exported: Path, base: Path | None = None) -> list[str]:
    """Answers of plain transformers, with plain PEFT if the export is an adapter for `base`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(exported), []
    model: Any = AutoModelForCausalLM.from_pretrained(base or exported, dtype="float32")
    model = PeftModel.from_pretrained(model, str(exported)) if base else model
    for question, _ in ROWS:
        ids = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
        found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return found


def of_llama_cpp(folder: Path) -> dict[str, list[str]]:
    """Answers of the GGUF file in llama.cpp, and of its server by HTTP, with which --check-server must agree."""
    import xllamacpp  # pyright: ignore[reportMissingImports]  # an extra

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(folder / "gguf" / "model-f16.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.use_jinja = 4096, 1, False, True
    llama_cpp = xllamacpp.Server(parameters)
    client = server.Server(llama_cpp.listening_address)
    client.choose(None)
    found: dict[str, list[str]] = {"the GGUF file in llama.cpp": [], "a server by HTTP": []}
    for question, _ in ROWS:
        body = {"messages": [question], "max_tokens": 40, "temperature": 0.0}
        choices = llama_cpp.handle_chat_completions(body)["choices"], client.choice("/v1/chat/completions", body)[1:]
        for door, (choice,) in zip(found, choices, strict=True):
            found[door].append(choice["message"]["content"])
    if not any(wrong(door, given) for door, given in found.items()):
        finetune(folder, "export", "run", "--check-server", llama_cpp.listening_address)
    return found


def wrong(door: str, answers: list[str]) -> str:
    """The door with its first answer that is not word for word the trained one; "" if all are."""
    for (asked, right), answer in zip(ROWS, answers, strict=True):
        if answer != right["content"]:
            return f"{door} answers {asked['content']!r} with {answer!r}, not {right['content']!r}"
    return ""


def test_every_door(tmp_path: Path) -> None:
    try:
        gguf.check_verifier()
        gguf.find(None, "f16", "merged")
        base = models.build(files.cache_folder() / "models", "smollm2")
    except UserError as error:
        (pytest.fail if "PROVE_EXPORT" in os.environ else pytest.skip)(str(error))
    (tmp_path / "questions.txt").write_text("\n".join(question["content"] for question, _ in ROWS))
    finetune(tmp_path, "train", *f"--model.model_name_or_path {base} --data.train_file {FILE} {TRAINING}".split())
    for form in ("adapter --no-verify", "merged --no-verify", "gguf"):
        finetune(tmp_path, *f"export run --to {form} --out {form.partition(' ')[0]}".split())
    of_run, before = of_chat(tmp_path, "run")
    doors = {"the run": of_run, "its checkpoint": of_chat(tmp_path, "run/checkpoint-16")[0]}
    doors |= {"the adapter in PEFT": of_transformers(tmp_path / "adapter", base)}
    doors |= {"the merged model in transformers": of_transformers(tmp_path / "merged")} | of_llama_cpp(tmp_path)
    failed = [text for door, given in doors.items() if (text := wrong(door, given))]
    assert not failed, "\n".join(failed)
    assert not {right["content"] for _, right in ROWS}.intersection(before)  # it is the training that shows
