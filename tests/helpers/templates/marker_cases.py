"""Tokenizers and rendered conversations of chat templates, for the markers that can be derived from them."""

from __future__ import annotations

import random
import re
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, CORPUS, MISTRAL_V3, build_tokenizer

# Templates outside the families above: how turns start and end, and what the generation prompt is.
_IM = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_IM_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_IM_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set words = m.content.split('</think>') %}{% if loop.last and words|length > 1 %}"
    "<think>{{ words[0].split('<think>')[-1].strip() }}{% endif %}</think>{{ words[-1].strip() }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)


def _empty_thought(where: str) -> tuple:
    thought = f"{{% if m.role == 'assistant' and {where} %}}<think>\n\n</think>\n\n{{% endif %}}"
    return _IM_TURNS.replace("{{ m.content", thought + "{{ m.content") + _IM_PROMPT, _IM, "<|im_end|>", None


TEMPLATES = {  # template, special tokens, EOS, BOS
    **{name: (case.template, case.tokens, case.eos, case.bos) for name, case in CHAT_TEMPLATES.items()},
    "mistral v0.3": (MISTRAL_V3, ("[INST]", "[/INST]"), "</s>", "<s>"),
    "glm": (_GLM, ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>", "</think>"), "<|endoftext|>", None),
    "deepseek": (_DEEPSEEK, ("<U>", "<A>"), "<end>", "<begin>"),
    "an empty thought in every turn without": _empty_thought("'<think>' not in m.content"),
    "an empty thought in the last turn": _empty_thought("loop.last"),
    "an empty thought in every turn": _empty_thought("true"),
    "no generation prompt": (_IM_TURNS, _IM, "<|endoftext|>", None),
    "the prompt is a thought": (
        CHAT_TEMPLATES["mistral"].template + "{% if add_generation_prompt %}<think>{% endif %}",
        ("[INST]", "[/INST]", "<think>"), "</s>", "<s>",
    ),
    "bos opens turns": (_IM_TURNS + _IM_PROMPT, _IM, "<|im_end|>", "<|im_start|>"),
    "sentencepiece": (CHAT_TEMPLATES["chatml"].template, (), "<|im_end|>", "<s>"),
    "sentencepiece, llama 2": (CHAT_TEMPLATES["mistral"].template, (), "</s>", "<s>"),
}  # fmt: skip


SHIPPED_EOS = {"llama-3": "<|eot_id|>", "llama-3.1": "<|eot_id|>", "qwen-2.5": "<|im_end|>"}  # the others state theirs


SHIPPED_TOKEN = re.compile(r"<\|\w+\|?>|<\w+\|>|<\w+_of_turn>|</?think>|</?tool_call>|\[/?INST\]")


def template_cases(shipped: dict[str, tuple], folder: Path) -> list[dict]:
    """Tokenizers and rendered conversations for TEMPLATES and for `shipped`: template and EOS by name."""
    templates = dict(TEMPLATES)
    for name, (template, eos, *_) in shipped.items():
        if template in [known for known, *_ in templates.values()]:
            continue  # the same template under another name
        eos = eos[1] if isinstance(eos, tuple) else SHIPPED_EOS.get(name, "</s>") if eos == "eos_token" else eos
        tokens = tuple(SHIPPED_TOKEN.findall(template))
        templates[name] = (template, tokens, eos, "<s>")
        templates[f"{name}, another eos"] = (template, tokens, "<|another|>", "<s>")
    cases = []
    for number, (name, (template, tokens, eos, bos)) in enumerate(templates.items()):
        build = sentencepiece_tokenizer if name.startswith("sentencepiece") else build_tokenizer
        tokenizer = build(tokens, eos, bos)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / str(number))
        ids = tokenizer(conversations(name, tokenizer), add_special_tokens=False).input_ids
        one = {"name": f"template: {name}", "tokenizer": str(folder / str(number)), "input_ids": ids}
        cases.append(one | {"last_only": False})
    return cases


def conversations(name: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """One to three exchanges, with and without system prompt and thoughts: complete, truncated, and unanswered."""
    rng = random.Random(name)

    def say() -> str:
        return " ".join(rng.choices(["the cat", "runs", "user\n", "assistant\n", "1", "naïve", "}", "x\ny"], k=4))

    texts = []
    for turns in (1, 2, 3):
        for system, thought in ((False, ""), (True, ""), (False, "<think>\nhm the\n</think>\n\n")):
            messages = [{"role": "system", "content": say()}] * system
            for _ in range(turns):
                messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": thought + say()}]
            try:
                whole = tokenizer.apply_chat_template(messages, tokenize=False)
                asked = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            except Exception:  # the template does not support system prompts
                assert system, name
                continue
            texts += [whole, whole[:-9], asked + "the cat"]
    return texts


def sentencepiece_tokenizer(tokens: tuple[str, ...], eos: str, bos: str) -> PreTrainedTokenizerFast:
    """A tokenizer like that of Llama 2: a space before the text, and "<|im_start|>" is not a special token."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[attr-defined]
    backend.decoder = decoders.Sequence(  # type: ignore[attr-defined]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", bos, eos, *tokens, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=[*string.printable, "▁"], show_progress=False
    )
    backend.train_from_iterator([*CORPUS, "<|im_start|> [INST] [/INST]"] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos, unk_token="<unk>")
