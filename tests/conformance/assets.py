"""Local stand-ins for the Hub assets that TRL's tests ask for, in the layout of the caches that the libraries read.

python -m tests.conformance.assets FOLDER writes FOLDER/hub (HF_HUB_CACHE) and FOLDER/datasets (HF_DATASETS_CACHE).
With HF_HUB_OFFLINE=1 `from_pretrained("trl-internal-testing/...")` and `load_dataset("trl-internal-testing/zen", ...)`
then find them by their hub names; no library is patched. Sizes follow the originals when TRL's tests depend on them:
17 rows to train on and 2 to evaluate, models of two layers and 8 dimensions in bfloat16. Texts, tokenizers and weights
are made here; chat templates are those that the installed TRL knows, because it recognizes them by their text.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ORGANIZATION = "trl-internal-testing"
COMMIT = "0" * 40  # of every stand-in in the Hub's cache
EVAL_ROWS = 2
VERSIONS_OF = ("transformers", "datasets", "trl", "torch")  # a stand-in is made anew when one of them changes

# --- models: the name on the Hub (without organization) and what makes it ---------------------------------------------

SMALL: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
# Class of the model, name of TRL's chat template (or None), end of a text, padding, further fields of the config.
MODELS: dict[str, tuple[str, str | None, str, str | None, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", "qwen2_5", "<|im_end|>", "<|endoftext|>", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", "<|im_end|>", "<|endoftext|>", {}),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", "llama3_2", "<|eot_id|>", None, {}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", None, "</s>", None, {}),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", None, "<|endoftext|>", None, {}),
    "tiny-Cohere2ForCausalLM": (
        *("Cohere2ForCausalLM", "cohere2", "<|END_OF_TURN_TOKEN|>", "<PAD>"),
        {"logit_scale": 1.0},
    ),
    "tiny-Olmo3ForCausalLM": ("Olmo3ForCausalLM", None, "<|endoftext|>", "<|pad|>", {}),
    "tiny-Lfm2ForCausalLM": (
        *("Lfm2ForCausalLM", "lfm2", "<|im_end|>", "<|pad|>"),
        {"full_attn_idxs": [1], "block_multiple_of": 8, "use_cache": False},
    ),
    "tiny-Lfm2ForCausalLM-2.5": (
        *("Lfm2ForCausalLM", "lfm2_2_5", "<|im_end|>", "<|pad|>"),
        {"full_attn_idxs": [1], "block_multiple_of": 8, "use_cache": False},
    ),
    "tiny-Qwen3MoeForCausalLM": (
        *("Qwen3MoeForCausalLM", "qwen3", "<|im_end|>", "<|endoftext|>"),
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "tiny-Glm4MoeForCausalLM": (
        *("Glm4MoeForCausalLM", "glm4moe", "<|endoftext|>", None),
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 2},
    ),
    "tiny-GptOssForCausalLM": (
        *("GptOssForCausalLM", "gptoss", "<|return|>", "<|endoftext|>"),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "tiny-NemotronHForCausalLM-nano": (
        *("NemotronHForCausalLM", "nemotron_3_nano", "<|im_end|>", None),
        {
            **{"hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": None},
            **{"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16},
            **{"mamba_d_conv": 4, "mamba_expand": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
        },
    ),
    "tiny-RemoteForCausalLM": ("Qwen2ForCausalLM", "qwen2_5", "<|im_end|>", "<|endoftext|>", {}),
}
TOKENIZERS = {"Qwen/Qwen3-4B": ("qwen3", "<|im_end|>", "<|endoftext|>")}  # of which only the tokenizer is asked for
# Vision-language models have a configuration and a tokenizer here: enough for a trainer that refuses them.
VISION = {
    "tiny-Gemma3ForConditionalGeneration": "gemma3",
    "tiny-Gemma4ForConditionalGeneration": "gemma4",
    "tiny-LlavaForConditionalGeneration": "llava",
    "tiny-LlavaNextForConditionalGeneration": "llava_next",
    "tiny-Qwen2VLForConditionalGeneration": "qwen2_vl",
    "tiny-Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "tiny-Qwen3VLForConditionalGeneration": "qwen3_vl",
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": "qwen3_5",
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": "qwen3_5_moe",
}
DATASETS = ("zen", "toolcall", "harmony", "zen-image", "zen-multi-image")

REMOTE_CODE = {
    "configuration_remote.py": (
        'from transformers import Qwen2Config\n\n\nclass RemoteConfig(Qwen2Config):\n    model_type = "remote"\n'
    ),
    "modeling_remote.py": (
        "from transformers import Qwen2ForCausalLM\n\n"
        "from .configuration_remote import RemoteConfig\n\n\n"
        "class RemoteForCausalLM(Qwen2ForCausalLM):\n"
        "    config_class = RemoteConfig\n"
    ),
}


def known() -> dict[str, str]:
    """What each asset by its name on the Hub stands in with: "model", "tokenizer", "dataset", or "configuration"."""
    names = {f"{ORGANIZATION}/{name}": "model" for name in MODELS}
    names |= {f"{ORGANIZATION}/{name}": "dataset" for name in DATASETS}
    names |= {f"{ORGANIZATION}/{name}": "configuration" for name in VISION}
    return names | dict.fromkeys(TOKENIZERS, "tokenizer")


def key() -> str:
    """Of the stand-ins that this file makes with the installed libraries."""
    versions = "".join(f"{name}=={importlib.metadata.version(name)}\n" for name in VERSIONS_OF)
    return hashlib.sha256(Path(__file__).read_bytes() + versions.encode()).hexdigest()[:16]


def write(folder: Path) -> None:
    """Make all stand-ins below `folder`, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        root = Path(made, "root")
        sentences = zen()
        write_datasets(root / "datasets", sentences)
        write_models(root / "hub", sentences)
        if not folder.exists():
            root.rename(folder)


