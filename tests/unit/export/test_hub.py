"""Tests of finetune/export/hub.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune.export import command, hub
from tests.helpers.export import TOKEN, WARNINGS, ends

pytestmark = WARNINGS


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's interface as an upload needs."""

    requests: list[tuple[str, str, bytes]] = []
    may_write = True

    def do_GET(self) -> None:  # noqa: N802
        self.answer()

    def do_POST(self) -> None:  # noqa: N802
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path, body))
        good = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        status, content = 200, {}
        if not good:
            status, content = 401, {"error": "Invalid credentials"}
        elif self.path.endswith("repos/create"):
            content = {"url": f"http://{self.headers['Host']}/me/model", "name": "me/model"}
        elif "preupload" in self.path and not self.may_write:
            status, content = 403, {"error": "Forbidden"}
        elif "preupload" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            content = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        elif "commit" in self.path:
            content = {
                "commitUrl": f"http://{self.headers['Host']}/me/model/commit/" + "1" * 40,
                "commitOid": "1" * 40,
                "hookOutput": "",
            }
        elif "revision" in self.path:
            content = {"id": "me/model", "sha": "1" * 40, "siblings": [], "tags": []}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants, hf_api

    Hub.requests, Hub.may_write = [], True
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{running.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield Hub
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.usefixtures("in_this_process")
def test_an_upload_is_dry_unless_asked_for(
    run_folder: Path, tmp_path: Path, server: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    arguments = [str(run_folder), "--to", "hub", "--repo", "me/model", "--out", str(out), "--json", str(report)]
    assert command.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Would upload to me/model (private)" in shown and "adapter_model.safetensors" in shown
    assert "export.json" not in shown and server.requests == []
    (out / "README.md").write_text("filled in")
    assert command.main([*arguments, "--upload"]) == 0
    shown = capsys.readouterr()
    assert "Using the earlier export" in shown.out and "/me/model/commit/1111" in shown.out
    (create,) = [body for _, path, body in server.requests if path.endswith("repos/create")]
    assert "private" in json.loads(create).values() or json.loads(create)["private"] is True
    (commit,) = [body for _, path, body in server.requests if "commit" in path]
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()} - {None}
    assert sent == {one["name"] for one in hub.files(out)} and "export.json" not in sent
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written and TOKEN not in shown.out + shown.err
    (out / "tokenizer.json").write_text("{}")
    assert "has changed since its export: tokenizer.json" in ends(capsys, [*arguments, "--upload"], 2)


def test_the_token_is_looked_for_before_anything_is_written(
    run_folder: Path,
    tmp_path: Path,
    server: type[Hub],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    def words() -> str:
        given = [str(run_folder), "--to", "hub", "--repo", "me/model", "--out", str(tmp_path / "out"), "--upload"]
        found = ends(capsys, given, 2)
        assert not (tmp_path / "out").exists()
        return found

    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert "There is no token" in words()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in words()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("token", ["wrong", "may only read"])
def test_a_token_that_may_not_write(
    token: str,
    run_folder: Path,
    tmp_path: Path,
    server: type[Hub],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.may_write = False
    if token == "wrong":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    given = [str(run_folder), "--to", "hub", "--repo", "our-lab/model", "--out", str(tmp_path / "out"), "--upload"]
    found = ends(capsys, given, 1)
    assert "the token is wrong or may not write there (status 40" in found and TOKEN not in found
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
