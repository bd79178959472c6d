"""`tp_plan="auto"` of transformers, in two processes: int8 kernels on parts of the weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
)
from transformers import Qwen2ForCausalLM as Qwen2
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import qfx
from qfx.hf import QfxConfig
from qfx.nn.experts_like import is_experts
from qfx.nn.quantized_weight import QuantizedWeight
from tests.nn.processes import in_processes

IDS = torch.arange(24)[None]
SIZE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 64}
LAYERS = 2


def _write(folder: str) -> None:
    """A Llama, and a Qwen2, which has biases and whose head is tied to the embedding."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SIZE)).eval()
    llama.save_pretrained(f"{folder}/llama")
    qfx.quantize_(llama).save_pretrained(f"{folder}/llama-int8")
    config = Qwen2Config(
        num_hidden_layers=LAYERS, num_key_value_heads=2, tie_word_embeddings=True, **SIZE
    )
    qwen: Any = Qwen2(config).eval()
    for name, parameter in qwen.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    qwen.save_pretrained(f"{folder}/qwen")
    odd = LlamaConfig(num_hidden_layers=LAYERS, mlp_bias=True, **{**SIZE, "intermediate_size": 576})
    LlamaForCausalLM(odd).save_pretrained(f"{folder}/odd")
    heads = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 64}
    layers = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS, "q_lora_rank": None}
    latent = DeepseekV2Config(num_key_value_heads=4, **heads, **layers, **SIZE)
    DeepseekV2ForCausalLM(latent).save_pretrained(f"{folder}/deepseek")
    mixture = MixtralConfig(
        num_hidden_layers=LAYERS, num_key_value_heads=4, num_local_experts=4, **SIZE
    )
    mixtral = MixtralForCausalLM(mixture).eval()
    mixtral.save_pretrained(f"{folder}/mixtral")
    qfx.quantize_(mixtral).save_pretrained(f"{folder}/mixtral-int8")


def _load(folder: str, name: str, **given: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", **given).eval()


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def _checked(folder: str, name: str, **given: Any) -> tuple[Any, Any]:
    """The model of one process, and that of two, whose linears have int8 parts."""
    one, both = _load(folder, name, **given), _load(folder, name, tp_plan="auto", **given)
    parts = [p.to_local() for n, p in both.named_parameters() if "proj.weight" in n]
    assert len(parts) == 7 * LAYERS and {type(p) for p in parts} == {QuantizedWeight}
    whole = [p for n, p in one.named_parameters() if "proj.weight" in n]
    assert all(2 * p.numel() == w.numel() for p, w in zip(parts, whole, strict=True))
    return one, both


def _compiled(model: Any) -> None:
    """A layer is one graph, of several lengths, and computes in int8."""
    layer = model.model.layers[0].mlp
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for count in (9, 5, 7):
            assert torch.equal(compiled(x[:, :count]), layer(x[:, :count]))


def _odd_sizes(folder: str) -> None:
    """Columns that would be parted within a block are whole on each rank."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        both = _load(folder, "odd", tp_plan="auto", quantization_config=QfxConfig())
    texts = [str(each.message) for each in said]
    assert any("2 linears (model.layers.0.mlp.down_proj" in t for t in texts), texts
    assert not any("less than half" in t for t in texts), texts
    one = _load(folder, "odd", quantization_config=QfxConfig())
    assert type(both.model.layers[0].mlp.down_proj.weight) is QuantizedWeight
    assert both.model.layers[0].mlp.up_proj.scheme == one.model.layers[0].mlp.up_proj.scheme
    assert torch.equal(_logits(one), _logits(both))


def _latent_attention(folder: str) -> None:
    """Its first projection is whole on each rank; the style asks for the model's config."""
    one = _load(folder, "deepseek", quantization_config=QfxConfig())
    both = _load(folder, "deepseek", tp_plan="auto", quantization_config=QfxConfig())
    first = both.model.layers[0].self_attn.kv_a_proj_with_mqa
    assert type(first.weight) is QuantizedWeight
    assert torch.equal(_logits(one), _logits(both))


def _experts(folder: str) -> None:
    """They stay float where the plan splits them, and int8 experts are refused."""
    float_ = {"quantization_config": QfxConfig(skip=["experts"])}
    one = _load(folder, "mixtral", **float_)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        both = _load(folder, "mixtral", tp_plan="auto", quantization_config=QfxConfig())
    texts = [str(each.message) for each in said]
    assert any("experts (a tensor-parallel plan shares its weights out" in t for t in texts), texts
    assert is_experts(both.model.layers[0].mlp.experts)
    assert float(qfx.sqnr(_logits(one), _logits(both))) > 60
    with pytest.raises(ValueError, match=r"mlp.experts has int8 experts, and a tensor-parallel"):
        _load(folder, "mixtral-int8", tp_plan="auto")
    for name, style in [*ALL_PARALLEL_STYLES.items()]:  # the load was cut off
        if type(style).__module__.startswith("qfx"):
            del ALL_PARALLEL_STYLES[name]


def _run(mesh: Any) -> None:
    found = [None]
    if dist.get_rank() == 0:
        from tempfile import mkdtemp

        found = [mkdtemp()]  # type: ignore[list-item]
        _write(str(found[0]))
    dist.broadcast_object_list(found)
    folder = str(found[0])
    int8 = {"quantization_config": QfxConfig(skip=["lm_head"])}
    for name, given in (
        ("llama-int8", {}),
        ("llama", {**int8, "dtype": torch.bfloat16}),
        ("qwen", {"quantization_config": QfxConfig()}),
    ):
        one, both = _checked(folder, name, **given)
        assert torch.equal(_logits(one), _logits(both)), name
        texts = [m.generate(IDS, max_new_tokens=6, do_sample=False) for m in (one, both)]
        assert torch.equal(*texts), name
    _compiled(both)
    both.save_pretrained(f"{folder}/saved")
    assert torch.equal(_logits(_load(folder, "saved")), _logits(one))
    _odd_sizes(folder)
    _latent_attention(folder)
    _experts(folder)
    one, both = _checked(folder, "llama", quantization_config=QfxConfig(scheme="w4a8"))
    assert float(qfx.sqnr(_logits(one), _logits(both))) > 45
    kinds = {type(style).__module__ for style in ALL_PARALLEL_STYLES.values()}
    assert not any(kind.startswith("qfx") for kind in kinds)
    if dist.get_rank() == 0:
        import shutil

        shutil.rmtree(Path(folder))


def test_the_plan_of_a_model_runs_int8() -> None:
    in_processes(_run)
