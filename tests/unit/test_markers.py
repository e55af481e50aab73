"""Labels of texts whose turns are told by markers: against Unsloth's own `train_on_responses_only`."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from finetune.config import load
from finetune.data import prepare as preparing
from finetune.data.formats import RowError, Text
from finetune.data.markers import Markers
from finetune.data.template import IGNORE, Encoder
from finetune.errors import UserError
from tests import tiny
from tests.unit.chat_templates import CHAT_TEMPLATES, build_tokenizer

# Tokenizer, instruction marker, response marker: as notebooks give them.
MARKERS = {
    "chatml": ("chatml", "<|im_start|>user\n", "<|im_start|>assistant\n"),
    "llama3": (
        "llama3",
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": ("gemma", "<start_of_turn>user\n", "<start_of_turn>model\n"),
    "mistral": ("mistral", "[INST]", "[/INST]"),
    "phi3": ("phi3", "<|user|>\n", "<|assistant|>\n"),
    "phi4": ("phi4", "<|im_start|>user<|im_sep|>", "<|im_start|>assistant<|im_sep|>"),
    "newlines outside": ("chatml", "\n<|im_start|>user\n\n", "\n<|im_start|>assistant\n\n"),
    "opener alone": ("chatml", "<|im_start|>user", "<|im_start|>assistant"),
    "plain": ("plain", "### Instruction:\n", "### Response:\n"),
    "plain, spaced": ("plain", "User: ", "Assistant: "),
}
WORDS = [
    "the cat",
    "runs",
    "user",
    "assistant",
    "### Response:",
    "User:",
    "\n",
    "\n\n",
    " ",
    "1",
    "🙂",
    "naïve",
    "\\",
    "}",
]
ROWS = 60
REFERENCE = """
import json, os, sys
os.environ["UNSLOTH_IS_PRESENT"] = "1"  # the function needs nothing else of Unsloth
from transformers import PreTrainedTokenizerFast
from unsloth_zoo.dataset_utils import train_on_responses_only
cases = json.load(open(sys.argv[1]))
for case in cases:
    mark = train_on_responses_only(
        None, case["instruction"], case["response"], return_function=True,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(case["tokenizer"]), last_response_only=case["last_only"],
    )
    case["labels"] = mark({"input_ids": case["input_ids"]})["labels"]
