"""The trainer of scripts against TRL: losses, evaluation, callbacks, kernels and experts."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from tests.cases import models
from tests.helpers.drop_in import PAIRS, SETTINGS, TEXTS, WARNINGS, dataset, losses, refusal

pytestmark = WARNINGS


def test_the_constructor_is_that_of_the_installed_trl(make: Callable[..., Any]) -> None:
    import trl

    from finetune import SFTTrainer

    original = next(one for one in trl.SFTTrainer.__mro__ if one.__module__ == "trl.trainer.sft_trainer")
    theirs = inspect.signature(inspect.unwrap(original.__init__)).parameters
    if "model" not in theirs:  # Unsloth's class for CPUs hides it
        theirs = inspect.signature(original.__mro__[1].__init__).parameters
    ours = dict(inspect.signature(SFTTrainer.__init__).parameters)
    assert ours.pop("global_batch_size").kind is inspect.Parameter.KEYWORD_ONLY
    assert ours.pop("older").kind is inspect.Parameter.VAR_KEYWORD
    assert [(one.name, one.default, one.kind) for one in ours.values()] == [
        (one.name, one.default, one.kind) for one in theirs.values()
    ]


def test_the_fused_head_of_trl_is_found(make: Callable[..., Any]) -> None:
    """On a GPU the loss of a transformers model goes through it, unless Unsloth's version of the class left it out."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from finetune.engine.training.loss import has_fused_head

    trainer = make(peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert has_fused_head(trainer.model) and has_fused_head(make().model)
    assert not has_fused_head(AutoModelForCausalLM.from_config(trainer.model.config))


def test_ligers_kernels_are_installed_once_and_recorded(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the adapter is there. transformers' trainer would install them again when training begins."""
    from peft import LoraConfig

    from finetune.engine.kernels import liger

    installed: list[Any] = []
    monkeypatch.setattr(liger, "why_not", lambda stack, kind: None)
    monkeypatch.setattr(liger, "install", installed.append)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *given: pytest.fail("installed by others"))
    adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make(use_liger_kernel=True, peft_config=adapter, max_steps=1)
    trainer.train()
    assert installed == [trainer.model] and hasattr(trainer.model, "peft_config")
    assert vars(trainer.job.layer_kernels) == {"kernels": "Liger", "reason": "set by use_liger_kernel"}
    assert make().job.layer_kernels.kernels == "transformers" and len(installed) == 1


def test_evaluation_before_training_computes_as_after_it(make: Callable[..., Any]) -> None:
    """In the run's precision: accelerate puts autocast around the model's forward only when training begins."""
    entered: list[bool] = []

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        entered.append(True)
        yield

    trainer = make(eval_dataset=dataset(TEXTS))
    trainer.accelerator.autocast = autocast
    trainer.evaluate()
    assert entered


def test_rows_that_are_set_later_replace_those_of_the_plan(make: Callable[..., Any]) -> None:
    """As Unsloth's `train_on_responses_only(trainer)` does: other labels on the same tokens."""
    trainer = make()
    before, plan = trainer.layout.label_tokens.sum(), trainer.plan.digest()

    def last_only(row: dict[str, Any]) -> dict[str, Any]:
        return {"labels": [-100] * (len(row["input_ids"]) - 1) + row["input_ids"][-1:]}

    trainer.train_dataset = trainer.train_dataset.map(last_only)
    assert trainer.layout.label_tokens.sum() == len(TEXTS) < before
    assert trainer.plan.digest() != plan
    trainer.train()
    end = trainer.processing_class.eos_token_id
    model = trainer.model.eval()
    assert len(losses(trainer)) == 4
    row = torch.tensor([trainer.train_dataset[0]["input_ids"]])
    assert row[0, -1] == end and losses(trainer)[-1] < losses(trainer)[0]
    assert torch.isfinite(model(row).logits).all()


def test_packs_are_shown_as_trl_shows_them(make: Callable[..., Any]) -> None:
    trainer = make(packing=True, max_length=64, eval_dataset=dataset(TEXTS[:5]), eval_packing=False)
    packs = trainer.train_dataset
    assert sum(map(len, packs["seq_lengths"])) == len(TEXTS) and len(packs) < len(TEXTS)
    assert packs.column_names == ("input_ids", "labels", "seq_lengths") and len(packs[1:3]["input_ids"]) == 2
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) <= 64 for row in packs)
    assert packs.map(lambda row: row).num_rows == len(packs)  # whatever else a Dataset can do
    assert len(trainer.eval_dataset) == 5 and "seq_lengths" not in trainer.eval_dataset.column_names


