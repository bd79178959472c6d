"""Modules that compute what an nn.Linear or an nn.Embedding does, those of transformers too."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qfx.nn.weight_faults import unserved_weight

# By module and name, since nothing here imports transformers; a subclass may compute otherwise.
_SAME = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}
_TRANSPOSED = {("transformers.pytorch_utils", "Conv1D")}  # GPT-2's, whose weight is [K, N]
# transformers repeats in its models a class that multiplies what it looks up by a number.
_SCALED = ("transformers.models.", "ScaledWordEmbedding")


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is [K, N], not [N, K]."""
    return _name_of(module) in _TRANSPOSED


def is_linear(module: nn.Module) -> bool:
    """Whether it is exactly an nn.Linear, or one of these modules."""
    return type(module) is nn.Linear or _name_of(module) in _SAME | _TRANSPOSED


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """K and N, as its attributes say them."""
    names = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    if isinstance(module, nn.Embedding):
        names = ("embedding_dim", "num_embeddings")
    k, n = (getattr(module, name) for name in names)
    return k, n


def as_linear(module: nn.Module) -> nn.Linear:
    """The module itself, an embedding too; of one whose weight is [K, N], an nn.Linear with its
    weight transposed, a view of the same memory, and its very bias, and which says so:
    `floats_are_transposed`."""
    if not is_transposed(module):
        assert isinstance(module, nn.Linear | nn.Embedding)
        return module  # type: ignore[return-value]
    k, n = sizes_of(module)
    linear = nn.utils.skip_init(nn.Linear, k, n, bias=False, device="meta")
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    linear.bias = module.bias  # type: ignore[assignment]
    linear.floats_are_transposed = True  # type: ignore[assignment]
    return linear.train(module.training)


def is_embedding(module: nn.Module) -> bool:
    """Whether it is exactly an nn.Embedding, or one of these classes."""
    return type(module) is nn.Embedding or _is_scaled(module)


def embed_scale_of(module: nn.Module) -> float | Tensor | None:
    """The number that multiplies the rows: a tensor where it is first rounded to their type, which
    is how the module has it."""
    held: Any = getattr(module, "embed_scale", None)
    if not isinstance(held, Tensor) or not held.is_meta:
        return held  # type: ignore[no-any-return]
    return held.new_tensor(module.scalar_embed_scale, device="cpu")


def why_no_codes(module: nn.Embedding) -> str:
    """Why this embedding stays float; '' where `qfx.nn.Embedding` can take its place."""
    if not is_embedding(module):
        return f"{type(module).__name__}, a subclass of nn.Embedding"
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} writes to the rows that are looked up"
    for name in ("sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            return f"{name}=True says how its weight trains, and codes do not train"
    return unserved_weight(module._parameters.get("weight"))


def _is_scaled(module: nn.Module) -> bool:
    begin, end = _SCALED
    kind = type(module)
    named = kind.__module__.startswith(begin) and kind.__qualname__.endswith(end)
    return named and {*module._parameters} == {"weight"}


def _name_of(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__
