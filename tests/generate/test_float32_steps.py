"""Programs of 16-bit models: they compute in float32 what a float32 model with the same values
does, in the memory of 16 bits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import qfx
from qfx.generate import load_programs, save_programs
from qfx.generate.step_modules import named_tensors
from qfx.hf import KVCache
from tests.generate.test_decoders import STEPS, logits, prompt
from tests.lib.coded_attention import reading_codes
from tests.lib.decoders import decoder, ids
from tests.lib.pairs import usual

BF16, F16 = torch.bfloat16, torch.float16
# Matmuls that stay float, with more outputs than a router has, multiply in the type of their
# weights, so these are as exact as that type.
HEAD = 640
ROWS = usual(
    [("llama", F16, True), ("gemma3", BF16, True), ("mixtral", BF16, True),
     ("llama", BF16, False)],
    [("llama", F16, True), ("gemma3", BF16, True), ("mixtral", BF16, True), ("opt", BF16, True),
     ("cohere", BF16, True), ("llama", BF16, False)],
)  # fmt: skip


def held_bytes(model: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {*model.parameters(), *model.buffers()})


@pytest.mark.parametrize(("name", "dtype", "whole"), ROWS, ids=str)
def test_a_step_is_that_of_the_same_values_in_float32(
    name: str, dtype: torch.dtype, whole: bool, ran: list[tuple[int, ...]]
) -> None:
    skip = () if whole else ("lm_head",)
    base = decoder(name, **({} if whole else {"vocab_size": HEAD}))
    model = qfx.quantize_(base.to(dtype), qfx.Config(skip=skip))
    wide, size = copy.deepcopy(model).float(), held_bytes(model)
    qfx.compile_for_generate(model, max_length=64)
    assert held_bytes(model) == size and model.get_input_embeddings().weight.dtype == dtype
    cache, same = transformers.DynamicCache(config=model.config), KVCache(wide.config)
    y = prompt(model, cache)
    ran.clear()
    z = logits(model, cache)
    assert [count for _, count in ran] == [*STEPS] and y.dtype == z.dtype == dtype
    with reading_codes():
        y_expected, expected = prompt(wide, same), logits(wide, same)
    eps = torch.finfo(dtype).eps  # logits are rounded to it
    # of a product in 16 bits each of K=128 terms may be off by eps; sums are of random signs
    bound = eps if whole else eps * 128**0.5
    for found, wanted in ((y, y_expected), (z, expected)):
        assert (found.float() - wanted).norm() <= bound * wanted.norm()


def test_the_text_is_that_of_the_modules_in_float32() -> None:
    model = qfx.quantize_(decoder("llama").to(BF16))
    wide = copy.deepcopy(model).float()
    qfx.compile_for_generate(model, max_length=64)
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    text = model.generate(ids(2, 9), **how)
    with reading_codes():
        expected = wide.generate(ids(2, 9), past_key_values=KVCache(wide.config), **how)
    assert torch.equal(text, expected)


def test_tables_and_vectors_are_no_work_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """No weight is converted at each step: all of it is one program, and what that holds of
    float32 is vectors."""
    with caplog.at_level(logging.INFO, "qfx.generate"):
        model = qfx.compile_for_generate(decoder("llama").to(BF16), max_length=64)
    assert "PyTorch runs" not in caplog.text
    ((run,),) = (model.forward.runners[1, 1, (), torch.float32].parts,)
    assert run.bytes[0] < model.get_input_embeddings().weight.numel()  # memory of its steps
    own = {t.untyped_storage().data_ptr() for _, t in named_tensors(model)}
    made = sum(s.nbytes() for s in run.storages if s.data_ptr() not in own)
    vectors = [t for t in (*model.parameters(), *model.buffers()) if t.ndim <= 1]
    assert made <= 4 * sum(t.numel() for t in vectors) + 4 * 64  # and numbers of the graph


def test_new_values_of_a_vector_are_seen() -> None:
    model = qfx.compile_for_generate(decoder("llama", num_hidden_layers=1).to(BF16), max_length=64)
    before = prompt(model, transformers.DynamicCache())
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    after = prompt(model, transformers.DynamicCache())
    assert torch.equal(after, before * 2)


def test_a_file_of_programs(tmp_path: Any) -> None:
    model = qfx.compile_for_generate(decoder("llama").to(BF16), max_length=64)
    path = tmp_path / "programs.safetensors"
    save_programs(model, path)
    text = model.generate(ids(1, 9), max_new_tokens=8, do_sample=False)
    found: Tensor = load_programs(path).generate(ids(1, 9), 8)
    assert torch.equal(found, text[:, 9:])


def test_logits_of_the_type_that_is_asked_for() -> None:
    base = qfx.quantize_(decoder("llama").to(BF16))
    rounded = qfx.compile_for_generate(copy.deepcopy(base), max_length=64)
    exact = qfx.compile_for_generate(base, max_length=64, logits_dtype=torch.float32)
    y, z = (prompt(model, transformers.DynamicCache()) for model in (rounded, exact))
    assert y.dtype == BF16 and z.dtype == torch.float32 and torch.equal(z.to(BF16), y)
    with pytest.raises(ValueError, match=r"logits_dtype=torch.int8: expected a float type"):
        qfx.compile_for_generate(base, logits_dtype=torch.int8)
