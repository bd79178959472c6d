"""Unrecognized weights: the weights of a graph that are multiplied and that no plan can make int8;
and a warning about them."""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from qfx.graph.capture import is_constant, roots, value
from qfx.host.tensors import is_distributed
from qfx.match.base import Match
from qfx.match.experts import ExpertProduct
from qfx.match.grouped import GroupedConvolution
from qfx.match.operator_calls import OwnCall
from qfx.match.recurrent import RecurrentSteps
from qfx.match.site import Site
from qfx.nn.weight_bytes import kinds, size

log = logging.getLogger(__name__)
_PRODUCT = re.compile(r"conv|lstm|gru|rnn|mm|matmul|mv|linear|einsum|dot|experts")
_TINY = 0.01  # fraction of the weights around a graph; less float is no news
_NO_INT8 = "qfx has no int8 for them"
_PARTED = (
    "they are distributed tensors (call qfx.quantize_ before the model is distributed, or load it "
    "by from_pretrained with a QfxConfig and a tp_plan)"
)
_WARNED: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()  # by the code of the frame


def unrecognized_weights(
    gm: fx.GraphModule, matches: Iterable[Match]
) -> tuple[dict[str, int], int]:
    """Returns the bytes of the float parameters that are multiplied by operations that qfx does not
    support, by class of the module that reads them; and the bytes of the weights of matmuls that
    qfx supports, whether or not they become int8."""
    served = {
        w
        for m in matches
        if isinstance(m, Site | ExpertProduct | GroupedConvolution | RecurrentSteps | OwnCall)
        for w in m.weights
    }
    outer = {root for node in served for root in roots(node)}
    left: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node not in outer and _multiplies(node):
            left[_kind(node)] += _bytes(node)
    return dict(left), sum(map(_bytes, outer))


def _multiplies(node: fx.Node) -> bool:
    """Whether a node is a float parameter with at least two dimensions that is multiplied, not only
    looked up or added."""
    weight = value(node)
    if not is_constant(node) or not isinstance(weight, nn.Parameter):
        return False
    if not weight.is_floating_point() or weight.ndim < 2 or weight.shape[0] == 1:
        return False
    return _reader(node) is not None


def _reader(node: fx.Node) -> fx.Node | None:
    """Returns the node of the matmul or convolution that has a weight as an operand, directly or
    after operations on the weight alone such as a view or a cast. Returns None for a weight that is
    looked up, added or multiplied elementwise."""
    todo, seen = [(node, user) for user in node.users], set[fx.Node]()
    while todo:
        operand, user = todo.pop(0)
        if str(user.target).startswith("qfx."):  # the biases of int8 operators
            continue
        name = str(getattr(user.target, "__name__", user.target))
        if _PRODUCT.search(name):
            if "add" not in name or operand in user.args[1:]:
                return user
        elif user not in seen and (user.all_input_nodes == [operand] or _gathers(user, operand)):
            seen.add(user)
            todo += [(user, after) for after in user.users]
    return None


def _gathers(user: fx.Node, weight: fx.Node) -> bool:
    """Whether a node selects matrices of the weights of experts, such as one for each token."""
    shape = getattr(value(weight), "shape", ())
    return len(shape) > 2 and user.target is operator.getitem and user.args[0] is weight


def _kind(node: fx.Node) -> str:
    """Returns the class of the module that reads the node, or the operation if the class is
    unknown."""
    reader = _reader(node)
    assert reader is not None
    stack = [*(reader.meta.get("nn_module_stack") or {}).values()]
    if not stack:
        return str(getattr(reader.target, "__name__", reader.target))
    kind = stack[-1][1]
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _bytes(node: fx.Node) -> int:
    weight = value(node)
    return int(weight.numel()) * weight.element_size() if isinstance(weight, Tensor) else 0


def warning_of(
    gm: fx.GraphModule,
    matches: Sequence[Match],
    modules: Iterable[nn.Module],
    code: CodeType | None,
    selective: bool,
) -> str | None:
    """Returns the text of a warning if more than half of the bytes of weights that the graph
    multiplies are of an unsupported kind. Returns None otherwise, and if the same text was already
    returned for `code`, the Python function that was captured. If the configuration is `selective`
    (it names modules), or if the bytes are less than 1 % of the parameters of `modules`, the
    modules around the graph, the text is only logged, at INFO."""
    left, served = unrecognized_weights(gm, matches)
    count = sum(left.values())
    parted = any(is_distributed(value(n)) for n in gm.graph.nodes if _multiplies(n))
    if count <= served:
        return None
    text = (
        f"{size(count)} of {size(count + served)} of the weights that this graph multiplies stay "
        f"float, since {_PARTED if parted else _NO_INT8}: {kinds(left)}. qfx.explain(model, "
        "*inputs) lists what becomes of each matmul"
    )
    if selective or count < _TINY * _around(modules):
        log.info("%s", text)
        return None
    before = _WARNED.setdefault(code, set()) if code is not None else set[str]()
    if text in before:
        return None
    before.add(text)
    return f"qfx: {text}"


def _around(modules: Iterable[nn.Module]) -> int:
    tensors: Mapping[int, Any] = {
        id(p): p for m in modules for p in m.parameters() if not is_lazy(p)
    }
    return sum(p.numel() * p.element_size() for p in tensors.values())


def forget() -> None:
    """Clears the record of warnings when `torch._dynamo.reset()` is called."""
    _WARNED.clear()
