"""Secrets in the forms of a maintained scanner, detect-secrets: what its rules find, redaction masks.

Its rules are the reference: texts are generated from their regular expressions, and the scanner itself says which part
is the secret. It is no dependency of the package: several of its rules match words of code (`SK` and 32 letters,
public IP addresses) and would change a converted notebook.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from finetune.redact import redact

plugins = pytest.importorskip("detect_secrets.plugins", reason="detect-secrets is not installed: `make install`")

# Rules whose matches are no secrets, with the reason.
NO_SECRET = {
    ("IPPublicDetector", 0): "an address",
    **{("PrivateKeyDetector", number): "the first line of a key, without the key" for number in range(8)},
    ("ArtifactoryDetector", 1): "AP and nine letters: a word. Masked from 33 letters and digits on",
    **{
        (name, number): "a name and a value, in quotes that need not match: names are in test_redact.py"
        for name, number in [
            ("CloudantDetector", 0),
            ("CloudantDetector", 1),
            ("IbmCloudIamDetector", 0),
            ("IbmCosHmacDetector", 0),
            ("SoftlayerDetector", 0),
        ]
    },
    ("SoftlayerDetector", 1): "the rule's dots match any character: other addresses",
    ("JwtTokenDetector", 0): "the scanner decodes it, and what is generated is no JSON",
    ("NpmDetector", 0): "any address before `:_authToken=npm_...`: the token alone is masked",
}


def rules() -> Iterator[Any]:
    """Each plugin with each of its regular expressions."""
    from detect_secrets.plugins.base import RegexBasedDetector

    for module in pkgutil.iter_modules(plugins.__path__):
        for name, one in vars(importlib.import_module(f"detect_secrets.plugins.{module.name}")).items():
            own = isinstance(one, type) and issubclass(one, RegexBasedDetector) and one.__module__.endswith(module.name)
            if not own or not isinstance(getattr(one, "denylist", None), list | tuple):
                continue
            for number, rule in enumerate(one.denylist):
                if (name, number) not in NO_SECRET:
                    yield pytest.param(one, rule, id=f"{name}-{number}")


@pytest.mark.parametrize(("plugin", "rule"), list(rules()))
@pytest.mark.campaign
def test_what_a_scanner_finds_is_masked(plugin: Any, rule: re.Pattern[str]) -> None:
    scanner = plugin()
    masked: list[str] = []

    @settings(max_examples=15, database=None, deadline=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.from_regex(rule, fullmatch=True, alphabet=st.characters(min_codepoint=33, max_codepoint=126)), st.data())
    def check(text: str, data: st.DataObject) -> None:
        # hypothesis prefers zeros: draw the letters and digits of long runs anew
        text = re.sub(
            r"[0-9a-zA-Z]{20,}",
            lambda run: "".join(
                data.draw(st.sampled_from(alphabet(letter))) if place > 8 else letter
                for place, letter in enumerate(run.group())
            ),
            text,
        )
        found = [one for one in scanner.analyze_string(text) if one and len(one) >= 12]
        found = found or [text]  # the rule has a group for a part that is no secret, such as the prefix
        secrets = [one for one in found if len(one) >= 12 and len(set(one)) >= 6]
        assume(secrets and not re.search(r"[{}<>|`]|[\"'].*@", text))
        quoted = [f'send("a", "{text}")'] if not re.search(r"[\"'\\]", text) else []
        for line in (text, f"x = 1  # {text}", *quoted):
            assert not [one for one in secrets if one in redact(line)], line
        masked.extend(secrets)

    check()
    assert masked


def alphabet(letter: str) -> str:
    """Of the kind of a letter or digit that a rule allowed: hexadecimal digits stay hexadecimal."""
    return "0123456789" if letter.isdigit() else "abcdef" if letter.islower() else "ABCDEF"
