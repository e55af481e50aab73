"""The embedded demo: what `finetune train --demo` trains.

A small Llama with random weights from a seed; its tokenizer and an instruction dataset are files of this package. Once
they are on disk, they take the same code path as a user's own model and data.

The task is to follow eight kinds of instruction about small scenes, such as "What color is the last thing? Anna has a
red key. Ben has a blue map." No fact (owner, color and thing) of a held-out scene occurs in training, so a correct
answer is read from the prompt, not memorized.
"""

import gzip
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from finetune.config import Config
from finetune.errors import RunError
from finetune.runtime.types import JsonObject

VERSION = 1  # increment when the output of materialize changes: folders of other versions are not reused
EVAL_ROWS = 192
MAX_LENGTH = 64  # tokens; no rendered row is longer
MAX_NEW_TOKENS = 16  # no answer is longer, its end-of-turn token included
GLOBAL_BATCH_SIZE = 64

DATA = Path(__file__).with_name("demo_data")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)


@dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """What `materialize` wrote: a Hugging Face model folder and two JSONL files of {"messages": [user, assistant]}."""

    model_dir: Path
    train_file: Path
    eval_file: Path


def materialize(folder: Path) -> DemoPaths:
    """Write the demo under `folder`, or reuse a complete one from an earlier call.

    The same library versions give the same bytes. Several processes may call it at once: one writes, the others wait. A
    killed call leaves nothing that a later one would mistake for the demo. Imports transformers, so Unsloth, if used,
    must be imported first.

    Raises:
        RunError: the folder cannot be written.
    """
    home = _home(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            if not _is_complete(home):
                unfinished = home.with_name(f"{home.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                _write(_paths(unfinished))
                if not _is_complete(unfinished):  # never let the next run fail on what this one wrote
                    raise OSError(f"files are missing in {unfinished}")
                shutil.rmtree(home, ignore_errors=True)
                unfinished.rename(home)
    except OSError as error:
        raise RunError(
            f"The demo could not be written under {folder}: {error}. It needs a writable folder with 10 MB free. "
            "Free some space or choose another folder."
        ) from error
    return _paths(home)


def _home(folder: Path) -> Path:
    return folder / f"demo-v{VERSION}-seed0"


def _paths(home: Path) -> DemoPaths:
    return DemoPaths(model_dir=home / "model", train_file=home / "train.jsonl", eval_file=home / "eval.jsonl")


def _is_complete(home: Path) -> bool:
    paths = _paths(home)
    files = (paths.train_file, paths.eval_file, *(paths.model_dir / name for name in MODEL_FILES))
    return all(file.is_file() for file in files)


def _write(paths: DemoPaths) -> None:
    paths.model_dir.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(DATA / name, paths.model_dir / name)
    write_model(paths.model_dir)
    paths.train_file.write_bytes(gzip.decompress((DATA / "train.jsonl.gz").read_bytes()))
    shutil.copyfile(DATA / "eval.jsonl", paths.eval_file)


def write_model(folder: Path) -> None:
    """A Llama of half a million random weights."""
    import torch  # here, not above: Unsloth must be imported before transformers
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids: JsonObject = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}  # of the tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # CPU only: torch.manual_seed would also seed the GPUs
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=504,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                initializer_range=0.05,  # at the usual 0.02, meant for wide models, this one needs twice the steps
                **ids,
            )
        )
    # Part by part: model.save_pretrained silently writes nothing on ranks other than 0 of a process group.
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    GenerationConfig(do_sample=False, max_new_tokens=MAX_NEW_TOKENS, **ids).save_pretrained(folder)
    tied = "lm_head.weight"  # the same tensor as the input embeddings
    weights = {name: weight for name, weight in model.state_dict().items() if name != tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def overrides(world_size: int = 1) -> dict[str, JsonObject]:
    """The configuration values of the demo, by section, without the paths.

    Full fine-tuning, because an adapter on random weights has nothing to adapt. Float32, for equal results on a CPU and
    on a GPU.
    """
    return {
        "model": {"full_finetuning": True, "load_in_4bit": False, "dtype": "float32"},
        "data": {"max_length": MAX_LENGTH, "packing": False, "assistant_only_loss": True},
        "training": {
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "per_device_train_batch_size": max(1, GLOBAL_BATCH_SIZE // world_size),
            "max_steps": 260,
            "eval_steps": 52,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 30,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "optim": "adamw_torch",
            "gradient_checkpointing": False,
        },
    }


def introduction() -> str:
    """The text printed before the demo trains."""
    return """\
This is the demo. It trains a very small model (half a million parameters) that starts from random weights, not a
pretrained one, on instructions made up for it; nothing is downloaded. All its weights are trained (full fine-tuning),
because a LoRA adapter on random weights has nothing to build on. The model is of no use afterwards; the run shows that
the installation works, by the same code that fine-tunes your own model.

To fine-tune your own model on your own data, let `finetune init` write my.yaml, then start `finetune train my.yaml`.
"""


def configure(config: Config, folder: Path, world_size: int) -> Config:
    """`config` with the demo's model, data and settings, except for keys that the user has set."""
    paths = _paths(_home(folder))
    own = overrides(world_size)
    own["model"]["model_name_or_path"] = str(paths.model_dir)
    own["data"] |= {"train_file": str(paths.train_file), "eval_file": str(paths.eval_file)}
    own["training"]["output_dir"] = "outputs/demo"
    own["logging"] = {"logging_steps": 25, "generate_samples": EVAL_ROWS}
    given = set(config.given)
    if any(name.startswith("lora.") for name in given):  # asks for an adapter
        given.add("model.full_finetuning")
    if given & {"training.global_batch_size", "training.gradient_accumulation_steps"}:
        given.add("training.per_device_train_batch_size")
    if "training.num_train_epochs" in given:
        own["training"]["max_steps"] = -1
    sections = {
        section: replace(
            getattr(config, section), **{key: value for key, value in values.items() if f"{section}.{key}" not in given}
        )
        for section, values in own.items()
    }
    return replace(config, **sections)
