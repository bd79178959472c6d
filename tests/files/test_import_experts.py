"""Experts of models of other tools: the weights are bit for bit those that the tool makes of the
file, whose parts may be apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import qfx
import qfx.hf  # for tables of positions of models on the meta device
from qfx.nn import Experts
from qfx.nn.experts_like import is_experts
from tests.conftest import same_bits
from tests.lib.experts_blocks import IDS, MODELS, SIZES
from tests.lib.gguf_files import Kind, write_gguf

# Models and their architectures in GGUF.
ARCHITECTURES = {"mixtral": "llama", "qwen3-moe": "qwen3moe", "olmoe": "olmoe"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}


def made(name: str, **sizes: Any) -> Any:
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for each in model.modules():
        if is_experts(each):
            each.gate_up_proj.data[1, :32] = 0  # scales of no type of their own
    return model


def skeleton(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)(model.config).eval()


def parts_of(model: Any) -> dict[str, Tensor]:
    """The weights of a model, with both halves of the first product of experts apart."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            found[name] = tensor
    return found


Kinds = Callable[[str], Any]  # the kind of a tensor of experts, by its name in the file


def written(path: Path, model: Any, arch: str, kind: Kinds) -> dict[str, Tensor]:
    """Writes a file, in which all but experts is in float32, and returns the values of experts."""
    config = model.config
    by_name = {each: name for name, each in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(by_name[arch], config.num_hidden_layers)
    tensors, names = {}, {}
    for name, tensor in parts_of(model).items():
        there = known.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 3:
            there += ".weight"
        names[there] = name
        tensor = _pairs(name, tensor, config) if arch == "llama" else tensor
        tensors[there] = tensor.contiguous(), kind(there) if tensor.ndim == 3 else Kind.F32
    fields = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
    }
    values = write_gguf(path, tensors, fields, arch)
    return {names[there]: v for there, v in values.items() if v.ndim == 3}


def _pairs(name: str, tensor: Tensor, config: Any) -> Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return tensor
    return tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def with_values(model: Any, values: dict[str, Tensor]) -> Any:
    """The model with these weights of experts, in float."""
    for name, block in model.named_modules():
        if is_experts(block):
            halves = [values[f"{name}.{half}_proj"] for half in ("gate", "up")]
            block.gate_up_proj.data = torch.cat(halves, 1)
            block.down_proj.data = values[f"{name}.down_proj"]
    return model


def same_weights(loaded: Any, model: Any) -> bool:
    """Whether int8 or float experts have the weights of those of the model."""
    pairs = [
        (m, model.get_submodule(n))
        for n, m in loaded.named_modules()
        if isinstance(m, Experts) or is_experts(m)
    ]
    assert len(pairs) == 2
    for found, block in pairs:
        for part, name in (("up", "gate_up_proj"), ("down", "down_proj")):
            for e, wanted in enumerate(getattr(block, name)):
                int8 = isinstance(found, Experts)
                w = getattr(found, part).dequantized(e) if int8 else getattr(found, name)[e]
                if not torch.equal(w, wanted):
                    return False
    return True


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(IDS).logits
    return y


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts_of_gguf_keep_their_values(name: str, kind: str, tmp_path: Path) -> None:
    """And are saved as experts of qfx from then on."""
    path, model = tmp_path / "a.gguf", made(name)
    values = written(path, model, ARCHITECTURES[name], lambda at: Kind[kind])
    expected = with_values(model, values)
    loaded = qfx.load(path, skeleton(model))
    assert sum(isinstance(m, Experts) for m in loaded.modules()) == 2
    assert same_weights(loaded, expected)
    assert qfx.sqnr(logits(expected), logits(loaded)) > 30
    qfx.save(loaded, tmp_path / "folder")
    again = qfx.load(tmp_path / "folder", skeleton(model))
    assert same_weights(again, expected) and same_bits(logits(again), logits(loaded))


