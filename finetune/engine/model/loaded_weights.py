"""What transformers and PEFT report about the weights that they loaded. What a checkpoint lacks they initialize at
random, with a warning."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

from finetune.engine import multimodal
from finetune.errors import UserError, listed
from finetune.runtime.command import print_line
from finetune.runtime.types import JsonObject
from finetune.text import counted

_ADJUST = "_adjust_missing_and_unexpected_keys"
_COMPARED = 100  # missing weights that are looked for under another name
_NO_WEIGHT = re.compile(r"(inv_freq|position_ids|(attn|attention)\.(masked_)?bias|_scale(_inv)?)$")  # old, quantized


@contextlib.contextmanager
def require_all(*, full: bool | None = None) -> Iterator[None]:
    """Context in which models and adapters are loaded, by transformers and PEFT or by Unsloth, which calls both. It
    leaves out transformers' table of missing and unexpected weights.

    Args:
        full: whether a run trains all weights, or an adapter; it prints a line on what does not fit. None: no run.

    Raises:
        UserError: the files lack weights of the model, or an adapter has other tensors than the model's adapter.
            Tied weights, those that the model's class declares as optional, and, unless `full`, towers for images and
            sound may be missing.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    by_transformers, by_peft = PreTrainedModel.__dict__["from_pretrained"], PeftModel.load_adapter
    adjust: Any = getattr(PreTrainedModel, _ADJUST, None)  # of transformers itself, which may rename it

    @functools.wraps(by_transformers.__func__)
    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **arguments: Any) -> Any:
        model, report = by_transformers.__func__(cls, *args, output_loading_info=True, **arguments)
        _check_model(model, report, full)
        note_unused(model, getattr(model, "unused_tensors", report["unexpected_keys"]), full)
        return (model, report) if output_loading_info else model

    def keep_unused(model: Any, found: Any, *further: Any) -> Any:
        model.unused_tensors = set(getattr(found, "unexpected_keys", ()))  # also what the class leaves unreported
        return adjust(model, found, *further)

    @functools.wraps(by_peft)
    def load_adapter(model: Any, folder: Any, *args: Any, **arguments: Any) -> Any:
        report = by_peft(model, folder, *args, **arguments)
        missing, unexpected = report.missing_keys, report.unexpected_keys
        for names, why in ((missing, "it has no tensors for"), (unexpected, "nothing of it takes")):
            if names:
                raise UserError(
                    f"PEFT does not load the adapter in {folder} as it was saved: {why} {listed(sorted(names), 1)}. "
                    "Copy the folder again; if it is whole, PEFT does not support this model."
                )
        return report

    PreTrainedModel.from_pretrained, PeftModel.load_adapter = classmethod(from_pretrained), load_adapter  # type: ignore[method-assign, assignment]
    if adjust is not None:
        setattr(PreTrainedModel, _ADJUST, keep_unused)
    tables = logging.getLogger("transformers.modeling_utils")
    tables.addFilter(_is_no_table)
    try:
        yield
    finally:
        tables.removeFilter(_is_no_table)
        PreTrainedModel.from_pretrained, PeftModel.load_adapter = by_transformers, by_peft  # type: ignore[method-assign]
        if adjust is not None:
            setattr(PreTrainedModel, _ADJUST, adjust)


def _is_no_table(record: logging.LogRecord) -> bool:
    """Whether a message is not a table of weights that `_check_model` reports. That of wrong shapes explains an error
    of transformers."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or any(kind in text for kind in ("MISMATCH", "CONVERSION"))


def _check_model(model: Any, report: JsonObject, full: bool | None) -> None:
    beside = tuple(f"{name}." for name in multimodal.towers(model))
    lacking, parameters = sorted(report["missing_keys"]), dict(model.named_parameters())
    missing = [name for name in lacking if not name.startswith(beside) or full and name in parameters]
    if not missing:
        if full is False and (random := [name for name in lacking if name in parameters]):
            print_line(
                f"warning: the files of the model lack {counted(len(random), 'weight')} of its towers, which are "
                f"random numbers: {listed(random, 3)}. Rows of text do not use them.",
                style="yellow",
            )
        return
    unknown = sorted(report["unexpected_keys"])
    renamed = next(((a, b) for a in missing[:_COMPARED] for b in unknown if _same_but_for_prefix(a, b)), None)
    head = {name for name, one in parameters.items() if one is getattr(model.get_output_embeddings(), "weight", 0)}
    remedy = "Copy or download the model again: a file may be missing or cut short."
    if renamed is not None:
        remedy = (
            f"They have {renamed[1]} instead of {renamed[0]}, as a model that was saved inside another one (PEFT, "
            "torch.compile, DDP). Save it again, unwrapped; a PEFT model after `merge_and_unload()`."
        )
    elif head.issuperset(missing):
        remedy = (
            "If its output layer is its embeddings, set `tie_word_embeddings: true` in its config.json; otherwise copy "
            "or download the model again."
        )
    elif unknown:
        remedy += f" The files also have {len(unknown):,} that {type(model).__name__} does not: {listed(unknown, 3)}."
    total = len({*missing, *parameters})
    raise UserError(
        f"The files of the model {model.name_or_path} lack {len(missing):,} of the model's {total:,} "
        f"weights, which would be random numbers: {listed(missing, 3)}. {remedy}"
    )


def note_unused(model: Any, names: Collection[str], full: bool | None) -> None:
    """Print which of the files' tensors, of these `names`, a model does not have. Those that its class leaves out on
    purpose, as `mtp.*` of Qwen3.5, concern full fine-tuning alone."""
    on_purpose = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"])).search
    unknown = sorted(name for name in names if not on_purpose(name) and not _NO_WEIGHT.search(name))
    known = sorted(name for name in names if full and on_purpose(name) and not _NO_WEIGHT.search(name))
    why = " Its config.json may have fewer layers than the files, or another architecture." if unknown else ""
    gone = " The trained model will not have them." if full else ""
    if unknown + known and full is not None:
        print_line(
            f"{'warning' if unknown else 'note'}: {type(model).__name__} does not load "
            f"{counted(len(unknown + known), 'weight')} of the model's files: {listed(unknown + known, 3)}.{why}{gone}",
            style="yellow" if unknown else None,
        )


def _same_but_for_prefix(name: str, other: str) -> bool:
    """Whether one of two names is the other with further parts, such as `base_model.model.` or `base_layer.`."""
    few, many = sorted((name.split("."), other.split(".")), key=len)
    rest = iter(many)
    return len(few) < len(many) and few[-1] == many[-1] and all(part in rest for part in few)
