"""Source texts of graph modules: what qfx makes and drops leaves none in torch.fx or linecache."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.dynamo_backend.backend import qfx as compile_graph
from qfx.generate.program_cache import PROGRAMS
from qfx.host.source_text import _TEXTS
from tests.lib.decoders import decoder, ids
from tests.lib.pairs import usual

X = torch.randn(4, 32)
OPTIONS = {"minimum_gain": 0}
CONFIG = qfx.Config(minimum_gain=0)


def names() -> set[str]:
    """Of the texts that are kept."""
    gc.collect()
    return {*_TEXTS} | {name for name in linecache.cache if name.startswith("<eval_with_key>")}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def generates() -> None:
    model = decoder("llama", num_hidden_layers=1)
    qfx.compile_for_generate(model, "w4a8", max_length=64)
    model.generate(ids(1, 5), max_new_tokens=2, do_sample=False)


class Tupled(nn.Sequential):
    """What Dynamo captures returns a tuple."""

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),)


def through_backend(inner: str) -> None:
    """The text of the captured graph is Dynamo's."""
    with torch.no_grad():
        compile_graph(CAPTURED, [X], options={"inner": inner, **OPTIONS})(X)


def captured_anew(done: object) -> None:
    """What Dynamo compiled lives as long as the code of the module's class."""
    torch._dynamo.reset()


TRACED = qfx.trace(mlp()).eval()
CAPTURED = qfx.trace(Tupled(*mlp().children()), X)
EXPORTED: Any = torch.export.export(mlp(), (X,)).module()
USES: dict[str, Callable[[], object]] = {
    "trace": lambda: qfx.trace(mlp(), X),
    "rewrite": lambda: qfx.rewrite(TRACED, CONFIG),
    "rewrite of an exported program": lambda: qfx.rewrite(EXPORTED, CONFIG),
    "compile_for_generate": generates,
    "explain of a graph": lambda: str(qfx.explain(TRACED, X, options=OPTIONS)),
    "explain of a module": lambda: captured_anew(str(qfx.explain(mlp(), X, options=OPTIONS))),
    "calibrate of a graph": lambda: qfx.calibrate(TRACED, [X], CONFIG),
    "calibrate of a module": lambda: captured_anew(qfx.calibrate(mlp(), [X], CONFIG)),
    "the backend": lambda: through_backend("eager"),
    "the backend with AOTAutograd": lambda: through_backend("aot_eager"),
}
KEPT_BY_TORCH = {
    "compile_for_generate": 1
}  # the text of the last export, which is another each time


FEW = ("rewrite", "rewrite of an exported program", "compile_for_generate", "explain of a module",
       "calibrate of a graph", "the backend with AOTAutograd")  # fmt: skip


@pytest.mark.parametrize("name", usual(FEW, USES))
def test_no_text_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAMS.switch, "0")
    USES[name]()  # what is made once in a process
    before = names()
    for _ in range(3):
        USES[name]()
    new = names() - before  # a text of an earlier test that goes meanwhile hides no new one
    assert len(new) <= KEPT_BY_TORCH.get(name, 0), new


def test_a_module_that_lives_shows_its_lines() -> None:
    gm, _ = qfx.rewrite(qfx.trace(mlp()), CONFIG)
    with pytest.raises(Exception, match="K=") as caught:
        gm(torch.randn(4, 31))
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("torch.ops.qfx" in (line or "") for line in lines)
