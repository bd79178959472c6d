"""Calibration of experts: each is rounded for the tokens that it gets, and all experts of a product
have one scheme."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers its operator)
from torch import Tensor, nn

import qfx
import qfx.hf
from qfx import Recipe, SiteRecipe
from qfx.calibration.experts import LEAST_TOKENS, warn_of_unseen
from qfx.calibration.gptq import Hessian, ordered, rounded_codes
from qfx.calibration.record import Transform
from qfx.calibration.sensitivity import Gradients
from qfx.dynamo_backend.captured_graphs import watch_recording
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import dequantize, quantize
from qfx.ops.storage import values_of
from qfx.values.config import PRESETS, Config
from qfx.values.rounding import Rounding
from qfx.weights.recipe_codes import digest_for
from tests.conftest import same_bits
from tests.lib.experts_blocks import IDS, model_of

E, N, K = 4, 48, 64
TOKENS = ((0, 30, 4, 50), (0, 30, 3, 0), (0, 0, 0, 20))  # of each batch, for each expert
SEEN = tuple(map(sum, zip(*TOKENS, strict=True)))
ALL = {"minimum_gain": 0, "inner": "eager"}


class Stack(nn.Module):
    """A product of experts, [E, N, K] or [E, K, N], of rows that are sorted already."""

    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        w = torch.randn(E, N, K, generator=g)
        self.transposed = transposed
        self.weight = nn.Parameter(w if transposed else w.mT.contiguous())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        w = self.weight.transpose(-2, -1) if self.transposed else self.weight
        y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, w, ends)
        return y

    def experts(self) -> list[Tensor]:
        return list(self.weight.detach() if self.transposed else self.weight.detach().mT)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Returns rows whose channels are correlated, and where those of each expert end."""
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(K, K, generator=g) * torch.arange(1, K + 1) ** -1.0
    each = [(torch.randn(sum(n), K, generator=g) @ mix.t(), torch.tensor(n)) for n in TOKENS]
    return [(x, n.cumsum(0, dtype=torch.int32)) for x, n in each]


def rows_of(e: int) -> list[Tensor]:
    """Returns the rows that expert `e` gets in each batch."""
    found = []
    for x, ends in batches():
        begin, end = list(pairwise([0, *ends.tolist()]))[e]
        found.append(x[begin:end])
    return found


def calibrated(model: nn.Module, scheme: Any = "w4a8", **how: Any) -> Recipe:
    config = Config(scheme=scheme, minimum_gain=0)
    return qfx.calibrate(model, batches(), config, progress=False, **how)


def moments(e: int, transform: Transform) -> Hessian:
    found = Hessian(K)
    for rows in rows_of(e):
        found.update(transform.of(rows))
    return found


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8", "w8a8-groups"])
@pytest.mark.parametrize("transposed", [True, False])
def test_an_expert_is_rounded_as_a_linear_with_its_tokens(scheme: str, transposed: bool) -> None:
    """Bit for bit, by GPTQ of its weight and rows; to nearest if it sees too few."""
    model, spec = Stack(transposed).eval(), PRESETS[scheme].w
    transform = Transform(None, PRESETS[scheme].block(K))
    (site,) = calibrated(model, scheme, rounding="gptq").sites
    assert site.name == "weight" and site.tokens == SEEN and site.rounding
    assert site.rounding.codes.shape == (E, N, K)
    for e, weight in enumerate(model.experts()):
        w, h = transform.of_weight(weight), moments(e, transform)
        nearest, codes = quantize(w, spec), site.rounding.codes[e]
        if SEEN[e] < LEAST_TOKENS:
            assert torch.equal(codes, nearest.codes)
            continue
        assert torch.equal(codes, rounded_codes(w, spec, ordered(h)))
        losses = [
            torch.einsum("nk,kl,nl->n", d, h.h_kk.double(), d)
            for c in (codes, nearest.codes)
            for d in [(w - dequantize(nearest._replace(codes=c))).double()]
        ]
        assert (losses[0] <= losses[1] * (1 + 2 * (K + 2) * 2.0**-24)).all()
        assert losses[0].sum() < 0.8 * losses[1].sum()


def test_experts_that_see_few_tokens_are_said() -> None:
    (site,) = calibrated(Stack().eval(), rounding="gptq").sites
    assert site.reason == (
        f"2 of 4 experts saw fewer than {LEAST_TOKENS} tokens and are rounded to nearest: "
        "0 (0), 2 (7)"
    )
    recipe = Recipe((site,))
    assert f"4 of {K}x{N}" in str(recipe) and site.reason in str(recipe)
    (plain,) = calibrated(Stack().eval()).sites
    assert plain.reason == "" and plain.rounding is None and plain.tokens == SEEN


