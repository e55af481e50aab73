"""Labels of texts whose turns start with markers, compared with Unsloth's `train_on_responses_only`."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from finetune.config import load
from finetune.data import IGNORE_INDEX
from finetune.data import prepare as preparing
from finetune.data.formats import RowError, Text
from finetune.data.templates.encoder import Encoder
from finetune.data.templates.markers import Markers, derive_markers
from finetune.errors import UserError
from tests.helpers import launch, tiny
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, build_tokenizer
from tests.helpers.templates.marker_cases import TEMPLATES

# Tokenizer, instruction marker and response marker, as in notebooks.
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
import importlib.util, json, os, sys, types
os.environ["UNSLOTH_IS_PRESENT"] = "1"
spec = importlib.util.find_spec("unsloth")
package = types.ModuleType("unsloth")  # its files without its __init__, which patches transformers and needs a GPU
package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
sys.modules["unsloth"] = package
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from unsloth.chat_templates import CHAT_TEMPLATES
from unsloth_zoo.dataset_utils import train_on_responses_only
from tests.helpers.templates.marker_cases import template_cases
path = Path(sys.argv[1])
cases = json.loads(path.read_text()) + template_cases(CHAT_TEMPLATES, path.parent)
for case in cases:
    mark = train_on_responses_only(
        None, case.get("instruction"), case.get("response"), return_function=True,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(case["tokenizer"]), last_response_only=case["last_only"],
    )
    case["labels"] = mark({"input_ids": case["input_ids"]})["labels"]
path.write_text(json.dumps(cases))
"""


@functools.cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    if name == "plain":
        return build_tokenizer(["<unused>"], "</s>", "<s>")
    case = CHAT_TEMPLATES[name]
    return build_tokenizer(case.tokens, case.eos, case.bos)


def texts(name: str, instruction: str, response: str) -> list[str]:
    """Conversations of one to four exchanges; one in three is unfinished, and one in three contains an irregularity."""
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
    """Token ids and labels of every case by Unsloth's function, in a separate process because it patches transformers:
    for MARKERS with the given markers, for templates (below) with those that it finds."""
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
    done = launch.python(["-c", REFERENCE, str(path)], cache=folder, kind="unsloth")
    assert done.returncode == 0, done.stderr[-3000:]
    return {(case["name"], case["last_only"]): case for case in json.loads(path.read_text())}


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.campaign
def test_labels_are_those_of_unsloth(reference: dict, name: str, last_only: bool) -> None:
    tokenizer, instruction, response = MARKERS[name]
    markers = Markers(tokenizer_for(tokenizer), response, instruction, last_only=last_only)
    case = reference[name, last_only]
    supervised = 0
    for ids, labels in zip(case["input_ids"], case["labels"], strict=True):
        found = markers.labels(np.array(ids, dtype=np.int32)).tolist()
        assert found == labels, tokenizer_for(tokenizer).decode(ids)
        supervised += sum(label != IGNORE_INDEX for label in labels)
    assert supervised > ROWS


def encoded(tokenizer: PreTrainedTokenizerFast, text: str, markers: Markers | None) -> tuple[list[int], list[int]]:
    (result,) = Encoder(tokenizer, None, markers=markers).encode_batch([Text(text=text)])
    assert not isinstance(result, RowError), result
    return result[0].input_ids.tolist(), result[0].labels.tolist()


def test_with_only_a_response_marker_a_response_ends_at_eos_or_the_next_response() -> None:
    tokenizer = tokenizer_for("plain")
    markers = Markers(tokenizer, "Assistant:")
    ids = tokenizer("User: a cat Assistant: it runs</s>User: 1 Assistant: one Assistant: two").input_ids
    spans = markers.spans(np.array(ids, dtype=np.int32))
    assert [tokenizer.decode(ids[first:stop]).strip() for first, stop in spans] == ["it runs</s>", "one", "two"]


