"""Modules of transformers that compute what an nn.Linear does, and the nn.Linear that says it."""

from __future__ import annotations

from torch import nn

# By module and name, since nothing here imports transformers; a subclass may compute otherwise.
_SAME = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}
_TRANSPOSED = {("transformers.pytorch_utils", "Conv1D")}  # GPT-2's, whose weight is [K, N]


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is [K, N], not [N, K]."""
    return _name_of(module) in _TRANSPOSED


def is_linear(module: nn.Module) -> bool:
    """Whether it is exactly an nn.Linear, or one of these modules."""
    return type(module) is nn.Linear or _name_of(module) in _SAME | _TRANSPOSED


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """K and N, as its attributes say them."""
    names = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    k, n = (getattr(module, name) for name in names)
    return k, n


def as_linear(module: nn.Module) -> nn.Linear:
    """The module itself; of one whose weight is [K, N], an nn.Linear with its weight transposed, a
    view of the same memory, and its very bias."""
    if not is_transposed(module):
        assert isinstance(module, nn.Linear)
        return module
    k, n = sizes_of(module)
    linear = nn.utils.skip_init(nn.Linear, k, n, bias=False, device="meta")
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    linear.bias = module.bias  # type: ignore[assignment]
    return linear.train(module.training)


def _name_of(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__
