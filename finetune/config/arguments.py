"""What becomes of each argument of TRL's SFTConfig and SFTTrainer: one row per name, today's or former.

The YAML loader, the JSON schema, the docs, the trainer for scripts and the converter read this table. A field of
SFTConfig without a row is the key of the same name in one of our sections. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any

from finetune.config.schema import KEYS

CONFIG, TRAINER = "SFTConfig", "SFTTrainer"
UNSLOTH = "UnslothTrainingArguments"
ANY = object()  # every value
UNSET = object()


@dataclass(frozen=True, slots=True)
class Argument:
    """One name, or several that are treated alike.

    Args:
        names: separated by spaces.
        of: CONFIG, which includes TrainingArguments, TRAINER or UNSLOTH.
        now: of a former name, today's; "" if it has no effect today.
        moved: an argument of SFTTrainer once, of SFTConfig now.
        passed: SFTConfig gets it unchanged.
        sets: value -> our key and its value; ANY for every value.
        excludes: value -> our key and the value of it that contradicts. Nothing is set.
        kept: values that describe every run: accepted, and nothing is set.
        fixed: what TRL and transformers get in every run.
        reason: why other values are not kept.
        remedy: what to do in a configuration, which refuses other values if there is a reason or a remedy.
        script: what to do in a script, which refuses other values; "" if it keeps all.
        changes_loss: other values change the loss, which the converter refuses.
        left_out: why the converter leaves it out; "" if it stays.
    """

    names: str
    of: str = CONFIG
    _: KW_ONLY
    now: str | None = None
    moved: bool = False
    passed: bool = False
    sets: Mapping[Any, tuple[str, Any]] = field(default_factory=dict)
    excludes: Mapping[Any, tuple[str, Any]] = field(default_factory=dict)
    kept: tuple[object, ...] = ()
    fixed: object = UNSET
    reason: str = ""
    remedy: str = ""
    script: str = ""
    changes_loss: bool = False
    left_out: str = ""

    @property
    def instead(self) -> str:
        """Why a configuration refuses it, and what to do; "" if it does not."""
        return "; ".join(text for text in (self.reason, self.remedy) if text)

    def is_kept(self, value: object) -> bool:
        """Whether this value describes every run."""
        return any(type(value) is type(one) and value == one for one in self.kept)


_EXACT = "the loss is the mean over the supervised tokens of the whole global batch, exact on any number of GPUs"
_ONE_LOSS = f"{_EXACT}; other objectives are not supported"
_ORDER = "`seed` alone sets the order of the rows, so that any number of GPUs takes the same steps"
_ONE_RATE = "all weights are trained with one learning rate"
_ONE_GPU = "each GPU holds the whole model, or a part of it with --finetune training.strategy=shard"
_LAUNCHED = (
    "in a script each GPU holds the whole model (DDP). Launch with torchrun --standalone --nproc_per_node N; to "
    "split a model that SFTTrainer is given by name, add --finetune training.strategy=shard"
)
_SHARD = "use training.strategy: shard to split the model over the GPUs"
_METRICS = "evaluation does not build the logits; it reports loss, token accuracy and entropy over all ranks"
_LOGITS_METRICS = f"{_METRICS}. Remove it, and compute other metrics from the saved model"
_SCORED = f"{_METRICS}. Name a function that scores generated answers as logging.metric"
_PUBLISH = "publish a finished run with `finetune export RUN --to adapter --out DIR`, then `hf upload USER/NAME DIR`"
_NOT_PUBLISHED = "nothing is published while training; publish the finished folder with `hf upload`"
_NO_EFFECT = "it has no effect on the result"
_PACKS = "use data.packing and data.pack_length"
_PREPARED = "data is prepared once, and the keys of `data:` control how"
_EVALUATED = "evaluation averages the loss over all supervised tokens"
EXAMPLES = {"training.eval_steps": 100}  # of keys whose default is off
_EVAL_STEPS = (
    f"use training.eval_steps, such as training.eval_steps: {EXAMPLES['training.eval_steps']}; evaluation before and "
    "after training is always on"
)
_LIGER_AGAIN = "it changes the speed only; set it again on a GPU where liger-kernel is installed"

ARGUMENTS = (
    # Former names of SFTConfig and TrainingArguments.
    Argument("evaluation_strategy", now="eval_strategy"),
    Argument("max_seq_length", now="max_length"),
    Argument("no_cuda", now="use_cpu"),
    Argument("warmup_ratio", now="warmup_steps"),
    Argument("per_gpu_train_batch_size", now="per_device_train_batch_size"),
    Argument("per_gpu_eval_batch_size", now="per_device_eval_batch_size"),
    Argument("push_to_hub_model_id", now="hub_model_id"),
    Argument("push_to_hub_token", now="hub_token"),
    Argument(
        "group_by_length",
        now="train_sampling_strategy",
        sets={
            True: ("training.train_sampling_strategy", "group_by_length"),
            False: ("training.train_sampling_strategy", "random"),
        },
        remedy="use training.train_sampling_strategy: group_by_length",
    ),
    Argument(
        "logging_dir", now="", reason="TensorBoard's files are in runs/ under training.output_dir", left_out=_NO_EFFECT,
    ),
    Argument("push_to_hub_organization", now="", remedy=_PUBLISH, left_out=_NOT_PUBLISHED),
    Argument("fsdp_min_num_params sharded_ddp", now="", remedy=_SHARD, left_out=_ONE_GPU),
    Argument("include_inputs_for_metrics", now="", reason=_EVALUATED, left_out=_METRICS),
    Argument("overwrite_output_dir", now="", left_out=_NO_EFFECT),
    Argument(
        "save_safetensors use_mps_device jit_mode_eval use_ipex half_precision_backend fp16_backend fp16_opt_level"
        " past_index ray_scope torchdynamo include_tokens_per_second dispatch_batches split_batches dataset_batch_size"
        " num_of_sequences chars_per_token infinite xpu_backend tpu_num_cores tpu_metrics_debug mp_parameters"
        " report_from_all_ranks infinite_sampling",
        now="",
        left_out=_NO_EFFECT,
    ),
    # SFTConfig.
    Argument("extra", remedy="give each SFTConfig field under `training:` by its own name"),
    Argument("model_init_kwargs", remedy="use the keys of `model:`"),
    Argument("chat_template_path", remedy="use model.chat_template"),
    Argument(
        "bf16",
        sets={True: ("model.dtype", "bfloat16")}, excludes={False: ("model.dtype", "bfloat16")},
        remedy="use model.dtype: bfloat16",
    ),
    Argument(
        "fp16",
        sets={True: ("model.dtype", "float16")}, excludes={False: ("model.dtype", "float16")},
        remedy="use model.dtype: float16",
    ),
    Argument("bf16_full_eval fp16_full_eval", kept=(False,), remedy="use model.dtype"),
    Argument("eos_token pad_token", remedy="it comes from the tokenizer and model.chat_template"),
    Argument("dataset_text_field", sets={ANY: ("data.dataset_text_field", ANY)}),
    Argument("dataset_num_proc", sets={ANY: ("data.num_proc", ANY)}, remedy="use data.num_proc"),
    Argument("max_length", fixed=None),
    Argument("packing", fixed=False),
    Argument(
        "activation_checkpointing",  # the name of gradient_checkpointing from transformers 5.18 on
        sets={
            True: ("training.gradient_checkpointing", True),
            False: ("training.gradient_checkpointing", False),
        },
        remedy="use training.gradient_checkpointing",
    ),
    Argument("activation_checkpointing_kwargs", remedy="use training.gradient_checkpointing_kwargs"),
    Argument("truncation_mode", sets={"keep_start": ("data.over_length", "truncate")}, remedy="use data.over_length"),
    Argument("packing_strategy", kept=("bfd",), remedy=_PACKS),
    Argument("padding_free", fixed=False, remedy=_PACKS),
    Argument("eval_packing pad_to_multiple_of", remedy=_PACKS),
    Argument("dataset_kwargs", fixed={"skip_prepare_dataset": True}, remedy=_PREPARED),
    Argument("remove_unused_columns", fixed=False, remedy=_PREPARED),
    Argument("skip_prepare_dataset label_names", remedy=_PREPARED),
    Argument("completion_only_loss", fixed=False),  # the labels say it
    Argument("assistant_only_loss", fixed=False),
    Argument("shuffle_dataset", reason=_ORDER),
    Argument("data_seed", kept=(None,), reason=_ORDER, script="Set `seed`", left_out=_ORDER),
    Argument("accelerator_config", reason=_ORDER),
    Argument("ignore_data_skip", fixed=True, reason=_ORDER),  # the plan starts at the right step: nothing to skip
    Argument("length_column_name", reason=_ORDER, left_out="the lengths are those of the tokenized rows"),
    Argument("train_sampling_strategy", kept=("random", "group_by_length"), script=f"{_ORDER}. Remove it"),
    Argument(
        "dataloader_drop_last",
        kept=(False,), reason="an epoch trains on every row once", script="Remove it",
        left_out="an epoch trains on every row once",
    ),
    Argument(
        "auto_find_batch_size",
        kept=(False,), reason="the batch would depend on the GPU",
        remedy="set training.per_device_train_batch_size", script="Set per_device_train_batch_size",
        left_out="the batch would depend on the GPU; per_device_train_batch_size sets it",
    ),
    Argument(
        "average_tokens_across_devices",
        kept=(True,), fixed=True, reason=_EXACT, script="Remove it",
        left_out="the loss is always the mean over the whole global batch",
    ),
    Argument(
        "eval_strategy",
        sets={"no": ("training.eval_steps", 0)}, excludes={"steps": ("training.eval_steps", 0)}, remedy=_EVAL_STEPS,
    ),
    Argument("eval_on_start", kept=(True,), remedy=_EVAL_STEPS),
    Argument("eval_delay do_eval", remedy=_EVAL_STEPS),
    Argument(
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps"
        " include_for_metrics batch_eval_metrics",
        reason=_EVALUATED,
    ),
    Argument("loss_type", kept=("nll",), reason=_ONE_LOSS, script="Remove it", changes_loss=True),
    Argument("label_smoothing_factor", kept=(0, 0.0), reason=_ONE_LOSS, script="Remove it", changes_loss=True),
    Argument("ddp_static_graph", reason="it breaks gradient accumulation in DDP"),
    Argument("do_train", kept=(True,), reason="this command always trains"),
    Argument("do_predict", reason="this command always trains"),
    Argument(
        "save_strategy",
        sets={"no": ("training.save_steps", 0)}, excludes={"steps": ("training.save_steps", 0)},
        remedy="use training.save_steps; one rank writes",
    ),
    Argument("save_on_each_node", remedy="use training.save_steps; one rank writes"),
    Argument("enable_jit_checkpoint", reason="Ctrl-C and SIGTERM always save a checkpoint"),
    Argument("logging_strategy", kept=("steps",), remedy="use logging.logging_steps"),
    # On, it hides losses that are not finite, and syncs with the GPU in every step.
    Argument("logging_nan_inf_filter", kept=(False,), fixed=False, reason="a loss that is not finite is always logged"),
    Argument("report_to", sets={ANY: ("logging.report_to", ANY)}),
    Argument(
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        reason="Trackio writes to this machine", remedy="publish a project with `trackio sync`",
    ),
    Argument(
        "use_liger_kernel",
        sets={True: ("model.layer_kernels", "liger"), False: ("model.layer_kernels", "torch")},
        fixed=False,  # `layer_kernels` has installed them
        remedy="use model.layer_kernels", left_out=_LIGER_AGAIN,
    ),
    Argument(
        "liger_kernel_config",
        kept=(None, {}), fixed=None, remedy="use model.layer_kernels",
        script="all of Liger's layer kernels are used, and its loss is not. Remove it", left_out=_LIGER_AGAIN,
    ),
    Argument(
        "disable_tqdm",
        kept=(None,), fixed=True, reason="progress is a bar on a terminal and plain lines elsewhere",
        left_out=_NO_EFFECT,
    ),
    Argument(
        "push_to_hub", kept=(False,), remedy=_PUBLISH, left_out=_NOT_PUBLISHED,
        script="checkpoints are not pushed while training. Call trainer.push_to_hub() afterwards",
    ),
    Argument("hub_revision", remedy=_PUBLISH),
    Argument(
        "hub_model_id hub_token hub_strategy hub_private_repo hub_always_push",
        remedy=_PUBLISH, left_out=_NOT_PUBLISHED,
    ),
    Argument("fsdp", kept=(None, "", [], False), remedy=_SHARD, script=_LAUNCHED, left_out=_ONE_GPU),
    Argument("deepspeed", kept=(None, ""), remedy=_SHARD, script=_LAUNCHED, left_out=_ONE_GPU),
    Argument("parallelism_config", kept=(None,), remedy=_SHARD, script=_LAUNCHED, left_out=_ONE_GPU),
    Argument("fsdp_config", remedy=_SHARD, left_out=_ONE_GPU),
    Argument("local_rank", reason="the launcher sets it", left_out="the launcher sets it"),
    Argument("ddp_backend", kept=(None,), reason="NCCL connects GPUs, and gloo connects CPUs"),
    Argument(
        "lr_scheduler_kwargs optim_args adam_beta1 adam_beta2 adam_epsilon optim_target_modules torch_compile"
        " torch_compile_backend torch_compile_mode use_cache torch_empty_cache_steps logging_first_step"
        " log_on_each_node include_num_input_tokens_seen project save_only_model"
        " restore_callback_states_from_checkpoint full_determinism dataloader_num_workers dataloader_pin_memory"
        " dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context"
        " dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers debug"
        " skip_memory_metrics router_aux_loss_coef neftune_noise_alpha run_name gradient_checkpointing_kwargs tf32"
        " use_cpu log_level_replica",
        passed=True,
    ),
    Argument(
        "activation_offloading",
        fixed=False, sets={True: ("training.gradient_checkpointing", "offload")}, kept=(False,),
        remedy="use training.gradient_checkpointing: offload",
    ),
    # SFTTrainer.
    Argument("tokenizer", TRAINER, now="processing_class"),
    Argument(
        "dataset_text_field max_seq_length max_length packing eval_packing dataset_num_proc dataset_kwargs"
        " neftune_noise_alpha model_init_kwargs",
        TRAINER,
        moved=True,
    ),
    Argument("dataset_batch_size num_of_sequences chars_per_token infinite", TRAINER, now="", left_out=_NO_EFFECT),
    Argument(
        "model args train_dataset eval_dataset processing_class peft_config callbacks formatting_func"
        " quantization_config data_collator optimizers optimizer_cls_and_kwargs",
        TRAINER,
    ),
    Argument("compute_metrics", TRAINER, kept=(None,), remedy=_SCORED, script=_LOGITS_METRICS, left_out=_METRICS),
    Argument(
        "preprocess_logits_for_metrics", TRAINER,
        kept=(None,), remedy=_SCORED, script="evaluation does not build logits. Remove it", left_out=_METRICS,
    ),
    Argument(
        "compute_loss_func", TRAINER,
        kept=(None,), script=f"{_EXACT}. Remove it, or train with trl.SFTTrainer", changes_loss=True,
    ),
    Argument("embedding_learning_rate", UNSLOTH, kept=(None,), reason=_ONE_RATE, script="Remove it"),
    Argument("loraplus_lr_ratio", UNSLOTH, kept=(None, 1, 1.0), reason=_ONE_RATE, script="Remove it"),
    Argument(
        "q_galore_config", UNSLOTH,
        kept=(None,), reason="this optimizer needs UnslothTrainer", script="Choose one by `optim`",
    ),
    Argument(
        "context_parallel_size", UNSLOTH,
        kept=(None, 1), reason="this trainer does not read it", remedy="use training.context_parallel",
        script="Use context_parallel of finetune.SFTConfig",
    ),
)  # fmt: skip

# Names of other tools: suggested in errors, not accepted. Each setting has one name.
FOREIGN = {
    name: key
    for key, names in {
        "data.assistant_only_loss": "train_on_inputs",
        "data.dataset_name": "dataset",
        "data.eval_fraction": "val_set_size",
        "data.max_length": "cutoff_len max_seq_len seq_length sequence_len",
        "data.packing": "sample_packing",
        "data.train": "weights",
        "data.train_file": "data_path dataset_path",
        "data.train_on_roles": "roles_to_train",
        "lora.lora_alpha": "alpha",
        "lora.r": "lora_r lora_rank rank",
        "lora.target_modules": "lora_target_modules",
        "model.dtype": "torch_dtype",
        "model.model_name_or_path": "base_model model_name",
        "training.learning_rate": "lr",
        "training.lr_scheduler_type": "lr_scheduler",
        "training.num_train_epochs": "epochs num_epochs",
        "training.optim": "optimizer",
        "training.per_device_train_batch_size": "batch_size micro_batch_size",
    }.items()
    for name in names.split()
}


@cache
def rows(of: str) -> dict[str, Argument]:
    """Name -> row, of one class."""
    return {name: row for row in ARGUMENTS if row.of == of for name in row.names.split()}


def row(name: str, of: str = CONFIG) -> Argument:
    """The row of a name; one without content if it has none."""
    return rows(of).get(name) or Argument(name, of)


@cache
def former_names(of: str = CONFIG) -> dict[str, str]:
    """Former name -> today's of the same values; "" if it has no effect today."""
    return {name: one.now for name, one in rows(of).items() if one.now is not None and not one.sets}


