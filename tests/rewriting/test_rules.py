"""Rules of fusion: a plan says of a site which rule was refused, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx


class Layers(nn.Module):
    def __init__(self, run: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _recipe(model: nn.Module, x: Tensor) -> qfx.Recipe:
    config = qfx.Config(scheme="w8a8-static", minimum_gain=0)
    return qfx.calibrate(model, [(x,)], config)


ALONE = lambda s, x: s.b(s.a(x))  # noqa: E731
SHARED = lambda s, x: s.b(x) * s.a(x) * s.c(x)  # noqa: E731
# the bias of the second one is computed behind the first, and the third reads another input
LATE = lambda s, x: s.c(F.linear(x, s.b.weight, s.a(x)[0]))  # noqa: E731


@pytest.mark.parametrize(
    ("run", "rows", "said"),
    [
        (ALONE, 5, ["", ""]),
        (SHARED, 5, [""] * 3),
        (SHARED, 1, [""] * 3),
        (LATE, 5, ["", "no linears: getitem comes after", ""]),
    ],
)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w8a8-groups"])
def test_dynamic(
    run: Callable[[Layers, Tensor], Tensor], rows: int, said: list[str], scheme: str
) -> None:
    model, x = Layers(run).eval(), torch.randn(rows, 64)
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    gm, plan = qfx.rewrite(qfx.trace(model, x), config)
    assert ("linears" in gm.code) == (run is SHARED)
    assert ("linear_dynamic" in gm.code) == (run is not SHARED)
    _, before = qfx.rewrite(qfx.trace(model, x), config, canonical=True)
    for entry, canonical, words in zip(plan.entries, before.entries, said, strict=True):
        found = entry.reason.removeprefix(canonical.reason).removeprefix("; ")
        assert found.startswith(words) and bool(found) == bool(words)


STATIC: list[tuple[Callable[[Layers, Tensor], Tensor], str]] = [
    (ALONE, ""),
    (lambda s, x: (y := s.a(x)) + s.b(y), "its result is read in float too"),
    (lambda s, x: s.b(torch.detach(s.a(x).relu())), ""),
]


@pytest.mark.parametrize(("run", "said"), STATIC)
def test_requantize(run: Callable[[Layers, Tensor], Tensor], said: str) -> None:
    model, x = Layers(run).eval(), torch.randn(8, 64)
    scheme = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True))
    sites = tuple(qfx.SiteRecipe(name, 0, 64, 64, scheme, scale=0.02) for name in ("a", "b"))
    config = qfx.Config(recipe=qfx.Recipe(sites), minimum_gain=0)
    gm, plan = qfx.rewrite(qfx.trace(model, x), config)
    words = f"no linear_requantize: {said}"
    assert (words in plan.entries[0].reason) == bool(said), plan
    assert ("linear_requantize" in gm.code) == (not said)


def test_notes_stand_at_the_sites_of_bodies_too() -> None:
    """Layers of one checkpointed body are entries of their own."""
    model = Layers(
        lambda s, x: torch.utils.checkpoint.checkpoint(LATE, s, x, use_reentrant=False)
    ).eval()  # fmt: skip
    plans: list[qfx.Plan] = []
    program = torch.export.export(model, (torch.randn(5, 64),)).module()
    plans.append(qfx.rewrite(program, qfx.Config(minimum_gain=0))[1])
    assert ["no linears" in e.reason for e in plans[0].entries] == [False, True, False], plans[0]
