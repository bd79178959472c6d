"""A cache of keys and values in codes: what is written, read and attended to. (K1) to (K5)"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from qfx.ops import REFERENCES
from qfx.ops.heads import added
from qfx.ops.kv_cache import kv_empty, rotation_of
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib import bounds
from tests.lib.strategies import DTYPES, ISAS, SEEDS

OPS = torch.ops.qfx
SIZES = st.sampled_from([8, 16, 40, 64, 80, 96, 128, 256])
BITS = st.sampled_from([(8, 8), (8, 4), (4, 8), (4, 4)])
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 33, 48, 70, 512, 1041])  # one part, and three: (K4)
LOWEST = torch.finfo(torch.float32).min
# Of b sequences, h heads of queries, t tokens and n keys.
MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, t, n: None,
    "some": lambda b, h, t, n: torch.rand(b, 1, t, n) < 0.5,
    "of each head": lambda b, h, t, n: torch.rand(b, h, t, n) < 0.3,
    "behind the last": lambda b, h, t, n: (torch.arange(n) < n // 2 + 1).expand(b, 1, t, n),
    "window": lambda b, h, t, n: ((n - 1 - torch.arange(n)) < 3)[None, None, None],
    "nothing": lambda b, h, t, n: torch.zeros(1, 1, t, n, dtype=torch.bool),
    "floats": lambda b, h, t, n: torch.randn(t, n),
    "minus infinity": lambda b, h, t, n: torch.randn(b, 1, t, n).masked_fill(
        torch.rand(b, 1, t, n) < 0.6, -math.inf
    ),
    "lowest": lambda b, h, t, n: torch.zeros(h, t, n).masked_fill(
        torch.rand(h, t, n) < 0.6, LOWEST
    ),
    "transposed": lambda b, h, t, n: torch.randn(n, t).T,
    "one number": lambda b, h, t, n: torch.randn(n),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads in rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 0))[..., 1:, 3:-2],
    "features apart": lambda x: x.mT.contiguous().mT,
}
Cache = tuple[Tensor, Tensor, Tensor, Tensor]


class Case(NamedTuple):
    cache: Cache
    k: Tensor
    v: Tensor
    q: Tensor
    mask: Tensor | None
    length: int

    def seen(self) -> Tensor:
        """[B, Hq, T, length]: which keys a row sees."""
        b = added(self.mask, False, self.q.shape[2], self.length)
        return (b != -math.inf).expand(*self.q.shape[:3], self.length)

    def attend(self, cache: Cache | None = None) -> Tensor:
        cache = self.cache if cache is None else cache
        how = (self.mask, self.q.shape[-1] ** -0.5, self.length, torch.float32)
        return OPS.kv_attention(self.q, *cache, *how)  # type: ignore[no-any-return]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A cache into which k and v were written, the later tokens first."""
    torch.manual_seed(draw(SEEDS))
    batch, heads, group, t = (draw(st.integers(1, n)) for n in (2, 3, 5, 9))
    d, n, layout = draw(SIZES), draw(LENGTHS), LAYOUTS[draw(st.sampled_from([*LAYOUTS]))]
    dtype = draw(DTYPES)
    cache = kv_empty(batch, heads, n + draw(st.integers(0, 40)), d, *draw(BITS))
    k, v = (layout(torch.randn(batch, heads, n, d).to(dtype)) for _ in range(2))
    OPS.kv_write(*cache, k.flip(2), v.flip(2), torch.arange(n).flip(0))
    q = layout(torch.randn(batch, heads * group, t, d).to(dtype))
    mask = MASKS[draw(st.sampled_from([*MASKS]))](batch, heads * group, t, n)
    return Case(cache, k, v, q, mask, n)


@given(ISAS, cases(), st.sampled_from([1, 2]))
def test_what_is_written_and_read_is_the_reference(isa: str, case: Case, threads: int) -> None:
    length = case.length
    expected = tuple(torch.zeros_like(t) for t in case.cache)
    got = tuple(torch.zeros_like(t) for t in case.cache)
    tokens = (case.k, case.v, torch.arange(length))
    REFERENCES["kv_write"](*expected, *tokens)
    with on_isa(isa), on_threads(threads):
        OPS.kv_write(*got, *tokens)
        read = (
            OPS.kv_keys(*got[:2], length, case.k.dtype),
            OPS.kv_values(*got[2:], length, torch.float32),
        )
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert same_bits(read[0], REFERENCES["kv_keys"](*got[:2], length, case.k.dtype))
    assert same_bits(read[1], REFERENCES["kv_values"](*got[2:], length, torch.float32))


