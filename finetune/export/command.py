"""The command line of `finetune export`: the story of an export, top to bottom."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import RunError, UserError
from finetune.export import card, gguf, server, verify
from finetune.export import source as sources
from finetune.export.adapter import FILE as ADAPTER_WEIGHTS
from finetune.export.source import Source
from finetune.redact import redact_tree
from finetune.runtime import bootstrap, files
from finetune.runtime.command import DONE, print_line, run_with_options
from finetune.runtime.options import Options, one_of, path
from finetune.runtime.types import JsonObject, Tokenizer

if TYPE_CHECKING:
    from finetune.export.merged import Merge

PURPOSE = (
    "Export a finished run or one of its checkpoints as an adapter, a merged 16-bit model or a GGUF file. Every export"
    " is loaded again by plain transformers and compared with the run before it gets its name."
)
NOTES = (
    "Exit code 0: exported, 1: failed, or the export does not match the run, 2: bad input. Nothing is left then. Of "
    "--check-server, 0: it serves what was trained, 1: no reply that can be judged, 3: it serves the base model, 4: "
    "another chat template, 5: other end tokens, 6: another model, 7: trained and base model are too close to tell."
)
KEY = "FINETUNE_SERVER_KEY"  # environment variable: the key that a server asks for
FORMS = ("adapter", "merged", "gguf")
DTYPES = ("bfloat16", "float32")
MANIFEST = "export.json"  # what the folder holds, and of which run
SPARE_BYTES = 64 * 2**20  # for the tokenizer and the card


def main(argv: list[str] | None = None) -> int:
    """Export a run. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    usage = "RUN|CHECKPOINT --to FORM --out DIR | --check-server URL"
    found = Options("export", PURPOSE, notes=NOTES, configuration=False, usage=usage)
    found.add_argument("source", type=path, metavar="RUN|CHECKPOINT", help="output folder of a run, or a checkpoint")
    found.add("--to", one_of(*FORMS), "FORM", "adapter, merged or gguf")
    found.add("--out", path, "DIR", "new folder for the export; `hf upload USER/NAME DIR --private` publishes it")
    found.add("--base", str, "DIR", "the base model's folder or name, if it is not where the run found it")
    found.add("--dtype", one_of(*DTYPES), "DTYPE", "of a merged model: bfloat16 or float32 (default: the base model's)")
    found.add("--shard-size", _gigabytes, "GB", "largest file of a merged model, in GB (default 5)")
    found.add("--gguf-type", str.lower, "TYPE", "f16 (default), bf16, f32, or a type of llama-quantize such as q4_k_m")
    found.add("--llama-cpp", path, "DIR", "folder with llama.cpp's convert_hf_to_gguf.py")
    found.add_switch("--overwrite", "replace an earlier export in --out")
    found.add_switch("--no-verify", "do not load and compare the export")
    found.add_switch("--trust-remote-code", "allow Python code that comes with the model to run in the check")
    found.add("--check-server", str, "URL", "export nothing: ask the server at this address whether it serves this")
    found.add("--served-name", str, "NAME", "the model's or adapter's name there (default: the only one)")
    return found


def run(argv: list[str]) -> int:
    """Find, check, write and verify.

    Raises:
        UserError, RunError: with what is wrong and what to do; nothing is left in --out.
    """
    options, _ = own_options().split(argv)
    check_options(options)
    bootstrap.quiet_libraries("error")
    found = sources.find(options.source, options.base)
    if options.check_server:
        return check_server(options, found)
    if options.to == "adapter" and found.adapter is None:
        raise UserError(f"{found.given} has no adapter: all weights were trained. Use --to merged.")
    for note in found.notes:
        print_line(f"note: {note}", style="yellow")
    if found.raw:
        print_line("note: the run was trained without the chat template. Send prompts as they are, not as messages.")
    result = export(options, found, options.to)
    if options.json:
        files.write_json(options.json, redact_tree(result))
    return DONE


