"""Tests of finetune/drop_in/backbone.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config import load
from finetune.engine.model import adapters
from finetune.errors import UserError
from tests.helpers import tiny
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


@pytest.mark.parametrize("family", ["FalconH1", "NemotronH", "GraniteMoeHybrid"])
@pytest.mark.parametrize("targets", ["all-linear", ["in_proj", "out_proj"]])
def test_both_doors_leave_out_layers_on_which_an_adapter_has_no_effect(
    family: str, targets: Any, make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT itself refuses two of these families, and accepts `out_proj` of the third."""
    from peft import LoraConfig, get_peft_model

    from finetune.drop_in import backbone

    given = LoraConfig(target_modules=targets, task_type="CAUSAL_LM")
    model = tiny.make_text(family, tiny.RECURRENT[family])
    script = get_peft_model(model, backbone.without_effectless(model, given))
    said = capsys.readouterr().out
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.target_modules"]
    words.append(targets if isinstance(targets, str) else f"[{', '.join(targets)}]")
    configured = adapters.add_adapter(tiny.make_text(family, tiny.RECURRENT[family]), load(words))
    assert capsys.readouterr().out == said and ".out_proj: kernels of these layers read the weights past" in said
    adapted, wanted = (
        {name for name, one in door.get_base_model().named_modules() if hasattr(one, "lora_A") and "exp" not in name}
        for door in (script, configured)
    )
    assert adapted == wanted and any(name.endswith("in_proj") for name in adapted)
    assert not any(name.endswith(("mamba.out_proj", "mixer.out_proj")) for name in adapted)
    assert given.exclude_modules is None


@pytest.mark.parametrize("family", ["Qwen3_5", "Gemma4", "Lfm2", "GraniteMoeHybrid"])
def test_a_script_packs_rows_of_todays_families(family: str, make: Callable[..., Any], tmp_path: Path) -> None:
    folder = (tiny.save_multimodal if family in tiny.MULTIMODAL else tiny.save_text)(family, tmp_path / "model")
    job = make(path=folder, packing=True, max_length=64).job
    assert job.unpacked_because is None and job.layout.packs.pack_length == 64
    assert job.layouts.proof.startswith("documents are apart bit for bit")
