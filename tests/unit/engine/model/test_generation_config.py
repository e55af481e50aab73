"""Where a trained model stops, and what of a model cannot be saved."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from finetune.engine.model import generation_config
from finetune.errors import UserError
from tests.helpers import tiny

Row = tuple[np.ndarray, np.ndarray]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """ChatML's tokens; EOS is another one."""
    found = tiny.make_tokenizer(tmp_path)
    found.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    return found


def rows(tokenizer: Any, *texts: str, masked: int = 1) -> list[Row]:
    """Texts with a loss on all but the first tokens."""
    made = [np.array(tokenizer(text)["input_ids"]) for text in texts]
    return [(ids, np.where(np.arange(len(ids)) < masked, -100, ids)) for ids in made]


def ends(tokenizer: Any, *texts: str, **named: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(
        generation_config.trained_end_tokens(tokenizer, rows(tokenizer, *texts, **named))
    )  # type: ignore[arg-type]


def test_the_end_of_the_template_s_turns_counts_if_it_is_trained(tokenizer: Any) -> None:
    turn = "<|im_start|>assistant\nruns<|im_end|>"
    assert ends(tokenizer, turn, turn) == ["<|im_end|>"]
    assert ends(tokenizer, "the cat runs", turn + "\n") == ["<|im_end|>"]  # with a loss on all tokens, "\n" is last
    assert ends(tokenizer, turn, masked=100) == []
    assert ends(tokenizer, "the cat runs", "a dog") == []


def test_any_added_token_that_ends_most_rows_counts(tokenizer: Any) -> None:
    """Raw text ends with EOS, which may be the pad token too; rows that were cut end anywhere."""
    whole = "the cat runs<|endoftext|>"
    assert ends(tokenizer, whole, whole, "cut here") == ["<|endoftext|>"]
    assert ends(tokenizer, "a cat", "a dog", "cut at<|im_start|>") == []
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    assert ends(tokenizer, "the cat<|done|>", "a dog<|done|>") == ["<|done|>"]


def test_of_an_end_of_several_tokens_the_first_added_one_counts(tokenizer: Any) -> None:
    one = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + END }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.chat_template = one.replace("END", "'<|im_end|><|endoftext|>'")
    assert tokenizer.decode(generation_config.end_of_turn_token(tokenizer)) == "<|im_end|>"
    tokenizer.chat_template = one.replace("END", "' the end\n'")  # a text, which no token says
    assert generation_config.end_of_turn_token(tokenizer) is None
    tokenizer.chat_template = {"rag": "x"}
    assert generation_config.end_of_turn_token(tokenizer) is None


def test_further_end_tokens_follow_the_model_s_own() -> None:
    assert generation_config.add_end_tokens({"eos_token_id": [7, 9]}, [9, None, 3]) == {"eos_token_id": [7, 9, 3]}
    assert generation_config.add_end_tokens({"eos_token_id": None, "top_p": 0.9}, [3, 3]) == {
        "eos_token_id": 3,
        "top_p": 0.9,
    }
    assert generation_config.add_end_tokens({}, [None]) == {}


def test_what_transformers_refuses_to_save_is_written_as_it_was_loaded(tmp_path: Path) -> None:
    (tmp_path / generation_config.FILE).write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}))
    model = SimpleNamespace(generation_config=GenerationConfig.from_pretrained(str(tmp_path)))
    with contextlib.suppress(ValueError):  # of transformers before 5.24
        model.generation_config.save_pretrained(tmp_path)
    with generation_config.without_model_config(model):
        model.generation_config.save_pretrained(tmp_path)
    generation_config.write(tmp_path, model, [5])
    found = json.loads((tmp_path / generation_config.FILE).read_text())
    assert (found["temperature"], found["top_p"], found["eos_token_id"]) == (0.6, 0.9, [2, 5])
    assert "do_sample" not in found


@pytest.mark.parametrize(
    "content, why",
    [
        ({"max_new_tokens": -5}, "max_new_tokens"),
        ({"num_return_sequences": 3}, "num_return_sequences"),
        ({"eos_token_id": "<|im_end|>"}, "eos_token_id must be a number"),
    ],
)
def test_a_generation_config_that_cannot_be_loaded_is_named(tmp_path: Path, content: dict[str, Any], why: str) -> None:
    (tmp_path / generation_config.FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"generation_config.json is invalid: .*{why}"):
        generation_config.check(tmp_path)
