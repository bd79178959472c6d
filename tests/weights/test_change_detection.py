"""Whether a tensor is what it was: what each level notices, and what it misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qfx.io.digest import digest_of
from qfx.weights.change_detection import (
    content_of,
    place_and_version,
    place_of,
    snapshot,
    stamp_of,
)
from qfx.weights.offload import LEAST, offload

N = 2 * LEAST // 4 // 64  # rows of 64, twice the bytes that are given back


def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(N, 64))


def counted(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(2)


def uncounted(w: Tensor) -> None:
    w.data += 1


def one_element(w: Tensor) -> None:
    w.detach().numpy()[N // 2 + 1, 33] += 1


def other_memory(w: Tensor) -> None:
    w.data = w.data + 1


def same_values_elsewhere(w: Tensor) -> None:
    w.data = w.data.clone()


def nothing(w: Tensor) -> None:
    pass


# A change -> whether a stamp, a sample and the content notice it.
NOTICED: dict[Callable[[Tensor], None], tuple[bool, bool, bool]] = {
    counted: (True, True, True),
    uncounted: (False, True, True),
    one_element: (False, False, True),
    other_memory: (True, True, True),
    same_values_elsewhere: (True, True, False),
    nothing: (False, False, False),
}


@pytest.mark.parametrize("change", NOTICED)
def test_what_each_level_notices(change: Callable[[Tensor], None]) -> None:
    w = weight()
    stamp, before, content, digest = stamp_of(w), snapshot((w,)), content_of(w), digest_of(w)
    change(w)
    stamped, sampled, contained = NOTICED[change]
    assert (stamp_of(w) != stamp) == stamped == (not before.same_tensors((w,)))
    assert (not before.unchanged((w,))) == sampled
    assert (content_of(w) != content) == contained == (digest_of(w) != digest)


def test_another_tensor_of_the_same_memory_has_another_stamp_and_one_place() -> None:
    w = weight()
    other, before = w.detach(), snapshot((w,))
    assert stamp_of(other) != stamp_of(w) and not before.same_tensors((other,))
    assert place_and_version(other) == place_and_version(w)
    counted(w)
    assert place_of(other) == place_of(w)
    assert place_and_version(other) == place_and_version(w)  # they share the count


@pytest.mark.parametrize("of", [Tensor.t, lambda w: w[1:], lambda w: w.view(torch.int32)])
def test_other_elements_are_another_place(of: Callable[[Tensor], Tensor]) -> None:
    w = weight().detach()
    assert place_of(of(w)) != place_of(w) and place_of(w[:]) == place_of(w)


@pytest.mark.parametrize("change", [counted, other_memory, nothing])
def test_values_that_a_file_holds_are_known_by_their_stamp(
    change: Callable[[Tensor], None],
) -> None:
    w, beside = weight(), torch.zeros(8)
    assert offload(w) == ""
    before = snapshot((w, beside))
    one_element(w)  # which a stamp misses
    assert before.unchanged((w, beside))
    change(w)
    assert before.unchanged((w, beside)) == (change is nothing) == before.same_tensors((w, beside))
    uncounted(beside)
    assert not before.unchanged((w, beside))


def test_a_snapshot_is_of_the_positions_that_are_asked_for() -> None:
    a, b = weight(), weight()
    of_b, of_both = snapshot((a, b), [1]), snapshot((a, b))
    counted(a)
    assert of_b.unchanged((a, b)) and not of_both.unchanged((a, b))


def test_other_devices_have_no_content() -> None:
    assert content_of(torch.empty(3, device="meta")) is None
