"""vLLM computes with int8 weights what transformers computes with them: same codes, same numbers
but for the order of float sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.served import models
from tests.served.models import answers, engine, in_transformers, in_vllm

PROMPTS = 4
WAYS: dict[str, dict[str, Any]] = {
    "w8a8": {},
    "w4a8": {"scheme": "w4a8"},
    "skip": {"skip": ["lm_head", "q_proj", "k_proj", "v_proj"]},
}


@pytest.fixture(scope="module")
def wanted(llama: Path) -> dict[str, Tensor]:
    """The log probabilities in transformers, float and quantized in each way."""
    ways = {"float": None, **WAYS}
    return {name: in_transformers(llama, options, PROMPTS) for name, options in ways.items()}


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_transformers(
    llama: Path, wanted: dict[str, Tensor], way: str
) -> None:
    """Sums in another order change a float by some 2^-24, which now and then moves an activation
    to the next code, one of thousands. All of them are rounded differently, or not at all, in
    every other way: that changes far more than ten times as much."""
    with engine(llama, WAYS[way]) as llm:
        found = in_vllm(llm, PROMPTS)
    away = {name: (found - other).square().mean().sqrt() for name, other in wanted.items()}
    own = away.pop(way)
    assert own < min(away.values()) / 10, (own, away)


@pytest.mark.filterwarnings("ignore:qfx.quantize_:UserWarning")  # experts that stay float
@pytest.mark.parametrize("kind", ["OLMOE", "GPT_OSS"])
def test_a_mixture_of_experts_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Experts may be int8 on one side and float on the other, and a router then chooses another
    expert now and then. Still 8 bits change the probabilities far less than weights of 4 do. Those
    of GPT-OSS, which vLLM loads in another way, stay float."""
    folder = models.written(getattr(models, kind), tmp_path)
    exact, wanted, coarse = (
        in_transformers(folder, options, PROMPTS) for options in (None, {}, {"scheme": "w4a8"})
    )
    with engine(folder) as llm:
        found = in_vllm(llm, PROMPTS)
        texts = [answer.outputs[0].text.split() for answer in answers(llm, PROMPTS, 4)]
    assert _divergence(wanted, found) < _divergence(exact, coarse) / 5
    assert [len(words) for words in texts] == [4] * PROMPTS


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Returns the mean Kullback-Leibler divergence of log probabilities [..., V]."""
    return (p.exp() * (p - q)).sum(-1).mean()
