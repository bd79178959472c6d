"""The guard: no row exceeds its bound, those above the guard are float, and all are counted."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import qfx
from qfx.graph.activations import ACTIVATIONS, activate
from qfx.ops.code import Code
from qfx.ops.guard import relative_bound
from qfx.ops.guard_counts import GuardCount, taken
from qfx.ops.layout import Layout, layout_of
from qfx.ops.packing import Packing
from qfx.values.scheme import PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme
from qfx.weights.cache import pack
from tests.conftest import on_isa, same_bits
from tests.lib.models import FEATURES, Block, compiled
from tests.lib.pairs import LONG, pairs
from tests.lib.strategies import BITS, ISAS, SEEDS, filled

ops = torch.ops.qfx
FLOAT32 = ("none", torch.float32)
# Nothing over- or underflows in the epilogue with these.
K, LIMIT = 256, 0.025  # uniform rows have bounds near 0.011, those with an outlier 0.035
FILLS = ("normal", "wide", "equal", "zero", "zero_rows", "one_sided", "powers", "outlier")


def _error(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """|y_mn - x_m w_n| / (|x_m| |w_n|), the greatest of each row; 0 where a norm is 0."""
    x, w = x.double(), w.double()
    sizes = x.norm(dim=1, keepdim=True) * w.norm(dim=1)
    found = (y.double() - x @ w.T).abs() / sizes
    return torch.where(sizes == 0, (y != 0).double(), found).amax(1)


def _column_factor(k: int, generator: torch.Generator) -> tuple[float, ...]:
    return tuple(torch.exp(torch.randn(k, generator=generator)).tolist())


@given(
    seed=SEEDS, isa=ISAS, rows=st.integers(1, 9), n=st.integers(1, 9),
    k=st.sampled_from([1, 2, 7, 16, 64, 65, 200, 320]), fill=st.sampled_from(FILLS),
    w_fill=st.sampled_from(FILLS), bits=BITS, w_bits=BITS, symmetric=st.booleans(),
    axes=st.sampled_from([PER_ROW, PER_TENSOR]), w_axes=st.sampled_from([PER_ROW, PER_COLUMN]),
    rotation=st.sampled_from([0, 16, 64]), factor=st.booleans(),
)  # fmt: skip
def test_no_row_is_further_off_than_its_bound(
    seed: int, isa: str, rows: int, n: int, k: int, fill: str, w_fill: str, bits: int, w_bits: int,
    symmetric: bool, axes: Any, w_axes: Any, rotation: int, factor: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x, w = filled(fill, rows, k, generator), filled(w_fill, n, k, generator)
    block = Scheme(rotation=rotation).block(k)
    given = _column_factor(k, generator) if factor and w_axes == PER_ROW else None
    packed = pack(w, (), Packing(QSpec(bits=w_bits, axes=w_axes), given, block, guarded=True))
    scales = None if given is None else torch.tensor(given)
    by = packed.factor if scales is None else scales
    assert packed.error is not None
    code = Code(bits, int(symmetric), int(axes == PER_TENSOR), 0, block)
    with on_isa(isa):
        y = ops.linear_dynamic(x, packed.weight, Layout(n), None, code, *FLOAT32, by)
    assert (_error(x, w, y) <= relative_bound(x, packed.error, code, by)).all()


@given(
    seed=SEEDS, isa=ISAS, rows=st.integers(1, 9), n=st.integers(1, 9),
    k=st.sampled_from([1, 16, 64, 65, 200, 320]), fill=st.sampled_from(FILLS),
    w_fill=st.sampled_from(FILLS), bits=BITS, w_bits=BITS, symmetric=st.booleans(),
    w_symmetric=st.booleans(), x_group=st.booleans(), w_group=st.booleans(),
    group=st.sampled_from([32, 64, 96, 256]), rotation=st.sampled_from([0, 16, 64]),
    factor=st.booleans(),
)  # fmt: skip
def test_no_row_with_groups_is_further_off_than_its_bound(
    seed: int, isa: str, rows: int, n: int, k: int, fill: str, w_fill: str, bits: int, w_bits: int,
    symmetric: bool, w_symmetric: bool, x_group: bool, w_group: bool, group: int, rotation: int,
    factor: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x, w = filled(fill, rows, k, generator), filled(w_fill, n, k, generator)
    block = Scheme(rotation=rotation).block(k)
    given = _column_factor(k, generator) if factor else None
    spec = QSpec(bits=w_bits, symmetric=w_symmetric, group=group if w_group else 0)
    packed = pack(w, (), Packing(spec, given, block, guarded=True, group=group))
    factor = None if given is None else torch.tensor(given)
    assert packed.error is not None
    weight = (packed.weight, layout_of(spec, group, n))
    code = Code(bits, int(symmetric), 0, group if x_group else 0, block)
    with on_isa(isa):
        y = ops.linear_dynamic(x, *weight, None, code, *FLOAT32, factor)
    bound = relative_bound(x, packed.error, code, factor)
    assert (_error(x, w, y) <= bound).all()


@pytest.mark.parametrize(
    "scheme",
    [Scheme(x=QSpec(group=64), w=QSpec(group=64)), Scheme(w=QSpec(symmetric=False))],
    ids=str,
)
def test_rows_above_are_float_with_groups(scheme: Scheme) -> None:
    layer, (x, bad) = nn.Linear(K, 30), _outliers()
    config = qfx.Config(minimum_gain=0, scheme=scheme, guard=LIMIT)
    graph, plan = qfx.rewrite(qfx.trace(layer, x), config)
    assert plan.entries[0].reason.endswith("; guarded")
    unguarded, _ = qfx.rewrite(qfx.trace(layer, x), replace(config, guard=None))
    y, plain = graph(x), unguarded(x)
    assert same_bits(y[bad], layer(x[bad])) and same_bits(y[~bad], plain[~bad])


def test_the_bound_is_not_vacuous() -> None:
    """Every element half a step off in the direction of w: more than half of it is reached."""
    k = 256
    x = torch.full((1, k), 10.5)
    x[0, 0] = 127.0
    w = torch.ones(1, k)
    packed = pack(w, (), Packing(QSpec(), guarded=True))
    assert packed.error is not None
    y = ops.linear_dynamic(x, packed.weight, Layout(1), None, Code(), *FLOAT32)
    bound = relative_bound(x, packed.error, Code())
    assert 0.5 * bound < _error(x, w, y) <= bound


def test_alpha_and_beta_without_a_factor_are_those_of_the_codes() -> None:
    """alpha <= 1 + r and beta = r + 2^-16, r the greatest relative error of a row of codes."""
    w = torch.randn(20, 128)
    (q, scale, _), error = ops.quantize(w, Code()), _packed(w).error
    codes = q.double() * scale.double()
    r = ((w - codes).norm(dim=1) / w.double().norm(dim=1)).max()
    assert error is not None and error[0] <= 1 + r
    torch.testing.assert_close(error[1].double(), r + 2.0**-16, rtol=1e-5, atol=0)


def _packed(w: Tensor) -> Any:
    return pack(w, (), Packing(QSpec(), guarded=True))


def _guarded(x: Tensor, w: Tensor, guard: float, site: str = "", **other: Any) -> Tensor:
    packed = _packed(w)
    how = {"code": Code(symmetric=0), "activation": "none"}
    how |= {"bias": None, "out_dtype": x.dtype, **other}
    operands = (x, w, packed.weight, Layout(len(w)), packed.error)
    return ops.linear_guarded(*operands, guard=guard, site=site, **how)


def _weight() -> Tensor:
    return torch.rand(30, K) * 2 - 1


def _outliers(rows: int = 40, k: int = K) -> tuple[Tensor, Tensor]:
    """x of which the rows 3 and 17 have an outlier, and which those are."""
    x = torch.rand(rows, k) * 2 - 1
    x[3, 5], x[17, 0] = 300.0, -1000.0
    bad = torch.zeros(rows, dtype=torch.bool)
    bad[[3, 17]] = True
    return x, bad


@pytest.mark.parametrize(
    "activation, dtype, biased",
    pairs(ACTIVATIONS, [torch.float32, torch.bfloat16, torch.float16], [True, False]),
)
def test_rows_above_are_float_and_rows_below_int8(
    activation: str, dtype: torch.dtype, biased: bool
) -> None:
    x, bad = _outliers()
    x, w, bias = x.to(dtype), _weight().to(dtype), torch.randn(30).to(dtype)
    bias = bias if biased else None
    packed = _packed(w)
    y = _guarded(x, w, LIMIT, bias=bias, activation=activation)
    how = (bias, Code(symmetric=0), activation, dtype)
    int8 = ops.linear_dynamic(x, packed.weight, Layout(30), *how)
    assert same_bits(y[~bad], int8[~bad])
    assert same_bits(y[bad], activate(activation, F.linear(x[bad], w, bias)))
    assert activation == "relu6" or not torch.equal(y[bad], int8[bad])  # these are 0 or 6


def _within_roundoff(y: Tensor, x: Tensor, w: Tensor, rows: Tensor) -> bool:
    """Whether these rows are x w^T up to a float32 matmul's error."""
    x, w, y = x[rows].double(), w.double(), y[rows].double()
    return bool(((y - x @ w.T).abs() <= (K + 8) * 2.0**-24 * (x.abs() @ w.abs().T)).all())


