"""Models whose positions are rows of a table, learned or computed once: GPT-2, OPT, GPT-J, BERT's kin. A position
beyond it is an IndexError on a CPU, and an unspecific assertion on a GPU."""

from __future__ import annotations

from typing import Any

from finetune.config import Config
from finetune.data.packs import MULTIPLE
from finetune.data.store import Rows
from finetune.engine.preflight import adapter_files
from finetune.errors import UserError
from finetune.runtime.types import Model

# Words in a table's name: wpe, embed_positions, positions_embed, position_embeddings, pos_encoding.
_WORDS = {"wpe", "pos", "position", "positions"}
# What configurations call their number: nearly all, MPT and DBRX, Whisper's kin.
_CONFIG_KEYS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
_SPARE_ROWS = 8  # tables may begin with rows for padding: OPT's with 2


def limit(model: Model) -> int | None:
    """Positions of the model's table; None if it has none, as with rotary embeddings."""
    config = model.config.get_text_config()
    if config.model_type == "mpt":  # its table of linear biases is computed in every forward pass
        return config.max_seq_len
    named = (getattr(config, name, None) for name in _CONFIG_KEYS)
    found = [rows for most in named if isinstance(most, int) and (rows := _rows(model, most)) is not None]
    return min(found, default=None)


def _rows(model: Model, most: int) -> int | None:
    """Usable rows of a table of `most` positions; None if the model has no such table."""
    for name, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for own, tensor in tensors:
            last = name.rpartition(".")[2] if own == "weight" else own
            named = not _WORDS.isdisjoint(last.split("_"))
            if named and tensor.ndim == 2 and most <= tensor.shape[0] <= most + _SPARE_ROWS:
                # RoBERTa's kin count from the row after the one for padding.
                padding = getattr(module, "padding_idx", None)
                return min(most, tensor.shape[0] - (0 if padding is None else padding + 1))
    return None


def check(model: Model, rows: Rows, split: str, setting: str = "data.max_length") -> None:
    """Check that the model has a position for every token.

    Args:
        setting: what limits the length of rows, for the message.

    Raises:
        UserError: a row is longer than the model's table, once it is padded.
    """
    found, longest = limit(model), int(rows.lengths.max(initial=0))
    if found is None:
        return
    usable = found // MULTIPLE * MULTIPLE or found
    if longest > usable:
        raise UserError(
            f"The {split} rows have up to {longest:,} tokens, and {model.config.model_type} has a table of {found:,} "
            f"positions. Set {setting} to {usable} or less."
        )


def context(name: str, **known: Any) -> int | None:
    """`max_position_embeddings` of a model that is not loaded; None if its configuration has none, or is not found."""
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(name, **known).get_text_config(), "max_position_embeddings", None)
    except (OSError, ValueError):  # loading the model reports it better
        return None


def without_scaling(config: Config, row_length: int, longest: int) -> int:
    """The row length for Unsloth, whose loader for GPUs scales RoPE above the model's context, unknown to an adapter.
    Packs need no longer context than their `longest` document.

    Raises:
        UserError: a document is longer.
    """
    adapter = adapter_files.local_adapter(config) or {}
    name = str(adapter.get("base_model_name_or_path") or config.model.model_name_or_path)
    revision = None if adapter else config.model.revision
    most = context(name, revision=revision, trust_remote_code=config.model.trust_remote_code)
    if most is not None and longest > most:
        raise UserError(
            f"Rows have up to {longest:,} tokens, and {name} has a context of {most:,}, beyond which Unsloth scales "
            f"RoPE, unrecorded in an adapter. Set data.max_length to {most}, or write the scaling into config.json."
        )
    return row_length if most is None else min(row_length, most)
