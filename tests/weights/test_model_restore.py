"""explain, calibrate and the preparations leave model and generators as they were, in any mode."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import qfx
from qfx.weights.model_restore import in_training
from qfx.weights.model_snapshot import ModelSnapshot
from tests.lib.pairs import every

K = 16
X = torch.randn(8, K, generator=torch.Generator().manual_seed(0))
STATIC = qfx.Config(scheme="w8a8-static", minimum_gain=0)
ALL = {"minimum_gain": 0}


class Net(nn.Module):
    """Two linears, and between them what a row of CHANGES does."""

    def __init__(self, change: Callable[[Net, Tensor], Tensor], captured: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(K, K), nn.Linear(K, K)
        self.norm, self.instance = nn.BatchNorm1d(K), nn.InstanceNorm1d(K, track_running_stats=True)
        self.drop, self.aside = nn.Dropout(0.5), nn.Parameter(torch.ones(K))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("hidden", torch.tensor([1.0, torch.nan]), persistent=False)
        self.change = change if captured else torch._dynamo.disable(change)
        self.fails: BaseException | None = None
        self.calls, self.seen, self.built = 0, [0], False

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.change(self, self.first(x)))
        if self.fails is not None:
            torch._dynamo.graph_break()
            raise self.fails
        return h


def after(h: Tensor, *done: Any) -> Tensor:
    """h, once the rest was done."""
    return h


def _written(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _build(net: Net) -> None:
    """Without its flag the part would be missing, and the flag without the part."""
    net.built, net.scale = True, nn.Parameter(torch.ones(1))
    net.add_module("part", nn.ReLU())


def _rebound(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.5


CHANGES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "batch norm": lambda net, h: net.norm(h),
    "instance norm": lambda net, h: net.instance(h.t()[None])[0].t(),
    "a buffer": lambda net, h: after(h, net.kept.add_(1)),
    "a hidden buffer": lambda net, h: after(h, net.hidden.mul_(2)),
    "a buffer's data": lambda net, h: after(h, net.kept.data.copy_(net.kept * 3)),
    "another buffer": lambda net, h: after(h, setattr(net, "kept", net.kept + 1)),
    "a buffer's memory": lambda net, h: after(h, _rebound(net.kept)),
    "a new buffer": lambda net, h: after(h, net.register_buffer("more", torch.ones(1))),
    "a parameter": lambda net, h: after(h, _written(net.aside)),
    "a parameter's data": lambda net, h: after(h, net.aside.data.mul_(0.5)),
    "a parameter's memory": lambda net, h: after(h, _rebound(net.aside)),
    "an attribute": lambda net, h: after(h, setattr(net, "calls", net.calls + 1)),
    "a list": lambda net, h: after(h, net.seen.append(1)),
    "a part that is built": lambda net, h: h if net.built else after(h, _build(net)),
    "dropout": lambda net, h: net.drop(h),
    "random": lambda net, h: h * random.random() * random.gauss(1, 0.1),
    "numpy": lambda net, h: h * float(np.random.rand()),
}
IN_PLACE = ("a parameter", "a parameter's data")  # undone only where a graph does it


def all_changes(net: Net, h: Tensor) -> Tensor:
    for name, change in CHANGES.items():
        h = h if name in IN_PLACE else change(net, h)
    return h


def calibrated(model: Any, *others: Any, **options: Any) -> qfx.Recipe:
    return qfx.calibrate(model, [X, 2 * X], *others, progress=False, **options)


CALLS: dict[str, Callable[[Any], Any]] = {
    "explain": lambda m: qfx.explain(m, X, options=ALL),
    "explain, traced": lambda m: qfx.explain(torch.compile(m, backend="eager"), X, options=ALL),
    "calibrate": lambda m: calibrated(m, STATIC),
    "calibrate by metric": lambda m: calibrated(m, metric=lambda f: float(f(X).sum())),
    "prepare_qat": lambda m: qfx.prepare_qat(m, X),
    "prepare_binary": lambda m: qfx.prepare_binary(m, X),
}
EAGER = ("calibrate by metric", "prepare_qat", "prepare_binary")  # the model runs as it is


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def everything(model: nn.Module) -> Any:
    """Which tensors and parts there are, where and with what bits; the states of generators."""
    held = {
        n: (id(t), t.data_ptr(), t.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for n, t in tensors(model).items()
        if "log" not in n  # steps are new
    }
    own = {n: repr(v) for n, v in vars(model).items() if not n.startswith("_")}
    parts = [name for name, _ in model.named_modules()]
    numbers = repr(np.random.get_state(legacy=False))
    return held, own, parts, torch.get_rng_state().tolist(), random.getstate(), numbers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change, captured", every(CHANGES, [True, False]))
def test_nothing_is_changed(change: str, captured: bool) -> None:
    if change in IN_PLACE and not captured:
        pytest.skip("only a warning reports this change: see the test of warnings")
    net = Net(CHANGES[change], captured)
    before = everything(net)
    qfx.explain(net, X, options=ALL)
    assert everything(net) == before
    net(X)
    assert everything(net) != before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training, captured", [(True, True), (False, False)])
@pytest.mark.parametrize("call", CALLS)
def test_no_call_changes_anything(call: str, training: bool, captured: bool) -> None:
    net = Net(all_changes, captured).train(training)
    before = everything(net)
    CALLS[call](net)
    assert everything(net) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", [ValueError("at the end"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_changed_by_what_raises(call: str, fault: BaseException) -> None:
    def change(net: Net, h: Tensor) -> Tensor:
        net.kept.add_(1)
        return net.drop(net.norm(h))

    net = Net(change)
    net.fails = fault
    before = everything(net)
    with pytest.raises(type(fault)):
        CALLS[call](net)
    assert everything(net) == before


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_calibration_puts_back_what_its_batches_did() -> None:
    net = Net(CHANGES["batch norm"])
    before = everything(net)

    def batches() -> Any:
        yield X
        net.fails = KeyboardInterrupt()
        yield X

    with pytest.warns(UserWarning, match="interrupted, 1 batches count"):
        qfx.calibrate(net, batches(), progress=False)
    assert everything(net) == before


@pytest.mark.parametrize("call", ["explain", *EAGER])
def test_parameters_that_cannot_be_put_back_are_named(call: str) -> None:
    net = Net(CHANGES["a parameter"], captured=False).eval()
    said = call.split(" ")[0]
    with pytest.warns(
        UserWarning, match=f"qfx.{said}: .* wrote to its parameters aside, which"
    ) as w:
        CALLS[call](net)
    assert {each.filename for each in w} == {__file__} or call.startswith("calibrate")


@pytest.mark.parametrize("change", [*IN_PLACE, "a buffer", "batch norm", "dropout"])
def test_of_a_function_what_its_graphs_write_is_put_back(change: str) -> None:
    net = Net(CHANGES[change])
    before = everything(net)
    qfx.explain(lambda x: net(x), X, options=ALL)
    calibrated(lambda x: net(x))
    assert everything(net) == before


def test_buffers_that_nobody_writes_are_not_touched() -> None:
    """Their versions too: what is packed of them stays valid."""
    net = Net(CHANGES["batch norm"]).eval()
    before = {n: t._version for n, t in tensors(net).items()}
    qfx.explain(net, X, options=ALL)
    assert {n: t._version for n, t in tensors(net).items()} == before


def test_buffers_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net = Net(CHANGES["a buffer"])
        before = everything(net)
        qfx.explain(net, X, options=ALL)
        assert everything(net) == before


@pytest.mark.filterwarnings("ignore:.*saw no graph")
def test_models_that_fsdp_shards_are_left_to_it(one_rank: Any) -> None:
    """It notes itself which parameters are gathered; buffers are put back all the same."""
    net = Net(CHANGES["a buffer"], captured=False)
    fully_shard(net, mesh=one_rank)
    expected, kept = net(X), net.kept.clone()
    qfx.explain(net, X)
    assert torch.equal(net.kept, kept) and torch.equal(net(X), expected)


def test_lazy_modules_stay_made() -> None:
    net = nn.Sequential(nn.LazyLinear(K), nn.LazyBatchNorm1d())
    state = torch.get_rng_state()
    assert qfx.explain(net, X, options=ALL).total == 1
    assert torch.equal(torch.get_rng_state(), state) and type(net[0]) is nn.Linear
    net(X)


def test_int8_weights_are_not_copied() -> None:
    made = nn.Sequential(qfx.nn.Linear(K, K), qfx.nn.Embedding(8, K))
    assert not ModelSnapshot(made).values and {*made[1].READ_ONLY} == {*made[1]._buffers}


# --- the mode is said ---


def test_reports_say_that_the_model_trains(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    net, said = (
        Net(CHANGES["dropout"]),
        "in training mode: what dropout and batch statistics",
    )
    report = qfx.explain(net, X, options=ALL)
    report.save_html(tmp_path / "report.html")
    assert f"\nthe model is {said}" in str(report)
    assert f"the model is {said}" in (tmp_path / "report.html").read_text()
    assert "training" not in str(qfx.explain(net.eval(), X, options=ALL))
    net.drop.train()
    assert f"\n1 of the model's 6 modules are {said}" in str(qfx.explain(net, X, options=ALL))


def test_calibration_says_that_the_model_trains() -> None:
    net = Net(CHANGES["dropout"])
    with pytest.warns(
        UserWarning, match=r"^qfx.calibrate: the model is in training mode.*eval\(\)"
    ) as w:
        calibrated(net)
    assert [each.filename for each in w if "training" in str(each.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*training mode", UserWarning)
        calibrated(net.eval())


def test_the_mode_is_that_of_the_module_that_is_called() -> None:
    net = Net(CHANGES["dropout"])
    wrapped = (net, net.forward, partial(net), torch.compile(net), partial(net.forward, X))
    assert {in_training(each) for each in wrapped} == {"the model is"}
    assert in_training(torch.relu) == in_training(lambda x: net(x)) == ""


@pytest.mark.filterwarnings("ignore:.*training mode")
def test_calibration_of_a_model_in_training_mode_is_reproducible() -> None:
    """Both passes over the batches, and the next calibration, see the same dropout."""
    net, seen = Net(CHANGES["dropout"]), []
    net.last.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    assert calibrated(net, STATIC) == calibrated(net, STATIC)
    assert len(seen) == 8 and not torch.equal(seen[0], seen[1] / 2)
    assert all(map(torch.equal, seen[:2] * 3, seen[2:]))
