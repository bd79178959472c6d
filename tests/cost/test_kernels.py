"""Parameters of kernels: measured here, kept, shown, and asked again where they did not settle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qfx
import qfx._C as _C
from qfx.cost import disk, kernels
from qfx.cost.kernel_parameters import KernelParameters
from tests.conftest import on_threads


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_chosen_here_is_legal_and_nothing_is_set(threads: int) -> None:
    for isa in _C.isas():
        before = _C.tuning(isa)
        with on_threads(threads):
            found = kernels.measured(isa, threads)
        _C.check_tuning(isa, {name: dict(given) for name, given in found.formats.items()})
        assert _C.tuning(isa) == before and [*found.formats] == [*before]


def test_a_product_of_more_rows_than_it_was_made_for_is_refused() -> None:
    with pytest.raises(ValueError, match="a product of 3 rows, made for 2"):
        _C.TimedProduct(2, 64, 32, 1).seconds("ref", "s8s8", {}, 3, 1)


# --- kept and shown ---

OTHER = {"ahead": 640, "hint": "t1"}


@pytest.fixture
def isa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A process that has tuned nothing yet, of a user without files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_SET", {})
    kernels._chosen.cache_clear()
    name = _C.isa()
    before = _C.tuning(name)
    _C.set_tuning(name, _C.default_tuning(name))
    yield name
    _C.set_tuning(name, before)
    kernels._chosen.cache_clear()


class Measuring:
    """Takes the place of `measured`, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *spreads: float) -> None:
        self.spreads, self.calls = spreads, 0
        monkeypatch.setattr(kernels, "measured", self)

    def __call__(self, isa: str, threads: int) -> KernelParameters:
        self.calls += 1
        spread = self.spreads[self.calls - 1]
        formats = {name: given | OTHER for name, given in _C.default_tuning(isa).items()}
        return KernelParameters(formats, dict.fromkeys(formats, spread))

    def in_new_process(self) -> int:
        """Tunes, and returns how often was measured."""
        kernels._chosen.cache_clear()
        before = self.calls
        kernels.tune_kernels()
        return self.calls - before


def origins() -> set[str]:
    return {format.origin for format in qfx.kernels().formats}


def test_what_was_chosen_is_in_use_and_a_second_process_measures_nothing(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.01)
    assert origins() == {kernels.DEFAULT}
    assert [measuring.in_new_process() for _ in range(3)] == [1, 0, 0]
    assert all(given.items() >= OTHER.items() for given in _C.tuning(isa).values())
    assert origins() == {"measured here, spread 1.0%"}
    assert "measured here, spread 1.0%" in str(qfx.kernels())


def test_each_number_of_threads_is_measured_apart(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.0, 0.0)
    with on_threads(1):
        assert measuring.in_new_process() == 1
    assert [measuring.in_new_process() for _ in range(2)] == [1, 0]


def test_what_was_set_by_hand_stays(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(monkeypatch, 0.0)
    _C.set_tuning(isa, {name: {"ahead": 4032} for name in _C.tuning(isa)})
    assert measuring.in_new_process() == 1
    assert {given["ahead"] for given in _C.tuning(isa).values()} == {4032}
    assert origins() == {kernels.BY_HAND}


def test_a_high_spread_is_measured_again_and_the_best_stays(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.5, 0.2, 0.9)
    assert [measuring.in_new_process() for _ in range(disk.TRIES + 2)] == [1, 1, 1, 0, 0]
    assert origins() == {"measured here, not settled: spread 20.0%"}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: text.replace("640", "-1"),
        lambda text: text.replace('"t1"', '"t9"'),
        lambda text: text.replace('"ahead"', '"behind"'),
        lambda text: text.replace('"ahead": 640, ', ""),
        lambda text: text.replace('"s8s8', '"s9s9'),
        lambda text: text.replace("0.0", "1e9"),
        lambda text: text.replace("1\n", "", 1),
        lambda text: text.replace("1\n", "0\n", 1),
        lambda text: "1\n[]",
    ],
)
def test_a_file_that_is_none_is_measured_anew(
    change: Any, isa: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measuring = Measuring(monkeypatch, 0.0, 0.0)
    measuring.in_new_process()
    cache = disk.TABLES.cache()
    assert cache is not None and cache.folder == tmp_path / "qfx"
    (key,) = (path.name for path in cache.folder.iterdir())
    text = cache.read(key).decode()
    assert json.loads(text.partition("\n")[2])["spreads"] and change(text) != text
    cache.write(key, change(text).encode())
    assert [measuring.in_new_process() for _ in range(2)] == [1, 0]
    assert cache.read(key).decode() == text


@pytest.mark.real_cost
def test_a_compilation_tunes_and_an_operator_does_not(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.0)
    qfx.quantize(torch.ones(4, 8), qfx.QSpec())
    qfx.nn.functional.linear(torch.ones(2, 8), torch.ones(4, 8))
    assert measuring.calls == 0
    qfx.rewrite(qfx.trace(torch.nn.Linear(8, 4)))  # its sizes are not known: nothing is priced
    assert measuring.calls == 1