@given(cases())
def test_what_is_read_is_what_was_written_to_within_half_a_step(case: Case) -> None:
    """Rotated back, the errors of a block add up, and the roundings of both rotations. (B1) (B4)"""
    for x, codes, scale, read in (
        (case.k, *case.cache[:2], OPS.kv_keys),
        (case.v, *case.cache[2:], OPS.kv_values),
    ):
        block = max(rotation_of(x.shape[-1]), 1)
        x = x.double()
        steps = scale[:, :, : case.length, :1].double() * (0.5 + 255 * 2.0**-21) * block**0.5
        roundings = 32 * 2.0**-24 * x.abs().sum(-1, keepdim=True)
        error = (read(codes, scale, case.length, torch.float32).double() - x).abs()
        assert (error <= steps + roundings).all()


@given(ISAS, cases(), st.sampled_from([1, 2, 5]))
def test_attention_is_within_its_bound_and_has_the_same_bits_everywhere(
    isa: str, case: Case, threads: int
) -> None:
    how = (case.mask, case.q.shape[-1] ** -0.5, case.length, torch.float32)
    exact = REFERENCES["kv_attention"](case.q, *case.cache, *how)
    y = case.attend()
    limit = bounds.kv_attention(case.q, *case.cache, *how)
    assert ((y.double() - exact.double()).abs() <= limit).all()
    assert not y[~case.seen().any(-1)].any()
    with on_isa(isa), on_threads(threads):
        assert same_bits(case.attend(), y)


@given(ISAS, cases(), st.sampled_from([1, 5]), st.data())
def test_a_row_has_the_bits_that_it_has_alone(
    isa: str, case: Case, threads: int, data: st.DataObject
) -> None:
    """Whatever queries and sequences come with it. (K5)"""
    b, t = (data.draw(st.integers(0, case.q.shape[i] - 1)) for i in (0, 2))
    mask = None if case.mask is None else torch.broadcast_to(
        case.mask, (*case.q.shape[:3], case.length)
    )[b : b + 1, :, t : t + 1]  # fmt: skip
    with on_isa(isa), on_threads(threads):
        row = case._replace(q=case.q[b : b + 1, :, t : t + 1], mask=mask)
        alone = row.attend(tuple(x[b : b + 1] for x in case.cache))
        assert same_bits(alone, case.attend()[b : b + 1, :, t : t + 1])


@given(ISAS, cases(), st.sampled_from([math.nan, math.inf, 1e30]))
def test_a_row_depends_on_what_it_sees_alone(isa: str, case: Case, fault: float) -> None:
    """Garbage behind the length, and in tokens that no row of a sequence sees."""
    keys, key_scale, values, value_scale = cache = tuple(t.clone() for t in case.cache)
    unseen = torch.ones(key_scale.shape[:3], dtype=torch.bool)
    group = case.q.shape[1] // keys.shape[1]
    unseen[:, :, : case.length] = ~case.seen().any(2).unflatten(1, (-1, group)).any(2)
    key_scale[unseen] = value_scale[unseen] = fault
    values[unseen] = 77
    tokens = keys.transpose(-1, -2).flatten(2, 3)
    tokens[unseen] = 99
    keys = tokens.unflatten(2, (-1, 16)).transpose(-1, -2).contiguous()
    with on_isa(isa):
        assert same_bits(case.attend((keys, *cache[1:])), case.attend())


