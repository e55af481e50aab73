"""Tests of finetune/export/server.py and of `finetune export --check-server`, against servers in this process that
answer in the formats of vLLM, llama.cpp and SGLang with the log-probabilities of plain transformers."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data import store
from finetune.export import command, server
from tests.helpers.export import WARNINGS, edit, load

pytestmark = [*WARNINGS, pytest.mark.usefixtures("in_this_process")]

Reply = tuple[int, Any] | Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Reply]) -> Iterator[str]:
    """The address of a server that answers requests (path, body) with (status, JSON), or by itself."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            reply = answer(self.path, json.loads(self.rfile.read(length)) if length else {})
            if callable(reply):
                reply(self)
                return
            self.send_response(reply[0])
            self.end_headers()
            self.wfile.write(reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1]).encode())

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


class Engine:
    """What vLLM, llama.cpp or SGLang answer with a model, by their documentation.

    Args:
        forced: tokens that are generated at places of each answer, whatever the model prefers.
    """

    def __init__(self, kind: str, model: Any, tokenizer: Any, template: str, forced: dict[int, int] | None = None):
        self.kind, self.model, self.tokenizer, self.template = kind, model, tokenizer, template
        self.forced = forced or {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def logs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "mine", "object": "model"}]}
        chat = path == "/v1/chat/completions"
        prompt = body.get("prompt")
        if chat:
            text = self.tokenizer.apply_chat_template(
                body["messages"], chat_template=self.template, add_generation_prompt=True, tokenize=False
            )
            prompt = self.tokenizer(text).input_ids
        ids, new, own = list(prompt), [], []
        while len(new) < body["max_tokens"] and (not new or new[-1] != 2 or self.forced):
            logs = self.logs(ids)[-1]
            new.append(self.forced.get(len(new), int(logs.argmax())))
            own.append(float(logs[new[-1]]))
            ids.append(new[-1])
        choice = {"index": 0, "finish_reason": "stop" if new[-1] == 2 else "length"}
        choice |= self.logprobs(list(prompt), new, own, body, chat)
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(new)}
        ours = {"prompt_token_ids": list(prompt)} if chat and self.kind == "vllm" else {}
        return 200, {"model": "mine", "choices": [choice], "usage": usage} | ours

    def logprobs(
        self, prompt: list[int], new: list[int], own: list[float], body: dict[str, Any], chat: bool
    ) -> dict[str, Any]:
        pieces = [self.tokenizer.decode([one]) for one in new]
        content = [{"token": piece, "logprob": one} for piece, one in zip(pieces, own, strict=True)]
        if self.kind == "llama.cpp":  # `id` beside OpenAI's fields, in both endpoints
            content = [{"id": token} | one for token, one in zip(new, content, strict=True)]
        before = [None, *self.logs(prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()]
        found: dict[str, Any] = {"logprobs": {"content": content}}
        if not chat and self.kind != "llama.cpp":
            echoed = before if body.get("echo") else []
            found["logprobs"] = {"tokens": pieces, "token_logprobs": [*echoed, *own], "top_logprobs": None}
        if self.kind == "vllm":
            found["token_ids"] = new
            if "prompt_logprobs" in body:
                scores = [
                    None,
                    *({str(t): {"logprob": s, "rank": 1}} for t, s in zip(prompt[1:], before[1:], strict=True)),
                ]
                found["prompt_logprobs"] = scores
        return found


@pytest.fixture
def trained(run_folder: Path, base: Path, tmp_path: Path) -> dict[str, Any]:
    """A run with held-out rows, its model and its base as plain transformers and PEFT load them."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    def build(folder: Path) -> dict[str, Any]:
        writer = store.Writer(folder, "eval")
        for row in range(5):
            ids = np.arange(3 + row, 15 + row, dtype=np.int32)
            writer.add(ids, np.where(np.arange(len(ids)) < 4, -100, ids).astype(np.int32))
        writer.close()
        return {}

    folder, _ = store.entry(tmp_path / "cache", "key", build, verify=True)
    edit(run_folder / "run.json", data_folder=str(folder), ledger={"eval": {}})
    tokenizer = AutoTokenizer.from_pretrained(run_folder)
    adapted = PeftModel.from_pretrained(load(base).float(), run_folder).eval()
    given = {"run": run_folder, "tokenizer": tokenizer, "template": tokenizer.chat_template}
    return given | {"model": adapted, "base": load(base).float().eval()}


def check(run: Path, url: str, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and --json of the command."""
    file = tmp_path / "check.json"
    code = command.main([str(run), "--check-server", url, "--json", str(file), *more])
    return code, json.loads(file.read_text()) if file.is_file() else {}


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "sglang"])
@pytest.mark.campaign
def test_a_server_is_told_by_its_log_probabilities(
    kind: str,
    trained: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the trained model, of its base, and with another chat template. These models end no turn."""
    monkeypatch.setattr(server, "MAX_NEW_TOKENS", 6)
    tokenizer, template = trained["tokenizer"], trained["template"]

    engine = Engine(kind, trained["model"], tokenizer, template)
    with serving(engine) as url:
        code, found = check(trained["run"], f"{url}/v1/", tmp_path)
    assert (code, [one["outcome"] for one in found["findings"]]) == (0, ["equal"]), found
    assert found["to_run"] < 1e-3 < 0.1 < found["to_base"] and found["kept"] == pytest.approx(1, abs=1e-3)
    assert found["apart"] == pytest.approx(found["to_base"], rel=1e-2)
    # SGLang names no tokens by number, and these texts are not tokenized into the same ones again.
    assert found["chat"]["tokens"] == 18 or kind == "sglang"
    scored = 5 * 8 if kind != "llama.cpp" else 0  # llama.cpp has no log-probabilities of prompts
    assert found["tokens"] == scored + 8 * 6 or kind == "sglang" and found["tokens"] >= scored
    assert {body["model"] for _, body in engine.asked if body} == {"mine"}

    with serving(Engine(kind, trained["base"], tokenizer, template)) as url:
        code, found = check(trained["run"], url, tmp_path, "--served-name", "other")
    assert (code, found["findings"][0]["outcome"]) == (3, "base") and abs(found["kept"]) < 1e-3
    assert "as the base model" in capsys.readouterr().out

    monkeypatch.setattr(server, "NOISE", 1e-4)  # this model hardly listens
    monkeypatch.setattr(server, "LOST", 1e-2)
    other = "the cat " + template if kind == "sglang" else template.replace("['role']", "['role'][::-1]")  # as long
    with serving(Engine(kind, trained["model"], tokenizer, other)) as url:
        code, found = check(trained["run"], url, tmp_path)
    assert (code, [one["outcome"] for one in found["findings"]]) == (4, ["template", "equal"]), found


def test_answers_that_end_elsewhere(trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that has an end token and goes on, and one whose last token it is."""
    monkeypatch.setattr(server, "MAX_NEW_TOKENS", 4)
    for forced in ({1: 2}, {3: 2}):
        with serving(Engine("vllm", trained["model"], trained["tokenizer"], trained["template"], forced)) as url:
            code, found = check(trained["run"], url, tmp_path)
        outcomes = [one["outcome"] for one in found["findings"]]
        if forced == {3: 2}:
            assert (code, outcomes) == (0, ["equal"])
        else:
            assert (code, outcomes) == (5, ["stop", "equal"]) and found["ends_wrong"] == found["ends_judged"] == 11
            assert "<|im_end|>" in found["findings"][0]["sentence"]


def judged(**fields: Any) -> list[str]:
    """The outcomes of an answer [1, | 5, 6] by a server with the trained model's log-probabilities."""
    given = {"kind": "answer", "ids": [1, 5, 6], "start": 1, "logprobs": [-1.0, -2.0], "text": "b c"}
    given |= {"run": [-1.0, -2.0], "base": [-4.0, -3.0], "ends": [0.0, 0.1, 0.9]} | fields
    findings, _ = server.judge([server.Answer(**given)], "RUN", stops=[2], stop_text="<|end|>")
    return [outcome for outcome, _ in findings]


def test_ends_are_judged_by_the_trained_model() -> None:
    assert judged() == ["equal"]
    assert judged(text="b<|end|>") == ["stop", "equal"]
    assert judged(ends=[0.0, 0.7, 0.9]) == judged(ids=[1, 2, 6]) == ["stop", "equal"]
    assert judged(ends=[0.0, 0.7, 0.9], logprobs=[-4.0, -3.0]) == ["base"]  # another model has other ends
    assert judged(kind="chat", read=3)[0] == "template"
    assert judged(stopped=True) == judged(stopped=True, ids=[1, 5, 2], ends=[0.0, 0.9, 0.0]) == ["equal"]
    assert judged(stopped=True, ends=[0.0, 0.1, 0.001]) == ["stop", "equal"]  # too early


def test_what_lies_between_trained_and_base_model() -> None:
    """By the bound, and where both are within it, by the share of what training changed."""

    def outcome(server_share: float, apart: float, noise: float = 0.0) -> str:
        run = [-3.0] * 100
        base = [-3.0 + apart * (-1) ** place for place in range(100)]
        pairs = zip(run, base, strict=True)
        own = [b + server_share * (t - b) + noise * (place % 3 - 1) for place, (t, b) in enumerate(pairs)]
        answer = server.Answer("row", [1] * 101, 1, own, run=run, base=base, ends=[0.0] * 101)
        return server.judge([answer], "RUN")[0][0][0]

    assert [outcome(share, 1.0) for share in (1.0, 0.9, 0.58, 0.1, 0.0)] == [
        "equal",
        "equal",
        "differs",
        "base",
        "base",
    ]
    assert [outcome(share, 0.06, 0.02) for share in (1.0, 0.58, 0.0)] == ["equal", "differs", "base"]
    assert outcome(1.0, 0.001, 0.03) == "undecided"
    assert outcome(-3.0, 1.0) == "differs"
    alone = server.Answer("row", [1, 2], 1, [-3.0], run=[-3.01], ends=[0.0, 0.0])
    assert server.judge([alone], "RUN")[0][0][0] == "equal"
    alone.logprobs = [-3.2]
    assert server.judge([alone], "RUN")[0][0][0] == "differs"


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A byte at a time, without an end."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def choice(**fields: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"text": "the", "finish_reason": "stop"} | fields]}


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ((200, b"<html>\x1b[31mno"), "something else than a JSON object"),
        ((200, b"[" * 90_000), "something else than a JSON object"),
        ((200, b"\xff\xfe\x00"), "something else than a JSON object"),
        ((200, [1]), "something else than a JSON object"),
        ((200, b" " * 100_001), "more than 0 MiB"),
        ((302, b""), "HTTP 302"),
        ((500, {"error": {"message": "bad \x1b[31m\nthing " * 99}}), "HTTP 500: bad \\x1b[31m thing bad"),
        ((401, {"error": "no key"}), "HTTP 401: no key"),
        ((404, b"x"), "HTTP 404"),
        (drip, "does not answer"),
        (lambda handler: handler.wfile.write(b"\x00\x01garbage\r\n\r\n"), "does not answer"),
        (lambda handler: handler.wfile.write(b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "answer"),
        ((200, {}), "without choices"),
        ((200, {"choices": [3]}), "without choices"),
        (choice(), "gives no log-probabilities"),
        (choice(logprobs={"token_logprobs": [float("nan")]}), "gives no log-probabilities"),
        (choice(logprobs={"token_logprobs": [10**400]}), "gives no log-probabilities"),
        (choice(logprobs={"token_logprobs": ["x"], "tokens": 3}), "gives no log-probabilities"),
        (choice(logprobs={"content": [{"id": 10**9, "logprob": [1]}]}), "gives no log-probabilities"),
        (choice(logprobs={"token_logprobs": [-1.0] * 4}, text="\ud800"), "gives no log-probabilities"),
        (choice(logprobs={"token_logprobs": [-1.0] * 2000}, token_ids=[5] * 2000), "replies with 2,000 tokens to a"),
        (choice(logprobs={"token_logprobs": [-1.0]}, text="the " * 20_000), "gives no log-probabilities"),
        (choice(logprobs=[None], token_ids="x", prompt_logprobs=[{}, {"3": 1}]), "gives no log-probabilities"),
    ],
)
def test_a_broken_server_is_an_error(
    reply: Reply,
    wanted: str,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(server, "MOST_BYTES", 100_000)
    with serving(lambda path, body: reply) as url:
        assert command.main([str(run_folder), "--check-server", url, "--served-name", "m"]) == 1
    text = capsys.readouterr().err
    assert wanted in text and "Traceback" not in text and "\x1b" not in text and len(text) < 1000


def test_addresses_and_names(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (
        "localhost:8000",
        "file:///etc/passwd",
        "http://a:b@host",
        "http://h/?q",
        "http://",
        "http://h:x",
        "http://h/a b",
    ):
        assert command.main([str(run_folder), "--check-server", url]) == 2
        assert "--check-server must be an address" in capsys.readouterr().err
    assert command.main([str(run_folder), "--check-server", "http://h", "--to", "gguf"]) == 2
    assert command.main([str(run_folder), "--served-name", "m", "--to", "adapter", "--out", str(tmp_path / "x")]) == 2
    with serving(lambda path, body: (200, {"data": [{"id": "base"}, {"id": "my\x1b"}, {"id": 3}, 4]})) as url:
        assert command.main([str(run_folder), "--check-server", url]) == 2
    assert "base, my\\x1b. Name yours with --served-name" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert command.main([str(run_folder), "--check-server", f"http://127.0.0.1:{free.getsockname()[1]}"]) == 1
    assert "vllm serve" in capsys.readouterr().err


def test_the_key_is_sent() -> None:
    def keyed(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(json.dumps({"data": [{"id": handler.headers["Authorization"]}]}).encode())

    with serving(lambda path, body: keyed) as url:
        made = server.Server(url, "abc\n")
        made.choose(None)
        assert made.name == "Bearer abc" and made.shown(made.name) == "Bearer ***"
    with pytest.raises(server.UserError, match="must be printable ASCII"):
        server.Server(url, "abc\nX: y")
