"""No operator keeps memory of a call, by glibc's count; without memory it says what it wanted."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import pytest
import torch

from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.lib.rows import Row
from tests.ops.test_op_parts import OPS

CALLS = 500
SMALLEST = 32  # bytes of malloc's smallest chunk: what one lost allocation a call would add
FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def allocated() -> int:
    """Bytes that malloc has handed out."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("counts with mallinfo2 of glibc 2.33 or later")
    mallinfo.restype = Mallinfo
    return int(mallinfo().uordblks)


@pytest.mark.parametrize("name", OPS)
def test_keeps_nothing(name: str) -> None:
    op, arguments = getattr(torch.ops.qfx, name).default, Row(name).arguments()
    for _ in range(CALLS):
        op(*arguments)  # fills what threads and Python keep between calls

    def grown() -> int:
        before = allocated()
        for _ in range(CALLS):
            op(*arguments)
        return allocated() - before

    # What each call loses is lost in every round; another thread of the process seldom allocates.
    assert min(grown() for _ in range(3)) < CALLS * SMALLEST / 2


def test_lost_memory_is_seen() -> None:
    before = allocated()
    kept = [torch.empty(1) for _ in range(CALLS)]
    assert allocated() - before >= len(kept) * SMALLEST


def test_sizes_without_elements_end() -> None:
    """A loop over 2^40 rows of nothing would not."""
    command = [sys.executable, "-m", "tests.lib.huge"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as stuck:
        pytest.fail(f"this did not end: {(stuck.stdout or b'').decode().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    outcomes = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert outcomes.count("returned") > 200 and outcomes.count("too large") > 30


HUGE = 2**46
WIDE, TALL = torch.zeros(1, 8).expand(HUGE, 8), torch.empty(HUGE, 0)
NONE = torch.ops.qfx.pack_weight(torch.zeros(33, 0, dtype=torch.int8), torch.ones(33))
TOO_LARGE = {
    "an output": (
        lambda: torch.ops.qfx.int8_mm(TALL.char(), torch.zeros(1, 1).int(), NONE, 33),
        f"int8_mm: out of memory. It asked for {4 * 33 * HUGE} bytes, a tensor of shape "
        f"{HUGE}x33 and dtype Int",
    ),
    "one of several": (
        lambda: torch.ops.qfx.quantize(TALL, Code()),
        f"quantize: out of memory. It asked for {4 * HUGE} bytes, a tensor of shape {HUGE}x1 and",
    ),
    "scales of a weight": (
        lambda: torch.ops.qfx.pack_weight(TALL.char(), torch.ones(1).expand(HUGE)),
        f"pack_weight: out of memory. It asked for {4 * HUGE} bytes, a tensor of shape",
    ),
    "a contiguous operand": (
        lambda: torch.ops.qfx.rotate(WIDE, None, 0),
        f"rotate: out of memory. It asked for {32 * HUGE} bytes, a tensor of shape {HUGE}x8 and",
    ),
    "an output of floats": (
        lambda: torch.ops.qfx.linear_dynamic(
            TALL, NONE, Layout(33), None, Code(), "none", torch.float32
        ),
        f"linear_dynamic: out of memory. It asked for {4 * 33 * HUGE} bytes, a tensor of shape "
        f"{HUGE}x33 and dtype Float",
    ),
    "more than there are addresses": (
        lambda: torch.ops.qfx.binary_mm(
            torch.empty(2**60, 0), torch.ops.qfx.binary_pack(torch.zeros(33, 0)), 33
        ),
        "binary_mm: out of memory. It asked for more than 2^63 bytes, a tensor of shape",
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_out_of_memory_is_a_sentence(what: str) -> None:
    call, sentence = TOO_LARGE[what]
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        call()


IN_A_THREAD = """
import resource, torch, qfx
torch.set_num_threads(2)
a, b = torch.ones(8, 2, 65536), torch.ones(1, 1, 65536).expand(8, 4096, 65536)
call = lambda n: torch.ops.qfx.int8_bmm_dynamic(
    a, b[:, :n], [1], 8, False, 8, torch.float32)
call(2)
pages = int(open("/proc/self/statm").read().split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
try:
    call(4096)
except RuntimeError as why:
    print(why)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
small, large = call(2), call(4096)
assert small.shape == (8, 2, 2) and torch.equal(large[..., :2], small)
print("goes on")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_out_of_memory_in_a_thread_is_a_sentence_and_not_the_end() -> None:
    command = [sys.executable, "-c", IN_A_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"int8_bmm_dynamic: out of memory. It asked for 268435456 bytes, which it works in\n(.*\n)*"
        r"goes on",
        done.stdout,
    ), done.stdout