json.dump(cases, open(sys.argv[1], "w"))
"""


@functools.cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    if name == "plain":
        return build_tokenizer(["<unused>"], "</s>", "<s>")
    case = CHAT_TEMPLATES[name]
    return build_tokenizer(case.tokens, case.eos, case.bos)


def texts(name: str, instruction: str, response: str) -> list[str]:
    """Conversations of one to four exchanges; of each three, one unfinished and one with something odd in it."""
    rng = random.Random(name)
    tokenizer = tokenizer_for(MARKERS[name][0])

    def say() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))

    def text(row: int) -> str:
        end = rng.choice([tokenizer.eos_token, tokenizer.eos_token + "\n", "<|end|>\n", "\n"])
        turns = [f"{instruction}{say()}{end}{response}{say()}{end}" for _ in range(rng.randint(1, 4))]
        odd = ["", response + say() + end, instruction, tokenizer.bos_token or "", say(), response, end]
        turns.insert(rng.randint(0, len(turns)), rng.choice(odd) if row % 3 == 1 else "")
        if row % 3 == 2:
            turns.append(f"{instruction}{say()}{end}{response}{say()}")
        return "".join(turns) + ("the end" if row % 3 == 1 else "")

    return [text(row) for row in range(ROWS)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict]:
    """Token ids and labels of every case by Unsloth's function, in one process of its own: it patches transformers."""
    folder = tmp_path_factory.mktemp("markers")
    cases = []
    for name, (tokenizer, instruction, response) in MARKERS.items():
        saved = folder / tokenizer
        tokenizer_for(tokenizer).save_pretrained(saved)
        ids = tokenizer_for(tokenizer)(texts(name, instruction, response)).input_ids
        one = {"name": name, "tokenizer": str(saved), "instruction": instruction, "response": response}
        cases += [one | {"input_ids": ids, "last_only": last_only} for last_only in (False, True)]
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    done = subprocess.run([sys.executable, "-c", REFERENCE, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {(case["name"], case["last_only"]): case for case in json.loads(path.read_text())}


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("name", MARKERS)
def test_labels_are_those_of_unsloth(reference: dict, name: str, last_only: bool) -> None:
    tokenizer, instruction, response = MARKERS[name]
    markers = Markers(tokenizer_for(tokenizer), response, instruction, last_only=last_only)
    case = reference[name, last_only]
    learnt = 0
    for ids, labels in zip(case["input_ids"], case["labels"], strict=True):
        found = markers.labels(np.array(ids, dtype=np.int32), IGNORE).tolist()
        assert found == labels, tokenizer_for(tokenizer).decode(ids)
        learnt += sum(label != IGNORE for label in labels)
    assert learnt > ROWS


def encoded(tokenizer: PreTrainedTokenizerFast, text: str, markers: Markers | None) -> tuple[list[int], list[int]]:
    (result,) = Encoder(tokenizer, None, markers=markers).encode_batch([Text(text=text)])
    assert not isinstance(result, RowError), result
    return result[0].input_ids.tolist(), result[0].labels.tolist()


def test_a_response_marker_alone_learns_to_the_end_token_or_the_next_response() -> None:
    tokenizer = tokenizer_for("plain")
    markers = Markers(tokenizer, "Assistant:")
    ids = tokenizer("User: a cat Assistant: it runs</s>User: 1 Assistant: one Assistant: two").input_ids
    spans = markers.spans(np.array(ids, dtype=np.int32))
    assert [tokenizer.decode(ids[first:stop]).strip() for first, stop in spans] == ["it runs</s>", "one", "two"]


def test_marked_text_gets_no_tokens_of_its_own() -> None:
    """Neither a second BOS nor an EOS, so that the tokens are those of the notebook."""
    tokenizer = with_bos()
    markers = Markers(tokenizer, "<|im_start|>assistant\n", "<|im_start|>user\n")
    text = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyou"
    assert encoded(tokenizer, text, markers)[0] == tokenizer(text, add_special_tokens=False).input_ids
    assert encoded(tokenizer, text.removeprefix("<s>"), markers)[0] == tokenizer(text.removeprefix("<s>")).input_ids


def test_templated_text_without_markers_gets_one_bos_and_one_end() -> None:
    tokenizer = with_bos()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for text in ("<s>the cat", "the cat", "<s>the cat<|im_end|>", "the cat<|im_end|>\n"):
        ids, labels = encoded(tokenizer, text, None)
        assert (ids[0], ids.count(bos), ids.count(eos)) == (bos, 1, 1), text
        assert labels[0] == IGNORE and labels[1:] == ids[1:]


def with_bos() -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS before everything, as Llama's does."""
    tokenizer = build_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_markers_that_cannot_work_are_refused() -> None:
    tokenizer = tokenizer_for("chatml")
    with pytest.raises(UserError, match="are the same tokens"):
        Markers(tokenizer, "<|im_start|>", "<|im_start|>")
    tokenizer = build_tokenizer(["<x>"], "<x>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no token to"):
        Markers(tokenizer, " ")


# --- through the data engine ------------------------------------------------------------------------------------------

ROW = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nruns<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"


def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict], *extra: str) -> preparing.Data:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model.model_name_or_path", "m", "--data.train_file", str(tmp_path / "rows.jsonl")]
    return preparing.prepare(load([*given, "--data.cache_dir", str(tmp_path / "cache"), *extra]), tokenizer)


def test_rows_without_a_response_are_counted(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = "{{ 'cannot be masked' }}"  # and need not be: text is not rendered
    markers = ("--data.response_part", json.dumps(ASSISTANT), "--data.instruction_part", '"<|im_start|>user\\n"')
    rows = [{"text": ROW + ROW}, {"text": "<|im_start|>user\nthe cat<|im_end|>\n"}, {"text": ROW + ASSISTANT}]
    data = prepared(tmp_path, tokenizer, rows, *markers)
    assert data.ledgers["train"]["dropped"] == {"no_label": 1}
    ids, labels = data.train[0]
    assert tokenizer.decode(ids) == ROW + ROW
    assert tokenizer.decode(labels[labels != IGNORE]) == "runs<|im_end|>" * 2
    last = prepared(tmp_path, tokenizer, rows, *markers, "--data.last_turn_only")
    assert tokenizer.decode([label for label in last.train[0][1] if label != IGNORE]) == "runs<|im_end|>"
    assert not last.cached and prepared(tmp_path, tokenizer, rows, *markers).cached
    other = ("--data.response_part", '"<|im_start|>user\\n"', "--data.instruction_part", json.dumps(ASSISTANT))
    turned = prepared(tmp_path, tokenizer, rows, *other)
    assert not turned.cached and tokenizer.decode([i for i in turned.train[1][1] if i != IGNORE]) == "the cat<|im_end|>"


def test_markers_and_rows_of_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    with pytest.raises(UserError, match="known without markers"):
        prepared(tmp_path, tokenizer, [{"messages": messages}], "--data.response_part", json.dumps(ASSISTANT))