@given(ISAS, cases(), st.sampled_from([0, 1]), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_fault_shows_in_the_rows_that_see_it(
    isa: str, case: Case, place: int, fault: float
) -> None:
    tokens = [case.k.clone(), case.v.clone()]
    tokens[place][0, 0, 0, -1] = fault
    cache = tuple(torch.zeros_like(t) for t in case.cache)
    with on_isa(isa):
        OPS.kv_write(*cache, *tokens, torch.arange(case.length))
        y = case._replace(cache=cache).attend()
    group = case.q.shape[1] // case.k.shape[1]
    sees = torch.zeros(case.q.shape[:3], dtype=torch.bool)
    sees[0, :group] = case.seen()[0, :group, :, 0]
    assert cache[2 * place + 1][0, 0, 0, 0].isfinite().logical_not()
    assert y[sees].isnan().all() and not y[~sees].isnan().any()


@given(cases(), st.data())
def test_sequences_are_rows_that_can_be_selected(case: Case, data: st.DataObject) -> None:
    """Reordered, repeated, or a view of some of them."""
    b = case.q.shape[0]
    order = torch.tensor(data.draw(st.lists(st.integers(0, b - 1), min_size=1, max_size=4)))
    mask = None if case.mask is None else torch.broadcast_to(
        case.mask, (*case.q.shape[:3], case.length)
    )[order]  # fmt: skip
    y = case._replace(q=case.q[order], mask=mask).attend(tuple(t[order] for t in case.cache))
    assert same_bits(y, case.attend()[order])
    half = tuple(torch.cat([t, t], 1)[:, : t.shape[1]] for t in case.cache)
    assert same_bits(case.attend(half), case.attend())


def test_the_later_of_two_tokens_at_one_place_stays(isa: str) -> None:
    cache, k = kv_empty(1, 1, 16, 64), torch.randn(1, 1, 3, 64)
    OPS.kv_write(*cache, k, k, torch.tensor([5, 2, 5]))
    read = OPS.kv_keys(*cache[:2], 16, torch.float32)[0, 0]
    assert (read[5] - k[0, 0, 2]).norm() < 0.1 and (read[2] - k[0, 0, 1]).norm() < 0.1


def test_a_token_takes_68_bytes_for_its_key_and_as_many_for_its_value() -> None:
    keys, key_scale, values, value_scale = kv_empty(2, 3, 100, 64)
    tokens = 2 * 3 * 112
    assert keys.nbytes + key_scale.nbytes == values.nbytes + value_scale.nbytes == 68 * tokens


@given(ISAS, cases(), SEEDS)
def test_a_block_table_finds_what_other_sequences_hold(isa: str, case: Case, seed: int) -> None:
    """As if the blocks were copied; and kv_copy_blocks copies them."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, room, _ = case.cache[1].shape
    table = torch.randint(batch, (batch, room // 16), generator=generator, dtype=torch.int32)
    copied = tuple(t.clone() for t in case.cache)
    for block in range(room // 16):
        OPS.kv_copy_blocks(*copied, table[:, block].long(), torch.full((batch,), block))
    how = (case.mask, 0.3, case.length, torch.float32)
    with on_isa(isa):
        by_table = OPS.kv_attention(case.q, *case.cache, *how, table)
        assert same_bits(by_table, OPS.kv_attention(case.q, *copied, *how))
        for read, part in ((OPS.kv_keys, slice(0, 2)), (OPS.kv_values, slice(2, 4))):
            found = read(*case.cache[part], case.length, torch.float32, table)
            assert same_bits(found, read(*copied[part], case.length, torch.float32))


# --- errors ---

Q, K = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 3, 8)


def _write(cache: Cache, k: Tensor = K, v: Tensor = K, places: object = (0, 1, 2)) -> None:
    OPS.kv_write(*cache, k, v, torch.tensor(places))


def _attend(cache: Cache, q: Tensor = Q, mask: Tensor | None = None, length: int = 9) -> None:
    OPS.kv_attention(q, *cache, mask, 1.0, length, torch.float32)


def _copy(cache: Cache, sources: list[int], blocks: list[int]) -> None:
    OPS.kv_copy_blocks(*cache, torch.tensor(sources), torch.tensor(blocks))


def _found(cache: Sequence[Tensor], table: list[list[int]]) -> None:
    found = torch.tensor(table, dtype=torch.int32)
    OPS.kv_attention(Q, *cache, None, 1.0, 9, torch.float32, found)


ERRORS: dict[str, tuple[Callable[[Cache], None], str]] = {
    "place": (lambda c: _write(c, places=[0, 32, 1]), "token 1 is to be written to place 32"),
    "before": (lambda c: _write(c, places=[0, 1, -2]), "place -2, which is outside 0..31"),
    "sequences": (lambda c: _write(c, places=[[0, 1, 2]] * 2), "places has shape 2x3, k 1x2x3x8"),
    "places": (lambda c: _write(c, places=[0, 1]), "places has shape 2, k 1x2x3x8"),
    "types": (lambda c: _write(c, places=[0.0, 1.0, 2.0]), "places has dtype Float, expected Long"),
    "heads": (lambda c: _write(c, k=K[:, :1]), "k has shape 1x1x3x8, expected 1x2xTx8"),
    "double": (lambda c: _write(c, v=K.double()), "v has dtype Double"),
    "swapped": (lambda c: _write((*c[2:], *c[:2])), "keys has shape 1x2x32x8"),
    "scales": (lambda c: _write((c[0], c[3].repeat(1, 1, 1, 2), *c[2:])), "expected Byte"),
    "cut": (lambda c: _write((c[0].flip(3).mT.contiguous().mT, *c[1:])), "cut or permuted"),
    "length": (lambda c: _attend(c, length=33), "length=33 is outside 0..32"),
    "negative": (lambda c: _attend(c, length=-1), "length=-1 is outside 0..32"),
    "groups": (lambda c: _attend(c, Q[:, :3]), "q has shape 1x3x1x8, expected 1xHqxTx8"),
    "mask": (lambda c: _attend(c, mask=torch.zeros(8)), "mask has shape 8, which does not"),
    "mask type": (lambda c: _attend(c, mask=torch.zeros(9).double()), "mask has dtype Double"),
    "read": (lambda c: OPS.kv_keys(*c[:2], 99, torch.float32), "kv_keys: length=99"),
    "source": (lambda c: _copy(c, [1], [0]), "sources has 1 for sequence 0, which is outside 0..0"),
    "block": (lambda c: _copy(c, [0], [2]), "blocks has 2 for sequence 0, which is outside -1..1"),
    "table": (lambda c: _found(c, [[0, 1]]), "block_table has 1 for block 1 of sequence 0"),
    "short table": (lambda c: _found(c, [[0]]), "block_table has shape 1x1, expected 1x2"),
    "not whole": (
        lambda c: _found([torch.stack([t, t], 2)[:, :, 0] for t in c], [[0, 0]]),
        "a block_table is given, and a tensor of the cache with shape 1x2x2x8x16 is not contiguous",
    ),
    **{
        f"softcap {size}": (
            lambda c, size=size: OPS.kv_attention(  # type: ignore[misc]
                Q, *c, None, 1.0, 9, torch.float32, None, size
            ),
            "expected a size of scores in float32, or 0 for any",
        )
        for size in (-2.0, math.nan, math.inf, 1e300, 1e-300)
    },
    "out": (lambda c: OPS.kv_values(*c[2:], 9, torch.int8), "kv_values: out_dtype is Char"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_sentences_and_write_nothing(name: str) -> None:
    call, sentence = ERRORS[name]
    cache = kv_empty(1, 2, 20, 8)
    with pytest.raises(RuntimeError, match=sentence):
        call(cache)
    assert not any(t.any() for t in cache)


@pytest.mark.parametrize(("d", "bits", "sentence"), [(8, 5, "5 bits"), (7, 4, "D=7: two features")])
def test_caches_that_cannot_be(d: int, bits: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kv_empty(1, 1, 16, d, bits)


# --- compiled ---


class Step(nn.Module):
    """Writes a token and attends, to a cache that is its own."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        for name, t in zip(("k", "ks", "v", "vs"), kv_empty(1, 2, 40, 16, bits, bits), strict=True):
            self.register_buffer(name, t)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        k = x.unflatten(-1, (2, 16)).transpose(1, 2)
        cache = (self.k, self.ks, self.v, self.vs)
        OPS.kv_write(*cache, k, k * 2, place)
        mask = torch.arange(48) <= place[-1]
        q = k.repeat_interleave(3, 1) + 1
        return OPS.kv_attention(q, *cache, mask, 0.25, 48, torch.float32) + 1  # type: ignore[no-any-return]


def _steps(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    return [run(torch.randn(1, 1, 32), torch.tensor([i])).clone() for i in range(3)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_steps_write_and_attend(inner: str, bits: int) -> None:
    own, compiled = Step(bits), Step(bits)
    run = torch.compile(compiled, fullgraph=True, backend=inner)
    with torch.no_grad():
        expected, got = _steps(own), _steps(run)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own.buffers(), compiled.buffers(), strict=True))
    assert own.ks[:, :, :3].any() and not own.ks[:, :, 3:].any()


def test_lengths_that_change_compile_once() -> None:
    cache = kv_empty(1, 2, 64, 16)
    OPS.kv_write(*cache, *torch.randn(2, 1, 2, 64, 16), torch.arange(64))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def read(n: int) -> Tensor:
        y = OPS.kv_attention(torch.ones(1, 2, 1, 16), *cache, None, 1.0, n, torch.float32)
        return y + OPS.kv_keys(*cache[:2], n, torch.float32).sum()  # type: ignore[no-any-return]

    for n in (5, 17, 60):
        y = OPS.kv_attention(torch.ones(1, 2, 1, 16), *cache, None, 1.0, n, torch.float32)
        assert torch.equal(read(n), y + OPS.kv_keys(*cache[:2], n, torch.float32).sum())
    assert counter.frame_count == 1


def test_an_exported_step_writes_and_attends(tmp_path: Path) -> None:
    own, step = Step(), Step()
    example = (torch.randn(1, 1, 32), torch.tensor([0]))
    with torch.no_grad():
        program = torch.export.export(step, example)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "step.pt2")
        )
        run = torch._inductor.aoti_load_package(package)
        expected = _steps(own)
        assert all(same_bits(a, b) for a, b in zip(_steps(run), expected, strict=True))
        module = program.module()
        assert all(same_bits(a, b) for a, b in zip(_steps(module), expected, strict=True))


def test_a_tracked_key_is_a_constant_to_autograd() -> None:
    cache, k = kv_empty(1, 1, 16, 8), torch.randn(1, 1, 1, 8, requires_grad=True)
    OPS.kv_write(*cache, k, k, torch.tensor([0]))
    assert not any(t.requires_grad for t in cache)
    y = OPS.kv_attention(k, *cache, None, 1.0, 1, torch.float32)
    with pytest.raises(NotImplementedError, match="kv_attention is an inference operator"):
        y.sum().backward()
