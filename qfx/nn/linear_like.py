"""Recognizes modules that compute the same as nn.Linear or nn.Embedding, also those of
transformers, and the sizes of these and of convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qfx.nn.conv_like import CONVOLUTIONS, conv_sizes
from qfx.nn.weight_faults import unserved_weight

# Named by module and class, because this file does not import transformers. Subclasses are not
# included: they may compute something else.
_SAME = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}
_TRANSPOSED = {("transformers.pytorch_utils", "Conv1D")}  # used by GPT-2; its weight is [K, N]
# Several models of transformers define such a class: it multiplies the embedding by a number.
_SCALED = ("transformers.models.", "ScaledWordEmbedding")


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight of `module` is [K, N] instead of [N, K]."""
    return _name_of(module) in _TRANSPOSED


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is exactly an nn.Linear, or one of the equivalent modules listed above."""
    return type(module) is nn.Linear or _name_of(module) in _SAME | _TRANSPOSED


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Returns K and N as the attributes of `module` state them, of a convolution those of the
    linear of its windows."""
    if isinstance(module, CONVOLUTIONS):
        return conv_sizes(module)
    names = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    if isinstance(module, nn.Embedding):
        names = ("embedding_dim", "num_embeddings")
    k, n = (getattr(module, name) for name in names)
    return k, n


def as_linear(module: nn.Module) -> nn.Linear:
    """Returns `module` as an nn.Linear. A module with a weight [K, N] becomes a new nn.Linear with
    the transposed weight, which is a view of the same memory, with the same bias parameter, and
    with the attribute `floats_are_transposed` set to True. Every other linear, and an embedding, is
    returned itself."""
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
    """Whether `module` is exactly an nn.Embedding, or one of the scaled embeddings of
    transformers."""
    return type(module) is nn.Embedding or _is_scaled(module)


def embed_scale_of(module: nn.Module) -> float | Tensor | None:
    """Returns the number that multiplies the rows, or None. It is a tensor if the module stores a
    tensor, which is rounded to the dtype of the rows before the multiplication."""
    scale: Any = getattr(module, "embed_scale", None)
    if not isinstance(scale, Tensor) or not scale.is_meta:
        return scale  # type: ignore[no-any-return]
    return scale.new_tensor(module.scalar_embed_scale, device="cpu")


def why_no_codes(module: nn.Embedding) -> str:
    """Returns why this embedding stays float; '' if `qfx.nn.Embedding` can replace it."""
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
