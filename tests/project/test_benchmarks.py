"""The whole-model benchmark measures every model, and says why a candidate is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from benchmarks import common, models, peers
from benchmarks.common import compiled_apart
from benchmarks.converted import converted
from benchmarks.models import BASELINE, Way, measure, report, ways
from benchmarks.peer import UnsupportedError, missing
from benchmarks.peer_ctranslate2 import Steps
from benchmarks.peers import PEERS
from benchmarks.prepare import BACKENDS, rows
from benchmarks.standing import ordinal, standings
from benchmarks.subjects import SUBJECTS, TABLE, Subject
from tests.lib.pairs import every
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
    "minilm": {**BLOCK, **WEIGHTS, "vocab_size": 128},
    "smollm2": {
        **BLOCK,
        "vocab_size": 128,
        "intermediate_size": 128,
        "num_key_value_heads": 1,
        "initializer_range": 0.125,
    },
}
OWN = [name for name in ways() if name not in PEERS]
FIGURES = {"median_ms", "best_ms", "spread", "ratio", "prepare_cpu_s"}
LANGUAGE = ("opt", "smollm2")


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
        assert ("logits_sqnr_db" in row) == ("sqnr_db" in row and subject.name.startswith(LANGUAGE))
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


def _fails(*_: Any) -> Any:
    raise ModuleNotFoundError("No module named 'peer'\nmore")


def _refuses(*_: Any) -> Any:
    raise UnsupportedError("It knows no BERT.")


def _logits_only(model: Any, inputs: Any) -> Any:
    return lambda: (None, *model(*inputs)[1:])


# A peer, and its reason; None where it runs.
FAKES = {
    "runs": (Way(models.eager), None),
    "logits": (Way(_logits_only), None),
    "fails": (Way(_fails), "ModuleNotFoundError: No module named 'peer'"),
    "refuses": (Way(_refuses), "It knows no BERT."),
    "lacks": (
        Way(models.eager, packages=("torch", "no-such-peer", "no-such-other")),
        "Not installed: pip install no-such-peer no-such-other.",
    ),
}


def test_a_peer_that_does_not_run_is_a_line_with_the_reason() -> None:
    small, sizes = _tiny(TABLE["opt-prefill-256"])
    chosen = {BASELINE: ways()[BASELINE], **{name: way for name, (way, _) in FAKES.items()}}
    found = measure(small, chosen, rounds=2, sizes=sizes)
    assert {r["candidate"]: r.get("reason") for r in found[1:]} == {
        n: w for n, (_, w) in FAKES.items()
    }
    printed = report(found)
    for row in found:
        assert ("reason" in row) != (set(row) >= FIGURES)
        if "reason" in row:
            assert f"{small.name}: no {row['candidate']}: {row['reason']}" in printed
    logits = found[2]
    assert "sqnr_db" not in logits and logits["logits_sqnr_db"] > 100


def _row(candidate: str, ratio: float | None = None) -> dict[str, Any]:
    figures = {"reason": "It broke."} if ratio is None else {"ratio": ratio}
    return {"model": "a", "candidate": candidate, "threads": 2, **figures}


@pytest.mark.parametrize(
    "own, lines",
    [
        ([_row("qfx", 9.0)], ["qfx compiled: first of 4"]),
        (
            [_row("qfx", 2.0), _row("qfx exported", 4.0), _row("qfx on AVX2", 9.0)],
            [
                "qfx compiled: 3rd of 4, 2.50x the first (peer)",
                "qfx exported: 2nd of 4, 1.25x the first (peer)",
            ],
        ),
        ([_row("qfx", 5.0)], ["qfx compiled: first of 4"]),
        ([_row("qfx")], ["qfx compiled: did not run. It broke."]),
        ([], []),
    ],
)
def test_the_summary_says_first_or_nth(own: list[Any], lines: list[str]) -> None:
    """Among all that is not qfx and that ran, float32 too."""
    rows = [_row(BASELINE, 1.0), *own, _row("slow", 3.0), _row("peer", 5.0), _row("broken")]
    assert standings(rows) == lines
    last = report(rows).splitlines()[-len(lines) :] if lines else []
    assert last == [f"a, 2 threads: {line}" for line in lines]


def test_candidates_can_be_chosen_by_name() -> None:
    everything = ways()
    assert models.names(",".join(everything), everything) == list(everything)


def test_ordinals() -> None:
    named = {1: "first", 2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 12: "12th", 13: "13th"}
    named |= {21: "21st", 22: "22nd", 111: "111th"}
    assert {n: ordinal(n) for n in named} == named


@pytest.mark.filterwarnings("ignore:.*deprecated")  # a peer may be
@pytest.mark.parametrize("name, subject", every(PEERS, ["bert-1x128", "smollm2-token"]))
def test_an_installed_peer_is_near_float(
    name: str, subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it says that it does not take the model."""
    if lacking := missing(PEERS[name].packages):
        pytest.skip(lacking)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not PEERS[name].packages:  # where Inductor's code does not matter, and all must wait for it
        monkeypatch.setattr(peers, "compiled_apart", lambda m, _: compiled_apart(m, "aot_eager"))
    small, sizes = _tiny(TABLE[subject])
    model, inputs = small.build(sizes)
    with torch.no_grad():
        expected = model(*inputs)
        try:
            found = PEERS[name].prepare(model, inputs)()
        except UnsupportedError:
            return
    pairs = [(e, f) for e, f in zip(expected, found, strict=False) if f is not None]
    assert pairs
    for e, f in pairs[:2]:
        least = 0 if "float32" in name else 1e-4  # else it would be float32 under another name
        assert least * e.norm() <= (f.float() - e).norm() < 0.1 * e.norm()


