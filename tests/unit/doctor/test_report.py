"""Tests of finetune/doctor/report.py."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from finetune.doctor import inspect, report
from tests.helpers.doctor import HUB_TOKEN, KEY, SECRET, gpus


@pytest.mark.process
def test_text_can_be_pasted_as_it_is(healthy: tuple[str, dict[str, Any]]) -> None:
    text, _ = healthy
    assert text.isascii() and "\x1b" not in text
    assert "Not an error" not in text and "Unsloth 2" not in text.splitlines()[0]  # what libraries print stays out


@pytest.mark.process
def test_no_secret_and_no_home_is_shown(healthy: tuple[str, dict[str, Any]]) -> None:
    text, found = healthy
    for shown in (text, json.dumps(found)):
        for secret in (HUB_TOKEN, SECRET, KEY, "me:pass", "0123456789abcdef", "alice", "not to be shown", "HF_TOKEN"):
            assert secret not in shown, secret
    assert found["environment"]["NCCL_SECRET_TOKEN"] == "***"
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert found["environment"]["NCCL_DEBUG_FILE"] == "~/***/nccl.log"
    assert found["environment"]["TORCH_SHOW"] == "url=https://***@host key=***, ***"
    named = {
        *("FINETUNE_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
        *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SECRET_TOKEN", "TORCH_SHOW"),
    }
    others = set(found["environment"]) - named
    assert named <= set(found["environment"])
    assert all(name.startswith(inspect.SHOWN_PREFIXES) or name == "CUDA_VISIBLE_DEVICES" for name in others)
    assert "Triton cache" in text and "~/.triton/cache" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("401 for hf_AbCdEfGhIjKlMnOp at the Hub", "401 for *** at the Hub"),
        ("GET https://user:word@host/x", "GET https://***@host/x"),
        ("token='0123456789abcdef0123'", "token='***'"),
        ('{"api_key": "AbCdEfGhIjKlMnOpQrStUvWx"}', '{"api_key": "***"}'),
        ("/home/alice/x and /Users/bob: /root", "~/x and ~: ~"),
        ("/data/root/x, /homes/x and /opt/home/x/y", "/data/root/x, /homes/x and /opt/home/x/y"),
        ("unknown key: learning_rate; sk-learn, token: pad", "unknown key: learning_rate; sk-learn, token: pad"),
        ("sha256 of the wheel 0123456789abcdef0123", "sha256 of the wheel 0123456789abcdef0123"),
    ],
)
def test_masks(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if re.search("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", name):
            monkeypatch.delenv(name)
    assert report.without_secrets({"a": [text, 1, None]}) == {"a": [expected, 1, None]}


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "local-abc")
    monkeypatch.setenv("DB_PASSWORD", "local-abc-and-more")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "sometimes")  # no secret
    text = "local-abc-and-more, local-abc, sometimes"
    assert report.without_secrets(text) == "***, ***, sometimes"


@pytest.mark.process
def test_report_of_many_gpus(two_gpus: dict[str, Any]) -> None:
    pairs = [{"gpus": [a, b], "kind": "NVLink", "peer_access": True} for a in range(8) for b in range(a + 1, 8)]
    line = "8 x NVIDIA H200, NVLink between all pairs, peer access"
    found = two_gpus | {"devices": gpus(8), "topology": pairs, "topology_line": line}
    text = report.plain_text(found)
    assert f"  machine       {line}\n" in text
    assert "  all 28 pairs  NVLink, peer access\n" in text
    assert "  GPU 7  NVIDIA H200, compute capability 9.0, 139.8 GiB, 139.3 free\n" in text
    pairs[3] |= {"kind": None, "peer_access": False}
    assert "  GPUs 0 and 4  unknown link, no peer access\n" in report.plain_text(found)
