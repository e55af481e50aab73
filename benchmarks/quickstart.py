"""Write docs/quickstart.md: a session on a CPU, from `init` to the exported model, with what each command printed.

    pip install -e '.[gguf]' && git clone https://github.com/ggml-org/llama.cpp
    python -m benchmarks.quickstart --llama-cpp llama.cpp

The rows are the demo's, and the model is the demo's with a SentencePiece tokenizer, so that the transcript needs no
download: llama.cpp's converter takes SentencePiece files as they are, and knows other tokenizers only by name. About 4
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from finetune.engine import demo

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"
MOST_LINES = 40  # of one command's output
SETTINGS = "--training.max_steps 260 --training.learning_rate 2e-3 --training.global_batch_size 64"
INIT = "finetune init my.yaml --model my-model --data rows.jsonl --method full --output-dir outputs/my-model"
LLAMA_CPP = "llama.cpp"  # in the working folder
TURN_START = "<|im_start|>"  # of the demo's chat template
INTRODUCTION = """# Quickstart

A session on a CPU, as `python -m benchmarks.quickstart` ran it: write a configuration, train, talk to the result,
export it, load it without this project, convert it for llama.cpp. `my-model` is a small model with random weights, and
`rows.jsonl` the demo's task; with your own, such as Qwen/Qwen3.5-2B, google/gemma-4-E2B-it or LiquidAI/LFM2-1.2B, the
commands are the same. It uses full fine-tuning, because an adapter on random weights learns nothing.

The last two sections need llama.cpp's source in `llama.cpp` and `pip install 'finetune-multigpu[gguf]'`.
"""
RELOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("exported")
tokenizer = AutoTokenizer.from_pretrained("exported")
for prompt in open("prompts.txt").read().splitlines():
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True))
"""
ASK_LLAMA = """\
import xllamacpp  # llama.cpp as a wheel

parameters = xllamacpp.CommonParams()
parameters.model.path = "exported-gguf/model-f16.gguf"
server = xllamacpp.Server(parameters)
for prompt in open("prompts.txt").read().splitlines():
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0.0}
    print(server.handle_chat_completions(chat)["choices"][0]["message"]["content"])
"""
PROGRAMS = {"reload.py": RELOAD, "ask_llama.py": ASK_LLAMA}
GGUF = f"finetune export outputs/my-model --to gguf --llama-cpp {LLAMA_CPP} --out exported-gguf"
SECTIONS = (
    ("Write a configuration", INIT),
    ("Train", f"accelerate launch -m finetune.train --config my.yaml {SETTINGS}"),
    ("Talk to the result", "finetune chat outputs/my-model --prompts prompts.txt --json answers.json"),
    ("Export", "finetune export outputs/my-model --to merged --out exported"),
    ("Load it without this project", "python reload.py"),
    ("GGUF", GGUF),
    ("Ask llama.cpp", "python ask_llama.py 2> log.txt"),
)
END = (
    "The answers of `finetune chat`, of plain transformers with the exported model and of llama.cpp with the GGUF file "
    "are equal.\n"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with convert_hf_to_gguf.py")
    options = parser.parse_args()
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        (work / LLAMA_CPP).symlink_to(options.llama_cpp.resolve())
        printed = {}
        for title, command in SECTIONS:
            printed[title] = run(command, work)
            program = PROGRAMS.get(command.split()[1])
            shown = [f"```python\n{program}```\n"] if program else []
            parts += [f"## {title}\n", *shown, transcript(command, printed[title], work)]
        chat = [one["answer"]["text"] for one in json.loads((work / "answers.json").read_text())["answers"]]
    others = [printed[title].strip().splitlines() for title in ("Load it without this project", "Ask llama.cpp")]
    if any(answers != chat for answers in others):
        raise SystemExit(f"chat answered {chat}, the exported model {others[0]}, the GGUF file {others[1]}")
    PAGE.write_text("\n".join([*parts, END]), encoding="utf-8")
    return 0


def prepare(work: Path) -> None:
    """The model, the rows, three held-out prompts, and the programs that load the exports."""
    paths = demo.materialize(work / "demo")
    shutil.copy(paths.train_file, work / "rows.jsonl")
    rows = [json.loads(line) for line in paths.train_file.read_text().splitlines()]
    write_model(work / "my-model", paths.model_dir, [one["content"] for row in rows for one in row["messages"]])
    rows = [json.loads(line) for line in paths.eval_file.read_text().splitlines()[:3]]
    prompts = [row["messages"][0]["content"] for row in rows]
    (work / "prompts.txt").write_text("\n".join(prompts) + "\n")
    for name, program in PROGRAMS.items():
        (work / name).write_text(program)


def write_model(folder: Path, source: Path, texts: list[str]) -> None:
    """The demo's model with random weights, and a SentencePiece tokenizer trained on `texts`."""
    import sentencepiece
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer

    own = AutoTokenizer.from_pretrained(source)
    names = {"bos": own.bos_token, "eos": own.eos_token, "pad": own.pad_token, "unk": "<unk>"}
    pieces: dict[str, Any] = {f"{name}_piece": text for name, text in names.items()}
    pieces |= {f"{name}_id": place for place, name in enumerate(("unk", "bos", "eos", "pad"))}
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts, "system", "user", "assistant"]),
        model_writer=file,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,  # any text can be encoded
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        control_symbols=[TURN_START],
        minloglevel=2,
        **pieces,
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    tokenizer = LlamaTokenizer.from_pretrained(
        folder,
        additional_special_tokens=[TURN_START],
        add_prefix_space=False,
        model_max_length=256,
        **{f"{name}_token": text for name, text in names.items()},
    )
    tokenizer.chat_template = own.chat_template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig.from_pretrained(source)
    config.vocab_size = len(tokenizer)
    for name in ("bos", "eos", "pad"):
        setattr(config, f"{name}_token_id", pieces[f"{name}_id"])
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def run(command: str, work: Path) -> str:
    """What a command prints in the working folder, typed in a shell with the project's environment active. Ends this
    program if the command fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "FINETUNE_CACHE": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
    env |= {"COLUMNS": "110", "TQDM_DISABLE": "1"}
    # A program's answers are compared: what libraries log while it imports them is not one.
    errors = subprocess.PIPE if command.split()[1] in PROGRAMS else subprocess.STDOUT
    done = subprocess.run(command, shell=True, cwd=work, env=env, text=True, stdout=subprocess.PIPE, stderr=errors)
    if done.returncode != 0:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr or ''}")
    return done.stdout


def transcript(command: str, printed: str, work: Path) -> str:
    """The command and what it printed, as Markdown, without paths of this machine."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed).replace(f"{work}/", "").replace(str(work), ".")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"[{len(lines) - MOST_LINES} lines]", *lines[-half:]]
    return "\n".join(["```", f"$ {command}", *lines, "```", ""])


if __name__ == "__main__":
    sys.exit(main())
