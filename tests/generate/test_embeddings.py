"""Decoders whose embeddings are int8: a step is one program, and looks rows up as codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import qfx
from qfx.generate import load_programs, save_programs
from qfx.generate.step_modules import named_tensors
from qfx.hf import KVCache
from qfx.nn import Embedding
from tests.generate.test_decoders import STEPS, logits, prompt
from tests.lib.coded_attention import reading_codes
from tests.lib.decoders import decoder, ids
from tests.lib.pairs import usual

CONFIG = qfx.Config(embeddings="int8")
# Gemma's rows are scaled; GPT-2 and OPT look positions up too.
_FEW = [("gemma3", torch.float32), ("gpt2", torch.bfloat16), ("opt", torch.float16)]
ROWS = usual(_FEW, [*_FEW, ("llama", torch.bfloat16), ("xglm", torch.float32)])
BY_ROW = pytest.mark.parametrize(("name", "dtype"), ROWS, ids=str)


def int8(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = qfx.quantize_(decoder(name).to(dtype), CONFIG)
    assert isinstance(model.get_input_embeddings(), Embedding)
    return model


@BY_ROW
def test_a_step_is_one_program(name: str, dtype: torch.dtype, ran: list[tuple[int, ...]]) -> None:
    """Its logits are those of modules that hold the same codes, in float32, rounded to the type.
    Where the rounding of an activation tips, a token differs by a step of 127: not the median."""
    model = int8(name, dtype)
    wide = copy.deepcopy(model).float()
    qfx.compile_for_generate(model, max_length=64)
    cache, same = transformers.DynamicCache(config=model.config), KVCache(wide.config)
    first = prompt(model, cache)
    ran.clear()
    befores: list[Any] = []
    steps = logits(model, cache, befores).float()
    with reading_codes():
        expected_first, expected = prompt(wide, same), logits(wide, befores)
    assert [count for _, count in ran] == [*STEPS]
    assert all(len(runner.parts) == 1 for runner in model.forward.runners.values())
    assert first.dtype == dtype
    assert (first.float() - expected_first).norm() <= expected_first.norm() / 127
    error = (steps - expected).abs().amax(1) / expected.abs().amax(1)
    bound = max(torch.finfo(dtype).eps, 128 * torch.finfo(torch.float32).eps)
    assert error.max() <= 2 / 127 and error.median() <= bound


@BY_ROW
def test_the_text_is_that_of_the_modules(name: str, dtype: torch.dtype) -> None:
    model = int8(name, dtype)
    wide = copy.deepcopy(model).float()
    qfx.compile_for_generate(model, max_length=64)
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    text = model.generate(ids(2, 9), **how)
    with reading_codes():
        expected = wide.generate(ids(2, 9), past_key_values=KVCache(wide.config), **how)
    assert torch.equal(text, expected)


def test_a_program_holds_no_floats_of_the_table() -> None:
    """Rows are looked up as codes; a step's own memory is smaller than the table."""
    vocabulary = 4096
    model = qfx.quantize_(decoder("llama", vocab_size=vocabulary), CONFIG)
    qfx.compile_for_generate(model, max_length=64)
    embedding = model.get_input_embeddings()
    ((run,),) = (model.forward.runners[1, 1, (), torch.float32].parts,)
    held = {storage.data_ptr() for storage in run.storages}
    assert embedding.packed.untyped_storage().data_ptr() in held
    own = {t.untyped_storage().data_ptr() for _, t in named_tensors(model)}
    made = sum(s.nbytes() for s in run.storages if s.data_ptr() not in own)
    assert run.bytes[0] + made < 4 * vocabulary * 64 / 4


def test_new_codes_are_seen() -> None:
    model = qfx.compile_for_generate(int8("llama"), max_length=64)
    before = prompt(model, transformers.DynamicCache())
    embedding = model.get_input_embeddings()
    embedding.weight = embedding.weight.flip(0)
    after = prompt(model, transformers.DynamicCache())
    expected = prompt(int8("llama"), KVCache(model.config))
    assert not torch.allclose(after, before) and torch.allclose(before, expected, atol=1e-3)


def test_a_file_of_programs(tmp_path: Path) -> None:
    model = qfx.compile_for_generate(int8("gemma3", torch.bfloat16), max_length=64)
    save_programs(model, tmp_path / "programs.safetensors")
    text = model.generate(ids(1, 9), max_new_tokens=8, do_sample=False)
    found: Tensor = load_programs(tmp_path / "programs.safetensors").generate(ids(1, 9), 8)
    assert torch.equal(found, text[:, 9:])


def test_compile_for_generate_takes_the_config() -> None:
    model = qfx.compile_for_generate(decoder("llama"), config=CONFIG, max_length=64)
    assert isinstance(model.get_input_embeddings(), Embedding)
    assert all(len(runner.parts) == 1 for runner in model.forward.runners.values())
