"""Rows mean what they mean to `trl.SFTTrainer`: generated datasets give the same token ids and labels, token by token.

The reference is TRL's own preparation. Differences are the ones in `explained`, `with_special_tokens_once`
and `with_last_characters`, which docs/data.md lists with reasons.
"""

from __future__ import annotations

import functools
import json
import random
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.data import IGNORE_INDEX, formats, store
from finetune.data.collate import collate
from finetune.data.formats import Conversation, RowError
from finetune.data.templates.encoder import Encoder
from tests.helpers.templates.chat_templates import CORPUS, build_tokenizer

FAST, ALL = 36, 360

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>")
SPECIAL += ("<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")

# The role and a variable of the row in the text, and marks around the answer.
OWN = (
    "{% if persona is defined %}{{ 'You are ' + persona + '.\n' }}{% endif %}"
    "{{ 'tools:\n' if tools is not none }}{% for t in tools or [] %}{{ 'tool ' + t.function.name + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if think else '') }}{% endif %}"
)
TEMPLATES = ("own", "qwen2_5", "qwen3", "llama3", "phi3", "gemma")  # all but the first: TRL's training templates

WORDS = [
    "hel",
    "lo",
    " world",
    "Natalia",
    " 48",
    "\n",
    " ",
    "  ",
    "é",
    "日本",
    "🙂",
    "👩\u200d👧",
    "answers:",
    "\t",
    "ß",
]
WORDS += ["0", "{{ x }}", "user\n", "-100", "<|im_end|>", "clips", "<eos>", "<bos>", "assistant"]


@functools.cache
def tokenizer_for(kind: str, template: str) -> PreTrainedTokenizerFast:
    """plain: byte-level; bos, both: it adds BOS, or BOS and EOS; metaspace: like Llama 2's, with a BOS."""
    if kind == "metaspace":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPECIAL]
        backend.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")
    else:
        tokenizer = build_tokenizer(SPECIAL, "<eos>", None if kind == "plain" else "<bos>")
    if kind != "plain":
        ends = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>" if kind == "both" else "<bos> $A", special_tokens=ends
        )
    if template != "own":
        from trl import chat_template_utils

        tokenizer.chat_template = getattr(chat_template_utils, f"{template}_training_chat_template")
    else:
        tokenizer.chat_template = OWN
    tokenizer.pad_token = "<eos>"
    return tokenizer


@functools.cache
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, bos_token_id=None, eos_token_id=1, **sizes))


# --- the datasets -----------------------------------------------------------------------------------------------------

FORMATS = ("text", "strings", "prompt messages", "messages", "conversations", "tokenized")


