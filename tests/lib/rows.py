"""The table of operator cases: correctness, opcheck and bit-exactness are tested on these rows, on
all of them in the long profile, otherwise on rows that cover every two of their properties."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from qfx.graph.activations import ACTIVATIONS
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.depthwise import stored_taps
from qfx.ops.experts import stack_packed
from qfx.ops.guard import relative_bound
from qfx.ops.header import MINIMUMS, NONE, ZERO_POINTS
from qfx.ops.kv_blocks import TOKENS
from qfx.ops.kv_cache import kv_empty
from qfx.ops.layout import Layout
from qfx.ops.recurrent import GRU_GATES, LSTM_GATES
from qfx.values.scheme import PER_ROW, PER_TENSOR
from tests.lib.pairs import covering, values

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8"}
SHORT[torch.float64] = "f64"


@dataclass(frozen=True)
class Row:
    """One operator on one problem. `leading` are the axes before K; the rest as in the schemas.

    `dtype` is that of x, or else of the bias; int8 makes `dequantize` take codes instead of sums.
    `group`: elements of K that share a scale of the weight, or heads of queries that share keys.
    `x_groups`: x also has a scale for each group. `w_rows`: the weight then has one scale per row.
    `w_bits`: bits of a stored code of the weight, if fewer than 8 in groups of 32 or `group`.
    `shift`: zero points or minimums of the weight. `given`: an argument of `quantize`: "scale" or
    "seed".
    """

    op: str
    leading: tuple[int, ...] = (5,)
    k: int = 19
    n: int = 33
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32
    axes: tuple[int, ...] = PER_ROW
    bits: int = 8
    symmetric: bool = False
    activation: str = "none"
    bias: bool = True
    factor: bool = False
    rotation: int = 0
    group: int = 0
    x_groups: bool = False
    w_rows: bool = False
    w_bits: int = 8
    shift: int = NONE
    given: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.leading, self.k, self.n)))
        kind = (
            f"{'s' if self.symmetric else 'a'}{self.bits}{'t' if self.axes == PER_TENSOR else 'r'}"
        )
        group = f"-g{self.group}" if self.group else ""
        group += f"{'-of-x' * self.x_groups}{'-w-rows' * self.w_rows}"
        weight = f"-w{self.w_bits}" if self.w_bits != 8 else ""
        weight += f"-shift{self.shift}" if self.shift else ""
        types = f"{SHORT[self.dtype]}-{SHORT[self.out_dtype]}"
        transform = f"{'-factor' * self.factor}{f'-h{self.rotation}' if self.rotation else ''}"
        bias, given = "-bias" * self.bias, f"-{self.given}" if self.given else ""
        return (
            f"{self.op}{given}-{shape}-{types}-{kind}-{self.activation}{bias}{group}{weight}"
            f"{transform}"
        )

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns random arguments of the operator, in schema order."""
        generator = torch.Generator().manual_seed(seed)
        return BUILDERS[self.op](self, generator)

    @property
    def layout(self) -> Layout:
        """The layout of the row's weight."""
        group = self.group or (32 if self.w_bits != 8 else 0)
        scale_group = 0 if self.w_rows else group
        return Layout(self.n, self.w_bits, group, scale_group, int(self.shift != NONE))

    @property
    def code(self) -> list[int]:
        """The quantization of the row's x."""
        group = self.layout.group if self.x_groups else 0
        per_tensor = int(self.axes == PER_TENSOR and not group)
        return list(Code(self.bits, int(self.symmetric), per_tensor, group, self.rotation))


def _codes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _x(row: Row, g: torch.Generator) -> Tensor:
    return torch.randn(*row.leading, row.k, generator=g).to(row.dtype)


def _factor(row: Row, g: torch.Generator) -> Tensor | None:
    return torch.exp(torch.randn(row.k, generator=g)) if row.factor else None


def _bias(row: Row, g: torch.Generator) -> Tensor | None:
    dtype = torch.float32 if row.dtype == torch.int8 else row.dtype
    return torch.randn(row.n, generator=g).to(dtype) if row.bias else None


def _weight(row: Row, g: torch.Generator) -> Tensor:
    if row.dtype == torch.int8:
        return _codes(g, row.n, row.k)
    return torch.randn(row.n, row.k, generator=g).to(row.dtype)


def _packed_bits(row: Row, g: torch.Generator) -> Tensor:
    return REFERENCES["binary_pack"](_weight(row, g))


def _scales(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g) * 0.02 + 0.001


def _scale_shape(row: Row) -> tuple[int, ...]:
    per_tensor = row.axes == PER_TENSOR
    return (1,) * (len(row.leading) + 1) if per_tensor else (*row.leading, 1)


def _zeros(row: Row, g: torch.Generator) -> Tensor:
    zeros = torch.randint(-128, 128, _scale_shape(row), generator=g, dtype=torch.int32)
    return zeros * 0 if row.symmetric else zeros


