"""Compiled models: one of Llama's shape for prefill, decoding in a CUDA graph and training; and one
linear for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.clock import wall_seconds
from benchmarks.gpu.session import Row, Session

HIDDEN, INNER, HEADS, LAYERS = 4096, 14336, 32, 4
PREFILL, CONTEXT, DECODES = (4, 2048), 2048, (1, 16)
MUST = {"prefill": 1.15, "decode": 1.25, "training": 1.15, "linear, both ways": 1.15}
Ways = dict[str, dict[str, Any] | None]
_DEFAULT: Ways = {"bf16": None, "qfx": {}}
_CODES: Ways = {
    **_DEFAULT,
    "qfx w8a8-asymmetric": {"scheme": "w8a8-asymmetric", "minimum_gain": 0},
}
_TRAINED: Ways = {
    **_CODES,
    "int8 backward": {"scheme": "w8a8-asymmetric", "backward": "int8", "minimum_gain": 0},
}
WAYS: dict[str, Ways] = {
    "prefill": {**_CODES, "qfx w8a8": {"scheme": "w8a8", "minimum_gain": 0}},
    "decode": {**_DEFAULT, "qfx w8": {"scheme": "w8", "minimum_gain": 0}},
    "training": _TRAINED,
    "linear, both ways": _TRAINED,
}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    heads: int


class Layer(nn.Module):
    """A layer of Llama without its rotary embedding; queries, keys and values share one input."""

    keys: Tensor
    values: Tensor

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.norms = nn.ModuleList(nn.RMSNorm(s.hidden) for _ in range(2))
        self.q, self.k, self.v, self.o = (
            nn.Linear(s.hidden, s.hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(s.hidden, s.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(s.inner, s.hidden, bias=False)

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

    def remember(self, keys: Tensor, values: Tensor) -> None:
        """Sets the cache: buffers, so that its address is fixed and a CUDA graph may write to
        it."""
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))

    def forward(self, x: Tensor, decodes: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, decodes)
        return x

    def remember(self, session: Session, batch: int, sizes: Sizes) -> None:
        """Sets a random cache of [batch, heads, CONTEXT, hidden / heads] for each layer."""
        shape = (batch, sizes.heads, session.size(CONTEXT), sizes.hidden // sizes.heads)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.remember(session.random(*shape), session.random(*shape))


def llama(session: Session) -> Iterator[Row]:
    """Yields the rows of prefill, decoding and training: bfloat16 first, then the ways of qfx."""
    sizes = Sizes(session.size(HIDDEN), session.size(INNER), 4 if session.dry else HEADS)
    with session.device:
        model = Llama(sizes, 1 if session.dry else LAYERS).bfloat16()
    batch, tokens = (2, 16) if session.dry else PREFILL
    x = session.random(batch, tokens, sizes.hidden)
    yield from _compared(session, "prefill", model, (x,))
    first, *others = DECODES
    for count in (first, None, *others):  # training between: decoding alone would take all the time
        if count is None:
            yield from _compared(session, "training", model, (x,))
            continue
        model.remember(session, count, sizes)
        one = session.random(count, 1, sizes.hidden)
        yield from _compared(session, "decode", model, (one, True), mode="reduce-overhead")


def linear_both_ways(session: Session) -> Iterator[Row]:
    """Measures forward and backward of one linear, with the gradients of its input and its
    weight."""
    sizes = session.size(HIDDEN), session.size(HIDDEN)
    linear = nn.Linear(*sizes, bias=False, device=session.device, dtype=torch.bfloat16)
    x = session.random(session.size(8192), sizes[0]).requires_grad_()
    return _compared(session, "linear, both ways", linear, (x,))


def _compared(
    session: Session, what: str, model: nn.Module, inputs: tuple[Any, ...], mode: str | None = None
) -> Iterator[Row]:
    baseline: float | None = None
    expected: Tensor | None = None
    for name, options in WAYS[what].items():
        run = _compiled(session, model, options, mode)
        step, result = _step(run, model, inputs, WAYS[what] is _TRAINED)
        took = wall_seconds(step, session.device, 2 if session.dry else 9)
        baseline, expected = baseline or took, result if expected is None else expected
        noise = (result.float() - expected.float()).norm() / expected.float().norm()
        row = {"what": what, "shape": list(inputs[0].shape), "way": name, "ms": took * 1e3}
        yield {**row, "ratio": baseline / took, "must": MUST[what], "relative_error": float(noise)}


def _compiled(
    session: Session, model: nn.Module, options: dict[str, Any] | None, mode: str | None
) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "inductor" if options is None else "qfx", "mode": mode}
    if session.dry:
        how = {"backend": "aot_eager" if options is None else "qfx"}
        options = options and {**options, "inner": "aot_eager"}
    if options is not None:
        how["options"] = {**options, **(_graphs(how.pop("mode", None)))}
    return torch.compile(model, dynamic=False, **how)  # type: ignore[no-any-return]


def _graphs(mode: str | None) -> dict[str, Any]:
    """Returns the options of a mode: torch.compile takes a mode or options, not both."""
    return torch._inductor.list_mode_options(mode) if mode else {}


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
