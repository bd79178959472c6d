"""The products of csrc/cuda on the emulator, beyond the rows of the table: sizes at the edges of
tiles, extremes of codes, split K, views, the same bits in any order of threads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops import REFERENCES
from qfx.ops.layout import Layout
from qfx.ops.weight import cuda_pack_weight
from tests.conftest import same_bits
from tests.cuda import emulator as cuda_emulator
from tests.cuda.emulator import packed_codes, run
from tests.lib.bounds import STEEPEST, U32, UNIT
from tests.lib.pairs import covering, every, pairs
from tests.lib.rows import ALL_ROWS, Row, reached
from tests.ops.test_op_parts import as_tuple

# The one with most rows and a long K is there for how the CPU cuts its work.
WEIGHT_ONLY = covering(
    [r for r in ALL_ROWS if r.op == "linear_float" and r.w_bits == 8 and r.k < 60000],
    reached,
)


@pytest.fixture(autouse=True)
def emulator() -> None:
    cuda_emulator.emulate()


@pytest.mark.parametrize("row", WEIGHT_ONLY, ids=str)
def test_weight_only_is_within_its_bound(row: Row) -> None:
    """(W1) in the order of (W2); then scale, bias, activation and output type round."""
    x, weight, layout, bias, activation, dtype = row.arguments()
    got = run(row.op, *cuda_emulator.arguments_of(row))
    w, scale, *_ = REFERENCES["unpack_weight"](weight, layout, row.k)
    x, w, scale = x.double(), w.double(), scale.double().t()
    exact = x @ w.t() * scale + (0 if bias is None else bias.double())
    error = (row.k / 2 + 8) * U32 * (x.abs() @ w.abs().t()) * scale
    error = error + U32 * (exact.abs() + error)
    if activation not in ("none", "relu"):
        error = error * STEEPEST + 4 * U32 * exact.abs().clamp_min(1)
    y = activate(activation, exact)
    error = error + UNIT[dtype] * (y.abs() + error) + 2.0**-25
    assert got.dtype == dtype and ((got.double() - y).abs() <= error).all()


@pytest.mark.parametrize("architecture", [75, 1000])
def test_every_tile_on_each_architecture(architecture: int) -> None:
    """Turing's instructions, and later ones: tests/cuda/gemm_tests.cpp."""
    program = cuda_emulator.build() / f"gemm_tests_{architecture}"
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout == "ok\n", result.stdout + result.stderr


def extremes(generator: torch.Generator, *shape: int) -> Tensor:
    """Half of the codes are -128, -127 or 127."""
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    ends = torch.tensor([-128, 127, -127], dtype=torch.int8)
    chosen = ends[torch.randint(0, 3, shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, chosen, codes)


def in_two_orders(call: Callable[[], Any]) -> tuple[Tensor, ...]:
    """The result, which must not depend on the order of threads and copies."""
    cuda_emulator.emulate(seed=1)
    first = as_tuple(call())
    cuda_emulator.emulate(seed=2)
    assert all(same_bits(a, b) for a, b in zip(first, as_tuple(call()), strict=True))
    return first


HEIGHTS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300)
WIDTHS = ((1, 1), (33, 7), (65, 65), (129, 31))
# Few tiles and a long K, which is split into parts on the emulated GPU's four multiprocessors.
SPLIT = ((1, 1025, 5), (16, 2200, 70), (17, 4097, 3), (65, 1100, 64))
LONGEST = ((1, 65792, 2),)


