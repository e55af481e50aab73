"""Secrets in texts. Tokens are made up here, from parts: no literal of this file looks like one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finetune.config import ConfigError, load
from finetune.engine.preflight import config_checks
from finetune.engine.record import RunRecord
from finetune.errors import RunError, UserError
from finetune.redact import MASK, is_secret_name, redact, redact_tree
from finetune.runtime import command

MIXED = "aB3xK9qZ7mW2"
HEX = "0123456789abcdef"
# The published forms of services: prefix and body.
SHAPES = {
    "huggingface": "hf" + "_" + MIXED * 3,
    "openai": "sk" + "-proj-" + MIXED * 4,
    "anthropic": "sk" + "-ant-api03-" + MIXED * 7,
    "groq": "gsk" + "_" + MIXED * 4,
    "nvidia": "nvapi" + "-" + MIXED * 5,
    "replicate": "r8" + "_" + MIXED * 3,
    "perplexity": "pplx" + "-" + MIXED * 4,
    "wandb": "wandb" + "_v1_" + MIXED * 3,
    "github": "ghp" + "_" + MIXED * 3,
    "github fine-grained": "github" + "_pat_" + MIXED * 6,
    "gitlab": "glpat" + "-" + MIXED * 2,
    "aws": "AKIA" + "QWERTYUIOPASDFGH",
    "google": "AIza" + MIXED * 3,
    "slack": "xoxb" + "-1234567890-" + MIXED * 2,
    "slack webhook": "https://hooks.slack.com/" + "services/T0AAAAAAA/B0AAAAAAA/" + MIXED * 2,
    "pypi": "pypi" + "-AgEIcHlwaS5vcmc" + MIXED * 6,
    "npm": "npm" + "_" + MIXED * 3,
    "docker": "dckr" + "_pat_" + MIXED * 2,
    "databricks": "dapi" + HEX * 2,
    "stripe": "sk" + "_live_" + MIXED * 2,
    "sendgrid": "SG" + "." + MIXED * 2 + "." + MIXED * 3,
    "telegram": "123456789" + ":AA" + MIXED * 2 + "aB3xK9qZ",
    "jwt": "eyJ" + MIXED + ".eyJ" + MIXED * 2 + "." + MIXED * 2,
    "square": "EAAA" + MIXED * 5,
    "new relic": "NRAK" + "-" + "QWERTYUIOPASDFGHJKLZXCVBNM1",
    "new relic license": HEX * 2 + "0123" + "NRAL",
    "private key in base64": "LS0tLS1CRUdJTi" + "BSU0EgUFJJVkFURSBLRVktLS0tLQ" + MIXED * 3,
    "an unknown service": "newco" + "_" + MIXED * 3,
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\\n" + MIXED + "\\n-----END RSA " + "PRIVATE KEY-----",
    "address": "https://me:" + MIXED + "@example.org/x",
    "database": "postgres://me:" + MIXED + "@db.local/x",
}
INSIDE = {name: MIXED if name in ("address", "database", "private key") else secret for name, secret in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_in_a_text(name: str) -> None:
    for before, after in (("", ""), ("it is ", ", and no other"), ('x = "', '"'), ("line\n", "\nline")):
        assert INSIDE[name] not in redact(before + SHAPES[name] + after)
        assert redact(before) == before and redact(after) == after


@pytest.mark.parametrize("name", ["api_key", "HF_TOKEN", "--hub-token", "X_SERVICE_KEY", "db_password", "clientSecret"])
def test_values_beside_a_secret_name(name: str) -> None:
    assert is_secret_name(name)
    for text in (f"{name}=pass1word", f"{name}: 'pass1word'", f'"{name}": "pass1word"', f'{name} = "pass1word"'):
        assert "pass1word" not in redact(text)
    assert redact_tree({name: "x", "n": [{name: "y"}], "k": 1}) == {name: MASK, "n": [{name: MASK}], "k": 1}


def test_names_in_escaped_quotes_and_passwords_of_words() -> None:
    """As JSON within JSON, once and twice, and as people choose passwords."""
    body = MIXED * 3
    for escape in ("", "\\", "\\\\\\"):
        text = "{QAccessKeyIdQ: QidQ, QSecretAccessKeyQ: QBODYQ, QRegionQ: Qeu-1Q}"
        text = text.replace("Q", escape + '"').replace("BODY", body)
        shown = redact(text)
        assert body not in shown and "eu-1" in shown and "Region" in shown, shown
    for text in ("password: correct-horse-battery", "DB_PASSWORD=correct-horse-battery", "--pwd correct-horse-battery"):
        assert "horse" not in redact(text)
    for text in ("key: one-two-three", "password: asked", "bypass: the-usual-way-out"):
        assert redact(text) == text


def test_what_is_no_secret_stays() -> None:
    for text in (
        "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        f"revision: {HEX * 2}01234567",
        f"sha256:{HEX * 4}",
        "data.train_file: /data/a_b-c/train-00001-of-00002.jsonl",
        "pad_token: '<pad>', eos_token: '</s>', max_new_tokens: 128, tokens=12345",
        "the token: a word; the password is asked for; key: value",
        "/home/me/.cache/huggingface/token: permission denied",
    ):
        assert redact(text) == text
    for name in ("pad_token", "eos_token", "max_new_tokens", "text_key", "tokenizer", "image_token", "keys"):
        assert not is_secret_name(name)


@pytest.mark.campaign
def test_long_texts_take_linear_time() -> None:
    """Each of these took minutes under a pattern that backtracks: the test then never ends."""
    for text in (
        "://" + "a" * 10**5,
        "curl -u " * 10**4,
        "a_" * 10**5,
        "?" + "token" * 10**4,
        "a" + " " * 10**5,
        "a" + "\\" * 10**5,
        "token:" * 33_000,
        "AccountKey=" * 10**4,
        "eyJ-" * 10**5,
    ):
        redact(text)


def test_a_long_secret_is_masked_to_its_end() -> None:
    for length in (900, 1_100, 10_000):
        secret = (MIXED * 1_000)[:length]
        for text in (f"password={secret}", f"api_key: '{secret}'", f"--hub-token {secret}", f"AccountKey={secret}"):
            assert redact(f"{text} and more").replace("'", "").endswith(f"{MASK} and more")
            assert MIXED not in redact(text)
    token = "eyJ" + MIXED + "-eyJ" + MIXED * 200 + ".eyJ" + MIXED * 200 + "." + MIXED
    assert redact(f"({token})") == f"({MASK})"


# --- where users meet them --------------------------------------------------------------------------------------------

PLACES = {
    "a managed key": "--training.hub_token {}",
    "with an equals sign": "--training.hub_token={}",
    "an unknown key": "--training.unknown_thing {}",
    "an unknown section": "--api_key {}",
    "a stray word": "{}",
    "a wrong type": "--training.max_steps {}",
    "not among the choices": "--training.optim {}",
    "in a mapping": "--model.loader_kwargs {{token: {}}}",
    "YAML": "training: {{hub_token: '{}'}}",
    "YAML of a wrong type": "training: {{max_steps: '{}'}}",
    "YAML unknown section": "api: '{}'",
    "YAML unknown nested": "training: {{thing: {{a: ['{}']}}}}",
    "YAML duplicate": "training: {{seed: 1, seed: '{}'}}",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_configuration_error_never_repeats_a_secret(place: str, tmp_path: Path) -> None:
    for name, secret in {**SHAPES, "short": "hunter2pass"}.items():
        if name == "short" and place not in ("a managed key", "with an equals sign", "an unknown section", "YAML"):
            continue  # nothing tells such a word from a value
        text = PLACES[place].format(secret)
        if place.startswith("YAML"):
            (tmp_path / "c.yaml").write_text(text)
            argv = ["--config", str(tmp_path / "c.yaml")]
        else:
            argv = [word.format(secret) for word in PLACES[place].split(" ", 1)]
        with pytest.raises(ConfigError) as caught:
            load(argv)
        shown = str(caught.value) + repr(caught.value.problems)
        assert INSIDE.get(name, secret) not in shown, (name, shown)


def test_every_error_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    secret = SHAPES["huggingface"]
    for error in (UserError(f"no {secret}"), RunError(f"no {secret}"), ValueError(f"no {secret}")):

        def fail(error: Exception = error) -> int:
            raise error

        assert command.run_guarded(fail) == getattr(error, "exit_code", 1)
        shown = capsys.readouterr().err
        assert secret not in shown and f"no {MASK}" in shown


def test_run_json_and_the_resolved_configuration(tmp_path: Path) -> None:
    from finetune.config import dump_yaml

    secret = SHAPES["huggingface"]
    argv = ["--model.model_name_or_path", "m", "--data.train_file", "x.jsonl", "--model.backend", "unsloth"]
    config = load([*argv, "--model.loader_kwargs", f"{{api_key: pass1word, name: {secret}}}"])
    record = RunRecord(tmp_path)
    record.update(config=config.to_dict(), rows=[1])
    record.fail(f"no {secret}")
    for shown in ((tmp_path / "run.json").read_text(), dump_yaml(config)):
        assert secret not in shown and "pass1word" not in shown and MASK in shown


def test_the_name_of_a_model_is_shown_without_its_password(tmp_path: Path) -> None:
    config = load(["--model.model_name_or_path", SHAPES["address"], "--data.train_file", "x.jsonl"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match=rf"https://{re.escape(MASK)}@example.org"):
            config_checks.check_model(config)
