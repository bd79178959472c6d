"""qfx.nn.Embedding: rows are codes times their scale, in the type that the table had; nothing else
about an embedding changes."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.nn.embedding import TABLE
from qfx.nn.summary import bytes_of
from qfx.nn.weight_bytes import weight_bytes
from tests.conftest import same_bits
from tests.lib.pairs import every

V, D = 50, 48
IDS = torch.arange(V)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CONFIG = qfx.Config(embeddings="int8")
BY_TYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def table(dtype: torch.dtype = torch.float32, **how: Any) -> nn.Embedding:
    """Rows of many sizes, of which one is zero and one has a single large element."""
    generator = torch.Generator().manual_seed(0)
    made = nn.Embedding(V, D, **how)
    weight = torch.randn(V, D, generator=generator) * torch.logspace(-3, 3, V)[:, None]
    weight[7], weight[9, 3] = 0, 1000
    made.weight = nn.Parameter(weight.to(dtype))
    return made


class Tied(nn.Module):
    """Ids [B, T] -> logits [B, T, V] by the weight that they are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = table(padding_idx=7), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.up(self.embed(ids)))
        return y


def tied(config: qfx.Config = CONFIG) -> Tied:
    torch.manual_seed(0)
    model = Tied().eval()
    assert qfx.quantize_(model, config) is model
    return model


# --- what a row is ---


@BY_TYPE
def test_an_element_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    """And the codes are those of a linear with the same row. A quotient of up to 127 is rounded
    twice before it becomes an integer, to 2^-23 of it."""
    float_ = table(dtype)
    made = qfx.nn.Embedding.from_float(float_)
    w, step = float_.weight.detach().double(), made.scale.double()[:, None]
    assert torch.equal(made.scale, w.abs().amax(1).float().div(127).clamp_min(2.0**-126))
    values = made.row_codes.double() * step
    assert ((values - w).abs() <= step * (0.5 + 127 * 2.0**-23)).all()
    assert (values - w).abs().max() > 0.4 * step.max()  # it was rounded
    linear = nn.Linear(D, V, bias=False)
    linear.weight = float_.weight
    assert torch.equal(qfx.nn.Linear.from_float(linear, TABLE).codes, made.row_codes)
    assert torch.equal(made.weight, values.float().to(dtype))


@BY_TYPE
def test_rows_are_those_of_the_weight(dtype: torch.dtype) -> None:
    made = qfx.nn.Embedding.from_float(table(dtype))
    for ids in (IDS, IDS.reshape(2, 25), IDS[:0], torch.tensor(3, dtype=torch.int32)):
        rows = made(ids)
        assert rows.dtype == dtype and same_bits(rows, made.weight[ids.long()])
    with pytest.raises(IndexError):
        made(torch.tensor([V]))


def test_a_row_of_zeros_stays_zero() -> None:
    made = tied().embed
    assert made.padding_idx == 7 and not made(torch.tensor([7])).any()


@BY_TYPE
def test_casting_changes_what_it_gives_alone(dtype: torch.dtype) -> None:
    first = qfx.nn.Embedding.from_float(table())
    cast = copy.deepcopy(first).to(dtype)
    assert same_bits(cast.scale, first.scale) and same_bits(cast.row_codes, first.row_codes)
    assert same_bits(cast(IDS), first(IDS).to(dtype))
    assert same_bits(cast.float()(IDS), first(IDS))


SCALED = {"gemma3": "Gemma3Text", "bart": "Bart", "xglm": "XGLM"}


@BY_TYPE
@pytest.mark.parametrize("model", SCALED)
def test_the_scale_of_an_embedding_multiplies_its_rows(model: str, dtype: torch.dtype) -> None:
    """As its own class multiplies them: Gemma rounds the number to the type of the rows first."""
    file = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    own = getattr(file, f"{SCALED[model]}ScaledWordEmbedding")(V, D, 0, embed_scale=3.3)
    own.weight = nn.Parameter(table().weight.detach())
    own.to(dtype)
    made = qfx.quantize_(nn.Sequential(copy.deepcopy(own)), CONFIG)[0]
    with torch.no_grad():
        own.weight.copy_(made.weight)
    assert isinstance(made, qfx.nn.Embedding) and same_bits(made(IDS), own(IDS).detach())


