"""Calls of the public functions that read files, generate text or compile, in addition to those of
`public_calls`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import qfx
from qfx.generate import load_programs, save_programs
from qfx.hf import KVCache, QfxConfig
from tests.files.test_import import FILES, HERE, Net, llama, meta, net_file
from tests.lib.decoders import decoder, ids
from tests.lib.gguf_files import Kind
from tests.lib.models import Block, compiled
from tests.lib.public_calls import Call, mlp, rows, trained

CALLS: dict[str, Callable[[Path], Call]] = {}
MASK = torch.ones(1, 12, dtype=torch.int64, device="cpu")


def call(make_call: Callable[[Path], Call]) -> Callable[[Path], Call]:
    CALLS[make_call.__name__] = make_call
    return make_call


@call
def save_and_load(folder: Path) -> Call:
    names = ("w8a8", "w4a8", "w4")
    models = [qfx.quantize_(mlp(), qfx.Config(scheme=name)) for name in names]
    skeletons, x = [meta(mlp) for _ in models], rows()

    def run() -> Any:
        found: list[Any] = []
        for model, skeleton in zip(models, skeletons, strict=True):
            qfx.save(model, folder / "model")
            loaded = qfx.load(folder / "model", skeleton)
            found += [loaded(x).detach(), loaded.state_dict()]
        return found

    return run


@call
def load_files_of_others(folder: Path) -> Call:
    """Loads files of GGUF, torchao and compressed-tensors."""
    skeletons: dict[Path, Any] = {}
    for kind in ("Q8_0", "Q4_1", "Q5_0"):
        net_file(folder / f"{kind}.gguf", Kind[kind])
        skeletons[folder / f"{kind}.gguf"] = meta(Net)
    for name in FILES:
        skeletons[HERE / name] = llama()

    def run() -> Any:
        found: list[Any] = []
        for path, skeleton in skeletons.items():
            found.append(qfx.load(path, skeleton).state_dict())
        return found

    return run


STATED = {"dtype": torch.float32, "device_map": {"": "cpu"}}


@call
def from_pretrained(folder: Path) -> Call:
    decoder("llama").save_pretrained(folder / "float")
    tokens, load = ids(1, 12), AutoModelForCausalLM.from_pretrained

    def run() -> Any:
        found: list[Any] = []
        for config in (QfxConfig(), QfxConfig("w4a8"), QfxConfig(smoothing=True)):
            model = load(folder / "float", quantization_config=config, **STATED)
            model.save_pretrained(folder / "int8")
            again = load(folder / "int8", **STATED)
            with torch.no_grad():
                found += [each(tokens, use_cache=False).logits for each in (model, again)]
        return found

    return run


@call
def save_pretrained(folder: Path) -> Call:
    decoder("llama").save_pretrained(folder / "float")
    load, how = AutoModelForCausalLM.from_pretrained, {"quantization_config": QfxConfig()}
    model = load(folder / "float", **how, **STATED)

    def run() -> Any:
        model.save_pretrained(folder / "int8")
        saved = load_file(folder / "int8" / "model.safetensors")  # its metadata names the save
        return [saved[name] for name in sorted(saved)]

    return run


@call
def adapters(folder: Path) -> Call:
    base = qfx.quantize_(decoder("llama"), qfx.Config(skip=["lm_head"]))
    torch.manual_seed(1)
    given = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, tokens = get_peft_model(base, given), ids(1, 12)

    def run() -> Any:
        model.merge_adapter()
        merged = copy.deepcopy(model.state_dict())
        model.unmerge_adapter()
        with torch.no_grad():
            return merged, model.state_dict(), model(tokens).logits

    return run


@call
def caches(folder: Path) -> Call:
    model, tokens = decoder("llama"), ids(2, 20)
    one, chosen = ids(2, 1), torch.tensor([3, 0, 1, 2])

    def run() -> Any:
        found: list[Any] = []
        for length, bits in ((None, 8), (None, 4), (48, 8)):
            cache = KVCache(model.config, length, key_bits=bits, value_bits=bits)
            with torch.no_grad():
                for part in (tokens, one):
                    y = model(input_ids=part, past_key_values=cache, use_cache=True)
                    found.append(y.logits)
            if length is None:
                cache.batch_repeat_interleave(2)
                cache.reorder_cache(chosen)
            found.append([layer.tensors for layer in cache.layers])
        return found

    return run


@call
def compile_for_generate(folder: Path) -> Call:
    """Generates after a prompt that is read in several steps, by programs and by the decoder of
    their file."""
    model, tokens = decoder("llama"), ids(1, 12)

    def run() -> Any:
        fast = qfx.compile_for_generate(model, "w4a8", max_length=16)
        how = {"max_new_tokens": 3, "do_sample": False, "attention_mask": MASK}
        assert fast.forward.why_none is None and fast.forward.runners
        save_programs(fast, folder / "programs.safetensors")
        said = load_programs(folder / "programs.safetensors").generate(tokens, 3)
        return fast.generate(tokens, **how), said

    return run


def _compiled(options: dict[str, Any], make_model: Callable[[], nn.Module] = mlp) -> Any:
    def make_call(folder: Path) -> Call:
        model, x = make_model().eval(), rows(0, 12, 32 if make_model is Block else 64)

        def run() -> Any:
            with torch.no_grad():
                return compiled(model, **options)(x)

        return run

    return make_call


OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {}, "aot_eager": {"inner": "aot_eager"}, "inductor": {"inner": "inductor"},
    "w4": {"scheme": "w4"}, "w4a8": {"scheme": "w4a8"}, "guard": {"guard": 0.05},
}  # fmt: skip
CALLS |= {f"torch.compile, {name}": _compiled(options) for name, options in OPTIONS.items()}
CALLS["torch.compile, attention"] = _compiled({}, Block)


@call
def train_compiled(folder: Path) -> Call:
    models, x = [mlp().train() for _ in range(2)], rows()

    def run() -> Any:
        found: list[Any] = []
        for model, backward in zip(models, ("float", "int8"), strict=True):
            fast = compiled(model, inner="aot_eager", backward=backward, scheme="w8a8")
            found += trained(fast, x)
        return found

    return run