def _dequantize(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes int32 sums with column scales (E1), or int8 codes without (Q5)."""
    shape = (*row.leading, row.n)
    zero_point = None if row.symmetric else _zeros(row, g)
    tail = (_bias(row, g), row.activation, row.out_dtype)
    if row.dtype == torch.int8:
        return (_codes(g, *shape), _scales(g, *_scale_shape(row)), zero_point, None, *tail)
    acc = torch.randint(-(2**20), 2**20, shape, generator=g, dtype=torch.int32)
    col_scale = _scales(g, row.n) * 0.01
    return (acc, _scales(g, *_scale_shape(row)), zero_point, col_scale, *tail)


def _few_bits(row: Row, g: torch.Generator, *shape: int) -> Tensor:
    half = 1 << (row.w_bits - 1)
    return torch.randint(-half, half, shape, generator=g)


def _parts(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes arguments of pack_weight; for low bits, scales and minimums of half precision."""
    layout = row.layout
    each = (row.n, layout.scales(row.k))
    codes, scale = _few_bits(row, g, row.n, row.k).char(), _scales(g, *each)
    scale = scale.bfloat16().float() if layout.low_bit else scale
    zero = _few_bits(row, g, *each).int() if row.shift == ZERO_POINTS else None
    minimum = -scale * 8 if row.shift == MINIMUMS else None
    return codes, scale, zero, minimum, row.w_bits, layout.group


def _packed(row: Row, g: torch.Generator) -> tuple[Tensor, list[int]]:
    """Makes a packed weight and its layout."""
    return REFERENCES["pack_weight"](*_parts(row, g)), list(row.layout)


def _of_rows(row: Row, g: torch.Generator) -> Tensor:
    """Makes a packed weight with one scale for each row."""
    return _packed(replace(row, group=0, w_bits=8, shift=NONE), g)[0]


def _q(row: Row, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Makes codes of x with their scales and zero points."""
    q = _codes(g, *row.leading, row.k)
    if not row.x_groups:
        return q, _scales(g, *_scale_shape(row)), _zeros(row, g)
    scale = _scales(g, *row.leading, -(-row.k // row.layout.group))
    return q, scale, _codes(g, *scale.shape).int() * (not row.symmetric)


def _tail(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    return _bias(row, g), row.activation, row.out_dtype


def _linear(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    return (*_q(row, g), *_packed(row, g), *_tail(row, g))


def _dynamic(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    operands, bias = (_x(row, g), *_packed(row, g)), _bias(row, g)
    return (*operands, bias, row.code, row.activation, row.out_dtype, _factor(row, g))


def _several(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes several weights of different sizes, some without a bias, one in low bits."""
    x, few = _x(row, g), {} if row.x_groups else {"w_bits": 4, "group": 32, "shift": MINIMUMS}
    rows = (row, replace(row, n=row.n + 3, bias=False), replace(row, n=row.n // 2 + 1, **few))  # type: ignore[arg-type]
    packed = [_packed(each, g) for each in rows]
    layouts = [number for _, layout in packed for number in layout]
    biases = [_bias(each, g) for each in rows]
    activations = [row.activation, "relu", "none"]
    end = (row.code, activations, row.out_dtype, _factor(row, g))
    return (x, [weight for weight, _ in packed], layouts, biases, *end)


EXPERTS = 4


def _stack(row: Row, g: torch.Generator, bias: bool = True) -> tuple[Any, ...]:
    """Makes packed weights of several experts, their layout, and their biases."""
    packed = stack_packed((_packed(row, g)[0] for _ in range(EXPERTS)), EXPERTS)
    biases = torch.randn(EXPERTS, row.n, generator=g).to(row.dtype) if row.bias and bias else None
    return packed, list(row.layout), biases


def _sorted_rows(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes rows sorted by expert: the second has none, and some rows belong to no expert; with
    several leading axes most of them."""
    x = torch.randn(math.prod(row.leading), row.k, generator=g).to(row.dtype)
    (packed, layout, bias), rows = _stack(row, g), x.shape[0]
    ends = torch.tensor([rows // 3, rows // 3, rows - rows // 4, rows - rows // 8])
    ends = ends.clamp(max=2**31 - 1 if len(row.leading) < 2 else 7)
    end = (bias, row.code, row.activation, row.out_dtype, _factor(row, g))
    return (x, packed, layout, ends.int(), *end)


def _sorted_ste(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes rows sorted by expert and their codes. Weights train if n is odd and they have one
    scale for each row; otherwise they are packed."""
    x, packed, layout, ends, _, code, *_ = _sorted_rows(row, g)
    codes, w = list(REFERENCES["quantize"](x, code)), None
    if row.n % 2 and row.layout.one_scale:
        w = torch.randn(EXPERTS, row.n, row.k, generator=g).to(row.dtype)
    weights = (w, codes, packed if w is None else None, layout)
    return (x, *weights, ends, [*code, 8, 0], None, row.out_dtype)


def _sorted_backward(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes a gradient of sorted rows. Weights that train have an int8 backward if codes of x are
    symmetric."""
    x, w, *between, _, out_dtype = _sorted_ste(row, g)
    grad = torch.randn(x.shape[0], row.n, generator=g).to(out_dtype)
    seed = _seed(g) if w is not None and row.symmetric else None
    end = (seed, _factor(row, g), row.k, row.dtype, [True, w is not None, True])
    return (grad, w, *between, *end)


def _experts(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes a block whose hidden size is the row's n, as is that of the output: with a gate whose
    kind depends on n. One of the experts that tokens go to does not exist."""
    tokens = math.prod(row.leading)
    gate = ("none", "halves", "interleaved")[row.n % 3]
    x = torch.randn(tokens, row.k, generator=g).to(row.dtype)
    expert = torch.randint(EXPERTS + 1, (tokens, 2), generator=g)
    routing = torch.rand(tokens, 2, generator=g).to(row.dtype)
    up = _stack(replace(row, n=row.n if gate == "none" else 2 * row.n), g)
    down = _stack(replace(row, k=row.n), g)
    inner = [*row.code[:2], 0, *row.code[3:4], row.rotation]
    clip = (0.5, 1.0) if gate == "interleaved" else (0.0, 0.0)
    end = (row.code, inner, row.activation, gate, row.out_dtype, *clip)
    return (x, expert, routing, *up, *down, *end)


def _experts_backward(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    x, *between, out_dtype, limit, shift = _experts(row, g)
    grad, code = torch.randn(x.shape[0], row.n, generator=g).to(out_dtype), between[8]
    codes = list(REFERENCES["quantize"](x, code))
    return (grad, codes, *between, limit, shift, row.dtype, [True] * 4)


def _window(row: Row) -> tuple[list[int], ...]:
    """Returns a kernel with as many outputs as inputs, of 3 taps if the row's k allows it, its
    stride, padding and dilation."""
    taps = 3 if row.k % 3 == 0 else 1
    return [taps], [1], [taps // 2] * 2, [1]


def _image(row: Row, g: torch.Generator) -> Tensor:
    """Makes an image [B, C, L] with a window for each row of x."""
    (taps,), batch = _window(row)[0], math.prod(row.leading[:-1])
    length = row.leading[-1] if row.leading else 1
    return torch.randn(batch, row.k // taps, length, generator=g).to(row.dtype)


def _conv(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    end = (*_window(row), row.code, row.activation, row.out_dtype, _factor(row, g))
    image, outputs = _image(row, g), (math.prod(row.leading[:-1]), *row.leading[-1:], row.n)
    residual = None if row.n % 2 else torch.randn(outputs, generator=g).to(row.out_dtype)
    return (image, *_packed(row, g), _bias(row, g), *end, residual)


def _depthwise(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes an image of n channels with an output for each pixel, and kernels of up to 8 taps."""
    taps, length = row.k % 8 or 1, row.leading[-1] if row.leading else 1
    x = torch.randn(math.prod(row.leading[:-1]), row.n, length, generator=g).to(row.dtype)
    codes = torch.randint(-127, 128, (row.n, taps), generator=g).to(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, stored_taps(taps) - taps))
    packed = torch.ops.qfx.pack_weight.default(codes, torch.rand(row.n, generator=g))
    window = ([taps], [1], [taps // 2, (taps - 1) // 2], [1])
    code = list(Code(row.bits, int(row.symmetric)))
    end = (*window, code, row.activation, row.out_dtype)
    return (x, packed, list(Layout(row.n)), _bias(row, g), *end)


def _im2col_backward(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    grad, image = _x(row, g), _image(row, g)
    rows = (image.shape[0], image.shape[2], row.k)
    return (grad.reshape(rows), list(image.shape), *_window(row))


def _recurrent(row: Row, g: torch.Generator, gates: int) -> tuple[Any, ...]:
    """Makes three steps, whose state has k columns, from the last to the first if n is even; with
    two leading axes the steps of a packed sequence."""
    batch, k, types = math.prod(row.leading), row.k, (row.dtype, row.out_dtype)
    packed = replace(row, n=gates * k)
    h, c = (torch.randn(batch, k, generator=g).to(t) for t in types[::-1])
    sizes = torch.tensor([batch, batch // 2, batch // 3]) if len(row.leading) == 2 else None
    rows = (3, batch) if sizes is None else (int(sizes.sum()),)
    x = 2 * torch.randn(*rows, gates * k, generator=g).to(row.dtype)
    states = (h, c) if gates == LSTM_GATES else (h,)
    operands = (x, *_packed(packed, g), _bias(packed, g), *states)
    return (*operands, row.code, row.n % 2 == 0, row.out_dtype, sizes)


def _recurrent_backward(row: Row, g: torch.Generator, gates: int) -> tuple[Any, ...]:
    x, *weight, code, reverse, dtype, sizes = _recurrent(row, g, gates)
    states = weight[3:]
    y = torch.randn(*x.shape[:-1], row.k, generator=g).to(dtype)
    grads = (torch.randn(t.shape, generator=g).to(dtype) for t in (y, *states))
    return (*grads, x, *weight, y, code, reverse, sizes)


def _recurrent_float(row: Row, g: torch.Generator, gates: int) -> tuple[Any, ...]:
    batch, k = math.prod(row.leading), row.k
    x, w = torch.randn(3, batch, gates * k, generator=g), torch.randn(gates * k, k, generator=g)
    states = torch.randn(gates - 2, batch, k, generator=g).to(row.dtype).unbind()
    bias = _bias(replace(row, n=gates * k), g)
    return (x.to(row.dtype), w.to(row.dtype), bias, *states, row.n % 2 == 0)


def _float(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    return (_x(row, g), *_packed(row, g), *_tail(row, g))


def _unpack(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    return (*_packed(row, g), row.k)


def _cut(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Cuts off the first third: of the rows, or of the columns at a group or block."""
    layout, dim = row.layout, int(row.symmetric)
    step = (layout.group or row.rotation or 1) if dim else 1
    size = row.k if dim else row.n
    begin = min(-(-size // 3 // step) * step, size)
    return (*_unpack(row, g), dim, begin, size, 0)


def _ste(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    carriers = (_x(row, g), None, _bias(row, g), None, None)
    operands = (*carriers, list(_q(row, g)), *_packed(row, g))
    return (*operands, [*row.code, 8, 0], None, row.out_dtype, _factor(row, g))


def _frozen(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    grad = torch.randn(math.prod(row.leading), row.n, generator=g).to(row.dtype)
    return (grad, *_packed(row, g), row.k, _seed(g), row.out_dtype)


def _quantize(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    if row.given == "scale":
        return _static(row, g)
    if row.given == "seed":
        return (_x(row, g), row.code, None, None, _seed(g), _factor(row, g))
    return (_x(row, g), row.code, None, None, None, _factor(row, g))


def _seed(g: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (1,), generator=g)


def _static(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    per_tensor = row.axes == PER_TENSOR
    scale = _scales(g, 1) if per_tensor else _scales(g, *row.leading, 1)
    zero_point = None if row.symmetric else torch.tensor([3], dtype=torch.int32)
    return (_x(row, g), row.code, scale, zero_point, None, _factor(row, g))


def _matrices(g: torch.Generator, row: Row, rows: int, dtype: torch.dtype) -> Tensor:
    """Makes a batch [*leading[:-1], rows, k] of operand b, whose rows are not contiguous."""
    shape = (*row.leading[:-1], row.k, rows)
    if dtype == torch.int8:
        return _codes(g, *shape).mT
    return torch.randn(*shape, generator=g).to(dtype).mT


def _a_rows(row: Row) -> Row:
    """Gives operand a of a batched product at least two axes."""
    return row if row.leading else replace(row, leading=(1,))


def _bmm(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    row = _a_rows(row)
    a = (_codes(g, *row.leading, row.k), _zeros(row, g))
    return (*a, _matrices(g, row, row.n, torch.int8))


def _bmm_dynamic(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    row = _a_rows(row)
    b = _matrices(g, row, row.n, row.dtype)
    return (_x(row, g), b, list(row.axes), row.bits, row.symmetric, 8, row.out_dtype)


def _requantize(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    *operands, bias, activation, _ = _linear(row, g)
    zero_point = None if row.symmetric else torch.tensor([3], dtype=torch.int32)
    out_scale = _scales(g, 1) * row.k  # makes some codes saturate, but not most
    return (*operands, bias, activation, out_scale, zero_point, row.code)


def _attention(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes operands with leading axes [*B, M], K features, and N keys that `group` heads share."""
    row = _a_rows(row)
    batch = row.leading[:-1]
    q = _x(row, g)
    k, v = (_matrices(g, row, row.n, row.dtype).contiguous() for _ in range(2))
    if row.group and batch:
        k, v = (t[..., :: row.group, :, :] for t in (k, v))
    hidden = torch.arange(row.n) % 5 == 3  # hidden from all rows
    mask = torch.randn(row.n, generator=g).masked_fill(hidden, -math.inf) if row.bias else None
    if not row.symmetric and mask is not None:
        mask = torch.rand(*batch, row.leading[-1], row.n, generator=g) < 0.7
    return (q, k, v, mask, row.k**-0.5 if row.k else 1.0, row.bits < 8, row.out_dtype)


def _attention_backward(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    *operands, dtype = _attention(row, g)
    return (torch.randn(operands[0].shape, generator=g).to(dtype), *operands)


def _append(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes operands in which the last third of the keys is new."""
    q, k, v, *rest = _attention(row, g)
    parts = [part for t in (k, v) for part in t.tensor_split([row.n - row.n // 3], dim=-2)]
    return (q, *parts, *rest)


def _cache(row: Row, g: torch.Generator, room: int) -> tuple[Tensor, ...]:
    """Makes a cache of random codes, for the row's leading axes [B, H of queries, T]. With `bits` <
    8, keys have 4, and values too unless the row is symmetric. `group`: heads of queries. Scales
    are not negative, as (K1) says."""
    key_bits = 8 if row.bits == 8 or row.k % 2 else 4
    batch, heads, _ = _three(row)
    heads = heads // row.group if row.group and heads % row.group == 0 else heads
    value_bits = 8 if row.symmetric else key_bits
    empty = kv_empty(batch, heads, room, row.k, key_bits, value_bits)
    for t in empty:
        if t.is_floating_point():
            t.uniform_(-0.02, 0.02, generator=g)[..., 0].abs_()
        else:
            t.random_(generator=g)
    return empty


def _three(row: Row) -> tuple[int, int, int]:
    """Returns [B, H, T] of the leading axes."""
    leading = (1, 1, 1, *row.leading)
    return leading[-3], leading[-2], leading[-1]


def _tokens(row: Row, g: torch.Generator, heads: int) -> Tensor:
    """Makes tokens [B, heads, T, D], with heads adjacent in memory."""
    batch, _, t = _three(row)
    return torch.randn(batch, t, heads, row.k, generator=g).to(row.dtype).transpose(1, 2)


def _kv_write(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes T tokens and their places among N more."""
    tokens = _three(row)[2]
    cache = _cache(row, g, tokens + row.n)
    k, v = (_tokens(row, g, cache[0].shape[1]) for _ in range(2))
    places = torch.randperm(tokens + row.n, generator=g)[:tokens]
    if row.symmetric:  # each sequence has its own places, and some tokens have none
        places = torch.stack([(places + b).remainder(tokens + row.n) for b in range(len(k))])
        places[:, ::3] = -1
    return (*cache, k, v, places)


def _kv_copy_blocks(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    cache = _cache(row, g, row.n + 20)
    batch, room = len(cache[1]), cache[1].shape[2] // TOKENS
    sources = torch.randint(batch, (batch,), generator=g)
    return (*cache, sources, torch.randint(-1, room, (batch,), generator=g))


def _table(cache: tuple[Tensor, ...], row: Row, g: torch.Generator) -> tuple[Tensor, ...]:
    """Makes a block table for rows with a `group`."""
    batch, _, room, _ = cache[1].shape
    shape = (batch, room // TOKENS)
    return (torch.randint(batch, shape, generator=g, dtype=torch.int32),) if row.group else ()


def _kv_read(row: Row, g: torch.Generator, part: slice) -> tuple[Any, ...]:
    cache = _cache(row, g, row.n + 20)
    return (*cache[part], row.n, row.out_dtype, *_table(cache, row, g))


def _kv_attention(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes operands that read the first N tokens of a longer cache."""
    cache = _cache(row, g, row.n + 20)
    q = _tokens(row, g, _three(row)[1])
    hidden = torch.arange(row.n) % 5 == 3
    mask = torch.randn(row.n, generator=g).masked_fill(hidden, -math.inf) if row.bias else None
    if not row.symmetric and mask is not None:
        mask = torch.rand(*q.shape[:3], row.n, generator=g) < 0.7
    how = (row.k**-0.5 if row.k else 1.0, row.n, row.out_dtype)
    softcap = (1.5,) if row.group > 3 else ()
    return (q, *cache, mask, *how, *_table(cache, row, g), *softcap)


def _kv_write_pages(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes T tokens and their slots in pages of N tokens or more."""
    cache, count = _cache(row, g, row.n + 20), _three(row)[2]
    heads, room = cache[0].shape[1], cache[1].shape[0] * cache[1].shape[2]
    count = min(count, room)
    k, v = (torch.randn(count, heads, row.k, generator=g).to(row.dtype) for _ in range(2))
    slots = torch.randperm(room, generator=g)[:count]
    if row.symmetric:
        slots[::3] = -1
    return (*cache, k, v, slots)


def _kv_attention_pages(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Makes two texts, of which one has all its queries from T - 1 on, in twice as many pages as
    they take; the last query is of neither."""
    cache = _cache(row, g, 20)
    if len(cache[0]) == 0:
        cache = tuple(t.new_zeros((1, *t.shape[1:])) for t in cache)
    _, heads, count = _three(row)
    tokens = cache[1].shape[2]
    first = max(count - 2, 0)
    edges = torch.tensor([0, first, max(count - 1, 0)], dtype=torch.int32)
    lengths = torch.tensor([max(row.n, first), row.n // 2 + 1], dtype=torch.int32)
    used = -(-int(lengths.max()) // tokens)
    pages = torch.randint(len(cache[0]), (2, 2 * used), generator=g, dtype=torch.int32)
    q = torch.randn(count, heads, row.k, generator=g).to(row.dtype)
    window = 19 if row.bias else 0
    how = (row.k**-0.5 if row.k else 1.0, window, row.out_dtype)
    return (q, *cache, pages, edges, lengths, *how, *((1.5,) if row.group > 3 else ()))


def _guarded(row: Row, g: torch.Generator) -> tuple[Any, ...]:
    """Chooses a guard such that some rows are above it and some below, if there are several."""
    x, w = _x(row, g), torch.randn(row.n, row.k, generator=g).to(row.dtype)
    error = torch.tensor([1.01, 0.01])
    operands, factor = (*_packed(row, g), error, _bias(row, g)), _factor(row, g)
    bounds = relative_bound(x, error, row.code, factor)
    guard = max(0.999 * bounds.mean().item(), 1e-3) if len(bounds) else 0.02
    return (x, w, *operands, guard, "", row.code, row.activation, row.out_dtype, factor)


BUILDERS: dict[str, Callable[[Row, torch.Generator], tuple[Any, ...]]] = {
    "quantize": _quantize,
    "rotate": lambda r, g: (_x(r, g), _factor(r, g), r.rotation, r.symmetric),  # symmetric: back
    "fake_quantize": lambda r, g: (_x(r, g), list(r.axes), r.bits, r.symmetric, r.out_dtype),
    "dequantize": _dequantize,
    "pack_weight": _parts,
    "unpack_weight": _unpack,
    "weight_scale": lambda r, g: (_of_rows(r, g), r.n),
    "cut_weight": _cut,
    "int8_mm": lambda r, g: (_codes(g, *r.leading, r.k), _zeros(r, g), _of_rows(r, g), r.n),
    "int8_bmm": _bmm,
    "int8_bmm_dynamic": _bmm_dynamic,
    "int8_attention": _attention,
    "int8_attention_backward": _attention_backward,
    "attention_decode": _attention,
    "attention_append": _append,
    "kv_write": _kv_write,
    "kv_copy_blocks": _kv_copy_blocks,
    "kv_keys": lambda r, g: _kv_read(r, g, slice(0, 2)),
    "kv_values": lambda r, g: _kv_read(r, g, slice(2, 4)),
    "kv_attention": _kv_attention,
    "kv_write_pages": _kv_write_pages,
    "kv_attention_pages": _kv_attention_pages,
    "linear": _linear,
    "linear_dynamic": _dynamic,
    "linears": _several,
    "linear_experts": _sorted_rows,
    "linear_experts_ste": _sorted_ste,
    "linear_experts_backward": _sorted_backward,
    "experts": _experts,
    "experts_backward": _experts_backward,
    "im2col": lambda r, g: (_image(r, g), *_window(r)),
    "im2col_backward": _im2col_backward,
    "conv_dynamic": _conv,
    "conv_depthwise": _depthwise,
    "lstm": lambda r, g: _recurrent(r, g, LSTM_GATES),
    "lstm_backward": lambda r, g: _recurrent_backward(r, g, LSTM_GATES),
    "gru": lambda r, g: _recurrent(r, g, GRU_GATES),
    "lstm_float": lambda r, g: _recurrent_float(r, g, LSTM_GATES),
    "gru_float": lambda r, g: _recurrent_float(r, g, GRU_GATES),
    "gru_backward": lambda r, g: _recurrent_backward(r, g, GRU_GATES),
    "linear_float": _float,
    "linear_requantize": _requantize,
    "linear_ste": _ste,
    "frozen_gradient": _frozen,
    "linear_guarded": _guarded,
    "binary_pack": lambda r, g: (_weight(r, g),),
    "binary_mm": lambda r, g: (_x(r, g), _packed_bits(r, g), r.n),
    "binary_linear": lambda r, g: (
        _x(r, g),
        _packed_bits(r, g),
        _scales(g, r.n),
        _bias(r, g),
        r.activation,
        r.out_dtype,
    ),
}
_OF_ROWS: dict[str, Any] = {}
_SHIFTED: dict[str, Any] = {"shift": ZERO_POINTS}
_LOW_BIT: dict[str, Any] = {"w_bits": 4, "group": 32}
_LAYOUTS = (_OF_ROWS, _SHIFTED, _LOW_BIT)
_RECURRENT = ("lstm", "lstm_backward", "gru", "gru_backward")
# The variants of an operator: its rows are repeated for each of them.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        (
            "pack_weight",
            "unpack_weight",
            "linear",
            "linear_dynamic",
            "linears",
            "conv_dynamic",
            "linear_experts",
            "linear_experts_ste",
            "linear_experts_backward",
            "experts",
            "experts_backward",
            "linear_ste",
            "frozen_gradient",
            *_RECURRENT,
        ),
        _LAYOUTS,
    ),
    "cut_weight": (_OF_ROWS, _SHIFTED, _LOW_BIT, {**_LOW_BIT, "symmetric": True}),
    "linear_guarded": (_OF_ROWS, _SHIFTED),
    "linear_float": (_OF_ROWS, _LOW_BIT),
    "quantize": (
        {},
        {"given": "scale"},
        {"given": "seed", "symmetric": True},
        {"group": 32, "x_groups": True},
    ),
}


def _each(ops: Iterable[str], **fields: Any) -> list[Row]:
    """Makes rows for all legal variants of these operators: stochastic rounding excludes
    rotation."""
    found = [{**fields, **kind, "op": op} for op in ops for kind in VARIANTS.get(op, ({},))]
    return [Row(**made) for made in found if _is_one(made)]


def _is_one(fields: dict[str, Any]) -> bool:
    return not (fields.get("given") == "seed" and fields.get("rotation"))


_TRANSFORMED = (
    "rotate", "quantize", "linear_dynamic", "linears", "linear_experts",
    "linear_experts_ste", "linear_experts_backward", "linear_ste", "linear_guarded",
    "conv_dynamic",
)  # fmt: skip
_SHAPES = (
    {"leading": (1,), "k": 16, "n": 32},
    {"leading": (13,), "k": 65, "n": 31},
    {"leading": (25,), "k": 600, "n": 97},  # two blocks of K, two tile heights
    {"leading": (25,), "k": 1024, "n": 33},  # whole blocks of K
    {"leading": (2, 3), "k": 4, "n": 1},
    {"leading": (), "k": 7, "n": 5},
    {"leading": (0,), "k": 8, "n": 8},
    {"leading": (3,), "k": 0, "n": 8},
    {"leading": (3,), "k": 8, "n": 0},
    {"leading": (300,), "k": 33, "n": 40},  # more rows than a row block
)
_ARRANGING = (
    "int8_mm", "linear", "linear_dynamic", "linears", "linear_requantize", "linear_ste",
    "linear_guarded", "binary_mm", "binary_linear", "conv_dynamic",
)  # fmt: skip
_QUANTIZED = (
    "quantize", "fake_quantize", "linear_dynamic", "linears", "linear_experts", "experts",
    "int8_bmm_dynamic", "linear_guarded", "conv_dynamic",
)  # fmt: skip
_ROWWISE = (*_QUANTIZED, "dequantize", "int8_mm", "int8_bmm", "linear")
_FLOAT_OUT = (
    "dequantize", "linear", "linear_dynamic", "linear_experts", "linear_float", "binary_linear",
)  # fmt: skip
CACHED = (
    "kv_write", "kv_copy_blocks", "kv_keys", "kv_values", "kv_attention", "kv_write_pages",
    "kv_attention_pages",
)  # fmt: skip
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTIONS = (
    "int8_attention", "int8_attention_backward", "attention_decode", "attention_append",
)  # fmt: skip
# Enough work in every operator, including packing, to be divided among threads.
THREADED = [
    *_each(BUILDERS, leading=(300,), k=130, n=600),
    *_each(_ROWWISE, leading=(300,), k=130, n=600, axes=PER_TENSOR),
    *(Row(op, leading=(30, 64), k=64, n=64) for op in ("int8_bmm", "int8_bmm_dynamic")),
    *(Row(op, leading=(2, 4, 40), k=64, n=600) for op in CACHED),
    *_each(_TRANSFORMED, leading=(300,), k=128, n=600, factor=True, rotation=64),
    Row("quantize", leading=(300,), k=600, given="seed", symmetric=True, factor=True),
    # also with the range of all rows
    *_each(_QUANTIZED, leading=(300,), k=600, n=40, axes=PER_TENSOR),
]
ROWS = [row for shape in _SHAPES for row in _each(BUILDERS, **shape)]
ROWS += THREADED
ROWS += [  # more rows than are arranged at a time
    Row(op, leading=(500,), k=60000, n=2) for op in _ARRANGING
]
ROWS += [
    Row(op, leading=(500,), k=60000, n=2, group=4096, shift=ZERO_POINTS)
    for op in ("linear", "linear_dynamic", "linear_guarded")
]
ROWS += [
    Row(op, leading=(500,), k=60000, n=2, group=128, w_bits=4, shift=shift)
    for op in ("linear", "linear_dynamic")
    for shift in (NONE, MINIMUMS)
]
ROWS += [
    Row(op, leading=(500,), k=60000, n=2, axes=PER_TENSOR) for op in ("linear", "linear_dynamic")
]
ROWS += [
    row
    for dtype in _TYPES
    for axes in (PER_ROW, PER_TENSOR)
    for symmetric, bits in ((True, 8), (False, 4), (True, 2))
    for row in _each(_QUANTIZED, dtype=dtype, axes=axes, symmetric=symmetric, bits=bits)
]
ROWS += [
    Row(op, dtype=dtype, axes=axes, symmetric=symmetric)
    for op, types in (
        ("int8_mm", (torch.float32,)),
        ("int8_bmm", (torch.float32,)),
        ("linear", _TYPES),
        ("linear_requantize", (torch.float32,)),
        ("dequantize", (*_TYPES, torch.int8)),
    )
    for dtype in types
    for axes in (PER_ROW, PER_TENSOR)
    for symmetric in (True, False)
]
ROWS += [
    Row(op, (m,), k, n, symmetric=symmetric, group=group, bias=False,
        shift=NONE if symmetric else ZERO_POINTS, **more)  # type: ignore[arg-type]
    for op, more in (
        ("pack_weight", {}),
        ("pack_weight", {"w_rows": True}),
        ("unpack_weight", {}),
        ("quantize", {"x_groups": True}),
        ("linear", {}),
        ("linear", {"x_groups": True}),
        ("linear", {"x_groups": True, "w_rows": True}),
        ("linear_dynamic", {}),
        ("linear_dynamic", {"x_groups": True, "bits": 5}),
        ("linears", {"x_groups": True, "bits": 5}),
        ("linear_experts", {"x_groups": True}),
        ("experts", {"x_groups": True, "bits": 5}),
        ("conv_dynamic", {"x_groups": True, "bits": 5}),
        ("linear_guarded", {}),
        ("linear_guarded", {"x_groups": True, "w_rows": True}),
    )
    # whole and short last groups, several in a block of K or one in several, tails of N
    for m, k, n, group in (
        (1, 64, 32, 64),
        (1, 1000, 70, 64),
        (2, 700, 33, 128),
        (13, 65, 31, 64),
        (25, 600, 97, 192),
        (37, 1100, 40, 576),
        (241, 1290, 64, 1024),
        (5, 0, 8, 64),
        (3, 8, 0, 64),
        (0, 100, 5, 64),
        (40, 300, 64, 512),
        (3, 31, 5, 32),
        (70, 330, 33, 32),
        (9, 200, 40, 96),
    )
    for symmetric in (True, False)
]  # fmt: skip
ROWS += [
    Row(op, k=k, n=n, group=group, w_bits=bits, shift=shift, symmetric=columns)
    for op in ("pack_weight", "unpack_weight", "cut_weight")
    for k, n, group in ((70, 33, 32), (200, 100, 64))
    for bits, shifts in ((8, (NONE, ZERO_POINTS)), (4, (NONE, ZERO_POINTS, MINIMUMS)),
                         (5, (NONE, ZERO_POINTS, MINIMUMS)))
    for shift in shifts
    for columns in ((False, True) if op == "cut_weight" else (False,))
]  # fmt: skip
ROWS += [
    Row(op, (m,), k, n, symmetric=m % 2 == 0, group=group, w_bits=bits, shift=shift, **more)  # type: ignore[arg-type]
    for op, more in (
        ("linear", {}),
        ("linear_experts", {}),
        ("experts", {}),
        ("experts", {"x_groups": True}),
        ("conv_dynamic", {}),
        ("linear", {"x_groups": True}),
        ("linear_dynamic", {"bits": 5}),
        ("linear_dynamic", {"x_groups": True, "bias": False}),
        ("linear_float", {}),
    )
    for bits in (4, 5)
    for shift in (NONE, ZERO_POINTS, MINIMUMS)
    # each size of a group, whole and short last groups, tails of N, few rows and many
    for m, k, n, group in (
        (1, 64, 32, 64),
        (1, 1000, 70, 64),
        (2, 700, 33, 128),
        (4, 2049, 40, 32),
        (8, 130, 31, 32),
        (9, 31, 65, 128),
        (37, 1100, 40, 64),
        (241, 1290, 64, 128),
        (5, 0, 8, 64),
        (3, 8, 0, 64),
        (0, 100, 5, 32),
    )
]
ROWS += [
    row
    for dtype in _TYPES
    for activation in ACTIVATIONS
    for bias in (True, False)
    for row in _each(_FLOAT_OUT, out_dtype=dtype, activation=activation, bias=bias)
]
ROWS += [
    Row(op, leading=leading, k=k, n=n, symmetric=symmetric)
    for op in ("int8_bmm", "int8_bmm_dynamic")
    for leading, k, n in (
        ((7, 13), 33, 40),
        ((2, 3, 50), 64, 70),
        ((0, 4), 5, 6),
        ((30, 64), 64, 64),
    )
    for symmetric in (True, False)
]
ROWS += [
    Row(op, k=70, dtype=dtype)
    for op, types in (
        ("binary_pack", (*_TYPES, torch.float64, torch.int8)),
        ("binary_mm", _TYPES),
        ("binary_linear", _TYPES),
    )
    for dtype in types
]
ROWS += [
    Row(op, leading=(m,), k=k, n=40)
    for op in ("binary_mm", "binary_linear")
    # blocks of K with each remainder modulo 3 nibbles, tile heights, rows without a partner
    for m, k in ((1, 32), (2, 1984), (7, 1921), (12, 4097), (31, 8200), (249, 96))
]
ROWS += [
    Row(op, leading, k, n, dtype, dtype, bits=bits, symmetric=symmetric)
    for op in _ATTENTIONS
    for dtype in _TYPES
    for leading, k, n in (((2, 3, 50), 64, 70), ((7, 13), 33, 40), ((2, 1), 16, 100))
    for bits in (8, 7)  # fewer than 8 bits: causal
    for symmetric in (True, False)
]
ROWS += [
    Row(op, (2, 6, 20), 32, 40, bits=bits, symmetric=symmetric, group=group)
    for op in _ATTENTIONS
    for group in (2, 6)
    for bits in (8, 7)
    for symmetric in (True, False)
]
ROWS += [
    Row(op, leading, k, n, dtype, dtype, bits=bits, symmetric=symmetric, group=group)
    for op in CACHED
    for leading, k, n, group in (
        ((2, 3, 5), 64, 70, 0),
        ((1, 6, 9), 40, 33, 3),
        ((2, 8, 2), 8, 100, 4),
        ((1, 4, 1), 128, 48, 2),
        ((1, 10, 1), 18, 17, 5),
        ((1, 1, 2), 256, 20, 0),
        ((1, 2, 3), 80, 31, 2),
        ((1, 2, 40), 96, 64, 0),  # more queries than pass by at once
    )
    for bits in (8, 4)
    for symmetric in (True, False)
    for dtype in (_TYPES[(k // 2 + n) % 3], torch.float32)
]
ROWS += [
    row
    for leading, k, rotation in (
        ((5,), 19, 0),
        ((2, 3), 48, 16),
        ((3,), 47, 16),
        ((9,), 576, 64),
        ((4,), 120, 64),
        ((2,), 7, 64),
        ((0,), 64, 64),
        ((4,), 0, 16),
    )
    for symmetric in (True, False)
    for factor in (True, False)
    for row in _each(
        _TRANSFORMED, leading=leading, k=k, symmetric=symmetric, factor=factor, rotation=rotation
    )
]
ROWS += [
    row
    for op in _TRANSFORMED
    for dtype in _TYPES
    for axes in ((PER_ROW, PER_TENSOR) if op in _QUANTIZED else (PER_ROW,))
    for row in _each([op], k=64, dtype=dtype, axes=axes, factor=True, rotation=64)
]
ROWS += [
    Row("quantize", leading, k, dtype=dtype, axes=axes, given="seed", symmetric=True, factor=True)
    for leading, k in (((5,), 19), ((2, 3), 600), ((0,), 64), ((4,), 0))
    for dtype in _TYPES
    for axes in (PER_ROW, PER_TENSOR)
]
ROWS += [
    row
    for leading, k, rotation in (((5,), 19, 0), ((2, 3), 48, 16), ((1,), 64, 64), ((0,), 64, 0))
    for dtype in _TYPES
    for out_dtype in _TYPES
    for row in _each(
        _RECURRENT, leading=leading, k=k, n=k + 2 - rotation // 64, dtype=dtype,
        out_dtype=out_dtype, rotation=rotation, symmetric=rotation == 16, bias=rotation != 16,
    )
]  # fmt: skip
ALL_ROWS = list(dict.fromkeys(ROWS))


def reached(row: Row) -> list[Hashable]:
    """Every two properties by which a kernel may branch: of its sizes those that tell few from
    many and whole from cut short. Where there are more branches than that, three properties; where
    there is nothing to compute, none but that."""
    sizes: dict[str, Hashable] = {
        "leading": min(len(row.leading), 2),
        "m": bisect_right((1, 2, 9, 32, 256), math.prod(row.leading)),
        "k": (bisect_right((1, 16, 64, 512, 4096), row.k), row.k % 4 == 0, row.k % 64 == 0),
        "n": (bisect_right((1, 32, 256), row.n), row.n % 32 == 0),
        "short group": row.layout.group and row.k % row.layout.group > 0,
    }
    if 0 in (*row.leading, row.k, row.n):
        return [(row.op, *size) for size in sizes.items()]
    each = [p for p in values(row).items() if p[0] not in sizes] + [*sizes.items()]
    found: list[Hashable] = list(combinations(each, 2))
    codes = (row.axes, row.given, row.x_groups)
    found += [(row.op, row.w_bits, row.shift), (row.op, codes, sizes["m"])]
    if "attention" in row.op or row.op.startswith("kv_"):
        found.append((row.op, row.bits, row.symmetric, row.group > 0))
    if row.op in ("int8_attention", "int8_attention_backward"):
        found.append((row.bits, row.symmetric, sizes["k"]))
    if row.op.startswith("kv_attention") and row.k % 2 == 0:
        kinds = (("of", row.group), row.k)
        found += [(row.op, row.bits, row.symmetric, more) for more in kinds]
    if row.op == "linear_float":
        found.append((row.op, row.activation, row.out_dtype))
    return found


ROWS = covering(ALL_ROWS, reached)
# operators that return nothing -> how many of the first operands they write
WRITTEN = {"kv_write": 4, "kv_copy_blocks": 4, "kv_write_pages": 4}


def results(op: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the operator's results, or copies of the operands that it writes."""
    if op not in WRITTEN:
        returned = function(*arguments)
        return tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    copies = tuple(t.clone() for t in arguments[: WRITTEN[op]])
    assert function(*copies, *arguments[len(copies) :]) is None
    return copies
