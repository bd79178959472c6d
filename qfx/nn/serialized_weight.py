"""The tensors of a quantized weight as they are saved, in a layout that does not depend on the
processor.

Low-bit codes (4 and 5 bits) are saved as a stream of bits for each row, u = code + 2^(bits - 1),
the first k in the lowest bits: eight codes take `bits` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.nn.state_checks import Kind
from qfx.ops.lowbit_packing import half_type_of
from qfx.ops.storage import Values, scale_shape
from qfx.values.scheme import PACKED_BITS, Scheme

SAVED = ("codes", "scale", "zero_point", "minimum")
_TOGETHER = 8  # codes that take a whole number of bytes
_AT_ONCE = 2**18  # elements that are converted at once


def stream_bytes(k: int, bits: int) -> int:
    return -(-k // _TOGETHER) * bits


def code_shapes(n: int, k: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes that the saved codes of a weight [N, K] may have."""
    return ((n, k), *((n, stream_bytes(k, bits)) for bits in PACKED_BITS))


def stream_of(codes: Tensor, bits: int) -> Tensor:
    """Packs codes int8 [N, K] into a stream of bits uint8 [N, stream_bytes]."""
    n, k = codes.shape
    stream = codes.new_empty((n, stream_bytes(k, bits)), dtype=torch.uint8)
    for here, to in _some_rows(codes, stream):
        u = F.pad(here.long() + (1 << (bits - 1)), (0, -k % _TOGETHER))
        u = u.reshape(len(here), to.shape[1] // bits, _TOGETHER)
        words = (u << bits * _numbers(_TOGETHER, u)).sum(-1, keepdim=True)
        parts = words >> 8 * _numbers(bits, u) & 255
        to.copy_(parts.reshape(to.shape))
    return stream


def codes_of_stream(stream: Tensor, bits: int, k: int) -> Tensor:
    """Unpacks the stream of `stream_of` into codes int8 [N, K]."""
    codes = stream.new_empty((stream.shape[0], k), dtype=torch.int8)
    for here, to in _some_rows(stream, codes):
        parts = here.long().reshape(len(here), here.shape[1] // bits, bits)
        words = (parts << 8 * _numbers(bits, parts)).sum(-1, keepdim=True)
        u = words >> bits * _numbers(_TOGETHER, parts) & (1 << bits) - 1
        to.copy_((u - (1 << (bits - 1))).flatten(1)[:, :k])
    return codes


def _numbers(count: int, like: Tensor) -> Tensor:
    """Returns 0, 1, ..: int64 [count] on the device of `like`."""
    return torch.arange(count, dtype=torch.int64, device=like.device)


def _some_rows(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some rows of both tensors at a time, so few that temporary tensors take little
    memory."""
    step = max(1, _AT_ONCE // max(a.shape[1], b.shape[1], 1))
    return zip(a.split(step), b.split(step), strict=True)


def saved_kinds(
    scheme: Scheme, n: int, k: int, minimum: bool, half: torch.dtype
) -> dict[str, Kind]:
    """Returns the dtype and shape of each saved tensor, by name."""
    w, of_scales = scheme.w, scale_shape(scheme.w, scheme.group, n, k)
    if not w.packed:
        zeros: dict[str, Kind] = {} if w.symmetric else {"zero_point": (torch.int32, of_scales)}
        return {"codes": (torch.int8, (n, k)), "scale": (torch.float32, of_scales), **zeros}
    found: dict[str, Kind] = {
        "codes": (torch.uint8, (n, stream_bytes(k, w.bits))),
        "scale": (half, of_scales),
    }
    if minimum:
        found["minimum"] = (half, of_scales)
    elif not w.symmetric:
        found["zero_point"] = (torch.int8, of_scales)
    return found


def saved_values(values: Values, scheme: Scheme) -> dict[str, Tensor]:
    """Returns the tensors that are saved for the codes and scales of a weight, by name."""
    if not scheme.w.packed:
        found = {"codes": values.codes, "scale": values.scale, "zero_point": values.zero_point}
        return {name: t.contiguous() for name, t in found.items() if t is not None}
    return {"codes": stream_of(values.codes, scheme.w.bits), **saved_scales(values)}


def saved_scales(values: Values) -> dict[str, Tensor]:
    """Returns the tensors that are saved for a low-bit weight, other than its codes, by name."""
    _, scale, zero, minimum = values
    known = has_values(scale)  # False on the meta device
    with_minimum = minimum is not None and known and bool((minimum != 0).any())
    half = half_type_of(scale, minimum if with_minimum else None) if known else torch.bfloat16
    if minimum is not None and with_minimum:
        return {"scale": scale.to(half), "minimum": minimum.to(half)}
    return {"scale": scale.to(half)} | ({} if zero is None else {"zero_point": zero.to(torch.int8)})


def loaded_values(tensors: Mapping[str, Tensor], scheme: Scheme, k: int) -> Values:
    """Returns the values of a weight from saved tensors that were checked; the inverse of
    `saved_values`."""
    codes, w = tensors["codes"], scheme.w
    if w.packed:
        codes = codes_of_stream(codes, w.bits, k)
    return Values(codes, *[tensors.get(name) for name in SAVED[1:]])
