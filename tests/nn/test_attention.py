"""Attention in int8 in eager code: what is served, what stays float and why, what it is combined
with; and by name for models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import qfx
import qfx.hf
from qfx.hf.attention_choice import attended
from qfx.hf.attention_function import attention_forward
from qfx.nn import attention
from qfx.nn.functional import scaled_dot_product_attention as int8
from tests.conftest import same_bits
from tests.lib.int8_calls import int8_matmuls

IDS = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))


def heads(dtype: torch.dtype = torch.float32, queries: int = 40) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = ((2, 4, queries, 32), (2, 4, 40, 32), (2, 4, 40, 32))
    return [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]


def _few(leaves: list[Tensor], keys: int, values: int) -> list[Tensor]:
    return [leaves[1][:, :keys], leaves[2][:, :values]]


MASK = torch.rand(40, 40, generator=torch.Generator().manual_seed(2)) < 0.7
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "flags": {"attn_mask": MASK},
    "floats": {"attn_mask": torch.zeros(40, 40).masked_fill(~MASK, -1e9)},
    "bfloat16 mask": {"attn_mask": torch.zeros(40, 40).masked_fill(~MASK, -1e9).bfloat16()},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, dtype: torch.dtype) -> None:
    """Output and gradients are near those of PyTorch, in its dtypes."""
    more = dict(SERVED[name])
    leaves = heads(dtype)
    y = int8(*leaves, **more)
    found = [y, *torch.autograd.grad(y.float().square().sum(), leaves)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    mask = more.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        more["attn_mask"] = mask.double()
    exact_y = F.scaled_dot_product_attention(*wide, **more)
    exact = [exact_y, *torch.autograd.grad(exact_y.square().sum(), wide)]
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        assert torch.cosine_similarity(a.double().ravel(), b.ravel(), 0) > 0.999


FLOATS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one query": (lambda f: f(*heads(queries=1)), "one query"),
    "dropout": (lambda f: f(*heads(), dropout_p=0.5), "dropout"),
    "float64": (lambda f: f(*heads(torch.float64)), "float64"),
    "a mask that learns": (
        lambda f: f(*heads(), attn_mask=torch.zeros(40, 40, requires_grad=True)),
        "a mask with a gradient",
    ),
    "no heads": (lambda f: f(*(t[0, 0] for t in heads())), "no axis of heads"),
    "no keys": (lambda f: f(heads()[0], *(t[:, :, :0] for t in heads()[1:])), "no keys"),
    "a meta tensor": (lambda f: f(*(t.to("meta") for t in heads())), "other than the CPU"),
    "torch.func": (lambda f: torch.func.vmap(f)(*heads()), "torch.func"),
    "heads of keys and of values": (
        lambda f: f(heads()[0], *_few(heads(), 2, 1), enable_gqa=True),
        "heads that do not fit",
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_what_stays_float(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The result is PyTorch's own, and the reason is logged."""
    run, reason = FLOATS[name]
    attention._say_float.cache_clear()
    with caplog.at_level("INFO", "qfx"):
        torch.manual_seed(0)
        found = run(int8)
    torch.manual_seed(0)
    expected = run(F.scaled_dot_product_attention)
    assert found.device.type == "meta" or torch.allclose(found, expected, 0, 0, equal_nan=True)
    assert caplog.text.count("attention stays float") == 1 and reason in caplog.text


@pytest.mark.parametrize("keys, values", [(2, 2), (3, 3)])
def test_heads_are_shared_only_if_asked(keys: int, values: int) -> None:
    q, *others = heads()
    given = (q, *_few([q, *others], keys, values))
    if keys == 2:
        assert int8(*given, enable_gqa=True).shape == q.shape
    for gqa in (False, True)[: 1 if keys == 2 else 2]:
        with pytest.raises(RuntimeError):  # PyTorch's own
            int8(*given, enable_gqa=gqa)


