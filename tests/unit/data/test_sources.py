"""Reading rows: every file type gives the same rows, and errors name the position in the file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets.exceptions
import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.arrow import Struct
from finetune.data.sources import content_digest, expand, iter_hub, iter_rows
from finetune.errors import UserError

ROWS = [{"prompt": "1 + 1?", "completion": "2"}, {"prompt": 'Größe 🙂,\n"x"?', "completion": "groß\u2028enough"}]


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path], object]] = {
    "x.jsonl": lambda path: path.write_text(jsonl(ROWS), encoding="utf-8"),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS).encode())),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8"),
    "data.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8"),
    "lines.json": lambda path: path.write_text(jsonl(ROWS), encoding="utf-8"),
    "x.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "x.csv": write_csv,
    "x.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
}


def read(*files: object) -> list[dict]:
    return [row for row, _ in iter_rows([str(file) for file in files])]


def fails(*files: object) -> str:
    with pytest.raises(UserError) as caught:
        read(*files)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_type_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == ROWS
    assert len(content_digest([str(tmp_path / name)])) == 32


def test_zstd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(b"any")
    assert "unsupported extension: .jsonl.zst. Supported are .jsonl" in fails(tmp_path / "x.jsonl.zst")


def test_positions_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + jsonl(ROWS), encoding="utf-8")  # blank lines are skipped
    write_csv(tmp_path / "b.csv")
    WRITERS["x.parquet"](tmp_path / "c.parquet")
    places = [where for _, where in iter_rows([str(tmp_path)])]
    assert places == [
        *[f"{tmp_path}/a.jsonl:{line}" for line in (2, 3)],
        *[f"{tmp_path}/b.csv:row {row}" for row in (1, 2)],
        *[f"{tmp_path}/c.parquet:row {row}" for row in (1, 2)],
    ]


def test_folders_and_globs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(jsonl([{"text": name}]), encoding="utf-8")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    (tmp_path / ".hidden.jsonl").write_text("about", encoding="utf-8")
    WRITERS["saved"](tmp_path / "saved")
    assert [row["text"] for row in read(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [row["text"] for row in read(tmp_path / "**" / "*.jsonl")] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert [row["text"] for row in read(tmp_path / "b.jsonl", tmp_path / "a*")] == ["b.jsonl", "a.jsonl"]
    assert expand([str(tmp_path / "sav*")]) == [tmp_path / "saved"]
    assert "No data file matches" in fails(tmp_path / "*.parquet")
    assert "README.md" in fails(tmp_path / "READ*")
    odd = tmp_path / "odd[1].jsonl"  # a name that looks like a glob
    odd.write_text(jsonl(ROWS), encoding="utf-8")
    assert read(odd) == ROWS


def test_a_missing_file_lists_similar_names(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    assert "does not exist" in (message := fails(tmp_path / "trian.jsonl")) and "train.jsonl" in message
    assert f"{tmp_path / 'nowhere'} does not exist either" in fails(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "empty").mkdir()
    assert "has no data file: it contains nothing" in fails(tmp_path / "empty")
    (tmp_path / "x.xlsx").write_bytes(b"PK")
    assert "unsupported extension: .xlsx. Supported are .jsonl" in fails(tmp_path / "x.xlsx")
    assert "No data file was given" in fails()


def test_splits_of_a_saved_dataset_dict(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "dict")
    folder = tmp_path / "dict"
    assert f"data.train_file: {folder / 'train'} and data.eval_file: {folder / 'test'}" in fails(folder)
    assert read(tmp_path / "dict" / "train") == ROWS


@pytest.mark.parametrize(
    "names, refused",
    [
        (["train.jsonl", "test.jsonl"], True),
        (["chat.jsonl", "my-test-set.jsonl"], True),
        (["train-00000.parquet", "validation-00000.parquet"], True),
        (["trainset.jsonl", "testset.jsonl"], True),  # which `datasets` reads as one split
        (["train.jsonl", "training_2.jsonl"], False),
        (["test_a.jsonl", "test_b.jsonl"], False),
        (["contest.jsonl", "latest.jsonl", "devices.jsonl"], False),
    ],
)
def test_held_out_files_are_not_mixed_with_others(names: list[str], refused: bool, tmp_path: Path) -> None:
    folder = tmp_path / "test"  # the name of the given folder itself does not count
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"")
    for given in (folder, folder / "*", folder / "**" / "*.*", folder.as_uri()):
        if not refused:
            assert len(expand([str(given)])) == len(names)
        else:
            with pytest.raises(UserError, match=r"contains several splits: .* Give one of them: data\."):
                expand([str(given)])
    assert len(expand([str(folder / name) for name in names])) == len(names)


def test_files_about_a_data_set_are_not_its_rows(tmp_path: Path) -> None:
    for name in ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "config.json"):
        (tmp_path / name).write_text('{"default": {"features": {}}}')
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    for given in (tmp_path, tmp_path / "*", tmp_path.as_uri()):
        assert [str(file).rpartition("/")[2] for file in expand([str(given)])] == ["train.jsonl"]


def test_a_folder_of_folders_names_those_that_have_data(tmp_path: Path) -> None:
    for name in ("data", "docs", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    (tmp_path / "docs" / "README.md").write_text("# Rows")
    with pytest.raises(UserError, match=f"has no data file: .*docs.* Give {tmp_path}/data, which has some"):
        expand([str(tmp_path)])


@pytest.mark.parametrize(
    ("names", "suggested"),
    [
        (["test_gen", "test_sft", "train_gen", "train_sft"], ["train_sft", "test_sft"]),
        (["dev_math", "test_code", "train_code"], ["train_code", "test_code"]),
        (["test", "train", "train_sft", "validation"], ["train", "validation"]),
        (["test", "train_prefs", "train_sft"], ["train_sft", "test"]),
        (["train_sft"], []),
    ],
)
def test_the_splits_of_a_saved_dictionary_that_belong_together(
    names: list[str], suggested: list[str], tmp_path: Path
) -> None:
    datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in names}).save_to_disk(tmp_path)
    with pytest.raises(UserError) as caught:
        expand([str(tmp_path)])
    pairs = zip(("data.train_file", "data.eval_file"), suggested, strict=False)
    remedy = " and ".join(f"{key}: {tmp_path}/{name}" for key, name in pairs)
    expected = f"one of them: {remedy}." if suggested else f"its folder: {tmp_path}/{names[0]}."
    assert str(caught.value).endswith(f"Give {expected}"), caught.value


def test_raw_text_is_read_only_if_it_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "README.md", "LICENSE.txt"):
        (tmp_path / name).write_bytes(
            gzip.compress(b"one\n\ntwo") if name.endswith("gz") else b"one\r\n\t\n\ntwo\r\nlines"
        )
    expected = [("one", f"{tmp_path}/a.txt:1"), ("two\nlines", f"{tmp_path}/a.txt:4")]
    assert [(row["text"], where) for row, where in iter_rows([str(tmp_path / "a.txt")])] == expected
    assert expand([str(tmp_path)]) == [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    assert read(tmp_path / "b.txt.gz") == [{"text": "one"}, {"text": "two"}]
    assert read(tmp_path / "README.md") == [{"text": "one\n\t\n\ntwo\nlines"}]
    assert list(iter_rows([tmp_path / "a.txt"], whole=True)) == [
        (read(tmp_path / "README.md")[0], f"{tmp_path}/a.txt:1")
    ]
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    for given in (tmp_path, tmp_path / "*", tmp_path.as_uri(), f"{tmp_path.as_uri()}/*"):
        assert [str(file).rpartition("/")[2] for file in expand([str(given)])] == ["rows.jsonl"]
    assert len(expand([f"{tmp_path.as_uri()}/*.txt"])) == 2


def test_objects_of_arrow_are_distinguished_from_json(tmp_path: Path) -> None:
    """Arrow gives an object the keys of all objects; what `datasets` stores as JSON keeps its own."""
    features = datasets.Features(
        {"calls": datasets.List({"a": datasets.Value("string"), "own": datasets.Json()}), "top": datasets.Json()}
    )
    rows = [{"calls": [{"own": {"x": None}}], "top": {"y": [1, "1", None]}}, {"calls": [{"a": "b"}], "top": "text"}]
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(tmp_path / "x.parquet")
    data.save_to_disk(tmp_path / "saved")
    for found in (read(tmp_path / "x.parquet"), read(tmp_path / "saved")):
        (call,), top = found[0]["calls"], found[0]["top"]
        assert type(call) is Struct and call == {"a": None, "own": {"x": None}}
        assert type(call["own"]) is dict and top == {"y": [1, "1", None]} and type(top) is dict
        assert found[1]["top"] == "text"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_of_a_csv(separator: str, mark: bytes, tmp_path: Path) -> None:
    lines = [["prompt", "completion"], ["a, b; c", "d\te"], ['"', "two\nlines"]]
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator).writerows(lines)
    (tmp_path / "x.csv").write_bytes(mark + file.getvalue().encode())
    assert read(tmp_path / "x.csv") == [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    (tmp_path / "x.csv").write_bytes(mark + f"prompt{separator}completion\na{separator}b{separator}c\n".encode())
    name = {",": "a comma", ";": "a semicolon", "\t": "a tab"}[separator]
    assert f"has 3 fields, but the header has 2. Put quotes around text that contains {name}." in fails(
        tmp_path / "x.csv"
    )


def test_a_csv_of_one_column_and_of_utf_16(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text\na; b\tc\n")
    assert read(tmp_path / "x.csv") == [{"text": "a; b\tc"}]
    (tmp_path / "x.csv").write_text("prompt\tcompletion\na\tb\n", encoding="utf-16")  # Excel's "Unicode text"
    assert "Convert it, for example with `iconv -f UTF-16 -t UTF-8`." in fails(tmp_path / "x.csv")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.jsonl.gz"])
def test_an_empty_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert f"{tmp_path / name} is empty" in fails(tmp_path / name)


def test_files_without_rows_are_empty(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n", encoding="utf-8")
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    (tmp_path / "x.csv").write_text("prompt,completion\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.string())}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.json", "x.csv", "x.parquet"):
        assert "is empty" in fails(tmp_path / name)


def test_invalid_json_is_reported_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(jsonl(ROWS) + '{"prompt": "cut off\n', encoding="utf-8")
    assert f"{file}:3: invalid JSON (" in fails(file)
    file.write_text(jsonl(ROWS) + "[1, 2]\n", encoding="utf-8")
    assert f"{file}:3: a row must be an object with named fields, not a list" in fails(file)
    listed = tmp_path / "x.json"
    listed.write_text('[{"a": 1},\n {"a": 2\n', encoding="utf-8")
    assert f"{listed}:3: invalid JSON (" in fails(listed)
    listed.write_text('[{"a": 1}, 7]', encoding="utf-8")
    assert f"{listed}:row 2: a row must be an object" in fails(listed)
    listed.write_text('{"rows": [], "version": 2}', encoding="utf-8")
    assert "an object with the keys rows, version" in fails(listed)
    listed.write_text('"text"', encoding="utf-8")
    assert "it is a str" in fails(listed)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_wrong_encoding_is_reported_with_the_byte(name: str, tmp_path: Path) -> None:
    WRITERS["list.json" if name == "x.json" else name](tmp_path / name)
    good = (tmp_path / name).read_bytes().replace("ß".encode(), b"ss")
    (tmp_path / name).write_bytes(good.replace("ö".encode(), b"\xf6"))
    offset = good.index("ö".encode()) if name != "x.json" else None
    if offset is None:  # json.dumps wrote escapes: insert the byte by hand
        offset = 5
        (tmp_path / name).write_bytes(good[:5] + b"\xf6" + good[5:])
    message = fails(tmp_path / name)
    line = good[:offset].count(b"\n") + 1
    assert f"{tmp_path / name}:{line}: not UTF-8 at byte {offset} of the file" in message
    (tmp_path / name).write_bytes(good.decode().encode("utf-16"))
    assert "UTF-16" in fails(tmp_path / name)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.csv", "list.json"):
        WRITERS[name](tmp_path / name)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
        assert read(tmp_path / name) == ROWS


def test_invalid_csv(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("prompt,completion\na,b\nc,d,e\n", encoding="utf-8")
    assert f"{file}:row 2 (line 3) has 3 fields, but the header has 2" in fails(file)
    file.write_text("text,text\na,b\n", encoding="utf-8")
    assert "the header repeats text" in fails(file)
    file.write_text('text\n"a\n', encoding="utf-8")
    assert "invalid CSV" in fails(file)
    file.write_text("text\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert len(read(file)[0]["text"]) == 200_000


@pytest.mark.parametrize("name", ["x.parquet", "stream.arrow", "file.arrow", "x.jsonl.gz", "saved"])
def test_incomplete_and_damaged_files(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    target = next((tmp_path / name).glob("*.arrow")) if name == "saved" else tmp_path / name
    target.write_bytes(target.read_bytes()[:-20][: 60 if name == "x.jsonl.gz" else None])
    assert "incomplete or damaged" in fails(tmp_path / name)
    target.write_bytes(b"something else")
    assert "incomplete or damaged" in fails(tmp_path / name)
    if name == "saved":
        target.unlink()
        assert "is missing: " in fails(tmp_path / name)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for _ in range(20_000):
            out.write('{"text": "' + "x" * 990 + '"}\n')
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_rows([str(file)])) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_the_digest_depends_on_the_contents_only(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
        (tmp_path / folder / "b.jsonl").write_text(jsonl(ROWS[:1]), encoding="utf-8")
    a, b = (str(tmp_path / "one" / name) for name in ("a.jsonl", "b.jsonl"))
    digest = content_digest([a, b])
    assert content_digest([str(tmp_path / "two")]) == digest
    assert content_digest([b, a]) != digest
    assert content_digest([a]) != digest
    (tmp_path / "two" / "a.jsonl").write_text(jsonl(ROWS)[:-1], encoding="utf-8")  # moves a newline to the next file
    (tmp_path / "two" / "b.jsonl").write_text("\n" + jsonl(ROWS[:1]), encoding="utf-8")
    assert content_digest([str(tmp_path / "two")]) != digest
    (tmp_path / "two" / "b.jsonl").write_text(jsonl(ROWS[1:]), encoding="utf-8")
    assert content_digest([str(tmp_path / "two")]) != digest

    WRITERS["saved"](tmp_path / "saved")
    saved = content_digest([str(tmp_path / "saved")])
    (tmp_path / "saved").rename(tmp_path / "moved")
    assert content_digest([str(tmp_path / "moved")]) == saved


# --- the Hub ----------------------------------------------------------------------------------------------------------


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(iter_hub("org/name", "main", "test", "v1")) == [
        (ROWS[0], "org/name:test:row 1"),
        (ROWS[1], "org/name:test:row 2"),
    ]
    assert asked == [(("org/name", "main"), {"split": "test", "revision": "v1"})]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ConnectionError("no route"), "not in the local cache and cannot be downloaded.*data.train_file"),
        (datasets.exceptions.DatasetNotFoundError("no such thing"), "not found on the Hub.*log in"),
        (ValueError("Unknown split \"trian\". Should be one of ['train']"), "Unknown split.*train"),
    ],
)
def test_hub_errors_name_the_remedy(error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=hint):
        list(iter_hub("org/name"))