@pytest.mark.parametrize(
    "m, k, n", [(m, *size) for m, size in every(HEIGHTS, WIDTHS)] + [*SPLIT, *LONGEST]
)
def test_sums_of_codes_are_exact(m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(m + k + n)
    q, w = extremes(generator, m, k), extremes(generator, n, k)
    zero = extremes(generator, m, 1).int()
    (got,) = in_two_orders(lambda: run("int8_mm", q, zero, packed_codes(w), n))
    assert torch.equal(got.double(), (q.double() - zero) @ w.double().t())


@pytest.mark.parametrize("m, k, n", [(1, 33, 7), (17, 65, 65), (129, 129, 31), *SPLIT])
def test_sums_of_signs_are_exact(m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(m + k + n)
    x, w = (torch.randn(rows, 8 * k, generator=generator) for rows in (m, n))
    (packed,) = in_two_orders(lambda: run("binary_pack", w))
    (got,) = in_two_orders(lambda: run("binary_mm", x, packed, n))
    signs_x, signs_w = (torch.where(t >= 0, 1.0, -1.0).double() for t in (x, w))
    assert torch.equal(got.double(), signs_x @ signs_w.t())


@pytest.mark.parametrize(
    "m, size", every([1, 3, 5, 8, 9, 17], [(1, 3), (48, 5), (1000, 40), (4097, 3), (4097, 5)])
)
def test_weight_only_of_few_rows(m: int, size: tuple[int, int]) -> None:
    """Warps share K where columns are few; a row with a NaN or an infinity shows it, no other."""
    k, n = size
    generator = torch.Generator().manual_seed(m + k + n)
    x, w = torch.randn(m, k, generator=generator), extremes(generator, n, k)
    x[m // 2, k // 2], w[:, k // 2] = torch.inf, 1
    arguments = (x, packed_codes(w), list(Layout(n)), None, "none", torch.float32)
    (got,) = in_two_orders(lambda: run("linear_float", *arguments))
    exact, terms = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    finite = torch.arange(m) != m // 2
    error = (got.double() - exact).abs()
    assert (error[finite] <= (k / 2 + 8) * U32 * terms[finite]).all()
    assert (got[m // 2] == torch.inf).all()


EXTREME = [(3, 300, 70, 64), (70, 130, 33, 128), (16, 640, 5, 320), (3, 300, 70, 0), (1, 0, 4, 64)]


@pytest.mark.parametrize("sizes, zeros, by_group", pairs(EXTREME, [True, False], [True, False]))
def test_linears_of_extremes(sizes: tuple[int, int, int, int], zeros: bool, by_group: bool) -> None:
    """(E3), and (E1) where K is whole and there are no zero points."""
    m, k, n, group = sizes
    layout = Layout(n, 8, group, group * by_group, int(zeros))
    generator, each = torch.Generator().manual_seed(m + k + n), (n, layout.scales(k))
    q, w = extremes(generator, m, k), extremes(generator, n, k)
    how = (torch.rand(m, 1, generator=generator), extremes(generator, m, 1).int())
    scale = torch.rand(each, generator=generator)
    zero = extremes(generator, *each).int() if zeros else None
    rest = (list(layout), torch.rand(n, generator=generator), "relu", torch.float16)
    weight = cuda_pack_weight(w, scale, zero, group=group)
    (got,) = in_two_orders(lambda: run("linear", q, *how, weight, *rest))
    weight = REFERENCES["pack_weight"](w, scale, zero, None, 8, group)
    assert same_bits(got, REFERENCES["linear"](q, *how, weight, *rest))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "columns": lambda t: t.mT.contiguous().mT,
    "padded": lambda t: torch.nn.functional.pad(t, (0, 16))[..., :-16],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:1].expand_as(t),
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].reshape(t.shape),
}


@pytest.mark.parametrize("view, k", every(VIEWS, [48, 33]))
def test_batched_products_of_views(view: str, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a = VIEWS[view](extremes(generator, 2, 3, 5, k))
    b = VIEWS[view](extremes(generator, 2, 3, 7, k))
    zero = extremes(generator, 2, 3, 5, 1).int()
    (got,) = in_two_orders(lambda: run("int8_bmm", a, zero, b))
    assert torch.equal(got.double(), (a.double() - zero) @ b.double().mT)


def test_a_row_beyond_float_shows_and_leaves_the_others_alone() -> None:
    """Codes 0, zero point 0, an infinite scale (Q4): as the two operators one after the other."""
    generator = torch.Generator().manual_seed(0)
    q, w = extremes(generator, 20, 40), extremes(generator, 70, 40)
    scale = torch.rand(20, 1, generator=generator)
    scale[3], scale[11] = 3e38, torch.nan
    linear = (q, scale, extremes(generator, 20, 1).int())
    w_scale = torch.rand(70, generator=generator)
    to = (torch.rand(20, 1, generator=generator) * 1e4, torch.full((20, 1), 5).int())
    rest = (list(Layout(70)), None, "none", *to, [7, 0, 0, 0, 0])
    weight = cuda_pack_weight(w, w_scale)
    got = in_two_orders(lambda: run("linear_requantize", *linear, weight, *rest))
    weight = REFERENCES["pack_weight"](w, w_scale)
    expected = REFERENCES["linear_requantize"](*linear, weight, *rest)
    assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))
    assert not got[0][3].any() and got[1][3].isinf() and got[1][11].isnan() and got[0][4].any()


class ByName:
    """The operators under test, as attributes."""

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return partial(run, op)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_gradients_have_the_bits_of_the_cpu(
    symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(T3) with CUDA's operators in the place of the CPU's."""
    generator = torch.Generator().manual_seed(1)
    x, w, grad = (torch.randn(*s, generator=generator) for s in ((19, 33), (21, 33), (19, 21)))
    cpu = torch.ops.qfx
    code = [8, int(symmetric), 0, 0, 0]
    codes = list(cpu.quantize(x, code))
    w_codes, w_scale, _ = cpu.quantize(w, [8, 1, 0, 0, 0])
    how = (list(Layout(21)), [*code, 8, 0], torch.tensor([7]), torch.float32)

    def gradients() -> tuple[Tensor, Tensor]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        operands = (a, b, None, None, None, codes, cpu.pack_weight(w_codes, w_scale))
        cpu.linear_ste(*operands, *how).backward(grad)
        assert a.grad is not None and b.grad is not None
        return a.grad, b.grad

    expected = gradients()
    monkeypatch.setattr("qfx.ops.ste.ops", ByName())
    assert all(same_bits(g, e) for g, e in zip(gradients(), expected, strict=True))


Q, ZERO = torch.ones(5, 8, dtype=torch.int8), torch.zeros(5, 1, dtype=torch.int32)
WEIGHT, BITS = torch.zeros(152, dtype=torch.int8), torch.zeros(48, dtype=torch.int8)
X, ONE, ROWS_8 = torch.ones(5, 8), torch.ones(1), [6, 8, 0, 0, 0]
HOW = (None, "none", torch.float32)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "k": (lambda: run("int8_mm", Q[:, :7].float(), ZERO, WEIGHT, 6), "q has dtype Float, expected"),
    "bytes": (
        lambda: run("int8_mm", Q, ZERO, WEIGHT[1:], 6),
        "int8_mm: the packed weight has 151 bytes, but one of the layout [6, 8, 0, 0, 0] for K=8 "
        "has 152",
    ),
    "zero": (lambda: run("int8_mm", Q, ZERO[:3], WEIGHT, 6), "zero_point has 3 elements, expected"),
    "layout": (
        lambda: run("linear", Q, ONE, ZERO, WEIGHT, [6, 8, 0], *HOW),
        "linear: layout has 3 numbers, expected n, bits, group, scale_group and shift",
    ),
    "bias": (
        lambda: run("linear", Q, ONE, ZERO, WEIGHT, ROWS_8, Q[0], *HOW[1:]),
        "bias has dtype Char, expected Float or BFloat16 or Half",
    ),
    "shift": (
        lambda: run("linear", Q, ONE, ZERO, WEIGHT, [6, 8, 0, 0, 1], *HOW),
        "the packed weight has 152 bytes, but one of the layout [6, 8, 0, 0, 1] for K=8 has 176",
    ),
    "groups_of_x": (
        lambda: run("linear", Q, torch.ones(5, 2), ZERO, WEIGHT, ROWS_8, *HOW),
        "scale has 10 elements, expected one for each of the 5 rows or a single one",
    ),
    "dynamic_groups_of_x": (
        lambda: run("linear_dynamic", X, WEIGHT, ROWS_8, None, [8, 1, 0, 64, 0], *HOW[1:]),
        "linear_dynamic: x has a scale for each 64 elements of K, which has no kernel on CUDA",
    ),
    "float_groups": (
        lambda: run("linear_float", X, WEIGHT, [6, 8, 64, 64, 0], *HOW),
        "linear_float: the weight has the layout [6, 8, 64, 64, 0], expected [6, 8, 0, 0, 0]",
    ),
    "requantize_groups": (
        lambda: run(
            "linear_requantize", Q, ONE, ZERO, WEIGHT, [6, 8, 64, 0, 0], None, "none", ONE, None,
            [8, 1, 0, 0, 0],
        ),
        "linear_requantize: the weight has the layout [6, 8, 64, 0, 0], expected [6, 8, 0, 0, 0]",
    ),
    "codes": (
        lambda: run(
            "linear_ste", X, None, None, None, None, [Q, ONE], WEIGHT, ROWS_8,
            [8, 1, 0, 0, 0, 8, 0], None, torch.float32,
        ),
        "linear_ste: codes has 2 tensors, expected 3: q, scale, zero_point",
    ),
    "low_bit_size": (
        lambda: run("linear_float", X, WEIGHT, [6, 4, 32, 32, 1], *HOW),
        "the packed weight has 152 bytes, but one of n=6, bits=4, group=32, shift=1 for K=8 has "
        "768 or, with minimums, 768",
    ),
    "low_bit_group": (
        lambda: run("linear_float", X, WEIGHT, [6, 5, 16, 16, 0], *HOW),
        "linear_float: group=16, expected 32, 64 or 128 with bits=5",
    ),
    "low_bit": (
        lambda: run("unpack_weight", WEIGHT.new_zeros(704), [6, 4, 32, 32, 0], 8),
        "unpack_weight: qfx::low_bit_unpack failed, which is Python on CUDA",
    ),
    "batch": (
        lambda: run("int8_bmm", Q[None], ZERO, Q[None, :, :7]),
        "a_q has K=8 (shape 1x5x8) but b_q has K=7 (shape 1x5x7)",
    ),
    "bits": (
        lambda: run("binary_mm", torch.ones(5, 200), BITS[1:], 1),
        "the packed weight has 47 bytes, but one for N=1 (n, or the size of scale) and K=200 of x "
        "(shape 5x200) has 48",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()
