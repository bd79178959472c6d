"""Which rows and batches predictions are made of, and what they stand for."""

from __future__ import annotations

import pytest
import torch

from qfx.calibration import sensitivity
from qfx.calibration.batches import arguments_of, parted
from qfx.calibration.sensitivity import _pairs
from qfx.dynamo_backend.captured_graphs import watch_recording

K = 32


@pytest.mark.parametrize(("total", "kept"), [(1, 1), (7, 7), (900, 256), (5, 1)])
def test_the_rows_that_are_kept_stand_for_all(total: int, kept: int) -> None:
    pairs = _pairs(total, kept)
    assert pairs.diagonal().sum() == pytest.approx(total)
    if kept > 1:
        assert pairs.double().sum().item() == pytest.approx(total**2, rel=1e-5)
    if kept == total:
        assert torch.equal(pairs, torch.ones(kept, kept))


def test_a_part_of_the_rows_gives_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean over many draws is the whole: within five of its standard errors."""
    torch.manual_seed(0)
    d, g = torch.randn(40, 8).double(), torch.randn(40, 8).double()
    whole = (d @ d.t() * (g @ g.t())).sum()
    monkeypatch.setattr(sensitivity, "ROWS", 10)
    probing, found = sensitivity.Gradients(torch.Generator().manual_seed(0)), []
    for _ in range(2000):
        kept, total = probing.draw(d)
        assert (len(kept), total) == (10, 40)
        found.append((d[kept] @ d[kept].t() * (g[kept] @ g[kept].t()) * _pairs(40, 10)).sum())
    error = torch.stack(found).std() / len(found) ** 0.5
    assert abs(torch.stack(found).mean() - whole) < 5 * error


def test_gradients_are_found_without_tensors_for_them() -> None:
    """A product's size in zeros, for each site, would be a fifth of what a batch takes."""
    gradients = sensitivity.Gradients(torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(torch.nn.Linear(K, 500), torch.nn.Linear(500, 3)).eval()
    watch_recording(model, gradients.run, torch.randn(7, K))
    assert [leaf.untyped_storage().nbytes() for leaf in gradients.leaves] == [4, 4]


def test_faulty_rows_are_not_kept() -> None:
    x = torch.randn(6, K)
    x[1, 3], x[4, 0] = torch.nan, torch.inf
    kept, total = sensitivity.Gradients(torch.Generator()).draw(x)
    assert (kept.tolist(), total) == ([0, 2, 3, 5], 4)


@pytest.mark.parametrize(
    ("count", "seen", "held"), [(1, 1, 1), (2, 1, 1), (4, 3, 1), (9, 7, 2), (64, 56, 8)]
)
def test_batches_are_parted(count: int, seen: int, held: int) -> None:
    first, last = parted(range(count), count)
    assert (len(first), len(last)) == (seen, held) == (len([*first]), len([*last]))
    assert [*first, *last] == [*range(count)] or count == 1


def test_batches_are_given_as_they_are_meant() -> None:
    x = torch.ones(1)
    assert [arguments_of(b) for b in (x, (x, 2), {"a": x})] == [
        ((x,), {}),
        ((x, 2), {}),
        ((), {"a": x}),
    ]
