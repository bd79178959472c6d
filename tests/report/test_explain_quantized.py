"""explain of models with int8 modules: what runs, against their weights in float or a reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.io.errors import UserError
from qfx.ops.single_tensors import sqnr
from qfx.report.float_forms import computing_in_float, int8_modules

K = 64
ALL = {"minimum_gain": 0}


class Net(nn.Module):
    """Ids [B, T] -> logits [B, T, 40], by a table, a linear called twice, attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, K)
        self.twice, self.act, self.drop = nn.Linear(K, K), nn.GELU(), nn.Dropout(0.5)
        self.few, self.skipped = nn.Linear(K, K, bias=False), nn.Linear(K, K)
        self.head = nn.Linear(K, 40)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.drop(self.embed(ids))
        h = h + self.act(self.twice(self.act(self.twice(h))))
        a = F.scaled_dot_product_attention(*(h.unsqueeze(1),) * 3).squeeze(1)
        return self.head(self.skipped(self.few(a)))


IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(0))
SKIP = {"skip": ["skipped"]}


def net(**how: Any) -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    return qfx.quantize_(model, {**SKIP, **how}) if how else model


def inputs_of(model: nn.Module, *names: str) -> dict[str, list[Tensor]]:
    """What these modules get in a call of the model."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0])
        )
        for name in names
    ]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return seen


def by_module(report: qfx.Report) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in report.rows:
        found.setdefault(row.module, []).append(row)
    return found


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w5"])
def test_each_call_of_an_int8_linear_is_a_row_with_its_error_and_times(scheme: str) -> None:
    model = net(scheme=scheme)
    report = qfx.explain(model, IDS)
    rows = by_module(report)
    int8 = {n: len(r) for n, r in rows.items() if r[0].scheme != "float"}
    assert int8 == {"twice": 2, "few": 1, "head": 1} and report.quantized == 4
    for name, seen in inputs_of(model, *int8).items():
        module = model.get_submodule(name)
        for row, x in zip(rows[name], seen, strict=True):
            with torch.no_grad():
                exact, y = F.linear(x, module.weight.dequantize(), module.bias), module(x)
            assert row.sqnr_db == pytest.approx(sqnr(exact, y), abs=1e-3)
            assert (row.sqnr_db > 100) is (scheme == "w5")  # whose inputs are not rounded
            assert row.measured and row.float_s and row.int8_s and row.kernel and row.bits
            assert row.scheme == str(module.scheme) and row.input_max == x.abs().max()
            assert row.reason == "an int8 module, qfx.nn.Linear"
            block = module.scheme.block(module.in_features)
            assert row.transform.endswith(f"R{block}" if block else "")
            assert ("factor" in row.transform) is (module.factor is not None)


def test_a_reference_adds_what_the_weights_lost() -> None:
    reference, model = net(), net(scheme="w4a8")
    alone, beside = (qfx.explain(model, IDS, reference=r) for r in (None, reference))
    seen = inputs_of(model, "twice", "few", "head")
    for name in seen:
        exact, module = reference.get_submodule(name), model.get_submodule(name)
        pairs = zip(by_module(alone)[name], by_module(beside)[name], seen[name], strict=True)
        for without, row, x in pairs:
            with torch.no_grad():
                assert row.sqnr_db == pytest.approx(sqnr(exact(x), module(x)), abs=1e-3)
            assert row.sqnr_db < without.sqnr_db - 6
    assert beside.whole.sqnr_db < alone.whole.sqnr_db - 3
    assert "reference model" in str(beside) and "reference=float_model" in str(alone)


def test_the_whole_of_a_quantized_model_is_what_the_outputs_say() -> None:
    reference, model = net(), net(scheme="w4a8")
    with torch.no_grad():
        noisy, exact = model(IDS), reference(IDS)
        with computing_in_float(int8_modules(model)):
            dequantized = model(IDS)
    assert qfx.explain(model, IDS, reference=reference).whole.sqnr_db == sqnr(exact, noisy)
    whole = qfx.explain(model, IDS).whole
    assert whole.sqnr_db == sqnr(dequantized, noisy)
    assert whole.float_s > 0 and whole.int8_s > 0 and whole.turns >= 1


def test_what_is_float_says_why() -> None:
    model = net(scheme="w8a8")
    rows = by_module(qfx.explain(model, IDS))
    assert rows["skipped"][0].reason == "skipped by the pattern 'skipped'"
    assert rows[""][0].scheme == "float"
    assert rows[""][0].reason.startswith("float as called; compiled by qfx: ")
    copied = by_module(qfx.explain(copy.deepcopy(model), IDS))
    assert copied["skipped"][0].reason == "a float module"
    few = qfx.quantize_(nn.Sequential(nn.Linear(4, K), nn.Linear(K, K)))
    (row, _) = qfx.explain(copy.deepcopy(few), torch.randn(3, 4)).rows
    assert row.scheme == "float" and "K=4" in row.reason


def test_options_and_torch_compile_say_what_compiling_adds() -> None:
    model = net(scheme="w8a8")
    compiled = torch.compile(model, backend="qfx", options=ALL)
    for report in (
        qfx.explain(compiled, IDS, options=ALL),
        qfx.explain(model, IDS, options=ALL),
    ):
        (added,) = by_module(report)["skipped"]
        assert added.scheme != "float" and added.sqnr_db and added.measured
        assert {r.measured for r in by_module(report)["twice"]} == {True}
        assert "as qfx rewrites them" in report.whole.int8_side
    assert by_module(qfx.explain(model, IDS))["skipped"][0].sqnr_db is None


def test_a_lookup_is_a_row_and_no_matmul() -> None:
    reference, model = net(), net(scheme="w8a8", embeddings="int8")
    report = qfx.explain(model, IDS)
    row, *_ = report.rows
    assert (row.module, row.shape, row.scheme) == ("embed", f"48 of 40x{K}", "ws8r")
    assert row.sqnr_db is None and row.float_s and row.int8_s
    assert report.quantized == 4 and report.total == len(report.rows) - 1
    (found,) = by_module(qfx.explain(model, IDS, reference=reference))["embed"]
    with torch.no_grad():
        assert found.sqnr_db == pytest.approx(sqnr(reference.embed(IDS), model.embed(IDS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = qfx.quantize_(nn.Sequential(nn.Linear(K, K), nn.Tanh()).to(dtype))
    x = torch.randn(5, K).to(dtype)
    report = qfx.explain(model, x)
    linear = model[0]
    exact = F.linear(x.float(), linear.weight.dequantize(torch.float32), linear.bias.float())
    with torch.no_grad():
        assert report.rows[0].sqnr_db == pytest.approx(sqnr(exact, linear(x)), abs=1e-3)
        weight = linear.weight.dequantize(torch.float32).to(dtype)
        whole = sqnr(F.linear(x, weight, linear.bias).tanh(), model(x))
    assert report.whole.sqnr_db == whole


def test_the_model_its_hooks_and_generators_are_left_alone() -> None:
    """In training mode, so that dropout draws: both sides of the whole draw the same."""
    model, calls = net(scheme="w8a8").train(), []
    model.twice.register_forward_hook(lambda m, args, y: calls.append(1) or y * 2)
    held = [(vars(m).copy(), m._forward_hooks.copy()) for m in model.modules()]
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = qfx.explain(model, IDS)
    assert [(vars(m), m._forward_hooks) for m in model.modules()] == held
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator) and calls
    assert "training mode" in str(report) and report.whole.sqnr_db > 25
    first, second = by_module(report)["twice"]
    assert first.sqnr_db < 60 and second.sqnr_db < 60  # what the hook doubles is no error


def test_references_that_do_not_fit() -> None:
    model = net(scheme="w8a8")
    with pytest.raises(UserError, match="has no linear or embedding 'twice'"):
        qfx.explain(model, IDS, reference=nn.Linear(3, 3))
    other = net()
    other.head = nn.Linear(K, 41)
    with pytest.raises(UserError, match=r"head of reference has a weight \[41, 64\].* \[40, 64\]"):
        qfx.explain(model, IDS, reference=other)
    with pytest.raises(UserError, match="reference is a function, expected the float model"):
        qfx.explain(model, IDS, reference=lambda ids: ids)  # type: ignore[arg-type]


def test_transposed_weights_of_a_reference() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    reference = nn.Sequential(conv1d(48, K))
    model, x = qfx.quantize_(copy.deepcopy(reference)), torch.randn(5, K)
    (row,) = qfx.explain(model, x, reference=reference).rows
    with torch.no_grad():
        assert row.sqnr_db == pytest.approx(sqnr(reference(x), model(x)), abs=1e-3)


class Up(nn.Module):
    """A padded convolution, and a transposed one whose output has a given size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 24, 3, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(24, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.conv(x), output_size=[12, 11])
        return y


