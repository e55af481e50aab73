"""From files to the cache: tokenized once, exactly and safely, with every row accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from tokenizers import Regex, pre_tokenizers

from finetune.config import load
from finetune.data import prepare as preparing
from finetune.data import readers, store
from finetune.data.layout import lay_out
from finetune.data.prepare import Data, prepare
from finetune.errors import RunError, UserError
from tests.helpers import launch, tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return tiny.make_rows(tmp_path / "train.jsonl", 60)


def prepared(tmp_path: Path, tokenizer: Any, files: Any, *extra: str) -> Data:
    named = [
        "--model.model_name_or_path",
        "m",
        "--data.train_file",
        str(files),
        "--data.cache_dir",
        str(tmp_path / "c"),
    ]
    return prepare(load([*named, *extra]), tokenizer)


def weighted(tmp_path: Path, tokenizer: Any, files: dict[Path, float], *extra: str) -> Data:
    entries = json.dumps([{"file": str(file), "weight": weight} for file, weight in files.items()])
    base = ["--model.model_name_or_path", "m", "--data.train", entries, "--data.cache_dir", str(tmp_path / "c")]
    return prepare(load([*base, *extra]), tokenizer)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(user: str, assistant: str) -> dict:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def test_rows_are_what_the_template_renders(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    data = prepared(tmp_path, tokenizer, train)
    for index, line in enumerate(train.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        ids, labels = data.train[index]
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(labels[labels != -100]) == messages[1]["content"] + "<|im_end|>"
    assert data.train.lengths.sum() == data.ledgers["train"]["tokens"]
    assert data.train.label_tokens.sum() == data.ledgers["train"]["supervised_tokens"]
    assert data.train.dataset[3]["input_ids"] == data.train[3][0].tolist()


def test_unchanged_data_and_settings_hit_the_cache_and_others_miss(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    first = prepared(tmp_path, tokenizer, train)
    assert not first.cached
    again = prepared(
        tmp_path, tokenizer, train, "--training.learning_rate", "1e-3", "--data.packing", "--training.seed", "9"
    )
    assert again.cached and again.fingerprint == first.fingerprint
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert prepared(tmp_path, tokenizer, train.rename(moved / "other.jsonl")).cached  # bytes count, not names
    train = moved / "other.jsonl"
    for extra in (
        ("--data.max_length", "64"),
        ("--data.assistant_only_loss", "false"),
        ("--data.system_prompt", "Be brief."),
        ("--model.chat_template", "phi"),
        ("--data.eval_fraction", "0.2"),
        ("--data.over_length", "drop"),
    ):
        assert not prepared(tmp_path, tokenizer, train, *extra).cached, extra
    with train.open("a") as file:
        file.write(json.dumps(chat("one", "more")) + "\n")
    assert not prepared(tmp_path, tokenizer, train).cached


def test_the_last_call_of_the_tokenizer_does_not_change_the_key(tmp_path: Path, train: Path) -> None:
    """Of a machine's ranks, one calls the tokenizer in `datasets.map`; the others read the result from the cache."""
    tokenizer = tiny.make_tokenizer(tmp_path / "tokenizer")
    first = prepared(tmp_path, tokenizer, train)
    tokenizer("a", truncation=True, max_length=8, padding="max_length")
    again = prepared(tmp_path, tokenizer, train)
    assert again.cached and again.fingerprint == first.fingerprint


