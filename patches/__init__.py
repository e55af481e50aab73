"""Patches for defects of the installed libraries, one file each, listed in the order in which they run.

FIRST patches run before transformers is imported, EARLY ones before `import unsloth`, LATE ones after it, those of
EVERY on both backends, those of OPTIMIZERS in runs with that `training.optim`, MASKED ones where rows attend through a
mask on a GPU. A patch is applied only if its probe finds the defect.
"""

from patches import (
    peft_moe_layer_targets,
    torch_cudnn_attention_nan,
    torch_varlen_gqa,
    torchao_state_dtype,
    transformers_grouped_mm_width,
    transformers_slow_import,
    unsloth_all_trl_trainers,
    unsloth_embeddings_on_disk,
    unsloth_full_checkpointing,
    unsloth_fused_loss_backward,
    unsloth_fused_loss_view,
    unsloth_fused_loss_waits,
    unsloth_merged_export_ranks,
    unsloth_packed_fused_loss,
    unsloth_packed_probe_in_checkpoint,
    unsloth_rope_gradient_layout,
)

FIRST = (transformers_slow_import,)
EARLY = (torch_varlen_gqa, unsloth_all_trl_trainers)
LATE = (
    unsloth_fused_loss_view,
    unsloth_fused_loss_backward,
    unsloth_merged_export_ranks,
    unsloth_embeddings_on_disk,
    unsloth_full_checkpointing,
    unsloth_packed_fused_loss,
    unsloth_fused_loss_waits,
    unsloth_packed_probe_in_checkpoint,
    unsloth_rope_gradient_layout,
)
EVERY = (peft_moe_layer_targets, transformers_grouped_mm_width)
MASKED = (torch_cudnn_attention_nan,)
OPTIMIZERS = {"adamw_torch_8bit": (torchao_state_dtype,)}
ALL = (*FIRST, *EARLY, *LATE, *EVERY, *(patch for each in OPTIMIZERS.values() for patch in each), *MASKED)
