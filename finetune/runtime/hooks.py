"""The functions of a user's script that a run calls, and the report of errors in them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError
from finetune.runtime.types import Model, Tokenizer, Trainer


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The functions that a script provides, all optional. `finetune.script.run` takes them as arguments.

    Attributes:
        script: the file of the script.
        tokenizer: takes the tokenizer, and returns it or a replacement, or None; after it is loaded, on every rank.
        dataset: takes the tokenizer; returns rows, or a pair (training rows, held-out rows). Called once per machine,
            before the ranks connect.
        model: takes the model and the tokenizer, and returns the model or None; after the adapter is added, on every
            rank.
        trainer: takes the trainer, after it is built, on every rank.
        save: takes the model and the tokenizer, after the final model is saved; on the main rank only, once the other
            ranks have exited.
    """

    script: Path | None = None
    tokenizer: Callable[[Tokenizer], Tokenizer | None] | None = None
    dataset: Callable[[Tokenizer], object] | None = None
    model: Callable[[Model, Tokenizer], Model | None] | None = None
    trainer: Callable[[Trainer], object] | None = None
    save: Callable[[Model, Tokenizer], object] | None = None

    def call(self, name: str, *arguments: object) -> Any:
        """The result of the function `name`; None if the script does not provide it.

        Raises:
            RunError: it failed; the message names the line of the script.
        """
        function = getattr(self, name)
        if function is None:
            return None
        with self.user_errors(name):
            return function(*arguments)

    def replace(self, name: str, value: Any, *others: object) -> Any:
        """The result of the function `name` for `value`; `value` itself if it returns None or is not provided."""
        result = self.call(name, value, *others)
        return value if result is None else result

    @contextlib.contextmanager
    def user_errors(self, name: str) -> Iterator[None]:
        """Report an error in the script's function with the script's own stack frames, without those of libraries."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # after sys.exit() on one rank, the others would wait for it
            raise RunError(self._message(name, error)) from error

    def _message(self, name: str, error: BaseException) -> str:
        function = getattr(self, name)
        called = getattr(function, "__name__", repr(function))
        frames = [(frame.lineno or 0, frame.name, frame.line or "") for frame in self._own_frames(error)]
        frames += self._frames_of_workers(error)
        file = self.script.name if self.script else "the script"
        place = f" at {file}:{frames[-1][0]}" if frames else ""
        lines = [f"{called}(), the script's `{name}` function, failed{place}: {type(error).__name__}: {error}"]
        for line, within, text in frames:
            lines += [f"  {file}:{line}, in {within}", f"    {text}"]
        return "\n".join(lines)

    def _own_frames(self, error: BaseException) -> list[traceback.FrameSummary]:
        found = traceback.extract_tb(error.__traceback__)
        return [frame for frame in found if self.script and Path(frame.filename).resolve() == self.script]

    def _frames_of_workers(self, error: BaseException) -> list[tuple[int, str, str]]:
        """The script's frames in the traceback that a worker process (`num_proc` of datasets) sent as text."""
        text = str(error.__cause__) if type(error.__cause__).__name__ == "RemoteTraceback" else ""
        pattern = rf'File "{re.escape(str(self.script))}", line (\d+), in (\S+)\n +(.*)'
        return [(int(line), within, code) for line, within, code in re.findall(pattern, text)]

    def identity(self) -> str:
        """Digest of the script and of the files that define its `dataset` and `tokenizer` functions."""
        digest = hashlib.blake2b(digest_size=16)
        for source in self._sources():
            digest.update(b"%d " % len(source) + source)
        return digest.hexdigest()

    def inputs(self) -> str:
        """Digest of the current data files whose paths appear in the script. Other sources, such as downloads, are not
        covered."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted({file for source in self._sources() for file in _data_files_named_in(source)}):
            with file.open("rb") as content:
                digest.update(f"{file} ".encode() + hashlib.file_digest(content, "blake2b").digest())
        return digest.hexdigest()

    def _sources(self) -> list[bytes]:
        defined = (inspect.getsourcefile(inspect.unwrap(f)) for f in (self.dataset, self.tokenizer) if f is not None)
        files = dict.fromkeys(Path(path).resolve() for path in (self.script, *defined) if path)
        return [file.read_bytes() for file in files]


NO_HOOKS = Hooks()


_DATA = {".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst"}


def _data_files_named_in(source: bytes) -> list[Path]:
    """Existing data files whose full path is a string literal in a Python source."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    paths = [Path(text) for text in texts if isinstance(text, str) and len(text) < 1024 and text.isprintable()]
    found = []
    for path in paths:
        if path.suffix.lower() in _DATA:
            with contextlib.suppress(OSError):  # the name is too long
                found += [path] if path.is_file() else []
    return found