def of_expert(site: SiteRecipe, weight: Tensor, e: int) -> SiteRecipe:
    """Returns the recipe of an expert as a linear."""
    assert site.scheme and site.rounding
    packing = Packing(site.scheme.w, rotation=site.scheme.block(K), group=site.scheme.group)
    digest = digest_for(weight, packing)
    codes = Rounding(f"{e}", "gptq", digest, site.rounding.codes[e])
    return SiteRecipe("", 0, N, K, site.scheme, rounding=codes)


def test_the_codes_run_as_those_of_linears() -> None:
    """Compiled, rewritten and explained: as a loop over int8 linears with these codes."""
    model, (x, ends) = Stack().eval(), batches()[0]
    recipe = calibrated(model, rounding="gptq")
    expected = []
    for e, ((begin, end), weight) in enumerate(
        zip(pairwise([0, *ends.tolist()]), model.experts(), strict=True)
    ):
        linear = nn.Linear(K, N, bias=False)
        linear.weight = nn.Parameter(weight)
        made = qfx.nn.Linear.from_float(linear, of_expert(recipe.sites[0], weight, e))
        expected.append(made(x[begin:end]))
    wanted = torch.cat(expected)
    with torch.no_grad():
        compiled = torch.compile(model, backend="qfx", options={**ALL, "recipe": recipe})
        assert same_bits(compiled(x, ends), wanted)
        gm, plan = qfx.rewrite(qfx.trace(model, x, ends), Config(recipe=recipe))
        assert same_bits(gm(x, ends), wanted) and "rounded by GPTQ" in str(plan)
    options = {"minimum_gain": 0, "recipe": recipe}
    row, nearest = (
        qfx.explain(model, x, ends, options=o).rows[0]
        for o in (options, {"minimum_gain": 0, "scheme": "w4a8"})
    )
    assert row.sqnr_db is not None and nearest.sqnr_db is not None
    assert row.sqnr_db > nearest.sqnr_db and "rounded by GPTQ" in row.reason


def test_a_recipe_is_saved_and_belongs_to_its_weights(tmp_path: Path) -> None:
    model, (x, ends) = Stack().eval(), batches()[0]
    recipe = calibrated(model, rounding="gptq")
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert Recipe.load(tmp_path / "recipe.json").sites[0].tokens == SEEN
    with torch.no_grad():
        model.weight[1, 0, 0] += 1
    with pytest.raises(ValueError, match="recipe of weight: its weight is not the one"):
        qfx.rewrite(qfx.trace(model, x, ends), Config(recipe=recipe))


@pytest.mark.parametrize(
    ("scheme", "chosen", "why"),
    [
        ("w8a8-static", "xs8r_ws8r_h64", ""),
        ("w8", None, "ws8r has float activations, and experts have no operator for them"),
    ],
)
def test_schemes_that_do_not_serve_experts_are_not_chosen(
    scheme: str, chosen: str | None, why: str
) -> None:
    (site,) = calibrated(Stack().eval(), scheme, max_sqnr_loss_db=30.0).sites
    assert (str(site.scheme) if site.scheme else None) == chosen and site.reason == why
    assert site.factor is None and site.scale is None and site.outliers == ()


def test_all_experts_of_a_product_have_one_scheme() -> None:
    """A budget of bits that allows some experts 8 bits gives them to none."""
    config = Config(scheme="w4a8", minimum_gain=0)
    how: dict[str, Any] = {"also": ["w8a8"], "progress": False, "loss": "direction"}
    found = []
    for bits in (6.9, 20.0):
        (site,) = qfx.calibrate(Stack().eval(), batches(), config, max_bits=bits, **how).sites
        found.append(str(site.scheme))
        assert site.divergence is not None and site.divergence > 0
    assert found == ["xs8r_wa4p64_h64", "xa8r_ws8r_h64"]


def by_linears(weight: Any, x: Tensor, cuts: list[int]) -> Tensor:
    each = zip(weight, pairwise(cuts), strict=True)
    return torch.cat([F.linear(x[begin:end], w) for w, (begin, end) in each])


