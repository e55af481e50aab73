"""The witness's generated rows: what a program asks for decides what it gets, equally on both sides."""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest

from tests.notebooks.oracle import notebook as witness_notebook
from tests.notebooks.oracle import stand_ins as witness_stand_ins
from tests.notebooks.oracle.stand_ins import (
    ROWS,
    divided,
    noted,
    places,
    quantization,
    record_trainer,
    rows,
    share,
    shown,
)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(witness_stand_ins, "columns", {"question": "text", "id": "number"})
    monkeypatch.setitem(sys.modules, "stand_ins", witness_stand_ins)
    return witness_stand_ins.columns


def test_a_selection_of_existing_rows_is_exact() -> None:
    assert places([3, 1, -1], ROWS) == [3, 1, -1] and places([], ROWS) == []
    assert places(list(range(100)), ROWS) == list(range(100))


def test_another_size_of_a_larger_data_set_is_another_selection() -> None:
    sizes = (1000, 2000, 5000, 10_000, 50_000)
    assert len({len(places(list(range(size)), ROWS)) for size in sizes}) == len(sizes)
    assert len({share(size, ROWS) for size in sizes}) == len(sizes)
    assert all(0.05 <= share(size, ROWS) <= 0.15 for size in sizes)
    assert share(10, ROWS) == 10 and share(0.2, ROWS) == 0.2 and share(None, ROWS) is None
    assert 0 < len(places(list(range(5000, 6000)), ROWS)) <= ROWS


def test_rows_are_the_same_for_the_same_source_alone() -> None:
    sources = ["a", "b", ("a", "train"), ("a", "test"), ("a", "train[:10]")]
    found = [json.dumps(rows(ROWS, source)) for source in sources]
    assert len(set(found)) == len(sources) and found == [json.dumps(rows(ROWS, source)) for source in sources]


def test_every_column_has_long_rows_and_short_ones() -> None:
    lengths = {name: [len(row[name]) for row in rows()] for name in ("question",)}
    witness_stand_ins.columns["answer"] = "text"
    lengths["answer"] = [len(row["answer"]) for row in rows()]
    for found in lengths.values():
        assert max(found) > 2000 and sum(length < 200 for length in found) > ROWS // 2
    assert [a > 500 for a in lengths["question"]] != [a > 500 for a in lengths["answer"]]


def test_some_values_are_empty_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    witness_stand_ins.columns["talk"] = "messages"
    assert all(row["question"] and all(turn["content"] for turn in row["talk"]) for row in rows())
    monkeypatch.setattr(witness_stand_ins, "empty", True)
    found = rows()
    assert 0 < sum(not row["question"] for row in found) < ROWS / 3
    last = [row["talk"][-1] for row in found]
    assert 0 < sum(not turn["content"] for turn in last) < ROWS / 3
    assert all(turn["role"] == "assistant" for turn in last)


def test_rows_are_divided_as_by_scikit_learn() -> None:
    table = pandas.DataFrame(rows())
    for size, held in ((0.25, 30), (12, 12), (None, 30)):
        train, test, ids, other = divided(table, list(range(ROWS)), test_size=size, random_state=3)
        assert len(test) == len(other) == held and len(train) == len(ids) == ROWS - held
        assert sorted([*train["id"], *test["id"]]) == list(range(ROWS)) and list(test["id"]) == other
    first, second = (divided(list(range(ROWS)), random_state=seed)[0] for seed in (1, 2))
    assert first != second


