"""Recurrent layers and cells in graphs: a linear of the input, and one operator for all steps."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm

import qfx
from qfx.values.scheme import QSpec, Scheme
from tests.conftest import same_bits
from tests.nn.test_nn_recurrent import CELLS, LAYERS, OPTIONS, H, K, Net, close, tensors

ANY = qfx.Config(minimum_gain=0)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def exported(net: nn.Module, *given: Any) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export names the flat weights of nn.LSTM
        gm: Any = torch.export.export(net, given).module()
    return gm  # type: ignore[no-any-return]


def counts(gm: fx.GraphModule) -> dict[str, int]:
    names = [str(node.target) for node in gm.graph.nodes]
    return {n: sum(n in name for name in names) for n in ("qfx.lstm", "qfx.gru", "qfx.linear")}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_a_linear_and_one_operator(kind: Any, options: str) -> None:
    """With the bits of the module that quantize_ makes."""
    net = Net(kind, **OPTIONS[options]).eval()
    x = torch.randn(6, 3, K)
    with torch.no_grad():
        gm, plan = qfx.rewrite(exported(net, x), ANY)
        expected = qfx.quantize_(copy.deepcopy(net))(x)
        for a, b in zip(tensors(gm(x)), tensors(expected), strict=True):
            assert same_bits(a, b)
    layers, shared = (4, 2) if options.startswith("two") else (1, 1)  # directions share codes of x
    name = "qfx.lstm" if kind is nn.LSTM else "qfx.gru"
    assert (counts(gm)[name], counts(gm)["qfx.linear"]) == (layers, shared)
    assert f"{2 * layers} of {2 * layers} matmuls in int8" in str(plan)
    assert "one operator runs all steps" in str(plan)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_two_linears(kind: Any) -> None:
    net = Net(kind).eval()
    x = torch.randn(3, K)
    state = torch.randn(3, H)
    given = (x, (state, state)) if kind is nn.LSTMCell else (x, state)
    with torch.no_grad():
        gm, plan = qfx.rewrite(exported(net, *given), ANY)
        close(gm(*given), net(*given))
    assert "2 of 2 matmuls in int8" in str(plan)


def test_a_cell_trains_through_int8_linears() -> None:
    net = Net(nn.LSTMCell)
    compiled = torch.compile(net, backend="qfx", options={"minimum_gain": 0, "inner": "aot_eager"})
    state = torch.randn(3, H)
    x = torch.randn(3, K)
    found = []
    for model in (net, compiled):
        net.zero_grad()
        h, c = model(x, (state, state))
        (h.square() + c).sum().backward()
        found.append(net.rnn.weight_hh.grad)
    assert (found[0] - found[1]).norm() <= 0.05 * found[0].norm()


def test_compiled_layers_of_any_length_and_of_changed_weights() -> None:
    """Where Dynamo captures them. One graph serves several lengths."""
    net = Net(nn.LSTM, num_layers=2).eval()
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        compiled = torch.compile(
            net, backend="qfx", fullgraph=True, dynamic=True,
            options={"minimum_gain": 0, "inner": "aot_eager"},
        )  # fmt: skip
        for steps in (5, 9, 300):
            x = torch.randn(steps, 2, K)
            close(compiled(x), net(x))
        net.rnn.weight_hh_l1.mul_(0.5)
        close(compiled(x), net(x))


def test_inductor_calls_the_operator() -> None:
    net = Net(nn.GRU).eval()
    x = torch.randn(100, 2, K)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        compiled = torch.compile(net, backend="qfx", fullgraph=True, options={"minimum_gain": 0})
        close(compiled(x), net(x))


STAYS: dict[str, tuple[dict[str, Any], str]] = {
    "skipped": ({"skip": ["rnn"]}, "skipped by the pattern 'rnn'"),
    "a weight is skipped": ({"skip": ["rnn.weight_hh_l0"]}, "skipped by the pattern"),
    "weight only": ({"scheme": "w8"}, "which ws8r does not serve"),
    "per tensor": (
        {"scheme": Scheme(x=QSpec(axes=(0, 1)))},
        "one scale for all rows, and rows of a state are independent",
    ),
    "guarded": ({"guard": 0.1}, "the steps of a recurrent layer have no bound"),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_stays_is_not_opened(case: str) -> None:
    options, reason = STAYS[case]
    net, x = Net(nn.LSTM).eval(), torch.randn(6, 3, K)
    with torch.no_grad():
        gm, plan = qfx.rewrite(exported(net, x), qfx.Config(minimum_gain=0, **options))
        assert reason in str(plan) and "aten.lstm.input" in str(gm.graph)
        for a, b in zip(tensors(gm(x)), tensors(net(x)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("net", "dtype", "reason"),
    [
        (Net(nn.LSTM, proj_size=32), torch.float32, "with a matmul inside"),
        (Net(nn.LSTM).double(), torch.float64, "with a matmul inside"),
    ],
)
def test_layers_without_an_operator_stay(net: nn.Module, dtype: torch.dtype, reason: str) -> None:
    with torch.no_grad():
        gm, plan = qfx.rewrite(exported(net, torch.randn(6, 3, K, dtype=dtype)), ANY)
    assert reason in str(plan) and "aten.lstm.input" in str(gm.graph)


def test_layers_stay_where_gradients_are_recorded() -> None:
    net, x = Net(nn.LSTM), torch.randn(6, 3, K)
    gm, plan = qfx.rewrite(exported(net, x), ANY, training=True)
    assert "qfx.quantize_(model) makes nn.LSTM and nn.GRU int8 there too" in str(plan)
    gm(x)[0].sum().backward()


def test_steps_that_stay_float_after_all_compute_in_float() -> None:
    """Their scheme is decided later than they are opened, for example by a pinned plan."""
    for kind in LAYERS:
        x, h = torch.randn(5, 3, 4 * H), torch.randn(3, H)
        net = kind(K, H)
        gates = 4 if kind is nn.LSTM else 3
        states = (h, h) if kind is nn.LSTM else (h,)
        products = x[..., : gates * H]
        run = torch.ops.qfx.lstm_float if kind is nn.LSTM else torch.ops.qfx.gru_float
        weights = (net.weight_hh_l0.detach(), net.bias_hh_l0.detach())
        y, *last = run(products, *weights, *states, True)
        state: Any = tuple(t[None] for t in states) if kind is nn.LSTM else h[None]
        eye, zeros = torch.eye(gates * H), torch.zeros(gates * H)
        torch_run = torch.lstm if kind is nn.LSTM else torch.gru
        flat = [eye, weights[0], zeros, weights[1]]
        expected, *end = torch_run(
            products.flip(0),
            state,
            flat,
            True,
            1,
            0.0,
            False,
            False,
            False,  # type: ignore[arg-type]
        )
        assert torch.allclose(y, expected.flip(0), atol=1e-5)
        for a, b in zip(last, end, strict=True):
            assert torch.allclose(a, b[0], atol=1e-5)


def test_explain_measures_steps() -> None:
    net, x = Net(nn.LSTM).eval(), torch.randn(6, 3, K)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        report = qfx.explain(net, x, options={"minimum_gain": 0})
    row = next(row for row in report.rows if "lstm" in row.node)
    assert row.shape == f"6*3x{H}x{4 * H}" and row.measured
    assert row.sqnr_db is not None and row.sqnr_db > 30
    int8 = qfx.quantize_(copy.deepcopy(net))
    with torch.no_grad():
        report = qfx.explain(int8, x, reference=net)
    rows = {row.module: row for row in report.rows if row.scheme != "float"}
    assert {"rnn.ih_l0", "rnn"} <= {*rows}
    assert "100.0% of the bytes of weights" in str(report)


class Headed(Net):
    def forward(self, x: Tensor, h: Any = None) -> Any:
        return self.head(self.rnn(x + 1)[0])


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + 1)


class Last(nn.RNN):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x[0])


EAGER = {"minimum_gain": 0, "inner": "eager"}
CAPTURED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "LSTM": (lambda: Headed(nn.LSTM), {}, True),
    "GRU": (lambda: Headed(nn.GRU, num_layers=2), {}, True),
    "a bare layer": (lambda: nn.LSTM(K, H), {}, True),
    "in a Sequential": (lambda: nn.Sequential(nn.Linear(K, K), nn.GRU(K, H)), {}, True),
    "bfloat16": (lambda: Headed(nn.LSTM).bfloat16(), {}, True),
    "another module is skipped": (lambda: Headed(nn.LSTM), {"skip": ["head"]}, True),
    "skipped": (lambda: Headed(nn.LSTM), {"skip": ["rnn"]}, False),
    "a scheme that it does not serve": (lambda: Headed(nn.LSTM), {"scheme": "w8"}, False),
    "guarded": (lambda: Headed(nn.LSTM), {"guard": 0.5}, False),
    "RNN": (lambda: Headed(nn.RNN), {}, False),
    "float64": (lambda: Headed(nn.LSTM).double(), {}, False),
    "a computed weight": (lambda: weight_norm(nn.LSTM(K, H), "weight_hh_l0"), {}, False),
    "another has no operator": (lambda: nn.Sequential(nn.LSTM(K, H), Last(H)), {}, False),
}


@pytest.mark.parametrize("case", CAPTURED)
@pytest.mark.filterwarnings("ignore:qfx. Dynamo leaves")
def test_dynamo_captures_layers_that_become_int8(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the qfx backend, without gradients; the flag of PyTorch is then as it was."""
    make, options, captured = CAPTURED[case]
    model = make().eval()
    x = torch.randn(6, 3, K, dtype=next(model.parameters()).dtype)
    compiled = torch.compile(model, backend="qfx", options=EAGER | options)
    with caplog.at_level(logging.INFO, logger="qfx"), torch.no_grad():
        for a, b in zip(tensors(compiled(x)), tensors(model(x)), strict=True):
            assert torch.equal(a, b) is not captured
    assert ("one operator runs all steps" in caplog.text) is captured
    assert torch._dynamo.config.allow_rnn is False