def test_no_tokens_are_added_to_text_with_markers() -> None:
    """Neither a second BOS nor an EOS, so that the tokens equal those of the notebook."""
    tokenizer = with_bos()
    markers = Markers(tokenizer, "<|im_start|>assistant\n", "<|im_start|>user\n")
    text = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyou"
    assert encoded(tokenizer, text, markers)[0] == tokenizer(text, add_special_tokens=False).input_ids
    assert encoded(tokenizer, text.removeprefix("<s>"), markers)[0] == tokenizer(text.removeprefix("<s>")).input_ids


def test_templated_text_without_markers_gets_one_bos_and_one_eos() -> None:
    tokenizer = with_bos()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for text in ("<s>the cat", "the cat", "<s>the cat<|im_end|>", "the cat<|im_end|>"):
        ids, labels = encoded(tokenizer, text, None)
        assert (ids[0], ids.count(bos), ids.count(eos)) == (bos, 1, 1), text
        assert labels == ids


def with_bos() -> PreTrainedTokenizerFast:
    """A tokenizer that prepends BOS to every text, like Llama's."""
    tokenizer = build_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_unusable_markers_are_refused() -> None:
    tokenizer = tokenizer_for("chatml")
    with pytest.raises(UserError, match="are the same tokens"):
        Markers(tokenizer, "<|im_start|>", "<|im_start|>")
    tokenizer = build_tokenizer(["<x>"], "<x>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="tokenizes to nothing with"):
        Markers(tokenizer, " ")


# --- markers from the chat template -----------------------------------------------------------------------------------


# If EOS does not end a turn, Unsloth supervises the end of the last answer of these templates but not of earlier
# answers: a space, or the thought in the generation prompt, prevents it from recognizing the start of a turn. Here both
# ends are supervised, as with all other templates.
ONLY_LAST_END_SUPERVISED = {"starling, another eos", "gemma-4-thinking, another eos", "qwen3-thinking, another eos"}


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.campaign
def test_labels_by_the_markers_of_the_template_are_those_of_unsloth(reference: dict) -> None:
    cases = {name.removeprefix("template: "): case for (name, _), case in reference.items() if "template: " in name}
    wrong = {}
    for name, case in cases.items():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(case["tokenizer"])
        instruction, response = derive_markers(tokenizer, tokenizer.chat_template)
        markers = Markers(tokenizer, response, instruction)
        closing = set(tokenizer.convert_tokens_to_ids(["<turn|>", "<|im_end|>", "<|end_of_turn|>", "\u010a"]))
        differ, supervised = set(), 0
        for ids, labels in zip(case["input_ids"], case["labels"], strict=True):
            mine = markers.labels(np.array(ids, dtype=np.int32)).tolist()
            differ |= {pair for pair in zip(mine, labels, strict=True) if pair[0] != pair[1]}
            supervised += sum(label != IGNORE_INDEX for label in mine)
        if name in ONLY_LAST_END_SUPERVISED:
            assert differ and differ <= {(token, IGNORE_INDEX) for token in closing}, name
        elif differ or supervised < 3 * len(case["input_ids"]):
            wrong[name] = (instruction, response)
    assert not wrong
    assert len(cases) > len(TEMPLATES) + 40 and cases.keys() >= ONLY_LAST_END_SUPERVISED


HARMONY = (  # the subset that gpt-oss uses
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_only_the_end_of_the_last_answer_is_supervised_if_earlier_ones_end_differently() -> None:
    tokens = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer = build_tokenizer(tokens, "<|return|>", "<|startoftext|>")
    tokenizer.chat_template = HARMONY
    markers = Markers(tokenizer, *reversed(derive_markers(tokenizer, HARMONY)))
    messages = [{"role": role, "content": words} for words in ("one", "two") for role in ("user", "assistant")]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False)).input_ids
    spans = markers.spans(np.array(ids, dtype=np.int32))
    assert [tokenizer.decode(ids[first:stop]) for first, stop in spans] == ["one", "two<|return|>"]


