"""Calls of qfx's own matmul operators by the model itself, through the modules and functions of
`qfx.nn` or directly. There is nothing to decide about them; plans and reports list them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qfx.graph.capture import SCHEME, value
from qfx.graph.views import View
from qfx.host.operators import schema
from qfx.match.base import FLOAT, Match, Size
from qfx.ops.attention import rotation_of_heads
from qfx.ops.code import Code
from qfx.ops.layout import Layout, each_layout
from qfx.values.scheme import PER_ROW, PER_TENSOR, QSpec, Scheme

Sizes = tuple[Size | None, Size | None, Size | None, Size | None]  # batch, M, K, N
Arguments = Mapping[str, Any]
BINARY = "binary"
_KINDS = {FLOAT: "a float", BINARY: "a 1-bit"}


@dataclass(frozen=True, kw_only=True)
class OwnCall(Match):
    """A call of one of qfx's matmul operators by the model itself. `token`: the scheme as far as
    the call determines it, or `binary`, or `float`. The bits of codes that are computed elsewhere
    are unknown and count as 8."""

    operand: fx.Node | None  # the left operand, unless it is codes
    stored: int | None = None  # bytes of the packed weight

    @property
    def left(self) -> tuple[fx.Node, View] | None:
        return None if self.operand is None else (self.operand, ())

    def closed(self, reason: str) -> OwnCall:
        return self

    @property
    def reason(self) -> str:
        return f"{_KINDS.get(self.token, 'an int8')} operator of the model itself"


def own_call(node: fx.Node, path: str) -> OwnCall | None:
    """Returns the match of a call of qfx's own matmul operators, or None for any other node."""
    row = _ROWS.get(node.target) if node.op == "call_function" else None
    if row is None:
        return None
    arguments = _named(node)
    left = row.left(arguments)
    seen = _seen(left)
    batch, m, k, n = row.sizes(seen, _seen(node), arguments)
    token = str(node.meta.get(SCHEME) or row.token(arguments))
    codes = seen is None or not seen.is_floating_point()
    gemm = row.gemm and all(layout.one_scale for layout in _layouts(arguments))
    return OwnCall(
        node=node, path=path, token=token, gemm=gemm, operand=None if codes else left,
        stored=_stored(arguments),
        batch=batch, m=m, k=k, n=n,
    )  # fmt: skip


class _Says(NamedTuple):
    """The meaning of the calls of one operator. `left`, `sizes` and `token` return the left
    operand, the sizes and the scheme of a call. `gemm`: whether a call is a matmul of int8
    matrices, provided that the weight has one scale per row."""

    left: Callable[[Arguments], Any]
    sizes: Callable[[Tensor | None, Tensor | None, Arguments], Sizes]
    token: Callable[[Arguments], str]
    gemm: bool = True


def _by_target(**rows: Any) -> dict[Any, Any]:
    """Returns `rows`, which are given by the name of an operator, by the operator itself: as an
    OpOverloadPacket and as an OpOverload, since graphs contain both."""
    packets = {name: getattr(torch.ops.qfx, name) for name in rows}
    return {t: rows[name] for name, packet in packets.items() for t in (packet, packet.default)}


def _seen(node: Any) -> Tensor | None:
    found = value(node) if isinstance(node, fx.Node) else None
    first = found[0] if isinstance(found, list | tuple) and found else found
    return first if isinstance(first, Tensor) else None


def _stored(a: Arguments) -> int | None:
    """Returns the bytes of the packed weights, or None if the call has none or they are unknown."""
    given = a.get("weight", a.get("packed"))
    weights = [_seen(each) for each in (given if isinstance(given, list | tuple) else [given])]
    known = [weight.numel() * weight.element_size() for weight in weights if weight is not None]
    return sum(known) if len(known) == len(weights) else None


# --- sizes ---

_UNKNOWN: Sizes = (None, None, None, None)


