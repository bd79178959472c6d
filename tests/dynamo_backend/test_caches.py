"""PyTorch's caches on disk with qfx: hit by a second process, never by one with other formulas.

The processes import a copy of the package, so that its sources can be changed between them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import qfx
from qfx.host.native_library import FACE, LIBRARY
from qfx.io import digest as sources
from tests.lib.damaged_package import check_refused
from tests.lib.fresh_process import run_python
from tests.lib.models import compiled
from tests.lib.pairs import usual
from tests.lib.versions import packages, several_passes

# Linears without biases: nothing for Inductor to generate C++ for, so a process takes seconds.
WORKER = """
import json, sys
package, load, save = sys.argv[1:]
sys.path.insert(0, package)
editable = [f for f in sys.meta_path if "qfx" in type(f).__module__]
sys.meta_path[:] = [f for f in sys.meta_path if f not in editable]
import torch
from torch import nn
from torch._dynamo.utils import counters
import qfx
from qfx.cost.device_models import costs_from
from qfx.cost.model import Costs
assert qfx.__file__.startswith(package), qfx.__file__
costs_from(Costs()).__enter__()  # nothing is measured
torch.set_num_threads(1)
if load:
    assert torch.compiler.load_cache_artifacts(open(load, "rb").read()) is not None

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
x = torch.randn(4, 8)
options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}
config = qfx.Config(minimum_gain=0, scheme="w8a8-asymmetric")

def trained(f, model):
    f(x).sum().backward()
    gradients = [p.grad.flatten().tolist() for p in model.parameters()]
    model.zero_grad()
    return gradients

def training():
    return trained(torch.compile(model, backend=qfx.backend, options=options), model)

def inference():
    with torch.no_grad():
        return torch.compile(model, backend=qfx.backend, options=options)(x).flatten().tolist()

def operators_without_the_backend():
    gm, _ = qfx.rewrite(qfx.trace(model), config, training=True)
    return trained(torch.compile(gm), gm)

found = {}
for run in (training, inference, operators_without_the_backend):
    counters.clear()
    values = run()
    names = {"aot": ("aot_autograd", "autograd_cache"), "fx": ("inductor", "fxgraph_cache")}
    found[run.__name__] = {"values": values} | {
        f"{short}_{what}": counters[group][f"{name}_{what}"]
        for short, (group, name) in names.items() for what in ("hit", "miss", "bypass")
    }
if save:
    open(save, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps(found))
"""
ANOTHER_FORMULA = """

_exact = input_gradient


def input_gradient(ctx, saved, g):
    dx, step = _exact(ctx, saved, g)
    w_hat = _weight(ctx, saved, g.dtype)
    return torch.addmm(dx, g, w_hat, beta=0, alpha=2), step  # 2 dx, without C++ to generate
"""


class Process(NamedTuple):
    """What a worker found, by its functions' names, and what it wrote to stderr."""

    found: dict[str, dict[str, Any]]
    stderr: str

    def values(self) -> dict[str, Any]:
        return {name: run["values"] for name, run in self.found.items()}


