"""Finds blocks of experts in a rewritten graph: two products of experts with a gate between them,
from the choice of experts to the sum over the slots of each token.

    numbers, order = sort(index.reshape(-1))            # slots, sorted by expert
    ends = cumsum(histc(numbers))
    u = linear_experts(x[order // slots], up, ends)
    y = linear_experts(gate(u), down, ends) * routing.reshape(-1)[order, None]
    y[inverse of order].view(T, slots, N).sum(1)

This is what transformers computes. What lies between the products is found by trying it on values.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qfx.graph.capture import value
from qfx.graph.patterns import Bound, calls
from qfx.graph.writes import written_inputs
from qfx.ops.expert_gates import ExpertGate
from qfx.rewriting.gate_regions import NoBlock, behind_casts, gate_between, shape_of, uncast
from qfx.rewriting.notation import pattern

_PRODUCT = pattern(
    "linear_experts(x, weight, layout, offsets, bias, code, activation, out_dtype, factor)"
)
_ADD = (operator.add, operator.iadd, torch.add, ".add", ".add_")
_MULTIPLY = (operator.mul, torch.mul, ".mul")
_VIEW = (".reshape", ".view", torch.reshape, ".flatten", torch.flatten)
_DIVIDE = (operator.floordiv, torch.floor_divide, ".floor_divide")
_TAKE = (operator.getitem,)


@dataclass
class ExpertBlock:
    """A block of experts in a graph, which computes the node `end`. `x` [T, K], `index` and
    `routing` [T, slots]. `up` and `down`: the arguments of both products, with the biases [E, N] or
    None. `last`: the second product. `inner`: all nodes that are computed for the block alone,
    `end` included."""

    last: fx.Node
    end: fx.Node
    x: fx.Node
    index: fx.Node
    routing: fx.Node
    up: Bound
    down: Bound
    gate: ExpertGate
    inner: set[fx.Node]


class _SortedSlots(NamedTuple):
    """The slots of all tokens, sorted by expert. `chosen`: the expert of each slot [T, slots].
    `numbers`: the same, sorted. `order`: their places."""

    chosen: fx.Node
    numbers: fx.Node
    order: fx.Node


def block_of(first: fx.Node, last: fx.Node) -> ExpertBlock:
    """Returns the block of which these calls of `linear_experts` are the products. Raises NoBlock,
    with the reason, if there is none."""
    up, down = _product(first), _product(last)
    if up["offsets"] is not down["offsets"]:
        raise NoBlock(f"{first} and {last} have rows of different experts")
    slots = _slots(down["offsets"])
    u, y = _biased(first, up, slots), _biased(last, down, slots)
    gate = gate_between(u, uncast(down["x"]))
    x = _tokens(uncast(up["x"]), slots)
    routing, end = _sum(y, slots)
    tokens, slots_of_each = value(slots.chosen).shape
    pairs = [*zip(value(routing).shape, (tokens, slots_of_each), strict=True)]
    if not all(_equal(a, b) for a, b in [*pairs, (value(x).shape[0], tokens)]):
        raise NoBlock(f"{x}, {slots.chosen} and {routing} are not of the same tokens")
    weights = {product[name] for product in (up, down) for name in ("weight", "bias")}
    inner = _inner(end, {x, slots.chosen, routing, *weights})
    return ExpertBlock(last, end, x, slots.chosen, routing, up, down, gate, inner)


def _product(node: fx.Node) -> Bound:
    found = _PRODUCT.match(node)
    if isinstance(found, str) or found["factor"] is not None:
        raise NoBlock(f"{node} has factors of its input")
    return found


def _slots(offsets: fx.Node) -> _SortedSlots:
    """Finds the sorted slots of which `offsets` are the ends."""
    experts = value(offsets).shape[0]
    total = _read(offsets, (torch.cumsum, ".cumsum"), "x", "dim", "dtype")
    counts = _read(total["x"], (torch.histc, ".histc"), "x", "bins", "min", "max")
    bins = (counts["bins"], counts["min"], counts["max"])
    if total["dim"] != 0 or bins != (experts, 0, experts - 1):
        raise NoBlock(f"{offsets} does not count the slots of {experts} experts")
    numbers = uncast(counts["x"])
    both = _read(numbers, _TAKE, "x", "at")
    flat = _read(both["x"], (torch.sort, ".sort"), "x")["x"]
    order = [n for n in both["x"].users if calls(n, *_TAKE) and n.args[1] == 1]
    if both["at"] != 0 or len(order) != 1:
        raise NoBlock(f"{numbers} is not sorted with its order")
    return _SortedSlots(_flattened(flat), numbers, order[0])


def _tokens(rows: fx.Node, slots: _SortedSlots) -> fx.Node:
    """Returns the tokens [T, K] of which `rows` are those of the sorted slots."""
    taken = _read(rows, _TAKE, "x", "at")
    divided = _read(taken["at"], _DIVIDE, "x", "by")
    if divided["x"] is not slots.order or not _equal(_size(divided["by"]), _count(slots)):
        raise NoBlock(f"{rows} are not the tokens of the slots")
    return _matrix(taken["x"])


def _biased(product: fx.Node, arguments: Bound, slots: _SortedSlots) -> fx.Node:
    """Returns the outputs of a product with its bias, if one is added, which becomes an argument:
    the one of the expert of each row."""
    adds = [user for user in product.users if calls(user, *_ADD)]
    if not adds:
        return product
    add, *more = adds
    given = _read(add, _ADD, "y", "other")
    bias = given["other"] if given["y"] is product else given["y"]
    taken = _read(bias, _TAKE, "x", "at")
    in_place = product in written_inputs(add)
    if more or taken["at"] is not slots.numbers or (not in_place and len(product.users) > 1):
        raise NoBlock(f"{add} adds something other than the bias of each expert")
    if in_place and any(user < add for user in product.users):
        raise NoBlock(f"{product} is read before its bias is added")
    arguments["bias"] = _matrix(taken["x"])
    return product if in_place and not add.users else add


def _sum(y: fx.Node, slots: _SortedSlots) -> tuple[fx.Node, fx.Node]:
    """Returns the weights of the slots, and the sum over the slots of each token of these times
    `y`."""
    weighted = _user(behind_casts(y), _MULTIPLY)
    factors = [uncast(a) for a in weighted.args]
    column = next((a for a in factors if a is not uncast(y)), None)
    taken = _read(uncast(_column(column)), _TAKE, "x", "at")
    routing = _flattened(uncast(taken["x"]))
    back = _user(behind_casts(weighted), _TAKE)
    if taken["at"] is not slots.order or not _is_inverse(back.args[1], slots.order, back):
        raise NoBlock("its outputs are not weighted and sorted back by slot")
    viewed = _user(back, _VIEW)
    shape, summed = shape_of(viewed), _user(behind_casts(viewed), (torch.sum, ".sum"))
    wanted = (*value(slots.chosen).shape, shape_of(y)[-1])
    if len(shape) != 3 or not all(map(_equal, shape, wanted)):
        raise NoBlock(f"{viewed} is not [T, slots, N]")
    how = _read(summed, (torch.sum, ".sum"), "x", "dim")
    if how["dim"] not in (1, [1], (1,)):
        raise NoBlock(f"{summed} is no sum over slots")
    return routing, behind_casts(summed)


def _column(node: Any) -> Any:
    """Returns the vector that `node` is as a column."""
    if calls(node, *_TAKE) and node.args[1] in ((Ellipsis, None), (slice(None), None)):
        return node.args[0]
    found = _read(node, (".unsqueeze", torch.unsqueeze), "x", "dim")
    if found["dim"] not in (-1, 1):
        raise NoBlock(f"{node} is no column")
    return found["x"]


def _is_inverse(node: Any, order: fx.Node, by: fx.Node) -> bool:
    """Whether `node` is the inverse of the permutation `order` when `by` reads it."""
    if calls(node, torch.argsort, ".argsort"):
        return node.args == (order,) and not node.kwargs
    if not calls(node, torch.empty_like) or node.args != (order,):
        return False
    writers = [user for user in node.users if written_inputs(user)]
    if len(writers) != 1 or writers[0].target is not operator.setitem or not writers[0] < by:
        return False
    _, at, counted = writers[0].args
    return at is order and calls(counted, torch.arange) and len(counted.args) == 1


def _inner(end: fx.Node, kept: set[Any]) -> set[fx.Node]:
    """Returns the tensors from which `end` is computed, back to those in `kept` and to constants,
    and what writes to them. Raises NoBlock if anything else reads one of them."""
    inner, pending = {end}, [end]
    while pending:
        sources = pending.pop().all_input_nodes
        new = {n for n in sources if n not in inner and n not in kept and _is_computed(n)}
        new |= {user for node in new for user in node.users if node in written_inputs(user)}
        inner |= new
        pending += new
    for node in inner - {end}:
        if others := sorted(str(user) for user in node.users if user not in inner):
            raise NoBlock(f"{others[0]} reads {node}, which is inside of it")
    return inner


def _is_computed(node: fx.Node) -> bool:
    tensors = isinstance(value(node), Tensor | tuple | list)
    return tensors and node.op not in ("placeholder", "get_attr")


# --- reading calls ---


def _read(node: Any, targets: tuple[Any, ...], *names: str) -> Bound:
    """Returns the arguments of a call of one of `targets` by these names, None for those that it
    does not have. Raises NoBlock for any other node, and for arguments of other names."""
    if not calls(node, *targets) or len(node.args) > len(names):
        raise NoBlock(f"{node} is no {_name(targets)}")
    given = {"x" if name == "input" else name: a for name, a in node.kwargs.items()}
    if unknown := given.keys() - set(names):
        raise NoBlock(f"{node} has an argument {min(unknown)}")
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | given


def _user(node: fx.Node, targets: tuple[Any, ...]) -> fx.Node:
    """Returns the only user of a node, besides what writes to it, which calls one of `targets`."""
    users = [user for user in node.users if node not in written_inputs(user)]
    if len(users) != 1 or not calls(users[0], *targets):
        raise NoBlock(f"{node} is not read by one {_name(targets)} alone")
    return users[0]


def _name(targets: tuple[Any, ...]) -> str:
    return str(getattr(targets[0], "__name__", targets[0])).lstrip(".")


def _flattened(node: Any) -> fx.Node:
    """Returns the matrix of which `node` is all elements as a vector."""
    viewed = _read(node, _VIEW, "x", "to")
    if viewed["to"] not in (-1, (-1,), None):  # flatten() has no shape
        raise NoBlock(f"{node} is not flattened")
    return _matrix(viewed["x"])


def _matrix(node: fx.Node) -> fx.Node:
    found = value(node)
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise NoBlock(f"{node} is no matrix")
    return node


def _size(size: Any) -> Any:
    return value(size) if isinstance(size, fx.Node) else size


def _count(slots: _SortedSlots) -> Any:
    return value(slots.chosen).shape[1]


def _equal(a: Any, b: Any) -> bool:
    return bool(guard_or_false(a == b))
