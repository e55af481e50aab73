"""Tests of finetune/drop_in/backbone.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from tests.helpers.drop_in import WARNINGS

pytestmark = WARNINGS


def test_rows_of_text_are_read_by_a_processors_tokenizer(make: Callable[..., Any], model: Path) -> None:
    from transformers import AutoTokenizer, ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
            super().__init__(tokenizer, chat_template=chat_template)

    tokenizer = AutoTokenizer.from_pretrained(model)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "red"}]}] * 8
    trainer = make(talk, processing_class=Processor(tokenizer, template))
    assert trainer.processing_class is tokenizer and trainer.processing_class.chat_template == template
    assert trainer.train_dataset["input_ids"][0] == make(talk).train_dataset["input_ids"][0]
    with pytest.raises(UserError, match="appears to be vision-related"):
        make([row | {"images": [""]} for row in talk], processing_class=Processor(tokenizer, template))
