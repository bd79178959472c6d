"""The decode benchmark runs each way on the graph of generate, and says why one is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import decode_exported
from benchmarks.common import machine
from benchmarks.decode import NAMES, gains, measure, report
from benchmarks.decode_models import drawn, gemma3, qwen3
from benchmarks.decode_parts import part
from benchmarks.decode_peers import PEERS
from benchmarks.decode_static import Case, Static, load, own
from benchmarks.decode_ways import EAGER, WAYS
from benchmarks.gguf_file import check, gguf_file
from benchmarks.peer import UnsupportedError, missing

BATCH, CONTEXT, NEW = 2, 12, 5
# Of the logits, relative: 4 bits are only asked to be nearer than zeros are.
ALLOWED = {"float32": 1e-4, "Q8_0": 0.1, "w5a8": 0.5, "w4a8": 1, "Q4_0": 1, "int4": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def _write_tokenizer(folder: Path) -> None:
    """Which some peers want, though they are given tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    ends = {"bos_token": letters[1], "eos_token": letters[2], "pad_token": letters[0]}
    PreTrainedTokenizerFast(tokenizer_object=made, **ends).save_pretrained(folder)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True, initializer_range=0.125)
    LlamaForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder)
    return Case(folder, BATCH, CONTEXT, NEW, inner="eager")


OTHERS = {
    "qwen3": qwen3(**SIZES, **HEADS, head_dim=32),
    "gemma3": gemma3(
        **{**SIZES, "num_hidden_layers": 6},  # of which the last sees all
        **HEADS,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,  # fewer than the prompt has
    ),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folders = {name: tmp_path_factory.mktemp(name) for name in OTHERS}
    for name, config in OTHERS.items():
        drawn(config).save_pretrained(folders[name])
    return {n: Case(folder, BATCH, CONTEXT, NEW, inner="eager") for n, folder in folders.items()}


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


def _near_float(name: str, case: Case, tokens: Tensor) -> None:
    """Of the logits in two rounds, from those of the float model without a cache."""
    way = {**WAYS, **PEERS}[name]
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


def _alone(run: Callable[[], None]) -> None:
    """In a thread of its own: llama.cpp configures the tiles of AMX once a thread, and ends with an
    illegal instruction where another library has released them since."""
    count = torch.get_num_threads()
    with ThreadPoolExecutor(1, "", torch.set_num_threads, (count,)) as thread:
        thread.submit(run).result()


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Inductor: what a package runs is its program. Converted files are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(decode_exported, "packaged", lambda program: program.module())


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("name", [*WAYS, *(p for p in PEERS if "ONNX" not in p)])
def test_the_logits_of_each_way_are_near_float(name: str, case: Case, tokens: Tensor) -> None:
    """But of ONNX Runtime GenAI: what its builder makes of this tiny model is another one, in
    float32 too. Of SmolLM2 the benchmark itself says how near it is."""
    _near_float(name, case, tokens)


@pytest.mark.usefixtures("no_package")
def test_openvino_generates_what_its_step_finds(case: Case, tokens: Tensor) -> None:
    way = PEERS["OpenVINO GenAI int8"]
    if lacking := missing(way.packages):
        pytest.skip(lacking)
    with torch.no_grad():
        decoder: Any = way.make(case, load(case))
        told = own(tokens[:, :CONTEXT])
        expected = [decoder.prefill(told).argmax(-1, keepdim=True)]
        for _ in range(NEW - 1):
            expected.append(decoder.step(expected[-1]).argmax(-1, keepdim=True))
    assert torch.equal(decoder.generate(told, NEW), torch.cat(expected, 1))


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(
    "name", [EAGER, "float32 exported", "qfx w8a8", "llama.cpp Q8_0", "OpenVINO GenAI int8"]
)
@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures(
    model: str, name: str, others: dict[str, Case], tokens: Tensor
) -> None:
    near = partial(_near_float, name, others[model], tokens)
    _alone(near) if "llama.cpp" in name else near()


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"query_pre_attn_scalar": 16}, "divide scores by the root of 32, this model has 16."),
        ({"num_hidden_layers": 7}, None),
        ({"layer_types": ["full_attention"] * 6}, "see all in the layers [5], this model has [0, "),
        ({"tie_word_embeddings": False}, "for heads that are the embedding."),
    ],
)
def test_what_llama_cpp_would_run_otherwise_is_refused(
    change: dict[str, Any], reason: str | None
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32}
    config = gemma3(**{**sizes, **change})
    if reason is None:
        check(config)
        return
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        check(config)


@pytest.mark.parametrize("model", OTHERS)
def test_a_gguf_file_has_every_weight(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inner = drawn(OTHERS[model]).model
    tensors = gguf.GGUFReader(gguf_file(inner, "Q8_0")).tensors
    added = 1.0 if model == "gemma3" else 0.0  # to the weights of norms
    weights = [w.detach() + added if w.ndim == 1 else w.detach() for w in inner.parameters()]
    expected = sorted(float(w.norm()) for w in weights)
    norms = [numpy.linalg.norm(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors]
    assert sorted(norms) == pytest.approx(expected, rel=1 / 127)


@pytest.mark.parametrize("name", ["float32 Inductor", "qfx w8a8", "qfx quantize_"])
def test_generate_runs_the_graphs_of_the_step(name: str, case: Case, tokens: Tensor) -> None:
    """One of the prefill and one of the step, for any number of tokens, with the same answers."""
    counters.clear()
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
    weights = sum(p.numel() for n, p in load(case).named_parameters() if "norm" not in n)
    assert eager["weights_mb"] >= round(per_weight["float32"] * weights / 1e6, 1) > 0
    assert 0 < ours["weights_mb"] < eager["weights_mb"] / 2


@pytest.mark.parametrize(
    "event, expected",
    [
        ("aten::mm", "linears"),
        ("aten::addmm", "linears"),
        ("qfx::linear_dynamic", "linears"),
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


def test_what_a_batch_gains_is_said_beside_what_its_bytes_allow() -> None:
    """100 MB of weights, 10 MB of cache a text: 8 texts read 180 MB instead of 8 times 110. Where
    the memory was slower in its run, less is allowed."""
    one = {"way": "qfx", "batch": 1, "weights_mb": 100.0, "cache_mb": 10.0, "read_gb_s": 10.0}
    one["step_tokens_s"] = 50.0
    many = one | {"batch": 8, "cache_mb": 80.0, "step_tokens_s": 220.0}
    (said,) = gains([one], [many, {"way": "other", "batch": 8}])
    assert said == (
        "qfx: a batch of 8 has 4.40 times the tokens of 1, 90% of the 4.89 that bytes allow"
    )
    (slower,) = gains([one], [many | {"read_gb_s": 9.0}])
    assert "100% of the 4.40 that bytes allow" in slower
    assert gains([], [many]) == []
