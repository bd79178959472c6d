"""Parameters of formats (csrc/cpu/kernels/tables/tuning.h) change no bit of any result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx
import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.strategies import ISAS, SEEDS

OPS = torch.ops.qfx
ROWS = st.sampled_from([1, 2, 3, 4, 6, 7, 12, 16, 17, 31, 33, 64, 100, 257])
DEPTHS = st.sampled_from([1, 15, 63, 64, 65, 130, 320, 513, 1100, 2049])
COLUMNS = st.sampled_from([1, 31, 32, 33, 64, 65, 96, 100, 161])
TUNINGS = st.fixed_dictionaries(
    {
        "block_depth": st.sampled_from([64, 65, 128, 300, 512, 1024, 1 << 20]),
        "block_rows": st.integers(1, 40) | st.sampled_from([240, 256, 1 << 14]),
        "stream_rows": st.integers(0, 64),
        "hint": st.sampled_from(["t0", "t1", "nta"]),
        "ahead": st.sampled_from([0, 64, 1000, 4096, 1 << 20]),
        "streams": st.integers(1, 2),
        "minimum_rows": st.integers(0, 20),
        "block_bytes": st.sampled_from([0, 1 << 14, 1 << 40]),
        "packed_rows": st.sampled_from([0, 7, 16, 64]),
        "packed_ahead": st.sampled_from([0, 1000, 1 << 20]),
        "near_bytes": st.sampled_from([0, 1 << 15, 1 << 40]),
        "far_bytes": st.sampled_from([0, 1 << 15, 1 << 40]),
        "serial_steps": st.sampled_from([0, 1 << 19, 1 << 40]),
    }
)


@contextmanager
def tuned(isa: str, tuning: dict[str, Any]) -> Iterator[None]:
    """Every format of the instruction set has these parameters."""
    before = _C.tuning(isa)
    _C.set_tuning(isa, dict.fromkeys(before, tuning))
    try:
        yield
    finally:
        _C.set_tuning(isa, before)


def three(x: Tensor) -> Tensor:
    """Matrices that differ, where there is more than one row."""
    return torch.stack([x, x.flip(0), x.roll(1, 0)])


def results(m: int, k: int, n: int, seed: int) -> dict[str, Tensor]:
    """A product of each kind that reads the parameters: exact sums, whole linears, groups of K,
    codes out, float activations, three products at once."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    zero = torch.randint(-128, 128, (m, 1), generator=generator, dtype=torch.int32)
    codes = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    scale, w_scale = torch.rand(m, 1, generator=generator), torch.rand(n, generator=generator)
    packed, end = OPS.pack_weight(codes, w_scale), ("none", torch.float32)
    whole = (packed, list(Layout(n)), None)
    grouped = OPS.pack_weight(*qfx.quantize(w, qfx.QSpec(symmetric=False, group=64))[:3], group=64)
    return {
        "sums": OPS.int8_mm(q, zero, packed, n),
        "linear": OPS.linear(q, scale, zero, *whole, *end),
        "dynamic": OPS.linear_dynamic(x, *whole, list(Code(symmetric=0)), *end),
        "narrow": OPS.linear_dynamic(x, *whole, list(Code(7)), *end),
        "float": OPS.linear_float(x, *whole, *end),
        "groups": OPS.linear(q, scale, zero, grouped, list(Layout(n, 8, 64, 64, 1)), None, *end),
        "bmm": OPS.int8_bmm(three(q), three(zero), three(codes)),
        "bmm_floats": OPS.int8_bmm_dynamic(three(x), three(w), [1], 8, False, 8, torch.float32),
        "bmm_tensor": OPS.int8_bmm_dynamic(three(x), three(w), [0, 1], 7, True, 7, torch.float32),
    }


