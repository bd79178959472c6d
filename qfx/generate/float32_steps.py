"""Steps of a 16-bit model, computed in float32 while its parameters stay 16-bit.

A step is captured with every bfloat16 and float16 parameter and buffer converted to float32. Then
the conversions are moved to where they cost least: after lookups and views, so that only the rows
of an embedding that a step uses are converted. Vectors, such as the weights of norms, are converted
once. A matmul that is not quantized multiplies in the dtype of its weight, as the model itself
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.host.operators import TO_COPY
from qfx.host.tensors import tree_map

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
_CONVERT = (aten.to.dtype, TO_COPY)
# Operators that only move elements of their first argument.
_MOVES = {
    aten.embedding.default, aten.view.default, aten.reshape.default, aten.transpose.int,
    aten.t.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.index.Tensor, aten.index_select.default,
    aten.expand.default, aten.contiguous.default, aten.clone.default, aten.detach.default,
    aten.alias.default,
}  # fmt: skip
_SEVERAL = {aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default}
_MATMULS = {
    aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten.baddbmm.default, aten.matmul.default,
}  # fmt: skip
_OF_EXPERTS = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}


def float32_vectors(model: nn.Module) -> dict[str, Tensor]:
    """Returns float32 copies of the 16-bit parameters and buffers with at most one axis, by
    name."""
    return {name: t.detach().float() for name, t in _halves(model).items() if t.ndim <= 1}


def _halves(model: nn.Module) -> dict[str, Tensor]:
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in every if tensor.dtype in HALVES}


class InFloat32(nn.Module):
    """Runs `run`, the forward of `model`: unchanged by `forward`, and by `call` with the 16-bit
    parameters and buffers converted to float32."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, **given: Any) -> Any:
        return self.run(**given)

    def call(self, **given: Any) -> Any:
        wide = {name: tensor.to(torch.float32) for name, tensor in _halves(self).items()}
        return torch.func.functional_call(self, wide, (), given) if wide else self(**given)


def keep_halves(gm: fx.GraphModule, vectors: Mapping[str, Tensor], prefix: str) -> None:
    """Moves the conversions to float32 in the graph of a step, captured from `InFloat32.call`, to
    where they cost least, as described above.

    `vectors`: the result of `float32_vectors`. `prefix`: the prefix of the model's names in `gm`.
    """
    for node in list(gm.graph.nodes):
        vector = _attribute_of(gm, node)
        if vector is None or vector.dtype not in HALVES:
            continue
        for user in list(node.users):
            if user.target in _CONVERT and _is_float32(user):
                _sink(user, vector.dtype)
        _fold(gm, node, vectors.get(str(node.target).removeprefix(prefix)))
    gm.graph.lint()
    gm.recompile()


def _attribute_of(gm: fx.GraphModule, node: fx.Node) -> Tensor | None:
    if node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(gm.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None


def is_check(node: fx.Node) -> bool:
    """Whether the node only asserts the dtype of a tensor."""
    return str(node.target).startswith("aten._assert")


def _is_float32(node: fx.Node) -> bool:
    return torch.float32 in (*node.args[1:], node.kwargs.get("dtype"))


def _sink(convert: fx.Node, dtype: torch.dtype) -> None:
    """Moves a conversion to float32 after the nodes that use its result, as far as possible."""
    for user in list(convert.users):
        if is_check(user):
            user.graph.erase_node(user)
        elif user.target in _CONVERT and _is_float32(user):
            user.replace_all_uses_with(convert)
            user.graph.erase_node(user)
            _sink(convert, dtype)
            return
        elif user.target in _MOVES | _SEVERAL and user.args[0] is convert:
            _move(user, convert, dtype)
        elif user.target in _MATMULS or str(user.target) in _OF_EXPERTS:
            _multiply_in(user, dtype)


def _move(user: fx.Node, convert: fx.Node, dtype: torch.dtype) -> None:
    """Rewrites move(convert(x)) to convert(move(x)), with one conversion for each result."""
    user.replace_input_with(convert, convert.args[0])  # type: ignore[arg-type]
    several = user.target in _SEVERAL
    for made in [user, *user.users] if several else [user]:
        made.meta["val"] = tree_map(lambda t: t.to(dtype), made.meta["val"])
        if several and made is user:
            continue
        later = _converted(made, torch.float32)
        if user.target is not aten.embedding.default:  # rows of an embedding are activations
            _sink(later, dtype)


def _converted(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Converts the result of `node` to another dtype for all nodes that use it; returns the
    conversion."""
    with node.graph.inserting_after(node):
        later = node.graph.call_function(aten.to.dtype, (node, dtype))
    later.meta["val"] = node.meta["val"].to(dtype)
    for user in [n for n in node.users if is_check(n)]:
        node.graph.erase_node(user)
    node.replace_all_uses_with(later, lambda n: n is not later)
    return later


def _multiply_in(matmul: fx.Node, dtype: torch.dtype) -> None:
    """Makes a matmul multiply operands of the 16-bit `dtype`, as the model's modules do, and
    converts its result to float32."""
    for operand in matmul.all_input_nodes:
        value = operand.meta["val"]
        if value.dtype != torch.float32:
            continue
        source = operand.args[0] if operand.target in _CONVERT else None
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != dtype:
            with matmul.graph.inserting_before(matmul):
                source = matmul.graph.call_function(aten.to.dtype, (operand, dtype))
            source.meta["val"] = value.to(dtype)
        matmul.replace_input_with(operand, source)
    matmul.meta["val"] = matmul.meta["val"].to(dtype)
    _converted(matmul, torch.float32)


def _fold(gm: fx.GraphModule, node: fx.Node, vector: Tensor | None) -> None:
    """Replaces the remaining conversions of the 16-bit vector `node` by its float32 copy
    `vector`."""
    left = [n for n in node.users if n.target in _CONVERT and _is_float32(n)]
    if vector is None or not left:
        return
    name = f"float32_{node.name}"
    gm.register_buffer(name, vector, persistent=False)
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    for convert in left:
        convert.replace_all_uses_with(constant)
        gm.graph.erase_node(convert)
