"""The converter's tables: each name stands once, and every kind has a use."""

import inspect
import re
from collections import Counter

import pytest
from trl import SFTConfig, SFTTrainer

from finetune.config import arguments
from finetune.convert import knowledge
from tests.helpers import ROOT

SOURCES = "\n".join(  # without the tables themselves
    path.read_text().partition("_rows(kind")[2] if path.name == "knowledge.py" else path.read_text()
    for path in sorted((ROOT / "finetune/convert").rglob("*.py"))
)


def test_a_name_stands_in_one_row():
    compared = {row: knowledge.KINDS[row.kinds.split(", ")[0]][0] for row in knowledge.CALLS}
    calls = Counter((name, compared[row]) for row in knowledge.CALLS for name in row.names.split())
    trainers = Counter((row.of, name) for row in arguments.ARGUMENTS for name in row.names.split())
    assert [name for name, count in (calls + trainers).items() if count > 1] == []


def test_the_kinds_of_a_row_are_compared_alike():
    for row in knowledge.CALLS:
        assert len({knowledge.KINDS[kind][0] for kind in row.kinds.split(", ")}) == 1, row


@pytest.mark.parametrize("kind", knowledge.KINDS)
def test_every_kind_is_used(kind):
    assert any(kind in row.kinds.split(", ") for row in knowledge.CALLS)
    assert re.search(rf"""["']{kind}["']""", SOURCES), f"no code asks for {kind}"


def test_an_unknown_kind_is_a_mistake():
    with pytest.raises(KeyError, match="loks"):
        knowledge.named("loks")


@pytest.mark.parametrize(
    ("kind", "yes", "no"),
    [
        ("service", "openai.OpenAI", "openai_tools.call"),
        ("service", "openai", "my.openai"),
        ("account", "wandb.init", "wandb.sweep"),
        ("account", "google.colab.drive.mount", "google.colab"),
        (
            "other model",
            "transformers.AutoModelForCausalLM.from_pretrained",
            "transformers.AutoTokenizer.from_pretrained",
        ),
        ("other model", "sentence_transformers.SentenceTransformer", "sentence_transformers.InputExample"),
        ("sets library", "torch.backends.cuda.enable_flash_sdp", "torch.backends"),
        ("images", "LlavaForConditionalGeneration", "ForConditionalGeneration"),
        ("secret", "google.colab.userdata.get", "dict.get"),
    ],
)
def test_full_names(kind, yes, no):
    assert knowledge.matches(kind, yes) and not knowledge.matches(kind, no)


def test_arguments_are_those_of_the_installed_libraries():
    """Independent of the table: the signatures. What is renamed or moved has its new name there. The fields of
    SFTConfig: test_arguments.py."""
    config, trainer = set(SFTConfig.__dataclass_fields__), set(inspect.signature(SFTTrainer).parameters)
    table = arguments.rows(arguments.TRAINER)
    gone = {name for name, row in table.items() if row.moved or row.now is not None}
    assert not gone & trainer and set(table) - gone == trainer - {"self"}
    assert {row.now for row in table.values()} - {None, ""} <= trainer
    assert {name for name, row in table.items() if row.moved} <= config | set(arguments.former_names())
