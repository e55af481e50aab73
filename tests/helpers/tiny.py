"""A model, a tokenizer and data small enough for a test and real in every other way, made from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
WORDS = "the cat dog runs over a red blue hill and sees seven small green birds that sing while rain falls".split()


def make_tokenizer(folder: Path, vocab_size: int = 400):
    """A byte-level BPE with ChatML's special tokens, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2) -> Path:
    """A Llama of about 100,000 parameters with random weights, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def checkpoint_activations(model: Any) -> None:
    """Turn activation checkpointing on. transformers 5.24 deprecates the name that 5.17 has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def make_rows(path: Path, count: int, *, seed: int = 0, longest: int = 40) -> Path:
    """Conversations of very different lengths, as JSON lines of `messages`."""
    rng = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": "user", "content": say(longest)}, {"role": "assistant", "content": say(longest)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
