"""The decode benchmark runs each way on the graph of generate, and says why one is missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import decode, first_token
from benchmarks.decode import EAGER, Measured, measure, nearness
from benchmarks.decode_models import drawn
from benchmarks.decode_peers import PEERS
from benchmarks.decode_ways import WAYS, Case, Static, load, own
from benchmarks.fresh import FailedError, call
from benchmarks.peer import UnsupportedError, missing
from tests.lib.pairs import LONG

BATCH, CONTEXT, NEW, VOCABULARY = 2, 12, 5, 128
# Of the logits, relative: 4 bits are only asked to be nearer than zeros are.
ALLOWED = {"float32": 1e-4, "w5a8": 0.5, "w4a8": 1, "4 bits": 1, "Q4_0": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
# The window has fewer tokens than the prompt; of six layers the last sees all.
WINDOW = {"num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 8}
KINDS: dict[str, dict[str, Any]] = {"qwen3": {}, "gemma3_text": WINDOW}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, sizes in KINDS.items():
        drawn(kind, **{**SIZES, **HEADS, **sizes}).save_pretrained(folders[kind])
    return {k: Case(folder, BATCH, CONTEXT, NEW, inner="eager") for k, folder in folders.items()}


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    seed = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (BATCH, CONTEXT + NEW), generator=seed)


def _logits(decoder: Any, tokens: Tensor) -> Tensor:
    """Of a step behind each of the last tokens."""
    decoder.prefill(own(tokens[:, :CONTEXT]))
    found = []
    for token in tokens[:, CONTEXT:].split(1, 1):
        decoder.prepare()
        found.append(decoder.step(own(token)).float().clone())
    return torch.stack(found)


# One way of each kind; the long profile runs all.
SOME = ("bfloat16 eager", "qfx generate w8a8 cache 4 bits", "qfx generate w4a8 bfloat16",
        "qfx w4a8", "qfx quantize_ by Inductor")  # fmt: skip
CHOSEN = [("qwen3", name) for name in (*(WAYS if LONG else SOME), *PEERS)]
CHOSEN += [("gemma3_text", name) for name in (EAGER, "qfx generate w8a8")]


@pytest.mark.parametrize("kind, name", CHOSEN)
def test_the_logits_of_each_way_are_near_float(
    kind: str, name: str, cases: dict[str, Case], tokens: Tensor
) -> None:
    """In two rounds, against the float model without a cache."""
    case, way = cases[kind], {**WAYS, **PEERS}[name]
    if lacking := missing(way.packages):
        pytest.skip(lacking)
    with torch.no_grad():
        expected = load(case)(tokens).logits[:, CONTEXT:].transpose(0, 1)
        try:
            decoder = way.make(case, load(case))
        except UnsupportedError as why:
            pytest.skip(str(why))
        found = [_logits(decoder, tokens) for _ in range(2)]
    error = float((found[0] - expected).norm() / expected.norm())
    allowed = next((most for word, most in ALLOWED.items() if word in name), 0.1)
    assert error < allowed, (name, error)
    assert error > 1e-4 or "float32" in name  # else it would be float32 under another name
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["float32 Inductor", "qfx w8a8", "qfx quantize_"])
def test_generate_runs_the_graphs_of_the_step(
    name: str, cases: dict[str, Case], tokens: Tensor
) -> None:
    """One of the prefill and one of the step, for any number of tokens, with the same answers."""
    counters.clear()
    case = cases["qwen3"]
    with torch.no_grad():
        decoder = WAYS[name].make(case, load(case))
        assert isinstance(decoder, Static)
        told = own(tokens[:, :CONTEXT])
        text = [decoder.prefill(told).argmax(-1, keepdim=True)]
        for _ in range(NEW):
            decoder.prepare()
            text.append(decoder.step(text[-1]).argmax(-1, keepdim=True))
        graphs = counters["stats"]["unique_graphs"]
        assert torch.equal(decoder.generate(told, NEW + 1), torch.cat([told, *text], 1))
    assert counters["stats"]["unique_graphs"] == graphs == (0 if "quantize_" in name else 2)
    assert not counters["graph_break"]


def test_bytes_of_weights_are_those_that_a_step_reads(
    cases: dict[str, Case], tokens: Tensor
) -> None:
    """Each linear once, the tied head too: 4, 2 or 1 bytes a weight, and in int8 its scales."""
    case = cases["qwen3"]
    count = sum(p.numel() for p in load(case).parameters() if p.ndim == 2)
    found = {}
    for name in (EAGER, "bfloat16 eager", "qfx quantize_", "qfx generate w8a8", "qfx w8a8"):
        with torch.no_grad():
            found[name] = WAYS[name].make(case, load(case)).weights / count
    eager, bf16, *int8 = found.values()
    assert (eager, bf16) == (4, 2)
    assert all(1 < each < 1.3 for each in int8), found
    assert found["qfx quantize_"] == found["qfx generate w8a8"]


def test_a_way_is_a_row_and_what_is_missing_says_why(
    cases: dict[str, Case], tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "READ_MB", 1)
    monkeypatch.setattr(decode, "Worker", _Here)
    names = ["qfx quantize_", "no such way"]
    eager, ours, absent = measure(names, cases["qwen3"], tokens, threads=1, rounds=2)
    assert "KeyError" in absent["reason"] and absent["way"] == "no such way"
    assert 0 < ours["weights_mb"] <= eager["weights_mb"] and eager["generate_tokens_s"] > 0
    assert 15 < ours["logits_sqnr_db"] < 60 and ours["kl"] > 0 and "kl" not in eager


class _Here(decode.Worker):
    """A worker in this process."""

    def __init__(self, name: str, case: Case, tokens: Tensor, threads: int) -> None:
        self.name, self.reason, self.rounds = name, "", list[dict[str, Any]]()
        self.process = ThreadPoolExecutor()
        try:
            with torch.no_grad():
                self.way = Measured(name, case, tokens)
        except KeyError as why:
            self.reason = f"KeyError: {why}"

    def ask(self, request: str) -> Any:
        with torch.no_grad():
            return {} if self.reason or not request else getattr(self.way, request)()


def test_a_worker_answers_until_its_process_ends(cases: dict[str, Case], tokens: Tensor) -> None:
    worker = decode.Worker(EAGER, cases["qwen3"], tokens, 1)
    assert worker.ask("totals")["peak_mb"] > 100 and not worker.reason
    (process,) = worker.process._processes.values()
    process.kill()
    assert worker.ask("totals") == {} and "BrokenProcessPool: A process" in worker.reason


def test_logits_are_compared_as_torch_does() -> None:
    expected, found = torch.randn(2, 3, 5, 9, generator=torch.Generator().manual_seed(0))
    row = nearness(expected, found)
    kl = F.kl_div(found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="sum")
    assert row["kl"] == pytest.approx(float(kl) / 15, rel=1e-2)
    same = (expected.argmax(-1) == found.argmax(-1)).float().mean()
    assert row["likeliest"] == pytest.approx(float(same), abs=1e-4)


def test_a_first_token_is_timed_in_a_process(cases: dict[str, Case], tokens: Tensor) -> None:
    found = call(first_token.one, EAGER, str(cases["qwen3"].folder), tokens[:1].tolist())
    assert 0 < found["made_s"] < found["first_s"] <= found["all_s"] and found["graphs"] == 0


@pytest.mark.parametrize("name, graphs", [("float32 Inductor by generate", 1), ("qfx w8a8", 2)])
def test_a_way_compiles_the_prefill_or_not(
    name: str, graphs: int, cases: dict[str, Case], tokens: Tensor
) -> None:
    torch._dynamo.reset()
    counters.clear()
    case, told = Case(cases["qwen3"].folder, 1, CONTEXT, NEW, "eager"), tokens[:1, :CONTEXT]
    with torch.no_grad():
        assert first_token.first(first_token.WAYS[name], case, told)["graphs"] == graphs


def test_the_second_process_of_a_round_has_the_folders_of_the_first(
    tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are medians of rounds; a way that does not run is one row with the reason."""
    seconds = iter([9.0, 1.0, 7.0, 2.0, 8.0, 3.0])

    def process(_: Any, name: str, *__: Any, environment: dict[str, str]) -> dict[str, float]:
        if name == "broken":
            raise FailedError("It broke.")
        left = [Path(environment[name]) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")]
        second = next(seconds)
        assert [path.exists() for path in left] == [second < 5] * 2
        for path in left:
            path.mkdir(exist_ok=True)
        return {"first_s": second}

    monkeypatch.setattr(first_token, "call", process)
    found = first_token.rows("way", Path("folder"), tokens, 3)
    assert found == [
        {"way": "way", "cache": "empty", "first_s": 8.0},
        {"way": "way", "cache": "filled", "first_s": 2.0},
    ]
    broken = first_token.rows("broken", Path("folder"), tokens, 3)
    assert broken == [{"way": "broken", "cache": "empty", "reason": "It broke."}]