def test_any_leading_shape_and_layout() -> None:
    x, bad = _outliers()
    w = _weight()
    y = _guarded(x, w, LIMIT)
    assert same_bits(_guarded(x.reshape(2, 4, 5, K), w, LIMIT).reshape(40, 30), y)
    assert same_bits(_guarded(x.t().contiguous().t(), w, LIMIT), y)
    strided = _guarded(x, w.t().contiguous().t(), LIMIT)
    assert same_bits(strided[~bad], y[~bad])
    assert _within_roundoff(strided, x, w, bad)
    assert same_bits(_guarded(x[3], w, LIMIT), F.linear(x[3][None], w)[0])


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_faulty_rows_are_those_of_float(fault: float) -> None:
    x, w = torch.randn(6, K), torch.randn(8, K)
    x[2, 7] = fault
    y = _guarded(x, w, 0.1)
    assert same_bits(y[2:3], F.linear(x[2:3], w))
    assert y[[0, 1, 3, 4, 5]].isfinite().all()


def test_a_faulty_weight_makes_all_rows_float() -> None:
    x, w = torch.randn(6, K), torch.randn(8, K)
    w[3, 3] = torch.nan
    assert same_bits(_guarded(x, w, 0.1), F.linear(x, w))


def test_rows_and_weights_of_zeros_stay_int8() -> None:
    taken("zeros")
    assert _guarded(torch.zeros(3, K), torch.randn(5, K), 1e-6, "zeros").eq(0).all()
    assert _guarded(torch.randn(3, K), torch.zeros(5, K), 0.1, "zeros").eq(0).all()
    assert taken("zeros") == GuardCount(2, 6, 0, 0)


