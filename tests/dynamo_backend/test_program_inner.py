"""torch.compile with the inner compiler "program": the results of the graph that PyTorch runs, for
weights that change, for layers that share a graph, and from several threads; and Inductor where
there is no program."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfx.dynamo_backend import program_compiler
from tests.conftest import on_threads
from tests.lib.models import compiled

FEATURES, HEADS, TOKENS = 64, 4, 9


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runners of the programs that are built; PyTorch runs the graphs that have none."""
    built: list[Any] = []
    build = program_compiler.build

    def recorded(*arguments: Any) -> Any:
        built.append(build(*arguments))
        return built[-1]

    monkeypatch.setattr(program_compiler, "build", recorded)
    return built


class Layer(nn.Module):
    """A layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.out, self.norm = nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, FEATURES // HEADS)
        q, k, v = (linear(x).view(heads).transpose(1, 2) for linear in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v)
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(x.shape)))
        return x + self.down(F.gelu(self.up(x)))


def _pair(model: nn.Module) -> tuple[Any, Any]:
    """Returns the model compiled to programs, and run by PyTorch, in int8 both."""
    return compiled(model.eval(), inner="program"), compiled(model.eval(), inner="eager")


def _near(found: Tensor, expected: Tensor) -> bool:
    """Whether results differ by no more than codes that are rounded in the other direction do."""
    off = (found - expected).norm() / expected.norm()
    return found.shape == expected.shape and bool(off < 0.02)


def _x(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, FEATURES, generator=torch.Generator().manual_seed(batch))


def test_an_encoder_is_one_program(taken: list[Any]) -> None:
    program, plain = _pair(nn.Sequential(Layer(), Layer()))
    with torch.no_grad():
        assert _near(program(_x()), plain(_x()))
    (runner,) = taken
    assert runner.outside == []


def test_a_linear_has_the_bits_of_the_operator(taken: list[Any]) -> None:
    program, plain = _pair(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
    with torch.no_grad():
        for x in (_x(), _x().mT.contiguous().mT):
            assert torch.equal(program(x), plain(x))
    assert len(taken) == 1


def test_inference_mode(taken: list[Any]) -> None:
    program, plain = _pair(Layer())
    with torch.inference_mode():
        assert _near(program(_x()), plain(_x()))
    with torch.no_grad():
        assert _near(program(_x()), plain(_x()))
    assert all(runner.outside == [] for runner in taken)


def test_a_new_shape_makes_a_new_program(taken: list[Any]) -> None:
    model = compiled(Layer().eval(), inner="program", dynamic=False)
    plain = compiled(Layer().eval(), inner="eager", dynamic=False)
    plain._orig_mod.load_state_dict(model._orig_mod.state_dict())
    with torch.no_grad():
        for batch in (1, 2, 3, 2):
            assert _near(model(_x(batch)), plain(_x(batch)))
    assert len(taken) == 3


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "norm.weight"])
@pytest.mark.parametrize("replaced", [False, True], ids=["written to", "replaced"])
def test_weights_may_change(name: str, replaced: bool, taken: list[Any]) -> None:
    model = Layer()
    program, plain = _pair(model)
    with torch.no_grad():
        before = program(_x())
        weight = model.get_parameter(name)
        if replaced:
            weight.data = weight.data * -3
        else:
            weight.mul_(-3)
        assert not _near(program(_x()), before)
        assert _near(program(_x()), plain(_x()))


def test_programs_of_replaced_weights_are_freed(taken: list[Any]) -> None:
    model = Layer()
    program = compiled(model.eval(), inner="program")
    with torch.no_grad():
        for name in ("up.weight", "norm.weight", "up.weight", "norm.bias"):
            program(_x())
            weight = model.get_parameter(name)
            weight.data = weight.data * 1.5
    runners = [weakref.ref(runner) for runner in taken]
    taken.clear()
    gc.collect()
    assert len(runners) == 4
    assert sum(runner() is not None for runner in runners) <= 2


def test_threads(taken: list[Any]) -> None:
    program = compiled(Layer().eval(), inner="program")
    inputs = [_x() * i for i in range(1, 9)]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return program(x)

    expected = [run(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(run, inputs), expected))
    with on_threads(3):
        assert all(map(torch.equal, map(run, inputs), expected))
    assert len(taken) <= 2  # Dynamo compiles again for another number of threads


def test_it_forgets_a_model() -> None:
    model = Layer()
    program = compiled(model.eval(), inner="program")
    with torch.no_grad():
        program(_x())
    weight = weakref.ref(model.up.weight)
    del model, program
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


class Written(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Spectrum(nn.Module):
    """Has no instruction."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).abs().cumsum(-1)


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "gradients": (Layer(), {"grad": True}, "it records gradients"),
    "sizes": (Layer(), {"dynamic": True}, "it serves different sizes"),
    "writes": (Written(), {}, "it writes to its inputs"),
    "operators": (Spectrum(), {}, "PyTorch would run"),
    "folded": (
        nn.Sequential(
            nn.Conv1d(TOKENS, 16, 3), nn.BatchNorm1d(16), nn.Flatten(), nn.Linear(992, 8)
        ),
        {},
        "an input has no values yet",
    ),
    "16 bits": (Layer().bfloat16(), {}, "PyTorch would run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_graphs_are_inductors(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, how, why = REFUSED[name]
    monkeypatch.setattr(
        "qfx.dynamo_backend.backend.inductor", lambda *_: lambda gm, inputs: gm.forward
    )
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    program, plain = (
        compiled(model.eval(), inner=inner, dynamic=how.get("dynamic", False))
        for inner in ("program", "eager")
    )
    with caplog.at_level(logging.INFO, "qfx"), torch.set_grad_enabled(how.get("grad", False)):
        found = program(_x().to(dtype))
        assert torch.equal(found, plain(_x().to(dtype)))
    assert "Inductor compiles a graph that has no program" in caplog.text
    assert why in caplog.text
    assert found.requires_grad == how.get("grad", False)
