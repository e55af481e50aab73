"""The fields of TRL's SFTConfig, read from its source: importing it would import torch, which takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from finetune.errors import UserError

# Package, file and class, from the base to SFTConfig: a later class overrides an earlier one.
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/sft_config.py", "SFTConfig"),
)
# Names that mean the same in those files as here. An annotation with any other name accepts every value: SFTConfig
# itself then checks it.
_NAMES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "Any": Any}
_NAMES |= {"Literal": Literal}

# Keys of ours and the enum behind each: SFTConfig refuses any value that is not in it.
CHOICES = {
    "optim": ("training_args.py", "OptimizerNames"),
    "lr_scheduler_type": ("trainer_utils.py", "SchedulerType"),
}

# SFTConfig fields (and former ones) that this project decides, with what to do instead. A field that has the same name
# in one of our sections needs no entry: the error names that section.
_MANAGED: tuple[tuple[str, str], ...] = (
    ("extra", "give each SFTConfig field under `training:` by its own name"),
    ("model_init_kwargs", "use the keys of `model:`"),
    ("chat_template_path", "use model.chat_template"),
    ("bf16 fp16 bf16_full_eval fp16_full_eval", "use model.dtype"),
    ("eos_token pad_token", "it comes from the tokenizer and model.chat_template"),
    ("dataset_num_proc", "use data.num_proc"),
    ("activation_checkpointing", "use training.gradient_checkpointing"),
    ("truncation_mode", "use data.over_length"),
    ("packing_strategy padding_free eval_packing pad_to_multiple_of", "use data.packing and data.pack_length"),
    (
        "dataset_kwargs skip_prepare_dataset remove_unused_columns label_names",
        "data is prepared once, and the keys of `data:` control how",
    ),
    (
        "length_column_name shuffle_dataset data_seed dataloader_drop_last accelerator_config ignore_data_skip",
        "training.seed alone sets the order of the data, so that any number of GPUs takes the same steps",
    ),
    ("group_by_length", "use training.train_sampling_strategy: group_by_length"),
    (
        "average_tokens_across_devices auto_find_batch_size",
        "the loss is the mean over the supervised tokens of training.global_batch_size rows, on any number of GPUs",
    ),
    (
        "eval_strategy eval_on_start eval_delay do_eval",
        "use training.eval_steps; evaluation before and after training is always on",
    ),
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps"
        " include_for_metrics batch_eval_metrics",
        "evaluation averages the loss over all supervised tokens",
    ),
    (
        "loss_type label_smoothing_factor",
        "the loss is the mean token loss, exact on any number of GPUs; other objectives are not supported",
    ),
    ("ddp_static_graph", "it breaks gradient accumulation in DDP"),
    ("do_train do_predict", "this command always trains"),
    ("save_strategy save_on_each_node", "use training.save_steps; one rank writes"),
    ("enable_jit_checkpoint", "Ctrl-C and SIGTERM always save a checkpoint"),
    ("logging_strategy", "use logging.logging_steps"),
    ("logging_nan_inf_filter", "a loss that is not finite is always logged"),
    ("logging_dir", "TensorBoard's files are in runs/ under training.output_dir"),
    (
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        "Trackio writes to this machine; publish a project with `trackio sync`",
    ),
    ("use_liger_kernel liger_kernel_config", "use model.layer_kernels"),
    ("disable_tqdm", "progress is a bar on a terminal and plain lines elsewhere"),
    (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "publish a finished run with `finetune export RUN --to hub --repo USER/NAME --upload`",
    ),
    (
        "deepspeed fsdp fsdp_config parallelism_config",
        "use training.strategy: shard to split the model over the GPUs",
    ),
    ("local_rank", "the launcher sets it"),
)
MANAGED = {name: reason for names, reason in _MANAGED for name in names.split()}


@cache
def sft_fields() -> dict[str, Any]:
    """Name -> annotation of every SFTConfig field, `typing.Any` if the annotation is not a simple one.

    Raises UserError if trl or transformers is not installed, or lacks these classes.
    """
    found: dict[str, Any] = {}
    for package, file, name in _CLASSES:
        for statement in _class_body(package, file, name):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = _annotation(statement.annotation)
    return found


PARAMETERS_OF = ("SFTTrainer", "SFTConfig", "TrainingArguments")


@cache
def parameters(name: str) -> frozenset[str]:
    """The arguments that one of the classes in PARAMETERS_OF takes in the installed release."""
    if name == "SFTTrainer":
        body = _class_body("trl", "trainer/sft_trainer.py", name)
        init = next(one for one in body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
        return frozenset(one.arg for one in [*init.args.args, *init.args.kwonlyargs])
    classes = _CLASSES if name == "SFTConfig" else _CLASSES[:1]
    bodies = [_class_body(*one) for one in classes]
    fields = [one.target for body in bodies for one in body if isinstance(one, ast.AnnAssign)]
    return frozenset(one.id for one in fields if isinstance(one, ast.Name))


@cache
def choices(name: str) -> tuple[str, ...]:
    """The values that SFTConfig allows for one of the names in CHOICES."""
    body = _class_body("transformers", *CHOICES[name])
    values = (item.value for item in body if isinstance(item, ast.Assign))
    return tuple(value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def _class_body(package: str, file: str, name: str) -> list[ast.stmt]:
    spec = find_spec(package)  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed. Install this project with its dependencies: pip install -e .")
    path = Path(spec.origin).parent / file
    if path.is_file():
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return statement.body
    raise UserError(f"the installed {package} has no class {name} in {path}. Install the version in constraints.txt.")


def _annotation(node: ast.expr) -> Any:
    try:
        # Nothing is trusted here that is not trusted anyway: the same file is imported when training starts.
        return eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)
    except (NameError, TypeError):
        return Any
