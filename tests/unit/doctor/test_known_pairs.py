"""Tests of finetune/doctor/known_pairs.py."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from finetune.config import Config
from finetune.doctor import checks, known_pairs
from tests.helpers import ROOT
from tests.helpers.doctor import gpus


@pytest.mark.parametrize(
    ("installed", "device", "expected"),
    [
        ({"transformers": "5.24.0", "peft": "0.21.2"}, "cpu", ["transformers>=5.24"]),
        ({"transformers": "5.24.0", "peft": "0.22.0"}, "cpu", []),
        ({"transformers": "5.23.0", "peft": "0.21.2"}, "cpu", []),
        ({"transformers": "5.24.0"}, "cpu", []),
        ({"unsloth": "2026.10.7", "unsloth_zoo": "2026.10.9"}, "cuda", ["unsloth<2026.10.9"]),
        ({"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"}, "cuda", []),
        ({"flash-attn-4": "4.0.0b37"}, "cuda", ["flash-attn-4!=4.0.0b36"]),
        ({"flash-attn-4": "4.0.0b36"}, "cuda", []),
        ({"flash-attn-4": "4.0.0b37"}, "cpu", []),
        ({"torch": "2.15.0+cu130", "bitsandbytes": "0.50.2"}, "cuda", ["torch>=2.11"]),
        ({"torch": "2.15.0+cpu", "bitsandbytes": "0.50.2"}, "cpu", []),
    ],
)
def test_pairs_are_found_by_the_installed_versions(installed: dict[str, str], device: str, expected: list[str]) -> None:
    assert [pair.versions[0] for pair in known_pairs.present(installed.get, device)] == expected


def test_a_pair_is_named_with_what_breaks_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that runs of this package handle are no warning."""

    def found_with(**installed: str) -> tuple[str, str]:
        monkeypatch.setattr(checks, "installed_version", lambda name: installed.get(name.replace("-", "_")))
        verdict = checks.CHECKS["known bad pairs"](Config(), {"devices": gpus(1)})
        assert verdict is not None
        return verdict

    state, reason = found_with(transformers="5.24.0", peft="0.21.2", torch="2.14.1", bitsandbytes="0.50.2")
    assert state == "warning" and reason.startswith("transformers>=5.24 with peft<0.22: `add_adapter`,")
    assert "peft.get_peft_model" in reason and "https://github.com/huggingface/transformers/" in reason
    assert "FSDP2" not in reason
    state, reason = found_with(torch="2.14.1", bitsandbytes="0.50.2")
    assert state == "ok" and reason.startswith(
        "none; handled: torch>=2.11 with bitsandbytes>=0.43: FSDP2 changes bytes"
    )
    assert found_with(torch="2.14.1") == ("ok", "none")


def test_transformers_and_peft_of_the_table_do_what_it_says() -> None:
    """The installed pair: six methods ask for a PEFT that is not installed, or none does."""
    from transformers.integrations import PeftAdapterMixin

    pair = known_pairs.PAIRS[0]
    bad = pair in known_pairs.present(checks.installed_version, "cpu")
    named = re.findall(r"`(\w+)`", pair.breaks)
    assert len(named) == 6
    for name in named:
        with pytest.raises((ValueError, TypeError)) as said:
            getattr(PeftAdapterMixin(), name)(*([None] if "able" not in name and "active" not in name else []))
        assert ("version of PEFT you are using is not compatible" in str(said.value)) == bad, name


def test_the_tested_flash_attention_is_the_pinned_one() -> None:
    """The row of the table, constraints-gpu.txt and the oldest of pyproject.toml."""
    pinned = re.search(r"^flash-attn-4==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE)
    assert pinned and any(pair.versions == (f"flash-attn-4!={pinned[1]}",) for pair in known_pairs.PAIRS)


def test_rows_of_the_table_are_complete() -> None:
    for pair in known_pairs.PAIRS:
        assert pair.versions and pair.breaks and pair.remedy and pair.link.startswith("https://"), pair
        assert pair.on in ("any", "cuda") and all(Requirement(text).specifier for text in pair.versions)