class Place:
    """Two versions of the package, one of them with another backward; and caches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        source = Path(qfx.__file__).parent
        for package in ("old", "new"):
            kept = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, root / package / "qfx", ignore=kept)
            (root / package / "qfx" / "lib").mkdir(exist_ok=True)
            for file in (FACE, LIBRARY):
                shutil.copy(file, root / package / "qfx" / file.relative_to(FACE.parent))
        with (root / "new/qfx/ops/ste.py").open("a") as file:
            file.write(ANOTHER_FORMULA)

    def run(
        self, package: str, caches: str, load: Path | str = "", save: Path | str = "", **more: str
    ) -> Process:
        """A worker on this version of the package and this directory of caches."""
        where = {"TORCHINDUCTOR_CACHE_DIR": str(self.root / caches / "inductor")}
        arguments = [str(self.root / package), str(load), str(save)]
        if more:  # PyTorch reads them when it is imported
            command, environment = [sys.executable, "-c", WORKER], {**os.environ, **where, **more}
            done = subprocess.run(
                command + arguments, env=environment, capture_output=True, text=True, timeout=300
            )
        else:
            done = run_python(WORKER, *arguments, environment=where)
        assert done.returncode == 0, done.stderr
        return Process(json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def first(place: Place) -> Process:
    """The process that finds empty caches; it also logs, traces, and saves its artifacts."""
    traces = str(place.root / "traces")
    artifacts = place.root / "artifacts"
    return place.run("old", "caches", save=artifacts, TORCH_LOGS="+qfx", TORCH_TRACE=traces)


GRAPHS = {"training": 2, "inference": 1}  # those of Inductor: training has a backward


@pytest.mark.parametrize("run", GRAPHS)
def test_the_first_process_misses(first: Process, run: str) -> None:
    found = first.found[run]
    assert (found["aot_hit"], found["aot_miss"], found["aot_bypass"]) == (0, 1, 0)
    assert (found["fx_hit"], found["fx_miss"], found["fx_bypass"]) == (0, GRAPHS[run], 0)


def _hits(process: Process, run: str) -> bool:
    found = process.found[run]
    aot = (found["aot_hit"], found["aot_miss"], found["aot_bypass"])
    return aot == (1, 0, 0) and (found["fx_hit"], found["fx_miss"]) == (GRAPHS[run], 0)


def test_a_second_process_hits(place: Place, first: Process) -> None:
    second = place.run("old", "caches")
    assert all(_hits(second, run) for run in GRAPHS), second.found
    assert second.values() == first.values()


def test_artifacts_travel_to_empty_caches(place: Place, first: Process) -> None:
    elsewhere = place.run("old", "other_caches", load=place.root / "artifacts")
    assert all(_hits(elsewhere, run) for run in GRAPHS), elsewhere.found
    assert elsewhere.values() == first.values()


@pytest.fixture(scope="module")
def changed(place: Place, first: Process) -> Process:
    """A process with another formula and the caches of the first."""
    return place.run("new", "caches")


def _first_weight_doubled(process: Process, run: str) -> list[list[float]]:
    """The other formula doubles dx, which only the first layer's gradient comes from."""
    first, second = process.values()[run]
    return [[2 * d for d in first], second]


def test_a_changed_formula_gets_its_own_backward(first: Process, changed: Process) -> None:
    found = changed.found["training"]
    assert (found["aot_hit"], found["aot_miss"]) == (0, 1)
    assert found["values"] == _first_weight_doubled(first, "training")


def test_a_changed_formula_hits_what_it_saved(place: Place, changed: Process) -> None:
    again = place.run("new", "caches")
    assert all(_hits(again, run) for run in GRAPHS), again.found
    assert again.values() == changed.values()


@pytest.mark.xfail(strict=True, reason="only the backend puts the digest into the caches' keys")
def test_a_changed_formula_without_the_backend(first: Process, changed: Process) -> None:
    """The same operators, compiled by Inductor without qfx in between."""
    run = "operators_without_the_backend"
    assert changed.found[run]["values"] == _first_weight_doubled(first, run)


def test_the_plan_is_in_the_log_and_in_the_structured_trace(place: Place, first: Process) -> None:
    traces = [file.read_text() for file in (place.root / "traces").iterdir()]
    assert any('"artifact": {"name": "qfx_graph"' in trace for trace in traces)
    for text in (first.stderr, *traces):
        assert "2 of 2 matmuls in int8" in text
        assert "torch.ops.qfx.linear_ste.default" in text


# --- what is in the keys ---


