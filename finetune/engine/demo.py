"""The embedded demo: what `accelerate launch -m finetune.train` trains without --config.

A small Llama with random weights, its tokenizer and an instruction dataset, generated from a seed without a download.
Once they are on disk, they take the same code path as a user's own model and data.

The task is to follow eight kinds of instruction about small scenes, such as "What color is the last thing? Anna has a
red key. Ben has a blue map." No fact (owner, color and thing) of a held-out scene occurs in training, so a correct
answer is read from the prompt, not memorized.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from finetune.config import Config
from finetune.errors import RunError
from finetune.runtime.types import JsonObject

VERSION = 1  # increment when the output of materialize changes: folders of other versions are not reused
TRAIN_ROWS = 6144
EVAL_ROWS = 192
KINDS = 8
MAX_LENGTH = 64  # tokens; no rendered row is longer
MAX_NEW_TOKENS = 16  # no answer is longer, its end-of-turn token included
GLOBAL_BATCH_SIZE = 64

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Karin Leo".split()
COLORS = "red blue green black white brown pink grey purple yellow golden silver".split()
THINGS = "key map hat cup book lamp ball coat bag pen box ring".split()

END_OF_TEXT, TURN_START, TURN_END, PAD = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (  # ChatML
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """What `materialize` wrote: a Hugging Face model folder and two JSONL files of {"messages": [user, assistant]}."""

    model_dir: Path
    train_file: Path
    eval_file: Path


class Fact(NamedTuple):
    name: str
    color: str
    thing: str

    def __str__(self) -> str:
        return f"{self.name} has a {self.color} {self.thing}."


def materialize(folder: Path, seed: int = 0) -> DemoPaths:
    """Write the demo of this seed under `folder`, or reuse a complete one from an earlier call.

    The same seed and library versions give the same bytes. Several processes may call it at once: one writes, the
    others wait. A killed call leaves nothing that a later one would mistake for the demo. Imports transformers, so
    Unsloth, if used, must be imported first.

    Raises:
        RunError: the folder cannot be written.
    """
    home = _home(folder, seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            if not _is_complete(home):
                unfinished = home.with_name(f"{home.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                _write(_paths(unfinished), seed)
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


def _home(folder: Path, seed: int) -> Path:
    return folder / f"demo-v{VERSION}-seed{seed}"


def _paths(home: Path) -> DemoPaths:
    return DemoPaths(model_dir=home / "model", train_file=home / "train.jsonl", eval_file=home / "eval.jsonl")


def _is_complete(home: Path) -> bool:
    paths = _paths(home)
    files = (paths.train_file, paths.eval_file, *(paths.model_dir / name for name in MODEL_FILES))
    return all(file.is_file() for file in files)


def _write(paths: DemoPaths, seed: int) -> None:
    train, held_out = rows(seed)
    paths.model_dir.mkdir(parents=True)
    write_model(paths.model_dir, [message["content"] for row in train for message in row["messages"]], seed)
    for file, content in ((paths.train_file, train), (paths.eval_file, held_out)):
        file.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def rows(seed: int) -> tuple[list[JsonObject], list[JsonObject]]:
    """Training rows and held-out rows, {"messages": [user, assistant]} each, with equal shares of every kind of
    instruction.

    No prompt occurs twice, and no fact of a held-out prompt occurs in a training prompt.
    """
    rng = random.Random(seed)
    facts = [Fact(*words) for words in itertools.product(NAMES, COLORS, THINGS)]
    rng.shuffle(facts)
    held_out, train = facts[: len(facts) // 8], facts[len(facts) // 8 :]
    return _rows(rng, train, TRAIN_ROWS), _rows(rng, held_out, EVAL_ROWS)


def _rows(rng: random.Random, facts: Sequence[Fact], count: int) -> list[JsonObject]:
    answers: dict[str, str] = {}
    while len(answers) < count:
        scene = rng.sample(facts, rng.choice((2, 3)))
        if all(len(set(words)) == len(scene) for words in zip(*scene, strict=True)):  # no name, color or thing twice
            prompt, answer = make_instruction(len(answers) % KINDS, scene)
            answers[prompt] = answer
    return [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in answers.items()
    ]


def make_instruction(kind: int, facts: Sequence[Fact]) -> tuple[str, str]:
    """The prompt of this kind about a scene of two or three facts, and its answer."""
    scene = " ".join(map(str, facts))
    first, last = facts[0], facts[-1]
    names = [fact.name for fact in facts]
    return (
        (f"Who is named first? {scene}", first.name),
        (f"Who is named last? {scene}", last.name),
        (f"What does the first person have? {scene}", f"a {first.color} {first.thing}"),
        (f"What color is the last thing? {scene}", f"It is {last.color}."),
        (f"List the names: {scene}", ", ".join(names)),
        (f"List the names backwards: {scene}", ", ".join(reversed(names))),
        (f"List the names in capitals: {scene}", ", ".join(names).upper()),
        (f"Repeat the last sentence: {scene}", str(last)),
    )[kind]


def write_model(folder: Path, texts: Iterable[str], seed: int) -> None:
    """A Llama of half a million random weights, and a byte-level BPE tokenizer trained on `texts`."""
    import torch  # here, not above: Unsloth must be imported before transformers
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        itertools.chain(texts, ("system", "user", "assistant")),
        trainers.BpeTrainer(
            vocab_size=1024,  # an upper bound: merging ends near 500, when every word is one token
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any text can be encoded
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    ids: JsonObject = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # CPU only: torch.manual_seed would also seed the GPUs
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
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
No --config was given: this is the demo. It trains a very small model (half a million parameters) that starts from
random weights, not a pretrained one, on instructions made up for it; nothing is downloaded. All its weights are
trained (full fine-tuning), because a LoRA adapter on random weights has nothing to build on. The model is of no use
afterwards; the run shows that the installation works, by the same code that fine-tunes your own model.

To fine-tune your own model on your own data, write my.yaml, or let `finetune init` write it:

    model:
      model_name_or_path: unsloth/Llama-3.2-1B-Instruct   # a Hub name or a folder
    data:
      train_file: my_data.jsonl                           # {"messages": [{"role": "user", "content": "..."}, ...]}
    training:
      output_dir: outputs/my-model

and start it:

    accelerate launch -m finetune.train --config my.yaml
"""


def configure(config: Config, folder: Path, world_size: int) -> Config:
    """`config` with the demo's model, data and settings, except for keys that the user has set."""
    paths = _paths(_home(folder, 0))
    own = overrides(world_size)
    own["model"]["model_name_or_path"] = str(paths.model_dir)
    own["data"] |= {"train_file": str(paths.train_file), "eval_file": str(paths.eval_file)}
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
