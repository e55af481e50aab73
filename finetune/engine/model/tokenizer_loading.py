"""The model's tokenizer: loading, padding, chat template, and whether it fits the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.engine.model.load_errors import explain_load_error
from finetune.engine.preflight import adapter_files
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.types import Model, Tokenizer


def load_tokenizer(config: Config) -> Tokenizer:
    """The model's tokenizer as its files have it: padding is not set yet.

    Raises:
        UserError: it is found neither locally nor on the Hub.
    """
    from transformers import AutoTokenizer

    files.check_name(Path(str(config.model.model_name_or_path)), "model.model_name_or_path")
    name, revision = adapter_files.tokenizer_source(config)
    with explain_load_error(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=config.model.trust_remote_code)


def set_padding(tokenizer: Any) -> Any:
    """Give the tokenizer a pad token, if it has a special token for that, and right padding; and return it."""
    if tokenizer.pad_token is None:
        # Padding is masked in attention and labels, so any token will do. But a token of text would become a special
        # one, which is left out of decoded answers.
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        tokenizer.pad_token = tokenizer.eos_token or next(special, None)
    tokenizer.padding_side = "right"
    return tokenizer


def check_vocabulary(model: Model, tokenizer: Tokenizer, ledger: Mapping[str, Any], split: str) -> None:
    """Check that every token id has a row in the model's embedding. Otherwise CUDA fails with an unspecific assertion,
    and a CPU with an IndexError.

    Args:
        ledger: of the rows, `Data.ledgers`.

    Raises:
        UserError: the tokenizer's vocabulary, or a token id of the user's own, is larger than the model's.
    """
    count, largest = model.get_input_embeddings().weight.shape[0], ledger["largest"]
    if largest["id"] < count:
        return
    found = f"{largest['where']} ({split}) has the token id {largest['id']}, and the model's embedding has {count} rows"
    if tokenizer.convert_ids_to_tokens(largest["id"]) is None:
        raise UserError(f"{found}. Correct the row: its ids must be those of the model's tokenizer.")
    raise UserError(
        f"The tokenizer does not fit the model: {found}. Use the tokenizer that belongs to the model, or resize the "
        "embedding (`model.resize_token_embeddings`) and save the model first."
    )
