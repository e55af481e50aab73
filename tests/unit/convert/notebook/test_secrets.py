"""Secrets of a notebook reach none of the files that `convert` writes. Tokens are made up here, from parts."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from finetune.convert.command import main
from finetune.convert.notebook.read import read
from finetune.convert.notebook.secrets import remove_secrets
from tests.unit.convert import test_convert as nb

RANDOM = "aB3xK9qZ7mW2"
SERVICE = "zq" + RANDOM * 3  # no shape: found by its name alone
GROQ = "gsk" + "_" + RANDOM * 4
HF = "hf" + "_" + RANDOM * 3
WORD = "hunter2" + "pass"

CODE = {
    "dict": f'cfg = {{"api_key": "{SERVICE}"}}',
    "header": f'headers = {{"Authorization": "Bearer {SERVICE}"}}',
    "setdefault": f'import os\nos.environ.setdefault("OPENAI_API_KEY", "{SERVICE}")',
    "update": f'import os\nos.environ.update({{"OPENAI_API_KEY": "{SERVICE}"}})',
    "service key": f'import os\nos.environ["X_SERVICE_KEY"] = "{SERVICE}"',
    "aws": f'AWS_SECRET_ACCESS_KEY = "{SERVICE}"',
    "shape": f'client = "{GROQ}"',
    "nvapi": f'client = "{"nvapi" + "-" + SERVICE}"',
    "address": f'base = "https://me:{SERVICE}@example.org/x"',
    "postgres": f'base = "postgresql://me:{WORD}@db/x"',
    "short password": f'db_password = "{WORD}"',
    "annotated": f'api_key: str = "{SERVICE}"',
    "walrus": f'print(api_key := "{SERVICE}")',
    "f-string": f'name = "x"\nline = f"{{name}} {GROQ}"',
    "in an f-string": f"line = f\"{{dict(api_key='{WORD}')}}\"",
    "concatenated": f'line = "{GROQ[:9]}" + "{GROQ[9:]}"',
    "joined": f'line = "".join(["{GROQ[:9]}", "{GROQ[9:]}"])',
    "bytes": f'line = b"{GROQ}"',
    "default": f'def ask(question, api_key="{WORD}"):\n    return question',
    "class": f'class Settings:\n    db_password = "{WORD}"',
    "argument": f'answer = print("x", api_key="{WORD}")',
    "tuple": f'user, password = "me", "{WORD}"',
    "pair": f'pairs = [("api_key", "{WORD}")]',
    "compared": f'password = input()\nok = password == "{WORD}"',
    "comment": f"x = 1  # the key is {GROQ}",
    "named comment": f"# password: {WORD}\nx = 1",
    "docstring": f'def ask():\n    """Asks with {GROQ}."""',
    "escaped": 'line = "' + "".join(f"\\x{ord(c):02x}" for c in GROQ) + '"',
    "elsewhere": f'api_key = "{SERVICE}"\n# used: {SERVICE}\nline = "key {SERVICE} is used"',
    "passed": f'mine = "{WORD}"\nprint(token=mine)',
    "private key": 'pem = """-----BEGIN RSA ' + f'PRIVATE KEY-----\n{SERVICE}\n-----END RSA PRIVATE KEY-----"""',
    "shell": f"!export X_TOKEN={WORD}",
    "curl": f'!curl -H "Authorization: Bearer {SERVICE}" https://example.org',
    "curl user": f"!curl -u me:{WORD} https://example.org",
    "magic": f"%env SERVICE_API_KEY={WORD}",
    "pip": f"!pip install git+https://me:{WORD}@example.org/a.git",
}


def written(path: Path, out: Path) -> dict[str, str]:
    assert main([str(path), "--out", str(out)]) == 0
    return {file.name: file.read_text() for file in out.iterdir()}


@pytest.mark.parametrize("name", CODE)
def test_no_statement_keeps_its_secret(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": CODE[name]}]}))
    found = read(path)
    notes = remove_secrets(found)
    left = "\n".join([*(one.source for one in found.statements), *(shell.text for shell in found.shells)])
    for secret in (SERVICE, GROQ, WORD):
        assert secret not in left
    for one in found.statements:  # the text and the tree are of the same code, and no string in it is the secret
        assert ast.dump(ast.parse(one.source).body[0]) == ast.dump(one.node)
        assert GROQ not in ast.unparse(one.node)
    assert any("cell 0" in note for note in notes)
    assert not any(secret in note for note in notes for secret in (SERVICE, GROQ, WORD))


@pytest.mark.process
def test_no_output_of_a_whole_notebook_has_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (
        f'import os\nos.environ["X_SERVICE_KEY"] = "{SERVICE}"\n'
        f'CONFIG = {{"api_key": "{SERVICE}", "url": "https://me:{WORD}@example.org"}}\n'
        f'def to_text(rows, password="{WORD}"):  # {GROQ}\n'
        f'    """With {GROQ}."""\n    return {{"text": [q + CONFIG["url"] + password for q in rows["q"]]}}'
    )
    data = 'from datasets import load_dataset\ndataset = load_dataset("acme/q", split="train", token="' + HF + '")'
    cells = nb.with_cells(
        data=kept + "\n" + data + "\ndataset = dataset.map(to_text, batched=True)",
    )
    document = nb.document(*cells)
    heading = {"cell_type": "markdown", "source": f"## Rows with {HF} and {GROQ}", "metadata": {"token": HF}}
    document["cells"].insert(3, heading)
    document["cells"][1]["outputs"] = [{"output_type": "stream", "text": [HF]}]
    document["cells"][1]["source"].insert(0, f"!pip install git+https://me:{WORD}@example.org/a.git\n")
    document["metadata"] = {"token": HF}
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(document))
    found = written(path, tmp_path / "out")
    shown = "".join([*found.values(), *capsys.readouterr()]).replace("_", "")
    for secret in (SERVICE, GROQ, WORD, HF):
        assert secret.replace("_", "") not in shown
    assert 'os.environ["X_SERVICE_KEY"]' in found["mine.py"] and 'os.environ["API_KEY"]' in found["mine.py"]
    assert "URL_CREDENTIALS" in found["mine.py"] and 'password=os.environ["PASSWORD"]' in found["mine.py"]
    notes = " ".join(json.loads(found["mine.report.json"])["notes"])
    for word in ("X_SERVICE_KEY", "HF_TOKEN", "a comment or docstring", "a shell line", "a heading"):
        assert word in notes


def test_a_refusal_does_not_quote_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(nb.document(f'%%{HF}\nprint("x")')))
    assert main([str(path), "--json", str(tmp_path / "x.json")]) == 3
    assert HF not in "".join(capsys.readouterr()) + (tmp_path / "x.json").read_text()


INNOCENT = [
    'model = load("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", revision="' + "0123456789abcdef" * 2 + '01234567")',
    'sha256 = "' + "0123456789abcdef" * 4 + '"',
    'image = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4"',
    'tokenizer.pad_token = "<|finetune_right_pad_id|>"\ntokenizer.eos_token = "</s>"',
    'pad_token = "[PAD]"\nstop_token = "im_end_1"',
    'text_key = "question"\nLABEL_KEY = "answer"',
    'INTRO_KEY = "Below is an instruction, number 1."\nINSTRUCTION_KEY = "### Instruct: Summarize"',
    'RESPONSE_TOKEN = "ASSISTANT:"\nCHAT_TOKEN = "### Assistant 1"\nsplit_token = "assistant_response_begin_v1"',
    'TEXT_KEY = "answer_text_v2"\nDATASET_KEY = "databricks-dolly-15k-v2"\ndata_key = "conversations_clean_v2"',
    'rows = {"token": "<|im_end|>", "key": "question", "secret": "<hidden>"}',
    'question = "What is a password, and is a token: a word?"',
    'import os\nkey = os.environ["HF_TOKEN"]\ntoken = os.getenv("HF_TOKEN")',
    'from google.colab import userdata\ntoken = userdata.get("HF_TOKEN")',
    'url = "git+https://github.com/a/b.git@' + "0123456789abcdef" * 2 + '01234567"',
    'password = None\ntoken = ""\nuse_auth_token = True',
]


@pytest.mark.parametrize(("name", "secret"), [('x"] + os.getcwd() + os.environ["y', HF), ("x\\\"'_api_key", SERVICE)])
def test_a_variable_with_quotes_in_its_name_stays_a_name(name: str, secret: str, tmp_path: Path) -> None:
    """It is written where the secret was, in code and in an f-string."""
    path = tmp_path / "mine.ipynb"
    source = f"import os\nos.environ[{name!r}] = '{secret}'\nline = 'a {secret} b'"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source}]}))
    found = read(path)
    remove_secrets(found)
    assert secret not in "".join(one.source for one in found.statements)
    calls = [node for one in found.statements for node in ast.walk(one.node) if isinstance(node, ast.Call)]
    assert len(found.statements) == 3 and not calls


@pytest.mark.parametrize("code", INNOCENT)
def test_what_is_no_secret_is_kept(code: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": code}]}))
    found = read(path)
    before = [statement.source for statement in found.statements]
    assert remove_secrets(found) == []
    assert [statement.source for statement in found.statements] == before