@pytest.mark.parametrize("changed", ["ops/ste.py", "values/scheme.py", FACE.name, "lib/libqfx.so"])
def test_the_digest_covers_sources_and_kernels(
    changed: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place.root / "old" / "qfx", tmp_path / "qfx")

    def digest() -> str:
        return sources.own_digest.__wrapped__()

    monkeypatch.setattr("qfx.io.digest.__file__", str(tmp_path / "qfx/io/digest.py"))
    monkeypatch.setattr("qfx.io.digest.FACE", tmp_path / "qfx" / FACE.name)
    monkeypatch.setattr("qfx.io.digest.LIBRARY", tmp_path / "qfx" / "lib" / LIBRARY.name)
    before = digest()
    assert before == digest()
    with (tmp_path / "qfx" / changed).open("ab") as file:
        file.write(b"\n")
    assert before != digest()


@pytest.fixture(scope="module")
def own_inductor_cache() -> Iterator[None]:
    with fresh_cache():
        yield


class Counted(CustomGraphPass):
    """A pass of the user, each one another to the caches."""

    made = itertools.count()

    def __init__(self) -> None:
        self.calls, self.number = 0, next(self.made)

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return f"counted {self.number}"


def _as_option(model: nn.Module, x: Tensor, passes: Any) -> None:
    compiled(model, inner="inductor", post_grad_custom_pre_pass=passes)(x)


def _as_configuration(model: nn.Module, x: Tensor, passes: Any) -> None:
    with torch._inductor.config.patch(post_grad_custom_pre_pass=passes):
        compiled(model, inner="inductor")(x)


@pytest.mark.parametrize(
    ("given", "several"),
    [
        (_as_option, False),
        pytest.param(_as_option, True, marks=several_passes),
        (_as_configuration, False),
        pytest.param(_as_configuration, True, marks=several_passes),
    ],
)
def test_passes_of_the_user_still_run(
    given: Callable[..., None], several: bool, own_inductor_cache: None
) -> None:
    user = Counted()
    with torch.no_grad():
        given(nn.Linear(8, 8, bias=False), torch.randn(4, 8), [user] if several else user)
    assert user.calls == 1


# --- ahead of time ---


class Tokens(nn.Module):
    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(features, 16), nn.Linear(16, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


STATIC = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True))
AHEAD = {
    "dynamic": (8, qfx.Config(minimum_gain=0), ["xa8r_ws8r_h64", "xa8r_ws8r_h64"]),
    "static": (
        64,
        qfx.Config(
            recipe=qfx.Recipe(
                (
                    qfx.SiteRecipe("a", 0, 16, 64, replace(STATIC, rotation=64), (1.5,) * 64, 0.05),
                    qfx.SiteRecipe("b", 0, 64, 16, STATIC, None, 0.02),  # reads codes of a
                )
            )
        ),
        ["xs8T_ws8r_h64", "xs8T_ws8r"],
    ),
}


@packages
@pytest.mark.parametrize(
    "kind, strict", usual([("dynamic", False)], [("dynamic", False), ("static", True)])
)
def test_export_rewrite_and_package(
    kind: str, strict: bool, tmp_path: Path, own_inductor_cache: None
) -> None:
    """The package has the bits of the rewritten graph, at other batch sizes too."""
    features, config, schemes = AHEAD[kind]
    torch.manual_seed(0)
    model, x = Tokens(features).eval(), torch.randn(4, features)
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=batch, strict=strict)
        gm, plan = qfx.rewrite(program.module(), config)
        assert [str(e.scheme) for e in plan.entries] == schemes
        int8 = torch.export.export(gm, (x,), dynamic_shapes=batch, strict=strict)
        package = torch._inductor.aoti_compile_and_package(
            int8, package_path=str(tmp_path / "tokens.pt2")
        )
        run = torch._inductor.aoti_load_package(package)
        for rows in (4, 7, 1):
            y = torch.randn(rows, features, generator=torch.Generator().manual_seed(rows))
            assert run(y).equal(gm(y)) and not gm(y).equal(model(y))
        check_refused(package, gm, y)
