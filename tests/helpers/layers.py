"""A causal language model of plain torch layers, to shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    """Two layers, an embedding and a head."""

    _no_split_modules: Any = ("Layer",)

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return 2 * self.head(x)  # FSDP2 warns of outputs that are views

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head
