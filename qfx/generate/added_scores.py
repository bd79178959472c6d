"""Recognizes how a graph computes the scores of an attention: scale q k^T, the terms that are added
to it, and the masks. explicit_attention.py replaces such an attention by one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from qfx.graph.capture import attribute, value
from qfx.host.operators import OpOverload, schema
from qfx.host.tensors import storage_key

aten, ops = torch.ops.aten, torch.ops.qfx
_MOST = 1 << 24  # largest number of elements of a constant that is computed
_NEVER = -1e30  # a term of this value or less hides a key
_PASS = {
    aten.view.default, aten.reshape.default, aten.contiguous.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.to.dtype, aten.lift_fresh_copy.default,
}  # fmt: skip
_VIEWS = _PASS | {aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.mT.default}


class UnknownScores(Exception):
    """Raised if the graph computes the scores in an unknown way."""


class Cached(NamedTuple):
    """Keys or values that an attention reads as floats of shape `sizes` = [B, H, L, D]. `call`: the
    node that converts the int8 cache to these floats."""

    call: fx.Node
    sizes: tuple[int, ...]

    @staticmethod
    def of(node: Any, target: Any, transposed: bool) -> Cached:
        """Returns the keys or values of which `node`, an operand of a matmul, is a view. `target`:
        the operator that returns them. The view is [B, H, L, D] or [B * H, L, D], or, if
        `transposed`, has L and D exchanged. Raises UnknownScores for other operands."""
        call: Any = node
        steps: list[Any] = []
        while isinstance(call, fx.Node) and call.target in _VIEWS:
            steps.append(call)
            call = call.args[0]
        if not isinstance(call, fx.Node) or call.target is not target:
            raise UnknownScores
        sizes = tuple(value(call).shape)
        whole = torch.empty(sizes, dtype=torch.float32, device="meta")
        found: Any = whole
        for step in reversed(steps):
            found = step.target(found, *step.args[1:], **step.kwargs)
        expected = whole.mT if transposed else whole
        flat = (sizes[0] * sizes[1], *expected.shape[2:])
        same = storage_key(found) == storage_key(whole)
        strides = {
            found.shape: None,
            expected.shape: expected.stride(),
            flat: expected.stride()[1:],
        }
        if not same or not _strided(found, strides[tuple(found.shape)]):
            raise UnknownScores
        return Cached(call, sizes)


def _strided(tensor: Tensor, strides: Any) -> bool:
    if strides is None:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or own == other for size, own, other in pairs)


class Term(NamedTuple):
    """One term of the scores: `factor` times `operand`, which is a constant tensor or a node."""

    operand: Any
    factor: float


@dataclass(frozen=True)
class Scores:
    """The scores scale q k^T + terms of an attention, for keys where all bool masks in `seen` are
    True; other keys get no weight. `product`: the node of q, and the keys; None if there is no q
    k^T."""

    product: tuple[fx.Node, Cached] | None = None
    scale: float = 0.0
    terms: tuple[Term, ...] = ()
    seen: tuple[fx.Node, ...] = ()

    def plus(self, other: Scores) -> Scores:
        if self.product and other.product:
            raise UnknownScores
        seen = tuple(dict.fromkeys(self.seen + other.seen))
        with_product = self if self.product else other
        return replace(with_product, terms=self.terms + other.terms, seen=seen)

    def times(self, factor: float) -> Scores:
        if factor <= 0 and self.seen:
            raise UnknownScores
        terms = tuple(term._replace(factor=term.factor * factor) for term in self.terms)
        return replace(self, scale=self.scale * factor, terms=terms)


class ScoreReader:
    """Recognizes scores in one graph; computes each constant of the graph once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Tensor | None] = {}

    def scores(self, node: Any) -> Scores:
        """Returns the scores that `node` computes. Raises UnknownScores if they do not have the
        form of `Scores`."""
        if not isinstance(node, fx.Node):
            raise UnknownScores
        constant = self.constant(node)
        if constant is not None:
            return Scores(terms=(Term(constant, 1.0),)) if bool(constant.any()) else Scores()
        read = _READ.get(node.target)
        return Scores(terms=(Term(node, 1.0),)) if read is None else read(self, node)

    def seen(self, node: Any, where: bool) -> tuple[fx.Node, ...]:
        """Returns bool inputs of the graph whose logical and is True exactly where the bool tensor
        `node` equals `where`; () if `node` equals it everywhere. Raises UnknownScores if there are
        no such inputs."""
        constant = self.constant(node)
        if constant is not None:
            if bool((constant.bool() != where).any()):
                raise UnknownScores
            return ()
        if node.op == "placeholder" and value(node).dtype == torch.bool and where:
            return (node,)
        if node.target is aten.logical_not.default or node.target is aten.bitwise_not.default:
            return self.seen(node.args[0], not where)
        repeats = (
            node.target is aten.expand.default and value(node.args[0]).ndim == value(node).ndim
        )
        if (node.target in _PASS or repeats) and value(node.args[0]).dtype == torch.bool:
            return self.seen(node.args[0], where)
        below = node.target is aten.lt.Scalar and _NEVER < node.args[1] <= 0
        if not where and (below or (node.target in _PASS and value(node).dtype == torch.bool)):
            found = self.scores(node.args[0])  # zeros, and -inf for hidden keys
            if found.product is None and not found.terms:
                return found.seen
        raise UnknownScores

    def constant(self, node: Any) -> Tensor | None:
        """Returns the value of a node that depends on no input and no parameter; None for other
        nodes."""
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Tensor | None:
        if node.op == "get_attr":
            constant = attribute(node)
            plain = isinstance(constant, Tensor) and not isinstance(constant, nn.Parameter)
            return constant.detach() if plain else None
        if node.target is aten.detach_.default:
            return self.constant(node.args[0])
        if not isinstance(node.target, OpOverload) or not isinstance(value(node), Tensor):
            return None
        tags = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
        if schema(node.target).is_mutable or tags & {*node.target.tags}:
            return None
        if value(node).numel() > _MOST or value(node).device.type != "cpu":
            return None
        if any(self.constant(each) is None for each in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.constant)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[no-any-return]

    def number(self, what: Any) -> float:
        if isinstance(what, int | float):
            return float(what)
        constant = self.constant(what) if isinstance(what, fx.Node) else None
        if constant is None or constant.numel() != 1:
            raise UnknownScores
        return float(constant)

    def never(self, what: Any) -> None:
        """Raises UnknownScores unless the number `what` is so negative, -1e30 or less, that a key
        with this score gets no weight in the softmax."""
        if not self.number(what) <= _NEVER:
            raise UnknownScores


