"""What a model writes is judged by float, its memory counted, and its first token timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import common, decode_batches, decode_long, decode_texts, first_token, results_page
from benchmarks.common import merge
from benchmarks.decode_long import conversations
from benchmarks.decode_models import drawn, qwen3
from benchmarks.decode_static import Case, Counted, load
from benchmarks.decode_texts import FLOAT, Kept, divergence, judge, measure
from benchmarks.decode_ways import WAYS
from benchmarks.fresh import FailedError, in_a_process

VOCABULARY, NEW = 64, 6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("qwen3")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    drawn(qwen3(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)
    return Case(folder, 3, 8, NEW, inner="eager")


@pytest.fixture(scope="module")
def told() -> Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))


def _noisy(model: Any) -> Any:
    with torch.no_grad():
        model.model.norm.weight.mul_(1 + torch.linspace(-0.5, 0.5, 64))
    return model


def test_texts_are_judged_by_float(case: Case, told: Tensor) -> None:
    """KL is that along float's text, as the model has it without a cache."""
    with torch.no_grad():
        rows = measure({FLOAT: Kept(), "other": Kept(_noisy)}, case, told)
        text = load(case).generate(told, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        logits, others = (
            m(text).logits[:, 7:-1].log_softmax(-1) for m in (load(case), _noisy(load(case)))
        )
    own, other = rows
    assert own == {"way": FLOAT, "texts": 3, "tokens": NEW, "same_tokens": 1, "first": NEW} | {
        "whole": 3,
        "kl": 0,
        "likeliest": 1,
    }
    expected = F.kl_div(others, logits, log_target=True, reduction="sum") / (3 * NEW)
    assert other["kl"] == pytest.approx(float(expected), rel=1e-2)
    likeliest = (others.argmax(-1) == logits.argmax(-1)).float().mean()
    assert other["likeliest"] == pytest.approx(float(likeliest), abs=1e-4)


@pytest.mark.parametrize(
    "texts, expected",
    [
        ([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]], (1, 4, 3)),
        ([[1, 2, 3, 4], [5, 6, 7, 0], [0, 1, 1, 1]], (10 / 12, 3, 1)),
        ([[0, 2, 3, 4], [0, 6, 7, 8], [1, 0, 0, 1]], (8 / 12, 0, 0)),
    ],
)
def test_where_texts_part(texts: list[list[int]], expected: tuple[float, float, int]) -> None:
    reference = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]])
    found = judge(torch.tensor(texts), reference)
    assert found["same_tokens"] == pytest.approx(expected[0], abs=1e-4)
    assert (found["first"], found["whole"]) == expected[1:]


def test_divergence_is_torchs() -> None:
    reference, logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    pair = logits.log_softmax(-1), reference.log_softmax(-1)
    expected = F.kl_div(*pair, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence(reference, logits), expected)


def test_a_streamer_counts_new_tokens(case: Case, told: Tensor) -> None:
    counts: list[int] = []
    one = Case(case.folder, 1, 8, NEW)
    with torch.no_grad():
        decoder: Any = WAYS["float32 eager"].make(one, load(one))
        decoder.generate(told[:1], NEW, streamer=Counted(counts.append))
    assert counts == list(range(1, NEW + 1))


@pytest.mark.parametrize("name, graphs", [("float32 eager", 0), ("float32 Inductor", 2)])
def test_memory_and_graphs_of_conversations(
    name: str, graphs: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo has no bucket for a prompt of another length: it compiles the prefill again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(decode_long, "SECOND", 5)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        found = conversations(WAYS[name], Case(case.folder, 1, 8, NEW, "eager"), tokens, (2, 5))
    assert set(found) == {"mb_2", "mb_5", "graphs", "graphs_second"}
    assert 10 < found["mb_2"] < 1e5
    assert (found["graphs"], found["graphs_second"]) == (graphs, graphs // 2)


def test_a_first_token_is_timed_in_a_process(case: Case, told: Tensor, tmp_path: Path) -> None:
    torch.save(told[:1], tmp_path / "tokens")
    given = ["--one", "float32 eager", str(case.folder), str(tmp_path / "tokens")]
    found = in_a_process("benchmarks.first_token", *given)
    assert 0 < found["first_s"] <= found["all_s"] and found["graphs"] == 0


def test_the_second_process_of_a_round_has_the_folders_of_the_first(
    told: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are medians of rounds; a way that does not run is one row with the reason."""
    seconds = iter([9.0, 1.0, 7.0, 2.0, 8.0, 3.0])

    def process(_: str, *given: str, environment: dict[str, str]) -> dict[str, float]:
        if given[1] == "broken":
            raise FailedError("It broke.")
        left = [Path(environment[name]) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")]
        second = next(seconds)
        assert [path.exists() for path in left] == [second < 5] * 2
        for path in left:
            path.mkdir(exist_ok=True)
        return {"first_s": second}

    monkeypatch.setattr(first_token, "in_a_process", process)
    found = first_token.rows("way", Path("folder"), told, 1, 3)
    head = {"way": "way", "threads": 1}
    assert found == [
        {**head, "cache": "empty", "first_s": 8.0},
        {**head, "cache": "filled", "first_s": 2.0},
    ]
    broken = first_token.rows("broken", Path("folder"), told, 1, 3)
    assert broken == [{"way": "broken", "threads": 1, "cache": "empty", "reason": "It broke."}]


def test_what_generate_compiles_is_the_step(case: Case, told: Tensor) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one = Case(case.folder, 1, 8, NEW, "eager")
    with torch.no_grad():
        found = first_token.first(first_token.WAYS["float32 Inductor by generate"], one, told[:1])
    assert found["graphs"] == 1


ROW = {"commit": "0123456789", "threads": 1}
FIGURES = {"first_s": 1.0, "first_cpu_s": 2.0, "all_s": 3.0, "all_cpu_s": 4.0}
SAVED: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    "decode-batches": (
        decode_batches.KEY,
        [
            {"model": "m", "way": "w", "batch": 8, "context": 128, "step_ms": 4.04}
            | {"tokens_s": 1980.0, "gain": 5.5, "allowed": 7.01, "share": 0.785}
        ],
    ),
    "decode-texts": (
        decode_texts.KEY,
        [
            {"way": "w", "texts": 20, "tokens": 64, "same_tokens": 0.5, "first": 9.5, "whole": 1}
            | {"kl": 0.0123, "likeliest": 0.75}
        ],
    ),
    "first-token": (
        first_token.KEY,
        [{"way": "w", "cache": c, **FIGURES} for c in ("empty", "filled")]
        + [{"way": "v", "cache": "empty", "reason": "It broke."}],
    ),
    "decode-long": (
        decode_long.KEY,
        [{"way": "w", "mb_100": 500.0, "mb_5000": 501.0, "graphs": 2, "graphs_second": 1}],
    ),
}


def test_saved_rows_stand_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for name, (key, rows) in SAVED.items():
        path = merge(name, [{**row, **ROW} for row in rows], key)
        assert json.loads(path.read_text())["rows"]
    page = results_page.page(results_page.read(tmp_path))
    for text in (
        "| 8 | 1980.0 | 4.0 ms | 5.50 of 7.01, 78% |",
        "| w | 50.0% | 9.5 | 1 of 20 | 0.0123 | 75.0% |",
        f"| w, 1 thread | {' | '.join(['1.0 s, CPU 2.0 s', '3.0 s, CPU 4.0 s'] * 2)} |",
        "no v: It broke.",
        "| w, 1 thread | 500 MB | 501 MB | 2 | 1 |",
    ):
        assert text in page, text
