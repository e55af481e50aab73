"""Gradients under accumulation, from whole runs in this process, against a plain PyTorch loop over the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from finetune import train
from finetune.config import load
from finetune.engine.model import loading
from tests.helpers import tiny
from tests.helpers.runs import give_trainer_to, in_this_process


class FirstStep(transformers.TrainerCallback):
    """Keeps the gradients of the first optimizer step, and the trainer that knows their rows."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def attach(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {name: one.grad.clone() for name, one in kwargs["model"].named_parameters()}

    def reference(self, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of the step's rows one by one: the sum of the token losses divided by their number."""
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        layout, losses, count = self.trainer.layout, [], 0
        for row in self.trainer.plan.step_rows(0, 0):
            for ids, labels in layout[int(row)]:
                targets = torch.tensor(labels[1:], dtype=torch.int64)
                logits = model(input_ids=torch.tensor(ids, dtype=torch.int64)[None]).logits[0, :-1].float()
                losses.append(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
                count += int((targets != -100).sum())
        loss = torch.stack(losses).sum() / count
        loss.backward()
        return float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("accepts", [True, False], ids=["model that divides", "model that ignores the count"])
@pytest.mark.parametrize("per_device", [8, 4, 1])
def test_gradients_do_not_depend_on_accumulation(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, accepts: bool, per_device: int
) -> None:
    first, load_model = FirstStep(), loading.load

    def declared(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        model.accepts_loss_kwargs = accepts  # transformers reads it as `model_accepts_loss_kwargs`
        return model

    settings = {
        "model.model_name_or_path": tiny_model,
        "model.backend": "transformers",
        "model.full_finetuning": "true",
        "data.train_file": tiny.make_rows(tmp_path / "train.jsonl", 8),
        "data.num_proc": 1,
        "data.packing": "false",
        "training.output_dir": tmp_path / "out",
        "training.global_batch_size": 8,
        "training.per_device_train_batch_size": per_device,
        "training.max_steps": 1,
        "training.max_grad_norm": 0,
        "logging.logging_steps": 1,
        "logging.generate_samples": 0,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with in_this_process(monkeypatch, tmp_path):
        monkeypatch.setattr(loading, "load", declared)
        give_trainer_to(monkeypatch, first.attach)
        train.run(load(words))

    assert first.trainer.model_accepts_loss_kwargs is accepts
    assert first.trainer.args.gradient_accumulation_steps == 8 // per_device
    if hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
        assert first.trainer.loss_is_scaled_for_ga is True
    loss, gradients = first.reference(tiny_model)
    logged = [entry["loss"] for entry in first.trainer.state.log_history if "loss" in entry]
    assert logged == [pytest.approx(loss, rel=1e-5)]
    for name, expected in gradients.items():
        torch.testing.assert_close(first.gradients[name], expected, rtol=1e-4, atol=1e-6)
