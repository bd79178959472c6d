"""The decode benchmark runs each way on the graph of generate, and says why one is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import decode_ways
from benchmarks.common import machine
from benchmarks.decode import NAMES, measure, report
from benchmarks.decode_parts import part
from benchmarks.decode_peers import PEERS
from benchmarks.decode_ways import EAGER, WAYS, Case, Static, own
from benchmarks.peer import UnsupportedError, missing

BATCH, CONTEXT, NEW = 2, 12, 5
# Of the logits, relative: 4 bits are only asked to be nearer than zeros are.
ALLOWED = {"float32": 1e-4, "Q8_0": 0.1, "w5a8": 0.5, "w4a8": 1, "Q4_0": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SIZES, **heads, initializer_range=0.125)
    LlamaForCausalLM(config).save_pretrained(folder)
    return Case(folder, BATCH, CONTEXT, NEW, inner="eager")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(1, 128, (BATCH, CONTEXT + NEW), generator=torch.Generator().manual_seed(1))


def _logits(decoder: Any, tokens: Tensor) -> Tensor:
    """Of a step behind each of the last tokens."""
    decoder.prefill(own(tokens[:, :CONTEXT]))
    found = []
    for token in tokens[:, CONTEXT:].split(1, 1):
        decoder.prepare()
        found.append(decoder.step(own(token)).clone())
    return torch.stack(found)


@pytest.mark.parametrize("name", [*WAYS, *PEERS])
def test_the_logits_of_each_way_are_near_float(
    name: str, case: Case, tokens: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In two rounds, without Inductor: what a package runs is its program."""
    way = {**WAYS, **PEERS}[name]
    if lacking := missing(way.packages):
        pytest.skip(lacking)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(decode_ways, "packaged", lambda program: program.module())
    with torch.no_grad():
        expected = _logits(WAYS[EAGER].make(case), tokens)
        try:
            decoder = way.make(case)
        except UnsupportedError as why:
            pytest.skip(str(why))
        found = [_logits(decoder, tokens) for _ in range(2)]
    error = float((found[0] - expected).norm() / expected.norm())
    allowed = next((most for word, most in ALLOWED.items() if word in name), 0.1)
    assert error < allowed, (name, error)
    assert error > 1e-4 or "float32" in name  # else it would be float32 under another name
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["float32 Inductor", "qfx w8a8", "qfx quantize_"])
def test_generate_runs_the_graphs_of_the_step(name: str, case: Case, tokens: Tensor) -> None:
    """One of the prefill and one of the step, for any number of tokens, with the same answers."""
    counters.clear()
    with torch.no_grad():
        decoder = WAYS[name].make(case)
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


def test_a_way_is_a_row_and_what_is_missing_says_why(case: Case, tokens: Tensor) -> None:
    rows = measure(["qfx quantize_", "no such way"], case, tokens, threads=1, rounds=2)
    assert [row["way"] for row in rows] == [EAGER, "qfx quantize_", "no such way"]
    eager, ours, absent = rows
    assert absent["reason"] and "KeyError" in absent["reason"]
    assert f"no no such way: {absent['reason']}" in report(rows)
    for row in (eager, ours):
        whole = sum(row[f"{name}_ms"] for name in NAMES)
        assert whole == pytest.approx(row["step_ms"], abs=0.005 * (len(NAMES) + 1))
    assert json.dumps(rows) and machine()
    per_weight = {"float32": 4, "int8": 1}
    weights = sum(
        p.numel() for n, p in decode_ways.load(case).named_parameters() if "norm" not in n
    )
    assert eager["weights_mb"] >= round(per_weight["float32"] * weights / 1e6, 1) > 0
    assert 0 < ours["weights_mb"] < eager["weights_mb"] / 2


@pytest.mark.parametrize(
    "event, expected",
    [
        ("aten::mm", "linears"),
        ("aten::addmm", "linears"),
        ("qfx::int8_linear_dynamic", "linears"),
        ("qfx::int8_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("TorchDynamo Cache Lookup", "guards"),
        ("Torch-Compiled Region: 0/1", "python"),
        ("## Call CompiledFxGraph abc ##", "graph"),
        ("aten::mul", "graph"),
        ("decode step", "elsewhere"),
    ],
)
def test_parts_of_a_step(event: str, expected: str) -> None:
    assert part(event, "elsewhere") == expected
