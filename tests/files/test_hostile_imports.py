"""Files of compressed-tensors and torchao that are truncated, damaged or hostile: each is refused
by a sentence that names the file, before anything of the skeleton changes, or is a model with
finite scales."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import qfx
import qfx.hf
from qfx.files.foreign.compressed import INDEX
from qfx.files.foreign.compressed_config import METHOD, compressed_config, method_of
from qfx.files.foreign.torchao import torchao_file
from tests.files.test_hostile_files import changed
from tests.files.test_import import HERE, IDS, Net, llama, meta
from tests.lib.mutations import mutated

W8, W4 = HERE / "w8a8", HERE / "w4a16_zeros"
AO = HERE / "int8_dynamic.safetensors"
UP = "model.layers.0.mlp.up_proj"


def refused(path: Path, skeleton: nn.Module, **how: Any) -> str:
    """What was said of it, '' where it was loaded."""
    before = {name: id(module) for name, module in skeleton.named_modules()}
    try:
        qfx.load(path, skeleton, **how)
    except (ValueError, NotImplementedError) as why:
        text = str(why)
        assert str(path) in text and text.replace("\n", "").isprintable(), text
        assert {name: id(module) for name, module in skeleton.named_modules()} == before
        assert all(t.is_meta for t in skeleton.parameters())
        return text
    linears = [m for m in skeleton.modules() if isinstance(m, qfx.nn.Linear)]
    for linear in linears:
        assert linear.weight.isfinite().all()
        assert linear.scheme.w.packed or bool((linear.scale > 0).all())  # packed ones have signs
    assert not any(t.is_meta for t in skeleton.parameters())
    return ""


# --- compressed-tensors ---


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def said(to: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((to / "config.json").read_text())
    change(config["quantization_config"])
    (to / "config.json").write_text(json.dumps(config))


def tensors(to: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = load_file(to / "model.safetensors")
    change(state)
    save_file(state, to / "model.safetensors")


@pytest.mark.parametrize("folder", [W8, W4], ids=lambda f: f.name)
def test_any_change_of_the_description(folder: Path, tmp_path: Path) -> None:
    """One in five of all; one in 200 is loaded by."""
    to = copied(folder, tmp_path / "m")
    text = json.loads((folder / "config.json").read_text())
    few = {"quantization_config": text["quantization_config"]}
    count = accepted = 0
    for new in islice(mutated(json.dumps(few)), 0, None, 5):
        if len(new) > 20_000:
            continue
        (to / "config.json").write_bytes(new.encode("utf-8", "surrogatepass"))
        count += 1
        try:
            accepted += method_of(to) == METHOD and compressed_config(to) is not None
        except ValueError as why:
            assert str(to) in str(why) and str(why).isprintable()
        if count % 40 == 0:
            refused(to, llama())
    assert count > 200 and accepted < count * 0.8, (count, accepted)


COMPRESSED: dict[str, tuple[Path, Callable[[Path], Any]]] = {
    "kv_cache_scheme is {'num_bits': 8}": (
        W8, lambda to: said(to, lambda c: c.update(kv_cache_scheme={"num_bits": 8}))
    ),
    "sparsity_config is {'format': 'sparse-24'}": (
        W8, lambda to: said(to, lambda c: c.update(sparsity_config={"format": "sparse-24"}))
    ),
    "the format of config_groups.group_0 is 'float-quantized'": (
        W8, lambda to: said(to, lambda c: group(c).update(format="float-quantized"))
    ),
    "config_groups.group_0.weights is .*'float'": (
        W8, lambda to: said(to, lambda c: group(c)["weights"].update(type="float"))
    ),
    "config_groups.group_0.weights.num_bits is 3": (
        W4, lambda to: said(to, lambda c: group(c)["weights"].update(num_bits=3))
    ),
    "config_groups.group_0.weights.actorder is 'group'": (
        W4, lambda to: said(to, lambda c: group(c)["weights"].update(actorder="group"))
    ),
    "config_groups.group_0.input_activations is .*'tensor'": (
        W8, lambda to: said(to, lambda c: group(c)["input_activations"].update(strategy="tensor"))
    ),
    r"targets has the pattern re:\(: missing \)": (
        W8, lambda to: said(to, lambda c: group(c).update(targets=["re:("]))
    ),
    "self_attn.q_proj is quantized, and no group of config.json says how": (
        W8, lambda to: said(to, lambda c: c.update(ignore=["re:.*q_proj", "lm_head"]))
    ),
    "down_proj has K=64, which groups of 48 do not divide": (
        W4, lambda to: said(to, lambda c: group(c)["weights"].update(group_size=48))
    ),
    r"weight_packed is torch.int32 \[\d+, [48]\], expected torch.int32 \[\d+, (8|16)\]": (
        W4, lambda to: said(to, lambda c: group(c)["weights"].update(num_bits=8))
    ),
    "has zero points, and config.json says that it is symmetric": (
        W4, lambda to: said(to, lambda c: group(c)["weights"].update(symmetric=True))
    ),
    "up_proj has weight_g_idx, which qfx.load does not read": (
        W4, lambda to: tensors(to, lambda s: s.update({f"{UP}.weight_g_idx": torch.zeros(32)}))
    ),
    "up_proj has a scale, and no weight_packed": (
        W4, lambda to: tensors(to, lambda s: s.pop(f"{UP}.weight_packed"))
    ),
    "up_proj has no weight_shape of two numbers": (
        W4, lambda to: tensors(to, lambda s: s.pop(f"{UP}.weight_shape"))
    ),
    r"up_proj has the shape \[-1, 32\]": (
        W4, lambda to: tensors(to, lambda s: s[f"{UP}.weight_shape"].__setitem__(0, -1))
    ),
    r"weight_packed is torch.int32 \[64, 4\], expected torch.int32 \[1073741824, 4\]": (
        W4, lambda to: tensors(to, lambda s: s[f"{UP}.weight_shape"].__setitem__(0, 2**30))
    ),
    r"weight_zero_point is not there, expected torch.int32 \[8, 1\]": (
        W4, lambda to: tensors(to, lambda s: s.pop(f"{UP}.weight_zero_point"))
    ),
    r"up_proj.weight: scale holds inf at \[3, 0\], which is not finite": (
        W8, lambda to: tensors(to, lambda s: s[f"{UP}.weight_scale"].__setitem__(3, torch.inf))
    ),
    "up_proj.scale holds -1.0": (
        W8, lambda to: tensors(to, lambda s: s[f"{UP}.weight_scale"].fill_(-1))
    ),
    "is no whole file of tensors": (
        W8, lambda to: (to / "model.safetensors").write_bytes(
            (W8 / "model.safetensors").read_bytes()[:-1]
        )
    ),
    "index.json has no weight_map": (
        W8, lambda to: (to / INDEX).write_text("{}")
    ),
    r"\.\./model.safetensors is no name of a file beside it": (
        W8, lambda to: (to / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    ),
    "b.safetensors is not there, and model.safetensors.index.json names it": (
        W8, lambda to: (to / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}')
    ),
    "is quantized by bitsandbytes, and qfx.load reads compressed-tensors": (
        W8, lambda to: said(to, lambda c: c.update(quant_method="bitsandbytes"))
    ),
    "says itself what its schemes are": (
        W8, lambda to: (to / "qfx.json").write_text("{}")
    ),
}  # fmt: skip


def group(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]
    return found


@pytest.mark.parametrize("phrase", COMPRESSED)
def test_what_is_said_of_a_damaged_folder(phrase: str, tmp_path: Path) -> None:
    folder, damage = COMPRESSED[phrase]
    to = copied(folder, tmp_path / "m")
    damage(to)
    text = refused(to, llama(), x=qfx.QSpec())
    assert re.search(phrase, text), text


def test_a_model_of_several_files(tmp_path: Path) -> None:
    """Parts of a linear may lie in two of them."""
    state = load_file(W4 / "model.safetensors")
    to = copied(W4, tmp_path / "m")
    (to / "model.safetensors").unlink()
    files: dict[str, dict[str, Any]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in state.items():
        files["a.safetensors" if name.endswith("packed") else "b.safetensors"][name] = tensor
    for name, part in files.items():
        save_file(part, to / name)
    where = {n: name for name, part in files.items() for n in part}
    (to / INDEX).write_text(json.dumps({"weight_map": where}))
    with torch.no_grad():
        expected = qfx.load(W4, llama())(IDS).logits
        assert torch.equal(qfx.load(to, llama())(IDS).logits, expected)
        where_x = {**files["b.safetensors"], "lm_head.weight": state["lm_head.weight"]}
    save_file({"lm_head.weight": where_x["lm_head.weight"], **files["a.safetensors"]},
              to / "a.safetensors")  # fmt: skip
    assert "has lm_head.weight in two files" in refused(to, llama())


# --- torchao ---


def described(path: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    with safe_open(path, "pt") as opened:
        metadata = dict(opened.metadata())
    change(metadata)
    save_file(load_file(path), to / "a.safetensors", metadata)
    return to / "a.safetensors"


def test_any_change_of_the_metadata_of_torchao(tmp_path: Path) -> None:
    name = f"{UP}.weight"
    with safe_open(AO, "pt") as opened:
        text = opened.metadata()[name]
    count = accepted = 0
    for new in islice(mutated(text), 0, None, 11):
        if len(new) > 20_000 or not new.isascii():
            continue
        count += 1
        path = described(AO, tmp_path, lambda m, new=new: m.update({name: new}))  # type: ignore
        try:
            accepted += torchao_file(path) is not None
        except ValueError as why:
            assert str(path) in str(why) and str(why).isprintable()
        if count % 40 == 0:
            refused(path, llama())
    assert count > 60 and accepted < count * 0.8, (count, accepted)


TORCHAO: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensor_names is no list of names": lambda m: m.update(tensor_names="{}"),
    "tensor_names: it is not JSON": lambda m: m.update(tensor_names="{"),
    "nonesuch is a None, and of torchao's tensors qfx.load reads Int8Tensor": lambda m: m.update(
        tensor_names='["nonesuch"]'
    ),
    "nonesuch is not there, and the metadata names it": lambda m: m.update(
        tensor_names='["nonesuch"]', nonesuch='{"_type": "Tensor"}'
    ),
    "is a Float8Tensor, and of torchao's tensors": lambda m: m.update(
        {f"{UP}.weight": '{"_type": "Float8Tensor"}'}
    ),
    "has no _data": lambda m: m.update({f"{UP}.weight": '{"_type": "Int8Tensor"}'}),
    "holds .*, of which its metadata says nothing": lambda m: m.update(tensor_names="[]"),
}


@pytest.mark.parametrize("phrase", TORCHAO)
def test_what_is_said_of_a_damaged_file_of_torchao(phrase: str, tmp_path: Path) -> None:
    text = refused(described(AO, tmp_path, TORCHAO[phrase]), llama())
    assert re.search(phrase, text), text


@given(st.data())
def test_any_change_of_a_file_of_torchao(tmp_path_factory: Any, data: Any) -> None:
    path: Path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    whole = AO.read_bytes()
    table = 8 + int.from_bytes(whole[:8], "little")
    places = st.integers(0, table) | st.integers(0, len(whole) - 1)
    path.write_bytes(changed(whole, places, data.draw))
    refused(path, llama())


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "the state dict has no tensor of torchao in it": lambda: {"a": torch.ones(3)},
    "the state dict: a is of type int, expected a tensor": lambda: {"a": 3},
}


@pytest.mark.parametrize("phrase", STATES)
def test_state_dicts_of_others_are_refused(phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        qfx.load(STATES[phrase](), meta(Net))
