"""Names of SFTConfig that mean the same as one of our keys: taken over, if their value can be kept exactly.

Every other value of these names, and every name that is not here, keeps its refusal (`sft_fields.MANAGED`).
"""

from typing import Any

# Values that describe what happens in every run: accepted, and nothing is set.
AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "average_tokens_across_devices": (True,),
    "bf16_full_eval": (False,),
    "disable_tqdm": (None,),
    "do_train": (True,),
    "eval_on_start": (True,),
    "fp16_full_eval": (False,),
    "label_smoothing_factor": (0, 0.0),
    "liger_kernel_config": (None, {}),
    "logging_nan_inf_filter": (False,),
    "logging_strategy": ("steps",),
    "loss_type": ("nll",),
    "packing_strategy": ("bfd",),
    "push_to_hub": (False,),
}

# Name -> value -> our key and its value. `ANY` stands for every value.
ANY = object()
SAME_AS: dict[str, dict[Any, tuple[str, Any]]] = {
    "activation_checkpointing": {
        True: ("training.gradient_checkpointing", True),
        False: ("training.gradient_checkpointing", False),
    },
    "bf16": {True: ("model.dtype", "bfloat16")},
    "fp16": {True: ("model.dtype", "float16")},
    "dataset_num_proc": {ANY: ("data.num_proc", ANY)},
    "dataset_text_field": {ANY: ("data.dataset_text_field", ANY)},
    "eval_strategy": {"no": ("training.eval_steps", 0)},
    "group_by_length": {
        True: ("training.train_sampling_strategy", "group_by_length"),
        False: ("training.train_sampling_strategy", "random"),
    },
    "report_to": {ANY: ("logging.report_to", ANY)},
    "save_strategy": {"no": ("training.save_steps", 0)},
    "truncation_mode": {"keep_start": ("data.over_length", "truncate")},
    "use_liger_kernel": {True: ("model.layer_kernels", "liger"), False: ("model.layer_kernels", "torch")},
}

# Values that only exclude one of ours, and otherwise change nothing: name -> value -> (our key, the value it excludes).
EXCLUDES: dict[str, dict[Any, tuple[str, Any]]] = {
    "bf16": {False: ("model.dtype", "bfloat16")},
    "fp16": {False: ("model.dtype", "float16")},
    "eval_strategy": {"steps": ("training.eval_steps", 0)},
    "save_strategy": {"steps": ("training.save_steps", 0)},
}

TAKEN = frozenset({*AS_IT_IS, *SAME_AS, *EXCLUDES, "chat_template_path"})


def same_as(name: str, value: Any) -> tuple[str, Any] | None:
    """The key and value of ours that a name with this value sets, or None if it sets none."""
    if name == "chat_template_path" and isinstance(value, str) and value.endswith((".jinja", ".jinja2")):
        return "model.chat_template", value  # a folder or Hub name would also bring a tokenizer
    if value is False and name.endswith("_strategy"):
        value = "no"  # YAML reads an unquoted no as false
    known = SAME_AS.get(name, {})
    if ANY in known:
        return known[ANY][0], value
    return known.get(value) if _is_plain(value) else None


def excluded(name: str, value: Any) -> tuple[str, Any] | None:
    """The key of ours, and the value of it, that contradicts a name with this value; None if there is none."""
    return EXCLUDES.get(name, {}).get(value) if _is_plain(value) else None


def is_as_it_is(name: str, value: Any) -> bool:
    """Whether a name with this value describes what happens in every run."""
    return any(type(value) is type(kept) and value == kept for kept in AS_IT_IS.get(name, ()))


def values(name: str) -> list[Any] | None:
    """The accepted values of a name in `TAKEN`, for an editor; None for any value."""
    if name == "chat_template_path" or ANY in SAME_AS.get(name, {}):
        return None
    found = [*AS_IT_IS.get(name, ()), *SAME_AS.get(name, {}), *EXCLUDES.get(name, {})]
    return found + ([False] if "no" in found else [])  # YAML 1.1 reads an unquoted no as false


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool)