def test_assigned_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of PyTorch then use it, and it does not call itself."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), torch.randn(2, 40, 64)
    exact = layer(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", int8)
    found = layer(x)
    assert not torch.equal(found, exact) and torch.allclose(found, exact, atol=0.05)
    assert same_bits(int8(*heads(queries=1)), attention.IN_FLOAT(*heads(queries=1)))


def test_under_autocast_checkpointing_and_save_in_int8() -> None:
    leaves = heads()
    with torch.autocast("cpu", torch.bfloat16):
        assert int8(*leaves).dtype == torch.bfloat16
    plain = torch.autograd.grad(int8(*leaves).square().sum(), leaves)
    y = checkpoint(int8, *leaves, use_reentrant=False)
    assert all(map(same_bits, plain, torch.autograd.grad(y.square().sum(), leaves)))
    with qfx.save_in_int8():
        y = int8(*leaves)
    noisy = torch.autograd.grad(y.square().sum(), leaves)
    for a, b in zip(noisy, plain, strict=True):
        assert torch.cosine_similarity(a.ravel(), b.ravel(), 0) > 0.995


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM._from_config(config, **more)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers(padded: bool) -> None:
    """A mask of padding or none; back and forth; checkpointed; then it generates."""
    mask = torch.ones_like(IDS)
    mask[0, : 5 if padded else 0] = 0
    float_, named = llama(), llama(attn_implementation="qfx_sdpa")
    grads = []
    for model in (float_, named):
        model(input_ids=IDS, labels=IDS, attention_mask=mask).loss.backward()
        grads.append(torch.cat([p.grad.ravel() for p in model.parameters()]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.999 and not torch.equal(*grads)
    named.set_attn_implementation("sdpa")
    assert same_bits(named(input_ids=IDS).logits, float_(input_ids=IDS).logits)
    named.set_attn_implementation("qfx_sdpa")
    named.zero_grad()
    named.gradient_checkpointing_enable()
    named(input_ids=IDS, labels=IDS, attention_mask=mask).loss.backward()
    again = torch.cat([p.grad.ravel() for p in named.parameters()])
    assert same_bits(again, grads[1])
    assert named.eval().generate(IDS, attention_mask=mask, max_new_tokens=4).shape == (2, 28)


def test_a_layer_whose_gradients_are_far_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    """It is measured at the first step that records gradients, and says so."""
    model = llama(attn_implementation="qfx_sdpa").eval()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, name).weight *= 30
        called = int8_matmuls(lambda: model(input_ids=IDS))[1]
    assert called["qfx::int8_attention"] == 2 and not caplog.records
    model(input_ids=IDS)  # measures
    for _ in range(2):
        _, called = int8_matmuls(lambda: model(input_ids=IDS))
        assert called["qfx::int8_attention"] == 1
    (record,) = caplog.records
    assert "LlamaAttention of layer 1 stays float, because" in record.getMessage()
    _, called = int8_matmuls(lambda: copy.deepcopy(model).eval()(input_ids=IDS))
    assert called["qfx::int8_attention"] == 1  # a copy decides as the model


def test_what_a_reentrant_checkpoint_runs_again_is_what_ran_before() -> None:
    """A layer that turns out to stay float is float at the first call too, without gradients."""
    losses = []
    for name in ("sdpa", "qfx_sdpa"):
        model = llama(attn_implementation=name).train()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight *= 60
                layer.self_attn.k_proj.weight *= 60
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        losses.append(model(input_ids=IDS, labels=IDS).loss)
    assert same_bits(*losses)


def test_values_that_are_not_finite_decide_nothing() -> None:
    module = nn.Module()
    attended(module, [x * float("nan") for x in heads()], {})
    assert not vars(module).get("qfx_sdpa_gradients_are_near")
    attended(module, heads(), {})
    assert vars(module)["qfx_sdpa_gradients_are_near"]


def test_models_without_it_refuse() -> None:
    """Bloom adds its own masks, and GPT-OSS has attention sinks."""
    with pytest.raises(ValueError, match="does not support"):
        BloomForCausalLM._from_config(BloomConfig(n_layer=1), attn_implementation="qfx_sdpa")
    leaves = heads()
    for name in ("s_aux", "softcap"):
        with pytest.raises(ValueError, match=f"does not compute {name}"):
            attention_forward(nn.Module(), *leaves, None, **{name: torch.ones(4)})


def test_a_compiled_model_decides_by_itself() -> None:
    model, other = llama(attn_implementation="qfx_sdpa"), llama()
    found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS).logits
    assert torch.allclose(found, other(input_ids=IDS).logits, atol=1e-5)
