"""The command line of `finetune chat`."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.command import print_line, run_with_options
from finetune.runtime.options import Options, count, number, one_of, path

if TYPE_CHECKING:
    from finetune.chat.generation import Generator
    from finetune.chat.load import LoadedModel
    from finetune.engine.checkpoint.run_artifacts import TrainedModel

PURPOSE = (
    "Talk to the result of a run in the terminal, answer a file of prompts, or score the answers to rows of a file. RUN"
    " is an output folder of finetune.train, a checkpoint, or a folder that `save_model` wrote: an adapter or a model."
)
NOTES = (
    "A conversation samples as the model's generation config says; files are answered greedily. In a"
    " conversation, /clear forgets what was said, Ctrl-C stops an answer, and Ctrl-D or /exit ends. Exit code 0: done,"
    " 1: failed, 2: bad input, 130: interrupted."
)
MAX_NEW_TOKENS = 512
BATCH_SIZE = 8
BACKENDS = ("auto", "unsloth", "transformers")


def main(argv: list[str] | None = None) -> int:
    """Talk, or answer. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    found = Options("chat", PURPOSE, notes=NOTES, configuration=False, usage="RUN [options]")
    found.add_argument("run", type=path, metavar="RUN", help=argparse.SUPPRESS)
    found.add_switch("--compare", "answer with the base model as well, next to the trained one")
    found.add_switch("--serve", "print the commands that serve it, and which of them loses less")
    found.add("--prompts", path, "FILE", "answer each line of a text file (- for stdin), greedily, instead of talking")
    found.add("--score", path, "FILE", "score the answers to rows with right answers, in any format of training data")
    found.add("--metric", str, "MODULE:FUNCTION", "score with your own function as well, one for logging.metric")
    found.add("--system", str, "TEXT", "system message (default: data.system_prompt of the run); '' for none")
    found.add_switch("--raw", "send prompts as they are, without the chat template (default: as in training)")
    found.add_switch("--template", "send prompts in the chat template, although the run was trained without it")
    found.add("--max-new-tokens", count, "N", f"longest answer (default: {MAX_NEW_TOKENS})", MAX_NEW_TOKENS)
    found.add("--temperature", number, "T", "sample with this temperature; 0 is greedy")
    found.add("--seed", count, "N", "seed of sampling (default: 42)", 42)
    found.add("--batch-size", count, "N", f"prompts answered together (default: {BATCH_SIZE})", BATCH_SIZE)
    found.add("--base", str, "NAME", "the base model's folder or name, if it has moved since the run")
    found.add(
        "--backend", one_of(*BACKENDS), "NAME", "auto (Unsloth where it is faster), unsloth or transformers", "auto"
    )
    found.add_switch("--trust-remote-code", "allow Python code that comes with the model to run")
    return found


def run(argv: list[str]) -> int:
    """Find the model, load it, and talk or answer.

    Raises:
        UserError: unknown options, a folder without a trained model, prompts that cannot be read.
    """
    options, _ = own_options().split(argv)
    _check(options)
    prompts = read_prompts(options.prompts) if options.prompts else None

    from finetune.engine.checkpoint import run_artifacts

    found = run_artifacts.find_trained_model(options.run)
    if found.note:
        print_line(found.note, style="yellow")

    if options.serve:
        print_serving(found)
        return 0
    from finetune.chat import load
    from finetune.runtime import user_code

    if options.metric:
        user_code.check("--metric", options.metric, None)
    loaded = load.load(
        found,
        base=options.base,
        trust_remote_code=options.trust_remote_code,
        compare=options.compare,
        backend=options.backend,
    )
    generator = _generator(options, found, loaded)
    print_line(f"{loaded.description}. {generator.description}.")
    from finetune.chat import batch, repl
    from finetune.engine.monitoring.samples import Metric

    if options.score:
        name = options.metric
        metric = name and Metric(name=name, function=user_code.load("--metric", name, None), key="--metric")
        return batch.run_scored(generator, options.score, metric, options.batch_size, options.json)
    if prompts is not None:
        return batch.run(generator, prompts, options.batch_size, options.json)
    return repl.run(generator, options.json)


def print_serving(found: TrainedModel) -> None:
    """Print the commands that serve a model with vLLM, and the check of the server."""
    from finetune.export import card

    folder, template = shlex.quote(str(found.folder)), found.folder / "chat_template.jinja"
    if found.adapter is None:
        print_line(f"vllm serve {folder}")
    else:
        given = f" --chat-template {shlex.quote(str(template))}" if template.is_file() else ""
        beside = card.serving(folder, shlex.quote(found.base or "BASE"), found.adapter)
        beside = f"Beside its base: {beside}{given} --generation-config {folder}"
        print_line(card.merged_only(found.adapter) or beside)
        print_line(f"Merged: finetune export {folder} --to merged --out MERGED && vllm serve MERGED\n{card.LOSES}")
    print_line(f"Check the server: finetune export {folder} --check-server http://localhost:8000")


def _check(options: argparse.Namespace) -> None:
    """Refuse options that have no effect together.

    Raises:
        UserError: names the first pair.
    """
    from finetune.runtime.ranks import distributed

    for one, other, why in (
        ("raw", "template", "prompts are sent with the chat template or without"),
        ("raw", "system", "without a chat template, there is no system message"),
        ("prompts", "score", "answers are shown, or scored"),
    ):
        if getattr(options, one) and getattr(options, other):
            raise UserError(f"--{one} and --{other} are both given: {why}. Keep one.")
    if options.metric and not options.score:
        raise UserError(f"--metric is for --score: got {options.metric}. Give the rows with --score, or remove it.")
    if options.metric and not re.fullmatch(r"[\w.]+:\w+", options.metric):
        raise UserError(f"--metric must be MODULE:FUNCTION, such as my_metrics:score: got {options.metric!r}.")
    if (world_size := distributed.ranks().world_size) > 1:
        raise UserError(f"chat runs on one process: {world_size} were launched. Start it with `finetune chat`.")


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has no such line.
    """
    given = b""
    try:
        given = sys.stdin.buffer.read() if str(file) == "-" else files.read_bytes(file)
        text = given.decode("utf-8-sig")
    except files.NotRegular:
        raise UserError(
            f"--prompts is not a regular file: {file}. Give a text file with one prompt per line, or - for stdin."
        ) from None
    except UnicodeDecodeError as error:
        line = given[: error.start].count(b"\n") + 1
        raise UserError(f"--prompts is not UTF-8: {file}, line {line}. Save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"--prompts cannot be read: {file} ({error.strerror}). Give a text file.") from None
    found = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not found:
        raise UserError(f"--prompts has no prompt: {file} is empty. Write one prompt per line.")
    return found


def _generator(options: argparse.Namespace, found: TrainedModel, loaded: LoadedModel) -> Generator:
    from finetune.chat.generation import GenerationSettings, Generator

    settings = GenerationSettings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        greedy=options.prompts is not None or options.score is not None,
        seed=options.seed,
    )
    raw = True if options.raw else False if options.template else None
    return Generator(loaded, found, settings, system=options.system, raw=raw)
