"""`finetune export`: merged weights against PEFT's own merge, every refusal, and the check that finds a flipped bit."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.engine.checkpoint import base_weights, checkpoints
from finetune.engine.optimizer import master_weights
from finetune.errors import UserError
from finetune.export import card, command, gguf, hub, source, verify
from finetune.export.adapter import Adapter, find_name
from finetune.export.merged import Merge
from finetune.export.weights import Entry, Weights, shards
from finetune.runtime import command as commands
from tests.helpers import launch, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
IDS = torch.tensor([[5, 9, 30, 77, 120, 8, 3]])


def make_base(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """A tiny model of an architecture, with its tokenizer."""
    import transformers

    tokenizer = tiny.make_tokenizer(folder)
    names = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma", "gpt2": "GPT2"}
    sizes = SIZES if kind != "gpt2" else {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tied = {"tie_word_embeddings": False} if kind == "llama" else {}
    config = getattr(transformers, f"{names[kind]}Config")(vocab_size=len(tokenizer), **sizes | tied | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base: Path, *, resize: int = 0, **lora: Any) -> Any:
    """An adapter with random weights, saved by PEFT. Returns PEFT's model in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | lora
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    peft.save_pretrained(folder)
    return peft.eval()


def make_run(folder: Path, base: Path, **lora: Any) -> Any:
    """The output folder of a finished run, as training leaves it."""
    peft = make_adapter(folder, base, **lora)
    for file in base.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(base / "chat_template.jinja", folder / "chat_template.jinja")
    model = {"model_name_or_path": str(base), "chat_template": None}
    content = {"status": "done", "steps": 7, "settings": base_weights.base_model_files(base), "eval_loss_after": 1.25}
    content["config"] = {"model": model, "data": {"train_file": "/home/me/secret project/rows.jsonl"}}
    (folder / "run.json").write_text(json.dumps(content))
    return peft


def merge(folder: Path, base: Path, out: Path, shard: int = 10**9) -> Merge:
    out.mkdir()
    found = Merge(base, Adapter(folder, json.loads((folder / "adapter_config.json").read_text())))
    found.write(out, shard)
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The program that runs in a process of its own, here in this one."""
    spec = importlib.util.spec_from_file_location("export_check", verify.PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the merge --------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3, all linear": ("qwen3", {"target_modules": "all-linear"}),
    "gemma, tied": ("gemma", {}),
    "gpt2, transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2, DoRA": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA, and an embedding": ("llama", {"use_dora": True, "target_modules": ["o_proj", "embed_tokens"]}),
    "patterns": ("llama", {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}}),
    "modules trained in full": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "tokens": ("llama", {"trainable_token_indices": [7, 3]}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_merged_weights_are_those_of_peft(name: str, tmp_path: Path) -> None:
    kind, lora = VARIANTS[name]
    base = make_base(tmp_path / "base", kind)
    peft = make_adapter(tmp_path / "adapter", base, **lora)
    unmerged = logits(peft)
    wanted = peft.merge_and_unload().state_dict()
    found = merge(tmp_path / "adapter", base, tmp_path / "out", shard=60_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    own = tensors(tmp_path / "out")
    assert own.keys() == Weights(base).entries.keys() and found.changed > 0
    for key, tensor in own.items():
        assert tensor.dtype == torch.bfloat16
        exact = wanted[key]
        assert ((tensor.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-7).all(), key  # up or down, not the nearest
        if not key.endswith(tuple(f"{path}.{part}" for path in found.adapter.changes for part in ("weight", "bias"))):
            assert torch.equal(tensor, tensors(base)[key]), key
    reloaded = logits(load(tmp_path / "out"))
    assert (reloaded - unmerged).abs().max() < 0.02 * unmerged.abs().max()
    assert not torch.allclose(reloaded, logits(load(base)), atol=0.02 * float(unmerged.abs().max()))


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "head trained": ({"modules_to_save": ["lm_head"]}, False),
    "embedding trained": ({"modules_to_save": ["embed_tokens"]}, False),
    "LoRA on the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "LoRA on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "resized": ({"resize": 328}, True),
    "neither": ({}, True),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_compute_what_was_trained(name: str, tmp_path: Path) -> None:
    """PEFT's merge would change both; the unmerged model is the reference."""
    lora, stays_tied = TIED[name]
    base = make_base(tmp_path / "base", "gemma", torch.float32)
    wanted = logits(make_adapter(tmp_path / "adapter", base, **lora))
    merge(tmp_path / "adapter", base, tmp_path / "out")
    model = load(tmp_path / "out")
    assert torch.allclose(logits(model), wanted, atol=1e-4)
    assert model.config.tie_word_embeddings is stays_tied
    assert ("lm_head.weight" in tensors(tmp_path / "out")) is not stays_tied
    assert model.config.vocab_size == lora.get("resize", 320)


