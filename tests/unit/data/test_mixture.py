"""Several sources of rows: each read its own way, together one set of documents."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pytest
from rich.console import Console

from finetune.config import Config, ConfigError, dump_yaml, load
from finetune.data.ledger import sources_table
from finetune.data.prepare import Data, Source, prepare, prepare_splits
from finetune.data.sources import expand
from finetune.engine.session.opening import check_present
from finetune.errors import UserError
from tests.helpers import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def config(tmp_path: Path, *extra: str) -> Config:
    base = ["--model.model_name_or_path", "m", "--data.train_file", "unused", "--data.cache_dir", str(tmp_path / "c")]
    return load([*base, *extra])


def source(name: str, rows: list[dict], **settings: Any) -> Source:
    items = [(row, f"{name}:{number}") for number, row in enumerate(rows, 1)]
    return Source(name=name, open=lambda: iter(items), identity=[name, rows], **settings)


def documents(rows: Any) -> list[tuple[list[int], list[int]]]:
    return [tuple(side.tolist() for side in rows[index]) for index in range(len(rows))]  # type: ignore[misc]


def texts(word: str, count: int) -> list[dict]:
    return [{"text": f"{word} {index}"} for index in range(count)]


def test_splits_of_any_name_and_none_to_train_on(tmp_path: Path, tokenizer: Any) -> None:
    one, two = source("one", texts("one", 3)), source("two", texts("one", 2) + texts("two", 4))
    data = prepare_splits(config(tmp_path), tokenizer, {"train": [one], "eval_a/b": [two], "eval_data2": [one]})
    assert [len(rows) for rows in data.splits.values()] == [3, 6, 3] and list(data.ledgers) == list(data.splits)
    assert data.ledgers["eval_a/b"]["leaked"] == {"rows": 2, "first": {"file": "two", "line": 1}}
    assert data.ledgers["eval_data2"]["leaked"]["rows"] == 3 and "leaked" not in data.ledgers["train"]
    alone = prepare_splits(config(tmp_path), tokenizer, {"eval": [two]})
    assert alone.eval is not None and documents(alone.eval) == documents(data.splits["eval_a/b"])
    assert "leaked" not in alone.ledgers["eval"] and "train" not in alone.splits


def test_sources_are_opened_only_to_build_an_entry(tmp_path: Path, tokenizer: Any) -> None:
    opened: list[int] = []
    rows = source("one", texts("one", 3))
    counted = Source(name="one", open=lambda: opened.append(1) or rows.open(), identity="same")
    first = prepare_splits(config(tmp_path), tokenizer, {"train": [counted]})
    again = prepare_splits(config(tmp_path), tokenizer, {"train": [counted]})
    assert opened == [1] and again.cached and again.fingerprint == first.fingerprint
    other = Source(name="one", open=rows.open, identity="other")
    assert prepare_splits(config(tmp_path), tokenizer, {"train": [other]}).fingerprint != first.fingerprint


def test_held_out_rows_have_no_copy_among_the_training_rows(tmp_path: Path, tokenizer: Any) -> None:
    given = {"train": [source("one", texts("one", 60), weight=3.0), source("two", texts("two", 60))]}
    data = prepare_splits(config(tmp_path, "--data.eval_fraction", "0.3"), tokenizer, given)
    assert data.eval is not None and data.ledgers["eval"]["leaked"]["rows"] == 0
    held_out = documents(data.eval)
    assert len(held_out) == len({tuple(ids) for ids, _ in held_out}) and 20 < len(held_out) < 55
    assert data.ledgers["train"]["duplicates"] == 0  # copies that a weight asks for are none


def test_a_source_whose_rows_are_all_dropped_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    good, bad = source("good", texts("one", 3)), source("bad", [{"text": ""}] * 2)
    with pytest.raises(UserError, match=r"bad: none of 2 rows \(train\) .* Dropped in train: 2 x empty \(first: bad:1"):
        prepare_splits(config(tmp_path), tokenizer, {"train": [good, bad]})


def test_a_source_without_usable_rows_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"mine: none of 1 row \(eval\) has a supervised token"):
        given = {"train": [source("one", texts("one", 3))], "eval": [source("mine", [{"text": ""}])]}
        prepare_splits(config(tmp_path), tokenizer, given)
    assert not list((tmp_path / "c").glob("*/"))


# --- data.train and data.eval ---------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(word: str, count: int) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"{word} {index}"}, {"role": "assistant", "content": "yes it is"}]}
        for index in range(count)
    ]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Three files in three formats, one with columns of its own."""
    (tmp_path / "q.csv").write_text("question,answer\n" + "".join(f"the cat {i},runs {i}\n" for i in range(7)))
    alpaca = [{"instruction": f"over a hill {index}", "input": "", "output": f"it runs {index}"} for index in range(5)]
    return {
        "chat": write(tmp_path / "chat.jsonl", chat("one", 6)),
        "csv": tmp_path / "q.csv",
        "alpaca": write(tmp_path / "alpaca.jsonl", alpaca),
    }


