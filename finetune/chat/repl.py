"""A conversation in the terminal. Answers appear as they are generated."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from transformers import TextStreamer

from finetune.chat.generation import REMEDY, Generator, Messages
from finetune.errors import UserError
from finetune.runtime.command import DONE, INTERRUPTED, print_line, printable
from finetune.runtime.files import write_json
from finetune.runtime.types import JsonObject
from finetune.text import counted

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def run(generator: Generator, json: Path | None) -> int:
    """Talk until the input ends. Returns the exit code: 130 after Ctrl-C at the prompt.

    Raises:
        UserError: the chat template fails on the conversation.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for `input`
    print_line(HELP)
    conversation, code = Conversation(generator), DONE
    with _keyboard():
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                code = INTERRUPTED
                break
            except UnicodeDecodeError:
                print_line("This is not UTF-8. Type it again.", style="yellow")
                continue
            if text == "/exit":
                break
            if text == "/clear":
                conversation = Conversation(generator, conversation.turns)
                print_line("Conversation cleared.")
            elif text == "/help":
                print_line(HELP)
            elif text:
                conversation.respond(text)
    if sys.stdin.isatty():
        print_line("")
    if json:
        write_json(json, {"run": str(generator.found.given), **generator.facts(), "turns": conversation.turns})
    return code


class Conversation:
    """What was said so far: once with the trained model and, if the base model answers too, once with that."""

    def __init__(self, generator: Generator, turns: list[JsonObject] | None = None) -> None:
        self.generator = generator
        self.number = 1 + (turns[-1]["conversation"] if turns else 0)
        self.sides = ("base", "trained") if generator.loaded.base is not None else ("trained",)
        self.messages: dict[str, Messages] = {side: [] for side in self.sides}
        self.turns: list[JsonObject] = [] if turns is None else turns  # for --json

    def respond(self, text: str) -> None:
        """Print the answer to a message. A message that is too long is reported and forgotten."""
        new = self.generator.opening(text)
        opened = {side: [*said, new[-1]] if said else new for side, said in self.messages.items()}
        try:
            encoded = {side: self.generator.encode(opened[side]) for side in self.sides}
            for ids in encoded.values():
                self.generator.answer_limit(ids)
        except UserError as error:
            print_line(f"{error} /clear forgets what was said.", style="yellow")
            return
        screen = Screen(self.sides)
        turn: JsonObject = {"conversation": self.number, "prompt": text}
        with contextlib.suppress(KeyboardInterrupt):
            for side in self.sides:
                streamer = Streamer(self.generator, functools.partial(screen.show, side))
                (answer,) = self.generator.answer([encoded[side]], base=side == "base", streamer=streamer)
                screen.texts[side] = answer.text  # white space may differ from what was shown while it grew
                turn["base" if side == "base" else "answer"] = asdict(answer)
        screen.close()
        for side in self.sides:  # of an answer that was stopped: what has been shown
            self.messages[side] = [*opened[side], {"role": "assistant", "content": screen.texts[side]}]
        self.turns.append(turn)
        for side in self.sides:
            shown = turn.get("base" if side == "base" else "answer")
            if shown is not None and not shown["finished"]:
                whose = f"{side} " if len(self.sides) > 1 else ""
                print_line(f"({whose}cut at {counted(shown['tokens'], 'token')}; {REMEDY})", style="yellow")


class Streamer(TextStreamer):
    """Passes on the text so far each time that it grows, without special tokens and without a stop text."""

    def __init__(self, generator: Generator, show: Callable[[str], None]) -> None:
        super().__init__(generator.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop, self._show, self._text = generator.stop_string, show, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._text += text
        shown = self._text
        if self._stop:
            found = shown.find(self._stop)
            # The beginning of a stop text may be all that has come so far.
            shown = shown[:found] if found >= 0 else shown if stream_end else shown[: 1 - len(self._stop) or None]
        self._show(shown)


class Screen:
    """Shows growing answers, one side after the other."""

    def __init__(self, sides: tuple[str, ...]) -> None:
        self.texts = dict.fromkeys(sides, "")
        self._begun = ""  # the side that is being written

    def show(self, side: str, text: str) -> None:
        """The answer of a side so far."""
        before, self.texts[side] = self.texts[side], text
        if text == before:
            return
        heading = ""
        if side != self._begun and len(self.texts) > 1:
            heading = f"{chr(10) if self._begun else ''}{side}: "
        self._begun = side
        sys.stdout.write(heading + printable(text[len(before) :]))
        sys.stdout.flush()

    def close(self) -> None:
        """End the last line."""
        if self._begun:
            sys.stdout.write("\n")


@contextlib.contextmanager
def _keyboard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt for the time of a block: it stops an answer, not the program."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
