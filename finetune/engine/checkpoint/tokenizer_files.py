"""The files of a run's tokenizer: those of the base model as they are, except for what the run changed.

transformers 5 saves a tokenizer under a class name that version 4 does not know, without `add_bos_token`, and with keys
about where it was loaded from. Engines with transformers 4, such as older vLLM and SGLang, do not load it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.engine.preflight import model_files
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.bootstrap import errors_only
from finetune.runtime.types import JsonObject, Tokenizer

NAMES = re.compile(
    r"(tokenizer|added_tokens|special_tokens_map|vocab|merges|spiece|sentencepiece|tekken|chat_template|(video_)?preprocessor|"
    r"processor)[\w.-]*\.(json|txt|model|jinja)"
)
VARIANTS = "additional_chat_templates"  # a folder of further chat templates
CONFIG, TOKENIZER, SPECIAL = "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"
LOCAL_KEYS = ("is_local", "local_files_only", "backend")  # of the machine and library that loaded the tokenizer
TRAINING_KEYS = ("padding_side", "truncation_side")  # set for a run's own batches
Files = dict[str, bytes]  # by name; of a chat template in VARIANTS with the folder's
# What `save_pretrained` writes of a tokenizer as it was loaded, and the files that it was loaded from.
_as_loaded: weakref.WeakKeyDictionary[Tokenizer, tuple[Files, Files]] = weakref.WeakKeyDictionary()


def note_loaded(tokenizer: Tokenizer, name: str, revision: str | None) -> None:
    """Keep a tokenizer as it was loaded from a folder or the Hub, so that `save` need not load it again, and does not
    find other files there by then."""
    with contextlib.suppress(Exception):  # `save` says what is wrong; tokenizers raises no subclass for a full disk
        if folder := model_files.model_folder(name, revision):
            _as_loaded[tokenizer] = _save_pretrained(tokenizer), read(folder)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files.

    Raises:
        UserError: it has something that cannot be saved, such as a chat template that is not text.
    """
    for name, content in _files_to_write(tokenizer).items():
        (folder / name).parent.mkdir(exist_ok=True)
        files.write_bytes(folder / name, content)


def copy(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer and its chat templates."""
    for name, content in read(source).items():
        (folder / name).parent.mkdir(exist_ok=True)
        files.write_bytes(folder / name, content)


def _files_to_write(tokenizer: Tokenizer) -> Files:
    own = _save_pretrained(tokenizer)
    base, raw = _as_loaded.get(tokenizer) or _of_origin(tokenizer)
    config, before = _json(own.get(CONFIG)), _json((base or {}).get(CONFIG))
    if base is None or CONFIG not in raw or TOKENIZER not in raw or TOKENIZER not in own:
        return own | {CONFIG: _bytes(_for_transformers_4(config))}
    same_tokens = own[TOKENIZER] == base.get(TOKENIZER) or _tokens(own) == _tokens(base)  # parsing takes long
    same_template = _templates(own) == _templates(base)
    names = {*config, *before} - {*LOCAL_KEYS, *TRAINING_KEYS, "chat_template"}
    changed = {name: config.get(name) for name in names if config.get(name) != before.get(name)}
    kept = raw
    if not same_tokens:  # other files of the base have its vocabulary
        kept = {CONFIG: raw[CONFIG]} | _templates(raw) | {TOKENIZER: own[TOKENIZER]}
        if "added_tokens_decoder" in _json(raw[CONFIG]):
            changed["added_tokens_decoder"] = {
                str(number): token.__getstate__() for number, token in tokenizer.added_tokens_decoder.items()
            }
    if not same_template:
        kept = {name: content for name, content in kept.items() if name not in _templates(kept)} | _templates(own)
    if changed or not same_template:
        content = {key: value for key, value in _json(kept[CONFIG]).items() if changed.get(key, value) is not None}
        if not same_template:
            content.pop("chat_template", None)
        new = {key: value for key, value in _for_transformers_4(changed).items() if value is not None}
        kept = kept | {CONFIG: _bytes(content | new)}
        if SPECIAL in kept:
            tokens = {key: value for key, value in new.items() if key in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
            kept |= {SPECIAL: _bytes(_json(kept[SPECIAL]) | tokens)}
    return {name: content for name, content in own.items() if name.endswith(".py")} | kept


def _of_origin(tokenizer: Tokenizer) -> tuple[Files | None, Files]:
    """What is kept of a tokenizer as loaded, for one that a script has loaded, whose revision is not known."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    origin = model_files.model_folder(name, None) if name else None
    return (None, {}) if origin is None else (_save_pretrained_from(type(tokenizer), origin.resolve()), read(origin))


def _save_pretrained(tokenizer: Tokenizer) -> Files:
    """What `save_pretrained` writes.

    Raises:
        UserError: it fails.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
        try:
            tokenizer.save_pretrained(folder)
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path} cannot be saved: {' '.join(str(error).split())[:300]}. "
                "Correct its chat templates and tokenizer_config.json, or set model.chat_template to another template."
            ) from error
        written = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): files.read_bytes(path) for path in written}


@functools.lru_cache(maxsize=2)
def _save_pretrained_from(kind: type, origin: Path) -> Files | None:
    """What `save_pretrained` writes of the tokenizer in a folder as it is; None if that cannot be loaded."""
    with errors_only():  # what it warns of, it has warned of before
        try:
            return _save_pretrained(kind.from_pretrained(str(origin)))  # type: ignore[attr-defined]
        except (UserError, ValueError, TypeError, KeyError, AttributeError, OSError):
            return None


def read(folder: Path) -> Files:
    """The files of a tokenizer in a folder."""
    found = {path.name: path for path in folder.iterdir() if path.is_file() and NAMES.fullmatch(path.name)}
    if (folder / VARIANTS).is_dir():
        found |= {f"{VARIANTS}/{path.name}": path for path in (folder / VARIANTS).glob("*.jinja")}
    return {name: files.read_bytes(path) for name, path in found.items()}


def _tokens(found: Files) -> JsonObject:
    """tokenizer.json without the padding and truncation that a call leaves in it."""
    content = _json(found.get(TOKENIZER))
    return {key: value for key, value in content.items() if key not in ("padding", "truncation")}


def _templates(found: Files) -> Files:
    return {name: content for name, content in found.items() if name.startswith(("chat_template", f"{VARIANTS}/"))}


def _json(content: bytes | None) -> JsonObject:
    found = json.loads(content) if content else {}
    return found if isinstance(found, dict) else {}


def _bytes(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _for_transformers_4(config: Mapping[str, Any]) -> JsonObject:
    """Values of transformers 5 in terms that version 4 reads as well."""
    found = {key: value for key, value in config.items() if key not in LOCAL_KEYS}
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    return found
