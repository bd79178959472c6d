"""Words that are no program: a file may hold any, and none leaves the memory of its slots."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfx._C import Program
from qfx.graph.activations import ACTIVATIONS
from qfx.ops.header import HEADER_BYTES
from qfx.programs.bytecode import OPERATIONS, UNARY
from tests.programs.written import (
    CACHE,
    EDGE,
    I64,
    KEY_SCALE,
    PROGRAMS,
    VALUE_SCALE,
    Given,
    floats,
    operand,
    say,
)

ops = torch.ops.qfx
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**k + d for k in (20, 31, 32, 40, 60, 62) for d in (-1, 0, 1)]),
    st.sampled_from([2**63 - 1, -(2**63), -(2**31), 2**63 - 64]),
)


def test_each_operation_has_words() -> None:
    assert set(PROGRAMS) == set(OPERATIONS)
    for make in PROGRAMS.values():
        given_ = make()
        given_.run()
        assert given_.whole()


def _try(given_: Given, words: list[int]) -> None:
    """It runs, or is refused by a sentence; around its slots nothing changes."""
    try:
        given_.run(words)
    except (ValueError, IndexError) as error:
        assert len(str(error)) > 20
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error)
    assert given_.whole()


@pytest.mark.parametrize("name", PROGRAMS)
def test_words_that_are_cut_off(name: str) -> None:
    given_ = PROGRAMS[name]()
    for end in range(1, len(given_.words)):
        with pytest.raises(ValueError, match="not a program of this build"):
            given_.program(given_.words[:end])
        short = [end - 1, *given_.words[1:end]] if end > 1 else [0]
        with pytest.raises(ValueError, match="not a program of this build"):
            given_.program(short)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_word_by_each_number(name: str) -> None:
    for place in range(len(PROGRAMS[name]().words)):
        given_ = PROGRAMS[name]()
        for number in (
            -1,
            0,
            1,
            2,
            3,
            7,
            64,
            2**20,
            2**31,
            2**32,
            2**40,
            2**62,
            2**63 - 1,
            -(2**63),
        ):
            _try(given_, [*given_.words[:place], number, *given_.words[place + 1 :]])


@settings(max_examples=max(settings().max_examples, 60))
@given(data=st.data())
def test_words_that_were_changed(data: st.DataObject) -> None:
    given_ = PROGRAMS[data.draw(st.sampled_from(sorted(PROGRAMS)))]()
    words = list(given_.words)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(words) - 1))
        words[place] = data.draw(st.one_of(NUMBERS, st.sampled_from(words)))
    _try(given_, words)


@given(st.lists(NUMBERS, max_size=40))
def test_words_by_chance(words: list[int]) -> None:
    _try(Given([], [64, 64]), words)


def test_a_copy_onto_itself_transposed_stays_in_its_memory() -> None:
    turned = [1, 0, 0, 2, 4, 4, 1, 4]
    given_ = Given(say("copy", floats(1, 4, 4), turned), [64])
    given_.run()
    assert given_.whole()


REFUSED: dict[str, tuple[str, list[int], str]] = {
    "an output that is one element": (
        "copy",
        say("copy", [1, 0, 0, 1, 2**40, 0], [2, 0, 0, 1, 2**40, 0]),
        "overlaps itself",
    ),
    "an output whose rows overlap": (
        "copy",
        say("copy", [1, 0, 0, 2, 3, 4, 2, 1], floats(2, 3, 4)),
        "overlaps itself",
    ),
    "a sum into one element": (
        "binary",
        say("binary", 0, [1, 0, 0, 1, 2**40, 0], [2, 0, 0, 1, 2**40, 0], [2, 0, 0, 1, 2**40, 0]),
        "overlaps itself",
    ),
    "float32 to 16 bits": (
        "copy",
        say("copy", operand(1, (3, 4), torch.bfloat16), floats(2, 3, 4)),
        "no such copy",
    ),
    "slot": ("copy", say("copy", floats(3, 3, 4), floats(2, 3, 4)), "no such slot"),
    "offset": (
        "copy",
        say("copy", operand(1, (3, 4), torch.float32, 4), floats(2, 3, 4)),
        "leaves its slot",
    ),
    "between elements": (
        "copy",
        say("copy", operand(1, (2, 4), torch.float32, 2), floats(2, 2, 4)),
        "leaves its slot",
    ),
    "shapes": ("copy", say("copy", floats(1, 3, 4), floats(2, 3, 3)), "different shapes"),
    "axes": ("copy", say("copy", floats(1, *[1] * 7), floats(2, *[1] * 7)), "too many axes"),
    "sizes whose product is too large": (
        "mean",
        say("mean", floats(1, 0, 1), [2, 0, 0, 3, 0, 2**62, 2**62, 1, 1, 1]),
        "too large",
    ),
    "strides of none": (
        "copy",
        say("copy", [1, 0, 0, 2, 0, 5, 2**62, 2**62], [2, 0, 0, 2, 0, 5, 1, 2**62]),
        "too large",
    ),
    "types": ("copy", say("copy", operand(1, (6,), I64), floats(2, 6)), "no such copy"),
    "operation": ("copy", [1, len(OPERATIONS)], "no such operation"),
    "function": (
        "unary",
        say("unary", len(UNARY), floats(1, 3, 4), floats(2, 3, 4)),
        "function of one",
    ),
    "functions": (
        "binary",
        say("binary", -1, floats(1, 3, 4), floats(2, 3, 4), floats(2, 3, 4)),
        "function of two",
    ),
    "too much": ("copy", say("copy", floats(1, 3, 4), floats(2, 3, 4), 0), "says too much"),
    "mean of none": ("mean", say("mean", floats(1, 3, 1), floats(2, 3, 0)), "a sum of other rows"),
    "more of a row than it has": (
        "top_k",
        say("top_k", floats(1, 1, 5), operand(2, (1, 5), I64), floats(3, 1, 4)),
        "more of a row",
    ),
    "indices of other rows": (
        "gather",
        say("gather", floats(1, 3, 2), floats(2, 3, 4), operand(3, (2, 2), I64)),
        "different rows",
    ),
    "a router of other sizes": (
        "float_linear",
        say("float_linear", floats(1, 2, 20), floats(2, 2, 16), floats(3, 10, 8), 0),
        "a linear of other sizes",
    ),
    "values of other heads": (
        "kv_write",
        say(
            "kv_write",
            CACHE[:26],
            operand(3, (1, 1, 16, 8), torch.int8),
            floats(4, 1, 1, 16, 1),
            floats(5, 1, 2, 3, 8),
            floats(6, 1, 1, 3, 8),
            operand(7, (3,), I64),
        ),
        "different heads",
    ),
}
_X, _OUT = len(floats(1, 2, 16)), len(floats(2, 2, 32))
LINEAR = {
    "a factor": (0, 1),
    "bits": (1, 9),
    "bits of another number": (1, 2**32 + 8),
    "group": (4, 32),
    "a rotation": (5, 8),
    "no weights": (6, 0),
    "fewer weights": (6, 1),
    "more weights": (6, 3),
    "a bias": (7 + _OUT, 1),
    "activation": (8 + _OUT, len(ACTIVATIONS)),
    "another activation": (8 + _OUT, 2**32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    like, words, why = REFUSED[name]
    given_ = PROGRAMS[like]()
    with pytest.raises(ValueError, match=why):
        given_.program(words)


# Counted from the words of the first code: those of the second follow a stack and a bias.
_FIRST = len([*floats(1, 3, 16), *floats(2, 3, 16), *operand(3, (3, 2), I64), *floats(4, 3, 2)])
_SECOND = 9 + len([*operand(5, (2, 1), torch.int8), 1, *floats(6, 2, 32)])
EXPERTS = {
    "bits": (0, 9),
    "one scale for all rows of an expert": (_SECOND + 2, 1),
    "activation": (5, len(ACTIVATIONS)),
    "gate": (6, 3),
    "no gate": (6, 0),
    "slots": (-4, 2),
}
CHANGED = {"linear": (_X, LINEAR), "experts": (_FIRST, EXPERTS)}


@pytest.mark.parametrize(
    ("op", "name"), [(op, n) for op, (_, rows) in CHANGED.items() for n in rows]
)
def test_products_that_are_refused(op: str, name: str) -> None:
    given_ = PROGRAMS[op]()
    begin, rows = CHANGED[op]
    place, number = rows[name]
    words = list(given_.words)
    words[2 + begin + place] = number
    with pytest.raises(ValueError, match="not a program of this build"):
        given_.program(words)


@pytest.mark.parametrize(("name", "slot"), [("linear", 3), ("linear", 5), ("experts", 7)])
def test_weights_whose_headers_lie(name: str, slot: int) -> None:
    for place in range(HEADER_BYTES):
        given_ = PROGRAMS[name]()
        given_.memory[slot - 1][EDGE + place] ^= 0x11
        with pytest.raises(ValueError, match="a weight: "):
            given_.program()
    given_ = PROGRAMS[name]()
    given_.addresses[slot] = 0
    with pytest.raises(ValueError, match="not given when"):
        given_.program()


def _longs(memory: Tensor) -> Tensor:
    return memory[EDGE:-EDGE].view(torch.int64)


@pytest.mark.parametrize("at", [-1, 5, 16, 2**62, -(2**63)])
def test_rows_and_places_that_there_are_not(at: int) -> None:
    for name, slot in (("gather", 3), ("scatter", 2)):
        given_ = PROGRAMS[name]()
        _longs(given_.memory[slot - 1])[5] = at
        with pytest.raises(IndexError, match=f"index {at} is none of the 4"):
            given_.run()
        assert given_.whole()
    lookup, write = PROGRAMS["embedding"](), PROGRAMS["kv_write"]()
    _longs(lookup.memory[1])[2] = at
    with pytest.raises(IndexError, match=f"token {at} is none of the 5"):
        lookup.run()
    _longs(write.memory[6])[1] = {5: 99, -1: -2}.get(at, at)  # -1 is nowhere
    with pytest.raises(IndexError, match="of a cache that has room for 16"):
        write.run()
    assert lookup.whole() and write.whole()


def test_places_that_the_tokens_overwrite() -> None:
    """They lie among the scales, which change between two tokens."""
    given_ = PROGRAMS["kv_write"]()
    given_.memory[4][EDGE:-EDGE].view(torch.float32).fill_(1e9)
    given_.memory[5][EDGE:-EDGE].view(torch.float32).fill_(1e9)
    for slot, shape in ((2, KEY_SCALE), (4, VALUE_SCALE)):
        words = list(given_.words[: -len(operand(7, (3,), I64))]) + operand(slot, (3,), I64)
        given_.memory[slot - 1][EDGE:-EDGE] = 0
        assert shape.numel() * 4 >= 24
        given_.run(words)
    assert given_.whole()


def test_addresses_that_a_run_is_not_given() -> None:
    given_ = PROGRAMS["copy"]()
    program, address = given_.program(), given_.memory[0].data_ptr() + EDGE
    for addresses in ([], [address], [address] * 3):
        with pytest.raises(ValueError, match=f"runs on 2 addresses, got {len(addresses)}"):
            program.run(addresses)
    with pytest.raises(ValueError, match="address 1 of a program is null, where 48 bytes"):
        program.run([address, 0])
    program.run([address, address])


@pytest.mark.parametrize(("sizes", "addresses"), [([], []), ([0], []), ([0, 8], [0]), ([-1], [0])])
def test_slots_that_do_not_fit(sizes: list[int], addresses: list[int]) -> None:
    with pytest.raises(ValueError, match="not a program of this build"):
        Program([], sizes, addresses)


@pytest.mark.parametrize("size", [2**63 - 1, 2**62, 2**44])
def test_more_memory_than_there_is(size: int) -> None:
    with pytest.raises(RuntimeError, match=f"out of memory. It asked for {size} bytes"):
        Program([], [size], [0])


def test_its_own_memory_begins_as_zeros_and_is_aligned() -> None:
    out = (ctypes.c_float * 4)(*[7.0] * 4)
    program = Program(say("copy", floats(1, 4), floats(0, 4)), [16, 16], [0, 0])
    program.run([ctypes.addressof(out)])
    assert list(out) == [0.0] * 4
