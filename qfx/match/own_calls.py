"""Calls of qfx's own matmul operators that a model makes itself, through the modules and functions
of `qfx.nn` or by hand: what they compute is decided, and plans and reports say it."""

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
from qfx.ops.forms import FORMS
from qfx.ops.lowbit_packing import lowbit_size
from qfx.values.scheme import GROUP_MULTIPLE, PER_ROW, PER_TENSOR, QSpec, Scheme

Sizes = tuple[Size | None, Size | None, Size | None, Size | None]  # batch, M, K, N
Arguments = Mapping[str, Any]
BINARY = "binary"
_KINDS = {FLOAT: "a float", BINARY: "a 1-bit"}


@dataclass(frozen=True, kw_only=True)
class OwnCall(Match):
    """One call. `token`: its scheme as far as the call says it, or `binary`, or `float`; the bits
    of codes that come from elsewhere are unknown and count as 8."""

    operand: fx.Node | None  # what is multiplied, where it is no codes
    stored: int | None = None  # bytes of the packed weight and its scales

    @property
    def left(self) -> tuple[fx.Node, View] | None:
        return None if self.operand is None else (self.operand, ())

    def closed(self, reason: str) -> OwnCall:
        return self

    @property
    def reason(self) -> str:
        return f"{_KINDS.get(self.token, 'an int8')} operator of the model itself"


def own_call(node: fx.Node, path: str) -> OwnCall | None:
    """None for a node that is no such call."""
    row = _ROWS.get(node.target) if node.op == "call_function" else None
    if row is None:
        return None
    arguments = _named(node)
    left = arguments[row.left]
    seen = _seen(left)
    batch, m, k, n = row.sizes(seen, _seen(node), arguments)
    token = str(node.meta.get(SCHEME) or row.token(arguments))
    codes = seen is None or not seen.is_floating_point()
    return OwnCall(
        node=node, path=path, token=token, gemm=row.gemm, operand=None if codes else left,
        stored=_stored(arguments),
        batch=batch, m=m, k=k, n=n,
    )  # fmt: skip


class _Says(NamedTuple):
    """What the calls of one operator say: the argument that stands left, sizes, the scheme."""

    left: str
    sizes: Callable[[Tensor | None, Tensor | None, Arguments], Sizes]
    token: Callable[[Arguments], str]
    gemm: bool = True


def _by_target(**rows: Any) -> dict[Any, Any]:
    """Rows by the operator in both forms in which graphs hold it."""
    packets = {name: getattr(torch.ops.qfx, name) for name in rows}
    return {t: rows[name] for name, packet in packets.items() for t in (packet, packet.default)}


def _seen(node: Any) -> Tensor | None:
    found = value(node) if isinstance(node, fx.Node) else None
    first = found[0] if isinstance(found, list | tuple) and found else found
    return first if isinstance(first, Tensor) else None


def _stored(a: Arguments) -> int | None:
    """The bytes of the weight, where the call has one."""
    parts = [_seen(a.get(name)) for name in ("packed", "w_scale", "w_zero")]
    known = [t.numel() * t.element_size() for t in parts if t is not None]
    return sum(known) if parts[0] is not None else None


# --- sizes ---

_UNKNOWN: Sizes = (None, None, None, None)