class Case:
    """One generated dataset and the options to read it with."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        self.format = FORMATS[number % len(FORMATS)]
        self.kind = rng.choice(("plain", "bos", "both", "metaspace"))
        self.template = "own" if rng.random() < 0.5 else rng.choice(TEMPLATES)
        if self.kind == "plain" and self.template in ("llama3", "gemma"):
            self.kind = "bos"  # these templates write a BOS
        conversational = self.format in ("prompt messages", "messages", "conversations")
        self.options: dict[str, Any] = {
            "assistant_only_loss": self.format in FORMATS[2:4] and rng.random() < 0.5,
            "completion_only_loss": rng.choice((None, None, True, False)),
            "max_length": rng.choice((None, None, 4, 9, 30)),
            "truncation_mode": rng.choice(("keep_start", "keep_end")),
        }
        self.extra = self.template == "own" and conversational and rng.random() < 0.5
        self.columns = [c for c in ("labels", "completion_mask", "assistant_masks") if rng.random() < 0.4]
        self.with_prompts = rng.random() < 0.3
        self.rows = [{**self.row(), "number": n} for n in range(rng.randint(1, 4))]

    def words(self, least: int = 0) -> str:
        text = "".join(self.rng.choices(WORDS, k=self.rng.randint(least, 6)))
        return text if self.kind != "plain" or "<bos>" not in text else text.replace("<bos>", "")

    def content(self) -> str:
        return "x" + self.words()

    def text(self) -> str:
        found = self.words()
        cut = self.options["max_length"] is not None  # then the difference below would shift the cut
        return "x" + found if cut and found[:1] in ("", "<") else found

    def turns(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.words()}] if self.template not in ("gemma",) else []
        found: list[dict[str, str]] = system if self.rng.random() < 0.3 else []
        for _ in range(self.rng.randint(1, 2)):
            found = [
                *found,
                {"role": "user", "content": self.content()},
                {"role": "assistant", "content": self.content()},
            ]
        return found

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.extra:
            tools = self.rng.choice(([{"type": "function", "function": {"name": "add"}}], []))
            row["tools"] = tools if self.options["max_length"] else json.dumps(tools)
            row["chat_template_kwargs"] = {"persona": self.words(), "think": self.rng.random() < 0.5}
        if self.format == "text":
            return row | {"text": self.text()}
        if self.format == "strings":
            return row | {"prompt": self.text(), "completion": self.words()}
        turns = self.turns()
        if self.format == "prompt messages":
            return row | {"prompt": turns[:-1], "completion": turns[-1:]}
        if self.format == "messages":
            return row | {"messages": turns, "text": "not read"}
        if self.format == "conversations":
            return row | {"conversations": [{"from": m["role"], "value": m["content"]} for m in turns]}
        ids = [self.rng.randint(3, 500) for _ in range(self.rng.randint(1, 40))]
        row["input_ids"] = ids
        for column in self.columns:
            bits = [self.rng.randint(0, 1) for _ in ids]
            row[column] = (
                [id if bit else IGNORE_INDEX for id, bit in zip(ids, bits, strict=True)] if column == "labels" else bits
            )
        return row | ({"prompt": "p", "completion": "c"} if self.with_prompts else {})


# --- both readings ----------------------------------------------------------------------------------------------------

Document = tuple[list[int], list[int]]  # token ids and labels
Documents = dict[int, Document]


def read_by_trl(rows: list[dict[str, Any]], tokenizer: Any, folder: Any, **options: Any) -> Documents:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, **options
    )
    none = ([], "[]")  # no tools: TRL's SFTTrainer passes an empty list on, its apply_chat_template does not
    rows = [row | {"tools": None} if row.get("tools") in none else row for row in rows]
    dataset = datasets.Dataset.from_list(rows)
    trainer = SFTTrainer(model(), args=args, train_dataset=dataset, processing_class=tokenizer)
    return {row["number"]: (row["input_ids"], row["labels"]) for row in trainer.train_dataset}


def read_here(
    rows: list[dict[str, Any]], tokenizer: Any, *, truncation_mode: str = "keep_start", **options: Any
) -> tuple[Documents, dict[int, RowError]]:
    dataset = datasets.Dataset.from_list(rows)
    over_length = {"keep_start": "truncate", "keep_end": "keep_end"}[truncation_mode]
    found = formats.detect(dataset.column_names, list(dataset))
    encoder = Encoder(tokenizer, tokenizer.chat_template, over_length=over_length, **options)
    documents: Documents = {}
    errors: dict[int, RowError] = {}
    for row in dataset:
        try:
            (result,) = encoder.encode_batch([formats.to_conversation(row, found)])
        except RowError as error:
            result = error
        if isinstance(result, RowError):
            errors[row["number"]] = result
        else:
            (piece,) = result
            documents[row["number"]] = (piece.input_ids.tolist(), piece.labels.tolist())
    return documents, errors


def explained(row: dict[str, Any], error: RowError, labels: list[int]) -> bool:
    """Whether a row that TRL keeps is dropped here for a documented reason."""
    if error.reason == "empty":
        return not row.get("completion", row.get("text", "?")).strip()
    return error.reason == "no_label" and set(labels[1:]) <= {IGNORE_INDEX}


def with_special_tokens_once(row: dict[str, Any], document: Document, case: Case) -> Document:
    """TRL's document of a text that begins with BOS itself, without what the tokenizer adds to any text."""
    text = row.get("text") or (row["prompt"] + row["completion"] if isinstance(row.get("prompt"), str) else "")
    if case.kind == "plain" or "input_ids" in row or "messages" in row or not text.startswith("<bos>"):
        return document
    end = -1 if case.kind == "both" else None
    return document[0][1:end], document[1][1:end]


