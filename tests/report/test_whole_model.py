"""The row of the whole model: its output and time in int8 against float, for all kinds of outputs
and inputs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.ops.single_tensors import sqnr
from qfx.report.whole_model import CallInputs, Side, WholeModel, floating, output_sqnr, whole_model
from tests.lib.decoders import decoder, ids
from tests.lib.models import FEATURES, Applied, Block, compiled

X = torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(0))
ALL = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}


class _Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class _Output:
    logits: Tensor
    past_key_values: Any = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, 3),
    "named tuple": lambda y: _Pair(y, [y.argmax(-1)]),
    "dict": lambda y: {"logits": y, "past_key_values": (2 * y, 3 * y)},
    "ordered dict": lambda y: OrderedDict(hidden=(y[:1], y[1:])),
    "data class": lambda y: _Output(y, (2 * y,)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_whole_is_what_the_outputs_say(kind: str) -> None:
    torch.manual_seed(0)
    model = Block()
    whole = qfx.explain(Applied(lambda x: OUTPUTS[kind](model(x))), X, options=ALL).whole
    with torch.no_grad():
        assert whole.sqnr_db == pytest.approx(sqnr(model(X), compiled(model)(X)), abs=1e-6)
    assert 20 < whole.sqnr_db < 60 and whole.why_not == ""
    assert 0 < whole.float_s < 60 and 0 < whole.int8_s < 60 and 1 <= whole.turns <= 5


def test_outputs_of_transformers_and_caches_among_the_inputs() -> None:
    """Each run begins with the cache as it was given."""
    transformers = pytest.importorskip("transformers")
    model, cache = decoder("llama"), transformers.DynamicCache()
    with torch.no_grad():
        model(ids(1, 3), past_key_values=cache)
        kept = [layer.keys.clone() for layer in cache.layers]
        exact = model(ids(1, 4, 1), past_key_values=cache).logits
    for layer, length in zip(cache.layers, [k.shape[-2] for k in kept], strict=True):
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    report = qfx.explain(model, ids(1, 4, 1), past_key_values=cache, options=ALL)
    assert report.whole.sqnr_db is not None and 20 < report.whole.sqnr_db < 60
    assert exact.shape[1] == 4 and cache.layers[0].keys.shape[-2] == 7  # the first run's


def test_models_of_compile_for_generate() -> None:
    """Rows are of its modules, the whole of what a call runs; it generates as before."""
    model = qfx.compile_for_generate(decoder("llama"), max_length=48)
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    text = model.generate(ids(1, 9), **how)
    report = qfx.explain(model, ids(1, 9))
    linears = [name for name, m in model.named_modules() if isinstance(m, qfx.nn.Linear)]
    rows = {row.module: row for row in report.rows if row.scheme != "float"}
    assert {*rows} == {*linears} and all(row.sqnr_db and row.int8_s for row in rows.values())
    assert "programs of compile_for_generate" in str(report) and report.whole.sqnr_db > 20
    assert torch.equal(model.generate(ids(1, 9), **how), text)
    assert model.forward.by_modules  # the programs are in their place again


def test_a_graph_of_leaf_modules_is_what_torch_compile_makes_of_it() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.point = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 1)
            self.norm, self.act, self.pool = nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
            self.fc, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.act(self.norm(self.point(self.act(self.first(x)))))).flatten(1)
            return self.head(self.act(self.fc(x)))

    graph, x = torch.fx.symbolic_trace(Conv().eval()), torch.randn(2, 3, 8, 8)
    assert {n.op for n in graph.graph.nodes} > {"call_module"}
    plans: list[Any] = []
    with torch.no_grad():
        text = _plans_of(lambda: compiled(graph, **ALL)(x), plans)
    report = qfx.explain(graph, x, options=ALL)
    assert (report.quantized, report.total) == (4, 4) and text.endswith("4 of 4 matmuls in int8")
    assert [r.module for r in report.rows if r.sqnr_db] == ["first", "point", "fc", "head"]
    assert "leaf module" not in str(report) and report.whole.sqnr_db > 20


def _plans_of(call: Callable[[], Any], found: list[Any]) -> str:
    """Runs the call; what the backend logs as its plan."""
    import logging

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    log, listener = logging.getLogger("qfx.dynamo_backend.backend"), Listener()
    level = log.level
    log.addHandler(listener), log.setLevel(logging.INFO)
    try:
        call()
    finally:
        log.removeHandler(listener), log.setLevel(level)
    return str(found[0])


def test_it_stands_at_the_end_of_the_table_and_of_the_page(tmp_path: Path) -> None:
    report = qfx.explain(Block(), X, options=ALL)
    assert report.last_rows[0].sqnr_db == report.whole.sqnr_db
    table = str(report).splitlines()
    (last,) = (line for line in table if line.startswith("whole model "))
    assert table.index(last) == 2 + len(report.rows) and f" {report.whole.sqnr_db:.1f} " in last
    assert f"\nwhole model: SQNR of the output {report.whole.sqnr_db:.1f} dB, " in str(report)
    pytest.importorskip("jinja2"), pytest.importorskip("matplotlib")
    report.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    foot = text[text.index("<tfoot>") : text.index("</tfoot>")]
    assert "whole model" in foot and f">{report.whole.sqnr_db:.1f}<" in foot
    assert f"{report.whole.sqnr_db:.1f} dB</dd>" in text and "without Inductor" in text


class _Once(nn.Module):
    """Its second call raises, and nothing puts that back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.left = nn.Linear(FEATURES, FEATURES), iter([1])

    @torch.compiler.disable
    def count(self) -> None:
        next(self.left)

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.fc(x)