# --- which become codes ---


def test_none_does_unless_it_is_asked_for() -> None:
    model = tied(qfx.Config())
    assert type(model.embed) is nn.Embedding and isinstance(model.head, qfx.nn.Linear)


def test_patterns_are_of_embeddings_too() -> None:
    skipped = tied(qfx.Config(embeddings="int8", skip=["embed"]))
    assert type(skipped.embed) is nn.Embedding and isinstance(skipped.up, qfx.nn.Linear)
    alone = tied(qfx.Config(embeddings="int8", only=["embed"]))
    assert isinstance(alone.embed, qfx.nn.Embedding) and type(alone.head) is nn.Linear
    assert alone.head.weight.dtype == torch.float32


class Own(nn.Embedding):
    """It may read its weight itself."""


def _nan() -> nn.Embedding:
    made = table()
    made.weight.data[3, 4] = torch.nan
    return made


STAY: dict[str, Callable[[], nn.Embedding]] = {
    "max_norm=2.0 writes to the rows that are looked up": lambda: table(max_norm=2.0),
    "sparse=True says how its weight trains": lambda: table(sparse=True),
    "scale_grad_by_freq=True says how its weight trains": lambda: table(scale_grad_by_freq=True),
    "Own, a subclass of nn.Embedding": lambda: Own(V, D),
    "its weight holds NaN or infinity": _nan,
    "its weight is float64": lambda: table(torch.float64),
}


@pytest.mark.parametrize("reason", STAY)
def test_it_stays_float_and_the_reason_is_said(reason: str) -> None:
    model = nn.Sequential(STAY[reason](), nn.Linear(D, D))
    with pytest.warns(UserWarning, match=f"1 of 2 linears and embeddings stay float.*0 .{reason}"):
        qfx.quantize_(model, CONFIG)
    assert not isinstance(model[0], qfx.nn.Embedding) and isinstance(model[1], qfx.nn.Linear)


def test_hooks_go_over_and_a_forward_of_its_own_is_refused() -> None:
    model, calls = nn.Sequential(table()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    qfx.quantize_(model, CONFIG)(IDS)
    assert calls == [1]
    model = nn.Sequential(table())
    model[0].forward = lambda ids: ids  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"1 of 1 linears and embeddings cannot .*\n  0: its forw"):
        qfx.quantize_(model, CONFIG)


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match=r"embeddings='int4': expected \"int8\", or None"):
        qfx.Config(embeddings="int4")
    with pytest.raises(ValueError, match=r"embeddings='int8' is for qfx.quantize_"):
        qfx.explain(Tied(), IDS[None], options={"embeddings": "int8"})


# --- what it takes ---


def test_a_tied_model_has_two_tables_of_codes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qfx"):
        model = tied()
    assert "3 of 3 linears and embeddings replaced" in caplog.text
    assert not hasattr(model.embed, "_parameters") or not dict(model.embed.named_parameters())
    assert bytes_of(model.embed) == V * D + 4 * V  # beside the head's own
    found = weight_bytes(model)
    assert (found.looked_up, found.quantized) == (4 * V * D, 4 * (V * D + D * D))
    assert found.share == 1.0 and str(found).startswith("28.4 kB of 28.6 kB of weights quantized")
    floats = weight_bytes(tied(qfx.Config()))
    assert floats.looked_up == 0 and floats.floating["Embedding"] == 4 * V * D


# --- what it does not do ---


def test_it_does_not_train_and_others_do() -> None:
    model = tied()
    model(IDS[None]).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["up.bias"]
    with pytest.warns(UserWarning, match=r"its weight is codes and does not train"):
        model.embed.requires_grad_()


def test_writing_changes_the_rows_that_are_written() -> None:
    made = qfx.nn.Embedding.from_float(table())
    before, after = made.row_codes, made.weight.clone()
    after[5] = torch.linspace(-1, 1, D)
    made.weight.data.copy_(after)
    changed = (made.row_codes != before).any(1).nonzero().flatten().tolist()
    assert changed == [5] and (made.weight[5] - after[5]).abs().max() <= 0.5001 / 127
    with pytest.raises(
        ValueError, match=r"a weight \[51, 48\] is written to int8 codes \[50, 48\]"
    ):
        made.weight = torch.zeros(V + 1, D)


