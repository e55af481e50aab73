"""Tests of finetune/export/gguf.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import RunError, UserError
from finetune.export import command, gguf
from tests.helpers.export import WARNINGS, ends

pytestmark = WARNINGS

CONVERTER = """
import sys
if sys.argv[1:] == ["--print-supported-models"]:
    sys.exit("usage: no such option")
model, file, kind = sys.argv[1], sys.argv[3], sys.argv[5]
assert sys.argv[2] == "--outfile" and sys.argv[4] == "--outtype"
if kind == "f32":
    sys.exit("no such model")
open(file, "wb").write(open(model + "/model.safetensors", "rb").read())
"""


def test_without_a_converter_the_command_says_what_to_install(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.delenv("UNSLOTH_LLAMA_CPP_PATH", raising=False)
    out = tmp_path / "out"
    words = ends(capsys, [str(run_folder), "--to", "gguf", "--out", str(out)], 2)
    assert "git clone" in words and f"convert_hf_to_gguf.py {out}-merged --outfile model.gguf --outtype f16" in words
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / gguf.CONVERTER).write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    assert gguf.find(None, "f16", "m").converter == folder / gguf.CONVERTER
    with pytest.raises(UserError, match="q4_k_m needs llama.cpp's llama-quantize"):
        gguf.find(None, "q4_k_m", "m")
    with pytest.raises(UserError, match=f"not in {tmp_path / 'none'}"):
        gguf.find(tmp_path / "none", "f16", "m")
    monkeypatch.setattr(gguf, "CHECKER", "a_module_that_is_not_there")
    words = ends(capsys, [str(run_folder), "--to", "gguf", "--out", str(out)], 2)
    assert "pip install 'finetune-multigpu[gguf]'" in words


def test_the_converter_gets_what_transformers_does_not_save(run_folder: Path, base: Path, tmp_path: Path) -> None:
    """The SentencePiece file of the base model, added tokens, and whether a text begins with the first token."""
    from transformers import AutoTokenizer

    origin, other = Path(shutil.copytree(base, tmp_path / "origin")), Path(shutil.copytree(base, tmp_path / "other"))
    for folder in (origin, other):
        (folder / gguf.SENTENCEPIECE).write_bytes(folder.name.encode())
    changed = json.loads((other / "tokenizer.json").read_text())
    changed["model"]["vocab"]["another piece"] = len(changed["model"]["vocab"])
    (other / "tokenizer.json").write_text(json.dumps(changed))
    tokenizer = AutoTokenizer.from_pretrained(run_folder)
    gguf.complete_tokenizer(run_folder, (tmp_path / "nothing", other), tokenizer)
    assert not (run_folder / gguf.SENTENCEPIECE).exists()
    gguf.complete_tokenizer(run_folder, (other, origin), tokenizer)
    assert (run_folder / gguf.SENTENCEPIECE).read_bytes() == b"origin"
    written = json.loads((run_folder / "tokenizer_config.json").read_text())
    assert written["add_bos_token"] is False
    names = {int(number): one["content"] for number, one in written["added_tokens_decoder"].items()}
    assert names and all(tokenizer.convert_ids_to_tokens(number) == name for number, name in names.items())
    assert AutoTokenizer.from_pretrained(run_folder)("a b").input_ids == tokenizer("a b").input_ids
    parts = {"bos_token_id": 7, "added_tokens_decoder": {}, "__call__": lambda self, text: {"input_ids": [7, 1]}}
    gguf.complete_tokenizer(run_folder, (), type("WithFirst", (), parts)())
    assert json.loads((run_folder / "tokenizer_config.json").read_text())["add_bos_token"] is True


@pytest.mark.process
@pytest.mark.usefixtures("in_this_process")
def test_the_converter_of_the_user_runs_on_the_merged_model(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / gguf.CONVERTER).write_text(CONVERTER)
    out = tmp_path / "out"
    arguments = [str(run_folder), "--to", "gguf", "--llama-cpp", str(tmp_path), "--no-verify", "--out", str(out)]
    assert command.main(arguments) == 0
    assert {path.name for path in out.iterdir()} == {"model-f16.gguf", "README.md", "export.json"}
    # The converter, which rounds to nearest, gets float32, or what was rounded to bfloat16 here.
    assert {one.dtype for one in load_file(out / "model-f16.gguf").values()} == {torch.float32}
    assert command.main([*arguments, "--gguf-type", "bf16", "--overwrite"]) == 0
    assert {one.dtype for one in load_file(out / "model-bf16.gguf").values()} == {torch.bfloat16}
    shutil.rmtree(out)
    capsys.readouterr()
    assert "convert_hf_to_gguf.py failed: no such model" in ends(capsys, [*arguments, "--gguf-type", "f32"], 1)
    assert not out.exists() and not list(tmp_path.glob(".*"))


@pytest.mark.process
def test_a_file_names_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    """Everything else stays as it is."""
    library = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    file, weights = tmp_path / "model.gguf", torch.arange(48.0).view(6, 8).numpy()
    writer = library.GGUFWriter(file, "llama")
    writer.add_token_list(["a", "b", "猫"])
    writer.add_eos_token_id(1)
    writer.add_tensor("output.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tools = gguf.Tools(tmp_path / gguf.CONVERTER)
    gguf.name_end_of_turn(tools, file, 2)
    found = library.GGUFReader(file)
    fields = {name: found.get_field(f"tokenizer.ggml.{name}").contents() for name in ("tokens", "eos_token_id")}
    assert fields == {"tokens": ["a", "b", "猫"], "eos_token_id": 1}
    assert found.get_field("tokenizer.ggml.eot_token_id").contents() == 2
    assert (found.tensors[0].data == weights).all() and len(found.tensors) == 1
    with pytest.raises(RunError, match="gguf_new_metadata failed: .*token list"):
        gguf.name_end_of_turn(tools, file, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.process
def test_a_model_that_the_converter_lacks_is_refused_before_merging(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "import sys\nsys.stderr.write('Supported models:\\nTEXT models:\\n  - {}\\n')\n"
    (tmp_path / gguf.CONVERTER).write_text(listed.format("Qwen3MoeForCausalLM"))
    monkeypatch.setattr(command, "_merge", lambda *given: pytest.fail("merged"))
    arguments = [str(run_folder), "--to", "gguf", "--llama-cpp", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--no-verify"]
    assert "cannot convert LlamaForCausalLM. Update llama.cpp, or use --to merged" in ends(capsys, arguments, 2)
    (tmp_path / gguf.CONVERTER).write_text(listed.format("LlamaForCausalLM"))
    gguf.check_architecture(gguf.find(tmp_path, "f16", "m"), ["LlamaForCausalLM"])
