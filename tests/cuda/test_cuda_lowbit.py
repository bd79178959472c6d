"""The CUDA operators of weights of 4 and 5 bits, on the emulator. Few rows are multiplied by
kernels, one on tensor cores and one without. For more rows a kernel writes the values of the
weight, which PyTorch multiplies. That, and packing, is Python that operators call by name
(qfx/ops/cuda_float_linear.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops import REFERENCES
from qfx.ops.header import MINIMUMS, NONE, ZERO_POINTS
from qfx.ops.layout import Layout
from tests.cuda.emulator import emulate, run
from tests.lib.bounds import STEEPEST, TINY, U32, UNIT
from tests.lib.pairs import covering, every, pairs
from tests.lib.rows import ALL_ROWS, Row, reached

KINDS = [(bits, group, shift) for bits, group in ((4, 32), (5, 128))
         for shift in (NONE, ZERO_POINTS, MINIMUMS)]  # fmt: skip
# The last are a float matmul.
SHAPES = [(1, 64, 32), (7, 130, 33), (3, 0, 4), (0, 40, 5), (17, 80, 33), (65, 40, 5), (65, 0, 4),
          (70, 130, 0)]  # fmt: skip
CODE = [8, 0, 0, 0, 0]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 64  # of the kernels
LOW_BIT = covering([r for r in ALL_ROWS if r.op == "linear_float" and r.w_bits < 8], reached)


@pytest.mark.parametrize(
    "kind, shape, gpu", every(2 * KINDS, [*SHAPES, SHAPES[1]], [80, 80, 75, 80, 75])
)
def test_products_are_those_of_the_values(
    kind: tuple[int, int, int], shape: tuple[int, int, int], gpu: int
) -> None:
    """(E4) (W3) (W4): exact, as float32 is for small codes."""
    (bits, group, shift), (m, k, n) = kind, shape
    emulate(gpu)
    g, half, each = torch.Generator().manual_seed(m + k), 1 << (bits - 1), (n, -(-k // group))
    codes = torch.randint(-half, half, (n, k), generator=g, dtype=torch.int8)
    scale = 2.0 ** torch.randint(-2, 3, each, generator=g)
    zero = torch.randint(-half, half, each, generator=g).int() if shift == ZERO_POINTS else None
    minimum = -scale if shift == MINIMUMS else None
    parts = (codes, scale, zero, minimum, bits, group)
    weight, layout = run("pack_weight", *parts), Layout(n, bits, group, group, int(shift != NONE))
    assert torch.equal(weight, REFERENCES["pack_weight"](*parts))
    unpacked = run("unpack_weight", weight, list(layout), k)
    expected = REFERENCES["unpack_weight"](weight, layout, k)
    assert all(torch.equal(a, b) for a, b in zip(unpacked, expected, strict=True))

    values = _values(*unpacked, group)
    q = torch.randint(-8, 8, (m, k), generator=g, dtype=torch.int8)
    how = (2.0 ** torch.randint(-2, 3, (m, 1), generator=g), torch.tensor([3]).int())
    x, bias = (q - how[1]) * how[0], torch.randint(-9, 9, (n,), generator=g).half()
    y = x @ values.t() + bias
    given = (weight, list(layout))
    assert torch.equal(run("linear", q, *how, *given, bias, "relu", torch.float32), y.relu())
    for dtype in DTYPES:
        rest = (*given, bias, "none", torch.float32)
        assert torch.equal(run("linear_float", x.to(dtype), *rest), y)
    ste = (x, None, bias, None, None, [q, *how], *given, [*CODE, bits, 0], None, torch.float32)
    assert torch.equal(run("linear_ste", *ste), y)
    dynamic = run("linear_dynamic", x, *given, bias, CODE, "none", torch.float32)
    made = run("quantize", x, CODE)
    assert torch.equal(dynamic, run("linear", *made, *given, bias, "none", torch.float32))


def _values(codes: Tensor, scale: Tensor, zero: Tensor, minimum: Tensor, group: int) -> Tensor:
    scale, zero, minimum = (
        v.repeat_interleave(group, 1)[:, : codes.shape[1]] for v in (scale, zero, minimum)
    )
    return (codes - zero) * scale + minimum


def _bound(x: Tensor, terms: Tensor, few: bool) -> Tensor:
    """Bounds the error of sums whose terms have the sum of magnitudes `terms`: of (W4) if there are
    few rows, else of (W5)."""
    k, u = x.shape[-1], UNIT[x.dtype]
    if few:
        return (k / 16 + 96) * U32 * terms
    lost = TINY[u] * x.double().abs().sum(-1, keepdim=True)
    return ((k + 3) * U32 + u) * terms + lost


@pytest.mark.parametrize("row", LOW_BIT, ids=str)
def test_float_activations_are_within_their_bound(row: Row) -> None:
    """(W4) or (W5); then bias, activation and output type round."""
    emulate()
    x, weight, layout, bias, activation, dtype = row.arguments()
    got = run(row.op, x, weight, layout, bias, activation, dtype)
    codes, scale, zero, minimum = (
        t.double() for t in REFERENCES["unpack_weight"](weight, layout, row.k)
    )
    few, given, group = x.shape[:-1].numel() <= MOST_ROWS, x, row.layout.group
    x = x.double()
    exact = x @ _values(codes, scale, zero, minimum, group).t()
    exact = exact + (0 if bias is None else bias.double())
    scaled = _values(codes, scale, zero, 0 * minimum, group)
    added = _values(0 * codes, scale, 0 * zero, minimum, group)
    terms = x.abs() @ (scaled.abs() + added.abs()).t()
    error = _bound(given, terms, few)
    error = error + U32 * (exact.abs() + error)
    if activation not in ("none", "relu"):
        error = error * STEEPEST + 4 * U32 * exact.abs().clamp_min(1)
    y = activate(activation, exact)
    error = error + UNIT[dtype] * (y.abs() + error) + 2.0**-25
    assert got.dtype == dtype and ((got.double() - y).abs() <= error).all()


# Rows of one, two and more blocks, a K of one part and of several, narrow weights and wide ones.
FEW = pairs([1, 3, 8, 9, 17], [(40, 5, 32), (1000, 40, 64), (2304, 3, 128), (136, 260, 32)],
            [(4, 75), (4, 80), (5, 80)], DTYPES)  # fmt: skip


@pytest.mark.parametrize("m, size, kind, dtype", FEW)
def test_few_rows(
    m: int, size: tuple[int, int, int], kind: tuple[int, int], dtype: torch.dtype
) -> None:
    """The same bits in any order of threads; a row with an infinity shows it, no other."""
    (k, n, group), (bits, gpu) = size, kind
    g, half = torch.Generator().manual_seed(m + k + n), 1 << (bits - 1)
    x = torch.randn(m, k, generator=g).to(dtype)
    codes = torch.randint(-half, half, (n, k), generator=g, dtype=torch.int8)
    x[m // 2, k // 2], codes[:, k // 2] = torch.inf, 1
    scale = torch.rand(n, -(-k // group), generator=g).half().float()
    weight = REFERENCES["pack_weight"](codes, scale, None, None, bits, group)
    layout = list(Layout(n, bits, group, group))

    def product(order: int) -> Tensor:
        emulate(gpu, order)
        return run("linear_float", x, weight, layout, None, "none", torch.float32)  # type: ignore[no-any-return]

    got = product(1)
    assert torch.equal(got, product(2))
    w = codes.double() * scale.double().repeat_interleave(group, 1)[:, :k]
    finite = torch.arange(m) != m // 2
    error = (got.double() - x.double() @ w.t()).abs()[finite]
    bound = _bound(x, x.double().abs() @ w.abs().t(), gpu >= 80 or dtype == torch.float32)
    assert (error <= bound[finite]).all() and (got[m // 2] == torch.inf).all()


@pytest.mark.parametrize(
    "kind, dtype, size", pairs(KINDS, DTYPES, [(72, 5), (130, 33), (1096, 40)])
)
def test_more_rows_multiply_the_values_rounded_once(
    kind: tuple[int, int, int], dtype: torch.dtype, size: tuple[int, int]
) -> None:
    """(Q14) (W5): x is the identity, so that outputs are what was multiplied, of rows that vectors
    can store and of others, in one and more blocks."""
    emulate()
    (bits, group, shift), (k, n) = kind, size
    g, half, each = torch.Generator().manual_seed(k), 1 << (bits - 1), (n, -(-k // group))
    codes = torch.randint(-half, half, (n, k), generator=g, dtype=torch.int8)
    scale, low = (torch.rand(each, generator=g).half().float() for _ in range(2))
    zero = torch.randint(-half, half, each, generator=g).int() if shift == ZERO_POINTS else None
    minimum = -low if shift == MINIMUMS else None
    weight = REFERENCES["pack_weight"](codes, scale, zero, minimum, bits, group)
    layout = Layout(n, bits, group, group, int(shift != NONE))
    got = run("linear_float", torch.eye(k, dtype=dtype), weight, list(layout), None, "none", dtype)
    values = _values(*REFERENCES["unpack_weight"](weight, layout, k), group)
    assert torch.equal(got, values.to(dtype).t())
