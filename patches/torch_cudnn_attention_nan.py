"""The backward pass of cuDNN's attention returns NaN for queries, with a mask and certain row lengths.

On Hopper GPUs, torch 2.11 and later use cuDNN for `scaled_dot_product_attention` with a mask, as padded rows have.
Where the length is 64 above a multiple of 128, its backward pass takes the missing half of the last tile of keys as
scores of 0 instead of minus infinity: if a query's logarithmic sum of scores is below -88.7, exp overflows to infinity,
and infinity times 0 is NaN. Attention heads of Qwen2.5 have such scores. Packs do not use this function on GPUs.
Without this: after some steps of padded rows, all gradients and then all weights are NaN, and the loss is 0.
"""

UPSTREAM = "https://github.com/pytorch/pytorch/issues/196678"
REMOVE_WHEN = None  # when the oldest torch that this project supports has a cuDNN with the repair

DEVICE = "cuda"


def needed() -> bool:
    """Whether the gradient of 64 queries with scores of -120, with a causal mask, is not finite on this GPU."""
    import torch

    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    length = size = 64
    query, key, value = (torch.zeros(1, 1, length, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    query[..., 0], key[..., 0] = 1.0, -120.0 * size**0.5
    value += torch.linspace(-1, 1, length, device=DEVICE)[:, None]
    query.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()[None, None]
    with torch.enable_grad():
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        (gradient,) = torch.autograd.grad(output, query, torch.ones_like(output))
    return not bool(gradient.isfinite().all())


def apply() -> None:
    """Let `scaled_dot_product_attention` use its other kernels: with a mask, the memory-efficient one."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