def with_last_characters(document: Document, found: Document) -> Document:
    """TRL's document with the labels found here for the last character of a marked turn, if it has several tokens.

    TRL's mask ends with the first of them: of Llama 2's two tokens for a newline after a special token, or of the
    bytes of an emoji.
    """
    ids, labels = document
    labels = list(labels)
    for place in range(1, len(labels)):
        follows = place + 1 == len(ids) or found[1][place + 1] == IGNORE_INDEX or labels[place + 1] == IGNORE_INDEX
        if labels[place] == IGNORE_INDEX != found[1][place] and labels[place - 1] != IGNORE_INDEX and follows:
            labels[place] = ids[place]
    return ids, labels


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets() -> Any:
    datasets.disable_progress_bars()
    datasets.disable_caching()
    yield
    datasets.enable_caching()


@pytest.mark.parametrize("number", [n if n < FAST else pytest.param(n, marks=pytest.mark.campaign) for n in range(ALL)])
@pytest.mark.filterwarnings("ignore")
def test_ids_and_labels_are_those_of_trl(number: int, tmp_path: Any) -> None:
    case = Case(number)
    tokenizer = tokenizer_for(case.kind, case.template)
    expected = read_by_trl(case.rows, tokenizer, tmp_path, **case.options)
    found, errors = read_here(case.rows, tokenizer, **case.options)
    rows = {row["number"]: row for row in case.rows}
    assert set(found) <= set(expected)
    for index, document in expected.items():
        if index in errors:
            assert explained(rows[index], errors[index], document[1]), errors[index]
        else:
            document = with_special_tokens_once(rows[index], document, case)
            if case.kind == "metaspace" and case.options["assistant_only_loss"]:
                document = with_last_characters(document, found[index])
            assert found[index] == document