def test_gradients_are_those_of_linears() -> None:
    """The sampled rows and the prices of each expert, as if experts were linears of a graph."""
    model, (x, ends) = Stack().eval(), batches()[0]
    w, cuts = model.weight, [0, *ends.tolist()]
    g = torch.Generator().manual_seed(3)
    towards = torch.randn(len(x), N, generator=g)

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(each.clone()) for each in w.detach())

        def forward(self, x: Tensor) -> Tensor:
            return by_linears(list(self.weights), x, cuts)

    found = []
    for module, given in ((model, (x, ends)), (Apart(), (x,))):
        gradients = Gradients(torch.Generator().manual_seed(0))
        y = watch_recording(module, gradients.run, *given)
        gradients.back((y.square() * towards).sum(1))
        found.append(
            [(c.x, *c.price.values()) for calls in gradients.calls.values() for c in calls]
        )
    together = [each for each in found[0] if each[0].numel()]
    apart = [each for each in found[1] if each[0].numel()]
    assert len(together) == len(apart) == sum(n > 0 for n in TOKENS[0])
    for (rows, price), (rows2, price2) in zip(together, apart, strict=True):
        assert same_bits(rows, rows2) and price.abs().max() > 0
        torch.testing.assert_close(price, price2, rtol=1e-5, atol=0)


def test_a_plan_is_pinned() -> None:
    model, (x, ends) = Stack().eval(), batches()[0]
    for gain, word in ((0, "1 of 1"), (1e5, "0 of 1")):
        plan = qfx.pin(model, x, ends, options={"minimum_gain": gain})
        assert [s.name for s in plan.sites] == ["weight"]
        _, found = qfx.rewrite(qfx.trace(model, x, ends), Config(recipe=plan))
        assert f"{word} matmuls in int8" in str(found)


@pytest.fixture(scope="module")
def mixture() -> Any:
    model = model_of("gpt-oss")  # weights [E, K, N], and biases
    model.set_experts_implementation("grouped_mm")
    model.model.layers = model.model.layers[:1]
    return model.eval()


UP, DOWN = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def test_modules_take_the_recipe_of_a_model(mixture: Any) -> None:
    """The packed weights are those of experts one by one, with the codes of the recipe."""
    g = torch.Generator().manual_seed(4)
    ids = [torch.randint(2, 96, (2, 20), generator=g) for _ in range(3)]
    config = Config(scheme="w4a8", minimum_gain=0, only=["experts"])
    recipe = qfx.calibrate(mixture, ids, config, rounding="gptq", progress=False)
    assert [site.name for site in recipe.sites] == [UP, DOWN]
    assert all(sum(site.tokens or ()) == 3 * 40 * 2 for site in recipe.sites)
    model = qfx.quantize_(copy.deepcopy(mixture), Config(recipe=recipe, only=["experts"]))
    block: Any = model.get_submodule(UP.rpartition(".")[0])
    for site, part in zip(recipe.sites, (block.up, block.down), strict=True):
        assert site.rounding and part.experts == len(site.rounding.codes)
        for packed, codes in zip(part.packed, site.rounding.codes, strict=True):
            found = values_of(packed, part.scheme.w, part.scheme.group, part.n, part.k)
            assert torch.equal(found.codes, codes)
        assert str(part.scheme.w) == str(PRESETS["w4a8"].w)
    changed = copy.deepcopy(mixture)
    with torch.no_grad():
        changed.get_parameter(DOWN)[0, 0, 0] += 1
    before = {name: p.clone() for name, p in changed.named_parameters()}
    with pytest.raises(ValueError, match=r"recipe of model\.layers\.0\.mlp\.experts\.down_proj"):
        qfx.quantize_(changed, Config(recipe=recipe))
    after = dict(changed.named_parameters())
    assert all(torch.equal(p, after[name]) for name, p in before.items())


def test_files_hold_the_codes_of_a_recipe_once(mixture: Any, tmp_path: Path) -> None:
    """Those of `save`, which also hold the recipe, and checkpoints that are read by a recipe."""
    ids = [IDS]
    recipe = qfx.calibrate(
        mixture, ids, Config(scheme="w4a8", minimum_gain=0), rounding="gptq", progress=False
    )
    assert all(site.rounding for site in recipe.sites if site.name in (UP, DOWN))
    model = qfx.quantize_(copy.deepcopy(mixture), Config(recipe=recipe))
    qfx.save(model, tmp_path / "saved", recipe=recipe)
    kept = Recipe.load(tmp_path / "saved" / "recipe.json")
    assert kept.sites and not any(site.rounding for site in kept.sites)
    mixture.save_pretrained(tmp_path / "float")
    recipe.save(tmp_path / "recipe.json")
    config = qfx.hf.QfxConfig(recipe=str(tmp_path / "recipe.json"))
    read = type(mixture).from_pretrained(tmp_path / "float", quantization_config=config)
    experts = UP.rpartition(".")[0]
    wanted: Any = model.get_submodule(experts)
    for found in (read, qfx.load(tmp_path / "saved", copy.deepcopy(mixture))):
        block: Any = found.get_submodule(experts)
        assert torch.equal(block.up.packed, wanted.up.packed)
        assert torch.equal(block.down.packed, wanted.down.packed)


