"""The whole-model benchmark measures every model, and says why a candidate is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, models
from benchmarks.models import BASELINE, Way, measure, report, ways
from benchmarks.peers import PEERS
from benchmarks.prepare import BACKENDS, rows
from benchmarks.subjects import SUBJECTS, Subject
from tests.lib.versions import packages

# Weights deviate as is usual for 64 features: with smaller ones nobody would see an int8 error.
BLOCK = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WEIGHTS = {"intermediate_size": 128, "initializer_range": 0.125}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {**BLOCK, **WEIGHTS, "vocab_size": 128},
    "vit": {**BLOCK, **WEIGHTS, "patch_size": 16},
    "opt": {
        **BLOCK,
        "vocab_size": 128,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "init_std": 0.125,
    },
}
OWN = [name for name in ways() if name not in PEERS]
FIGURES = {"median_ms", "best_ms", "ratio", "prepare_cpu_s"}


def _tiny(subject: Subject) -> tuple[Subject, dict[str, Any]]:
    return replace(subject, length=32), SIZES[subject.name.split("-")[0]]


def _without_inductor(name: str, way: Way) -> Way:
    """Compiling with Inductor takes a minute for all; what it runs is tested elsewhere."""
    return replace(way, prepare=models.eager) if name != BASELINE else way


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_a_model_gives_a_row_for_each_candidate(subject: Subject) -> None:
    small, sizes = _tiny(subject)
    chosen = {name: _without_inductor(name, ways()[name]) for name in OWN}
    found = measure(small, chosen, rounds=1, sizes=sizes)
    assert [row["candidate"] for row in found] == OWN
    for row in found:
        assert set(row) >= FIGURES, row
        assert ("sqnr_db" in row) == (row["candidate"] != BASELINE)
        assert ("logits_sqnr_db" in row) == ("sqnr_db" in row and subject.name.startswith("opt"))
    assert {row["isa"] for row in found if row["candidate"].startswith("qfx")} - {None}


@packages
def test_float_and_qfx_are_compiled_apart() -> None:
    """Of one model: int8 errors show in qfx's outputs, and only there."""
    small, sizes = _tiny(SUBJECTS[0])
    names = (BASELINE, "float32 Inductor", "qfx", "qfx exported")
    chosen = {name: ways()[name] for name in names}
    found = {row["candidate"]: row for row in measure(small, chosen, rounds=1, sizes=sizes)}
    assert found["float32 Inductor"]["sqnr_db"] > 100
    assert 20 < found["qfx"]["sqnr_db"] < 60
    assert 20 < found["qfx exported"]["sqnr_db"] < 60


def test_a_missing_peer_is_a_line_with_the_reason() -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'peer'\nmore")

    small, sizes = _tiny(SUBJECTS[0])
    chosen = {BASELINE: ways()[BASELINE], "peer": Way(missing)}
    found = measure(small, chosen, rounds=1, sizes=sizes)
    assert found[1]["reason"] == "ModuleNotFoundError: No module named 'peer'"
    assert report(found).endswith(f"{small.name}: no peer: {found[1]['reason']}")


@pytest.mark.filterwarnings("ignore:.*deprecated")  # a peer may be
@pytest.mark.parametrize("name", PEERS)
def test_an_installed_peer_is_near_float(name: str) -> None:
    pytest.importorskip(_package(name))
    small, sizes = _tiny(SUBJECTS[0])
    model, inputs = small.build(sizes)
    with torch.no_grad():
        expected, (found, *_) = model(*inputs)[0], PEERS[name](model, inputs)()
    assert (found - expected).norm() < 0.1 * expected.norm()


def _package(peer: str) -> str:
    packages = {"ONNX": "onnxruntime", "OpenVINO": "openvino", "torchao": "torchao"}
    return packages.get(peer.split()[0], "torch")


def test_saved_rows_are_replaced_by_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.merge("models", [{"model": "a", "ms": 1}, {"model": "b", "ms": 1}], ["model"])
    path = common.merge("models", [{"model": "a", "ms": 2}], ["model"])
    assert json.loads(path.read_text())["rows"] == [
        {"model": "b", "ms": 1},
        {"model": "a", "ms": 2},
    ]


def test_preparing_is_compared_with_float_inductor() -> None:
    rounds = [{name: {"cpu_s": 10.0 + i, "wall_s": 5.0} for i, name in enumerate(BACKENDS)}]
    assert [row["ratio"] for row in rows(rounds, 1)] == [1.0, 1.1, 1.2]


def test_the_plot_has_every_model_and_candidate_that_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    ran = {"model": "a", "candidate": "qfx", "ratio": 2.0, "sqnr_db": 30.0}
    path = tmp_path / "a.svg"
    draw([ran, {"model": "a", "candidate": "peer", "reason": "none"}], "title", path)
    assert path.read_text().count("<svg ") == 1
