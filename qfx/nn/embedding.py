"""Embedding: a table of int8 codes whose rows are returned as floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfx.nn.dtypes import casting_all_but
from qfx.nn.embedding_weight import EmbeddingWeight
from qfx.nn.linear_like import embed_scale_of
from qfx.nn.loading import StoredModule, placed
from qfx.nn.scheme_tensor import KEY, fields_of, read, written
from qfx.nn.state_checks import Kind, State, check_parts, check_positive, check_range
from qfx.ops.code import code_of
from qfx.values.scheme import Scheme

ops = torch.ops.qfx
TABLE = Scheme(x=None)  # a row is quantized like a row of a linear's weight
_ZERO = 128  # added to the codes in memory, because programs read unsigned bytes
_CODES = "row_codes"


class EmbeddingState(NamedTuple):
    """The tensors of an Embedding that a state dict contains, checked, without the scheme; and the
    dtype of the rows that the module returns."""

    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    token: str = str(TABLE)


class Embedding(StoredModule, nn.Embedding):
    """Rows [.., D] of a table [V, D], looked up by ids [..]: the codes of a row times its scale, in
    the dtype of the float table. (Q1) (Q3) (Q5)

    It is an nn.Embedding for isinstance, but has no parameter `weight` and does not train. The
    state_dict contains `row_codes` int8 [V, D], `scale` float32 [V] and `scheme` int32 [32], which
    also states the dtype of the rows. Loading checks everything first and raises ValueError if it
    does not fit. Casting the module casts the rows that it returns, not the tensors that it stores.

        embedding = qfx.nn.Embedding.from_float(torch.nn.Embedding(1000, 64))

    `embed_scale` multiplies the rows, if it exists, as in the scaled embeddings of transformers. It
    is not part of the state_dict, as there.
    """

    PARTS = (KEY, _CODES, "scale")
    READ_ONLY = ("packed", "scale", "like")
    UNSAVED = ("packed", "like")
    bias: Any = None
    # Attributes of an nn.Embedding, with the values that do not change its weight or gradient.
    max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False
    packed: Tensor  # uint8 [V, D], the codes + 128
    scale: Tensor
    like: Tensor  # has no elements, only the dtype of the rows; casting the module casts it too

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialises the table like nn.Embedding; mostly used before a state_dict is loaded.
        `dtype`: the dtype of the rows, float32 by default."""
        nn.Module.__init__(self)
        shape = (num_embeddings, embedding_dim)
        drawn = nn.Embedding(*shape, padding_idx, dtype=torch.float32, device=device)
        self._take(drawn if dtype is None else drawn.to(dtype))

    @classmethod
    def from_float(cls, embedding: nn.Module, weight: Tensor | None = None) -> Embedding:
        """Quantizes the weight [V, D] of `embedding`, or `weight` instead. The rows have the dtype
        of the weight of `embedding`."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(embedding, weight)
        module.train(embedding.training)
        return module

    @classmethod
    def from_state(cls, linear: nn.Module, found: EmbeddingState) -> Embedding:
        """Implements `StoredModule.from_state`; `linear` is an embedding."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        codes, scale = (found.tensors[name].detach() for name in cls.PARTS[1:])
        module._hold(linear, _unsigned(codes), scale, found.dtype)
        module.train(linear.training)
        return module

    def _take(self, embedding: Any, weight: Tensor | None = None) -> None:
        codes, scale = _codes_of(embedding.weight if weight is None else weight)
        self._hold(embedding, _unsigned(codes), scale, embedding.weight.dtype)

    def _hold(self, of: Any, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.num_embeddings, self.embedding_dim = of.weight.shape
        self.padding_idx = getattr(of, "padding_idx", None)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale)
        self.register_buffer("like", scale.new_empty(0, dtype=dtype), persistent=False)
        number = embed_scale_of(of)
        if isinstance(number, Tensor):
            self.register_buffer("embed_scale", number.to(scale.device), persistent=False)
        elif number is not None:
            self.embed_scale = number

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """D, the number of elements of a row."""
        return self.embedding_dim

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """V, the number of rows."""
        return self.num_embeddings

    @property
    def scheme(self) -> Scheme:
        """The scheme by which each row of the table is quantized."""
        return TABLE

    @property
    def token(self) -> str:
        """The scheme as a string."""
        return str(TABLE)

    @property
    def row_codes(self) -> Tensor:
        """The int8 codes [V, D] of the table."""
        return (self.packed ^ _ZERO).view(torch.int8)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The table [V, D] in the dtype of the rows, created at each access. (Q5)

        Rows that are written to it, or to its `data`, for example by merging an adapter, are
        quantized again. Raises ValueError for a table of another shape.
        """
        if torch.compiler.is_compiling():
            return self.floats()
        return EmbeddingWeight(self, self.packed.shape, self.like.dtype)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        own = isinstance(value, EmbeddingWeight) and value.table is self
        if not own:  # `weight += d` writes in place first, and then assigns the same weight
            self.store(value)

    def floats(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the table [V, D] as a new tensor, in the dtype of the rows or in `dtype`. (Q5)"""
        return _floats(self.packed, self.scale[:, None]).to(dtype or self.like.dtype)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Returns the rows [.., D] of ids [..], without `embed_scale`. (Q5)"""
        codes, scale = F.embedding(ids, self.packed), F.embedding(ids, self.scale[:, None])
        return _floats(codes, scale).to(self.like.dtype)

    @torch.no_grad()
    def store(self, value: Tensor) -> None:
        """Writes the float table `value` [V, D]: quantizes the rows that differ from the present
        ones, and leaves the codes of the other rows. Equations (Q1) (Q3). Raises ValueError for
        another shape."""
        if value.shape != self.packed.shape:
            raise ValueError(
                f"Embedding: a weight {list(value.shape)} is written to int8 codes "
                f"{list(self.packed.shape)}, which keep their size: resize the float model, and "
                "quantize it then"
            )
        codes, scale = _codes_of(value)
        changed = (value != self.floats(value.dtype)).any(1)
        self.scale.copy_(torch.where(changed, scale, self.scale))
        self.packed.copy_(torch.where(changed[:, None], _unsigned(codes), self.packed))

    def reset_parameters(self) -> None:
        """Draws a new table like nn.Embedding; the row `padding_idx` is zero."""
        shape, device = (self.num_embeddings, self.embedding_dim), self.packed.device
        drawn = nn.Embedding(*shape, self.padding_idx, dtype=torch.float32, device=device)
        self.weight = drawn.weight.detach()

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Embedding
        """Maps ids [..] to rows [.., D]."""
        rows = self.looked_up(input)
        number: Any = getattr(self, "embed_scale", None)
        if number is None:
            return rows
        return rows * (number.to(rows.dtype) if isinstance(number, Tensor) else number)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, scheme={TABLE}"

    # --- saved codes are signed ---

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _CODES] = self.row_codes
        destination[prefix + KEY] = self.saved_scheme()

    def saved_scheme(self) -> Tensor:
        """Implements `StoredModule.saved_scheme`."""
        return _scheme_tensor(self.like.dtype)

    @classmethod
    def taken_from(cls, state: State, prefix: str, n: int, k: int) -> EmbeddingState | None:
        """Implements `StoredModule.taken_from`."""
        parts = {name: state[prefix + name] for name in cls.PARTS if prefix + name in state}
        if not parts:
            return None
        if KEY not in parts:
            raise ValueError(f"{prefix}{KEY} is missing, which says what the codes mean")
        scheme = parts.pop(KEY)
        wanted = cls.kinds(scheme, prefix + KEY, n, k)
        check_parts(parts, prefix, cls.PARTS[1:], wanted, f"{prefix}{KEY} says so")
        check_range(parts[_CODES], prefix + _CODES, -128, 127)
        check_positive(parts["scale"], f"{prefix}scale")
        return EmbeddingState(parts, read(scheme, prefix + KEY, "Embedding")["dtype"])

    @classmethod
    def shapes(cls, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Returns the shape of the codes: one byte for each element."""
        return ((n, k),)

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, n: int, k: int) -> dict[str, Kind]:
        """Implements `StoredModule.kinds`."""
        fields = read(scheme, name, "Embedding")
        if fields != read(_scheme_tensor(fields["dtype"]), name, "Embedding"):
            raise ValueError(f"{name} does not say what int8 embeddings say")
        return {_CODES: (torch.int8, (n, k)), "scale": (torch.float32, (n,))}

    def _put(self, found: EmbeddingState, assign: bool) -> None:
        codes = found.tensors[_CODES].detach()
        device = codes.device if assign else self.packed.device
        self.scale = placed(found.tensors["scale"], device, assign)  # type: ignore[assignment]
        self.packed = _unsigned(codes.to(device))
        dtype = found.dtype if assign else self.like.dtype
        self.like = self.scale.new_empty(0, dtype=dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(casting_all_but((self.packed, self.scale), fn), recurse)


def _codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a float table: returns its codes int8 [V, D] and the scale of each row, float32
    [V]. Equations (Q1) (Q3)."""
    codes, scale, _ = ops.quantize(weight.detach(), code_of(TABLE.w))
    return codes, scale[:, 0]


def _unsigned(codes: Tensor) -> Tensor:
    """Returns int8 codes + 128 as uint8, the form in which the module stores them."""
    return codes.view(torch.uint8) ^ _ZERO


def _floats(unsigned: Tensor, scale: Tensor) -> Tensor:
    """Returns the float32 values of stored codes `unsigned` [.., D] with the scales [.., 1] of
    their rows. Integers below 2^24 are exact in float32, so only the product is rounded. Equation
    (Q5)."""
    return (unsigned.to(torch.float32) - _ZERO) * scale


def _scheme_tensor(dtype: torch.dtype) -> Tensor:
    return written("Embedding", fields_of(TABLE) | {"dtype": dtype})
