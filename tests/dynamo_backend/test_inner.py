"""What Inductor generates around the operators."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code

from tests.lib.models import Block, compiled

FEATURES = 16


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield


@torch.library.custom_op("qfx_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Foreign(nn.Module):
    """Calls another library's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x))


@pytest.mark.parametrize(
    "model, options, checks",
    [
        (Block(FEATURES), {}, False),
        (Block(FEATURES), {"size_asserts": True}, True),
        (Foreign(), {}, True),
        (Foreign(), {"size_asserts": False}, False),
    ],
    ids=["own", "own, asked for", "foreign", "foreign, not asked for"],
)
def test_sizes_are_checked_where_other_libraries_promise_them(
    model: nn.Module, options: dict[str, bool], checks: bool
) -> None:
    f = compiled(model, inner="inductor", **options)
    with torch.no_grad():
        _, (code,) = run_and_get_code(f, torch.randn(1, FEATURES))
    assert "torch.ops.qfx.linear" in code
    assert bool(re.search(r"    assert_size_stride(_grouped)?\(", code)) == checks


def test_cpp_wrapper() -> None:
    """Inductor's wrapper in C++ gives the bits of the one in Python."""
    torch.manual_seed(0)
    model, x = Block(FEATURES).eval(), torch.randn(1, FEATURES)
    with torch.no_grad():
        expected = compiled(model, inner="inductor")(x)
        torch._dynamo.reset()
        y, codes = run_and_get_code(compiled(model, inner="inductor", cpp_wrapper=True), x)
    assert any("aoti_torch" in code and "linear_dynamic" in code for code in codes)
    assert torch.equal(y, expected)
