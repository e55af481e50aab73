"""Files of strangers: a FIFO, a device or a link where a file should be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.engine.monitoring.event_file import RankLog
from finetune.errors import UserError
from finetune.runtime import files

NO_FILES = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}  # fmt: skip


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO would block whoever opens it, so the test fails instead."""

    def refused(*arguments: object) -> int:
        raise AssertionError(f"opened: {arguments}")

    monkeypatch.setattr(os, "open", refused)


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_not_a_regular_file_is_never_opened(kind: str, tmp_path: Path, nothing_opens: None) -> None:
    path = tmp_path / "x.json"
    NO_FILES[kind](path)
    calls: list[Callable[[Path], object]] = [files.read_text, files.read_bytes, files.read_json, files.checksum]
    calls += [lambda path: files.write_text(path, "x"), lambda path: files.append_text(path, "x"), files.check_output]
    for call in calls:
        with pytest.raises(files.NotRegular) as error:
            call(path)
        no_link = call in calls[:5]  # the others judge a link by itself
        found = kind if no_link or not path.is_symlink() else "symbolic link"
        assert str(error.value) == f"{path} is a {found}, not a regular file. Remove it, or give another path."
        assert isinstance(error.value, UserError) and isinstance(error.value, OSError)


def test_a_file_that_becomes_a_fifo_after_it_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened without waiting for a writer, and refused."""
    os.mkfifo(tmp_path / "x")
    (tmp_path / "regular").write_text("")
    before = os.stat(tmp_path / "regular")
    monkeypatch.setattr(os, "stat", lambda *path, **options: before)
    with pytest.raises(files.NotRegular, match="is a FIFO"):
        files.read_bytes(tmp_path / "x")


def test_links_are_read_but_never_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"one\r\ntwo")
    link.symlink_to(target)
    assert files.read_text(link) == "one\ntwo"
    assert files.read_bytes(link, at_most=2) == b"on"
    for write in (files.check_output, lambda path: files.append_text(path, "x")):
        with pytest.raises(files.NotRegular, match="is a symbolic link"):
            write(link)
    with pytest.raises(files.NotRegular):
        files.open_descriptor(link, follow=False)
    files.write_text(link, "new")
    assert not link.is_symlink() and link.read_text() == "new"
    assert target.read_bytes() == b"one\r\ntwo"


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".x.{os.getpid()}.partial").symlink_to(tmp_path / "victim")
    files.write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim", "x"]


def test_the_log_of_the_ranks_is_not_appended_to_another_file(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "runs" / "ranks.jsonl")
    log.append({"step": 1})
    log.append({"step": 2})
    assert (tmp_path / "runs" / "ranks.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(files.NotRegular):
        RankLog(tmp_path / "link.jsonl").append({"step": 1})
    assert (tmp_path / "victim").read_text() == "precious"


def test_what_a_folder_holds_beside_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    assert files.special_entry(tmp_path) is None
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert files.special_entry(tmp_path) == "zero is a device"
    assert files.special_entry(tmp_path / "none") is None


def test_a_place_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        tmp_path: "expected a file, got a folder",
        tmp_path / "file" / "a.json": "file is a file|Not a directory",
        tmp_path / ("n" * 300): "name too long",
        tmp_path / "pipe": "it is a FIFO",
    }
    for path, why in wrong.items():
        with pytest.raises(UserError, match=why):
            files.check_writable(path, "--json")
    files.check_writable(tmp_path / "new" / "a.json", "--json")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match="read-only"):
        files.check_writable(tmp_path / "new" / "a.json", "--json")


def test_the_name_of_an_output_is_text() -> None:
    files.check_name(Path("out/猫"), "--out")
    with pytest.raises(UserError, match="--out is .*, whose name is not UTF-8"):
        files.check_name(Path(os.fsdecode(b"out\xff")), "--out")


def test_a_text_may_quote_a_name_that_is_not_text(tmp_path: Path) -> None:
    files.write_text(tmp_path / "card", "trained on " + os.fsdecode(b"rows\xfe.jsonl"))
    assert (tmp_path / "card").read_text() == "trained on rows\\udcfe.jsonl"