# --- datasets ---------------------------------------------------------------------------------------------------------


def zen() -> list[str]:
    """The 19 sentences of the Zen of Python, from the standard library."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()
    return [line for line in lines[1:] if line]


def configurations(sentences: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by dataset and configuration."""
    halves = [_halves(sentence) for sentence in sentences]
    ask = [{"role": "user", "content": f"How does this line end: {start}?"} for start, _ in halves]
    answer = [{"role": "assistant", "content": end.strip()} for _, end in halves]
    wrong = [f"{start} {word}." for (start, _), word in zip(halves, _other_words(sentences), strict=True)]
    talks = list(zip(ask, answer, strict=True))
    zen_rows = {
        "standard_language_modeling": [{"text": sentence} for sentence in sentences],
        "standard_prompt_completion": [{"prompt": start, "completion": end} for start, end in halves],
        "standard_implicit_prompt_preference": [
            {"chosen": right, "rejected": other} for right, other in zip(sentences, wrong, strict=True)
        ],
        "conversational_language_modeling": [{"messages": [user, reply]} for user, reply in talks],
        "conversational_prompt_completion": [{"prompt": [user], "completion": [reply]} for user, reply in talks],
    }
    thought = [(user, {**reply, "thinking": "The line is well known."}) for user, reply in talks]
    efforts = [{"reasoning_effort": ("low", "medium", "high")[n % 3]} for n in range(len(talks))]
    harmony = {
        "language_modeling": [
            {"messages": [user, reply], "chat_template_kwargs": effort}
            for (user, reply), effort in zip(thought, efforts, strict=True)
        ],
        "prompt_completion": [
            {"prompt": [user], "completion": [reply], "chat_template_kwargs": effort}
            for (user, reply), effort in zip(thought, efforts, strict=True)
        ],
    }
    tools = {"language_modeling": [_tool_call(n) for n in range(len(sentences))]}
    return {"zen": zen_rows, "harmony": harmony, "toolcall": tools}


def _halves(sentence: str) -> tuple[str, str]:
    words = sentence.split(" ")
    middle = (len(words) + 1) // 2
    return " ".join(words[:middle]), " " + " ".join(words[middle:])


def _other_words(sentences: list[str]) -> list[str]:
    last = [re.sub(r"\W", "", sentence.split(" ")[-1]) for sentence in sentences]
    return last[1:] + last[:1]