def recipe_for(model: Any, **entries: Any) -> Recipe:
    """Returns a recipe with these schemes, or fields of entries, of the products of experts."""
    sites = []
    for name, how in entries.items():
        full = f"model.layers.0.mlp.experts.{name}"
        k, n = model.get_parameter(full).shape[1:]
        fields = how if isinstance(how, dict) else {"scheme": how and PRESETS[how]}
        sites.append(SiteRecipe(full, 0, n, k, **fields))
    return Recipe(tuple(sites))


def test_products_have_schemes_of_their_own_by_name(mixture: Any) -> None:
    """Also where the config has one that does not serve experts."""
    recipe = recipe_for(mixture, gate_up_proj="w8a8", down_proj="w4a8")
    config = Config(scheme="w8", recipe=recipe, only=["experts"])
    model = qfx.quantize_(copy.deepcopy(mixture), config)
    block: Any = model.get_submodule(UP.rpartition(".")[0])
    assert str(block.up.scheme) == "xa8r_ws8r_h64" and str(block.down.scheme) == "xs8r_wa4p64_h64"
    with torch.no_grad():
        compiled = torch.compile(mixture, backend="qfx", options={**ALL, "recipe": recipe})
        compiled(torch.arange(8)[None])
    report = str(qfx.explain(mixture, torch.arange(8)[None], options={"recipe": recipe}))
    assert "xa8r_ws8r_h64" in report and "xs8r_wa4p64_h64" in report


REFUSED: list[tuple[Any, str]] = [
    (None, "the recipe leaves down_proj float"),
    ({"scheme": PRESETS["w8a8-static"], "scale": 0.1}, "has static scales, and experts have no"),
    ({"scheme": PRESETS["w8a8"], "factor": (1.0,) * 96}, "has a factor or outliers, and experts"),
    ({"scheme": PRESETS["w8a8"], "outliers": (3,)}, "has a factor or outliers, and experts"),
]


@pytest.mark.parametrize(("down", "why"), REFUSED, ids=lambda value: str(value)[:12])
def test_a_recipe_that_does_not_serve_experts_leaves_them_float(
    mixture: Any, down: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, ids = recipe_for(mixture, down_proj=down), torch.arange(8)[None]
    with caplog.at_level("INFO"):
        model = qfx.quantize_(copy.deepcopy(mixture), Config(recipe=recipe))
    assert not any(isinstance(m, qfx.nn.Experts) for m in model.modules())
    assert why in caplog.text
    rows = qfx.explain(mixture, ids, options={"minimum_gain": 0, "recipe": recipe}).rows
    schemes = [row.scheme for row in rows if row.module.endswith("experts")]
    assert schemes == ["xa8r_ws8r_h64", "float"]  # each product by itself in a graph


def test_another_shape_is_refused(mixture: Any) -> None:
    recipe = Recipe((SiteRecipe(DOWN, 0, 5, 96, PRESETS["w8a8"]),))
    with pytest.raises(ValueError, match=r"is for N=5 K=96, the weights have N=64 K=96 of 4"):
        qfx.quantize_(copy.deepcopy(mixture), Config(recipe=recipe))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": [1, 2]}, "must be a tuple of integers"),
        ({"tokens": (1, -2)}, "must be a tuple of integers"),
        ({"tokens": (1,), "factor": (1.0, 1.0)}, "has no factor, scale or outliers"),
        ({"tokens": (1,), "codes": (3, 2)}, r"its codes have shape \[3, 2\].*needs \[1, N, K\]"),
        ({"codes": (1, 3, 2)}, r"its codes have shape \[1, 3, 2\].*needs \[N, K\]"),
    ],
)
def test_entries_that_contradict_themselves(fields: dict[str, Any], why: str) -> None:
    shape = fields.pop("codes", None)
    codes = None if shape is None else torch.zeros(shape, dtype=torch.int8)
    rounding = None if codes is None else Rounding("a", "gptq", "", codes)
    with pytest.raises(ValueError, match=why):
        SiteRecipe("a", 0, 3, 2, PRESETS["w8a8"], rounding=rounding, **fields)


def test_blocks_in_no_graph_are_a_warning(mixture: Any) -> None:
    with pytest.warns(UserWarning, match=r"1 blocks of experts multiply in no captured graph"):
        warn_of_unseen(mixture, {}, lambda name: None)