def _linear(x: Tensor | None, y: Tensor | None, a: Arguments) -> Sizes:
    if x is None or y is None:
        return _UNKNOWN
    return None, math.prod(x.shape[:-1]), x.shape[-1], y.shape[-1]


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
    """The arguments of an operator's call by their names in its schema."""
    names = [argument.name for argument in schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _spec(a: Arguments, axes: tuple[int, ...] | None = None) -> QSpec:
    group, static = a.get("group", 0), axes is not None
    return QSpec(a["bits"], a["symmetric"], axes or tuple(a["axes"]), group, static)


def _dynamic(a: Arguments) -> str:
    return str(Scheme(x=_spec(a), rotation=a.get("rotation", 0)))


def _groups_dynamic(a: Arguments) -> str:
    rotation = a.get("rotation", 0)
    return f"x{_spec(a)}_w{_weight_in_groups(a, a['x'])}{f'_h{rotation}' * bool(rotation)}"


def _weight_only(a: Arguments) -> str:
    return str(Scheme(x=None))


def _two_activations(a: Arguments) -> str:
    return str(Scheme(x=_spec(a), w=QSpec(bits=a["b_bits"])))


def _of_queries(a: Arguments) -> str:
    seen = _seen(a["q"])
    k = None if seen is None else seen.shape[-1]
    return str(Scheme(rotation=64).at(k if isinstance(k, int) else None))  # as (A2) does


def _of_codes(a: Arguments, w: QSpec | None = None) -> str:
    """x as the operator says that made the codes."""
    operand: fx.Node = a["q"] if "q" in a else a["a_q"]
    made: Any = operand.args[0] if operand.target is getitem else operand
    quantize = _QUANTIZE.get(made.target)
    if quantize is None:
        return f"x?_w{w or QSpec()}"
    given = _named(made)
    rotation = given.get("rotation", 0)
    return f"x{quantize(given)}_w{w or QSpec()}{f'_h{rotation}' * bool(rotation)}"


def _of_groups(a: Arguments) -> str:
    return _of_codes(a, _weight_in_groups(a, a["q"]))


def _weight_in_groups(a: Arguments, left: Any) -> QSpec:
    """Its groups are the smallest of which there are as many as scales."""
    x, scale = _seen(left), _seen(a["w_scale"])
    group = 0
    if x is not None and scale is not None and scale.shape[-1] > 1:
        group = math.ceil(x.shape[-1] / scale.shape[-1] / GROUP_MULTIPLE) * GROUP_MULTIPLE
    return QSpec(symmetric=a.get("w_zero") is None, group=group)


def _packed_weight(a: Arguments, left: Any) -> QSpec:
    """Without zero points it takes the fewest bytes that there are."""
    x, packed, bits, group = _seen(left), _seen(a["packed"]), a["w_bits"], a["w_group"]
    least = None if x is None else lowbit_size(a["n"], x.shape[-1], bits, group)
    symmetric = packed is not None and packed.numel() == least
    return QSpec(bits, symmetric, group=group, packed=True)


def _of_packed(a: Arguments) -> str:
    return _of_codes(a, _packed_weight(a, a["q"]))


def _packed_dynamic(a: Arguments) -> str:
    return str(Scheme(x=_spec(a), w=_packed_weight(a, a["x"]), rotation=a.get("rotation", 0)))


def _packed_only(a: Arguments) -> str:
    return str(Scheme(x=None, w=_packed_weight(a, a["x"])))


def _of_training(a: Arguments) -> str:
    return _of_codes(a, QSpec(bits=a["w_bits"], axes=tuple(a["w_axes"])))


def _is(token: str) -> Callable[[Arguments], str]:
    return lambda a: token


def _of_forms() -> dict[Any, Any]:
    """Rows of the operators of all forms."""
    rows = {}
    for form in FORMS:
        left, token = ("q", _of_codes) if form.codes else ("x", _weight_only)
        rows[form.fused.name] = _Says(left, _linear, token, form.gemm)
        for call in (form.dynamic, form.guarded):
            if call is not None:
                rows[call.name] = _Says("x", _linear, _dynamic, form.gemm)
    return _by_target(**rows)


_QUANTIZE = _by_target(
    quantize=_spec,
    quantize_groups=lambda a: _spec({"axes": PER_ROW, **a}),
    quantize_static=lambda a: _spec(a, PER_TENSOR),
    quantize_stochastic=lambda a: _spec({"symmetric": True, **a}),
)
_ROWS = _of_forms() | _by_target(
    int8_linear_requantize=_Says("q", _linear, _of_codes),
    int8_linear_groups=_Says("q", _linear, _of_groups, gemm=False),
    int8_linear_groups_ste=_Says("q", _linear, _of_groups, gemm=False),
    int8_linear_groups_dynamic=_Says("x", _linear, _groups_dynamic, gemm=False),
    int8_linear_ste=_Says("q", _linear, _of_training),
    lowbit_linear=_Says("q", _linear, _of_packed, gemm=False),
    lowbit_linear_ste=_Says("q", _linear, _of_packed, gemm=False),
    lowbit_linear_dynamic=_Says("x", _linear, _packed_dynamic, gemm=False),
    lowbit_weight_linear=_Says("x", _linear, _packed_only, gemm=False),
    int8_mm=_Says("q", _linear, _of_codes),
    int8_bmm=_Says("a_q", _batched, _of_codes),
    int8_bmm_dynamic=_Says("a", _batched, _two_activations),
    int8_attention=_Says("q", _attention, _of_queries),
    attention_decode=_Says("q", _attention, _is(FLOAT)),
    attention_append=_Says("q", _attention, _is(FLOAT)),
    binary_linear=_Says("x", _linear, _is(BINARY), gemm=False),
    binary_mm=_Says("x", _linear, _is(BINARY), gemm=False),
)