def _linear(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    if x is None or y is None:
        return _UNKNOWN
    return None, math.prod(x.shape[:-1]), x.shape[-1], y.shape[-1]


def _several(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    """Returns the sizes of `linears` as those of one matmul with the rows of all weights."""
    rows = [layout.n for layout in _layouts(a)]
    if x is None or not all(isinstance(n, int) for n in rows):
        return _UNKNOWN
    return None, math.prod(x.shape[:-1]), x.shape[-1], sum(rows)


def _experts(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    """Returns the sizes of `experts` as those of one matmul of all slots with as many
    multiply-adds."""
    slots, (up, down) = _seen(a["expert"]), (a["up_layout"][0], a["down_layout"][0])
    if x is None or slots is None or not isinstance(up, int) or not isinstance(down, int):
        return _UNKNOWN
    k, inner = x.shape[-1], up if a["gate"] == "none" else up // 2
    return None, math.prod(slots.shape), k, up + down * inner // max(k, 1)


def _conv(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    """Returns the sizes of a convolution as those of a matmul of its windows, with the outputs of
    all groups of channels."""
    weight = _seen(a["weight"])
    if x is None or y is None or weight is None:
        return _UNKNOWN
    groups = weight.shape[0] if weight.ndim == 2 else 1
    k = math.prod(a["kernel"]) * x.shape[1] // groups
    return None, math.prod(y.shape[:-1]), k, y.shape[-1]


def _depthwise(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    if y is None:
        return _UNKNOWN
    return None, math.prod(y.shape[:-1]), math.prod(a["kernel"]), y.shape[-1]


def _recurrent(h: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    """Returns the sizes of the product at each step, as often as there are steps."""
    x, (layout,) = _seen(a["x"]), _layouts(a)
    if x is None or h is None:
        return _UNKNOWN
    packed = x.ndim == 2  # of a packed sequence, whose steps have rows of their own
    steps, rows = (1, x.shape[0]) if packed else x.shape[:2]
    return steps, rows, h.shape[-1], layout.n


def _batched(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    if x is None or y is None:
        return _UNKNOWN
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1], y.shape[-1]


def _attention(q: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    keys = [_seen(a[name]) for name in ("past_k", "k") if name in a]
    if q is None or any(k is None for k in keys):
        return _UNKNOWN
    n = sum(k.shape[-2] for k in keys if k is not None)
    return math.prod(q.shape[:-2]), q.shape[-2], q.shape[-1], n


# --- schemes ---


def _named(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call by their names in its schema."""
    names = [argument.name for argument in schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _layouts(a: Arguments) -> list[Layout]:
    if "up_layout" in a:
        return [Layout(*a["up_layout"]), Layout(*a["down_layout"])]
    return each_layout(a.get("layout", ()))


def _weight(a: Arguments) -> QSpec | str:
    """Returns the spec that all weights have in common, or `?`."""
    specs = {
        QSpec(fields.bits, not fields.shift, group=fields.scale_group, packed=fields.bits != 8)
        for fields in _layouts(a)
    }
    return specs.pop() if len(specs) == 1 else "?"


def _spec(a: Arguments) -> QSpec:
    """Returns the spec of an activation from the arguments of `quantize`, or of an operator that
    quantizes its own input."""
    code = Code(*a["code"][: len(Code._fields)])
    static = a.get("scale") is not None
    axes = PER_TENSOR if static or code.per_tensor else PER_ROW
    return QSpec(code.bits, bool(code.symmetric), axes, code.group, static)


def _token(x: object, w: object, rotation: int = 0) -> str:
    return f"x{x}_w{w}{f'_h{rotation}' * bool(rotation)}"


def _dynamic(a: Arguments) -> str:
    return _token(_spec(a), _weight(a), Code(*a["code"]).rotation)


def _weight_only(a: Arguments) -> str:
    return f"w{_weight(a)}"


def _two_activations(a: Arguments) -> str:
    x = QSpec(a["bits"], a["symmetric"], tuple(a["axes"]))
    return str(Scheme(x=x, w=QSpec(bits=a["b_bits"])))


def _of_queries(a: Arguments) -> str:
    seen = _seen(a["q"])
    k = None if seen is None else seen.shape[-1]
    return str(Scheme(rotation=rotation_of_heads(k if isinstance(k, int) else None)))


def _codes(a: Arguments) -> Any:
    """Returns the node of the codes that are the left operand."""
    return a["codes"][0] if "codes" in a else a["q"] if "q" in a else a["a_q"]


def _of_codes(a: Arguments, w: QSpec | str | None = None) -> str:
    """Returns the scheme of a call whose left operand is int8 codes. The spec of x is that of the
    operator that computed the codes; `?` if it is unknown."""
    operand, w = _codes(a), w or QSpec()
    made: Any = operand.args[0] if operand.target is getitem else operand
    if made.target not in _QUANTIZE:
        return _token("?", w)
    given = _named(made)
    return _token(_spec(given), w, Code(*given["code"]).rotation)


def _of_linear(a: Arguments) -> str:
    return _of_codes(a, _weight(a))


def _of_training(a: Arguments) -> str:
    w_bits, per_tensor = a["code"][len(Code._fields) :]
    whole = all(layout.one_scale for layout in _layouts(a))
    axes = PER_TENSOR if per_tensor else PER_ROW
    return _of_codes(a, QSpec(w_bits, axes=axes) if whole else _weight(a))


def _is(token: str) -> Callable[[Arguments], str]:
    return lambda a: token


def _argument(name: str) -> Callable[[Arguments], Any]:
    return lambda a: a[name]


_X, _Q = _argument("x"), _argument("q")
_QUANTIZE = (torch.ops.qfx.quantize, torch.ops.qfx.quantize.default)
_ROWS = _by_target(
    linear=_Says(_Q, _linear, _of_linear),
    linear_requantize=_Says(_Q, _linear, _of_linear),
    linear_dynamic=_Says(_X, _linear, _dynamic),
    linears=_Says(_X, _several, _dynamic),
    conv_dynamic=_Says(_X, _conv, _dynamic, gemm=False),
    conv_depthwise=_Says(_X, _depthwise, _dynamic, gemm=False),
    linear_guarded=_Says(_X, _linear, _dynamic),
    linear_experts=_Says(_X, _linear, _dynamic, gemm=False),
    experts=_Says(_X, _experts, _dynamic, gemm=False),
    lstm=_Says(_argument("h"), _recurrent, _dynamic, gemm=False),
    gru=_Says(_argument("h"), _recurrent, _dynamic, gemm=False),
    linear_ste=_Says(_codes, _linear, _of_training),
    linear_float=_Says(_X, _linear, _weight_only, gemm=False),
    int8_mm=_Says(_Q, _linear, _of_codes),
    int8_bmm=_Says(_codes, _batched, _of_codes),
    int8_bmm_dynamic=_Says(_argument("a"), _batched, _two_activations),
    int8_attention=_Says(_Q, _attention, _of_queries),
    attention_decode=_Says(_Q, _attention, _is(FLOAT)),
    attention_append=_Says(_Q, _attention, _is(FLOAT)),
    binary_linear=_Says(_X, _linear, _is(BINARY), gemm=False),
    binary_mm=_Says(_X, _linear, _is(BINARY), gemm=False),
)
