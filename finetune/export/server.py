"""Asks a server with the OpenAI interface for log-probabilities, and judges whether it serves what was trained.

A server may be broken or hostile: its replies are limited in time and size, redirects are not followed, and every value
is checked before it is used.
"""

from __future__ import annotations

import http.client
import json
import shlex
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from finetune.errors import RunError, UserError, cut, listed
from finetune.redact import MASK
from finetune.runtime.types import JsonObject, Tokenizer
from finetune.text import counted

REQUEST_SECONDS, ALL_SECONDS = 120, 900  # for one reply, and for all
MOST_BYTES = 16 * 2**20  # of a reply
MAX_NEW_TOKENS = 64
MOST_CHARACTERS = 100 * MAX_NEW_TOKENS  # of an answer, of which the rest is not read; and of a model's name
ROWS, CONTEXT, SCORED = 8, 1024, 64  # rows of the run, most tokens before the scored ones, and most scored ones
# Of the mean difference of a token's log-probability, measured: docs/serving.md#bounds
NOISE = 0.1  # of bfloat16 and other kernels
LOST = 0.1  # of the difference between trained and base model, as in check.py
ENDS, GOES_ON = 0.5, 0.01  # the trained model's probability that a turn ends here, at least and at most
CODES = {"equal": 0, "base": 3, "template": 4, "stop": 5, "differs": 6, "undecided": 7}  # exit codes
START = (
    "Start one that gives log-probabilities: `vllm serve`, `llama-server` or `python -m sglang.launch_server` "
    "(docs/serving.md)."
)


