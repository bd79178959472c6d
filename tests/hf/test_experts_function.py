"""experts_implementation="qfx": the experts of transformers' models in graphs without breaks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers

import qfx
import qfx.hf
from qfx.hf import experts_function
from tests.conftest import same_bits
from tests.lib.experts_blocks import IDS, block_of, model_of, routed


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss"])
def test_a_loaded_model_computes_as_with_the_loop(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="qfx"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, model(IDS).logits, atol=1e-5)


def test_a_compiled_block_is_int8_without_a_break() -> None:
    block, given = block_of("mixtral"), routed()
    block.config._experts_implementation = "qfx"
    compiled = torch.compile(block, backend="qfx", options={"minimum_gain": 0}, fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(*given), qfx.nn.Experts.from_float(block, "w8a8")(*given))


def test_it_says_once_that_eager_mode_is_float(caplog: pytest.LogCaptureFixture) -> None:
    experts_function._say_float.cache_clear()
    model = model_of("mixtral")
    model.set_experts_implementation("qfx")
    with caplog.at_level(logging.INFO, "qfx"), torch.no_grad():
        model(IDS)
        model(IDS)
    (said,) = [r.getMessage() for r in caplog.records if "experts_function" in r.name]
    assert said.startswith("MixtralExperts computes in float in eager mode")