READS: dict[str, Callable[[Any], Any]] = {
    "by name": lambda data: data["answer"],
    "in a row": lambda data: data[0]["answer"],
    "renamed": lambda data: data.rename_column("answer", "text"),
    "several renamed": lambda data: data.rename_columns({"answer": "text"}),
    "removed": lambda data: data.remove_columns("answer"),
    "one of several removed": lambda data: data.remove_columns(["id", "answer"]),
    "selected": lambda data: data.select_columns(["answer"]),
    "of a frame": lambda data: data.to_pandas()["answer"],
    "an attribute of a frame": lambda data: data.to_pandas().answer,
    "several of a frame": lambda data: data.to_pandas()[["id", "answer"]],
    "dropped from a frame": lambda data: data.to_pandas().drop(columns=["answer"]),
    "in map": lambda data: data.map(lambda row: {"x": row["answer"]}),
    "in filter": lambda data: data.filter(lambda row: row["answer"]),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_a_missing_column_is_named(read: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever the library raises)
        read(datasets.Dataset.from_list(rows(3)))
    assert witness_notebook.missing(caught.value) == "answer"


def test_a_column_of_labels_has_those_that_the_code_names() -> None:
    named = 'for mood in ["good", "bad"]:\n    part = data[data.mood == mood]'
    compared = """a = data[data["mood"] == 'good']\nb = data[data.mood=="bad"]"""
    for source in (named, compared):
        witness_notebook.change("mood", source, witness_stand_ins)
        assert [row["mood"] for row in rows(4)] == ["good", "bad", "good", "bad"]
        del witness_stand_ins.columns["mood"]
    assert not witness_notebook.labels("mood", 'data.mood == "good"')


def test_columns_that_are_read_with_get_are_found() -> None:
    source = 'a = row.get("messages", [])\nb = os.environ.get("HF_TOKEN")\nc = row.get( \'answer\')\nd = m.get("role")'
    assert witness_notebook.optional_columns(source) == ["messages", "answer"]


@pytest.mark.parametrize("name", ["rows.json", "deep/rows.jsonl", "/content/rows.csv", "rows.tsv"])
def test_a_file_that_does_not_exist_is_generated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(witness_stand_ins, "files", {})
    path = Path(str(witness_stand_ins._elsewhere(name, "r")))
    assert path.is_relative_to(tmp_path)
    if path.suffix == ".json":
        found = json.loads(path.read_text())
    elif path.suffix == ".jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        found = pandas.read_csv(path, sep="," if path.suffix == ".csv" else "\t").to_dict("records")
    assert [list(row) for row in found] == [["question", "id"]] * ROWS
    assert found[3] == rows(ROWS, name)[3]


@pytest.mark.parametrize("name", ["weights.bin", "config.yaml", "../../etc/passwd", "", 3])
def test_another_file_is_not(name: Any) -> None:
    assert witness_stand_ins._elsewhere(name, "r") is None


def test_a_folder_of_another_machine_is_not_made_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((os, "makedirs"), (os, "mkdir"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(module, name, getattr(module, name))
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    witness_stand_ins._replace_open()
    (tmp_path / "none" / "birds").mkdir()
    os.mkdir(str(tmp_path / "none" / "birds"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError):
        os.mkdir("none/birds")


def test_what_is_not_installed_reads_the_same_on_both_sides() -> None:
    one, two = (witness_stand_ins.missing_package("emoji") for _ in range(2))
    assert str(one.demojize("x").upper()) == str(two.demojize("x").upper()) and f"{one}" == f"{two}"
    package = witness_stand_ins.missing_package("sklearn")
    assert package.model_selection.train_test_split is divided
    assert all(a != b for a, b in pairwise(divided([1, 2, 3, 4])))


def test_kinds_that_the_code_asks_for() -> None:
    kinds = {"label": "number:3", "text": "text:Price is $", "pair": "object:en|fr"}
    witness_stand_ins.columns.clear()
    witness_stand_ins.columns.update(kinds)
    found = rows()
    assert {row["label"] for row in found} == {0, 1, 2}
    with_words = [number % 3 for number, row in enumerate(found) if "\nPrice is $ " in row["text"]]
    assert set(with_words) == {0, 1} and len(with_words) == 2 * ROWS // 3
    assert all(set(row["pair"]) == {"en", "fr"} and row["pair"]["en"] != row["pair"]["fr"] for row in found)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("rows = rows.filter(lambda row: 'python' in row['text'])", ["python"]),
        ("rows = rows.filter(lambda row: any(w in row['text'] for w in ['java', 'perl']))", ["java", "perl"]),
        ("def keep(row):\n    return '### Answer' in row['text']\nrows = rows.filter(keep)", ["### Answer"]),
        ("print('python' in text)", []),
    ],
)
def test_words_that_a_filter_looks_for(cell: str, words: list[str]) -> None:
    witness_stand_ins.record.clear()
    assert witness_notebook.words_looked_for([cell], witness_stand_ins) == words


def test_rows_are_adapted_in_each_way_once() -> None:
    witness_stand_ins.columns.update(question="text", intent="text")
    cells, tried = ["rows = rows.filter(lambda row: 'python' in row['question'])"], [""]
    assert witness_notebook.adapt(cells, witness_stand_ins, tried)
    assert witness_stand_ins.columns["intent"].startswith("choice:") and witness_stand_ins.columns["question"] == "text"
    assert witness_notebook.adapt(cells, witness_stand_ins, tried)
    assert witness_stand_ins.columns["question"] == "text:python"
    assert not witness_notebook.adapt(cells, witness_stand_ins, tried)


def test_the_number_that_a_table_lacks() -> None:
    def failure(table: dict[Any, str], key: Any) -> int:
        with pytest.raises(KeyError) as error:
            table[key]
        return witness_notebook.unknown_number(error.value)

    assert failure({0: "no", 1: "yes"}, 2) == 2
    assert failure({"a": "b"}, "c") == 0


# --- what the program gives to its trainer ----------------------------------------------------------------------------


def of_a_notebook(space: dict[str, Any]) -> Any:
    """A function whose names are global."""
    exec('def keep(row):\n    """Short\n    rows."""\n    return any(len(row["id"]) < LIMIT for _ in [0])', space)
    return space["keep"]


def of_a_script() -> Any:
    """The same function, whose names are of the function around it."""
    LIMIT = 5  # noqa: N806

    def keep(row: Any) -> bool:
        """Short rows."""
        return any(len(row["id"]) < LIMIT for _ in [0])

    return keep


def test_a_function_reads_the_same_wherever_its_names_are_defined() -> None:
    theirs, ours = of_a_notebook({"LIMIT": 5}), of_a_script()
    assert shown(theirs) == shown(ours) and "LIMIT" in shown(ours) and "'id'" in shown(ours)
    exec('def keep(row):\n    """Short rows."""\n    return any(len(row["no"]) < LIMIT for _ in [0])', space := {})
    assert shown(space["keep"]) != shown(ours)


def test_rows_know_the_steps_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("filter", "select", "train_test_split"):
        monkeypatch.setattr(datasets.Dataset, name, noted(name, getattr(datasets.Dataset, name)))
    table = datasets.Dataset.from_list(rows())
    made = (
        table.filter(lambda row: row["id"] >= 0, keep_in_memory=True)
        .select(range(50))
        .train_test_split(test_size=10, seed=3)
    )
    steps: Any = made["test"].steps  # type: ignore[attr-defined]
    assert [step.split()[0] for step in steps] == ["filter", "select", "train_test_split", "test"]
    assert "keep_in_memory" not in steps[0] and "range(0, 50)" in steps[1] and "seed" in steps[2]
    given = {"train_dataset": made["train"], "eval_dataset": made["test"], "callbacks": [str, 5]}
    monkeypatch.setattr(witness_stand_ins, "record", {})
    record_trainer(given)
    one = dict(witness_stand_ins.record)
    record_trainer(given | {"eval_dataset": made["train"]})
    assert one["steps of the rows"] == [*steps[:-1], "train"] and one["callbacks"] == ["str", "int"]
    assert one["held-out rows"][0] == 10 and one["held-out rows"] != witness_stand_ins.record["held-out rows"]


def test_how_a_loader_quantizes_is_compared() -> None:
    assert quantization({"load_in_4bit": True}) == quantization({"quantization_config": {"load_in_4bit": True}})
    four = {"quantization_config": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "torch.bfloat16"}}
    assert quantization(four)["bnb_4bit_quant_type"] == "nf4"
    assert quantization(four)["bnb_4bit_compute_dtype"] == "bfloat16"