def _product(reader: ScoreReader, node: fx.Node) -> Scores:
    query, keys = node.args[:2]
    return Scores((query, Cached.of(keys, ops.kv_keys.default, transposed=True)), 1.0)  # type: ignore[arg-type]


def _added_product(reader: ScoreReader, node: fx.Node) -> Scores:
    term, query, keys = node.args
    beta, alpha = (reader.number(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
    product = Scores((query, Cached.of(keys, ops.kv_keys.default, transposed=True)), 1.0)  # type: ignore[arg-type]
    return product.times(alpha).plus(reader.scores(term).times(beta))


def _sum(reader: ScoreReader, node: fx.Node) -> Scores:
    a, b = node.args
    return reader.scores(a).plus(reader.scores(b).times(reader.number(node.kwargs.get("alpha", 1))))


def _scaled(reader: ScoreReader, node: fx.Node) -> Scores:
    factor = reader.number(node.args[1])
    inverse = node.target in (aten.div.Tensor, aten.div.Scalar)
    return reader.scores(node.args[0]).times(1 / factor if inverse else factor)


def _filled(reader: ScoreReader, node: fx.Node) -> Scores:
    x, hidden, number = node.args
    reader.never(number)
    return reader.scores(x).plus(Scores(seen=reader.seen(hidden, False)))


def _where(reader: ScoreReader, node: fx.Node) -> Scores:
    seen, x, number = node.args
    reader.never(number)
    return reader.scores(x).plus(Scores(seen=reader.seen(seen, True)))


def _bounded(reader: ScoreReader, node: fx.Node) -> Scores:
    x, number = node.args[:2]
    reader.never(number)
    return reader.scores(x)


def _same(reader: ScoreReader, node: fx.Node) -> Scores:
    """Returns the scores of the input of `node`, which only moves elements. Raises UnknownScores if
    it changes the dtype or the last two dimensions."""
    x: Any = node.args[0]
    found, given = value(node), value(x)
    if found.dtype != given.dtype or found.shape[-2:] != given.shape[-2:]:
        raise UnknownScores
    return reader.scores(x)


_READ: dict[Any, Callable[[ScoreReader, fx.Node], Scores]] = {
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.baddbmm.default: _added_product,
    aten.add.Tensor: _sum,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.maximum.default: _bounded,
    aten.max.other: _bounded,
    aten.clamp.default: _bounded,
}
_READ |= dict.fromkeys(
    (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar), _scaled
)
_READ |= dict.fromkeys(_PASS, _same)
