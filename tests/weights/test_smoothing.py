"""Smoothing without data: which factors, of which models, and that nothing else changes. (R4)"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import qfx
from qfx.ops.single_tensors import sqnr
from qfx.weights.smoothing.factors import factors_of
from qfx.weights.smoothing.token_ids import SHAPE, token_ids_of
from tests.lib.fresh_process import run_python

ALL: dict[str, Any] = {"minimum_gain": 0, "inner": "eager"}
VOCABULARY, D = 100, 64


class Block(nn.Module):
    """q and k share an input; `mix` is stored as [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.mix, self.out = nn.Parameter(torch.randn(D, 128) / 8), nn.Linear(128, D)
        with torch.no_grad():
            self.norm.weight.mul_(torch.randn(D).mul(1.5).exp())  # channels of unlike size

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.q(y) * self.k(y)[..., :D].sigmoid()
        return x + self.out(F.gelu(y @ self.mix))


class Language(nn.Module):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language(blocks: int = 1, seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language(blocks).eval()


def tokens(rows: int = 2) -> Tensor:
    return torch.arange(rows * 16).reshape(rows, 16) % VOCABULARY


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="qfx", options={**ALL, **options})


def reasons(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, str]:
    rows = qfx.explain(model, *(inputs or (tokens(),)), options={**ALL, **options}).rows
    return {row.module: row.reason for row in rows}


def smoothed(model: nn.Module, *inputs: Tensor, **options: Any) -> set[str]:
    found = reasons(model, *inputs, **options)
    return {name for name, reason in found.items() if "smoothed" in reason}


def test_factors_are_those_of_the_equation() -> None:
    model = language()
    block = model.blocks[0]
    assert isinstance(block, Block)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, SHAPE, generator=generator)
    with torch.no_grad():
        x = block.norm(model.table(ids)).reshape(-1, D).double()
    rms = x.square().mean(0).sqrt()
    largest = torch.maximum(block.q.weight.abs().amax(0), block.k.weight.abs().amax(0)).double()
    z = (rms / largest) ** 0.35
    found = {len(f): f for f in set(factors_of(model).values())}
    of = {
        name: torch.tensor(factors_of(model)[p.untyped_storage()._cdata, axis]).double()
        for name, p, axis in (("q", block.q.weight, 1), ("k", block.k.weight, 1))
    }
    assert torch.equal(of["q"], of["k"]) and set(found) == {D, 128}
    ratio = of["q"] * z
    limit = (1 / z / (1 / z).median()).clamp(2.0**-6, 2.0**6)
    inside = (limit > 2.0**-6) & (limit < 2.0**6)
    same = ratio[inside].mean().expand_as(ratio[inside])
    torch.testing.assert_close(ratio[inside], same, rtol=2.0**-18, atol=0)  # it is float32


def test_every_spelling_of_a_weight_has_its_factor() -> None:
    model = language()
    assert smoothed(model) == {"blocks.0.q", "blocks.0.k", "blocks.0", "blocks.0.out", "head"}


def test_it_makes_unlike_channels_more_exact() -> None:
    model, ids = language(), tokens(8)
    with torch.no_grad():
        expected, with_it = model(ids), compiled(model)(ids)
        without = compiled(model, smoothing=False)(ids)
    assert sqnr(with_it, expected) > sqnr(without, expected)


ONE_PROCESS = """
import sys, torch, qfx
sys.path.insert(0, {path!r})
from tests.weights.test_smoothing import compiled, language, tokens
torch.set_num_threads(1)
f = compiled(language())
with torch.no_grad():
    for rows in {before}:
        f(tokens(rows).flip(0) // 3)
    print(f(tokens()).double().sum().item().hex(), f(tokens()).flatten()[:9].tolist())
"""


def test_what_ran_before_in_a_process_changes_no_number() -> None:
    """Neither another batch nor another size of it."""
    said = [
        run_python(ONE_PROCESS.format(path=sys.path[0], before=before)).stdout
        for before in ([], [2, 5, 1])
    ]
    assert said[0] == said[1] and said[0]


def test_another_model_of_the_class_has_factors_of_its_own() -> None:
    first, second = language(), language(seed=1)
    with torch.no_grad():
        compiled(first)(tokens())
        found = compiled(second)(tokens())
        torch._dynamo.reset()
        assert torch.equal(found, compiled(second)(tokens()))


def test_a_changed_weight_has_new_factors_when_it_is_compiled_again() -> None:
    model = language()
    before = factors_of(model)
    assert factors_of(model) is before
    with torch.no_grad():
        model.head.weight[:, 3] *= 9
    after = factors_of(model)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {(model.head.weight.untyped_storage()._cdata, 1)}


def test_neither_a_former_mode_nor_hook_nor_autocast_matters() -> None:
    expected, model = factors_of(language()), language().train()
    assert factors_of(model) == {} and list(factors_of(model.eval()).values()) != []
    handle = model.head.register_forward_hook(lambda *_: None)
    assert factors_of(model) == {}
    handle.remove()
    assert [*factors_of(model).values()] == [*expected.values()]
    with torch.autocast("cpu", torch.bfloat16):
        assert [*factors_of(language()).values()] == [*expected.values()]


