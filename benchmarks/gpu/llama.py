"""Compiled models: one of Llama's shape for prefill, decoding in a CUDA graph and training; and one
linear for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.session import Row, Session

HIDDEN, INNER, HEADS, LAYERS = 4096, 14336, 32, 4
PREFILL, CONTEXT = (4, 2048), 2048
MUST = {"prefill": 1.15, "decode": 1.25, "training": 1.15, "linear, both ways": 1.15}
Ways = dict[str, dict[str, Any] | None]
_DEFAULT: Ways = {"bf16": None, "qfx": {}}
_ASYMMETRIC = {"scheme": "w8a8-asymmetric", "minimum_gain": 0}
_CODES: Ways = {**_DEFAULT, "qfx w8a8-asymmetric": _ASYMMETRIC}
_TRAINED: Ways = {**_CODES, "int8 backward": {**_ASYMMETRIC, "backward": "int8"}}
WAYS: dict[str, Ways] = {
    "prefill": {**_CODES, "qfx w8a8": {"scheme": "w8a8", "minimum_gain": 0}},
    "decode": {**_DEFAULT, "qfx w8": {"scheme": "w8", "minimum_gain": 0}},
    "training": _TRAINED,
    "linear, both ways": _TRAINED,
}


class Layer(nn.Module):
    """A layer of Llama without its rotary embedding; queries, keys and values share one input.
    `keys` and `values` are buffers, so that a CUDA graph may write to them."""

    keys: Tensor
    values: Tensor

    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, decodes: bool) -> Tensor:
        """Runs the layer on x [B, T, hidden]. `decodes`: T is 1, and x is the last token of a full
        cache."""
        read = self.norms[0](x)
        q, k, v = (self._split(linear(read)) for linear in (self.q, self.k, self.v))
        if decodes:
            self.keys[:, :, -1:], self.values[:, :, -1:] = k, v
            k, v = self.keys, self.values
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=not decodes)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        read = self.norms[1](x)
        return x + self.down(F.silu(self.gate(read)) * self.up(read))

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Llama(nn.Module):
    def __init__(self, layers: int, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(layers))

    def forward(self, x: Tensor, decodes: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, decodes)
        return x


def llama(session: Session) -> Iterator[Row]:
    """Yields the rows of prefill, decoding and training: bfloat16 first, then the ways of qfx."""
    hidden, heads = session.size(HIDDEN), 4 if session.dry else HEADS
    with session.device:
        layers = 1 if session.dry else LAYERS
        model = Llama(layers, hidden, session.size(INNER), heads).bfloat16()
    x = session.random(*((2, 16) if session.dry else PREFILL), hidden)

    def decode(batch: int) -> Iterator[Row]:
        shape = (batch, heads, session.size(CONTEXT), hidden // heads)
        for layer in model.layers:
            layer.register_buffer("keys", session.random(*shape))
            layer.register_buffer("values", session.random(*shape))
        one = session.random(batch, 1, hidden)
        return _compared(session, "decode", model, (one, True), mode="reduce-overhead")

    yield from _compared(session, "prefill", model, (x,))
    yield from decode(1)
    yield from _compared(session, "training", model, (x,))  # or decoding would take all the time
    yield from decode(16)


def linear_both_ways(session: Session) -> Iterator[Row]:
    """Measures forward and backward of one linear, with the gradients of its input and its
    weight."""
    size = session.size(HIDDEN)
    linear = nn.Linear(size, size, bias=False, device=session.device, dtype=torch.bfloat16)
    x = session.random(session.size(8192), size).requires_grad_()
    return _compared(session, "linear, both ways", linear, (x,))


def _compared(
    session: Session, what: str, model: nn.Module, inputs: tuple[Any, ...], mode: str | None = None
) -> Iterator[Row]:
    baseline: float | None = None
    expected: Tensor | None = None
    for name, options in WAYS[what].items():
        run = _compiled(session, model, options, mode)
        step, result = _step(run, model, inputs, WAYS[what] is _TRAINED)
        took = session.wall_seconds(step)
        baseline, expected = baseline or took, result if expected is None else expected
        noise = (result.float() - expected.float()).norm() / expected.float().norm()
        row = {"what": what, "shape": list(inputs[0].shape), "way": name, "ms": took * 1e3}
        yield {**row, "ratio": baseline / took, "must": MUST[what], "relative_error": float(noise)}


def _compiled(
    session: Session, model: nn.Module, options: dict[str, Any] | None, mode: str | None
) -> Callable[..., Tensor]:
    """Compiles for bfloat16 (no options) or by qfx, both with the options of the mode."""
    torch._dynamo.reset()
    inner = "aot_eager" if session.dry else "inductor"
    graphs = torch._inductor.list_mode_options(mode) if mode and not session.dry else {}
    how: dict[str, Any] = {"backend": inner, **({"options": graphs} if graphs else {})}
    if options is not None:
        how = {"backend": "qfx", "options": {**options, **graphs, "inner": inner}}
    return torch.compile(model, dynamic=False, **how)  # type: ignore[no-any-return]


def _step(
    run: Callable[..., Tensor], model: nn.Module, inputs: tuple[Any, ...], trains: bool
) -> tuple[Callable[[], object], Tensor]:
    """Returns the function to time, and its first result."""
    if not trains:
        with torch.no_grad():
            result = run(*inputs).clone()
        return torch.no_grad()(lambda: run(*inputs)), result
    first = run(*inputs).detach()
    gradient = torch.randn_like(first)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(run(*inputs), gradient)

    return step, first
