"""Tests of finetune/chat/generation.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers.chat import LONGEST, PROMPTS, answered, generator


def test_an_answer_ends_at_every_stop_token(run: Path, copy: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Of the generation config's list, of the tokenizer, and of the template's turns."""
    from transformers import AutoTokenizer

    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    whole = generator(run)
    (ids,) = [whole.encode(whole.opening(PROMPTS[0]))]
    from finetune.engine.model.generation import complete

    (tokens,) = complete(whole.loaded.model, [ids], whole.generation_config(LONGEST))
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    config = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [stop, 1]}))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.eos_token = "<|pad|>"  # no longer what ends a turn
    tokenizer.save_pretrained(copy)
    adapter = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(adapter | {"base_model_name_or_path": str(base)}))
    ended = generator(copy)
    assert set(ended.stops) == {stop, 1, *tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_end|>"])}
    (answer,) = ended.answer([ids])
    until = tokens[: tokens.index(stop)]
    assert answer.text == tokenizer.decode([*until, stop], skip_special_tokens=True)
    assert (answer.tokens, answer.finished) == (len(until) + 1, True)


def test_sampling_follows_the_generation_config_and_its_seed(run: Path, prompts: Path, tmp_path: Path) -> None:
    drawn = [
        [one["answer"]["text"] for one in answered(tmp_path, run, "--prompts", str(prompts), *extra)["answers"]]
        for extra in (
            ("--temperature", "2", "--seed", "7"),
            ("--temperature", "2", "--seed", "7"),
            ("--temperature", "2", "--seed", "8"),
            ("--temperature", "0"),
            (),
        )
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == drawn[4] != drawn[0]
    talking = generator(run, greedy=False)
    assert not talking.samples and talking.description.startswith("Greedy")
    talking.loaded.model.generation_config.do_sample = True
    talking.loaded.model.generation_config.top_p = 0.5
    assert talking.samples and "top_p 0.5" in talking.description