def _tool_call(number: int) -> dict[str, Any]:
    """A conversation with one tool call. Arguments differ between rows, so Arrow adds nulls; `tools` is JSON."""
    name, argument, value, answer = (
        ("start_timer", "duration", 60 * (number + 1), "The timer runs."),
        ("control_light", "room", f"room {number}", "The light is on."),
        ("get_weather", "city", f"city {number}", "It will rain."),
    )[number % 3]
    kind = "integer" if isinstance(value, int) else "string"
    parameters = {
        **{"type": "object", "required": [argument]},
        "properties": {argument: {"type": kind, "description": f"The {argument}."}},
    }
    tool = {
        "type": "function",
        "function": {"name": name, "description": f"Calls {name}.", "parameters": parameters},
    }
    call = {"type": "function", "function": {"name": name, "arguments": {argument: value}}}
    return {
        "messages": [
            {"role": "user", "content": f"Please call {name} with {value}."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": str(value)},
            {"role": "assistant", "content": answer},
        ],
        "tools": json.dumps([tool]),
    }


def write_datasets(cache: Path, sentences: list[str]) -> None:
    """As `datasets` keeps what it has downloaded: cache/<organization>___<name>/<configuration>/<version>/<hash>/."""
    from datasets import Dataset

    for name, rows_by_configuration in configurations(sentences).items():
        for configuration, rows in rows_by_configuration.items():
            _write_dataset(cache, name, configuration, Dataset.from_list(rows))
    if importlib.util.find_spec("PIL"):
        for name, configuration, dataset in _with_images(sentences):
            _write_dataset(cache, name, configuration, dataset)


def _write_dataset(cache: Path, name: str, configuration: str, dataset: Any) -> None:
    from datasets import DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    folder = cache / f"{ORGANIZATION}___{name}" / configuration / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    splits = SplitDict()
    cut = len(dataset) - EVAL_ROWS
    for split, numbers in {"train": range(cut), "test": range(cut, len(dataset))}.items():
        with ArrowWriter(path=str(folder / f"{name}-{split}.arrow"), features=dataset.features) as writer:
            writer.write_table(dataset.select(numbers).flatten_indices().data.table)
            rows, size = writer.finalize()
        splits.add(SplitInfo(name=split, num_bytes=size, num_examples=rows, dataset_name=name))
    DatasetInfo(
        features=dataset.features,
        **{"dataset_name": name, "config_name": configuration, "builder_name": "parquet"},
        **{"version": "0.0.0", "splits": splits, "download_size": 0, "dataset_size": splits.total_num_examples},
    ).write_to_directory(str(folder))


def _with_images(sentences: list[str]) -> Iterable[tuple[str, str, Any]]:
    """The conversations again, each with an image of one color."""
    from datasets import Dataset, Image, List
    from PIL import Image as PILImage

    zen_rows = configurations(sentences)["zen"]
    pictures = []
    for number in range(len(sentences)):
        encoded = io.BytesIO()
        PILImage.new("RGB", (32, 32), color=(12 * number, 128, 255 - 12 * number)).save(encoded, format="PNG")
        pictures.append({"bytes": encoded.getvalue(), "path": None})
    for configuration in ("conversational_language_modeling", "conversational_prompt_completion"):
        one = Dataset.from_list(zen_rows[configuration]).add_column("image", pictures).cast_column("image", Image())
        yield "zen-image", configuration, one
        several = Dataset.from_list(zen_rows[configuration]).add_column("images", [[image] for image in pictures])
        yield "zen-multi-image", configuration, several.cast_column("images", List(Image()))


# --- models and tokenizers --------------------------------------------------------------------------------------------


def write_models(cache: Path, sentences: list[str]) -> None:
    """As `huggingface_hub` keeps what it has downloaded: cache/models--<organization>--<name>/{refs,snapshots}/."""
    texts = [*sentences, *(json.dumps(_tool_call(number)) for number in range(len(sentences)))]
    texts += [row["messages"][0]["content"] for row in _talks(sentences)]
    for name, (model_class, template, eos, pad, fields) in MODELS.items():
        folder = _snapshot(cache, f"{ORGANIZATION}/{name}")
        tokenizer = _write_tokenizer(folder, texts, template, eos, pad)
        _write_model(folder, model_class, tokenizer, fields)
    _add_remote_code(_snapshot(cache, f"{ORGANIZATION}/tiny-RemoteForCausalLM"))
    for name, (template, eos, pad) in TOKENIZERS.items():
        folder = _snapshot(cache, name)
        _write_tokenizer(folder, texts, template, eos, pad)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # `AutoTokenizer` reads it first
    for name, model_type in VISION.items():
        folder = _snapshot(cache, f"{ORGANIZATION}/{name}")
        _write_tokenizer(folder, texts, "qwen2_5", "<|im_end|>", "<|endoftext|>")
        config = {"model_type": model_type, "architectures": [name.removeprefix("tiny-").partition("-")[0]]}
        (folder / "config.json").write_text(json.dumps(config))


def _talks(sentences: list[str]) -> list[dict[str, Any]]:
    return configurations(sentences)["zen"]["conversational_language_modeling"]


def _snapshot(cache: Path, name: str) -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return folder


def chat_template(name: str) -> str:
    """One of those that the installed TRL ships."""
    specification = importlib.util.find_spec("trl")
    assert specification and specification.origin
    return (Path(specification.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _write_tokenizer(folder: Path, texts: list[str], template: str | None, eos: str, pad: str | None) -> Any:
    """A byte-level BPE in which a word of `texts` is about one token, with the template's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    source = chat_template(template) if template else None
    special = list(dict.fromkeys([*filter(None, [pad]), eos, *re.findall(r"<\|\w+\|>", source or "")]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad, model_max_length=32768)
    tokenizer.chat_template = source
    tokenizer.save_pretrained(folder)
    return tokenizer


def _write_model(folder: Path, name: str, tokenizer: Any, fields: dict[str, Any]) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    sizes = {field: value for field, value in (SMALL | fields).items() if value is not None}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    # Larger than the default, so that no gradient of so small a model vanishes.
    config = model_class.config_class(vocab_size=len(tokenizer), initializer_range=0.2, **ends, **sizes)
    model_class(config).to(dtype=torch.bfloat16).save_pretrained(folder)


def _add_remote_code(folder: Path) -> None:
    for name, code in REMOTE_CODE.items():
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))


def copy(made: Path, folder: Path) -> None:
    """For one run: `datasets` writes what `map` computes beside the rows."""
    shutil.copytree(made, folder, symlinks=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    write(Path(sys.argv[1]).resolve())