def test_counts() -> None:
    x, bad = _outliers()
    w = _weight()
    for _ in range(3):
        _guarded(x, w, LIMIT, "counts.a")
    _guarded(x[~bad], w, LIMIT, "counts.a")
    _guarded(x[:0], w, LIMIT, "counts.b")
    _guarded(x, w, LIMIT, "")
    counts = qfx.guard_counts()
    assert counts["counts.a"] == (4, 3 * 40 + 38, 3, 6)
    assert counts["counts.b"] == (1, 0, 0, 0)
    assert "" not in counts
    assert taken("counts.a") == counts["counts.a"] and "counts.a" not in qfx.guard_counts()
    assert taken("counts.a") == (0, 0, 0, 0)


def test_counting_from_many_threads() -> None:
    x, w = torch.randn(2, 8), torch.randn(3, 8)
    calls = [threading.Thread(target=lambda: [_guarded(x, w, 1e-9, "t") for _ in range(50)])
             for _ in range(4)]  # fmt: skip
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert taken("t") == (200, 400, 200, 400)


class _Two(nn.Module):
    """Two layers of one shape that read the same input, and one whose output is not used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for part in ("a", "b", "unused"):
            self.add_module(f"{name}_{part}", nn.Linear(K, K))
        b = getattr(self, f"{name}_b")
        b.weight = getattr(self, f"{name}_a").weight

    def forward(self, x: Tensor) -> Tensor:
        a, b, unused = (getattr(self, f"{self.name}_{p}") for p in ("a", "b", "unused"))
        unused(x)
        return a(x) + b(x)


def _counted(name: str) -> dict[str, GuardCount]:
    return {k: v for k, v in qfx.guard_counts().items() if k.startswith(name)}


@pytest.mark.parametrize(
    "inner", ["eager", "aot_eager", "inductor"] if LONG else ["eager", "inductor"]
)
def test_compiled_models_count_each_call_of_each_site(inner: str) -> None:
    """Sites with the same operands are not merged, and code from a cache counts as other does."""
    name = f"two_{inner}"
    model, (x, bad) = _Two(name), _outliers()
    with fresh_cache():
        for round_ in (1, 2):
            torch._dynamo.reset()
            counters.clear()
            fast = compiled(model, guard=LIMIT, inner=inner)
            with torch.no_grad():
                y, again = fast(x), fast(x[~bad])
            counts = _counted(name)
            expected = (2 * round_, 78 * round_, round_, 2 * round_)
            assert counts[f"{name}_a"] == counts[f"{name}_b"] == expected
            torch.testing.assert_close(y[bad], model(x)[bad], rtol=1e-5, atol=1e-2)
            assert (again - model(x[~bad])).abs().max() < 0.1
    if inner == "inductor":
        assert counters["aot_autograd"]["autograd_cache_hit"] > 0


def test_what_a_compiler_drops_is_not_counted() -> None:
    model, (x, _) = _Two("dropped"), _outliers()
    with torch.no_grad():
        compiled(model, guard=LIMIT, inner="inductor")(x)
    assert set(_counted("dropped")) == {"dropped_a", "dropped_b"}


def test_plan_says_guarded_and_graphs_without_a_guard_are_as_before() -> None:
    model = Block().eval()
    x = torch.randn(2, 5, FEATURES)
    config = qfx.Config(minimum_gain=0, scheme="w8a8-asymmetric")
    plain, plan = qfx.rewrite(qfx.trace(model, x), config)
    none, unguarded = qfx.rewrite(qfx.trace(model, x), qfx.Config(
        minimum_gain=0, scheme="w8a8-asymmetric", guard=None))  # fmt: skip
    assert str(plain.graph) == str(none.graph) and str(plan) == str(unguarded)
    assert "guarded" not in str(plan) + str(plain.graph)
    guarded, plan = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0, guard=LIMIT))
    int8 = [entry for entry in plan.entries if entry.scheme]
    assert len(int8) == 7 and all(e.reason.endswith("; guarded") for e in int8)
    assert str(guarded.graph).count("linear_guarded") == 7


PACKED = QSpec(bits=4, group=64, packed=True)


@pytest.mark.parametrize(
    "scheme, why",
    [
        (Scheme(x=None), "float activations times int8 weights have no bound"),
        (Scheme(w=PACKED), "weights stored in fewer bits have no bound"),
        (
            Scheme(x=QSpec(group=64), w=PACKED),
            "weights stored in fewer bits and activations with groups have no bound",
        ),
        (
            Scheme(x=None, w=PACKED),
            "float activations times weights stored in fewer bits have no bound",
        ),
    ],
)
def test_schemes_without_a_guard_say_so(scheme: Scheme, why: str) -> None:
    config = qfx.Config(minimum_gain=0, scheme=scheme, guard=LIMIT)
    graph, plan = qfx.rewrite(qfx.trace(nn.Linear(K, 8), torch.randn(3, K)), config)
    (entry,) = plan.entries
    assert entry.scheme and entry.reason.endswith(f"; not guarded: {why}")
    assert "guarded" not in str(graph.graph)


def test_static_sites_of_a_recipe_and_sites_that_train_are_not_guarded() -> None:
    model, x = nn.Sequential(nn.Linear(K, 8)), _weight()
    static = Scheme(x=QSpec(axes=PER_TENSOR, static=True))
    site = qfx.SiteRecipe("0", 0, 8, K, static, scale=0.03)
    config = qfx.Config(recipe=qfx.Recipe((site,)), guard=LIMIT)
    _, plan = qfx.rewrite(qfx.trace(model, x), config)
    assert plan.entries[0].reason.endswith("; not guarded: its scale is static")
    config = qfx.Config(guard=LIMIT, minimum_gain=0)
    _, plan = qfx.rewrite(qfx.trace(model, x), config, training=True)
    assert plan.entries[0].reason.endswith("; not guarded: gradients are recorded")


def test_training_with_a_guard_is_training() -> None:
    model, x = nn.Linear(K, 8), _weight()
    compiled(model, guard=LIMIT)(x).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.abs().sum() > 0


def test_a_dynamic_recipe_with_a_factor_and_rotation_is_guarded() -> None:
    """Of the rows that the bound of the transformed operands is above."""
    (x, _), model = _outliers(), nn.Sequential(nn.Linear(K, 30, bias=False))
    factor = _column_factor(K, torch.Generator().manual_seed(0))
    site = qfx.SiteRecipe("0", 0, 30, K, Scheme(rotation=16), factor=factor)
    w = model[0].weight.detach()
    error = pack(w, (), Packing(QSpec(), factor, 16, guarded=True)).error
    assert error is not None
    bounds = relative_bound(x, error, Code(rotation=16), torch.tensor(factor))
    guard = bounds.mean().item()
    config = qfx.Config(recipe=qfx.Recipe((site,)), guard=guard)
    graph, plan = qfx.rewrite(qfx.trace(model, x), config)
    assert plan.entries[0].reason.endswith("; guarded")
    taken("0")
    with torch.no_grad():
        y, above = graph(x), bounds > guard
    assert taken("0") == (1, 40, 1, int(above.sum())) and 0 < above.sum() < 40
    assert _within_roundoff(y, x, w, above) and not _within_roundoff(y, x, w, ~above)


def test_a_changed_weight_changes_its_bound() -> None:
    model, x = nn.Linear(K, 8), _weight()
    fast = compiled(model, guard=LIMIT)
    taken("linear")
    with torch.no_grad():
        fast(x)
        before = qfx.guard_counts()
        model.weight[:, 0] = (
            1e4  # the others of a row round to nothing, but that is small in its norm
        )
        model.weight[0] = torch.nan
        assert fast(x)[:, 0].isnan().all()
    changed = [
        k for k, v in qfx.guard_counts().items() if v.float_rows - before[k].float_rows == 30
    ]
    assert len(changed) == 1


def test_explain_shows_rows_in_float() -> None:
    x, _ = _outliers()
    plain_options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}
    options = {**plain_options, "guard": LIMIT}
    model = nn.Sequential(nn.Linear(K, 8))
    before = qfx.guard_counts()
    report = qfx.explain(model, x, options=options)
    assert report.rows[0].guarded == (1, 40, 1, 2)
    assert "float rows" in str(report) and " 2/40 " in str(report)
    assert qfx.guard_counts() == before  # its own calls are not the user's
    plain = qfx.explain(model, x, options=plain_options)
    assert plain.rows[0].guarded is None and "float rows" not in str(plain)
    assert report.rows[0].sqnr_db > plain.rows[0].sqnr_db  # type: ignore[operator]


@pytest.mark.parametrize("value", [0, -0.02, True, "0.05", float("nan"), float("inf"), [0.05]])
def test_a_wrong_guard_is_an_error_sentence(value: Any) -> None:
    with pytest.raises(ValueError, match=r"guard=.* is not a relative error above 0, as 0.05 is"):
        qfx.Config(guard=value)
    with pytest.raises(ValueError, match="is not a relative error"):
        qfx.explain(nn.Linear(8, 8), torch.randn(2, 8), options={"guard": value})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"w": torch.ones(6, 9)}, "w has shape 6x9, expected 6x8, the packed weight's N and K"),
        ({"w": torch.ones(8, 6)}, "w has shape 8x6, expected 6x8"),
        ({"error": torch.ones(3)}, "error has shape 3, expected 2"),
        ({"guard": 0.0}, "guard=0 is no positive relative error"),
        ({"guard": float("nan")}, "guard=nan is no positive relative error"),
        ({"w": torch.ones(6, 8, dtype=torch.int8)}, "w has dtype Char, expected Float"),
    ],
)
def test_bad_arguments_of_the_operator(changed: dict[str, Any], message: str) -> None:
    w = torch.randn(6, 8)
    packed = _packed(w)
    arguments = {"x": torch.randn(5, 8), "w": w, "weight": packed.weight, "layout": Layout(6)}
    arguments |= {"error": packed.error, "bias": None, "guard": 0.1, "site": "", "code": Code()}
    arguments |= {"activation": "none", "out_dtype": torch.float32}
    with pytest.raises(RuntimeError, match=f"linear_guarded: {message}"):
        ops.linear_guarded(**{**arguments, **changed})