def test_products_of_two_kinds(tmp_path: Path) -> None:
    path, model = tmp_path / "a.gguf", made("olmoe")
    values = written(path, model, "olmoe", lambda at: Kind["Q8_0" if "down" in at else "Q4_0"])
    assert same_weights(qfx.load(path, skeleton(model)), with_values(model, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_float_stay_float(dtype: torch.dtype, tmp_path: Path) -> None:
    path, model = tmp_path / "a.gguf", made("qwen3-moe")
    values = written(path, model, "qwen3moe", lambda at: Kind.F16)
    loaded = qfx.load(path, skeleton(model).to(dtype))
    assert same_weights(loaded, with_values(model, values).to(dtype))


def test_experts_of_another_kind_are_quantized_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or refused by name, or left float."""
    path, model = tmp_path / "a.gguf", made("mixtral", **WIDE)
    values = written(path, model, "llama", lambda at: Kind.TQ2_0)
    with pytest.raises(ValueError, match=r"experts.\w+_proj is TQ2_0, which has a grid that no"):
        qfx.load(path, skeleton(model))
    expected = with_values(model, values)
    with caplog.at_level(logging.WARNING, "qfx"):
        loaded = qfx.load(path, skeleton(model), requantize="w8a8")
    wanted = [Experts.from_float(m, "w8a8") for m in expected.modules() if is_experts(m)]
    found = [m for m in loaded.modules() if isinstance(m, Experts)]
    for one, other in zip(found, wanted, strict=True):
        assert same_bits(one.up.packed, other.up.packed)
        assert same_bits(one.down.packed, other.down.packed)
    assert "4 linears of" in caplog.text and "experts.down (TQ2_0)" in caplog.text
    config = qfx.Config(scheme="w8a8", skip=["layers.0.mlp.experts"])
    loaded = qfx.load(path, skeleton(model), requantize=config)
    kinds = [isinstance(layer.mlp.experts, Experts) for layer in loaded.model.layers]
    assert kinds == [False, True]


# Arguments of load, or kinds of tensors of a file: why it is refused.
REFUSED: dict[str, tuple[Kinds, dict[str, Any]]] = {
    "is Q8_0, which does not go with these activations: .* float activations": (
        lambda at: Kind.Q8_0,
        {"x": None},
    ),
    "the parts of model.layers.0.mlp.experts.gate_up_proj differ: Q8_0 .* and Q4_0": (
        lambda at: Kind["Q4_0" if "up" in at else "Q8_0"],
        {},
    ),
    "layers.0.mlp.experts has experts in int8, and no codes of .*experts.down": (
        lambda at: Kind["F16" if "0.ffn_down" in at else "Q8_0"],
        {},
    ),
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_what_experts_cannot_hold_is_refused(phrase: str, tmp_path: Path) -> None:
    kind, given = REFUSED[phrase]
    path, model = tmp_path / "a.gguf", made("olmoe")
    written(path, model, "olmoe", kind)
    empty = skeleton(model)
    with pytest.raises(ValueError, match=phrase) as why:
        qfx.load(path, empty, **given)
    assert str(path) in str(why.value)
    assert is_experts(empty.model.layers[0].mlp.experts)


def test_a_file_with_a_number_of_experts_of_its_own_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "a.gguf", made("olmoe")
    written(path, model, "olmoe", lambda at: Kind.Q8_0)
    other = made("olmoe", num_experts=3)
    with pytest.raises(ValueError, match=r"codes \[4, .*\], and the product .* \[3, "):
        qfx.load(path, skeleton(other))


# --- compressed-tensors, with a linear for each expert ---

W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
X8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a8": ("int-quantized", {"weights": W8, "input_activations": X8}),
    "w4a16": ("pack-quantized", {"weights": W4}),
}
OLD_NAMES = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def compressed(folder: Path, model: Any, group: str, old: bool = False) -> dict[str, Tensor]:
    """Writes a folder in which all but experts is float, and returns the values of experts. `old`:
    with the names of Mixtral."""
    form, said = GROUPS[group]
    tensors, values = {}, {}
    for name, tensor in parts_of(model).items():
        if tensor.ndim != 3:
            tensors[_named(name, old)] = tensor.clone()
            continue
        block, _, part = name.rpartition(".")
        each = [_compressed(one, form == "pack-quantized") for one in tensor]
        for e, (stored, _) in enumerate(each):
            owner = _named(f"{block}.{e}.{part}", old)
            tensors |= {f"{owner}.{n}": t for n, t in stored.items()}
        values[name] = torch.stack([value for _, value in each])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    groups = {"group_0": {"targets": ["Linear"], **said}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return values


def _named(name: str, old: bool) -> str:
    for new, before in OLD_NAMES.items():
        name = name.replace(new, before) if old else name
    return name


def _compressed(w: Tensor, packed: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that the format has for a linear, and its float32 values."""
    most, group = (7, 32) if packed else (127, w.shape[1])
    rows = w.unflatten(1, (-1, group))
    scale = (rows.abs().amax(-1).clamp_min(1e-3) / most).bfloat16()
    q = (rows / scale.float()[..., None]).round().clamp(-most, most)
    values = (q * scale.float()[..., None]).reshape(w.shape)
    codes = q.reshape(w.shape).to(torch.int8)
    if not packed:
        return {"weight": codes, "weight_scale": scale}, values
    nibbles = (codes + 8).to(torch.uint8).reshape(len(w), -1, 2)
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)
    shape = torch.tensor(w.shape)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}, values


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts_of_compressed_tensors_keep_their_values(
    name: str, group: str, tmp_path: Path
) -> None:
    model = made(name)
    values = compressed(tmp_path, model, group, old=name == "mixtral")
    expected = with_values(model, values)
    loaded = qfx.load(tmp_path, skeleton(model))
    assert sum(isinstance(m, Experts) for m in loaded.modules()) == 2
    assert same_weights(loaded, expected)
    assert qfx.sqnr(logits(expected), logits(loaded)) > 25


