"""The embedded demo: what `accelerate launch -m finetune.train` trains when it is given no --config.

A small Llama with random weights, its tokenizer and an instruction data set, made from code and a seed: no download.
From the folder written here on, everything is the code path of a user's own model and data.

The task is to follow seven kinds of instruction about small scenes ("Anna has a red key. Ben has a blue map. Who has
the map?"). No owner-thing pair and no colour-thing pair of a held-out prompt occurs anywhere in training, so a right
answer was read from the prompt and not remembered.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

VERSION = 1  # raise it with every change of what materialise writes: folders of another version are not reused
TRAIN_ROWS = 6144
EVAL_ROWS = 256
MAX_LENGTH = 64  # tokens; the longest row has fewer

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Karin Leo Mia Noah Olga Paul".split()
COLOURS = "red blue green black white brown pink grey purple yellow golden silver violet beige teal crimson".split()
THINGS = "key map hat cup book lamp ball coat bag pen box ring bell drum kite boat".split()

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Fact(NamedTuple):
    name: str
    colour: str
    thing: str

    @property
    def item(self) -> str:
        return f"{self.colour} {self.thing}"

    def __str__(self) -> str:
        return f"{self.name} has a {self.item}."


def _ask(kind: int, facts: Sequence[Fact]) -> tuple[str, str]:
    """One instruction about a scene of two or three facts, and its answer."""
    scene = " ".join(map(str, facts))
    first, last = facts[0], facts[-1]
    match kind:
        case 0:
            return f"Who is named first? {scene}", first.name
        case 1:
            return f"Who is named last? {scene}", last.name
        case 2:
            return f"What does the first person have? {scene}", f"a {first.item}"
        case 3:
            return f"What colour is the last thing? {scene}", last.colour
        case 4:
            return f"List the things: {scene}", ", ".join(fact.thing for fact in facts)
        case 5:
            return f"List the names: {scene}", ", ".join(fact.name for fact in facts)
        case 6:
            return f"List the names backwards: {scene}", ", ".join(fact.name for fact in reversed(facts))
        case 7:
            return f"Repeat the last sentence: {scene}", str(last)
        case 8:
            return f"List the names in capitals: {scene}", ", ".join(fact.name for fact in facts).upper()
        case _:
            return f"List the colours: {scene}", ", ".join(fact.colour for fact in facts)


KINDS = 10


def _rows(rng: random.Random, facts: Sequence[Fact], count: int) -> list[dict[str, Any]]:
    """`count` different rows, the kinds in equal shares."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        scene = rng.sample(facts, rng.choice((2, 3)))
        if len({fact.name for fact in scene}) == len({fact.thing for fact in scene}) == len(scene):
            prompt, answer = _ask(len(rows) % KINDS, scene)
            rows[prompt] = answer
    return [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in rows.items()
    ]