def test_an_evaluation_is_the_mean_over_the_tokens_of_each_set(make: Callable[..., Any]) -> None:
    held_out = {"short": dataset(TEXTS[:3]), "long": dataset(TEXTS[3:10])}
    trainer = make(eval_dataset=held_out, per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    for name in held_out:
        total = count = 0.0
        for row in trainer.eval_dataset[name]:
            ids = torch.tensor(row["input_ids"])
            with torch.no_grad():
                logits = trainer.model(ids[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
        assert metrics[f"eval_{name}_loss"] == pytest.approx(total / count, rel=1e-5)
        assert 0 <= metrics[f"eval_{name}_mean_token_accuracy"] <= 1
    other = trainer.evaluate(dataset(TEXTS[:3]), metric_key_prefix="test")
    assert other["test_loss"] == pytest.approx(metrics["eval_short_loss"], rel=1e-6)
    with pytest.raises(UserError, match="predict"):
        trainer.predict(dataset(TEXTS))


def test_what_is_saved_loads_without_running_code(make: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make()
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    files = {path.suffix for path in (tmp_path / "final").iterdir()}
    assert files <= {".json", ".safetensors", ".jinja"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_callbacks_see_every_step_and_what_trl_logs(make: Callable[..., Any]) -> None:
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        steps = 0
        logs: list[dict[str, Any]] = []

        def on_step_end(self, *given: Any, **named: Any) -> None:
            self.steps += 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            self.logs.append(logs)

    seen = Seen()
    trainer = make(callbacks=[seen], logging_steps=0.5)  # of 4 steps
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 4, 4]  # and the summary of the run
    rows = [int(row) for step in (0, 1) for row in trainer.plan.step_rows(0, step)]
    counted = sum(len(trainer.train_dataset[row]["input_ids"]) for row in rows)
    assert seen.steps == 4
    assert seen.logs[0]["num_tokens"] == counted
    assert {"loss", "grad_norm", "learning_rate"} <= set(trainer.state.log_history[0])


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "LoRA"])
def test_losses_are_those_of_trl_on_the_rows_of_the_plan(
    make: Callable[..., Any], model: Path, tmp_path: Path, adapter: bool
) -> None:
    """The reference is trl.SFTTrainer itself, fed the plan's rows in the plan's order."""
    import trl
    from peft import LoraConfig

    from finetune import SFTConfig
    from tests.conformance import trl_on_cpu

    peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    own = make(PAIRS, peft_config=peft_config, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    own.train()
    order = [int(row) for step in range(4) for row in own.plan.step_rows(0, step)]

    trl_on_cpu.give_kernel()
    reference = trl.SFTTrainer(
        str(model),
        SFTConfig(
            output_dir=str(tmp_path / "reference"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            **SETTINGS,
        ),
        train_dataset=dataset([PAIRS[row] for row in order]),
        peft_config=peft_config,
    )
    reference.train()
    assert losses(own) == pytest.approx(losses(reference), rel=1e-5)
    for name, parameter in reference.model.named_parameters():
        assert torch.allclose(parameter, own.model.get_parameter(name), rtol=1e-3, atol=2e-5), name


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return models.make("moe", tmp_path_factory.mktemp("experts") / "moe")


def test_adapters_of_experts_train_as_with_trl(make: Callable[..., Any], experts: Path, tmp_path: Path) -> None:
    """By this package's kernels. The reference is trl.SFTTrainer itself, with PEFT's."""
    import peft
    import transformers
    import trl

    from finetune import SFTConfig, SFTTrainer
    from finetune.engine.kernels import grouped_experts
    from tests.conformance import trl_on_cpu

    def model() -> Any:
        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False, task_type="CAUSAL_LM",
        )  # fmt: skip
        return peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(experts), lora)

    def config(name: str, **more: Any) -> Any:
        return SFTConfig(
            output_dir=str(tmp_path / name), per_device_train_batch_size=1, router_aux_loss_coef=0.0, max_steps=3,
            save_strategy="no", report_to="none", bf16=False, use_cpu=True, optim="sgd", learning_rate=0.05, **more,
        )  # fmt: skip

    own = SFTTrainer(model(), config("own"), train_dataset=dataset(PAIRS))
    assert grouped_experts.installed(own.model) == 2
    own.train()
    order = [int(row) for step in range(3) for row in own.plan.step_rows(0, step)]
    trl_on_cpu.give_kernel()
    rows = dataset([PAIRS[row] for row in order])
    reference = trl.SFTTrainer(model(), config("reference", train_sampling_strategy="sequential"), train_dataset=rows)
    reference.train()
    trained = {name: one for name, one in reference.model.named_parameters() if one.requires_grad}
    assert sum("experts" in name for name in trained) == 8
    for name, parameter in trained.items():
        assert torch.allclose(parameter, own.model.get_parameter(name), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("coefficient", [0.5, 0.0, None], ids=["given", "off", "the model's"])
def test_by_single_rows_a_mixture_of_experts_trains_as_with_trl(
    make: Callable[..., Any], experts: Path, tmp_path: Path, coefficient: float | None
) -> None:
    """The load-balancing loss of a row is then that of TRL's batch. The reference is trl.SFTTrainer itself."""
    import trl

    from finetune import SFTConfig
    from tests.conformance import trl_on_cpu

    given: dict[str, Any] = dict(
        per_device_train_batch_size=1,
        router_aux_loss_coef=coefficient,
        logging_steps=1,
        max_steps=3,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
    )
    own = make(PAIRS, path=experts, eval_dataset=dataset(PAIRS), **given)
    before = own.evaluate()
    own.train()
    order = [int(row) for step in range(3) for row in own.plan.step_rows(0, step)]
    trl_on_cpu.give_kernel()
    reference = trl.SFTTrainer(
        str(experts),
        SFTConfig(output_dir=str(tmp_path / "reference"), train_sampling_strategy="sequential", **given),
        train_dataset=dataset([PAIRS[row] for row in order]),
    )
    reference.train()
    for name, parameter in reference.model.named_parameters():
        assert torch.allclose(parameter, own.model.get_parameter(name), rtol=1e-4, atol=1e-6), name
    logged = [entry for entry in own.state.log_history if "loss" in entry]
    theirs = [entry for entry in reference.state.log_history if "loss" in entry]
    if coefficient == 0.0:
        assert losses(own) == pytest.approx(losses(reference), rel=1e-5) and "aux_loss" not in logged[0] | theirs[0]
        return
    weight = 0.001 if coefficient is None else coefficient
    terms = [entry["aux_loss"] for entry in logged]
    assert terms == pytest.approx([entry["aux_loss"] for entry in theirs], rel=1e-5)
    # TRL's loss contains the term. Ours, of training and evaluation, is that of the tokens, as of a dense model.
    with_term = [loss + weight * term for loss, term in zip(losses(own), terms, strict=True)]
    assert with_term == pytest.approx(losses(reference), rel=1e-5)
    dense = make(PAIRS, path=experts, eval_dataset=dataset(PAIRS), **given | {"router_aux_loss_coef": 0.0})
    assert before["eval_loss"] == dense.evaluate()["eval_loss"]


def test_a_mixture_of_experts_trains_alike_by_any_micro_batch(make: Callable[..., Any], experts: Path) -> None:
    found: list[Any] = []
    for size, accumulation in ((1, 4), (4, 1)):
        batch: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        batch |= {"max_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
        trainer = make(PAIRS, path=experts, router_aux_loss_coef=0.5, **batch)
        trainer.train()
        router = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").detach()
        found.append((losses(trainer), [entry.get("aux_loss") for entry in trainer.state.log_history[:-1]], router))
    one, other = found
    assert other[0] == pytest.approx(one[0], rel=1e-5) and other[1] == pytest.approx(one[1], rel=1e-5)
    torch.testing.assert_close(other[2], one[2], rtol=1e-4, atol=1e-6)


def test_the_fused_head_keeps_the_load_balancing_loss(make: Callable[..., Any], experts: Path) -> None:
    """TRL's fused head, by which a GPU computes the loss, against that of transformers: one micro-batch."""
    from tests.conformance import trl_on_cpu

    trl_on_cpu.give_kernel()
    trainer, found = make(PAIRS, path=experts, router_aux_loss_coef=0.5), []
    for device in ("cpu", "cuda"):
        trainer.stack = dataclasses.replace(trainer.stack, device=device)
        trainer.model.zero_grad()
        batch = trainer.collate_rows(trainer.layout.__getitems__([0, 1, 2]))
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))
        loss.backward()
        router = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").grad.clone()
        found.append((loss.detach(), router, trainer.statistics.take_load_balancing()))
    torch.testing.assert_close(found[1], found[0])
    trainer.load_balancing.coefficient = 0.0
    trainer.model.zero_grad()
    batch = trainer.collate_rows(trainer.layout.__getitems__([0, 1, 2]))
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9)).backward()
    without = trainer.model.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert (without - found[1][1]).norm() > 0.1 * without.norm()  # the term is a large part of the gradient


