"""Checkpoints, adapters and ranks in vLLM itself: int8 weights that were saved, weights that are
loaded once more, LoRA on int8 linears, and linears that two processes share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.lora.request import LoRARequest

import qfx
from benchmarks.compressed import compressed
from qfx.io.errors import UserError
from qfx.nn.stacked_weight import StackedWeight
from qfx.vllm.kernels import Int8Kernel
from tests.served.models import answers, engine, in_transformers, in_vllm, prompts

PROMPTS, RANK = 4, 4
CHANGED = ("self_attn.q_proj", "mlp.down_proj")  # by the adapter
SCHEMES = ("w8a8", "w4a8", "w8a8-groups")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_saved_int8_checkpoint_is_that_of_transformers(
    llama: Path, tmp_path: Path, scheme: str
) -> None:
    """With its factors of smoothing. Where a sum in another order moves an activation to the next
    code, that changes far less than the codes themselves do."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(prompts(PROMPTS)).logits[:, :-1].log_softmax(-1)
        qfx.quantize_(model, scheme)
        wanted = model(prompts(PROMPTS)).logits[:, :-1].log_softmax(-1)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    with engine(tmp_path, quantization=None) as llm:
        found = in_vllm(llm, PROMPTS)
    assert _rms(found - wanted) < _rms(exact - wanted) / 5


def test_saved_int8_experts_are_those_that_vllm_makes_of_floats(
    olmoe: Path, tmp_path: Path
) -> None:
    """The same codes: `save_pretrained` writes both products of a block as stacked weights."""
    state = load_file(olmoe / "model.safetensors")
    config = json.loads((olmoe / "config.json").read_text())
    numbers = {}
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}.mlp.experts"
        parts = [f"{block}.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")]
        gate, up, down = (
            torch.stack([state.pop(name.format(e)) for e in range(config["num_experts"])])
            for name in parts
        )
        for name, floats in ("up", torch.cat([gate, up], 1)), ("down", down):
            made = StackedWeight.from_float(floats, qfx.Config().chosen).saved()
            numbers[f"{block}.{name}"] = made["scheme"].tolist()
            state |= {f"{block}.{name}.{part}": tensor for part, tensor in made.items()}
    shutil.copytree(olmoe, tmp_path, dirs_exist_ok=True)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "qfx", "format": 1, "linears": numbers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(olmoe, {"only": ["experts"]}) as llm:
        wanted = in_vllm(llm, PROMPTS)
    with engine(tmp_path, quantization=None) as llm:
        assert torch.equal(in_vllm(llm, PROMPTS), wanted)


def test_a_checkpoint_of_compressed_tensors_is_that_of_vllms_own_kernels(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same codes, and quantize activations for each token."""
    folder, calls = compressed(llama), set()
    with engine(folder, quantization=None) as llm:
        own = in_vllm(llm, PROMPTS)
    before = Int8Kernel.apply_weights
    monkeypatch.setattr(
        Int8Kernel, "apply_weights", lambda kernel, *x: (calls.add(kernel), before(kernel, *x))[1]
    )
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUInt8ScaledMMLinearKernel")
    with engine(folder, quantization=None) as llm:
        ours = in_vllm(llm, PROMPTS)
    assert len(calls) == 8  # of two blocks: qkv, o, gate and up, down
    exact = in_transformers(llama, None, PROMPTS)
    assert _rms(ours - own) < _rms(own - exact) / 2


def test_a_weight_that_no_file_has_is_an_error(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if "layers.1.mlp.down_proj" not in n}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="no weight was loaded for model"), engine(tmp_path):
        pass


def test_random_weights_need_no_file(llama: Path) -> None:
    with engine(llama, load_format="dummy") as llm:
        assert in_vllm(llm, PROMPTS).isfinite().all()


def test_weights_that_are_loaded_again_compute_the_same(llama: Path) -> None:
    with engine(llama, {"scheme": "w4a8"}) as llm:
        before = in_vllm(llm, PROMPTS)
        llm.reset_prefix_cache()
        llm.collective_rpc("reload_weights")
        assert torch.equal(in_vllm(llm, PROMPTS), before)


def test_an_adapter_changes_int8_linears_as_it_changes_floats(llama: Path, tmp_path: Path) -> None:
    """Its products are added in float: the error is that of the int8 model without it."""
    adapter = LoRARequest("adapter", 1, str(_adapter(llama, tmp_path)))
    found: dict[Any, Tensor] = {}
    for quantization in ("qfx", None):
        with engine(llama, quantization=quantization, enable_lora=True, max_lora_rank=8) as llm:
            for given in (None, adapter):
                found[quantization, given is not None] = _first_words(llm, given)
    effect = _rms(found[None, True] - found[None, False])
    assert _rms(found["qfx", True] - found[None, True]) < effect / 5
    assert _rms(found["qfx", False] - found[None, False]) < effect / 5


def test_two_ranks_compute_what_one_does(olmoe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quantizes its own part of the features that a row-parallel linear reads, so that the
    error is another one, of the same size."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    exact = in_transformers(olmoe, None, PROMPTS)
    with engine(olmoe) as llm:
        one = in_vllm(llm, PROMPTS)
    with engine(olmoe, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        two = in_vllm(llm, PROMPTS)
    assert 0 < _rms(two - one) < 3 * _rms(one - exact)
    assert _rms(two - exact) < 2 * _rms(one - exact)


def _adapter(folder: Path, to: Path) -> Path:
    """Writes an adapter of random weights, as PEFT does."""
    sizes = json.loads((folder / "config.json").read_text())
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    torch.manual_seed(2)
    found = {}
    for i in range(sizes["num_hidden_layers"]):
        for part in CHANGED:
            name = f"base_model.model.model.layers.{i}.{part}"
            k = inner if part == "mlp.down_proj" else hidden
            found[f"{name}.lora_A.weight"] = torch.randn(RANK, k) / k**0.5
            found[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK)
    save_file(found, to / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [part.rpartition(".")[2] for part in CHANGED],
        "bias": "none",
    }
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


def _first_words(llm: Any, adapter: Any) -> Tensor:
    """Returns the log probabilities [PROMPTS, words] of the first new word."""
    rows = []
    for answer in answers(llm, PROMPTS, 1, adapter, logprobs=-1):
        (entries,) = answer.outputs[0].logprobs
        rows.append([entries[word].logprob for word in sorted(entries)])
    return torch.tensor(rows)


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())
