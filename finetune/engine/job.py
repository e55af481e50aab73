"""Loads everything that training needs from a configuration, for runs, dry runs, benchmarks and parity alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from finetune.config import Batch, Config
from finetune.config.rules import SELECTIVE, Mode
from finetune.data.layout import Layout, lay_out
from finetune.data.plan import Plan, SequentialPlan
from finetune.data.prepare import Data, prepare
from finetune.engine import multimodal
from finetune.engine.kernels import liger
from finetune.engine.monitoring.metrics import ModelSize
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import hardware
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ALONE, ContextGroup
from finetune.runtime.types import JsonObject, Model, Tokenizer

if TYPE_CHECKING:
    import torch

    from finetune.engine.kernels.attention import AttentionKernel
    from finetune.engine.optimizer import master_weights


Value = TypeVar("Value")

AS_CONFIGURED = "as configured"


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[Value]):
    """What a run takes where its configuration leaves something open: a value, why, and the seconds that it took to
    find. It is how activations are kept (`config.rules.Mode`), or the rows of a micro-batch."""

    value: Value
    reason: str
    seconds: float = 0.0
    searches: bool = False  # whether the run still measures before its first step

    @property
    def made(self) -> bool:
        """Whether the configuration leaves it open, and it is known."""
        return not self.searches and self.reason != AS_CONFIGURED

    def to_dict(self, settings: JsonObject) -> JsonObject:
        """For run.json and checkpoints, with the value as they name it."""
        return {**settings, "reason": self.reason, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The rows as the model takes them, and the kernel of their attention."""

    train: Layout
    eval: Layout | Mapping[str, Layout] | None  # several sets by name, in a trainer that was given several
    unpacked_because: str | None  # why rows are padded instead of packed; None if packed
    attention: AttentionKernel
    proof: str = ""  # that documents of a row are apart, if they share rows
    in_order: bool = False  # train the rows in this order, without shuffling


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its data and the plan of its steps, on this rank. `assemble` makes it, and `measure.settle.settle`
    decides what its configuration leaves open."""

    config: Config
    batch: Batch
    stack: Stack
    hardware: Hardware
    tokenizer: Tokenizer
    data: Data
    layouts: Layouts
    layer_kernels: liger.LayerKernels
    master_weights: master_weights.WeightPrecision
    model: Model
    size: ModelSize
    context: ContextGroup  # the ranks that share each row
    # (key, package.module:name, what it stands for) of the code that the configuration names
    user_code: Sequence[tuple[str, str, Any]]
    activations: Choice[Mode] | None = None  # once settled
    micro_batch: Choice[int] | None = None

    @property
    def layout(self) -> Layout:
        """The training rows."""
        return self.layouts.train

    @property
    def eval_layout(self) -> Layout | Mapping[str, Layout] | None:
        """The held-out rows."""
        return self.layouts.eval

    @property
    def unpacked_because(self) -> str | None:
        """Why rows are padded instead of packed; None if packed."""
        return self.layouts.unpacked_because

    @property
    def attention(self) -> AttentionKernel:
        """The kernel of packs."""
        return self.layouts.attention

    @property
    def searches(self) -> bool:
        """Whether something is still measured before the first step."""
        return any(choice is not None and choice.searches for choice in (self.activations, self.micro_batch))

    def parts(self, **changed: Any) -> dict[str, Any]:
        """What `assemble` takes by name: for the same run with other rows, another batch or another model."""
        names = ("batch", "tokenizer", "layer_kernels", "master_weights", "layouts", "context", "user_code")
        return {name: getattr(self, name) for name in names} | changed

    def in_order_of(self, checkpoint_plan: str | None) -> Job:
        """The job in the order that version 0.1.0 took, drawn from the held-out rows as well, if a checkpoint's plan
        has this digest; else this one."""
        if checkpoint_plan in (None, self.plan().digest()) or self.data.order_key == self.data.fingerprint:
            return self
        data = dataclasses.replace(self.data, order_key=self.data.fingerprint)
        train = lay_out_split(self.config, data, "train", self.layout.packs.pack_length)
        former = dataclasses.replace(self, data=data, layouts=dataclasses.replace(self.layouts, train=train))
        return former if former.plan().digest() == checkpoint_plan else self

    def plan(self) -> Plan:
        """The order of the training rows in global steps."""
        given = self.config, self.data, self.layout, self.batch.global_batch_size, self.size.hidden
        return plan_of(*given, in_order=self.layouts.in_order)


def plan_of(
    config: Config, data: Data, layout: Layout, global_batch_size: int, hidden: int = 1, *, in_order: bool = False
) -> Plan:
    """The order of training rows in global steps. How ranks share a step depends on `hidden`, the model's width."""
    return (SequentialPlan if in_order else Plan)(
        costs=layout.packs.costs(hidden),
        label_tokens=layout.label_tokens,
        global_batch_size=global_batch_size,
        seed=config.training.seed,
        fingerprint=data.order_key,
        lengths=layout.padded_lengths,
        group_by_length=config.training.train_sampling_strategy == "group_by_length",
    )