@pytest.mark.parametrize(
    "subject, batch, reason",
    [
        ("vit-1x224", 1, "llama.cpp is for language models, and ViTConfig is none."),
        ("opt-token", 1, "are written here for llama, qwen3, gemma3_text, and this is opt."),
        ("smollm2-token", 2, "llama.cpp runs one text at a time here, and these are 2."),
        ("smollm2-prefill-128", 1, "Q8_0 has blocks of 32, which do not divide 64 and 72."),
    ],
)
def test_llama_cpp_says_what_it_does_not_take(subject: str, batch: int, reason: str) -> None:
    """Before it asks for a package."""
    small, sizes = _tiny(TABLE[subject])
    odd = {"intermediate_size": 72} if subject == "smollm2-prefill-128" else {}
    model, inputs = replace(small, batch=batch).build({**sizes, **odd})
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        PEERS["llama.cpp Q8_0"].prepare(model, inputs)


def test_a_generation_is_led_token_by_token() -> None:
    """It computes none before it is asked for, but the first; nor any when it is closed."""
    computed: list[int] = []

    def generate(callback: Any) -> None:
        for i in range(3):
            computed.append(i)
            if callback(SimpleNamespace(logits=numpy.full((1, 2), i, numpy.float32))):
                return

    steps = Steps(generate)
    for i in range(3):
        assert steps.next().tolist() == [i, i] and computed == list(range(i + 1))
    with pytest.raises(RuntimeError, match="CTranslate2 has ended its generation"):
        steps.next()
    closed = Steps(generate)
    closed.next()
    closed.close()
    assert computed == [0, 1, 2, 0]


def test_a_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its weights or its configuration change; what failed leaves nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, written = torch.nn.Linear(2, 2), []

    def write(path: Path) -> None:
        path.write_text(str(len(written)))
        written.append(path)

    def breaks(path: Path) -> None:
        path.write_text("half")
        raise UnsupportedError("no")

    with pytest.raises(UnsupportedError):
        converted("format", model, breaks)
    first = converted("format", model, write)
    assert converted("format", model, write) == first and first.read_text() == "0"
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert converted("format", model, write) != first and len(written) == 2
    assert converted("other", model, write) != first and len(written) == 3
    assert len(list(first.parent.iterdir())) == 3


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


def test_a_row_without_figures_removes_none_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a peer's package keeps what an earlier one measured."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    lacks = {"reason": "Not installed."}
    common.merge("models", [{"model": "a", "ms": 1}, {"model": "b", **lacks}], ["model"])
    common.merge("models", [{"model": "a", **lacks}, {"model": "c", **lacks}], ["model"])
    path = common.merge("models", [{"model": "b", "ms": 2}], ["model"])
    assert json.loads(path.read_text())["rows"] == [
        {"model": "a", "ms": 1},
        {"model": "c", **lacks},
        {"model": "b", "ms": 2},
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