@pytest.mark.parametrize("completion_only_loss", [None, True, False])
@pytest.mark.parametrize("assistant_only_loss", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_both_masks_apply_to_prompts_of_messages(
    assistant_only_loss: bool, completion_only_loss: bool | None, tmp_path: Any
) -> None:
    tokenizer = tokenizer_for("plain", "own")
    turns = [{"role": role, "content": f"{role} x"} for role in ("user", "assistant")]
    rows = [{"prompt": [*turns, turns[0]], "completion": [turns[1], *turns], "number": 0}]
    options = {"assistant_only_loss": assistant_only_loss, "completion_only_loss": completion_only_loss}
    assert read_here(rows, tokenizer, **options)[0] == read_by_trl(rows, tokenizer, tmp_path, **options)


@pytest.mark.filterwarnings("ignore")
def test_eos_ends_the_completion_whatever_other_columns_there_are(tmp_path: Any) -> None:
    """TRL appends EOS to an unread text column instead, so that such a completion has no end."""
    tokenizer = tokenizer_for("bos", "own")
    rows = [{"prompt": "1 + 1 =", "completion": " 2", "number": 0}]
    wanted = read_by_trl(rows, tokenizer, tmp_path)
    with_text = [{**rows[0], "text": "not read"}]
    assert read_by_trl(with_text, tokenizer, tmp_path)[0][0] == wanted[0][0][:-1]
    assert read_here(with_text, tokenizer)[0] == read_here(rows, tokenizer)[0] == wanted


# TRL's templates without marks: name -> special tokens.
UNMARKED = {
    "llama3": "<|eot_id|> <|start_header_id|> <|end_header_id|>",
    "qwen2_5": "<|im_start|> <|im_end|>",
    "qwen3_8": "<|im_start|> <|im_end|> <think> </think>",
    "gemma3": "<start_of_turn> <end_of_turn>",
    "phi3": "<|user|> <|assistant|> <|end|>",
    "gptoss": "<|start|> <|channel|> <|message|> <|end|> <|return|>",
    "deepseekv3": "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", UNMARKED)
def test_turns_without_marks_are_those_of_the_training_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked here: what the generation prompt already has, and what follows the end of the turn."""
    from trl import chat_template_utils

    tokenizer = build_tokenizer(UNMARKED[name].split(), "<eos>", "<bos>")
    template = getattr(chat_template_utils, f"{name}_chat_template")
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_training_chat_template")
    messages = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"))] * 2
    today = SimpleNamespace(now=lambda: datetime(2026, 1, 1))  # the date of every template here
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", today)
    trl = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    opening = tokenizer.apply_chat_template(
        messages[:1], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    ((found,),) = Encoder(tokenizer, template).encode_batch([Conversation(messages=messages)])  # type: ignore[misc]
    assert found.input_ids.tolist() == trl["input_ids"]
    here, there = _runs(found.labels != IGNORE_INDEX), _runs(np.array(trl["assistant_masks"]) == 1)
    assert len(here) == len(there) == 2
    for (start, stop), (first, last) in zip(here, there, strict=True):
        assert first <= start < stop <= last
        before, after = trl["input_ids"][first:start], trl["input_ids"][stop:last]
        assert tokenizer.decode(before) in opening
        assert tokenizer.decode(after).strip() in ("", "<eos>")
    if name == "llama3":
        assert here == there


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_rows_packed_by_someone_else_are_split_into_their_documents() -> None:
    row = {"input_ids": list(range(10, 20)), "labels": [10, 11, -100, *range(13, 20)], "seq_lengths": [4, 1, 5]}
    tokens = formats.to_conversation(row, formats.detect(list(row), [row]))
    (found,) = Encoder(tokenizer_for("plain", "own"), None, max_length=4).encode_batch([tokens])
    assert not isinstance(found, RowError)
    documents = [(piece.input_ids.tolist(), piece.labels.tolist()) for piece in found]
    # A document of one token predicts nothing; each document is cut for itself.
    assert documents == [([10, 11, 12, 13], [10, 11, -100, 13]), ([15, 16, 17, 18], [15, 16, 17, 18])]


def test_the_first_label_is_stored_and_never_trained(tmp_path: Any) -> None:
    tokenizer = tokenizer_for("bos", "own")
    rows = [{"text": "Natalia sold clips", "number": 0}, {"text": "a model answers", "number": 1}]
    expected = read_here(rows, tokenizer)[0]
    writer = store.Writer(tmp_path, "train")
    for ids, labels in expected.values():
        writer.add(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))
    writer.close()
    stored = store.load_rows(tmp_path, "train")
    assert [(row["input_ids"], row["labels"]) for row in stored.dataset] == list(expected.values())
    assert all(labels[0] == ids[0] for ids, labels in expected.values())
    lengths = [len(ids) for ids, _ in expected.values()]
    assert stored.label_tokens.tolist() == [length - 1 for length in lengths]
    packed = collate([[stored[0], stored[1]]], pad_token_id=0, pack_length=64)
    supervised = (packed["labels"][0] != IGNORE_INDEX).tolist()
    assert supervised == [place not in (0, lengths[0]) and place < sum(lengths) for place in range(64)]
    padded = collate([[stored[0]], [stored[1]]], pad_token_id=0, pack_length=None)
    assert (padded["labels"] != IGNORE_INDEX).sum(1).tolist() == stored.label_tokens.tolist()
    assert (padded["labels"][:, 0] == IGNORE_INDEX).all()