def test_a_coefficient_for_experts_that_a_model_lacks_is_refused(make: Callable[..., Any]) -> None:
    assert "LlamaForCausalLM is no mixture of experts" in refusal(make, router_aux_loss_coef=0.1)


def test_rows_of_similar_length_are_grouped_if_asked_for(make: Callable[..., Any]) -> None:
    random, grouped = (make(train_sampling_strategy=strategy) for strategy in ("random", "group_by_length"))
    assert not random.plan.group_by_length and grouped.plan.group_by_length
    assert grouped.job.config.training.train_sampling_strategy == "group_by_length"
    spread = [
        max(one.layout.tokens[one.plan.step_rows(0, 0)]) - min(one.layout.tokens[one.plan.step_rows(0, 0)])
        for one in (random, grouped)
    ]
    assert spread[0] > spread[1]


class TwoPoints(torch.optim.SGD):
    """As schedule-free optimizers: the weights that training sees are not the ones it promises."""

    OFFSET = 0.25
    trains = False

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def _move(self, trains: bool) -> None:
        for parameter in [one for group in self.param_groups for one in group["params"]]:
            parameter += self.OFFSET * (trains - self.trains)
        self.trains = trains


def test_an_optimizer_with_two_sets_of_weights_is_evaluated_and_saved_with_the_right_one(
    make: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """Its `eval` comes before evaluations, checkpoints and the final model, its `train` before each step."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, TrainerCallback

    at_first = AutoModelForCausalLM.from_pretrained(model)
    optimizer = TwoPoints(at_first.parameters(), lr=0.0)
    trained_at = []

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trained_at.append(optimizer.trains)

    from finetune import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        at_first,
        SFTConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            report_to="none",
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=dataset(TEXTS),
        eval_dataset=dataset(TEXTS[:8]),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[Watch()],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[-2:] == pytest.approx([before, before]) and trained_at == [True] * 4
    trainer.save_model(str(tmp_path / "saved"))
    right = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for folder in ("out/checkpoint-2", "out/checkpoint-4", "saved"):
        for name, value in load_file(tmp_path / folder / "model.safetensors").items():
            torch.testing.assert_close(value, right[name])
