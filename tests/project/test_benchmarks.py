"""The runner asks every question; whole models are measured, or a row says why not."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__ as runner
import qfx
import qfx._C as _C
from benchmarks import (
    common,
    compiling,
    linear,
    linear_peers,
    models,
    peers,
    results_page,
    training,
)
from benchmarks.common import compiled_apart, merge
from benchmarks.converted import converted
from benchmarks.fresh import FailedError, call
from benchmarks.models import BASELINE, Way, below, measure, ways
from benchmarks.peer import UnsupportedError, missing
from benchmarks.peers import PEERS
from benchmarks.question import Question, chosen
from benchmarks.results_cells import ordinal, standings
from benchmarks.subjects import SUBJECTS, TABLE, Subject
from tests.conftest import on_threads
from tests.lib.pairs import LONG, every
from tests.lib.versions import packages

Row = dict[str, Any]

# --- the runner ---


def test_every_question_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (common.ROOT / "benchmarks").glob("*.py")
    found = [p.stem for p in files if "\nQUESTION = Question(" in p.read_text()]
    assert sorted(found) == sorted(runner.QUESTIONS)
    with pytest.raises(SystemExit):
        runner.main([])
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\w.*\?$", printed, re.MULTILINE) for name in found)


def test_options_have_the_types_of_their_defaults() -> None:
    given = {"sizes": [1], "names": ["a"], "fast": False, "limit": 1.5}
    parser = runner.parser("some", Question("?", lambda options: (), key=(), options=given))
    assert parser.parse_args([]) == Namespace(threads=1, rounds=15, save=False, **given)
    found = parser.parse_args(["--sizes", "2,3", "--names", "a, b;c", "--fast", "--limit", "2"])
    assert (found.sizes, found.names, found.fast, found.limit) == ([2, 3], ["a, b", "c"], True, 2.0)
    with pytest.raises(SystemExit, match="d: not one of a, b"):
        chosen(["a", "d"], {"a": 1, "b": 2})


# What is asked, at a tiny size.
ASKED = {
    "linear": ["--shapes", "4x64x32", "--kinds", "int8;7-bit;rotated;groups 64;5 bits, 64;1-bit"],
    "linear, cold": ["--shapes", "1x64x32", "--kinds", "int8", "--cold", "1", "--peers"],
    "attention": ["--cases", "64"],
    "experts": ["--cases", "mixture", "--tokens", "1"],
    "convolutions": ["--cases", "ResNet-50 4"],
    "recurrent": ["--cases", "gru-512", "--batches", "1", "--steps", "2"],
    "networks": ["--models", "lstm-512-1x100", "--candidates", "float32 eager"],
    "cost": ["--count", "1"],
    "training": ["--layers", "1"],
    "compiling": [],
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_question_saves_stands_on_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the eager backend in place of Inductor, in one process."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    int8 = partial(qfx.backend, options={"inner": "eager"})
    monkeypatch.setattr(training, "COMPILERS", {"float32 Inductor": "eager", "qfx": int8})
    monkeypatch.setattr(training, "SIZES", {**SIZES["opt"], "dropout": 0.0})
    monkeypatch.setattr(compiling, "BACKENDS", {"float32 Inductor": "eager"})
    monkeypatch.setattr(compiling, "TABLE", {compiling.MODEL: _Tiny()})
    for module in (training, compiling):
        monkeypatch.setattr(module, "call", lambda f, *arguments, environment=None: f(*arguments))
    question = name.split(",")[0]
    with on_threads(1):
        runner.main([question, "--save", "--rounds", "1", *ASKED[name]])
    (file,) = results_page.read(tmp_path)
    assert file.name == question and file.rows
    assert all({"threads", "commit", "uncommitted_changes"} <= set(row) for row in file.rows)
    shown = results_page.page([file])
    assert re.search(r"^\| .* \| .*\d.* \|$", shown.split("## Whole models")[1], re.MULTILINE)


class _Tiny:
    def build(self) -> Any:
        return torch.nn.Linear(2, 2), (torch.zeros(2, 2),)


def test_saved_rows_are_replaced_by_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without figures replaces none that has them. Rows keep the commit that they had."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    lacks = {"reason": "Not installed."}
    path = merge("models", [{"model": "a", "ms": 1}, {"model": "b", **lacks}], ["model"])
    path.write_text(path.read_text().replace(common.machine()["commit"], "before"))
    merge("models", [{"model": "a", **lacks}, {"model": "c", **lacks}], ["model"])
    merge("models", [{"model": "b", "ms": 2}], ["model"])
    rows = json.loads(path.read_text())["rows"]
    found = [(row["model"], row.get("ms")) for row in rows]
    assert found == [("a", 1), ("c", None), ("b", 2)]
    assert rows[0]["commit"] == "before" != rows[1]["commit"]


def test_a_fresh_process_answers_or_says_why_not() -> None:
    assert call(ordinal, 3) == "3rd"
    with pytest.raises(FailedError, match="TypeError: not all arguments converted"):
        call(ordinal, "3")
    with pytest.raises(FailedError, match="stopped after 0 s"):
        call(ordinal, 3, limit_s=0.01)


# --- one linear ---


@pytest.mark.parametrize("name, shape", every(linear_peers.PEERS, ["1x64x32", "4x32x64"]))
def test_a_linear_of_another_library_is_near_float(name: str, shape: str) -> None:
    """Also the second time, because a library may reorder the weight itself. Without AVX-512 some
    say that they do not run, and without VNNI sums of oneDNN's int8 saturate in 16 bits."""
    has_vnni = bool({"avxvnni", "avx512vnni"} & {*_C.isas()})
    given = linear.operands(linear.Shape.parse(shape))
    layer = linear_peers.prepared(name, *given)
    if isinstance(layer, str):
        refused = not has_vnni and name.startswith("bfloat16") and "needs the cpu support" in layer
        assert refused or layer == missing(linear_peers.PEERS[name][1])
        return
    weight, exact = layer.pack(), torch.nn.functional.linear(*(t.double() for t in given))
    for _ in range(2):
        db = qfx.sqnr(exact, layer.finish(layer.run(weight)))
        lowest = 15 if name.startswith("int8 oneDNN") and not has_vnni else 30
        assert lowest < db < 60, db  # else it would be float32 under another name


