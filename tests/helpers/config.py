"""What the tests of config share."""

import pytest

from finetune.config import (
    ConfigError,
    load,
)

MODEL = ["--model.model_name_or_path", "some/model", "--data.train_file", "train.jsonl"]


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(argv))
    assert caught.value.exit_code == 2
    assert all(text in str(caught.value) for text in caught.value.problems)
    return caught.value.problems


def problem(*argv: str) -> str:
    found = problems(*argv)
    assert len(found) == 1, found
    return found[0]
