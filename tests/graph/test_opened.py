"""Operators that hold several matmuls are opened: the linears of torch.nn's attention are int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qfx
from qfx.graph.decomposition import open_operators
from qfx.ops.single_tensors import sqnr
from tests.dynamo_backend.test_backend import _int8_calls
from tests.lib.models import compiled

E, HEADS = 16, 2


class Attends(nn.Module):
    """A layer of torch.nn, called as its kind wants to be."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, y, y, need_weights=self.layer.add_zero_attn)[0]
        return (
            self.layer(x)
            if isinstance(self.layer, nn.TransformerEncoderLayer)
            else self.layer(x, y)
        )


class SelfAttends(Attends):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.layer(x, x, x)


class Masked(Attends):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x, x, attn_mask=mask, is_causal=True)[0]


def _layer(kind: Any, **options: Any) -> Any:
    options = {"batch_first": True, "dropout": 0.0, **options}
    feed = {} if kind is nn.MultiheadAttention else {"dim_feedforward": 32}
    return lambda: kind(E, HEADS, **feed, **options)


# name -> (wrapper, layer, matmuls with a weight)
LAYERS: dict[str, tuple[type[Attends], Callable[[], nn.Module], int]] = {
    "cross": (Attends, _layer(nn.MultiheadAttention), 4 - 1),  # k and v in one
    "self": (SelfAttends, _layer(nn.MultiheadAttention), 2),
    "masked": (Masked, _layer(nn.MultiheadAttention), 2),
    "own_widths": (Attends, _layer(nn.MultiheadAttention, kdim=E, vdim=E, bias=False), 3),
    "add_bias_kv": (SelfAttends, _layer(nn.MultiheadAttention, add_bias_kv=True), 2),
    "encoder": (Attends, _layer(nn.TransformerEncoderLayer), 4),
    "encoder_gelu": (Attends, _layer(nn.TransformerEncoderLayer, activation="gelu"), 4),
    "encoder_norm_first": (Attends, _layer(nn.TransformerEncoderLayer, norm_first=True), 4),
    "decoder": (Attends, _layer(nn.TransformerDecoderLayer), 4 + 3),
}
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, 5, E, generator=G), torch.randn(2, 7, E, generator=G)


def _model(name: str, train: bool) -> nn.Module:
    torch.manual_seed(0)
    wrapper, layer, _ = LAYERS[name]
    return wrapper(layer()).train(train)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", LAYERS)
def test_inference(name: str) -> None:
    model = _model(name, train=False)
    report = qfx.explain(model, X, Y, options={"minimum_gain": 0})
    assert report.quantized == LAYERS[name][2], report
    assert all(
        "attention" in r.reason or "activations" in r.reason
        for r in report.rows
        if r.scheme == "float"
    )
    with torch.no_grad():
        assert 25 < sqnr(_first(model(X, Y)), _first(compiled(model)(X, Y))) < 70


@pytest.mark.parametrize("name", LAYERS)
def test_training(name: str) -> None:
    model = _model(name, train=True)
    found = []
    for f in (model, compiled(model, inner="aot_eager")):
        model.zero_grad()
        _first(f(X, Y)).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 25 < sqnr(*found) < 80


def test_dropout_inside_attention_trains() -> None:
    model = SelfAttends(nn.MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True))
    f = compiled(model, inner="aot_eager")
    first, second = (_first(f(X, Y)) for _ in range(2))
    assert not torch.equal(first, second) and first.isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_symbolic_sizes(name: str) -> None:
    """One graph for all batches and lengths."""
    model = _model(name, train=False)
    f = compiled(model, fullgraph=True, dynamic=True)
    counters.clear()
    with torch.no_grad():
        for batch, queries, keys in ((2, 5, 7), (3, 9, 4)):
            x, y = torch.randn(batch, queries, E), torch.randn(batch, keys, E)
            expected, found = _first(model(x, y)), _first(f(x, y))
            assert 25 < sqnr(expected, found) < 70
            assert _int8_calls(f, x, y) == LAYERS[name][2]
    assert counters["stats"]["unique_graphs"] == 1


def test_symbolic_sizes_train() -> None:
    model = _model("self", train=True)
    found = []
    for f in (model, compiled(model, inner="aot_eager", dynamic=True)):
        model.zero_grad()
        _first(f(X, Y)).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 25 < sqnr(*found) < 80


def test_a_padding_mask_leaves_the_fast_path_closed() -> None:
    layer = _layer(nn.TransformerEncoderLayer)().eval()
    run = lambda x, mask: layer(x, src_key_padding_mask=mask)  # noqa: E731
    mask = torch.arange(5) >= torch.tensor([[5], [3]])  # the last two of the second are no tokens
    x = torch.where(mask[..., None], 10.0, X)  # who attends to them sees it
    with torch.no_grad():
        options = {"minimum_gain": 0, "inner": "eager"}
        got = torch.compile(run, backend=qfx.backend, options=options)(x, mask)
        assert sqnr(run(x, mask)[~mask], got[~mask]) > 25


def test_a_graph_that_holds_nothing_closed_is_left_alone() -> None:
    """Calibration opens its graphs again with every batch: their code is made once."""
    gm = qfx.trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    code = type(gm).forward
    assert type(open_operators(gm)).forward is code