class ServerError(RunError):
    """The server does not answer, or not with what is needed."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Server:
    """A server with the OpenAI interface, and the name of the model that is asked for."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` may end with /v1; `key` is sent as the bearer token, and shown nowhere. Raises UserError if one of them
        is invalid."""
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            valid = valid and not (parts.query or parts.fragment or parts.username is not None)
        except ValueError:
            valid = False
        if not valid or not url.isprintable() or " " in url:
            raise UserError(f"--check-server must be an address such as http://localhost:8000: got {cut(url)!r}.")
        self._key = (key or "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError("The server's key must be printable ASCII. Correct FINETUNE_SERVER_KEY.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name: str | None = None
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        self._send = urllib.request.build_opener(_NoRedirects).open
        self._until = time.monotonic() + ALL_SECONDS

    def shown(self, text: object, most: int = 80) -> str:
        """What the server sent, for the user: cut, and without the key, which it may repeat."""
        return cut(str(text).replace(self._key, MASK) if self._key else text, most)

    def choose(self, name: str | None) -> None:
        """Ask for the model of this name, or for the only one. Raises UserError if there are several."""
        data = [] if name else self.ask("/v1/models").get("data")
        given = [one.get("id") for one in data if isinstance(one, dict)] if isinstance(data, list) else []
        names = [one for one in given if isinstance(one, str) and 0 < len(one) < MOST_CHARACTERS]
        if len(names) > 1:
            raise UserError(
                f"The server has several models: {listed(map(self.shown, names))}. Name yours with --served-name."
            )
        if not name and not names:
            raise ServerError(f"{self.url}/v1/models names no model. Name yours with --served-name.")
        self.name = name or names[0]

    def ask(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """The JSON object with which the server replies to GET, or to POST if there is a body.

        Raises:
            ServerError: there is none within the limits.
        """
        seconds = max(min(REQUEST_SECONDS, self._until - time.monotonic()), 0.1)
        data = None if body is None else json.dumps(body).encode()
        replies: list[tuple[int, bytes] | Exception] = []

        def fetch() -> None:  # in a thread: a timeout of urllib begins again with every byte
            request = urllib.request.Request(self.url + path, data, self._headers)
            try:
                try:
                    with self._send(request, timeout=seconds) as reply:
                        replies.append((reply.status, reply.read(MOST_BYTES + 1)))
                except urllib.error.HTTPError as error:
                    replies.append((error.code, b"" if 300 <= error.code < 400 else error.read(10_000)))
            except (OSError, ValueError, http.client.HTTPException) as error:
                replies.append(error)

        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        thread.join(seconds)
        reply = replies[0] if replies else TimeoutError(f"no reply within {seconds:.0f} s")
        if isinstance(reply, Exception):
            why = self.shown(getattr(reply, "reason", None) or reply)
            raise ServerError(f"{self.url}{path} does not answer: {why}. Correct --check-server, or start it. {START}")
        status, content = reply
        if len(content) > MOST_BYTES:
            raise ServerError(f"{self.url}{path} replies with more than {MOST_BYTES / 2**20:.0f} MiB. {START}")
        try:
            given = json.loads(content)
        except (ValueError, RecursionError):
            given = None
        if status != 200:  # also for a redirect, which is not followed
            why = given.get("error", given) if isinstance(given, dict) else None
            why = why.get("message") if isinstance(why, dict) else why
            raise ServerError(f"{self.url}{path} replies with HTTP {status}: {self.shown(why or '', 200)}. {START}")
        if not isinstance(given, dict):
            raise ServerError(f"{self.url}{path} replies with something else than a JSON object. {START}")
        return given

    def choice(self, path: str, body: JsonObject) -> tuple[JsonObject, JsonObject]:
        """The reply to a greedy request, and its choice. Servers ignore fields that they do not know."""
        reply = self.ask(path, {"model": self.name, "temperature": 0.0, "return_token_ids": True} | body)
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise ServerError(f"{self.url}{path} replies without choices. {START}")
        return reply, choices[0]


@dataclass
class Answer:
    """What the server gives for one prompt, and what our own forward passes give for it.

    kind:      "row" (given tokens), "answer" (generated after our tokens) or "chat" (generated after our messages)
    ids:       tokens of the prompt, as training renders it, and of what follows
    start:     where that begins
    logprobs:  the server's, of ids[start:]; empty if it gives none
    text:      generated; `stopped`: it came to an end
    read:      number of tokens as which the server reads messages, if it gives that; or why it cannot be asked
    run, base: log-probabilities of ids[start:] by the trained model and by its base, if that is known
    ends:      the trained model's probability that the turn ends, before each of these tokens and after the last
    """

    kind: str
    ids: list[int]
    start: int
    logprobs: list[float]
    text: str = ""
    stopped: bool = False
    read: object = None
    run: list[float] = field(default_factory=list)
    base: list[float] | None = None
    ends: list[float] = field(default_factory=list)


# --- asking -----------------------------------------------------------------------------------------------------------


def ask_all(
    server: Server, tokenizer: Tokenizer, rows: Sequence[list[list[int]]], chats: Sequence[tuple[JsonObject, list[int]]]
) -> list[Answer]:
    """What the server gives for rows, as [input_ids, labels], and for questions: the request of each, empty without a
    chat template, and its tokens. Raises ServerError if it gives no log-probabilities."""
    found: list[Answer] = []
    scores: list[float] | None = []
    prompts = []
    for ids, labels in rows:
        first = next((place for place, label in enumerate(labels) if label >= 0 and place), CONTEXT)
        whole = list(ids[: first + SCORED])
        prompts.append(whole[: first if first > 1 else len(whole) // 2])  # half of a text without a prompt
        if scores is not None and first < CONTEXT and (scores := prompt_logprobs(server, whole)) is not None:
            found.append(Answer("row", whole, first, scores[first:]))
    for ids in [*(one for one in prompts if 0 < len(one) < CONTEXT), *(ids for _, ids in chats)]:
        request = {"prompt": ids, "max_tokens": MAX_NEW_TOKENS, "logprobs": 1}
        found.append(generated("answer", ids, tokenizer, *server.choice("/v1/completions", request)))
    if not any(one.logprobs for one in found):
        raise ServerError(f"{server.url}/v1/completions gives no log-probabilities of tokens. {START}")
    for request, ids in chats if chats and chats[0][0] else ():
        request = {"max_tokens": MAX_NEW_TOKENS, "logprobs": True, "top_logprobs": 1} | request
        try:
            found.append(generated("chat", ids, tokenizer, *server.choice("/v1/chat/completions", request)))
        except ServerError as error:
            return [*found, Answer("chat", ids, len(ids), [], read=str(error))]
    return found


def prompt_logprobs(server: Server, ids: list[int]) -> list[float] | None:
    """The log-probability of each token of a prompt, 0 for the first: vLLM's `prompt_logprobs`, or `echo`. None if the
    server offers neither."""
    for options in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
        try:
            _, choice = server.choice("/v1/completions", {"prompt": ids, "max_tokens": 1} | options)
        except ServerError:
            continue
        given, logprobs = choice.get("prompt_logprobs"), choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if isinstance(given, list) and all(isinstance(one, dict) for one in given[1:]):
            own = [one.get(str(token)) for token, one in zip(ids[1:], given[1:], strict=False)]
            values = [None, *(one.get("logprob") if isinstance(one, dict) else None for one in own)]
        if isinstance(values, list) and len(values) >= len(ids) and all(map(_is_logprob, values[1 : len(ids)])):
            return [0.0, *map(float, values[1 : len(ids)])]
    return None


def generated(kind: str, ids: list[int], tokenizer: Tokenizer, reply: JsonObject, choice: JsonObject) -> Answer:
    """An answer of the server. Its tokens are those that it names by number, or else those of its text. Raises
    ServerError if they are more than it was asked for."""
    parts = (choice.get("message"), reply.get("usage"), choice.get("logprobs"))
    message, usage, given = (one if isinstance(one, dict) else {} for one in parts)
    text = message.get("content") if kind == "chat" else choice.get("text")
    text = text[:MOST_CHARACTERS].encode(errors="replace").decode() if isinstance(text, str) else ""
    content, named, values = given.get("content"), choice.get("token_ids"), given.get("token_logprobs")
    if isinstance(content, list) and all(isinstance(one, dict) for one in content):
        values = [one.get("logprob") for one in content]
        named = named or [one.get("id") for one in content]
    own = named if _are_ids(named, tokenizer) else list(tokenizer(text, add_special_tokens=False)["input_ids"])
    logprobs = [float(one) for one in values] if isinstance(values, list) and all(map(_is_logprob, values)) else []
    if len(logprobs) > MAX_NEW_TOKENS + 1:
        raise ServerError(
            f"The server replies with {len(logprobs):,} tokens to a request for {MAX_NEW_TOKENS}. {START}"
        )
    if len(logprobs) - len(own) == 1:  # an end token is not part of the text
        logprobs.pop()
    if len(logprobs) != len(own):
        own, logprobs = [], []
    read = usage.get("prompt_tokens")
    read = read if kind == "chat" and type(read) is int and 0 <= read < 10**9 else None
    return Answer(kind, [*ids, *own], len(ids), logprobs, text, choice.get("finish_reason") == "stop", read)


def _is_logprob(value: object) -> bool:
    return type(value) in (int, float) and -1e5 < value < 0.01  # type: ignore[operator]  # not so if it is NaN


def _are_ids(value: object, tokenizer: Tokenizer) -> TypeGuard[list[int]]:
    most = len(tokenizer)
    return isinstance(value, list) and all(type(one) is int and 0 <= one < most for one in value)


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(
    answers: Sequence[Answer], folder: str, stops: Collection[int] = (), stop_text: str | None = None
) -> tuple[list[tuple[str, str]], JsonObject]:
    """(outcome, sentence) of what was found, the one that decides first, and the figures. `folder` is the run's,
    `stops` are tokens at which its model may stop, and `stop_text` ends a turn."""
    folder, chats = shlex.quote(folder), [one for one in answers if one.kind == "chat"]
    figures, of_chat = differences([one for one in answers if one.kind != "chat"]), differences(chats)
    weights = judge_weights(figures, folder)
    trained = weights[0] in ("equal", "undecided")
    found, other = [], ""
    if odd := next((one for one in chats if one.read not in (None, one.start)), None):
        other = f"it reads a question as {odd.read} tokens instead of {odd.start}"
        other = odd.read.rstrip(".") if isinstance(odd.read, str) else other
    elif trained and of_chat["to_run"] > max(figures["bound"], of_chat["bound"]):
        far = f"{of_chat['to_run']:.3f} in a chat, and by {figures['to_run']:.3f} after the run's own tokens"
        other = f"log-probabilities differ from the trained model's by {far}"
    if other:
        sentence = (
            f"The server's chat template is not that of the training: {other}. Give it the run's: `vllm serve ... "
            f"--chat-template {folder}/chat_template.jinja`, or `llama-server --jinja --chat-template-file "
            f"{folder}/chat_template.jinja`."
        )
        found.append(("template", sentence))
    judged = [one for one in answers if one.kind == "answer" or one.kind == "chat" and not other]
    wrong = [why for one in judged if (why := _wrong_end(one, stops, stop_text, trained))]
    if wrong:
        sentence = (
            f"The server does not stop where trained turns end{f' ({stop_text})' if stop_text else ''}: {len(wrong)} "
            f"of {counted(len(judged), 'answer')}, such as one that {wrong[0]}. Give it the run's end tokens: `vllm "
            f"serve ... --generation-config {folder}`, a GGUF file of `finetune export`, or `stop` in each request."
        )
        found.append(("stop", sentence))
    figures |= {"chat": of_chat, "ends_wrong": len(wrong), "ends_judged": len(judged)}
    return ([*found, weights] if weights[0] == "equal" else [weights, *found]), figures


def differences(answers: Sequence[Answer]) -> JsonObject:
    """Mean absolute differences of the log-probabilities of tokens: of the server's `to_run` and `to_base`, and of the
    models', `apart`; `bound` is what they may differ by. `kept` is the share of what training changed that the server's
    have, by least squares, with its standard `error`. Without a base, only `to_run` is known."""
    tokens = [
        (server, run, (one.base or one.run)[place])
        for one in answers
        for place, (server, run) in enumerate(zip(one.logprobs, one.run, strict=False))  # none, if it gives none
    ]
    count = max(len(tokens), 1)
    apart, changed = sum(abs(t - b) for _, t, b in tokens) / count, sum((t - b) ** 2 for _, t, b in tokens) or 1.0
    found: JsonObject = {"tokens": len(tokens), "to_run": sum(abs(s - t) for s, t, _ in tokens) / count}
    found["bound"] = NOISE + LOST * apart
    if all(one.base is None for one in answers):
        return found
    kept = sum((s - b) * (t - b) for s, t, b in tokens) / changed
    error = (sum((s - b - kept * (t - b)) ** 2 for s, t, b in tokens) / count / changed) ** 0.5
    to_base = sum(abs(s - b) for s, _, b in tokens) / count
    return found | {"to_base": to_base, "apart": apart, "kept": kept, "error": error}


def judge_weights(figures: JsonObject, folder: str) -> tuple[str, str]:
    """The outcome and its sentence: whose log-probabilities the server's are. Where trained and base model are both
    within the bound, the share of the training that the server's have decides, if it is known well enough."""
    run, base, bound, kept = figures["to_run"], figures.get("to_base"), figures["bound"], figures.get("kept")
    tokens = counted(figures["tokens"], "token")
    far = f"log-probabilities of {tokens} differ by {run:.3f} on average from the trained model's (at most {bound:.3f})"
    far += "" if base is None else f" and by {base:.3f} from the base model's"
    near_run, near_base = run <= bound, base is not None and base <= bound
    if near_run and near_base and kept is not None:
        if figures["error"] > LOST:
            return "undecided", f"The trained model is too close to its base to tell which one is served: {far}."
        near_run, near_base = kept >= 1 - 2 * LOST, kept <= 2 * LOST
    if near_run:
        return "equal", f"The server answers as the trained model: {far}."
    if near_base:
        return "base", (
            f"The server answers as the base model, without what was trained: {far}. Ask for the adapter by its name "
            f"(--served-name), start vLLM with `--enable-lora --lora-modules NAME={folder}`, or serve the merged model "
            "(`finetune export --to merged`)."
        )
    also = "" if kept is None else f" It has {kept:.0%} of what training changed."
    return "differs", (
        f"The server answers neither as the trained model nor as its base: {far}.{also} Check that it serves an export "
        "of this run, in 16 bits or more; `finetune export --to merged --dtype float32` rounds nothing."
    )


def _wrong_end(answer: Answer, stops: Collection[int], stop_text: str | None, trained: bool) -> str:
    """How an answer misses the end of a turn, also by the trained model if the server has that; "" if not."""
    own = answer.ids[answer.start :]
    if stop_text and stop_text in answer.text:
        return "contains it as text"
    if any(one in stops for one in own[:-1]):
        return "goes on after an end token"
    if trained and any(chance > ENDS and one not in stops for chance, one in zip(answer.ends, own, strict=False)):
        return "goes on where the trained model ends"
    early = trained and answer.stopped and own and own[-1] not in stops and answer.ends[len(own)] < GOES_ON
    return "ends where the trained model goes on" if early else ""