def check_options(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is read.

    Raises:
        UserError: an option is missing, does not fit the others, or --out exists.
    """
    if options.check_server:
        for flag in ("to", "out", "dtype", "shard-size", "gguf-type", "llama-cpp", "overwrite", "no-verify"):
            if getattr(options, flag.replace("-", "_")):
                raise UserError(f"--{flag} and --check-server are both given: a check exports nothing. Keep one.")
        return
    if options.served_name:
        raise UserError("--served-name is for --check-server. Give that as well, or remove it.")
    for flag in ("to", "out"):
        if getattr(options, flag) is None:
            raise UserError(f"export needs --{flag}. See finetune export --help.")
    files.check_name(options.out, "--out")
    for flag, form in {"gguf-type": "gguf", "llama-cpp": "gguf", "dtype": "merged", "shard-size": "merged"}.items():
        if getattr(options, flag.replace("-", "_")) and options.to != form:
            instead = "--gguf-type" if options.to == "gguf" and flag == "dtype" else f"--to {form}"
            what = {"gguf": "GGUF files", "merged": "merged models"}[form]
            raise UserError(f"--{flag} is for {what}: got --to {options.to}. Remove it, or use {instead}.")
    if options.out.is_symlink() or options.out.exists():
        earlier = (options.out / MANIFEST).is_file()
        empty = options.out.is_dir() and not any(options.out.iterdir())
        if not (earlier and options.overwrite) and not empty:
            remedy = "Give --overwrite to replace it" if earlier else "Give a new folder"
            raise UserError(f"--out {options.out} exists already. {remedy}.")


# --- writing ----------------------------------------------------------------------------------------------------------


def export(options: argparse.Namespace, found: Source, form: str) -> JsonObject:
    """Write and verify one export; returns its result. --out appears only when both succeeded."""
    out = Path(options.out)
    kind = options.gguf_type or "f16"
    tools = gguf.find(options.llama_cpp, kind, f"{out}-merged") if form == "gguf" else None
    if tools is not None and not options.no_verify:
        gguf.check_verifier()
    if tools is not None:
        gguf.check_architecture(tools, files.read_json(found.base / "config.json").get("architectures") or ())
    # The converter rounds to nearest: it gets float32, except for bfloat16, which is rounded here.
    dtype = options.dtype or {"gguf": "bfloat16" if kind == "bf16" else "float32"}.get(form)
    merge = None if form == "adapter" else _merge(found, dtype)
    needed = merge.bytes if merge is not None else (found.folder / ADAPTER_WEIGHTS).stat().st_size
    finding: JsonObject | None = None
    from finetune.engine import multimodal
    from finetune.engine.checkpoint import output_folder
    from finetune.engine.preflight import model_files

    room = needed * (1 if tools is None else 2) + SPARE_BYTES
    near = files.nearest_folder(out.absolute().parent, "--out")
    if tools is not None and merge is not None and (beside := multimodal.towers(merge.model)):
        print_line(
            f"note: the GGUF file has the text model alone, without {', '.join(beside)}: llama.cpp's converter writes "
            "those into a file of their own (--mmproj).",
            style="yellow",
        )
    output_folder.check_space(out, room, "the export", option="--out")
    with output_folder.explain_full_disk(near, "the export"), files.staging(out) as folder:
        model = folder if tools is None else folder / ".merged"
        model.mkdir(exist_ok=True)
        tokenizer = write_tokenizer(found, model)
        note_stop_text(found, tokenizer)
        if merge is None:
            write_adapter(found, model)
        else:
            size = f"{merge.bytes / 1e9:,.1f} GB" if merge.bytes >= 1e9 else f"{merge.bytes / 1e6:,.1f} MB"
            print_line(f"Writing {size}, {merge.changed} of {len(merge.steps)} tensors merged")
            merge.write(model, options.shard_size or 5_000_000_000)
            if merge.update_kept is not None:
                print_line(
                    f"Rounding kept {merge.update_kept:.1%} of the adapter's update; --dtype float32 keeps all of it."
                )
            if options.trust_remote_code:
                for file in found.base.glob("*.py"):
                    shutil.copyfile(file, model / file.name)
        write_generation_config(found, model, tokenizer)
        if not options.no_verify:
            finding = verify_export(options, found, model, tokenizer)
        kept = merge.update_kept if merge is not None else None
        result: JsonObject = {"dtype": options.dtype, "update_kept": kept, "verification": finding}
        if tools is not None:
            named = model_files.model_folder(found.name, found.model.get("revision"))
            gguf.complete_tokenizer(model, (found.base, *([named] if named else [])), tokenizer)
            result |= write_gguf(options, found, folder, model, tools, tokenizer)
            finding = result.get("gguf_verification") or finding
        card.write(folder, found, form, verify.sentence(finding) if finding else None)
        about = describe(found, form, folder)
        files.write_json(folder / MANIFEST, redact_tree(card.shortened(about) | result))  # answers are not paths
    print_line(f"Verified: {verify.sentence(finding)}" if finding else "Not verified: --no-verify was given.")
    print_line(f"Exported {found.given} to {out}")
    if form == "merged":
        print_line(f"Serve it: vllm serve {shlex.quote(str(out))}")
    return about | result | {"out": str(out)}


def _merge(found: Source, dtype: str | None) -> Merge:
    import torch

    from finetune.export.adapter import Adapter
    from finetune.export.merged import Merge

    adapter = Adapter(found.folder, found.adapter) if found.adapter is not None else None
    return Merge(found.base, adapter, getattr(torch, dtype) if dtype else None)


def write_tokenizer(found: Source, folder: Path) -> Tokenizer:
    """Copy the tokenizer, with the chat template that the run was trained with, and load it.

    Raises:
        UserError: it cannot be loaded, or the template is missing.
    """
    from transformers import AutoTokenizer

    from finetune.data.templates.chat_templates import read_template
    from finetune.engine.checkpoint import tokenizer_files

    tokenizer_files.copy(found.folder, folder)
    name = found.model.get("chat_template")
    if name not in (None, "none"):
        files.write_text(folder / "chat_template.jinja", str(read_template(str(name))))
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The tokenizer in {found.folder} cannot be loaded: {str(error).splitlines()[0][:200]}. Export another "
            "checkpoint."
        ) from None


def write_adapter(found: Source, folder: Path) -> None:
    """Copy the adapter as it is."""
    shutil.copyfile(found.folder / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    if why := card.merged_only(found.adapter or {}):
        print_line(f"note: {why}", style="yellow")
    if card.shortened(found.name) != found.name:
        print_line(
            "note: the base model is a local folder. Before you publish this adapter, set base_model_name_or_path in "
            "its adapter_config.json to the model's name on the Hub, or use --to merged.",
            style="yellow",
        )
    files.write_json(folder / "adapter_config.json", _adapter_config(found) | {"base_model_name_or_path": found.name})


def _adapter_config(found: Source) -> JsonObject:
    """The adapter's configuration as PEFT loads it without this project."""
    from finetune.export.adapter import loadable_config

    return loadable_config(found.adapter or {}, files.read_json(found.base / "config.json"))


def write_generation_config(found: Source, folder: Path, tokenizer: Tokenizer) -> None:
    """generation_config.json of the base, which stops where the trained turns ended as well."""
    from finetune.engine.model import generation_config

    file = found.base / generation_config.FILE
    content = files.read_json(file) if file.is_file() else {}
    config = files.read_json(found.base / "config.json")
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        content.setdefault(name, config.get(name))
    content = generation_config.add_end_tokens(content, stop_tokens(found, tokenizer))
    files.write_json(folder / generation_config.FILE, {k: v for k, v in content.items() if v is not None})


def stop_tokens(found: Source, tokenizer: Tokenizer) -> list[int]:
    """The tokens at which the run's model was trained to stop: those that the run recorded, the tokenizer's, and the
    one that ends a turn in the chat template."""
    from finetune.engine.model import generation_config

    turn = None if found.raw else generation_config.end_of_turn_token(tokenizer)
    ends = [*generation_config.end_tokens_in_file(found.folder), tokenizer.eos_token_id, turn]
    return [one for one in dict.fromkeys(ends) if one is not None]


def end_of_turn(found: Source, tokenizer: Tokenizer) -> int | None:
    """The token that ended the trained turns, for a file that can name one next to EOS; None if EOS or unknown."""
    from finetune.engine.model import generation_config

    if not found.raw and (turn := generation_config.end_of_turn_token(tokenizer)) is not None:
        return turn
    config = files.read_json(found.base / "config.json")
    of_base = [] if found.adapter is None else generation_config.end_tokens_in_file(found.base)
    known = {tokenizer.eos_token_id, *generation_config.to_token_ids(config.get("eos_token_id")), *of_base}
    return next((one for one in reversed(generation_config.end_tokens_in_file(found.folder)) if one not in known), None)


def note_stop_text(found: Source, tokenizer: Tokenizer) -> None:
    """Print the text that ends a turn if no token does: no file of an export can say it."""
    from finetune.engine.model import generation_config

    ending = generation_config.end_of_turn_text(tokenizer)
    if (
        ending is None
        or found.model.get("chat_template") == "none"
        or generation_config.first_added_token(tokenizer, ending) is not None
    ):
        return
    print_line(
        f"note: the chat template ends a turn with the text {ending!r}, which is not a token. Give it to your engine as"
        " a stop text (`stop` in a request, `stop_strings` in transformers).",
        style="yellow",
    )


def write_gguf(
    options: argparse.Namespace, found: Source, folder: Path, model: Path, tools: gguf.Tools, tokenizer: Tokenizer
) -> JsonObject:
    """Convert the merged model, compare the file with it, quantize if asked for, and remove the merged model."""
    finding, kind = None, options.gguf_type or "f16"
    exact = folder / f"model-{gguf.exact_kind(kind)}.gguf"
    gguf.convert(tools, model, exact, kind)
    if (token := end_of_turn(found, tokenizer)) not in (None, tokenizer.eos_token_id):
        gguf.name_end_of_turn(tools, exact, token)
    if not options.no_verify:
        finding = verify.run({"exported": model, "gguf": exact, "prompts": verify.prompts(tokenizer, raw=found.raw)})
        raise_if_failed(finding, options)
    if kind not in gguf.EXACT:
        gguf.quantize(tools, exact, folder / f"model-{kind}.gguf", kind)
        files.remove(exact)
    files.remove(model)
    return {"gguf_type": kind, "gguf_verification": finding}


def verify_export(options: argparse.Namespace, found: Source, folder: Path, tokenizer: Tokenizer) -> JsonObject:
    """The finding of the check.

    Raises:
        RunError: the export does not match the run.
    """
    asked = verify.prompts(tokenizer, raw=found.raw)
    job: JsonObject = {"exported": folder, "tokenizer": found.folder, "prompts": asked}
    job |= _reference(found) | {"trust_remote_code": options.trust_remote_code}
    job |= {"new_template": found.model.get("chat_template") not in (None, "none")}
    split, rows = verify.rows(found.record)
    of = {"": "its own answers to three questions", "train": "training rows"}.get(split, "held-out rows")
    finding = verify.run(job | {"rows": rows}) | {"rows": of}
    raise_if_failed(finding, options)
    return finding


def _reference(found: Source) -> JsonObject:
    """What the check compares with, as a part of its job."""
    if found.adapter is None:
        return {"model": found.folder}
    return {"base": found.base, "adapter": found.folder, "adapter_config": _adapter_config(found)}


def check_server(options: argparse.Namespace, found: Source) -> int:
    """Print whether a server serves this. Returns the exit code.

    Raises:
        RunError: the server does not answer, or without log-probabilities.
    """
    from finetune.engine.model import generation_config
    from finetune.engine.preflight import model_files

    asked = server.Server(options.check_server, os.environ.get(KEY))
    asked.choose(options.served_name)
    with tempfile.TemporaryDirectory(prefix="finetune-check-") as folder:
        tokenizer = write_tokenizer(found, Path(folder))
    section = found.record.get("config", {}).get("data")
    kwargs = section.get("chat_template_kwargs") if isinstance(section, dict) else None
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    texts = verify.prompts(tokenizer, raw=found.raw, kwargs={"strftime_now": date.today().isoformat()} | kwargs)
    templated = not found.raw and tokenizer.chat_template is not None
    chats = []
    for question, text in zip(verify.QUESTIONS, texts, strict=True):
        request = {"messages": [{"role": "user", "content": question}]} if templated else {}
        begins = bool(tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        ids = list(tokenizer(text, add_special_tokens=not begins)["input_ids"])
        chats.append((request | ({"chat_template_kwargs": kwargs} if templated and kwargs else {}), ids))
    rows = verify.rows(found.record)[1]
    print_line(f"Asking {asked.url} for the model {asked.shown(asked.name)}")
    answers = server.ask_all(asked, tokenizer, rows[:: max(len(rows) // server.ROWS, 1)][: server.ROWS], chats)
    ends = stop_tokens(found, tokenizer) + generation_config.end_tokens_in_file(found.base)
    before = model_files.model_folder(found.name, found.model.get("revision")) if found.adapter is None else None
    job = _reference(found) | {"exported": found.base, "before": before and str(before), "stops": ends}
    job |= {"sequences": [[one.ids, one.start] for one in answers], "trust_remote_code": options.trust_remote_code}
    scored = verify.run(job)
    for place, one in enumerate(answers):
        one.run, one.ends = scored["run"][place], scored["ends"][place]
        one.base = scored["base"] and scored["base"][place]
    ending = None if found.raw else generation_config.end_of_turn_text(tokenizer)
    findings, figures = server.judge(answers, str(found.given), ends, ending.strip() if ending else None)
    for outcome, sentence in findings:
        print_line(sentence, style=None if outcome == "equal" else "yellow")
    if options.json:
        result: JsonObject = {"findings": [{"outcome": one, "sentence": text} for one, text in findings]} | figures
        files.write_json(options.json, redact_tree(result | {"device": scored["device"], "dtype": scored["dtype"]}))
    return server.CODES[findings[0][0]]


def raise_if_failed(finding: JsonObject, options: argparse.Namespace) -> None:
    """Raise RunError if the check failed, after writing the finding to --json."""
    if finding["passed"]:
        return
    if options.json:
        files.write_json(options.json, {"verification": finding})
    raise RunError(
        f"The export does not match the run: {finding['why']}. Nothing was written to {options.out}. Export again; if "
        "it fails again, report it with --json's file."
    )


def describe(found: Source, form: str, folder: Path) -> JsonObject:
    """What an export holds, and of which run: for export.json and --json."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = files.checksums(paths)
    return {
        "form": form,
        "source": str(found.given),
        "step": found.step,
        "base": found.name,
        "files": [
            {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "xxh3_128": one}
            for path, one in zip(paths, sums, strict=True)
        ],
        "notes": found.notes,
    }


# --- small things -----------------------------------------------------------------------------------------------------


def _gigabytes(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-6 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"expected a size in GB, got {text!r}")
    return int(number * 1e9)
