"""q, k and v of a smoothed model are one call of a step's graph, though each module holds a factor
of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import qfx
from qfx.generate import program_cache, step_graph
from qfx.generate.step_modules import ServedLinear, equal_factors, share_factors
from qfx.values.site_recipe import SiteRecipe
from tests.generate.test_changed import LENGTH, Ran, compiled, current
from tests.lib.decoders import decoder


def _smoothed(*factor: float) -> qfx.nn.Linear:
    site = SiteRecipe("", 0, 8, len(factor), qfx.Scheme(), factor)
    return qfx.nn.Linear.from_float(nn.Linear(len(factor), 8), site)


def test_equal_factors_become_one_tensor_and_others_stay() -> None:
    made = [_smoothed(*factor) for factor in ((1.0, 2.0), (1.0, 2.0), (2.0, 1.0))]
    model = nn.ModuleList([*made, _smoothed(1.0, 2.0).to("meta"), nn.Linear(2, 2)])
    same = equal_factors(model)
    assert same == {"1": "0"}
    twin = nn.ModuleList(map(ServedLinear.of, made))
    share_factors(twin, same)
    one, its, other = (module._buffers["factor"] for module in twin)
    assert made[0].factor is not made[1].factor
    assert one is its and one is not other
    assert other is not None and other.tolist() == [2.0, 1.0]


def test_a_step_quantizes_what_its_linears_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    rewrite = step_graph.rewrite

    def counted(*given: Any) -> Any:
        found = rewrite(*given)
        calls.update(str(node.target) for node in found[0].graph.nodes)
        return found

    monkeypatch.setattr(step_graph, "rewrite", counted)
    monkeypatch.setenv(program_cache.PROGRAMS.switch, "0")  # made now, and not read
    model: Any = decoder("llama", num_hidden_layers=1)
    qfx.compile_for_generate(model, max_length=LENGTH)
    assert model.model.layers[0].self_attn.q_proj.factor is not None
    steps = calls["qfx.linear_dynamic.default"] // 3  # o, down and the head
    assert steps and calls["qfx.linears.default"] == 2 * steps  # q, k and v; gate and up


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_factor_that_changes_is_seen(name: str, ran: Ran) -> None:
    model = compiled()
    text = current(model, ran)
    factor = getattr(model.model.layers[0].self_attn, name).factor
    with torch.no_grad():
        factor.mul_(torch.linspace(-40, 40, len(factor)).exp2())
    assert not torch.equal(current(model, ran), text)