@pytest.mark.parametrize("damage", ["byte", "cut", "gone", "version"])
def test_a_damaged_entry_is_built_again(
    tmp_path: Path, tokenizer: Any, train: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(tmp_path, tokenizer, train)
    ids = [first.train[index][0].copy() for index in range(len(first.train))]
    file = first.folder / "train.arrow"
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "gone":
        file.unlink()
    else:
        monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
    second = prepared(tmp_path, tokenizer, train)
    assert not second.cached
    assert all(np.array_equal(second.train[index][0], ids[index]) for index in range(len(ids)))
    assert prepared(tmp_path, tokenizer, train).cached


@pytest.mark.process
def test_a_killed_process_leaves_no_entry(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    """Killed after some rows are written; the next process starts over and is correct."""
    tokenizer.save_pretrained(tmp_path / "tok")
    code = (
        "import os, sys\n"
        "from transformers import AutoTokenizer\n"
        "from finetune.config import load\n"
        "from finetune.data import prepare, store\n"
        "close = store.Writer.close\n"
        "def die(self):\n    close(self); os._exit(9)\n"
        "store.Writer.close = die\n"
        "config = load(['--model.model_name_or_path', 'm', '--data.train_file', sys.argv[1], '--data.cache_dir', "
        "sys.argv[2]])\n"
        "prepare.prepare(config, AutoTokenizer.from_pretrained(sys.argv[3]))\n"
    )
    argv = ["-c", code, str(train), str(tmp_path / "c"), str(tmp_path / "tok")]
    assert launch.python(argv, cache=tmp_path).returncode == 9
    assert not list((tmp_path / "c").glob("*/entry.json"))
    data = prepared(tmp_path, tokenizer, train)
    assert not data.cached and len(data.train) == 60


def test_concurrent_runs_build_once(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: prepared(tmp_path, tokenizer, train), range(4)))
    assert len({data.fingerprint for data in found}) == 1 and sum(data.cached for data in found) == 3


@pytest.mark.process
@pytest.mark.campaign
def test_rows_encoded_in_several_processes_keep_their_order(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tiny.make_rows(tmp_path / "many.jsonl", 300)
    one = prepared(tmp_path, tokenizer, train, "--data.num_proc", "1")
    monkeypatch.setattr(preparing, "CHUNK_ROWS", 20)
    monkeypatch.setattr(preparing, "POOL_FROM_CHUNK", 2)
    two = prepared(tmp_path / "other", tokenizer, train, "--data.num_proc", "2")
    assert one.ledgers == two.ledgers
    assert all(np.array_equal(one.train[index][1], two.train[index][1]) for index in range(300))
    monkeypatch.setattr(preparing.ProcessPoolExecutor, "submit", Mock(side_effect=preparing.BrokenProcessPool))
    with pytest.raises(RunError, match="One of 2 tokenizing processes was killed: .*data.num_proc"):
        prepared(tmp_path / "third", tokenizer, train, "--data.num_proc", "2")


def test_every_row_is_accounted_for(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        chat("a", "b"),
        chat("a", "b"),  # an exact duplicate: counted and kept
        {"messages": [{"role": "assistant", "content": "first"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "y"}]},
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        {"messages": []},
        {"messages": None},
        chat("long", "word " * 100),
        chat("word " * 100, "never reached"),
    ]
    data = prepared(tmp_path, tokenizer, write(tmp_path / "r.jsonl", rows), "--data.max_length", "64")
    ledger = data.ledgers["train"]
    assert ledger["rows_read"] == 9
    assert (ledger["rows_kept"], ledger["duplicates"], ledger["truncated"]) == (3, 1, 1)
    assert sum(ledger["dropped"].values()) == 6
    reasons = ledger["dropped"]
    assert reasons["roles_out_of_order"] == 1 and reasons["unknown_role"] == 1 and reasons["no_assistant"] == 1
    assert reasons["no_label"] == 1
    assert "r.jsonl:4" in ledger["examples"]["unknown_role"] and "wizard" in ledger["examples"]["unknown_role"]


@pytest.mark.parametrize("how", ["truncate", "drop", "split"])
def test_over_length_documents(tmp_path: Path, tokenizer: Any, how: str) -> None:
    path = write(tmp_path / "r.jsonl", [chat("short", "answer"), chat("long", "word " * 100)])
    data = prepared(tmp_path, tokenizer, path, "--data.max_length", "64", "--data.over_length", how)
    whole = prepared(tmp_path, tokenizer, path, "--data.max_length", "4096").ledgers["train"]
    ledger = data.ledgers["train"]
    assert data.train.lengths.max() <= 64
    if how == "drop":
        assert ledger["dropped"] == {"over_length": 1} and ledger["rows_kept"] == 1
    elif how == "truncate":
        assert ledger["truncated"] == 1 and ledger["supervised_tokens"] < whole["supervised_tokens"]
    else:
        assert ledger["split"] == 1
        assert ledger["supervised_tokens"] == whole["supervised_tokens"]  # each label exactly once


def test_held_out_rows_are_a_fixed_share_and_disjoint(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "r.jsonl", [chat(f"number {index}", f"it is {index}") for index in range(400)])
    data = prepared(tmp_path, tokenizer, path, "--data.eval_fraction", "0.25")
    assert data.eval is not None
    texts = [{tokenizer.decode(rows[index][0]) for index in range(len(rows))} for rows in (data.train, data.eval)]
    assert len(texts[0]) + len(texts[1]) == 400 and not texts[0] & texts[1]
    assert 60 < len(texts[1]) < 140


def test_evaluation_rows_that_are_training_rows_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [chat(f"number {index}", f"it is {index}") for index in range(20)]
    train = write(tmp_path / "train.jsonl", rows)
    held_out = write(tmp_path / "eval.jsonl", [chat("another", "row"), rows[7], rows[3], chat("one", "more")])
    ledger = prepared(tmp_path, tokenizer, train, "--data.eval_file", str(held_out)).ledgers["eval"]
    assert ledger["leaked"] == {"rows": 2, "first": {"file": str(held_out), "line": 2}}
    own = write(tmp_path / "own.jsonl", [chat("another", "row"), chat("another", "row")])
    assert prepared(tmp_path, tokenizer, train, "--data.eval_file", str(own)).ledgers["eval"]["leaked"]["rows"] == 0
    ledgers = prepared(tmp_path, tokenizer, train).ledgers
    assert "leaked" not in ledgers["train"] and "eval" not in ledgers
    twice = prepared(tmp_path, tokenizer, f"[{train}, {train}]", "--data.eval_fraction", "0.5").ledgers["eval"]
    assert twice["leaked"]["rows"] > 0  # a row and its copy may be in different splits


@pytest.mark.parametrize(
    ("rows", "weight", "copies"),
    [(50, 2, {2: 50}), (203, 0.25, {1: 51}), (8, 0.2, {1: 2}), (5, 2.5, {3: 3, 2: 2}), (1, 0.5, {1: 1})],
)
def test_a_weight_takes_so_many_rows_whatever_the_seed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, rows: int, weight: float, copies: dict[int, int]
) -> None:
    """round(rows x weight), which of them the seed decides; also if they come in chunks."""
    monkeypatch.setattr(preparing, "CHUNK_ROWS", 70)
    one = write(tmp_path / "one.jsonl", [chat("one", "x")])
    two = write(tmp_path / "two.jsonl", [chat(f"two {index}", "x") for index in range(rows)])
    found = []
    for seed in ("1", "2"):
        train = weighted(tmp_path, tokenizer, {one: 1, two: weight}, "--training.seed", seed).train
        texts = Counter(tokenizer.decode(train[index][0]) for index in range(len(train)))
        found.append({text: count for text, count in texts.items() if "two" in text})
        assert Counter(found[-1].values()) == copies
    assert (found[0] == found[1]) == (weight % 1 == 0 or rows == 1)


def test_files_of_one_entry_are_weighted_together(tmp_path: Path, tokenizer: Any) -> None:
    for index in range(10):
        write(tmp_path / f"part-{index}.jsonl", [chat(f"part {index}", "x")])
    assert len(weighted(tmp_path, tokenizer, {tmp_path / "part-*.jsonl": 0.3}).train) == 3


def test_weights_that_take_no_row(tmp_path: Path, tokenizer: Any) -> None:
    one = write(tmp_path / "one.jsonl", [chat(f"one {index}", "x") for index in range(50)])
    two = write(tmp_path / "two.jsonl", [chat(f"two {index}", "x") for index in range(8)])
    with pytest.raises(UserError) as caught:
        weighted(tmp_path, tokenizer, {one: 2, two: 0.06})
    assert str(caught.value) == (
        f"{two}: a weight of 0.06 takes none of its 8 rows. Set it to at least 0.063, or remove the source."
    )
    assert len(weighted(tmp_path, tokenizer, {one: 1, two: 0.063}).train) == 51


def test_other_formats_and_sources(tmp_path: Path, tokenizer: Any) -> None:
    """The same conversation as messages, ShareGPT, Alpaca and prompt/completion, in four file types."""
    import datasets

    question, answer = "the cat", "runs over a hill"
    share = {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    prompt, completion = ([message] for message in chat(question, answer)["messages"])
    datasets.Dataset.from_list([{"prompt": prompt, "completion": completion}]).to_parquet(tmp_path / "p.parquet")
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": question, "input": "", "output": answer}]))
    (tmp_path / "q.csv").write_text(f"question,answer\n{question},{answer}\n")
    files = [write(tmp_path / "m.jsonl", [chat(question, answer)]), write(tmp_path / "s.jsonl", [share])]
    files += [tmp_path / "p.parquet", tmp_path / "a.json"]
    found = [prepared(tmp_path, tokenizer, file).train[0] for file in files]
    found.append(
        prepared(
            tmp_path, tokenizer, tmp_path / "q.csv", "--data.columns", "{instruction: question, output: answer}"
        ).train[0]
    )
    for ids, labels in found[1:]:
        assert np.array_equal(ids, found[0][0]) and np.array_equal(labels, found[0][1])


WITH_SYSTEM = {"messages": [{"role": "system", "content": "s"}, *chat("a", "b")["messages"]]}


@pytest.mark.parametrize(
    ("rows", "extra", "expected"),
    [
        ([chat("word " * 200, "late")], ("--data.max_length", "32"), "no_label"),
        ([chat("word " * 200, "late")], ("--data.max_length", "32", "--data.over_length", "drop"), "over_length"),
        ([WITH_SYSTEM], ("--model.chat_template", "gemma"), "template_error"),
    ],
    ids=["all masked", "all too long", "template fails"],
)  # fmt: skip
def test_data_without_labels(tmp_path: Path, tokenizer: Any, rows: list, extra: tuple, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        prepared(tmp_path, tokenizer, write(tmp_path / "r.jsonl", rows), *extra)
    assert not list((tmp_path / "c").glob("*/"))


def test_mixed_formats_in_one_file_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [chat("a", "b")] * 3 + [{"messages": "just text"}]
    data = prepared(tmp_path, tokenizer, write(tmp_path / "r.jsonl", rows))
    assert data.ledgers["train"]["rows_kept"] == 3 and sum(data.ledgers["train"]["dropped"].values()) == 1


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_full_or_read_only_cache_disk(tmp_path: Path, tokenizer: Any, train: Path, kind: str) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], check=True)
    try:
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        extra = ("--data.cache_dir", str(mount / "c"))
        with pytest.raises((RunError, UserError), match="No space left" if kind == "full" else "Read-only file system"):
            prepared(tmp_path, tokenizer, tiny.make_rows(tmp_path / "big.jsonl", 400), *extra)
        assert not list(mount.glob("c/*/"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert prepared(tmp_path, tokenizer, train).ledgers["train"]["rows_kept"] == 60


def test_packs_hold_every_document_once_and_are_padded(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    from finetune.data.collate import collate

    data = prepared(tmp_path, tokenizer, train)
    layout = lay_out(data.train, 256, seed=1, fingerprint=data.fingerprint)
    seen = Counter()
    for row in range(len(layout)):
        batch = collate([layout[row], []], pad_token_id=0, pack_length=256)
        assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 512)
        lengths = batch["packed_seq_lengths"].tolist()
        assert sum(lengths) == 512
        starts = np.cumsum([0, *lengths[:-1]])
        assert (batch["position_ids"][0, starts] == 0).all()
        assert (batch["labels"][0, starts] == -100).all()  # the first token of a document is never a label
        for start, length in list(zip(starts, lengths, strict=True))[: len(layout[row])]:
            seen[tuple(batch["input_ids"][0, start : start + length].tolist())] += 1
        assert int((batch["labels"] != -100).sum()) == layout.label_tokens[row]
    assert sum(seen.values()) == 60
    assert layout.label_tokens.sum() == data.ledgers["train"]["supervised_tokens"]


def test_equally_long_documents_get_a_segment_of_another_length() -> None:
    from finetune.data.collate import collate

    document = (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    alike = collate([[document] * 2, [document] * 2], pad_token_id=9, pack_length=8, uneven=True)
    assert alike["packed_seq_lengths"].tolist() == [4, 4, 4, 4, 8]
    assert alike["input_ids"][0, 16:].tolist() == [9] * 8
    assert (alike["labels"][0, 16:] == -100).all()
    assert alike["position_ids"][0, 16:].tolist() == list(range(8))
    unlike = collate([[document], []], pad_token_id=9, pack_length=8, uneven=True)
    assert unlike["input_ids"].shape == (1, 16)  # padding does that already


@pytest.mark.process
@pytest.mark.campaign
def test_resident_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """40 million tokens (320 MB) are mapped and planned in a process that stays small."""
    writer = store.Writer(tmp_path, "train")
    ids = np.arange(20_000, dtype=np.int32)
    for _ in range(2000):
        writer.add(ids, ids)
    writer.close()
    assert (tmp_path / "train.arrow").stat().st_size > 300e6
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom finetune.data import store\nimport datasets\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = store.load_rows(Path(sys.argv[1]), 'train')\n"
        "assert len(rows) == 2000 and rows[1999][0][-1] == 19999\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env=launch.environment(tmp_path),
        check=True,
    )
    assert float(done.stdout) < 50  # MiB


class Backend:
    """A tokenizer's backend whose `encode_batch_fast` first calls `before(texts)`."""

    def __init__(self, backend: Any, before: Any) -> None:
        self._backend, self._before = backend, before

    def encode_batch_fast(self, texts: list[str], **given: Any) -> Any:
        self._before(texts)
        return self._backend.encode_batch_fast(texts, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def with_backend(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    from finetune.data.templates import encoder

    tokenize = encoder.Encoder.tokenize

    def tokenized(self: Any, texts: list[str], special: bool, *, offsets: bool) -> Any:
        tokenizer = SimpleNamespace(backend_tokenizer=Backend(self._tokenizer.backend_tokenizer, before))
        return tokenize(SimpleNamespace(_tokenizer=tokenizer), texts, special, offsets=offsets)  # type: ignore[arg-type]

    monkeypatch.setattr(encoder.Encoder, "tokenize", tokenized)


def test_a_slow_tokenizer_is_reported(
    tmp_path: Path,
    tokenizer: Any,
    train: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line comes while the tokenizer is at work. Here it goes on once the line is there."""
    reported = threading.Event()
    report = readers.report_slow

    def noted(places: list[str]) -> None:
        report(places)
        reported.set()

    monkeypatch.setattr(readers, "report_slow", noted)
    monkeypatch.setattr(readers, "SLOW_SECONDS", 0.0)
    with_backend(monkeypatch, lambda texts: reported.wait(30))
    data = prepared(tmp_path, tokenizer, train)
    assert len(data.train) == 60
    shown = capsys.readouterr().err
    assert f"warning: tokenizing rows {train}:1 to {train}:60 has taken 0 s so far" in shown and "Ctrl-C" in shown


def test_a_template_whose_error_is_long(tmp_path: Path, tokenizer: Any, train: Path) -> None:
    """The error is searched for secrets: under an expression that backtracks, that never ended."""
    (tmp_path / "t.jinja").write_text("{{ raise_exception('token:' * 15000) }}")
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, tokenizer, train, "--model.chat_template", str(tmp_path / "t.jinja"))
    assert "the chat template failed: token:" in str(caught.value) and "model.chat_template" in str(caught.value)


def test_a_quick_tokenizer_is_not_reported(
    tmp_path: Path, tokenizer: Any, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, tokenizer, train)
    assert "tokenizing" not in capsys.readouterr().err
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer) and not one.finished.is_set()]


def test_a_tokenizer_that_gives_up_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tokenizers library does after too many steps of a regular expression of tokenizer.json: Rust panics."""
    tokenizer = tiny.make_tokenizer(tmp_path / "t")
    split = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    rows = write(tmp_path / "rows.jsonl", [chat("hello", "x"), chat("a" * 60 + "b", "y"), chat("b", "z")])
    with pytest.raises(UserError, match=r"rows.jsonl:2: the tokenizer failed on this row: .*retry-limit.*tokenizer"):
        prepared(tmp_path, tokenizer, rows)


POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from finetune.data import prepare

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=prepare.start_worker) as pool:
        found = {pool.submit(os.getpid).result() for _ in range(2)}
        print("started", flush=True)
        time.sleep(600)
"""


@pytest.mark.process
def test_workers_of_the_data_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "pool.py")],
        stdout=subprocess.PIPE, text=True, env=launch.environment(tmp_path), cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == "started\n"
        workers = [
            child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
        process.kill()
        assert workers
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            for worker in workers:
                worker.kill()
            raise