WHY_NOT: dict[str, tuple[Callable[[], qfx.Report], str]] = {
    "all float": (lambda: qfx.explain(Block(), X), "all of it is float"),
    "an input that cannot be copied": (
        lambda: qfx.explain(lambda x, lock: x @ X[0].mT, X, Lock()),
        "the inputs cannot be copied for another run: TypeError: cannot pickle",
    ),
    "a call that works once": (
        lambda: qfx.explain(_Once(), X, options=ALL),
        "another run of it raised StopIteration",
    ),
}


@pytest.mark.filterwarnings("ignore:.*saw no graph")
@pytest.mark.parametrize("case", WHY_NOT)
def test_where_it_is_not_measured_the_report_says_why(case: str) -> None:
    make, why = WHY_NOT[case]
    report = make()
    assert report.whole.why_not.startswith(why) and report.last_rows == ()
    assert f"\nwhole model: not measured, {why}" in str(report)


def test_inputs_that_are_written_to_are_put_back() -> None:
    x = X.clone()
    model = nn.Linear(FEATURES, FEATURES)
    report = qfx.explain(lambda t: model(t.add_(1)), x, options=ALL)
    assert torch.equal(x, X) and 20 < report.whole.sqnr_db < 60


def test_what_was_packed_for_it_is_forgotten() -> None:
    from qfx.weights.cache import CACHE

    def packed() -> set[int]:
        """Storages of packed weights. Those of other tests may be freed at any time."""
        len(CACHE)  # forgets the dead
        return {storage for storage, (_, entries) in CACHE._owners.items() if entries}

    model, before = Block(), packed()
    report = qfx.explain(model, X, options=ALL)
    assert report.quantized == 7 and packed() <= before
    with torch.no_grad():
        compiled(model)(X)
    between = packed()
    qfx.explain(model, X, options=ALL)
    assert not between <= before and packed() <= between


def test_guards_count_nothing_of_it() -> None:
    before = qfx.guard_counts()
    qfx.explain(Block(), X, options={**ALL, "guard": 0.5})
    assert qfx.guard_counts() == before


def test_both_sides_run_in_turns_and_begin_alike() -> None:
    calls: list[tuple[str, int]] = []
    model = nn.BatchNorm1d(FEATURES)

    def side(name: str, factor: float) -> Side:
        def run(x: Tensor) -> tuple[Tensor, float]:
            assert model.num_batches_tracked is not None
            calls.append((name, int(model.num_batches_tracked)))
            return model(x) * factor, float(len(calls))

        return Side(run, name)

    found = whole_model(model, CallInputs((X[:, 0],), {}), side("float", 1), side("int8", 1.1))
    assert calls == [("float", 0), ("int8", 0)] * 6
    assert (found.float_s, found.int8_s, found.turns) == (7, 8, 5)
    assert found.sqnr_db == pytest.approx(20)


def test_sqnr_of_several_tensors() -> None:
    a, b = torch.ones(3), torch.tensor([2.0, math.inf])
    assert output_sqnr([a, b], [a, b]) == math.inf
    noisy = [a + 0.1, torch.tensor([2.0, 0.0])]
    assert output_sqnr([a, b], noisy) == pytest.approx(10 * math.log10(7 / 0.03), abs=1e-4)
    assert output_sqnr([], []) is None
    with pytest.raises(ValueError, match=r"tensors of \[3\] and of \[2\] elements"):
        output_sqnr([a], [b])
    assert [*floating({"a": [torch.ones(1, dtype=torch.int64), None]})] == []


def test_it_prints_both_sides() -> None:
    whole = WholeModel(31.26, 0.2, 0.1, 5, "one", "two")
    assert str(whole) == (
        "whole model: SQNR of the output 31.3 dB, 200 ms in float, 100 ms in int8 (2.00x), "
        "medians of 5 in turns; float: one; int8: two"
    )
    assert str(WholeModel(why_not="x")) == "whole model: not measured, x"
