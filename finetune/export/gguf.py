"""Converts a merged model to GGUF with llama.cpp's own converter, if the user has one. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError
from finetune.runtime import files, subprocesses
from finetune.runtime.types import Tokenizer

CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
SENTENCEPIECE = "tokenizer.model"
CHECKER = "xllamacpp"
EXACT = ("f16", "bf16", "f32")  # types that the converter writes and the check can bound


@dataclass(frozen=True)
class Tools:
    """Programs of llama.cpp: the converter, and the quantizer if it is asked for."""

    converter: Path
    quantizer: Path | None = None

    def command(self, model: Path, file: Path, kind: str) -> list[str]:
        """The converter's command line."""
        return [sys.executable, str(self.converter), str(model), "--outfile", str(file), "--outtype", kind]


def find(given: Path | None, kind: str, model: str) -> Tools:
    """llama.cpp's converter: in --llama-cpp, then in LLAMA_CPP, Unsloth's folder and on PATH.

    Args:
        kind: f16, bf16, f32, or a type of llama-quantize such as q4_k_m.
        model: the merged model's folder, for the command in the error.

    Raises:
        UserError: there is none. The message has what to install and the command that would run.
    """
    named = [os.environ.get(name) for name in ("LLAMA_CPP", "UNSLOTH_LLAMA_CPP_PATH")]
    folders = [*(Path(name) for name in named if name), Path.home() / ".unsloth" / "llama.cpp"]
    folders = [given] if given is not None else folders
    converter = next((folder / CONVERTER for folder in folders if (folder / CONVERTER).is_file()), None)
    if converter is None and given is None and (on_path := shutil.which(CONVERTER)) is not None:
        converter = Path(on_path)
    if converter is None:
        where = f"in {given}" if given is not None else "in LLAMA_CPP, ~/.unsloth/llama.cpp or on PATH"
        command = Tools(Path("llama.cpp", CONVERTER)).command(Path(model), Path("model.gguf"), exact_kind(kind))
        raise UserError(
            f"GGUF needs llama.cpp's {CONVERTER}, which is not {where}. Run `git clone "
            "https://github.com/ggml-org/llama.cpp` and `pip install gguf sentencepiece`, then give the folder with "
            f"--llama-cpp. Or export --to merged and run: {shlex.join(['python', *command[1:]])}"
        )
    if kind in EXACT:
        return Tools(converter)
    places = [converter.parent, converter.parent / "build" / "bin"]
    quantizer = next((place / QUANTIZER for place in places if (place / QUANTIZER).is_file()), None)
    on_path = shutil.which(QUANTIZER)
    if quantizer is None and on_path is None:
        raise UserError(
            f"--gguf-type {kind} needs llama.cpp's {QUANTIZER}, which is neither in {places[0]} nor on PATH. Build it "
            f"(cmake --build build --target {QUANTIZER}), or use one of {', '.join(EXACT)}."
        )
    return Tools(converter, quantizer or Path(str(on_path)))


def check_verifier() -> None:
    """Check that the library that verifies GGUF files is installed.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec(CHECKER) is None:
        raise UserError(
            f"A GGUF file is verified with {CHECKER}, which is not installed. Run "
            "`pip install 'finetune-multigpu[gguf]'`, or skip the check with --no-verify."
        )


def check_architecture(tools: Tools, architectures: Iterable[str]) -> None:
    """Check that the converter has the model, before anything is merged.

    Args:
        architectures: of config.json. A converter that cannot list its own is not asked.

    Raises:
        UserError: it does not.
    """
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    done = subprocesses.run([sys.executable, str(tools.converter), "--print-supported-models"], env=env)
    known = {line.strip().removeprefix("- ") for line in (done.stdout + done.stderr).splitlines()}
    named = list(architectures)
    if done.returncode == 0 and "Supported models:" in known and named and not known.intersection(named):
        raise UserError(f"{tools.converter} cannot convert {', '.join(named)}. Update llama.cpp, or use --to merged.")


def exact_kind(kind: str) -> str:
    """The type that the converter writes: `kind`, or float16 for types that are quantized from it."""
    return kind if kind in EXACT else "f16"


def complete_tokenizer(folder: Path, origins: Iterable[Path], tokenizer: Tokenizer) -> None:
    """Add to a merged model what the converter reads and transformers 5 does not save: the SentencePiece file, without
    which pieces lose their scores; added tokens in tokenizer_config.json; and whether a text begins with the first
    token, which the converter otherwise assumes of SentencePiece.

    Args:
        folder: the merged model, of which only the GGUF file remains.
        origins: folders that the tokenizer may come from; the file is taken if its tokenizer has the same vocabulary.
        tokenizer: the one in `folder`.
    """
    own = _vocabulary(folder)
    for origin in origins:
        if (folder / SENTENCEPIECE).exists() or own is None:
            break
        if (origin / SENTENCEPIECE).is_file() and _vocabulary(origin) in (own, None):
            shutil.copyfile(origin / SENTENCEPIECE, folder / SENTENCEPIECE)
    file = folder / "tokenizer_config.json"
    config = files.read_json(file) if file.is_file() else {}
    added = {
        str(number): {"content": str(token), "special": bool(getattr(token, "special", False))}
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
    }
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    files.write_json(file, {"added_tokens_decoder": added} | config | {"add_bos_token": begins})


def _vocabulary(folder: Path) -> Any:
    """Pieces and merges of tokenizer.json; None if there is no such file."""
    file = folder / "tokenizer.json"
    model = files.read_json(file).get("model", {}) if file.is_file() else {}
    return (model.get("vocab"), model.get("merges")) if model else None


def convert(tools: Tools, model: Path, file: Path, kind: str) -> None:
    """Write `file` from the merged model.

    Raises:
        RunError: the converter failed.
    """
    _run(tools.command(model, file, exact_kind(kind)), file, env=dict(os.environ) | {"HF_HUB_OFFLINE": "1"})


def name_end_of_turn(tools: Tools, file: Path, token: int) -> None:
    """Name the token that ends a turn in a GGUF file, with the library of the converter. The converter writes the
    tokenizer's EOS alone, and llama.cpp knows common ends of turns by their text; at any other it stops only if the
    file names it.

    Raises:
        RunError: the library failed.
    """
    partial = file.with_name(f"{file.name}.partial")
    command = [sys.executable, "-P", "-m", "gguf.scripts.gguf_new_metadata", "--force", "--special-token-by-id", "eot"]
    own = str(tools.converter.parent / "gguf-py")  # of llama.cpp's sources
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([own, os.environ.get("PYTHONPATH", "")])}
    _run([*command, str(token), str(file), str(partial)], partial, env=env)
    os.replace(partial, file)


def quantize(tools: Tools, source: Path, file: Path, kind: str) -> None:
    """Write `file` from the exact GGUF file `source`.

    Raises:
        RunError: llama-quantize failed.
    """
    _run([str(tools.quantizer), str(source), str(file), kind], file, env=dict(os.environ))


def _run(command: list[str], file: Path, env: dict[str, str]) -> None:
    done = subprocesses.run(command, env=env)
    if done.returncode != 0 or not file.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        program = next(word for word in command if word not in (sys.executable, "-P", "-m"))
        raise RunError(
            f"llama.cpp's {Path(program).name} failed: "
            f"{lines[-1][:300]}. Update llama.cpp if it does not know this model. The command was: "
            f"{shlex.join(command)}"
        )
