"""Edits the two graphs of a compiled training step, and what the first saves for the second,
between AOTAutograd's partition and Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor, fx

# (nodes that the forward graph saves, each with the input of the backward graph that reads it;
# results that the user gets; gradients that the backward graph gets) -> what is saved for a node
Rewrite = Callable[
    [Sequence[tuple[fx.Node, fx.Node]], Sequence[fx.Node], Sequence[fx.Node]],
    Mapping[fx.Node, Sequence[fx.Node]],
]


def partitioner(rewrite: Rewrite, digest: str, given: Any = None) -> Any:
    """Returns a partitioner for Inductor's option `custom_partitioner_fn` that lets `rewrite` edit
    both graphs. `digest`: of its code, for the keys of caches. `given`: the user's partitioner,
    which then does the partition; Inductor's own without one."""
    return _partitioner_class()(rewrite, digest, given)


@cache
def _partitioner_class() -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __init__(self, rewrite: Rewrite, digest: str, given: Any) -> None:
            self._rewrite, self._digest, self._given = rewrite, digest, given

        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            divide = self._given or min_cut_rematerialization_partition
            forward, backward = divide(gm, joint_inputs, **kwargs)
            _rewrite(forward.graph, backward.graph, kwargs["num_fwd_outputs"], self._rewrite)
            for part in (forward, backward):
                part.graph.lint()
                part.recompile()
            return forward, backward

        def uuid(self) -> Any:
            theirs = self._given.uuid() if self._given else ""
            return None if theirs is None else f"{self._digest} {theirs}"

        def __reduce__(self) -> Any:  # caches pickle it for their keys
            return str, (self.uuid(),)

    return Partitioner


def _rewrite(forward: fx.Graph, backward: fx.Graph, outputs: int, rewrite: Rewrite) -> None:
    """`outputs`: results of the forward graph that the user gets, before those that are saved."""
    (output,) = forward.find_nodes(op="output")
    results = [*output.args[0]]
    reads = {node.name: node for node in backward.find_nodes(op="placeholder")}
    saved = [
        (node, reads[node.name])
        for node in dict.fromkeys(results[outputs:])
        if isinstance(node, fx.Node) and node.name in reads and _is_checked_tensor(node)
    ]
    visible = [node for node in results[:outputs] if isinstance(node, fx.Node)]
    gradients = [node for name, node in reads.items() if name.startswith("tangents")]
    places = rewrite(saved, visible, gradients)
    after = [part for node in results[outputs:] for part in places.get(node, (node,))]
    output.args = (type(output.args[0])([*results[:outputs], *after]),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][:outputs], *_descriptions(after)]


def _is_checked_tensor(node: fx.Node) -> bool:
    """Whether a node is a tensor that autograd saves. Others are kept in an order of their own."""
    return isinstance(node.meta.get("val"), Tensor) and not _is_unchecked(node)


def _is_unchecked(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _descriptions(saved: Sequence[fx.Node]) -> list[Any]:
    from torch._functorch._aot_autograd.descriptors import (
        SavedForBackwardsAOTOutput,
        SavedForBackwardsNoVcCheckAOTOutput,
    )

    kinds = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)
    return [kinds[_is_unchecked(node)](i) for i, node in enumerate(saved)]