def test_convolutions_are_measured_as_linears_are() -> None:
    torch.manual_seed(0)
    reference, x = Up().eval(), torch.randn(2, 16, 6, 6)
    model = qfx.quantize_(copy.deepcopy(reference))
    own, against = qfx.explain(model, x), qfx.explain(model, x, reference=reference)
    with torch.no_grad():
        inner = model.conv(x)
        whole = model(x), reference(x)
        wanted = sqnr(reference.conv(x), inner)
        up = sqnr(reference.up(inner), model.up(inner))  # of the calls without a size
        with computing_in_float(int8_modules(model)):
            weights_alone = model(x)
    assert own.whole.sqnr_db == pytest.approx(sqnr(weights_alone, whole[0]), abs=1e-3)
    rows = by_module(against)
    assert rows["conv"][0].sqnr_db == pytest.approx(wanted, abs=1e-3)
    assert rows["up"][0].sqnr_db == pytest.approx(up, abs=1e-3)
    assert [rows[name][0].shape for name in ("conv", "up")] == ["72x144x24", "84x96x32"]
    assert against.whole.sqnr_db == pytest.approx(sqnr(whole[1], whole[0]), abs=1e-3)
    reference.conv = nn.Conv2d(16, 24, 5)
    with pytest.raises(
        UserError, match=r"conv of reference .* \[24, 16, 5, 5\], .* \[24, 16, 3, 3\]"
    ):
        qfx.explain(model, x, reference=reference)


