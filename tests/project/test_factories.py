"""Whoever makes a tensor states its dtype and device, and asks for no default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.project.house import PACKAGE, modules

_TENSORS = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_permuted", "empty_strided", "eye", "full", "hamming_window", "hann_window",
    "kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
_MODULES = {"Bilinear", "Conv1d", "Conv2d", "Embedding", "LayerNorm", "Linear", "RMSNorm"}
_STATED = {"dtype", "device"}
_ASKING = {
    "get_default_dtype", "get_default_device", "set_default_dtype", "set_default_device",
    "set_default_tensor_type", "Tensor", "FloatTensor", "finfo",
}  # fmt: skip
ALLOWED = {
    # What a model's own code may ask for counts in the key of its programs.
    "generate.program_key": {"torch.get_default_dtype()", "torch.get_default_device()"},
    # A program belongs to the default type under which it was made.
    "generate.model_programs": {"torch.get_default_dtype()"},
    # A node of a graph, whose keywords state the device; its int64 follows no default.
    "rewriting.codes": {"torch.randint"},
    # A call that is looked for in graphs.
    "rewriting.expert_blocks": {"torch.arange"},
}


def unstated(tree: ast.AST) -> Iterator[str]:
    """Each use of a factory of tensors or modules that leaves dtype or device to a default, and
    each choice between two numbers, whose result has the default dtype."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        call, owner = called.get(id(node)), node.value.id
        stated = {k.arg for k in call.keywords} if call else set()
        makes = owner == "torch" and node.attr in _TENSORS
        makes |= owner == "nn" and node.attr in _MODULES and call is not None
        asks = owner == "torch" and node.attr in _ASKING and call and not call.args
        if (makes and not stated >= _STATED) or asks or (call and _of_two_numbers(call)):
            yield ast.unparse(call or node)


def _of_two_numbers(call: ast.Call) -> bool:
    numbers = (ast.Constant, ast.UnaryOp)
    where = ast.unparse(call.func) == "torch.where"
    return where and all(isinstance(a, numbers) for a in call.args[1:])


def test_every_tensor_has_a_stated_dtype_and_device() -> None:
    found = {
        name: rest
        for name, module in modules(PACKAGE).items()
        if (rest := {*unstated(module.tree)} ^ ALLOWED.get(name, set()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "torch.zeros(3)", "torch.zeros(3, dtype=torch.int8)", "torch.arange(3, device=d)",
        "make(torch.empty)", "torch.where(x > 0, 1.0, -1.0)", "nn.Linear(1, 1, device='meta')",
        "torch.get_default_dtype()", "torch.Tensor()",
    ],
)  # fmt: skip
def test_what_is_left_to_a_default_is_seen(text: str) -> None:
    assert [*unstated(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "torch.zeros(3, dtype=t, device=d)",
        "x.new_zeros(3)",
        "torch.where(a, x, 0.0)",
        "x: torch.Tensor",
    ],
)
def test_what_is_stated_passes(text: str) -> None:
    assert [*unstated(ast.parse(text))] == []