def test_another_model_under_a_recipe_of_some_sites_has_factors_of_its_own() -> None:
    first, second = language(), language(seed=1)
    head = [s for s in qfx.pin(first, tokens(), options=ALL).sites if s.name == "head"]
    recipe = qfx.Recipe(tuple(head))
    with torch.no_grad():
        compiled(first, recipe=recipe)(tokens())
        found = compiled(second, recipe=recipe)(tokens())
        torch._dynamo.reset()
        assert torch.equal(found, compiled(second, recipe=recipe)(tokens()))


class Recording(nn.Module):
    """Takes floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(4, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.table.weight[0])


class Decoder(Language):
    """Reads what another part made of a picture, between its blocks; on ids alone it runs, and
    computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.Linear(D, D)

    def forward(self, input_ids: Tensor, picture: Tensor | None = None) -> Tensor:
        x = self.table(input_ids)
        if picture is not None:
            x = x + self.cross(picture)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Captions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eye, self.decoder = nn.Linear(D, D), Decoder()

    def forward(self, picture: Tensor, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.eye(picture))


def _hooked() -> nn.Module:
    model = language()
    model.head.register_forward_hook(lambda *_: None)
    return model


def _training() -> nn.Module:
    return language().train()


NOT_SMOOTHED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "asked not to": (language, (), {"smoothing": False}),
    "without a rotation": (language, (), {"scheme": "w8a8-asymmetric"}),
    "float activations": (language, (), {"scheme": "w8"}),
    "hooks would see the ids": (_hooked, (), {}),
    "in training mode": (_training, (), {}),
    "a part needs more than ids": (lambda: Captions().eval(), (torch.randn(16, D), tokens()), {}),
    "takes floats": (lambda: Recording().eval(), (torch.randn(3, D),), {}),
}


@pytest.mark.parametrize("case", NOT_SMOOTHED)
def test_where_nothing_is_smoothed(case: str) -> None:
    make, inputs, options = NOT_SMOOTHED[case]
    with torch.no_grad():
        assert smoothed(make(), *inputs, **options) == set()


def test_layers_that_are_compiled_one_by_one_share_a_graph_and_are_not_smoothed() -> None:
    model, graphs = language(3), []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return qfx.backend(gm, inputs, options=ALL)

    with torch.no_grad():
        for block in model.blocks:
            block.compile(backend=backend)
        found = model(tokens())
        torch._dynamo.reset()
        plain = language(3)
        for block in plain.blocks:
            block.compile(backend="qfx", options={**ALL, "smoothing": False})
        assert torch.equal(found, plain(tokens()))
    assert len(graphs) == 1


def test_two_models_of_one_class_have_their_own_factors() -> None:
    """As of an encoder of queries and one of documents, each compiled in place."""

    def one(seed: int) -> Tensor:
        torch._dynamo.reset()
        return compiled(language(1, seed))(tokens())

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = language(1, 0), language(1, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.stack([self.a(tokens), self.b(tokens)])

    pair = Pair().eval()
    with torch.no_grad():
        wanted = torch.stack([one(0), one(1)])
        torch._dynamo.reset()
        for model in (pair.a, pair.b):
            model.compile(backend="qfx", options=ALL)
        assert torch.equal(pair(tokens()), wanted)


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    class Counting(Language):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(tokens) + torch.rand(())

    model = Counting().eval()
    state = torch.get_rng_state()
    assert factors_of(model)
    assert model.calls == 0 and torch.equal(torch.get_rng_state(), state)


def test_parameters_that_wrap_others_are_left_to_whoever_made_them() -> None:
    model = language()
    model.head.weight = nn.Parameter(TwoTensor(model.head.weight.data, model.head.weight.data))
    assert factors_of(model) == {}


def test_a_module_inside_another_is_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = language()

        def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
            return self.model(tokens) * weights

    wrapper = Wrapper().eval()
    assert "model.head" in smoothed(wrapper, tokens(), torch.ones(VOCABULARY))


def test_parts_that_take_ids_are_smoothed_where_the_whole_does_not() -> None:
    """As of a model that encodes one text and decodes another."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = language(), language(seed=1)
            self.images = nn.Linear(D, VOCABULARY)

        def forward(self, input_ids: Tensor, more: Tensor | None = None) -> Tensor:
            assert more is not None
            return self.one(input_ids) + self.other(input_ids) + self.images(more)

    found = smoothed(Pair().eval(), tokens(), torch.randn(2, 16, D))
    assert {"one.head", "other.head"} <= found and "images" not in found


def test_pinned_rewritten_and_quantized_models_have_the_same_factors() -> None:
    model, ids = language(), tokens()
    plan = qfx.pin(model, ids, options=ALL)
    assert all(site.factor is not None for site in plan.sites)
    config = qfx.Config(minimum_gain=0)
    with torch.no_grad():
        expected = compiled(model)(ids)
        assert torch.equal(compiled(model, recipe=plan)(ids), expected)
        for gm in (qfx.trace(model), torch.export.export(model, (ids,)).module()):
            rewritten, decided = qfx.rewrite(gm, config)
            assert all("smoothed" in entry.reason for entry in decided.entries)
            assert torch.isfinite(rewritten(ids)).all()
        assert torch.equal(qfx.rewrite(qfx.trace(model), config)[0](ids), expected)
        head = qfx.quantize_(language()).head
    assert head.factor is not None


def test_ids_are_those_of_a_module_that_takes_ids() -> None:
    assert token_ids_of(language()) is not None
    assert token_ids_of(nn.Embedding(4, 4).eval()) is None
    assert token_ids_of(nn.Linear(4, 4).eval()) is None
