"""What `trl.SFTTrainer` lacks on a CPU, so that it can be the reference there. Ours gets no such help."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def give_kernel() -> None:
    """The default loss of newer TRL is a Triton kernel, which no CPU runs: put plain PyTorch in its place."""
    from trl.trainer import utils

    if hasattr(utils, "_ChunkedLogProbFunction") and not torch.cuda.is_available():
        utils._ChunkedLogProbFunction = LogProbabilities  # type: ignore[assignment]


class LogProbabilities:
    """In place of TRL's `ChunkedLogProbFunction`: the same values per token, in plain PyTorch."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [tokens, dimensions]
        weight: Tensor,  # [vocabulary, dimensions]
        bias: Tensor | None,
        targets: Tensor,  # [tokens]
        temperature: float,
        _chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        logits = linear(hidden, weight, bias).float() * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits / temperature
        logs = logits.log_softmax(-1)
        further = {
            "entropy": -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": (2 * logs).logsumexp(-1).detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        chosen = logs.gather(-1, targets[:, None]).squeeze(-1)
        return chosen, *(value if name in outputs else None for name, value in further.items())
