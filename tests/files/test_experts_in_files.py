"""qfx.save and qfx.load of models with int8 experts: what comes back has the bits of what was
saved, and damaged files and other skeletons are refused before anything changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qfx
import qfx.hf  # makes buffers that no file has
from qfx.nn import Experts
from qfx.nn.experts_like import is_experts
from tests.conftest import same_bits
from tests.lib.experts_blocks import BY_MODEL, IDS, SCHEMES, block_of, model_of, routed

KINDS = ["mixtral", "gpt-oss"]


def quantized(name: str, **options: Any) -> Any:
    return qfx.quantize_(model_of(name), qfx.Config(smoothing=False, **options))


def meta(name: str) -> Any:
    model = model_of(name)
    with torch.device("meta"):
        return type(model)(model.config).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(IDS).logits
    return y


def state_file(model: nn.Module, path: Path) -> Path:
    save_file({n: t.clone() for n, t in model.state_dict().items()}, path / "state.safetensors")
    return path / "state.safetensors"


@BY_MODEL
def test_a_model_comes_back(name: str, tmp_path: Path) -> None:
    """Into float values or into none, from one file or several, and from a state dict."""
    model = quantized(name)
    qfx.save(model, tmp_path / "whole")
    qfx.save(model, tmp_path / "parts", shard_size=50_000)
    for path in (tmp_path / "whole", tmp_path / "parts", state_file(model, tmp_path)):
        loaded = qfx.load(path, meta(name))
        assert same_bits(logits(loaded), logits(model))
        assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    said = json.loads((tmp_path / "parts" / "qfx.json").read_text())
    parts = [n for n in said["linears"] if ".experts." in n]
    blocks = sum(isinstance(m, Experts) for m in model.modules())
    assert len(parts) == 2 * blocks and len(said["files"]) > 3
    assert not any("packed" in tensor for f in said["files"].values() for tensor in f["tensors"])


@pytest.mark.parametrize("name", KINDS)
def test_a_model_comes_back_into_another_dtype(name: str, tmp_path: Path) -> None:
    """That of the file is kept."""
    model = quantized(name)
    qfx.save(model, tmp_path)
    loaded = qfx.load(tmp_path, model_of(name).bfloat16())
    assert loaded.dtype == torch.float32 and same_bits(logits(loaded), logits(model))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_comes_back(scheme: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": Experts.from_float(block_of("gpt-oss"), scheme)})
    qfx.save(model, tmp_path)
    loaded = qfx.load(tmp_path, nn.ModuleDict({"experts": block_of("gpt-oss").to("meta")}))
    assert repr(loaded) == repr(model)
    with torch.no_grad():
        assert same_bits(loaded["experts"](*routed()), model["experts"](*routed()))


def test_experts_that_stay_float_come_back(tmp_path: Path) -> None:
    model = quantized("olmoe", skip=["layers.0.mlp.experts"])
    qfx.save(model, tmp_path)
    loaded = qfx.load(tmp_path, meta("olmoe"))
    kinds = [type(layer.mlp.experts).__name__ for layer in loaded.model.layers]
    assert kinds == ["OlmoeExperts", "Experts"]
    assert same_bits(logits(loaded), logits(model))


def test_a_block_under_two_names_is_stored_once(tmp_path: Path) -> None:
    made = Experts.from_float(block_of("gpt-oss"))
    qfx.save(nn.ModuleDict({"a": made, "b": made}), tmp_path)
    said = json.loads((tmp_path / "qfx.json").read_text())
    assert said["same"]["b.up.codes"] == "a.up.codes"
    loaded = qfx.load(tmp_path, nn.ModuleDict({"a": block_of("gpt-oss"), "b": block_of("gpt-oss")}))
    assert loaded["a"] is loaded["b"]
    with torch.no_grad():
        assert same_bits(loaded["b"](*routed()), made(*routed()))


def test_hooks_of_a_block_are_kept(tmp_path: Path) -> None:
    qfx.save(nn.ModuleDict({"experts": Experts.from_float(block_of("mixtral"))}), tmp_path)
    skeleton, seen = nn.ModuleDict({"experts": block_of("mixtral")}), []
    skeleton["experts"].register_forward_hook(lambda *given: seen.append(given[0]))
    loaded = qfx.load(tmp_path, skeleton)
    with torch.no_grad():
        loaded["experts"](*routed())
    assert seen == [loaded["experts"]]


def _experts(change: Callable[[Any], Any]) -> nn.Module:
    skeleton = nn.ModuleDict({"experts": block_of("gpt-oss")})
    change(skeleton)
    return skeleton


def _parameter(name: str, *shape: int) -> Callable[[Any], Any]:
    return lambda m: setattr(m["experts"], name, nn.Parameter(torch.zeros(shape)))


# What is said of a skeleton that is not that of the file.
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "experts.up is a product of int8 experts, and the skeleton has nothing": lambda: _experts(
        lambda m: m.update({"experts": nn.Linear(4, 4)})
    ),
    r"codes \[4, 192, 64\], and the product of the skeleton a weight \[4, 192, 60\]": lambda: (
        _experts(_parameter("gate_up_proj", 4, 60, 192))
    ),
    r"codes \[4, 64, 96\], and the product of the skeleton a weight \[3, 64, 96\]": lambda: (
        _experts(_parameter("down_proj", 3, 96, 64))
    ),
    "it has experts.up.bias, which the skeleton lacks": lambda: _experts(
        lambda m: (setattr(m["experts"], "has_bias", False), delattr(m["experts"], BIAS))
    ),
    r"experts.up.bias is torch.float32 \[4, 192\], and in the skeleton": lambda: _experts(
        lambda m: (_parameter(BIAS, 4, 190)(m), setattr(m["experts"], "has_bias", False))
    ),
    "is int8, and in the skeleton GptOssExperts has only some of the experts": lambda: _experts(
        lambda m: setattr(m["experts"], "_is_expert_parallel", True)
    ),
    "experts.up is int8 in the skeleton already": lambda: _experts(
        lambda m: m.update({"experts": Experts.from_float(m["experts"])})
    ),
    "its forward is its own, not that of GptOssExperts": lambda: _experts(
        lambda m: vars(m["experts"]).update(forward=lambda *given: given[0])
    ),
}
BIAS = "gate_up_proj_bias"


@pytest.mark.parametrize("phrase", OTHERS)
def test_another_skeleton_is_refused(phrase: str, tmp_path: Path) -> None:
    qfx.save(nn.ModuleDict({"experts": Experts.from_float(block_of("gpt-oss"))}), tmp_path)
    skeleton = OTHERS[phrase]()
    block = skeleton["experts"]  # type: ignore[index]
    with pytest.raises(ValueError, match=phrase):
        qfx.load(tmp_path, skeleton)
    assert skeleton["experts"] is block  # type: ignore[index]


# What is said of a state dict that was changed.
DAMAGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "experts.up.scale holds 0.0 at": lambda s: s["experts.up.scale"][3].zero_(),
    "experts has experts in int8, and no codes of experts.down": lambda s: s.pop(
        "experts.down.codes"
    ),
    "it lacks experts.up.bias, which": lambda s: s.pop("experts.up.bias"),
    "experts.up.scale does not belong to 4 experts": lambda s: s.update(
        {"experts.up.scale": s["experts.up.scale"][:3].clone()}
    ),
    "experts.up.scheme' is not there": lambda s: s.pop("experts.up.scheme"),
    "experts.up.scheme: .* has float activations": lambda s: s["experts.up.scheme"][2:7].zero_(),
    "experts.up.codes is torch.int16": lambda s: s.update(
        {"experts.up.codes": s["experts.up.codes"].to(torch.int16)}
    ),
}


@pytest.mark.parametrize("phrase", DAMAGES)
def test_a_damaged_file_is_refused(phrase: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": Experts.from_float(block_of("gpt-oss"))})
    path = state_file(model, tmp_path)
    state = load_file(path)
    DAMAGES[phrase](state)
    save_file(state, path)
    skeleton = nn.ModuleDict({"experts": block_of("gpt-oss")})
    with pytest.raises(ValueError, match=phrase) as why:
        qfx.load(path, skeleton)
    assert str(path) in str(why.value) and is_experts(skeleton["experts"])


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    qfx.save(nn.ModuleDict({"experts": Experts.from_float(block_of("mixtral"))}), tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    for data in (whole[:-100], whole[:-100] + bytes(100)):
        path.write_bytes(data)
        skeleton = nn.ModuleDict({"experts": block_of("mixtral")})
        with pytest.raises(ValueError, match=path.name):
            qfx.load(tmp_path, skeleton)
        assert is_experts(skeleton["experts"])


@pytest.mark.parametrize("part", ["", ".up"])
def test_a_block_alone_is_refused(part: str, tmp_path: Path) -> None:
    made = Experts.from_float(block_of("mixtral"))
    with pytest.raises(ValueError, match="the model is a single block of experts: put it into"):
        qfx.save(made.up if part else made, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# Loads a model of experts in a new process, and prints how many bytes it took at most, beyond
# those before, and the bytes of its int8 weights.
PEAK = """
import sys, torch, qfx
from tests.files.test_experts_in_files import large
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
with torch.device("meta"):
    skeleton = large()
before = peak()
model = qfx.load(sys.argv[1], skeleton)
print(peak() - before, sum(m.packed.nbytes for m in model.modules() if hasattr(m, "packed")))
"""


def large() -> nn.Module:
    """A model of 6 blocks of 16 experts, each of 57 MB in float32."""
    config = transformers.MixtralConfig(
        hidden_size=384, intermediate_size=768, num_local_experts=16
    )
    kind: Any = transformers.models.mixtral.modeling_mixtral.MixtralExperts
    return nn.ModuleList(kind(config) for _ in range(6))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_little_more_than_the_model(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = large()
    for block in [*model]:
        for name, each in [*block.named_parameters()]:
            setattr(block, name, nn.Parameter(torch.randn(each.shape) / 10))
    qfx.quantize_(model)
    qfx.save(model, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    took, stored = map(int, done.stdout.split())
    one = 16 * 2 * 384 * 768  # the codes of one product
    assert took < stored + 3 * one + 10_000_000 < 2 * stored, (took, stored)
