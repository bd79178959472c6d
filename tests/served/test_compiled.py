"""vLLM compiles the model by default: operators of qfx are in its graph."""

from __future__ import annotations

from pathlib import Path

from torch._dynamo.utils import counters
from vllm.compilation.counter import compilation_counter

from tests.served.models import answers, engine

COUNTS = (1, 3, 8)


def test_one_graph_answers_all_batches_as_no_graph_does(llama: Path) -> None:
    found = {}
    for eager in (True, False):
        counters.clear()
        with engine(llama, eager=eager) as llm:
            before = _compiled()
            assert before["unique_graphs"] == (0 if eager else 1)
            found[eager] = [
                [[*answer.outputs[0].token_ids] for answer in answers(llm, count, 8)]
                for count in COUNTS
            ]
            assert _compiled() == before
    assert found[True] == found[False]
    assert [len(batch) for batch in found[True]] == [*COUNTS]


def _compiled() -> dict[str, int]:
    """Returns what Dynamo and vLLM have counted."""
    graphs = counters["stats"]["unique_graphs"]
    return {**vars(compilation_counter), "unique_graphs": graphs, **counters["recompiles"]}
