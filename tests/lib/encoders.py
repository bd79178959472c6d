"""Small encoders that programs run whole: one whose tokens mix by a linear over positions, and BERT
of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import qfx
from qfx.programs import Runner, build


class Mixer(nn.Module):
    """Tokens int64 [B, T] -> float32 [B, D], and the features [B, T, D]."""

    def __init__(self, vocabulary: int, tokens: int, features: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2 * layers))
        self.mixing = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(features, 4 * features) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * features, features) for _ in range(layers))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        for i, (mixing, up, down) in enumerate(zip(self.mixing, self.up, self.down, strict=True)):
            x = x + mixing(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + down(nn.functional.gelu(up(self.norms[2 * i + 1](x))))
        return x.mean(-1), x


def bert(batch: int = 2, tokens: int = 24) -> tuple[Runner, Tensor]:
    """The program of a small BERT, and token ids for it."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=64, return_dict=False,
    )  # fmt: skip
    return _program(BertModel(config).eval(), torch.randint(0, 100, (batch, tokens)))


def encoder(batch: int = 2, tokens: int = 64, features: int = 128) -> tuple[Runner, Tensor]:
    """The program of a small encoder, and token ids for it."""
    torch.manual_seed(0)
    model = Mixer(100, tokens, features, 2).eval()
    return _program(model, torch.randint(0, 100, (batch, tokens)))


def _program(model: nn.Module, ids: Tensor) -> tuple[Runner, Tensor]:
    with torch.no_grad():
        gm, _ = qfx.rewrite(torch.export.export(model, (ids,)), qfx.Config(minimum_gain=0))
        return build(gm, [ids]), ids