def test_other_backends_and_gradients_leave_layers_out() -> None:
    net, x, seen = Headed(nn.LSTM), torch.randn(6, 3, K), list[str]()

    def backend(gm: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    with torch.no_grad():
        compiled = torch.compile(net, backend="qfx", options=EAGER)
        assert not torch.equal(compiled(x), net(x))
    with pytest.warns(UserWarning, match="become int8 in graphs under torch.no_grad"):
        found, expected = compiled(x + 1), net(x + 1)
    assert torch.equal(found, expected)
    found.sum().backward()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Around(net), backend=backend)(x)
    assert seen and not any("lstm" in target for target in seen)


def test_matmuls_have_the_names_of_the_linears_of_quantize() -> None:
    """So a recipe of a float model with recurrent layers serves both ways."""
    net, x = Headed(nn.GRU, num_layers=2, bidirectional=True).eval(), torch.randn(6, 3, K)
    net.head = nn.Linear(2 * H, K)
    recipe = qfx.calibrate(net, [x], ANY, progress=False)
    names = [f"rnn.ih_l{at}{end}" for at in (0, 1) for end in ("", "_reverse")]
    assert [site.name for site in recipe.sites] == [*names, "head"]
    config = {"recipe": recipe, "minimum_gain": 0}
    int8 = qfx.quantize_(copy.deepcopy(net), config)
    with torch.no_grad():
        compiled = torch.compile(net, backend="qfx", options=config | {"inner": "eager"})
        assert same_bits(compiled(x), int8(x))
    rows = qfx.explain(net, x, options={"minimum_gain": 0}).rows
    names += [name.replace("ih", "hh") for name in names]
    assert {row.module for row in rows} == {*names, "head"}


def test_a_warning_names_layers_outside_of_graphs() -> None:
    net, x, options = Headed(nn.LSTM).eval(), torch.randn(6, 3, K), EAGER
    torch.compile(nn.Linear(K, K), backend="qfx", options=options)(x)  # after a reset
    compiled = torch.compile(net, backend="qfx", options=options)
    with pytest.warns(UserWarning, match="Dynamo leaves nn.LSTM out of graphs") as found:
        compiled(x)
        compiled(x[:2])
    assert sum("Dynamo leaves" in str(w.message) for w in found) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "qfx: Dynamo leaves")
        torch.compile(Headed(nn.LSTM), backend="eager")(x)
        torch.compile(Headed(nn.LSTM), backend="qfx", options=options | {"skip": ["rnn"]})(x)
        torch.compile(qfx.quantize_(net), backend="qfx", options=options)(x)