def test_a_wrong_linear_has_a_reason_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(x: Any, w: Any, bias: Any) -> linear_peers.Layer:
        layer = linear.layer("float32", x, w, bias)
        return layer._replace(run=lambda weight: -layer.run(weight))

    monkeypatch.setattr(linear, "PEERS", peers := {"wrong": (negated, ()), "breaks": (_fails, ())})
    monkeypatch.setattr(linear_peers, "PEERS", peers)
    rows = list(linear.measure("4x64x32", [], 1, 0, True))
    assert [row["isa"] for row in rows] == ["float32", "wrong", "breaks"]
    assert rows[1] == {"shape": "4x64x32", "isa": "wrong", "reason": WRONG}
    assert rows[2]["reason"] == FAKES["fails"][1]


# --- whole models ---

# Weights deviate as is usual for 64 features: with smaller ones nobody would see an int8 error.
BLOCK = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
WEIGHTS = {**BLOCK, "intermediate_size": 128, "initializer_range": 0.125}
SIZES: dict[str, dict[str, Any]] = {
    "bert": WEIGHTS,
    "minilm": WEIGHTS,
    "vit": {**WEIGHTS, "patch_size": 16},
    "opt": {**BLOCK, "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.125},
}
OWN = [name for name in ways() if name not in PEERS]
FIGURES = {"median_ms", "ratio"}


def _tiny(subject: Subject) -> tuple[Subject, dict[str, Any]]:
    return replace(subject, length=32), SIZES[subject.name.split("-")[0]]


def _without_inductor(name: str, way: Way) -> Way:
    """Compiling with Inductor takes a minute for all; what it runs is tested elsewhere."""
    return replace(way, prepare=models.eager) if name != BASELINE else way


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_a_model_gives_a_row_for_each_candidate(subject: Subject) -> None:
    small, sizes = _tiny(subject)
    used = {name: _without_inductor(name, ways()[name]) for name in OWN}
    found = measure(small, used, rounds=1, sizes=sizes)
    assert [row["candidate"] for row in found] == OWN
    for row in found:
        assert set(row) >= FIGURES, row
        assert ("sqnr_db" in row) == (row["candidate"] != BASELINE)
        assert ("logits_sqnr_db" in row) == ("sqnr_db" in row and subject.name.startswith("opt"))
    assert {row["isa"] for row in found if row["candidate"].startswith("qfx")} - {None}


def test_float_and_qfx_are_compiled_apart() -> None:
    """Of one model: int8 errors show in qfx's outputs, and only there."""
    small, sizes = _tiny(SUBJECTS[0])
    int8 = partial(qfx.backend, options={"inner": "eager", "minimum_gain": 0})
    backends = {"float32 compiled": "aot_eager", "qfx": int8}
    used = {name: Way(partial(models.compiled, how)) for name, how in backends.items()}
    found = measure(small, {BASELINE: Way(models.eager), **used}, rounds=1, sizes=sizes)
    assert found[1]["sqnr_db"] > 100 and 20 < found[2]["sqnr_db"] < 60


@packages
@pytest.mark.skipif(not LONG, reason="compiles C++, which the tests of export do too")
def test_an_exported_model_is_int8() -> None:
    small, sizes = _tiny(SUBJECTS[0])
    used = {name: ways()[name] for name in (BASELINE, "qfx exported")}
    assert 20 < measure(small, used, rounds=1, sizes=sizes)[1]["sqnr_db"] < 60


def _fails(*_: Any) -> Any:
    raise ModuleNotFoundError("No module named 'peer'\nmore")


def _refuses(*_: Any) -> Any:
    raise UnsupportedError("It knows no BERT.")


def _negated(model: Any, inputs: Any) -> Any:
    return lambda: tuple(-y for y in model(*inputs))


def _logits_only(model: Any, inputs: Any) -> Any:
    return lambda: (None, *model(*inputs)[1:])


WRONG = "Its outputs are wrong: -6.02 dB."
# A peer, and its reason; None where it runs.
FAKES = {
    "runs": (Way(models.eager), None),
    "logits": (Way(_logits_only), None),
    "fails": (Way(_fails), "ModuleNotFoundError: No module named 'peer'"),
    "wrong": (Way(_negated), WRONG),
    "refuses": (Way(_refuses), "It knows no BERT."),
    "lacks": (
        Way(models.eager, packages=("torch", "no-such-peer", "no-such-other")),
        "Not installed: pip install no-such-peer no-such-other.",
    ),
}


def test_a_peer_that_does_not_run_is_a_line_with_the_reason() -> None:
    small, sizes = _tiny(TABLE["opt-prefill-256"])
    used = {BASELINE: ways()[BASELINE], **{name: way for name, (way, _) in FAKES.items()}}
    found = measure(small, used, rounds=2, sizes=sizes)
    assert {r["candidate"]: r.get("reason") for r in found[1:]} == {
        n: w for n, (_, w) in FAKES.items()
    }
    printed = below(found)
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


def test_ordinals() -> None:
    named = {1: "first", 2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 12: "12th", 13: "13th"}
    named |= {21: "21st", 22: "22nd", 111: "111th"}
    assert {n: ordinal(n) for n in named} == named


@pytest.mark.filterwarnings("ignore:.*deprecated")  # a peer may be
@pytest.mark.parametrize("name, subject", every(PEERS, ["bert-1x128", "opt-token"]))
def test_an_installed_peer_is_near_float(
    name: str, subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it says that it does not take the model. Without VNNI the int8 sums of ONNX Runtime
    saturate in 16 bits."""
    saturates = "ONNX Runtime int8" in name and not {"avxvnni", "avx512vnni"} & {*_C.isas()}
    most = 0.3 if saturates else 0.1
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
        assert least * e.norm() <= (f.float() - e).norm() < most * e.norm()


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
