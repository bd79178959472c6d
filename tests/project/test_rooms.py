"""The rooms of qfx: imports go down one list, without circles; private parts of torch stay in host;
no room or module hides a public function; importing qfx is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import qfx
from tests.project.house import PACKAGE, Module, circles, modules, private_uses

# From the bottom up: a room may import those before it, and nothing else of qfx.
ROOMS = (
    "host",
    "io",
    "values",
    "graph",
    "ops",
    "weights",
    "match",
    "nn",
    "files",
    "onnx",
    "hf",
    "vllm",
    "cost",
    "programs",
    "plan",
    "rewriting",
    "pipeline",
    "dynamo_backend",
    "calibration",
    "report",
    "generate",
    "command",
    "__main__",
)
# Rooms that a user imports without compiling anything, and what they must do without.
_HEAVY = {"plan", "cost", "report", "match", "rewriting", "pipeline"}
LIGHT = {"nn": _HEAVY, "files": _HEAVY, "onnx": _HEAVY, "hf": _HEAVY, "vllm": _HEAVY}


@cache
def house() -> dict[str, Module]:
    return modules(PACKAGE)


def _room(name: str) -> str:
    return name.split(".")[0]


def test_every_module_is_in_a_room() -> None:
    assert {_room(name) for name in house() if name} == {*ROOMS}


def test_imports_go_down() -> None:
    floor = {room: i for i, room in enumerate(ROOMS)}
    up = [
        f"{name} imports {other}"
        for name, module in house().items()
        for other in module.imports
        if name and floor[_room(other)] > floor[_room(name)]
    ]
    assert up == []


def test_nothing_imports_in_a_circle() -> None:
    assert circles(house()) == []


@pytest.mark.parametrize("room", LIGHT)
def test_what_a_light_room_does_without(room: str) -> None:
    seen, todo = set[str](), [name for name in house() if _room(name) == room]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += house()[name].imports
    assert {_room(name) for name in seen} & LIGHT[room] == set()


def test_private_parts_of_torch_are_used_in_host_alone() -> None:
    elsewhere = {n: m for n, m in house().items() if _room(n) != "host"}
    found = {name: uses for name, module in elsewhere.items() if (uses := private_uses(module))}
    assert found == {}
    assert sum(len(private_uses(m)) for n, m in house().items() if _room(n) == "host") > 20


def test_no_room_or_module_has_the_name_of_a_public_function() -> None:
    """Its first import would put the module in the function's place."""
    assert {name for name in house() if "." not in name} & {*qfx.__all__} == {"nn", "ops"}


def _public() -> Iterator[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield from ast.literal_eval(node.value)


def test_public_names_are_the_same_whatever_was_imported_before() -> None:
    """Each is asked for twice, and again after every module has been imported, but for those that
    import vLLM, which is not installed."""
    names = sorted(_public())
    every = sorted(n for n in house() if n and (_room(n) != "vllm" or n == "vllm.plugin"))
    script = f"""
import importlib, sys
import qfx
names = {names!r}
first = {{name: getattr(qfx, name) for name in names}}
assert all(getattr(qfx, name) is first[name] for name in names)
for module in {every!r}:
    importlib.import_module("qfx." + module)
changed = [name for name in names if getattr(qfx, name) is not first[name]]
assert not changed, changed
assert set(names) <= set(dir(qfx))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_qfx_loads_no_compiler() -> None:
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "matplotlib", "jinja2")
    code = f"import sys, qfx, qfx.nn; print([m for m in {heavy!r} if m in sys.modules])"
    plain = f"import sys, torch; print([m for m in {heavy!r} if m in sys.modules])"
    ours, torchs = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, plain)
    )
    assert ours == torchs


def test_the_arrows_are_seen(tmp_path: Path) -> None:
    """What these tests look with finds what it is to find."""
    for name, text in {
        "low/a": "from qfx.high.b import f",
        "high/b": "import torch\nfrom torch._dynamo import exc\ntorch._C.x(); f._hidden; f._own",
        "high/c": "def g():\n    from qfx.low import a\nclass D:\n    _own = 1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    found = modules(tmp_path)
    assert found["low.a"].imports == {"high.b"} and found["high.c"].imports == {"low.a"}
    assert private_uses(found["high.b"], {"_own"}) == ["_hidden", "torch._C", "torch._dynamo"]
    (tmp_path / "high/b.py").write_text("import qfx.low.a")
    assert circles(modules(tmp_path)) == [["high.b", "low.a"]]
