"""Smoothing only of what is computed from token ids, and only where these tell enough. (R4)"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qfx
from benchmarks.zoo import TABLE, build
from qfx.ops.single_tensors import sqnr
from qfx.weights.smoothing.factors import factors_of, parts_of
from tests.weights.test_smoothing import ALL, VOCABULARY, Block, D, Language, reasons, tokens

FLOATS = "depends on a float input of the graph"
NO_IDS = "not computed from token ids of the graph"


class Trunk(Language):
    """A language model that may be given embeddings in the place of ids."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, D)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Seeing(nn.Module):
    """Puts what a linear makes of a picture in the place of some tokens, by a write."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.language = nn.Linear(D, D), Trunk()

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.language.table(input_ids)
        if pixel_values is not None:
            x[:, 2:6] = self.eye(pixel_values)
        return self.language(inputs_embeds=x)


class Deciding(nn.Module):
    """A trunk that reads states and the embedding of a time step, not of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.state, self.trunk = nn.Embedding(32, D), nn.Linear(17, D), Trunk()

    def forward(self, timesteps: Tensor, states: Tensor | None = None) -> Tensor:
        x = self.step(timesteps)
        return self.trunk(inputs_embeds=x if states is None else x + self.state(states))


class Attending(nn.Module):
    """Attends to tokens, and to keys and values that an earlier call left, under a float mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, cache: Tensor | None = None
    ) -> Tensor:
        x = self.norm(self.table(input_ids))
        q, k, v = self.q(x), self.k(x), self.v(x)
        if cache is not None:
            k, v = torch.cat((cache, k), 1), torch.cat((cache, v), 1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)
        return self.out(y[:, 0])


class Checkpointed(Language):
    def forward(self, tokens: Tensor) -> Any:
        x = checkpoint(self.blocks[0], self.table(tokens), use_reentrant=False)
        return self.head(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


X, PICTURE = torch.randn(2, 16, D), torch.randn(2, 4, D)
STEPS, STATES = torch.arange(32).reshape(2, 16), torch.randn(2, 16, 17)
MASK, CACHE = torch.zeros(2, 1, 16, 24), torch.randn(2, 8, D)
# Model, inputs, and why the linears of its language model are not smoothed; "" where they are.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "ids": (Trunk, {"input_ids": tokens()}, ""),
    "embeddings": (Trunk, {"inputs_embeds": X}, FLOATS),
    "a picture": (Seeing, {"input_ids": tokens(), "pixel_values": PICTURE}, FLOATS),
    "no picture": (Seeing, {"input_ids": tokens()}, ""),
    "states": (Deciding, {"timesteps": STEPS, "states": STATES}, FLOATS),
    "time steps": (Deciding, {"timesteps": STEPS}, NO_IDS),
    "a cache and a mask": (Attending, {"input_ids": tokens(), "mask": MASK, "cache": CACHE}, ""),
    "in a body": (Checkpointed, {"tokens": tokens()}, ""),
    "few ids": (lambda: Trunk(15), {"input_ids": tokens() % 15}, "a vocabulary of 15"),
    "enough ids": (lambda: Trunk(16), {"input_ids": tokens() % 16}, ""),
    "one id, embeddings": (lambda: Trunk(1), {"inputs_embeds": X}, "a vocabulary of 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_smoothed_and_why_not(case: str) -> None:
    make, inputs, why_not = CASES[case]
    model = seeded(make)
    with torch.no_grad():
        rows = qfx.explain(model, options=ALL, **inputs).rows
    own = {"eye", "state"}
    found = {row.reason for row in rows if row.scheme != "float" and row.module not in own}
    assert found
    for reason in found:
        expected = "smoothing not used" in reason and why_not in reason
        assert expected if why_not else "smoothed" in reason, reason


def _decision_transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=17, act_dim=4, hidden_size=D, n_layer=2, n_head=2, initializer_range=0.3
    )
    one = torch.randn(2, 20, 1)
    return DecisionTransformerModel(config), {
        "states": torch.randn(2, 20, 17),
        "actions": torch.randn(2, 20, 4),
        "rewards": one,
        "returns_to_go": one,
        "timesteps": torch.arange(20).expand(2, 20),
        "attention_mask": torch.ones(2, 20),
    }


def _trunk_of_gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=1, n_embd=D, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config), {"inputs_embeds": X}


# transformers caches functions that Dynamo then traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("make", [_decision_transformer, _trunk_of_gpt2])
def test_models_that_are_fed_embeddings_compute_what_they_do_unsmoothed(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    results = []
    with torch.no_grad():
        for smoothing in (True, False):
            torch._dynamo.reset()
            options = {**ALL, "smoothing": smoothing}
            results.append(torch.compile(model, backend="qfx", options=options)(**inputs))
    assert torch.equal(results[0].last_hidden_state, results[1].last_hidden_state)


@pytest.mark.parametrize("name", ["opt", "bert", "llama", "qwen2"])
def test_smoothing_loses_nothing_where_some_channels_are_larger(name: str) -> None:
    """Gains of norms are log-normal; 256 tokens, so that single roundings do not decide. (R4)
    allows 0.1 dB for sizes that are estimated. The mean of draws, of which one may lose 4 dB."""
    ids = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    gains = []
    for seed in range(5):
        found = []
        for smoothing in (True, False):
            model, _ = build(TABLE[name])
            torch.manual_seed(seed)
            with torch.no_grad():
                for module in model.modules():
                    if "Norm" in type(module).__name__:
                        module.weight.mul_(torch.randn_like(module.weight).mul(1.5).exp())
                expected = next(iter(model(input_ids=ids).values()))
                qfx.quantize_(model, qfx.Config(smoothing=smoothing))
                found.append(sqnr(expected, next(iter(model(input_ids=ids).values()))))
        gains.append(found[0] - found[1])
    assert sum(gains) / len(gains) > -0.1, gains


class Sparse(nn.Module):
    """Of the channels that `out` reads the first is 0 on all ids, the second on all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.out = nn.Embedding(64, D), nn.Linear(D, D), nn.Linear(D, 8)
        with torch.no_grad():
            self.table.weight[:, :2] = -1.0
            self.table.weight[5, 1] = 1.0
            self.up.weight.copy_(torch.eye(D))
            self.up.bias.zero_()
            self.out.weight.fill_(0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.up(self.table(input_ids)).relu())