def test_steps_of_recurrent_layers_are_one_row() -> None:
    """Of both directions, not a row for each step; in float the whole layer is PyTorch's."""
    torch.manual_seed(0)
    rnn = nn.LSTM(16, 32, batch_first=True, bidirectional=True)
    reference = nn.Sequential(nn.Conv1d(16, 16, 3), nn.Flatten(2), rnn).eval()
    reference[1].forward = lambda x: x.transpose(1, 2)  # type: ignore[method-assign]
    model, x = qfx.quantize_(copy.deepcopy(reference)), torch.randn(2, 16, 9)
    report = qfx.explain(model, x)
    names = ["0", "2.ih_l0", "2", "2.ih_l0_reverse", "2"]
    assert [row.module for row in report.rows] == names
    with torch.no_grad():
        y, (h, c) = model(x)
        layers = [m for m in model.modules() if isinstance(m, qfx.nn.LSTM)]
        with computing_in_float(int8_modules(model), layers):
            y2, (h2, c2) = model(x)
    ours = torch.cat([t.flatten() for t in (y, h, c)])
    theirs = torch.cat([t.flatten() for t in (y2, h2, c2)])
    assert report.whole.sqnr_db == pytest.approx(sqnr(theirs, ours), abs=1e-3)


def test_modules_that_train_are_measured_against_what_they_train() -> None:
    torch.manual_seed(0)
    model = qfx.prepare_qat(nn.Sequential(nn.Linear(K, K)), config=qfx.Config(scheme=qfx.Scheme()))
    x = torch.randn(5, K)
    (row,) = qfx.explain(model, x).rows
    exact = F.linear(x, model[0].weight, model[0].bias)
    assert row.sqnr_db == pytest.approx(sqnr(exact.detach(), model(x).detach()), abs=1e-3)


def test_functions_that_call_int8_operators_need_a_reference() -> None:
    model = net(scheme="w8a8")
    report = qfx.explain(lambda ids: model(ids), IDS)
    assert report.whole.why_not == "it calls int8 operators itself: give explain a reference"
    own = [r for r in report.rows if r.reason == "an int8 operator of the model itself"]
    assert len(own) == 4 and {r.sqnr_db for r in own} == {None}
