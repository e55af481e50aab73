"""Versions that are known not to work together, in one table. A new pair is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.requirements import Requirement


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Versions that are a problem if all of them are installed.

    Attributes:
        versions: requirements that the installed versions meet, such as `peft<0.22`.
        breaks: what goes wrong.
        remedy: what to do; of a pair that this package handles, how it does.
        link: where that is reported, or the lines that show it.
        handled: whether runs of this package are not affected. It is then no warning.
        on: the device on which it happens, "cuda" or "any".
    """

    versions: tuple[str, ...]
    breaks: str
    remedy: str
    link: str
    handled: bool = False
    on: str = "any"

    def __str__(self) -> str:
        return f"{' with '.join(self.versions)}: {self.breaks}; {self.remedy} ({self.link})"


PAIRS = (
    Pair(
        versions=("transformers>=5.24", "peft<0.22"),
        breaks=(
            "`add_adapter`, `set_adapter`, `enable_adapters`, `disable_adapters`, `active_adapters` and "
            "`delete_adapter` of a model raise ValueError, because they ask for PEFT 0.22"
        ),
        remedy="in your own code use `peft.get_peft_model` and the PeftModel's methods, or install transformers<5.24",
        link="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/peft.py",
    ),
    Pair(
        versions=("unsloth<2026.10.9", "unsloth_zoo>=2026.10.9"),
        breaks="Unsloth with a later unsloth_zoo is a pair that neither project tests",
        remedy="install both at one version: pip install --upgrade unsloth unsloth_zoo",
        link="https://pypi.org/project/unsloth/#history",
    ),
    Pair(
        versions=("flash-attn-4!=4.0.0b36",),
        breaks=(
            "betas of FlashAttention-4 change their functions, and this package was tested with 4.0.0b36; where they "
            "do not fit, a run uses torch's kernel"
        ),
        remedy="pip install flash-attn-4==4.0.0b36",
        link="https://pypi.org/project/flash-attn-4/#history",
        on="cuda",
    ),
    Pair(
        versions=("torch>=2.11", "bitsandbytes>=0.43"),
        breaks="FSDP2 changes bytes of 4-bit weights that are stored as bfloat16 or float16, when it gathers them",
        remedy="training.strategy: shard stores them as float32; other programs need bnb_4bit_quant_storage: float32",
        link="https://github.com/pytorch/pytorch/issues/159333",
        handled=True,
        on="cuda",
    ),
)


def present(installed: Callable[[str], str | None], device: str) -> list[Pair]:
    """The pairs whose versions are all installed.

    Args:
        installed: the version of a package, or None.
        device: "cpu" or "cuda".
    """

    def met(text: str) -> bool:
        wanted = Requirement(text)
        found = installed(wanted.name)
        return found is not None and wanted.specifier.contains(found, prereleases=True)

    return [pair for pair in PAIRS if pair.on in ("any", device) and all(map(met, pair.versions))]