UNDERIVABLE = {
    "there is none": None,
    "it refuses a conversation of 6 messages: no": "{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}",
    "each message once": "{% for m in messages[-1:] %}<|im_start|>{{ m.content }}{% endfor %}",
    "distinguished from a question": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    "distinguished from": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("why", UNDERIVABLE)
def test_templates_without_derivable_markers_are_refused(why: str) -> None:
    with pytest.raises(UserError, match=rf"{why}(.|\n)*Set data.instruction_part and data.response_part"):
        derive_markers(tokenizer_for("chatml"), UNDERIVABLE[why])


# --- through the data pipeline ----------------------------------------------------------------------------------------

ROW = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nruns<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"


def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict], *extra: str) -> preparing.Data:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model.model_name_or_path", "m", "--data.train_file", str(tmp_path / "rows.jsonl")]
    return preparing.prepare(load([*given, "--data.cache_dir", str(tmp_path / "cache"), *extra]), tokenizer)


def test_rows_without_a_response_are_counted(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = "{{ 'cannot be masked' }}"  # which does not matter: text is not rendered
    markers = ("--data.response_part", json.dumps(ASSISTANT), "--data.instruction_part", '"<|im_start|>user\\n"')
    rows = [{"text": ROW + ROW}, {"text": "<|im_start|>user\nthe cat<|im_end|>\n"}, {"text": ROW + ASSISTANT}]
    data = prepared(tmp_path, tokenizer, rows, *markers)
    assert data.ledgers["train"]["dropped"] == {"no_label": 1}
    ids, labels = data.train[0]
    assert tokenizer.decode(ids) == ROW + ROW
    assert tokenizer.decode(labels[labels != IGNORE_INDEX]) == "runs<|im_end|>" * 2
    last = prepared(tmp_path, tokenizer, rows, *markers, "--data.last_turn_only")
    assert tokenizer.decode([label for label in last.train[0][1] if label != IGNORE_INDEX]) == "runs<|im_end|>"
    assert not last.cached and prepared(tmp_path, tokenizer, rows, *markers).cached
    other = ("--data.response_part", '"<|im_start|>user\\n"', "--data.instruction_part", json.dumps(ASSISTANT))
    swapped = prepared(tmp_path, tokenizer, rows, *other)
    assert (
        not swapped.cached
        and tokenizer.decode([i for i in swapped.train[1][1] if i != IGNORE_INDEX]) == "the cat<|im_end|>"
    )


def test_markers_and_rows_of_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    with pytest.raises(UserError, match="known without markers"):
        prepared(tmp_path, tokenizer, [{"messages": messages}], "--data.response_part", json.dumps(ASSISTANT))


def test_derived_markers_are_reported_and_part_of_the_cache_key(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    chatml, mistral = CHAT_TEMPLATES["chatml"].template, CHAT_TEMPLATES["mistral"].template
    given = ("--data.response_part", json.dumps(ASSISTANT), "--data.instruction_part", '"<|im_start|>user\\n"')
    tokenizer.chat_template = chatml
    by_hand = prepared(tmp_path, tokenizer, [{"text": ROW + ROW}], *given)
    data = prepared(tmp_path, tokenizer, [{"text": ROW + ROW}], "--data.response_part", "auto")
    assert (data.fingerprint, data.cached) == (by_hand.fingerprint, True)  # nothing else differs
    assert data.format == by_hand.format + (
        r"; markers from the chat template: '<|im_start|>assistant\n' (supervised), '<|im_start|>user\n' (masked)"
    )
    tokenizer.chat_template = mistral
    rows = [{"text": "<s> [INST] the cat [/INST] runs</s>"}]
    other = prepared(tmp_path, tokenizer, rows, "--data.response_part", "auto")
    assert not other.cached and "'[/INST]' (supervised)" in other.format
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="there is none"):
        prepared(tmp_path, tokenizer, rows, "--data.response_part", "auto")
    with pytest.raises(UserError, match="Set both markers, or auto alone"):
        prepared(tmp_path, tokenizer, rows, *given[2:], "--data.response_part", "auto")