def assemble(
    config: Config,
    stack: Stack,
    model: Model,
    data: Data,
    *,
    batch: Batch,
    tokenizer: Tokenizer,
    layer_kernels: liger.LayerKernels,
    master_weights: master_weights.WeightPrecision,
    layouts: Layouts | None = None,
    pack_eval: bool = True,
    context: ContextGroup = ALONE,
    user_code: Sequence[tuple[str, str, Any]] = (),
) -> Job:
    """The job of a loaded model and tokenized rows, for both front doors, and for trials of it.

    Args:
        layouts: of the rows; None to prepare the model for packs, if it can take them, and lay the rows out.
        pack_eval: whether held-out rows are packed as the training rows are.

    Raises:
        UserError: an attention kernel is wanted that this run cannot use.
    """
    if layouts is None:
        layouts = lay_out_for(model, config, stack, data, batch.per_device, context, pack_eval=pack_eval)
        stack = stack.with_masks() if layouts.attention.masks else stack
    return Job(
        config=config,
        batch=batch,
        stack=stack,
        hardware=hardware.probe(),
        tokenizer=tokenizer,
        data=data,
        layouts=layouts,
        layer_kernels=layer_kernels,
        master_weights=master_weights,
        model=model,
        size=model_size(model),
        context=context,
        user_code=user_code,
    )


def lay_out_for(
    model: Model,
    config: Config,
    stack: Stack,
    data: Data,
    per_device: int,
    context: ContextGroup,
    *,
    pack_eval: bool = True,
) -> Layouts:
    """Prepare the model for packs, or for rows that ranks share, and lay the rows out as it takes them.

    Raises:
        UserError: an attention kernel is wanted that this run cannot use.
    """
    from finetune.engine.model import load_arguments, packing

    because, proof = None if config.data.packing else "packing is off", ""
    if context.size > 1:
        proof = packing.prepare_for_shared_rows(model, config, stack, context)
    elif because is None:
        tried = packing.prepare_for_packs(model, config, stack)
        because, proof = tried.leak, tried.proof
    length = config.data.row_length if because is None else None
    layout, dtype = lay_out_split(config, data, "train", length), load_arguments.resolve_dtype(config, stack)
    why = None
    if config.training.gradient_checkpointing == SELECTIVE:
        why = "selective checkpointing keeps the output of torch's kernel alone"
    elif stack.backend == "unsloth" and config.model.full_finetuning:
        why = "Unsloth compiles the layers of full fine-tuning with torch's kernel"
    kernel = choose_attention(config.model.packed_attention, model, stack, layout, per_device, dtype, context, why)
    held_out = lay_out_eval(config, data, length if pack_eval else None)
    return Layouts(train=layout, eval=held_out, unpacked_because=because, proof=proof, attention=kernel)


def lay_out_split(config: Config, data: Data, split: str, pack_length: int | None) -> Layout:
    """The rows of a split, in packs or padded."""
    return lay_out(data.splits[split], pack_length, seed=config.training.seed, fingerprint=data.order_key)


def lay_out_eval(config: Config, data: Data, pack_length: int | None) -> Layout | dict[str, Layout] | None:
    """The held-out rows; by name if there are several sets."""
    found = {
        split.removeprefix("eval").removeprefix("_"): lay_out_split(config, data, split, pack_length)
        for split in data.splits
        if split != "train"
    }
    return found.get("", found or None)


def read_rows(config: Config) -> tuple[Tokenizer, Data]:
    """The tokenizer and the tokenized rows of a configuration, before any rank has joined.

    Raises:
        UserError: the tokenizer or the data cannot be used.
    """
    from finetune.engine.checkpoint import tokenizer_files
    from finetune.engine.model import tokenizer_loading
    from finetune.engine.preflight import adapter_files

    tokenizer = tokenizer_loading.load_tokenizer(config)
    tokenizer_files.note_loaded(tokenizer, *adapter_files.tokenizer_source(config))
    tokenizer_loading.set_padding(tokenizer)
    return tokenizer, prepare(config, tokenizer)


