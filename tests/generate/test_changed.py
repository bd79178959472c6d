"""What happens to a compiled model later: programs are of what it is now."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import qfx
from qfx.hf import KVCache
from tests.lib.decoders import by_modules, decoder, ids

Ran = list[tuple[int, ...]]
LENGTH = 32


def compiled() -> Any:
    return qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=LENGTH)


def said(model: Any, **how: Any) -> Tensor:
    text: Tensor = model.generate(input_ids=ids(1, 9), max_new_tokens=10, do_sample=False, **how)
    return text


def current(model: Any, ran: Ran, base: Any = None) -> Tensor:
    """What programs say, which is what the modules say now."""
    ran.clear()
    text = said(model)
    assert sum(count == 1 for _, count in ran) == 9  # behind the prompt
    with by_modules(base or model):
        assert torch.equal(text, said(model, past_key_values=KVCache(model.config)))
    return text


def noisy(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in (model.model.norm.weight, model.model.embed_tokens.weight):
            weight.add_(torch.randn_like(weight))


def test_weights_that_change(ran: Ran) -> None:
    model = compiled()
    before, text = copy.deepcopy(model.state_dict()), current(model, ran)
    noisy(model)
    assert not torch.equal(current(model, ran), text)
    model.load_state_dict(before)
    assert torch.equal(current(model, ran), text)
    up = model.model.layers[0].mlp.up_proj
    up.weight.data.neg_()
    assert not torch.equal(current(model, ran), text)


def test_weights_that_change_in_a_conversation(ran: Ran) -> None:
    """Seen before a next prompt, if it is of more than one token."""
    model = compiled()
    first = model.generate(
        ids(1, 9), max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    noisy(model)
    tokens = torch.cat([first.sequences, ids(1, 2)], 1)
    ran.clear()
    caches = [first.past_key_values, copy.deepcopy(first.past_key_values)]
    text = model.generate(tokens, past_key_values=caches[0], max_new_tokens=6, do_sample=False)
    assert len(ran) == 6
    with by_modules(model):
        assert torch.equal(
            text,
            model.generate(tokens, past_key_values=caches[1], max_new_tokens=6, do_sample=False),
        )


LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "up_proj"]}


def test_adapters_on_a_compiled_model(ran: Ran) -> None:
    """Attached, off and on again, merged, taken out."""
    model = compiled()
    plain = current(model, ran)
    torch.manual_seed(1)
    adapted: Any = get_peft_model(model, LoraConfig(**LORA)).eval()
    text = current(adapted, ran, model)
    assert not torch.equal(text, plain)
    with adapted.disable_adapter():
        assert torch.equal(current(adapted, ran, model), plain)
    assert torch.equal(current(adapted, ran, model), text)
    adapted.merge_adapter()
    current(adapted, ran, model)
    adapted.unmerge_adapter()
    assert torch.equal(current(adapted, ran, model), text)
    current(adapted.merge_and_unload(), ran, model)


def test_a_model_with_adapters_is_compiled(ran: Ran) -> None:
    torch.manual_seed(1)
    model: Any = get_peft_model(decoder("llama", num_hidden_layers=1), LoraConfig(**LORA)).eval()
    assert qfx.compile_for_generate(model, max_length=LENGTH) is model
    current(model, ran, model.get_base_model())


def test_hooks_are_called(ran: Ran, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a module by the modules; those of the model around programs."""
    model, calls = compiled(), []
    text = said(model)
    hook = model.model.layers[0].register_forward_hook(lambda *call: calls.append(call))
    ran.clear()
    assert torch.equal(said(model), text) and len(calls) == 10 and ran == []
    assert "model.layers.0 has hooks" in caplog.text
    hook.remove()
    calls.clear()
    model.register_forward_hook(lambda *call: calls.append(call))
    assert torch.equal(current(model, ran), text)
    assert len(calls) == 20  # by programs, and then by modules


def as_copy(model: Any, folder: Path) -> Any:
    return copy.deepcopy(model)


def as_pickle(model: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(model))


def from_pretrained(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.generation_config = model.generation_config
    return qfx.compile_for_generate(again, max_length=LENGTH)


def from_folder(model: Any, folder: Path) -> Any:
    qfx.save(model, folder / "saved")
    return qfx.compile_for_generate(
        qfx.load(folder / "saved", decoder("llama", num_hidden_layers=1)), max_length=LENGTH
    )


@pytest.mark.parametrize("again", [as_copy, as_pickle, from_pretrained, from_folder])
def test_another_one_of_it(again: Callable[[Any, Path], Any], ran: Ran, tmp_path: Path) -> None:
    """Says the same, by programs of its own."""
    model = compiled()
    text, other = said(model), again(model, tmp_path)
    assert torch.equal(current(other, ran), text)
    noisy(other)
    assert not torch.equal(current(other, ran), text)
    assert torch.equal(current(model, ran), text)


def test_it_goes_elsewhere_and_comes_back(ran: Ran, caplog: pytest.LogCaptureFixture) -> None:
    model = compiled()
    for change, back, why in (
        (model.train, model.eval, ""),
        (
            lambda: model.set_attn_implementation("eager"),
            lambda: model.set_attn_implementation("sdpa"),
            "its attention is 'eager'",
        ),
    ):
        change()
        ran.clear()
        said(model)
        assert ran == [] and why in caplog.text
        back()
        current(model, ran)


def test_compiled_twice(ran: Ran) -> None:
    model = compiled()
    text = said(model)
    qfx.compile_for_generate(model, max_length=2 * LENGTH, key_bits=4, value_bits=4)
    ran.clear()
    assert said(model, num_beams=1).shape == text.shape and len(ran) == 9
    qfx.compile_for_generate(model, max_length=LENGTH)
    assert torch.equal(current(model, ran), text)


def test_under_torch_compile(ran: Ran) -> None:
    """generate belongs to the model inside; a call of the compiled model runs its modules."""
    model = compiled()
    outer: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        y, expected = (m(ids(1, 9), use_cache=False).logits for m in (outer, model))
    assert torch.allclose(y, expected)
    assert qfx.compile_for_generate(outer, max_length=LENGTH) is outer
    assert torch.equal(said(outer), current(model, ran))


def test_a_copy_continues_a_conversation() -> None:
    model = compiled()
    first = model.generate(
        ids(1, 9), max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    tokens = torch.cat([first.sequences, ids(1, 3)], 1)
    caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    texts = [
        each.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False)
        for each, cache in zip((model, copy.deepcopy(model)), caches, strict=True)
    ]
    assert torch.equal(*texts)


def _other_tensors(layers: list[Any]) -> None:
    for layer in layers:
        former = layer.tensors
        layer.keys, layer.key_scale, layer.values, layer.value_scale = (t.clone() for t in former)
        for tensor in former:
            tensor.fill_(1)


def _other_layers(layers: list[Any]) -> None:
    former = layers[:]
    layers[:] = copy.deepcopy(former)
    for layer in former:
        for tensor in layer.tensors:
            tensor.fill_(1)


@pytest.mark.parametrize("change", [_other_tensors, _other_layers])
def test_a_cache_whose_tensors_are_others(change: Callable[[list[Any]], None]) -> None:
    """What they were is overwritten, so that who still read it would say so."""
    model, caches = compiled(), [DynamicCache() for _ in range(2)]
    with torch.no_grad():
        for step in range(3):
            found = [
                model(input_ids=ids(1, 2, step), past_key_values=each, use_cache=True).logits
                for each in caches
            ]
            assert torch.equal(*found)
            change(caches[0].layers)