@given(ROWS, DEPTHS, COLUMNS, SEEDS, ISAS, TUNINGS, st.sampled_from([1, 2, 5]))
def test_parameters_change_no_bit(
    m: int, k: int, n: int, seed: int, isa: str, tuning: dict[str, Any], threads: int
) -> None:
    with on_isa("ref"):
        expected = results(m, k, n, seed)
    with on_isa(isa), on_threads(threads), tuned(isa, tuning):
        found = results(m, k, n, seed)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("m", [1, 2, 5, 17, 32])
def test_few_rows_of_many_panels(m: int, isa: str) -> None:
    """They are multiplied some at a time, where the weights pass by in one stream."""
    with on_isa("ref"):
        expected = results(m, 65, 1089, seed=m)
    with on_isa(isa), tuned(isa, {"stream_rows": 64, "streams": 1}):
        found = results(m, 65, 1089, seed=m)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def test_what_is_set_is_in_use_and_the_rest_stays() -> None:
    for isa in _C.isas():
        before = _C.tuning(isa)
        for name, parameters in before.items():
            with tuned(isa, {}):
                _C.set_tuning(isa, {name: {"ahead": 640, "hint": "t1"}})
                assert _C.tuning(isa) == before | {name: parameters | {"ahead": 640, "hint": "t1"}}
        assert _C.tuning(isa) == before


def test_rows_from_which_a_unit_takes_over() -> None:
    """A format with another one below it gives way to it for fewer rows, and only then."""
    if "amx" not in _C.isas():
        pytest.skip("of the instruction sets that have run here only amx has two units")
    with on_isa("amx"):
        for rows in (0, 5, 100):
            with tuned("amx", {"minimum_rows": rows}):
                kernels = {m: _C.kernel_for(m).split("_")[0] for m in (1, 4, 5, 99, 100)}
            assert kernels == {m: "s8s8" if m < rows else "s8s8k64" for m in kernels}


@pytest.mark.parametrize(
    ("tuning", "sentence"),
    [
        ({"s8s8": {"block_depth": 63}}, "ref, format s8s8: block_depth=63 is not between 64 and"),
        ({"s8s8": {"block_rows": 0}}, "block_rows=0 is not between 1 and 16384"),
        ({"s8s8": {"stream_rows": 65}}, "stream_rows=65 is not between 0 and 64"),
        ({"s8s8": {"ahead": -1}}, "ahead=-1 is not between 0 and 1048576"),
        ({"s8s8": {"streams": 3}}, "streams=3 is not between 1 and 2"),
        ({"s8s8": {"minimum_rows": -1}}, "minimum_rows=-1 is not between 0 and"),
        ({"s8s8": {"serial_steps": -1}}, "serial_steps=-1 is not between 0 and"),
        ({"s8s8": {"ahead": 1 << 70}}, "ahead=1180591620717411303424 does not fit into 64 bits"),
        ({"s8s8": {"hint": "t9"}}, "hint='t9' is none of: t0, t1, nta"),
        ({"s8s8": {"depth": 64}}, "a format has no parameter 'depth', but: block_depth, block"),
        ({"s8": {"ahead": 64}}, "ref has no format 's8', but: s8s8"),
    ],
)
def test_what_cannot_be_set_is_refused_with_a_sentence(
    tuning: dict[str, dict[str, Any]], sentence: str
) -> None:
    before = _C.tuning("ref")
    with pytest.raises(ValueError, match=sentence):
        _C.set_tuning("ref", {"s8s8": {"ahead": 128}} | tuning)
    assert _C.tuning("ref") == before


@pytest.mark.parametrize("value", ["64", 1.5, None])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="ahead is an integer"):
        _C.set_tuning("ref", {"s8s8": {"ahead": value}})


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels for an instruction set 'mmx'"):
        _C.tuning("mmx")


def test_defaults_are_in_use_where_nothing_was_set() -> None:
    """They come back whole, whatever was set before."""
    for isa in _C.isas():
        with tuned(isa, {"block_rows": 3, "streams": 1}):
            _C.set_tuning(isa, _C.default_tuning(isa))
            assert _C.tuning(isa) == _C.default_tuning(isa)
