"""CUDA graphs replay on fixed addresses: what Inductor does not take for static is copied for each
replay. Packed weights are static to it, and keep their addresses when they are refreshed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 16  # bytes; Inductor copies static inputs of a graph that are not so aligned


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))


class Compilation:
    """The graphs that Inductor is given, and what it calls them with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[list[str]] = []  # inputs, by the shape, that are not static
        self.calls: list[Sequence[Any]] = []
        inner = inductor._compile_fx_inner

        def spy(gm: torch.fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
            static = set(how["static_input_idxs"])
            moving = [t for i, t in enumerate(inputs) if i not in static]
            self.copied.append([str(list(t.shape)) for t in moving])
            return self._watched(inner(gm, inputs, **how))

        monkeypatch.setattr(inductor, "_compile_fx_inner", spy)

    def _watched(self, compiled: Any) -> Any:
        run = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            self.calls.append(list(inputs))
            return run(inputs)

        compiled.current_callable = call
        return compiled


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilation]:
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        yield Compilation(monkeypatch)


def _compiled(model: Any, scheme: str = "w8a8") -> Callable[..., Tensor]:
    options = {"minimum_gain": 0, "scheme": scheme, "triton.cudagraphs": True}
    return torch.compile(model, backend="qfx", options=options)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@torch.no_grad()
def test_packed_weights_are_static(scheme: str, compilation: Compilation) -> None:
    model, x = Model(), torch.randn(5, 64)
    run = _compiled(model, scheme)
    before = run(x)
    assert compilation.copied == [["[5, 64]"]]  # x alone
    model.up.weight.mul_(2)  # packed again, in place
    torch.testing.assert_close(run(x), _compiled(copy.deepcopy(model), scheme)(x))
    first, second = compilation.calls[:2]
    addresses = [[t.data_ptr() for t in call if t is not x] for call in (first, second)]
    assert addresses[0] == addresses[1] and len(addresses[0]) > 4
    assert all(address % ALIGNMENT == 0 for address in addresses[0])
    assert not torch.equal(before, run(x))


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@torch.no_grad()
def test_a_weight_that_a_function_is_given_is_packed_into_static_memory(
    compilation: Compilation,
) -> None:
    """Of a plain function, whose own arguments move."""
    model = Model()
    _compiled(lambda x, scale: model(x) * scale)(torch.randn(5, 64), torch.ones(64))
    assert compilation.copied == [["[5, 64]", "[64]"]]


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_frozen_weights_are_static_where_gradients_are_recorded(compilation: Compilation) -> None:
    model, x = Model().requires_grad_(False), torch.randn(5, 64, requires_grad=True)
    _compiled(model)(x).sum().backward()
    assert compilation.copied[0] == ["[5, 64]"]