def run(tmp_path: Path, tokenizer: Any, *arguments: str) -> Data:
    base = ("--model.model_name_or_path", "m", "--data.cache_dir", str(tmp_path / "c"))
    return prepare(load([*base, *arguments]), tokenizer)


def test_a_mixture_is_its_sources_prepared_alone(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    """Each with the short forms and its own settings; a weight repeats every row."""
    columns = {"prompt": "question", "completion": "answer"}
    entries = [
        {"file": str(files["chat"])},
        {"file": [str(files["csv"])], "columns": columns, "weight": 2},
        {"file": str(files["alpaca"]), "format": "alpaca", "template": "gemma", "weight": 3},
        {"file": str(files["chat"]), "template": "gemma"},
    ]
    mixed = run(tmp_path, tokenizer, "--data.train", json.dumps(entries))
    alone = [
        run(tmp_path, tokenizer, "--data.train_file", str(files["chat"])),
        run(tmp_path, tokenizer, "--data.train_file", str(files["csv"]), "--data.columns", json.dumps(columns)),
        run(tmp_path, tokenizer, "--data.train_file", str(files["alpaca"]), "--model.chat_template", "gemma"),
        run(tmp_path, tokenizer, "--data.train_file", str(files["chat"]), "--model.chat_template", "gemma"),
    ]
    counts = (1, 2, 3, 1)
    expected = [
        document
        for one, count in zip(alone, counts, strict=True)
        for document in documents(one.train)
        for _ in range(count)
    ]
    assert documents(mixed.train) == expected and expected[0] != documents(alone[3].train)[0]
    rows = mixed.ledgers["train"]["sources"]
    names = [str(files["chat"]), str(files["csv"]), str(files["alpaca"]), f"{files['chat']} (entry 2)"]
    assert [row["name"] for row in rows] == names
    for row, one, count in zip(rows, alone, counts, strict=True):
        ledger = one.ledgers["train"]
        assert row["formats"] == [one.format]
        for key in ("rows_read", "rows_kept", "tokens", "supervised_tokens"):
            assert row[key] == count * ledger[key]
    assert mixed.format == "; ".join(dict.fromkeys(one.format for one in alone))


def test_each_file_of_a_list_has_its_own_format(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    listed = run(tmp_path, tokenizer, "--data.train_file", f"[{files['chat']}, {files['alpaca']}]")
    alone = [run(tmp_path, tokenizer, "--data.train_file", str(files[name])) for name in ("chat", "alpaca")]
    assert documents(listed.train) == documents(alone[0].train) + documents(alone[1].train)
    one_entry = run(tmp_path, tokenizer, "--data.train", f"[{{file: {tmp_path}/*.jsonl}}]")
    assert documents(one_entry.train) == documents(alone[1].train) + documents(alone[0].train)
    (row,) = one_entry.ledgers["train"]["sources"]
    assert row["rows_read"] == 11 and row["formats"] == [alone[1].format, alone[0].format]


def test_raw_text_by_blank_lines_or_by_file(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    (tmp_path / "book.txt").write_text("the cat runs\n\nover a hill\n")
    (tmp_path / "book.md").write_text("the cat runs\n\nover a hill\n")
    divided = run(tmp_path, tokenizer, "--data.train_file", str(tmp_path / "book.txt"))
    whole = run(tmp_path, tokenizer, "--data.train_file", str(tmp_path / "book.txt"), "--data.format", "document")
    markdown = run(tmp_path, tokenizer, "--data.train_file", str(tmp_path / "book.md"))
    one_of_two = run(tmp_path, tokenizer, "--data.train", f"[{{file: {tmp_path}/book.txt, format: document}}]")
    assert len(divided.train) == 2 and divided.fingerprint != whole.fingerprint
    assert documents(whole.train) == documents(markdown.train) == documents(one_of_two.train)
    assert "divided by blank lines (data.format: document keeps a file whole), each ends with" in divided.format
    assert "documents of raw text, one per file, each ends with" in whole.format == markdown.format
    with pytest.raises(UserError, match=r"document is for .txt and .md files, and .*chat.jsonl has rows"):
        run(tmp_path, tokenizer, "--data.train_file", str(files["chat"]), "--data.format", "document")


def test_evaluation_rows_may_be_a_mixture(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    entries = f"[{{file: {files['chat']}}}, {{file: {files['alpaca']}, format: alpaca}}]"
    data = run(tmp_path, tokenizer, "--data.train", f"[{{file: {files['alpaca']}}}]", "--data.eval", entries)
    assert data.eval is not None and len(data.eval) == 11 and data.ledgers["eval"]["leaked"]["rows"] == 5


def test_dropped_rows_are_counted_by_source(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    bad = write(tmp_path / "bad.jsonl", [*chat("two", 2), {"messages": "text"}, {"messages": []}])
    entries = f"[{{file: {files['chat']}}}, {{file: {bad}, weight: 2}}]"
    ledger = run(tmp_path, tokenizer, "--data.train", entries).ledgers["train"]
    assert [row["rows_dropped"] for row in ledger["sources"]] == [0, 4] == [0, sum(ledger["dropped"].values())]
    assert [row["rows_kept"] for row in ledger["sources"]] == [6, 4] and ledger["rows_read"] == 14
    table = sources_table({"train": ledger})
    assert table is not None and table.row_count == 2
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    assert max(map(len, capture.get().splitlines())) <= 80 and "bad.jsonl" in capture.get()
    assert all(f" {name} " in capture.get() for name in ("kept", "dropped", "tokens", "share", "supervised"))


def test_the_weight_for_a_share_of_the_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """As docs/data.md computes it: 20 % beside 40 rows are 10 of 80 rows of the same length."""
    one, two = (write(tmp_path / f"{word}.jsonl", chat("one", n)) for word, n in (("a", 40), ("b", 80)))
    entries = f"[{{file: {one}}}, {{file: {two}, weight: {20 / 80 * 40 / 80}}}]"
    ledger = run(tmp_path, tokenizer, "--data.train", entries).ledgers["train"]
    assert [row["rows_kept"] for row in ledger["sources"]] == [40, 10]
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(sources_table({"train": ledger}))
    assert [line.split("│")[7].strip() for line in capture.get().splitlines() if ".jsonl" in line] == ["80%", "20%"]


def test_a_data_set_of_the_hub_in_a_mixture(
    tmp_path: Path, tokenizer: Any, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def from_hub(*arguments: Any) -> Any:
        asked.append(arguments)
        return ((row, f"hub:{number}") for number, row in enumerate(chat("hub", 3), 1))

    monkeypatch.setattr("finetune.data.sources.iter_hub", from_hub)
    entries = f"[{{file: {files['chat']}}}, {{name: org/set, config: main, split: test}}, {{name: org/other}}]"
    data = run(tmp_path, tokenizer, "--data.train", entries)
    assert asked == [("org/set", "main", "test"), ("org/other", None, "train")] and len(data.train) == 12
    assert [row["name"] for row in data.ledgers["train"]["sources"]][1:] == ["org/set:main:test", "org/other"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--data.train", "[{fiel: a.jsonl}]"), ["entry 1: `fiel`: unknown key. Nearest is file."]),
        (
            ("--data.train", "[{file: a, weight: x}, {chat_template: b, name: c, split: 3}]"),
            [
                "entry 1: `weight: x`: expected a number.",
                "entry 2: `chat_template`: unknown key. Nearest is template.",
                "entry 2: `split: 3`: expected a string.",
            ],
        ),
        (("--data.train", "[{file: a, epochs: 2}]"), ["entry 1: `epochs`: unknown key. Nearest is weight."]),
        (("--data.train", "[{file: a, name: b}]"), ["entry 1: `file` and `name`: both name the rows."]),
        (("--data.train", "[{format: text}]"), ["entry 1: `file` and `name`: neither names the rows."]),
        (("--data.train", "[{file: a, split: test}]"), ["`split` applies to a dataset on the Hub."]),
        (("--data.train", "[{file: a, weight: 0}]"), ["entry 1: `weight: 0`: must be above 0."]),
        (("--data.train", "[{file: a, format: chatml}]"), ["`format: chatml`: expected one of auto, messages"]),
        (("--data.train", "[]"), ["the list is empty."]),
        (("--data.train", "a.jsonl"), ["expected a list of mappings or null"]),
        (("--data.train", "[{file: a}]", "--data.train_file", "b"), ["both name the training data. Keep one."]),
        (("--data.train_file", "a", "--data.weights", "[1]"), ["unknown key of `data:`. Nearest is data.train ("]),
        (("--data.train_file", "b", "--data.eval", "[{}]"), ["--data.eval [{}]`: entry 1: `file` and `name`"]),
        (
            ("--data.train_file", "b", "--data.eval", "[{file: a}]", "--data.eval_fraction", "0.5"),
            ["both choose the held-out rows. Keep one."],
        ),
    ],
)
def test_mistakes_in_entries_are_reported_together(arguments: tuple[str, ...], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--model.model_name_or_path", "m", *arguments])
    for text in expected:
        assert text in str(caught.value)
    assert len(caught.value.problems) == len(expected)


def test_entries_survive_the_resolved_configuration(tmp_path: Path) -> None:
    given = "[{file: a.jsonl}, {name: org/set, weight: 0.5, columns: {prompt: q, completion: a}}]"
    first = load(["--model.model_name_or_path", "m", "--data.train", given, "--data.eval", "[{file: b.csv}]"])
    (tmp_path / "resolved.yaml").write_text(dump_yaml(first))
    again = load(["--config", str(tmp_path / "resolved.yaml")])
    assert again.data == first.data and Config.from_dict(first.to_dict()).data == first.data


def test_missing_files_of_a_mixture_are_found_before_anything_is_loaded(files: dict[str, Path]) -> None:
    for key in ("train", "eval"):
        other = ["--data.train_file", str(files["chat"])] if key == "eval" else []
        entries = f"[{{file: {files['chat']}}}, {{file: missing.jsonl}}]"
        loaded = load(["--model.model_name_or_path", str(files["chat"].parent), *other, f"--data.{key}", entries])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("finetune.engine.preflight.config_checks.check", lambda _: None)
            with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
                check_present(loaded)


def test_a_template_of_a_source_that_does_not_exist(tmp_path: Path, tokenizer: Any, files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"chat\.jsonl, template chatmll: .* neither a known name nor a file"):
        run(tmp_path, tokenizer, "--data.train", f"[{{file: {files['chat']}, template: chatmll}}]")


# --- files behind a URL ---------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_a_file_behind_a_url_has_the_same_documents(tmp_path: Path, tokenizer: Any, bucket: Any, name: str) -> None:
    rows, local = texts("one", 6), tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith((".parquet", ".arrow")):
        table = datasets.Dataset.from_list(rows)
        if name.endswith(".parquet"):
            table.to_parquet(local)
        else:
            with pyarrow.ipc.new_stream(local, table.data.table.schema) as stream:
                stream.write_table(table.data.table)
    elif name.endswith(".csv"):
        local.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
    elif name.endswith(".json"):
        local.write_text(json.dumps(rows))
    else:
        packed = {"gz": gzip.compress}.get(name[8:], bytes)
        local.write_bytes(packed(lines))
    bucket.pipe(f"/bucket/{name}", local.read_bytes())
    bucket.pipe("/bucket/README.md", b"x")
    there = run(tmp_path, tokenizer, "--data.train_file", f"memory://bucket/{name}")
    assert documents(there.train) == documents(run(tmp_path, tokenizer, "--data.train_file", str(local)).train)
    for other in ("memory://bucket/*", "memory://bucket"):
        assert documents(run(tmp_path, tokenizer, "--data.train", f"[{{file: '{other}'}}]").train) == documents(
            there.train
        )


def test_a_changed_file_behind_a_url_is_read_again(tmp_path: Path, tokenizer: Any, bucket: Any) -> None:
    found = []
    for word in ("one", "two"):
        bucket.pipe("/bucket/a.jsonl", json.dumps({"text": word}).encode())
        found += [run(tmp_path, tokenizer, "--data.train_file", "memory://bucket/a.jsonl") for _ in range(2)]
    assert [data.cached for data in found] == [False, True, False, True]
    assert documents(found[0].train) != documents(found[2].train)


def test_urls_that_cannot_be_read(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> str:
        with pytest.raises(UserError) as caught:
            expand([name])
        return str(caught.value)

    assert "memory://bucket/none.jsonl cannot be read" in refused("memory://bucket/none.jsonl")
    bucket.pipe("/bucket/README.md", b"x")
    assert "has no data file: it has memory:///bucket/README.md" in refused("memory://bucket")
    assert "Protocol not known: nosuch" in refused("nosuch://a/b.jsonl")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    text = refused("s3://me:hunter2hunter2@bucket/x.parquet")
    assert "`pip install s3fs`" in text and "hunter2" not in text

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("offline: token=abcdefgh12345678")

    monkeypatch.setattr(bucket, "exists", offline)
    monkeypatch.setattr(bucket.__class__, "exists", offline)
    text = refused("memory://bucket/a.jsonl")
    assert "memory://bucket/a.jsonl cannot be read: ConnectionError" in text and "abcdefgh" not in text
