"""Models that see images: their texts, and the steps behind an image, run by programs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import qfx
from qfx.hf import KVCache
from tests.lib.decoders import by_modules, decoder
from tests.lib.pairs import usual

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGE, NEW = 99, 8
PROMPT = torch.tensor([[5, 17, 33, 60, 2, 81, 44, 9, 23]])
Inputs = dict[str, Any]


def _with_image(tokens: int, image: Tensor, **others: Any) -> Inputs:
    """The prompt with so many tokens of an image in it."""
    text = torch.cat([PROMPT[:, :3], torch.full((1, tokens), IMAGE), PROMPT[:, 3:]], 1)
    return {"input_ids": text, "attention_mask": torch.ones_like(text), **image_of(image), **others}


def image_of(image: Tensor) -> Inputs:
    return {"pixel_values": image}


def _llava() -> tuple[Any, Inputs]:
    sight = transformers.CLIPVisionConfig(**SIGHT, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=sight,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    return model, _with_image(4, torch.randn(1, 3, 28, 28))


def _smolvlm() -> tuple[Any, Inputs]:
    config = transformers.SmolVLMConfig(
        vision_config=SIGHT,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    model = transformers.SmolVLMForConditionalGeneration(config)
    return model, _with_image(1, torch.randn(1, 1, 3, 28, 28))


def _gemma3() -> tuple[Any, Inputs]:
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        vision_config=SIGHT,
        text_config=TEXT | {"head_dim": 16} | kinds,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=97,
        eoi_token_index=96,
    )
    inputs = _with_image(4, torch.randn(1, 3, 28, 28))
    seen = (inputs["input_ids"] == IMAGE).int()
    return transformers.Gemma3ForConditionalGeneration(config), inputs | {"token_type_ids": seen}


def _qwen2_vl() -> tuple[Any, Inputs]:
    rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    sight = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        vision_config=sight | {"patch_size": 14},
        text_config=TEXT | {"rope_parameters": rotary},
        image_token_id=IMAGE,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )
    inputs = _with_image(4, torch.randn(16, 3 * 2 * 14 * 14))
    seen = (inputs["input_ids"] == IMAGE).int()
    more = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": seen}
    return transformers.Qwen2VLForConditionalGeneration(config), inputs | more


MODELS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "llava": _llava,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "qwen2-vl": _qwen2_vl,
}


@pytest.fixture(scope="module", params=usual(["smolvlm", "gemma3"], MODELS))
def made(request: pytest.FixtureRequest) -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    return qfx.compile_for_generate(model.eval(), max_length=64), inputs


def said(model: Any, inputs: Inputs, **others: Any) -> Tensor:
    text: Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **others)
    return text


def test_a_text_is_read_and_continued_by_programs(
    made: tuple[Any, Inputs], ran: list[tuple[int, ...]]
) -> None:
    model, _ = made
    text = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    before = dict(model.forward.runners)
    ran.clear()
    found = said(model, text)
    assert len(ran) == NEW - 1
    assert {key[:2] for key in model.forward.runners.keys() - before.keys()} <= {(1, 16)}
    with by_modules(model):
        assert torch.equal(said(model, text, past_key_values=KVCache(model.config)), found)


def test_steps_behind_an_image_run_by_programs(
    made: tuple[Any, Inputs], ran: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = made
    model.forward.named.clear()
    ran.clear()
    with caplog.at_level(logging.WARNING, "qfx.generate.steps"):
        found = said(model, inputs)
        assert torch.equal(said(model, inputs), found)
    assert len(ran) == 2 * (NEW - 1)
    warned = [r.message for r in caplog.records if "programs do not take" in r.message]
    assert len(warned) == 1 and "mm_encoder_outputs" in warned[0]
    with by_modules(model):
        assert torch.equal(said(model, inputs, past_key_values=KVCache(model.config)), found)


def test_positions_that_images_have_moved_are_the_models(ran: list[tuple[int, ...]]) -> None:
    """By hand, without position_ids: Qwen2-VL keeps by itself how far they are moved."""
    torch.manual_seed(0)
    model, inputs = _qwen2_vl()
    reference = qfx.quantize_(copy.deepcopy(model.eval()))
    qfx.compile_for_generate(model, max_length=64)
    ran.clear()
    found = []
    for each, cache in ((model, DynamicCache()), (reference, KVCache(reference.config))):
        with torch.no_grad():
            each(**inputs, past_key_values=cache, use_cache=True)
            found.append(each(PROMPT[:, :1], past_key_values=cache, use_cache=True).logits)
    assert ran == [] and (found[0] - found[1]).norm() < 0.02 * found[1].norm()


def test_kinds_of_tokens_that_a_model_adds_are_not_left_out() -> None:
    """GPT-2 adds the embedding of the number 0 to each token of the kind 0."""
    model = decoder("gpt2")
    reference = qfx.quantize_(copy.deepcopy(model))
    qfx.compile_for_generate(model, max_length=64)
    found = []
    for each, cache in ((model, DynamicCache()), (reference, KVCache(reference.config))):
        kinds = {"token_type_ids": torch.zeros_like(PROMPT)}
        with torch.no_grad():
            found.append(each(PROMPT, past_key_values=cache, use_cache=True, **kinds).logits)
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()