def test_experts_that_a_folder_leaves_float(tmp_path: Path) -> None:
    model = made("qwen3-moe")
    tensors = {}
    for name, tensor in parts_of(model).items():
        block, _, part = name.rpartition(".")
        many = tensor.ndim == 3
        each = {f"{block}.{e}.{part}.weight": t for e, t in enumerate(tensor)} if many else {}
        tensors |= each or {name: tensor}
    save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    groups = {"a": {"targets": ["Linear"], **GROUPS["w8a8"][1]}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    said = {"quantization_config": {**config, "config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded = qfx.load(tmp_path, skeleton(model))
    assert same_weights(loaded, model) and same_bits(logits(loaded), logits(model))


EXPERT = "model.layers.1.mlp.experts.2"
# Changes of a folder: what is said of it.
CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "lacks the expert 2 of model.layers.1.mlp.experts.down_proj": lambda s: [
        s.pop(f"{EXPERT}.down_proj.{part}") for part in ("weight", "weight_scale")
    ],
    "lacks a part of the experts of model.layers.1.mlp.experts.gate_up_proj": lambda s: [
        s.pop(n) for n in [*s] if ".1.mlp.experts." in n and "up_proj" in n
    ],
    "the parts of model.layers.1.mlp.experts.down_proj differ": lambda s: (
        s.update({f"{EXPERT}.down_proj.weight": s[f"{EXPERT}.down_proj.weight"].bfloat16()}),
        s.pop(f"{EXPERT}.down_proj.weight_scale"),
    ),
    r"experts.1.up_proj.*|model.layers.1.mlp.experts.gate_up_proj: .* is not finite": lambda s: s[
        f"{EXPERT}.up_proj.weight_scale"
    ].fill_(torch.nan),
}


@pytest.mark.parametrize("phrase", CHANGES)
def test_a_folder_with_other_experts_is_refused(phrase: str, tmp_path: Path) -> None:
    model = made("olmoe")
    compressed(tmp_path, model, "w8a8")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    CHANGES[phrase](state)
    save_file(state, file)
    empty = skeleton(model)
    with pytest.raises(ValueError, match=phrase):
        qfx.load(tmp_path, empty)
    assert is_experts(empty.model.layers[0].mlp.experts)