FIXED = {name: one.fixed for name, one in rows(CONFIG).items() if one.fixed is not UNSET}
# What a configuration does not set by this name, with why and what to do. Names of our keys are accepted as such.
_OWN = {name.partition(".")[2] for name in KEYS}
_ALL = [row for of in (UNSLOTH, TRAINER, CONFIG) for row in rows(of).items()]
REFUSED = {name: one.instead for name, one in _ALL if one.instead and name not in _OWN}
# Names that a configuration accepts under `training:` in addition to its keys, with some of their values or all.
TAKEN = frozenset(
    name
    for name, one in rows(CONFIG).items()
    if f"training.{name}" not in KEYS and (one.sets or one.excludes or one.kept or name == "chat_template_path")
)


# What a script can be given on its command line: our key -> the argument of SFTConfig that it sets; "" if the run or
# the adapter has it. What is not here the script decides in code.
SCRIPT_KEYS = {
    **{
        f"training.{name}": name
        for name in (
            "output_dir per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size"
            " num_train_epochs max_steps learning_rate lr_scheduler_type warmup_steps weight_decay optim max_grad_norm"
            " seed train_sampling_strategy gradient_checkpointing save_steps save_total_limit eval_steps"
            " load_best_model_at_end metric_for_best_model greater_is_better ddp_timeout"
        ).split()
    },
    **{
        f"data.{name}": name
        for name in "max_length packing dataset_text_field assistant_only_loss completion_only_loss".split()
    },
    "data.num_proc": "dataset_num_proc",
    "logging.logging_steps": "logging_steps",
    "logging.report_to": "report_to",
    **dict.fromkeys(
        "model.backend model.dtype model.tiled_mlp lora.r lora.lora_alpha lora.lora_dropout lora.target_modules"
        " lora.target_parameters lora.use_rslora training.global_batch_size training.resume_from_checkpoint"
        " training.resume_with_changes training.strategy training.context_parallel logging.profile_steps"
        " logging.include_rows logging.lines".split(),
        "",
    ),
}
_BY_SCRIPT = {
    "model": "the script loads the model. Change it there",
    "lora": "the script makes the adapter. Change it there",
    "data": "the script reads its rows. Change it there",
}