def _by_view(weight: Any) -> None:
    weight.t()[:, 5].copy_(ROW)


def _by_out(weight: Any) -> None:
    torch.mul(weight, 1 + (IDS == 5)[:, None], out=weight)


WRITES: dict[str, Callable[[Any], object]] = {
    "an item": lambda w: w.__setitem__(5, ROW),
    "a row": lambda w: w[5].copy_(ROW),
    "a view of a view": _by_view,
    "data of a row": lambda w: w.data[5].fill_(2.0),
    "out=": _by_out,
    "foreach": lambda w: torch._foreach_mul_([w], [1 + (IDS == 5)[:, None]]),
    "index_add_": lambda w: w.index_add_(0, IDS[5:6], ROW[None].to(w.dtype)),
    "nn.init": lambda w: nn.init.ones_(w[5]),
}
ROW = torch.linspace(-1, 1, D)


@pytest.mark.parametrize("how, dtype", every(WRITES, FLOATS), ids=str)
def test_writes_reach_the_codes_however_they_are_made(how: str, dtype: torch.dtype) -> None:
    made = qfx.nn.Embedding.from_float(table(dtype))
    wanted, before, memory = made.floats(), made.floats(), made.packed
    with torch.no_grad():
        for weight in (made.weight, wanted):
            WRITES[how](weight)
    assert (made.floats() != before).any(1).nonzero().flatten().tolist() == [5]
    step = made.scale[5] / 2 + torch.finfo(dtype).eps * wanted[5].abs().max()
    assert (made.weight[5] - wanted[5]).abs().max() <= step
    assert same_bits(made(IDS[:5]), wanted[:5]) and made.packed is memory


def test_adding_in_place_writes_once() -> None:
    made = qfx.nn.Embedding.from_float(table())
    wanted = made.floats() + 0.5
    made.weight += 0.25
    made.weight.data += 0.25
    assert (made.weight - wanted).abs().max() <= made.scale.max()


def test_it_is_read_as_floats() -> None:
    made = qfx.nn.Embedding.from_float(table(torch.bfloat16))
    weight: Any = made.weight
    floats = made.floats()
    assert same_bits(F.embedding(IDS[None], weight), floats[IDS][None])
    x = torch.randn(3, D).bfloat16()
    assert same_bits(F.linear(x, weight), F.linear(x, floats))
    assert same_bits(copy.deepcopy(weight), floats) and type(weight.clone()) is Tensor
    assert weight.data_ptr() == made.packed.data_ptr() and weight.shape == (V, D)
    saved = io.BytesIO()
    torch.save(weight, saved)
    saved.seek(0)
    assert same_bits(torch.load(saved, weights_only=True), floats)
    with torch.inference_mode():
        assert same_bits(weight[3:5].float(), floats[3:5].float())
    with pytest.raises(
        RuntimeError, match=r"no floats in memory: weight.dequantize\(\) makes them"
    ):
        weight.numpy()


# --- compiled, exported ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_and_exported_it_gives_the_same(dtype: torch.dtype) -> None:
    model, ids = nn.Sequential(qfx.nn.Embedding.from_float(table(dtype))), IDS[None]
    expected = model(ids)
    assert same_bits(torch.compile(model, backend="qfx")(ids), expected)
    assert same_bits(torch.export.export(model, (ids,)).module()(ids), expected)


def test_the_backend_multiplies_in_int8_behind_it() -> None:
    model = tied(qfx.Config(embeddings="int8", only=["embed"]))
    expected = model(IDS[None])
    y = torch.compile(model, backend="qfx", options={"minimum_gain": 0})(IDS[None])
    assert 0 < (y - expected).norm() < 0.03 * expected.norm()


def test_nothing_is_warned_of_where_all_becomes_codes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tied()


def test_loaded_scales_are_copies() -> None:
    """A write to the state dict after loading changes nothing in the module."""
    state = qfx.nn.Embedding.from_float(nn.Embedding(10, 64)).state_dict()
    module = qfx.nn.Embedding.from_float(nn.Embedding(10, 64))
    module.load_state_dict(state)
    before = module.scale.clone()
    state["scale"].fill_(1.0)
    assert torch.equal(module.scale, before)