def test_a_base_stored_in_4_bits_is_dequantized(tmp_path: Path, check: ModuleType) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = make_base(tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "nf4")
    make_adapter(tmp_path / "adapter", base)
    merge(tmp_path / "adapter", tmp_path / "nf4", tmp_path / "out")
    job = {"base": tmp_path / "nf4", "adapter": tmp_path / "adapter"}
    wanted = check._with_adapter(job, tmp_path / "adapter", torch.float32, torch.device("cpu"), tmp_path / "out")
    found, changed = check._compare_tensors(wanted, {}, tmp_path / "out", torch.float32)
    assert found == {"compared": 21, "changed": 6, "not_compared": [], "wrong": []} and len(changed) == 6
    assert {one.dtype for one in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert not torch.equal(*(tensors(f)["model.layers.0.mlp.up_proj.weight"] for f in (tmp_path / "out", base)))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


REFUSED: dict[str, dict[str, Any]] = {
    "init_lora_weights: pissa": {"init_lora_weights": "pissa"},
    "target_parameters": {"target_parameters": ["experts.gate_up_proj"]},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "not LORA": {"peft_type": "VERA"},
    "a_later_field": {"a_later_field": {"x": 1}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_merged_is_refused(words: str, tmp_path: Path) -> None:
    make_adapter(tmp_path, make_base(tmp_path / "base"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    with pytest.raises(UserError, match=f"{words}.*--to adapter"):
        Adapter(tmp_path, config | REFUSED[words])


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", make_base(tmp_path / "base"))
    other = make_base(tmp_path / "other", intermediate_size=32)
    with pytest.raises(UserError, match="does not fit the base model.*down_proj.*--base"):
        merge(tmp_path / "adapter", other, tmp_path / "out")
    make_adapter(tmp_path / "biased", make_base(tmp_path / "base"), lora_bias=True)
    with pytest.raises(UserError, match="the base has no tensor `.*bias`"):
        merge(tmp_path / "biased", tmp_path / "base", tmp_path / "out2")


def test_names_with_and_without_a_prefix() -> None:
    names = ["model.layers.0.q.weight", "visual.layers.1.q.weight", "model.layers.1.q.weight", "norm.weight"]
    assert find_name("model.layers.0.q", "weight", names) == "model.layers.0.q.weight"
    assert find_name("model.language_model.layers.0.q", "weight", names) == "model.layers.0.q.weight"
    assert find_name("model.language_model.layers.1.q", "weight", names) is None  # two could be meant
    assert find_name("model.layers.2.q", "weight", names) is None
    assert find_name("model.norm", "weight", names) == "norm.weight"


def test_shards_hold_at_most_so_many_bytes() -> None:
    entries = [Entry(str(n), torch.bfloat16, (size,)) for n, size in enumerate([10, 30, 20, 200, 1])]
    assert [[one.name for one in group] for group in shards(entries, 100)] == [["0", "1"], ["2"], ["3"], ["4"]]


def shrink(folder: Path, factor: float) -> None:
    """Make the update of an adapter, B A, smaller."""
    file = folder / "adapter_model.safetensors"
    content = load_file(file)
    save_file({name: one * factor if "lora_B" in name else one for name, one in content.items()}, file)


def test_small_updates_survive_the_rounding(tmp_path: Path, check: ModuleType) -> None:
    """To nearest, most of them would be lost. The same whatever the size of the files."""
    base = make_base(tmp_path / "base")
    peft = make_adapter(tmp_path / "adapter", base)
    shrink(tmp_path / "adapter", 1e-2)
    found = merge(tmp_path / "adapter", base, tmp_path / "out")
    assert found.kept == pytest.approx(1, abs=0.1)
    merge(tmp_path / "adapter", base, tmp_path / "shards", shard=10_000)
    own, again = tensors(tmp_path / "out"), tensors(tmp_path / "shards")
    assert all(torch.equal(own[name], again[name]) for name in own)

    (tmp_path / "exact").mkdir()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    exact = Merge(base, Adapter(tmp_path / "adapter", config), torch.float32)
    exact.write(tmp_path / "exact")
    assert exact.kept is None
    model = load(tmp_path / "exact")
    assert model.config.dtype == torch.float32
    peft.load_adapter(tmp_path / "adapter", "shrunk")
    peft.set_adapter("shrunk")
    assert torch.allclose(logits(model), logits(peft), atol=1e-5)

    nearest = {name: one.bfloat16() for name, one in tensors(tmp_path / "exact").items()}
    save_file(nearest, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    found, _ = check._compare_tensors(peft, {}, tmp_path / "out", torch.float32)
    assert len(found["wrong"]) == 6 and "q_proj.weight is off by more than a rounding" in " ".join(found["wrong"])


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_a_check_in_16_bits_does_not_lose_small_updates(
    kind: str, tmp_path: Path, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a float32 copy of the model does not fit, transformers would load float32 weights rounded to nearest."""
    base = make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter", base)
    shrink(tmp_path / "adapter", 1e-2)
    exact, out = (Path(shutil.copytree(base, tmp_path / name)) for name in ("exact", "out"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    Merge(base, Adapter(tmp_path / "adapter", config), torch.float32).write(exact)
    job: dict[str, Any] = {"tokenizer": base, "prompts": ["the cat"], "max_new_tokens": 4}
    if kind == "adapter":
        job |= {"base": base, "adapter": tmp_path / "adapter", "exported": exact}
    else:  # a checkpoint of full fine-tuning, whose weights are float32
        edit(exact / "config.json", dtype="bfloat16")
        Merge(exact, None).write(out)
        job |= {"model": exact, "exported": out}
    monkeypatch.setattr(check, "_place", lambda job: (torch.device("cpu"), torch.bfloat16))
    with torch.no_grad():
        found = check._check_folder(job)
        assert found["passed"], found["why"]
        loaded = check._load(exact, {}, torch.bfloat16).state_dict()[PROJECTION].float()
    old = tensors(base)[PROJECTION].float()
    update = tensors(exact)[PROJECTION] - old
    assert float(((loaded - old) * update).sum() / (update * update).sum()) == pytest.approx(1, abs=0.2)


# --- what is exported -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run_folder(base: Path, tmp_path: Path) -> Path:
    make_run(tmp_path / "run", base)
    return tmp_path / "run"


def ends(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    """Run the command; its message, after asserting the exit code, one error and no traceback."""
    assert command.main(arguments) == code
    words = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in words and words.count("error: ") == (code != 0), words
    return words


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def checkpoint(run: Path) -> Path:
    """checkpoint-5 of a run, complete."""
    folder = run / "checkpoint-5"
    folder.mkdir()
    for file in run.iterdir():
        if file.is_file() and file.name != "run.json":
            shutil.copyfile(file, folder / file.name)
    checkpoints.seal(folder, {"step": 5, "settings": json.loads((run / "run.json").read_text())["settings"]})
    return folder


def test_folders_that_cannot_be_exported(
    run_folder: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def words(folder: Path, *more: str) -> str:
        found = ends(capsys, [str(folder), "--to", "merged", "--out", str(out), "--no-verify", *more], 2)
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return found

    assert "There is no such folder" in words(tmp_path / "none")
    assert "not the output folder of a run" in words(base)
    partial = checkpoint(run_folder)
    (partial / "adapter_model.safetensors").write_bytes(b"x" * 10)
    assert "not a complete checkpoint: adapter_model.safetensors has 10 bytes" in words(partial)
    shutil.rmtree(partial)
    good = checkpoint(run_folder)
    edit(run_folder / "run.json", status="failed")
    assert f"its status is failed. Export a checkpoint: {good}." in words(run_folder)
    edit(run_folder / "run.json", status="done", final_files={"adapter_model.safetensors": "0" * 32})
    assert "does not match its checksum in run.json" in words(run_folder)
    weights = run_folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "is not a whole file" in words(run_folder)
    (run_folder / "run.json").write_text("[")
    assert "run.json cannot be read" in words(run_folder)


def test_a_base_that_has_changed_or_is_missing(base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "own"))
    make_run(tmp_path / "run", own)
    run = tmp_path / "run"
    assert source.find(run).notes == [] and source.find(run).base == own
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has changed since the run: .* has other weights than the run recorded"):
        source.find(run)
    assert source.find(run, str(base)).base == base
    edit(own / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(UserError, match=r"other config.json and weights"):
        source.find(run)
    shutil.rmtree(own)
    with pytest.raises(UserError, match="is not on this machine. Download it with `hf download .*--base"):
        source.find(run)
    edit(run / "run.json", settings={})
    assert len(source.find(run, str(base)).notes) == 2  # nothing to compare with
    shutil.copytree(base, own)
    edit(own / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match=r"quantized \(gptq\), which cannot be merged"):
        Merge(source.find(run, str(own)).base, None)


def test_a_disk_without_space(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(tmp_path / "out")], 2)
    assert "needs 64 MiB, and its disk has 1 MiB free" in words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["weights", "card"])
def test_a_disk_that_fills_up_while_writing(
    part: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another program took since the space was looked at."""
    write = Merge.write

    def full(self: Merge, folder: Path, shard: int) -> None:
        write(self, folder, shard)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    def full_card(folder: Path, *given: Any) -> None:
        (folder / "README.md").write_text("ha")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "README.md"))

    monkeypatch.setattr(*((Merge, "write", full) if part == "weights" else (card, "write", full_card)))
    out = tmp_path / "out"
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(out), "--no-verify"], 1)
    assert "disk" in words and "space" in words
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_options_that_do_not_fit(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    given = [str(run_folder), *out]
    for arguments, expected in {
        (): "export needs --to",
        ("--to", "zip"): "expected adapter, merged, gguf or hub",
        ("--to", "merged", "--upload"): "--upload is for --to hub",
        ("--to", "merged", "--gguf-type", "f16"): "--gguf-type is for GGUF files",
        ("--to", "gguf", "--dtype", "float32"): "--dtype is for merged models: got gguf. Remove it, or use --gguf-type",
        ("--to", "merged", "--dtype", "float16"): "expected bfloat16 or float32",
        ("--to", "hub"): "give --repo USER/NAME",
        ("--to", "hub", "--repo", "me"): "--repo must be USER/NAME",
        ("--to", "hub", "--repo", "../x/y"): "--repo must be USER/NAME",
        ("--to", "merged", "--shard-size", "0"): "expected a size in GB",
    }.items():
        assert expected in ends(capsys, [*given, *arguments], 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert "exists already. Give a new folder" in ends(capsys, [*given, "--to", "merged", "--overwrite"], 2)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "run", lambda job: check.check({"max_new_tokens": 8} | job))


def flip(folder: Path, name: str, bit: int = 0) -> None:
    """Flip one bit in the middle of a tensor of bfloat16."""
    (file,) = folder.glob("*.safetensors")
    content = load_file(file)
    raw = content[name].view(torch.int16).reshape(-1)
    raw[raw.numel() // 2] ^= 1 << bit
    save_file(content, file, {"format": "pt"})


@pytest.mark.usefixtures("in_this_process")
def test_an_export_is_complete_and_verified(run_folder: Path, base: Path, tmp_path: Path) -> None:
    edit(base / "generation_config.json", eos_token_id=1)  # another than the tokenizer's, which ended the turns
    given = checkpoint(run_folder)
    out, report = tmp_path / "a" / "out", tmp_path / "report.json"
    arguments = ["--to", "merged", "--out", str(out), "--json", str(report), "--shard-size", "0.0001"]
    assert command.main([str(given), *arguments]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert "model.safetensors.index.json" in names and not names & {"optimizer.pt", "checkpoint.json"}
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    found = json.loads(report.read_text())
    assert found["verification"]["passed"] and found["step"] == 5
    assert found["verification"]["tensors"] == {"compared": 21, "changed": 6, "not_compared": [], "wrong": []}
    difference, bound = (found["verification"]["logits"][name] for name in ("difference", "bound"))
    assert 0 < difference < bound < 0.2 * found["verification"]["logits"]["largest"]
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "export.json").read_text()


@pytest.mark.usefixtures("in_this_process")
def test_an_adapter_and_a_full_model_are_copied_bit_by_bit(run_folder: Path, base: Path, tmp_path: Path) -> None:
    assert command.main([str(run_folder), "--to", "adapter", "--out", str(tmp_path / "adapter")]) == 0
    one, two = (tensors(folder) for folder in (run_folder, tmp_path / "adapter"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    full = Path(shutil.copytree(base, tmp_path / "full"))
    (full / "run.json").write_text(json.dumps({"status": "done", "config": {"model": {}}}))
    assert command.main([str(full), "--to", "merged", "--out", str(tmp_path / "out")]) == 0
    one, two = (tensors(folder) for folder in (full, tmp_path / "out"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(UserError, match="has no adapter"):
        command.run([str(full), "--to", "adapter", "--out", str(tmp_path / "none")])


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_trained_tokens_are_checked(kind: str, tmp_path: Path, check: ModuleType) -> None:
    """In a model with tied embeddings the head has them too."""
    base = make_base(tmp_path / "base", kind)
    make_adapter(tmp_path / "adapter", base, trainable_token_indices=[7, 3])
    merge(tmp_path / "adapter", base, tmp_path / "out")
    job = {"base": base, "adapter": tmp_path / "adapter"}

    def wrong() -> list[str]:
        reference = check._with_adapter(job, tmp_path / "adapter", torch.float32, torch.device("cpu"), tmp_path / "out")
        return check._compare_tensors(reference, {}, tmp_path / "out", torch.float32)[0]["wrong"]

    assert wrong() == []
    content = load_file(tmp_path / "out" / "model.safetensors")
    content["model.embed_tokens.weight"][7, 0] += 1
    save_file(content, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert len(wrong()) == 1


@pytest.mark.usefixtures("in_this_process")
def test_float32_weights_of_a_16_bit_model_are_rounded_as_the_final_model(
    base: Path, tmp_path: Path, check: ModuleType
) -> None:
    """A checkpoint of full fine-tuning, with updates that rounding to nearest would lose."""
    full = Path(shutil.copytree(base, tmp_path / "full"))
    old = tensors(full)
    trained = {name: one.float() * (1 + 2**-11) for name, one in old.items()}
    save_file(trained, full / "model.safetensors", {"format": "pt"})
    (full / "run.json").write_text(json.dumps({"status": "done", "config": {"model": {}}}))
    assert command.main([str(full), "--to", "merged", "--out", str(tmp_path / "out")]) == 0
    own = tensors(tmp_path / "out")
    model = load(full)
    state = master_weights.saved_state(model, torch.bfloat16)
    assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
    name = "model.layers.0.mlp.up_proj.weight"
    assert float(own[name].float().abs().sum() / old[name].float().abs().sum() - 1) == pytest.approx(2**-11, rel=0.1)
    save_file({name: one.bfloat16() for name, one in trained.items()}, tmp_path / "out" / "model.safetensors")
    found, _ = check._compare_tensors(load(full), check._open(full), tmp_path / "out", torch.float32)
    assert found["wrong"] and "is not equal to the original" in found["wrong"][0]


@pytest.mark.parametrize(
    ("tensor", "bit"),
    [("model.layers.1.mlp.down_proj.weight", 0), ("model.embed_tokens.weight", 0), ("model.norm.weight", 12)],
)
def test_a_flipped_bit_is_found(
    tensor: str, bit: int, run_folder: Path, base: Path, tmp_path: Path, check: ModuleType
) -> None:
    merge(run_folder, base, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(run_folder / file, tmp_path / "out" / file)
    job = {"base": base, "adapter": run_folder, "exported": tmp_path / "out", "tokenizer": run_folder}
    job |= {"prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    assert check.check(job)["passed"]
    flip(tmp_path / "out", tensor, bit)
    found = check.check(job)
    assert not found["passed"] and tensor in found["why"]
    assert len(found["tensors"]["wrong"]) == 1


def test_a_wrong_weight_shows_in_the_logits_too(
    run_folder: Path, base: Path, tmp_path: Path, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_difference", lambda *arguments, **more: None)
    merge(run_folder, base, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(run_folder / file, tmp_path / "out" / file)
    job = {"base": base, "adapter": run_folder, "exported": tmp_path / "out", "tokenizer": run_folder}
    job |= {"prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    flip(tmp_path / "out", "model.layers.1.mlp.down_proj.weight", 14)  # of the exponent
    found = check.check(job)
    assert not found["passed"] and "logits differ" in found["why"]
    (tmp_path / "out" / "chat_template.jinja").write_text("other")
    assert "another chat template" in check.check(job)["why"]


def test_an_export_is_judged_by_the_loss_on_the_runs_rows(
    run_folder: Path,
    base: Path,
    tmp_path: Path,
    check: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held-out rows come from the data cache, where the run left them."""
    import numpy as np

    from finetune.data import store

    def build(folder: Path) -> dict[str, Any]:
        for split, first in (("train", 3), ("eval", 50)):
            writer = store.Writer(folder, split)
            for row in range(5):
                ids = np.arange(first, first + 8 + row, dtype=np.int32)
                writer.add(ids, np.where(np.arange(len(ids)) < 3, -100, ids).astype(np.int32))
            writer.close()
        return {}

    folder, _ = store.entry(tmp_path / "cache", "key", build, verify=True)
    edit(run_folder / "run.json", data_folder=str(folder), ledger={"train": {}, "eval": {}})
    split, rows = verify.rows(json.loads((run_folder / "run.json").read_text()))
    assert split == "eval" and len(rows) == 5 and rows[0][0][0] == 50 and rows[0][1][:3] == [-100] * 3

    monkeypatch.setattr(verify, "run", lambda job: check.check({"max_new_tokens": 8} | job))
    arguments = [str(run_folder), "--to", "merged", "--json", str(tmp_path / "r.json"), "--out"]
    assert command.main([*arguments, str(tmp_path / "out")]) == 0
    loss = json.loads((tmp_path / "r.json").read_text())["verification"]["loss"]
    assert f"loss on held-out rows {loss['export']:.4f} (run {loss['run']:.4f}, base model {loss['base']:.4f})" in (
        " ".join(capsys.readouterr().out.split())
    )
    with torch.no_grad():
        model = load(tmp_path / "out")
        own = check._losses(model, check._rows(rows[:1], 10**6)).mean()
        assert own == pytest.approx(model(torch.tensor([rows[0][0]]), labels=torch.tensor([rows[0][1]])).loss)
    assert [len(ids) for ids, _ in check._rows(rows, 14)] == [8, 6] and check._rows(rows, 2) == []

    given = {"base": [4.0, 4.0], "run": [2.0, 2.0], "export": [2.0, 2.4], "noisy": [2.1, 2.4]}
    losses = {name: torch.tensor(one) for name, one in given.items()}
    assert check._compare_losses(losses)["bound"] == pytest.approx(0.1 * 2.0 + 0.05)
    found = {"tensors": {"wrong": []}, "logits": {"difference": 0, "bound": 1}, "answers": []}
    assert check._verdict(found | {"loss": check._compare_losses(losses)}) == ""
    worse = check._compare_losses(losses | {"export": losses["noisy"] + 0.1, "noisy": losses["noisy"]})
    assert "loss on the run's rows is 2.3500 instead of 2.0000" in check._verdict(found | {"loss": worse})

    shutil.rmtree(folder)
    assert command.main([*arguments, str(tmp_path / "without")]) == 0
    assert "The run's rows are not in the data cache" in capsys.readouterr().out


def test_answers_may_part_at_a_tie_only(check: ModuleType) -> None:
    tokenizer = SimpleNamespace(decode=str)
    rows = torch.zeros(4, 5)
    rows[2, 1], rows[2, 3] = 2.0, 1.9
    compare = check._compare_answers
    assert compare([4, 1], [4, 1], rows, 2, 0.0, tokenizer)["outcome"] == "equal"
    assert compare([4, 1], [4, 3], rows, 2, 0.2, tokenizer)["outcome"] == "tie"
    assert compare([4, 1], [4, 3], rows, 2, 0.05, tokenizer)["outcome"] == "differs"
    assert compare([4, 1], [4], rows, 2, 9.0, tokenizer)["outcome"] == "differs"


@pytest.mark.process
def test_a_damaged_export_ends_with_1_and_leaves_nothing(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's own process, started as it is for users."""
    write, findings, run = Merge.write, [], verify.run

    def damaged(self: Merge, folder: Path, shard: int) -> None:
        write(self, folder, shard)
        flip(folder, "model.layers.0.self_attn.q_proj.weight")

    monkeypatch.setattr(Merge, "write", damaged)
    monkeypatch.setattr(verify, "run", lambda job: findings.append(run(job)) or findings[-1])
    out, report = tmp_path / "out", tmp_path / "report.json"
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(out), "--json", str(report)], 1)
    assert "does not match the run: the tensor model.layers.0.self_attn.q_proj.weight is off" in words
    assert not out.exists() and not list(tmp_path.glob(".*"))
    assert findings[0]["imported_finetune"] is False and findings[0]["passed"] is False
    assert json.loads(report.read_text())["verification"]["passed"] is False


@pytest.mark.process
@pytest.mark.campaign
def test_from_training_to_a_merged_model(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    data = ["--data.train_file", str(tiny_data / "train.jsonl"), "--model.model_name_or_path", str(tiny_model)]
    settings = [*data, "--training.max_steps", "4", "--training.save_steps", "2", "--training.learning_rate", "1e-2"]
    launch.train("1 rank", [*settings, "--model.backend", "transformers"], out=tmp_path / "run", cache=tmp_path)
    for given in ("run", "run/checkpoint-2"):
        out = tmp_path / given.replace("/", "-merged-")
        out = out.with_name(f"{out.name}-out")
        arguments = [str(tmp_path / given), "--to", "merged", "--out", str(out), "--json", str(tmp_path / "r.json")]
        done = launch.python(["-m", "finetune.export", *arguments], cache=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "r.json").read_text())["verification"]["imported_finetune"] is False
        assert load(out) is not None
    weights = tmp_path / "run" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum in run.json"):
        source.find(tmp_path / "run")


# --- GGUF -------------------------------------------------------------------------------------------------------------

CONVERTER = """
import sys
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
    assert "pip install 'finetune[gguf]'" in ends(capsys, [str(run_folder), "--to", "gguf", "--out", str(out)], 2)


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


# --- the Hub ----------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's interface as an upload needs."""

    requests: list[tuple[str, str, bytes]] = []
    may_write = True

    def do_GET(self) -> None:  # noqa: N802
        self.answer()

    def do_POST(self) -> None:  # noqa: N802
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path, body))
        good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        status, content = 200, {}
        if not good:
            status, content = 401, {"error": "Invalid credentials"}
        elif self.path.endswith("whoami-v2"):
            content = {"name": "me", "orgs": [{"name": "our-lab"}]}
        elif self.path.endswith("repos/create"):
            content = {"url": f"http://{self.headers['Host']}/me/model", "name": "me/model"}
        elif "preupload" in self.path and not self.may_write:
            status, content = 403, {"error": "Forbidden"}
        elif "preupload" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            content = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        elif "commit" in self.path:
            content = {
                "commitUrl": f"http://{self.headers['Host']}/me/model/commit/" + "1" * 40,
                "commitOid": "1" * 40,
                "hookOutput": "",
            }
        elif "revision" in self.path:
            content = {"id": "me/model", "sha": "1" * 40, "siblings": [], "tags": []}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3h"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants, hf_api

    Hub.requests, Hub.may_write = [], True
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{running.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield Hub
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.usefixtures("in_this_process")
def test_an_upload_is_dry_unless_asked_for(
    run_folder: Path, tmp_path: Path, server: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    arguments = [str(run_folder), "--to", "hub", "--repo", "me/model", "--out", str(out), "--json", str(report)]
    assert command.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Would upload to me/model (private)" in shown and "adapter_model.safetensors" in shown
    assert "export.json" not in shown and server.requests == []
    (out / "README.md").write_text("filled in")
    assert command.main([*arguments, "--upload"]) == 0
    shown = capsys.readouterr()
    assert "Using the earlier export" in shown.out and "/me/model/commit/1111" in shown.out
    (create,) = [body for _, path, body in server.requests if path.endswith("repos/create")]
    assert "private" in json.loads(create).values() or json.loads(create)["private"] is True
    (commit,) = [body for _, path, body in server.requests if "commit" in path]
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()} - {None}
    assert sent == {one["name"] for one in hub.files(out)} and "export.json" not in sent
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written and TOKEN not in shown.out + shown.err
    (out / "tokenizer.json").write_text("{}")
    assert "has changed since its export: tokenizer.json" in ends(capsys, [*arguments, "--upload"], 2)


def test_tokens_and_namespaces_are_checked_before_anything_is_written(
    run_folder: Path,
    tmp_path: Path,
    server: type[Hub],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    def words(repo: str, code: int = 2) -> str:
        given = [str(run_folder), "--to", "hub", "--repo", repo, "--out", str(tmp_path / "out"), "--upload"]
        found = ends(capsys, given, code)
        assert not (tmp_path / "out").exists() and TOKEN not in found
        return found

    assert "belongs to me, who cannot write there. Use one of me/..., our-lab/..." in words("someone/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in words("me/model")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert "There is no token" in words("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in words("me/model")


@pytest.mark.usefixtures("in_this_process")
def test_a_token_that_may_only_read(
    run_folder: Path, tmp_path: Path, server: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    server.may_write = False
    given = [str(run_folder), "--to", "hub", "--repo", "our-lab/model", "--out", str(tmp_path / "out"), "--upload"]
    assert "the token may only read it (status 403)" in ends(capsys, given, 1)


# --- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_has_names_instead_of_paths(run_folder: Path) -> None:
    found = source.find(run_folder)
    record = found.record
    record["config"]["data"] |= {"dataset_name": "org/data", "system_prompt": "private words"}
    record["config"]["training"] = {"max_steps": 3, "output_dir": "/home/me/out", "extra": {"tf32": True}}
    record["config"]["model"]["hub_token"] = TOKEN
    record |= {"versions": {"torch": "2.13"}, "losses": [2.0, 1.5], "eval_loss_before": 2.5}
    text = card.text(found, "merged", "all equal")
    for hidden in ("/home/me", str(run_folder.parent), "private words", TOKEN):
        assert hidden not in text
    for shown in ("rows.jsonl", "org/data", "max_steps: 3", "tf32: true", "1.2500", "torch 2.13", "all equal"):
        assert shown in text
    assert card.shortened("org/name") == "org/name" and card.shortened("C:\\a\\b.jsonl") == "b.jsonl"
    assert card.shortened({"a": ["~/x/y", 3, "s3://bucket/key"]}) == {"a": ["y", 3, "s3://bucket/key"]}


def test_the_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from finetune import cli

    assert cli.main(["export", "--help"]) == commands.DONE
    assert "RUN|CHECKPOINT --to FORM --out DIR" in capsys.readouterr().out


def test_answers_of_a_check_end_where_the_positions_do(tmp_path: Path, check: ModuleType) -> None:
    """GPT-2 has a table of them: beyond it is an IndexError."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny.make_tokenizer(tmp_path)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=24)
    ).save_pretrained(tmp_path)
    job: dict[str, Any] = {"model": tmp_path, "exported": tmp_path, "tokenizer": tmp_path, "max_new_tokens": 24}
    found = check.check(job | {"prompts": ["the cat", "the cat runs over " * 8]})
    assert found["passed"] and [one["tokens"] for one in found["answers"]] == [14, 1]