def why_not_in_script(key: str) -> str | None:
    """Why a script cannot be given this key of ours on its command line; None if it can."""
    section = key.partition(".")[0]
    if key in SCRIPT_KEYS or section == "training" and key not in KEYS:  # an argument of SFTConfig by its own name
        return None
    return _BY_SCRIPT.get(section, "only a run from a configuration has it")


def with_current_names(
    given: Mapping[str, Any], of: str = CONFIG, note: Callable[[str], None] = lambda text: None
) -> dict:
    """Arguments under the names that they have now. If both names are given, today's wins, unless it is unset, such as
    `warmup_steps=0` next to a `warmup_ratio`.

    Args:
        note: called with a sentence for each former name.
    """
    old = {name: one for name, one in rows(of).items() if one.now is not None and name in given}
    found = {name: value for name, value in given.items() if name not in old}
    for name, one in old.items():
        note(f"`{name}` is `{one.now}` now" if one.now else f"`{name}` is left out: {one.reason or one.left_out}")
        value = one.sets[bool(given[name])][1] if one.sets else given[name]
        if one.now and value is not None and found.get(one.now) in (None, 0):
            found[one.now] = value
    return found


def key_set_by(name: str, value: object) -> tuple[str, Any] | None:
    """The key and value of ours that a name with this value sets, or None if it sets none."""
    if name == "chat_template_path" and isinstance(value, str) and value.endswith((".jinja", ".jinja2")):
        return "model.chat_template", value  # a folder or Hub name would also bring a tokenizer
    if value is False and name.endswith("_strategy"):
        value = "no"  # YAML reads an unquoted no as false
    known = row(name).sets
    if ANY in known:
        return known[ANY][0], value
    return known.get(value) if _is_plain(value) else None


def key_excluded_by(name: str, value: object) -> tuple[str, Any] | None:
    """The key of ours, and the value of it, that contradicts a name with this value; None if there is none."""
    return row(name).excludes.get(value) if _is_plain(value) else None


def values(name: str) -> list[Any] | None:
    """The accepted values of a name in `TAKEN`, for an editor; None for any value."""
    one = row(name)
    if name == "chat_template_path" or ANY in one.sets:
        return None
    found = [*one.kept, *one.sets, *one.excludes]
    return found + ([False] if "no" in found else [])  # YAML 1.1 reads an unquoted no as false


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bool)
