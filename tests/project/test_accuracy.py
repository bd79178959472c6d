"""A trained language model stays near float. The whole of it: `python -m benchmarks accuracy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.accuracy import figures
from benchmarks.judged import Judged, language
from examples.minilm import cache_folder
from tests.conftest import on_threads
from tests.lib.pairs import LONG

USERS_CACHE = cache_folder().parent.parent  # asked before the tests get a cache of their own
TEXTS, TOKENS, PERPLEXITY = 6, 96, 42.86  # the float model's, over 548 predicted tokens
# The greatest mean divergence from float in nats, every linear in int8. For 7 bits it is what plain
# 8 bits have (docs/decisions/0010).
ROTATED: dict[str, tuple[dict[str, Any], float]] = {
    "w8a8": ({"scheme": "w8a8"}, 0.008),
    "w7a7": ({"scheme": "w7a7"}, 0.047),
}


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    """From the user's cache, which is filled at the first use."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch, on_threads(1):
        patch.setenv("XDG_CACHE_HOME", str(USERS_CACHE))
        try:
            found = language(TEXTS, TOKENS, sections=())
        except RuntimeError as why:  # neither cached nor to be had: a sentence that says so
            pytest.skip(f"no SmolLM2: {why}")
        yield found


def test_float_has_the_known_perplexity(judged: Judged) -> None:
    """So the model, its conversion, the texts and their tokens are the ones that were judged."""
    found = judged.judge(judged.expected)
    assert found["perplexity"] == pytest.approx(PERPLEXITY, abs=0.01)
    assert abs(found["KL"]) < 1e-6 and found["top-1 %"] == 100


@pytest.mark.parametrize("setting", list(ROTATED)[: None if LONG else 1])
def test_int8_is_near_float(judged: Judged, setting: str) -> None:
    options, divergence = ROTATED[setting]
    found = figures(judged, options)
    assert 0 < found["KL"] < divergence, found
    assert "211 " in found["schemes"], found
