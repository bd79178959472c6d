"""One module looks whether a tensor is what it was: what it looks with is used nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.project.house import PACKAGE, Module, modules

HOME = "weights.change_detection"
RESTORES = "puts back what was written, and so asks whether anything was"
RUNS = "programs run on addresses"
BYTES = "writes, places or hashes the bytes that lie there"
FILES = "hashes files, texts or code, not tensors"
DIGESTS = "has the digest of tensors that leaves the process"


def _attribute(name: str, of: str = "") -> Callable[[ast.AST], bool]:
    def found(node: ast.AST) -> bool:
        is_it = isinstance(node, ast.Attribute) and node.attr == name
        return is_it and (not of or ast.unparse(node.value) == of)

    return found


def _taken(name: str, of: str) -> Callable[[ast.AST], bool]:
    def found(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom) and node.module == of:
            return name in {alias.name for alias in node.names}
        return False

    return found


def _imported(name: str) -> Callable[[ast.AST], bool]:
    def found(node: ast.AST) -> bool:
        return isinstance(node, ast.Import) and name in {alias.name for alias in node.names}

    return found


# What looks -> how it shows, and the modules that have it: besides the one that looks those that do
# something else.
LOOKS: dict[str, tuple[Callable[[ast.AST], bool], dict[str, str]]] = {
    "stamps and samples": (_attribute("Snapshot", "_C"), {HOME: ""}),
    "a hash of values": (_attribute("content", "_C"), {HOME: ""}),
    "versions": (
        _taken("version", "qfx.host.tensors"),
        {
            HOME: "",
            "weights.model_snapshot": RESTORES,
            "nn.state_part": "stores what a call has written",
        },
    ),
    "addresses": (
        _attribute("data_ptr"),
        {
            HOME: "",
            "io.digest": BYTES,
            "weights.model_snapshot": RESTORES,
            "programs.build_program": RUNS,
            "programs.inputs": RUNS,
            "programs.executor": RUNS,
            "dynamo_backend.program_compiler": RUNS,
            "programs.serialization": RUNS,
            "files.tensor_file": BYTES,
            "weights.offload": BYTES,
            "io.huge_pages": BYTES,
            "ops.experts": BYTES,
            "nn.embedding_weight": "has an address as any table",
            "nn.weight_attributes": "has an address for whoever tells tied parameters by it",
        },
    ),
    "SHA-256": (
        _imported("hashlib"),
        dict.fromkeys(
            (
                "files.loading",
                "files.tensor_file",
                "generate.distributions",
                "generate.program_key",
                "generate.fingerprint",
                "io.atomic_write",
                "io.codes_file",
                "io.disk_cache",
                "io.recipe_files",
            ),
            FILES,
        )
        | {"io.digest": DIGESTS},
    ),
}


def _users(shows: Callable[[ast.AST], bool], house: dict[str, Module]) -> set[str]:
    return {name for name, module in house.items() if any(map(shows, ast.walk(module.tree)))}


@pytest.mark.parametrize("look", LOOKS)
def test_one_module_looks_and_the_others_say_what_else_they_do(look: str) -> None:
    shows, others = LOOKS[look]
    assert _users(shows, modules(PACKAGE)) == {*others}


@pytest.mark.parametrize(
    ("look", "text"),
    [
        ("stamps and samples", "import qfx._C as _C\n_C.Snapshot(t, [0])"),
        ("a hash of values", "def f(t):\n    return _C.content(t)"),
        ("versions", "from qfx.host.tensors import storage_id, version"),
        ("addresses", "if [t.data_ptr() for t in ts] != before:\n    pass"),
        ("SHA-256", "import hashlib"),
    ],
)
def test_what_looks_is_seen(look: str, text: str) -> None:
    shows, _ = LOOKS[look]
    house = {"a": Module(ast.parse(text), frozenset()), "b": Module(ast.parse(""), frozenset())}
    assert _users(shows, house) == {"a"}
