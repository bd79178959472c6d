"""Routing: how often int8 changes which experts the tokens of a call go to.

The routers of a mixture of experts stay float, but what they read comes from int8 matmuls, so that
two experts of almost equal scores may change places. The choices of a run are kept where they enter
a block of experts: by hooks on blocks that run as modules, by calls in captured graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from qfx.graph.capture import clone, module_path, value
from qfx.nn.experts import Experts
from qfx.nn.experts_like import is_experts

Choices = Mapping[str, Sequence[Tensor]]  # of each call of a block, int64 [T, S], by its name
_KEPT: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("kept", default=None)


class RoutingChange(NamedTuple):
    """The effect of int8 on the choices of experts for one block. `choices`: the number of pairs of
    a token and a slot; 0 if no call of the block was compared. `changed`: how many of these went,
    in the float run, to an expert that the token does not go to in the int8 run; the order of a
    token's slots does not matter."""

    name: str
    changed: int
    choices: int

    @property
    def share(self) -> float:
        """changed / choices, 0 to 1."""
        return self.changed / max(self.choices, 1)

    def __str__(self) -> str:
        if not self.choices:
            return f"{self.name} not compared"
        return f"{self.name} {self.changed} of {self.choices} ({self.share:.1%})"


def routing_changes(
    names: Iterable[str], in_float: Choices, in_int8: Choices
) -> tuple[RoutingChange, ...]:
    """Compares the choices of two runs on the same inputs, for the blocks `names`."""
    return tuple(_change(name, in_float.get(name, ()), in_int8.get(name, ())) for name in names)


def _change(name: str, exact: Sequence[Tensor], other: Sequence[Tensor]) -> RoutingChange:
    if [t.shape for t in exact] != [t.shape for t in other]:
        return RoutingChange(name, 0, 0)
    pairs = zip(exact, other, strict=True)
    changed = sum(int((a[:, :, None] != b[:, None]).all(2).sum()) for a, b in pairs)
    return RoutingChange(name, changed, sum(t.numel() for t in exact))


def routing_text(changes: Sequence[RoutingChange]) -> str:
    """Returns a line that says how many choices changed, the blocks with most of them first; ''
    without a block."""
    if not changes:
        return ""
    sums = RoutingChange("", sum(c.changed for c in changes), sum(c.choices for c in changes))
    each = ", ".join(map(str, sorted(changes, key=lambda c: -c.share)))
    return (
        f"routing: int8 changes {sums.changed} of {sums.choices} choices of experts "
        f"({sums.share:.1%}): {each}"
    )


def blocks_of(model: nn.Module | None) -> dict[str, nn.Module]:
    """Returns the blocks of experts of a model, float and int8, by name."""
    named = () if model is None else model.named_modules()
    return {n: m for n, m in named if isinstance(m, Experts) or is_experts(m)}


@contextmanager
def choices_kept(called: nn.Module | None) -> Iterator[dict[str, list[Tensor]]]:
    """Context manager that yields a dict, to which each call of a block of experts inside the
    `with` block adds its choices. `called`: the model, if its blocks run as modules."""
    kept: dict[str, list[Tensor]] = defaultdict(list)
    token = _KEPT.set(kept)
    try:
        with ExitStack() as hooks:
            for name, block in blocks_of(called).items():
                hook = block.register_forward_pre_hook(partial(_called, name), with_kwargs=True)
                hooks.callback(hook.remove)
            yield kept
    finally:
        _KEPT.reset(token)


def _called(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for given in (*args, *kwargs.values()):
        if _is_choice(given):
            _keep(name, given)
            return


def _is_choice(given: Any) -> bool:
    indices = isinstance(given, Tensor) and not (given.is_floating_point() or given.is_complex())
    return indices and given.dtype != torch.bool and given.dim() == 2


def _keep(name: str, choice: Tensor) -> None:
    kept = _KEPT.get()
    if kept is not None:
        kept[name].append(choice.detach().to("cpu", torch.int64, copy=True))


fx.node.has_side_effect(_keep)  # no pass removes its calls, whose result nothing reads


def keeping_choices(
    gm: fx.GraphModule, prefixes: Mapping[str, str], blocks: Mapping[str, nn.Module]
) -> fx.GraphModule:
    """Returns a copy of a captured graph that keeps the choices for these blocks, and `gm` itself
    if it calls none of them. `prefixes`: complete names in the graph to names in the model."""
    found = dict[tuple[str, str], str]()  # by block and choice, the first node that reads it
    for user in gm.graph.nodes if blocks else ():
        if (name := module_path(user, prefixes)) in blocks:
            for node in user.all_input_nodes:
                outside = not f"{module_path(node, prefixes)}.".startswith(f"{name}.")
                if outside and _is_choice(value(node)):
                    found.setdefault((name, node.name), user.name)
    if not found:
        return gm
    copy = clone(gm)
    nodes = {node.name: node for node in copy.graph.nodes}
    for (name, choice), user in found.items():
        with copy.graph.inserting_before(nodes[user]):
            copy.graph.call_function(_keep, (name, nodes[choice]))
    copy.recompile()
    return copy
