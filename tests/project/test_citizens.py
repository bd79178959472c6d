"""The lines that a user types are those that run, and what comes of them is judged, not assumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import citizens, lora
from benchmarks.citizen_tasks import TASKS, Work
from benchmarks.citizens import outcome, typed_lines
from benchmarks.common import RESULTS
from benchmarks.typed import FLOAT, LIBRARIES, Library, code, load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A tiny model with weights as large as trained ones, and what float32 does with it."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("citizens")
    model = load(lora.tiny(folder / "float"))
    for parameter in model.parameters():
        parameter.data.mul_(4)
    model.save_pretrained(folder / "float")
    found = Work(str(folder / "float"), str(folder), new_tokens=4, steps=6)
    citizens.prepare(found, torch.randint(0, 128, (2, 80)))
    assert {row["outcome"] for row in citizens.rows(FLOAT, found, outcome)} == {"works"}
    return found


def test_qfx_does_every_task(work: Work) -> None:
    found = {row["task"]: row for row in citizens.rows("qfx", work, outcome)}
    assert list(found) == list(TASKS)
    assert {task: row["outcome"] for task, row in found.items()} == dict.fromkeys(TASKS, "works")
    assert 20 < found["quantize"]["sqnr_db"] < 60
    assert {"step_s", "base_mb", "step_mb", "loss_first"} < set(found["fine-tune"])


def test_a_library_that_is_not_installed_is_a_row_that_says_so(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Library(load, packages=("no-such-peer", "no.such"))
    monkeypatch.setitem(LIBRARIES, "absent", lacking)
    found = citizens.rows("absent", work, outcome)
    said = "Not installed: pip install no-such-peer no.such."
    assert [row["reason"] for row in found] == [said] * len(TASKS)


def _noisy(folder: Path) -> Any:
    """It works, and is not float32."""
    model = load(folder)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.add_(1e-3 * torch.randn(p.shape, generator=generator))
    return model


def _raises(*_: Any) -> Any:
    raise RuntimeError("It broke.\nmore")


def _another(folder: Path) -> Any:
    return _replaced(load(folder))


def _replaced(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def _constant(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    worst = model(ids).logits[:, -1].argmin(-1, keepdim=True)
    return torch.cat([ids, worst.expand(-1, count)], 1)


def _cut(model: Any) -> Any:
    """Adapters before the last layer get no gradient."""
    adapted = LIBRARIES[FLOAT].adapt(model)
    last = adapted.base_model.model.model.layers[-1]
    last.register_forward_pre_hook(lambda m, inputs: (inputs[0].detach(), *inputs[1:]))
    return adapted


GOOD = Library(_noisy)
# A library with one fault: its task, and what is said of it.
FAULTS: dict[str, tuple[Library, str, str, str]] = {
    "nothing": (replace(GOOD, quantize=load), "quantize", "silently wrong", "nothing is quantized"),
    "noise": (replace(GOOD, quantize=_another), "quantize", "silently wrong", "% of the likeliest"),
    "raises": (replace(GOOD, quantize=_raises), "quantize", "error", "RuntimeError: It broke."),
    "forgets": (replace(GOOD, load=_another), "load", "silently wrong", "other logits than before"),
    "unsaved": (replace(GOOD, save=_raises), "load", "nothing to load", ""),
    "babbles": (replace(GOOD, generate=_constant), "generate", "silently wrong", "0 of the 4"),
    "cut": (replace(GOOD, adapt=_cut), "fine-tune", "silently wrong", "adapters have no gradient"),
    "untrained": (replace(GOOD, adapt=_raises), "merge", "nothing to merge", ""),
    "drops": (
        replace(GOOD, merge=lambda model: model.unload()),
        "merge",
        "silently wrong",
        "0 % of what the loss fell by is kept",
    ),
}
BEFORE = {"load": "save", "merge": "fine-tune"}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    library, task, came, said = FAULTS[name]
    monkeypatch.setitem(LIBRARIES, name, library)
    if task in BEFORE:
        outcome(name, BEFORE[task], asdict(work))
    found = outcome(name, task, asdict(work))
    assert found["outcome"] == came and said in found.get("said", ""), found
    assert "\n" not in found.get("said", "")


def _typed(model: Any) -> Any:
    """Not counted."""
    import json

    # Nor this.
    texts = [
        json.dumps(model),
    ]
    return texts


def test_lines_are_those_of_the_source() -> None:
    assert code(_typed) == "import json\ntexts = [json.dumps(model)]"

    def hides(model: Any) -> Any:
        return json.dumps(model)

    with pytest.raises(AssertionError, match="hides code in its return"):
        code(hides)
    assert typed_lines(FLOAT, "save") == 1


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-citizens.json")), ids=lambda p: p.stem)
def test_saved_lines_are_those_of_today(path: Path) -> None:
    """Or what was measured is not what is written."""
    rows: list[Row] = json.loads(path.read_text())["rows"]
    assert rows
    for row in rows:
        assert row["lines"] == typed_lines(row["library"], row["task"]), row


def test_each_library_has_its_own_lines() -> None:
    """No two of them are the same function under two names."""
    quantize: list[Callable[..., Any]] = [library.quantize for library in LIBRARIES.values()]
    assert len(set(map(code, quantize))) == len(quantize)
