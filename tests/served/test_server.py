"""vLLM serves a trained model, SmolLM2 in bfloat16 with int8 weights, to the client of OpenAI."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from benchmarks.smollm import converted
from tests.served.server import LENGTH, NAME, Server, started

PROMPT = "The capital of France is"
PROMPTS = [
    PROMPT,
    "Water boils at",
    "Once upon a time",
    "The largest planet",
    "A cat is",
    "Every morning I",
    "The opposite of hot is",
    "Two plus two is",
]
END_S = 60  # ends a wait for a request that nobody ends


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(converted(), tmp_path_factory.mktemp("server") / "log.txt") as running:
        yield running


@pytest.fixture(scope="module")
def plain(server: Server) -> str:
    """The answer to PROMPT."""
    return server.ask(PROMPT).choices[0].text


def test_a_completion(server: Server, plain: str) -> None:
    again = server.ask(PROMPT)
    assert plain.startswith(" Paris") and again.choices[0].text == plain
    assert again.choices[0].finish_reason == "length" and again.usage.completion_tokens == 16


def test_a_chat(server: Server) -> None:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    told = server.client.chat.completions.create(model=NAME, messages=asked, temperature=0)
    assert "Paris" in told.choices[0].message.content and told.choices[0].finish_reason == "stop"


def test_pieces_of_a_stream_are_the_plain_answer(server: Server, plain: str) -> None:
    pieces = [piece.choices[0].text for piece in server.ask(PROMPT, stream=True)]
    assert "".join(pieces) == plain and len(pieces) > 8


def test_log_probabilities(server: Server, plain: str) -> None:
    """Each token is the most probable one, and probabilities have a sum of 1 at most."""
    found = server.ask(PROMPT, logprobs=3).choices[0].logprobs
    assert "".join(found.tokens) == plain
    for token, own, best in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert best[token] == own == max(best.values())
        assert 0 < sum(map(math.exp, best.values())) < 1 + 1e-5


def test_stop_words(server: Server, plain: str) -> None:
    word = plain.split()[3]
    stopped = server.ask(PROMPT, stop=[word, "nowhere"]).choices[0]
    assert stopped.text == plain[: plain.index(word)] and stopped.finish_reason == "stop"


def test_eight_requests_at_a_time(server: Server) -> None:
    """They share steps of the model. Each answer is that to its prompt alone, up to a token that
    was hardly more probable than the other: logits of 16 to 32 are multiples of 1/8 in bfloat16,
    and the attention of a batch may round each by one of them."""

    def answer(prompt: str) -> Any:
        return server.ask(prompt, max_tokens=24, logprobs=2).choices[0].logprobs

    start = server.metric("iteration_tokens_total_count")
    alone = [*map(answer, PROMPTS)]
    middle = server.metric("iteration_tokens_total_count")
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = [*threads.map(answer, PROMPTS)]
    end = server.metric("iteration_tokens_total_count")
    assert end - middle < (middle - start) / 2
    for one, other in zip(alone, together, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            best = one.top_logprobs[at]
            assert best[one.tokens[at]] - best[other.tokens[at]] <= 2 / 8


def test_a_client_that_leaves_ends_its_request(server: Server, plain: str) -> None:
    before, wanted = server.metric("generation_tokens_total"), LENGTH - 32
    stream = server.ask(PROMPT, stream=True, max_tokens=wanted, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(stream)
    assert server.metric("num_requests_running") == 1
    stream.close()
    until = time.monotonic() + END_S
    while server.metric("num_requests_running"):
        assert time.monotonic() < until, "the request still runs"
        time.sleep(0.1)
    assert server.metric("generation_tokens_total") - before < wanted
    assert server.ask(PROMPT).choices[0].text == plain


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": 100 * LENGTH}, openai.BadRequestError),
        ({"prompt": "word " * LENGTH}, openai.BadRequestError),
        ({"model": "unknown"}, openai.NotFoundError),
    ],
    ids=["tokens", "prompt", "model"],
)
def test_a_bad_request_is_refused(
    server: Server, plain: str, options: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error):
        server.ask(**{"prompt": PROMPT, **options})
    assert server.ask(PROMPT).choices[0].text == plain
