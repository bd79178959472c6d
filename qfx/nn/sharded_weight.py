"""FSDP's hooks for a quantized weight: the ranks exchange codes, never floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.host.subclasses import keeping_version
from qfx.nn.frozen import Frozen
from qfx.ops.storage import Values, packed_values, values_of
from qfx.values.scheme import Scheme


class ShardedWeight:
    """The rows of a quantized weight that one rank holds, with the methods that `fully_shard`
    calls."""

    scheme: Scheme

    @property
    def frozen(self) -> Frozen:
        """The packed rows and the tensors that the input is quantized with."""
        raise NotImplementedError

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the packed rows of this rank, the same number on every rank, and the metadata
        that all ranks share."""
        refuse_padding(mesh, outer_size)
        return (self.frozen.packed,), (self.frozen[1:], tuple(outer_size))

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """Returns the whole weight, assembled from the packed rows of all ranks. If `out` is given,
        which is so from the second call on, copies the weight into `out` and returns None."""
        parts = outputs[0].reshape(-1, self.frozen.packed.numel())
        beside, size = metadata
        frozen = Frozen(_joined(parts, self.scheme, (size[0] // len(parts), size[1])), *beside)
        if out is not None:
            with keeping_version(out.packed):  # backward may have saved it before it was freed
                out.packed.copy_(frozen.packed)
            return None
        frozen = frozen._replace(packed=frozen.packed.clone())  # memory that FSDP can free
        whole = type(self).holding(frozen, self.scheme, size, param_dtype)  # type: ignore
        return whole, (frozen.packed,)


def refuse_padding(mesh: Any, size: Any) -> None:
    """Raises ValueError, on every rank, if the rows of the weight [N, K] are not a multiple of the
    ranks, so that FSDP would pad them."""
    ranks = mesh.size()
    if size[0] % ranks:
        raise ValueError(
            f"FSDP: the {size[0]} rows of a quantized weight are no multiple of {ranks} ranks; "
            "leave it out (fully_shard(ignored_params=...)) or float (qfx.Config(skip=[...]))"
        )


def _joined(parts: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """Joins packed weights of this shape into one packed weight with the rows of all of them."""
    each = [values_of(part, scheme.w, scheme.group, *shape) for part in parts]
    values = [None if v[0] is None else torch.cat(v) for v in zip(*each, strict=True)]
    return packed_values(Values(*values), scheme.w, scheme.group)  # type: ignore[no-any-return]