def test_channels_that_few_ids_reach_are_not_enlarged() -> None:
    model = seeded(Sparse)
    assert isinstance(model, Sparse)
    factor = factors_of(model)[model.out.weight.untyped_storage()._cdata, 1]
    assert factor[0] == 1.0 and factor[1] <= 1.0
    assert max(factor) <= 8.0 and min(factor) >= 1 / 8 and len(set(factor)) > D / 2


class Placed(Language):
    """Its first embedding is that of positions."""

    def __init__(self) -> None:
        super().__init__()
        table = self.table
        del self.table
        self.places, self.table = nn.Embedding(128, D), table
        self.register_buffer("at", torch.arange(128))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(self.at[: tokens.shape[1]])
        return self.head(self.blocks[0](x))


def test_ids_are_drawn_for_the_table_that_they_are_looked_up_in() -> None:
    for more in (50, 200):  # the positions are fewer, or more
        model = seeded(Placed)
        model.table = nn.Embedding(more, D).eval()
        (part,) = parts_of(model)
        assert part.table == model.table.weight.untyped_storage()._cdata and part.factors
    few = seeded(Placed)
    few.table = nn.Embedding(4, D).eval()
    assert "smoothing not used" in reasons(few, tokens() % 4)["head"]


class Around(nn.Module):
    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.trunk = nn.Linear(D, D), trunk or Trunk()


class Forecast(Around):
    def forward(self, x: Tensor) -> Any:
        return self.trunk(inputs_embeds=self.first(x))


class Vision(Around):
    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        x = torch.cat([self.trunk.table(input_ids), self.first(pixel_values)], 1)
        return self.trunk(inputs_embeds=x)


class Classifier(Around):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.first(self.trunk(ids)[..., :D] * mask)


class Container(nn.Module):
    """Computes nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.trunk(batch["input_ids"])


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "itself": (Trunk, ""),
    "takes floats": (Forecast, "Forecast takes no token ids"),
    "takes pictures": (Vision, "Vision takes pixel_values"),
    "takes ids": (Classifier, ""),
    "computes nothing": (Container, ""),
    "only ids": (lambda: Forecast(Language()), ""),
    "few ids": (lambda: Trunk(4), "Trunk has a vocabulary of 4"),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_are_smoothed_where_signatures_say_ids(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, why_not = MODULES[case]
    with caplog.at_level(logging.INFO, "qfx"):
        model = qfx.quantize_(seeded(make))
    trunk = getattr(model, "trunk", model)
    assert isinstance(trunk.head, qfx.nn.Linear)
    assert (trunk.head.factor is None) == bool(why_not)
    said = f"not used, {why_not}" if why_not else "of 5 weights"
    assert f"quantize_: smoothing of {type(trunk).__name__}: {said}" in caplog.text


def test_a_block_alone_has_no_factors() -> None:
    assert parts_of(seeded(Block)) == ()