def choose_attention(
    wanted: str,
    loaded: Model,
    stack: Stack,
    layout: Layout,
    per_device: int,
    dtype: torch.dtype,
    context: ContextGroup = ALONE,
    why_torchs: str | None = None,
) -> AttentionKernel:
    """The kernel for the attention of this run's packs, from the first micro-batch's documents.

    Args:
        why_torchs: why only torch's kernel can compute them; None if that is not so.

    Raises:
        UserError: a kernel is wanted that this run cannot use.
    """
    from finetune.engine.kernels import attention, context_attention
    from finetune.engine.model import packing

    own = str(loaded.config.get_text_config()._attn_implementation)
    if stack.device == "cpu":
        reason = "there is no GPU"
    elif layout.packs.pack_length is None and context.size == 1:
        reason = "rows are not packed"
    elif own not in (attention.PACKED, context_attention.NAME) and (
        stack.backend == "transformers" or not (why_torchs or packing.has_unsloths_attention(loaded))
    ):
        reason = "the model's own, as set or because it needs what the kernels for packs lack"
    elif why_torchs is not None and wanted != "torch":
        reason = why_torchs
        if wanted == "auto":
            return attention.AttentionKernel(kernel=attention.FLASH_2, reason=reason)
    else:
        lengths = [len(ids) for row in range(min(per_device, len(layout))) for ids, _ in layout[row]]
        documents = (1, per_device + 1) if layout.packs.pack_length is None else layout.packs.segments(per_device)
        found = context_attention.own_shapes(attention.shapes(loaded, lengths, dtype), context.size)
        chosen = attention.choose(wanted, found, stack.torch_device, documents)
        if (wide := max(attention.head_widths(loaded), default=0)) <= attention.WIDEST:
            return chosen
        return dataclasses.replace(
            chosen, reason=f"{chosen.reason}; torch's memory-efficient kernel for heads of {wide}"
        )
    if own == context_attention.NAME:  # on a CPU
        own = "sdpa"
    if wanted == "flash_4":
        raise UserError(f"model.packed_attention is flash_4, which this run cannot use: {reason}. Set it to auto.")
    return attention.AttentionKernel(kernel=own, reason=reason, masks=context.size == 1)


def load_model(config: Config, stack: Stack, row_length: int) -> Model:
    """The model, sharded if the configuration asks for it.

    Raises:
        UserError: it cannot be sharded, or is not found.
    """
    import torch

    from finetune.engine.model import load_arguments, loading
    from finetune.engine.sharding import quantized_storage, shard, unit_loading

    def load(without_weights: bool) -> Model:
        return loading.load(config, stack, row_length=row_length, without_weights=without_weights)

    if not shard.is_requested(config):
        return load(without_weights=False)
    shard.check(stack.device, dtype := load_arguments.resolve_dtype(config, stack))
    shard.separate_compile_caches()
    mesh, device = shard.mesh(stack.device), stack.torch_device
    stored = unit_loading.loadable_files(config)
    everywhere = all(distributed.gather_objects(stored is not None))  # machines may have different files in the cache
    if stored is not None and everywhere:
        loaded = load(without_weights=True)
        shard.apply(loaded, mesh, dtype, fill=lambda unit: unit_loading.load_unit(unit, stored, device))
        return loaded
    me = distributed.ranks()
    turns = max(distributed.gather_objects(me.local_world_size))
    with unit_loading.one_rank_at_a_time(me.local_rank, turns):  # each keeps its part before the next one loads
        loaded = load(without_weights=False)
        if config.model.load_in_4bit:
            dtype = torch.float32  # packed bytes must not be cast
            quantized_storage.store_as_float32(loaded, device)
        shard.apply(loaded, mesh, dtype)
    quantized_storage.restore_quant_states(loaded)
    shard.base_model(loaded).hf_device_map = stack.device_map  # accelerate compares it with the rank's device
    return loaded


def model_size(model: Model) -> ModelSize:
    """Sizes that determine the floating-point operations per step."""
    from finetune.engine.model import experts

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    reached: list[Any] = list(multimodal.outside_towers(model).values())
    looked_up = {one.weight for one in reached if hasattr(one, "num_embeddings")} - {getattr(head, "weight", None)}
    heads = getattr(config, "num_attention_heads", None) or 1
    of_a_head = sum(getattr(one, "head_dim", 0) for one in reached if hasattr(one, "is_causal"))
    found = experts.count(model)
    beside = sum(one.numel() for tower in multimodal.towers(model).values() for one in tower.parameters())
    return ModelSize(
        parameters=found.total,
        active_parameters=found.active,
        matmul_parameters=found.active - beside - sum(one.numel() for one in looked_up),
        trainable_parameters=found.trainable,
        active_trainable_parameters=found.active_trainable,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention=heads * of_a_head // config.num_hidden_layers or config.hidden_size,
    )


def layout_facts(job: Job) -> dict[str, JsonObject]:
    """The composition of the rows in each split."""
    held_out = job.eval_layout or {}
    named = held_out if isinstance(held_out, Mapping) else {"": held_out}
    found = {"train": job.layout} | {f"eval_{name}" if name else "eval": layout for name, layout in named.items()}
    return {split: layout.to_dict() for split, layout in found.items()}


def experts_of(job: Job) -> JsonObject | None:
    """The routed experts of the model for run.json, and in how many layers `grouped_experts` computes them; None if
    there are none."""
    from finetune.engine.kernels import grouped_experts
    from finetune.engine.model import experts

    routed = experts.summary(job.model)
    return routed and routed | {"grouped": grouped_experts.installed(job.model)}
