"""Files of programs from anywhere: memory and work are bounded by what they bring."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qfx.files.tensor_file import write_tensors
from qfx.generate import load_programs
from qfx.generate.decoder import KEY
from qfx.generate.layout import with_rings
from qfx.generate.program_file import ProgramFile
from qfx.programs.bytecode import OPERATIONS
from tests.generate import program_files
from tests.generate.program_files import Tensors, hunt, read, tried
from tests.lib.decoders import ids
from tests.programs.written import floats

Change = Callable[[Any, Tensors], Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_files.saved(tmp_path_factory.mktemp("programs"))


def agreed(told: Any) -> None:
    """All programs have the inputs that the rest of the file says."""
    shapes = tuple((heads, features) for heads, features in told["shapes"])
    layout = with_rings(told["length"], dict(told["windows"]), told["layers"])
    file = ProgramFile(layout, 1, shapes, (8, 8), {})
    for rows, each in told["programs"].items():
        each["inputs"] = file.inputs(int(rows))


def windows(told: Any, _: Tensors) -> None:
    """Two hundred kinds of layers, whose masks are inputs of every program."""
    told["windows"] += [[f"kind {i}", None] for i in range(198)]
    agreed(told)


def long(told: Any, _: Tensors) -> None:
    """A cache of 2^40 tokens in all layers, which all programs agree on."""
    told.update(length=2**40, windows=[[kind, None] for kind, _ in told["windows"]])
    agreed(told)


def rings(told: Any, _: Tensors) -> None:
    """2^40 tokens, of which a small cache holds the last."""
    told.update(length=2**40, windows=[["full_attention", 8], ["sliding_attention", 8]])
    agreed(told)


def again(told: Any, tensors: Tensors) -> None:
    """All instructions of a step 3,000 times."""
    name = told["programs"]["128"]["words"]
    tensors[name] = tensors[name].repeat(3000)


CHANGES: dict[str, tuple[Change, str]] = {
    "an infinite length": (lambda told, _: told.update(length=1e999), "length=inf: expected"),
    "a long length": (lambda told, _: told.update(length=2**40), "that do not fit the cache"),
    "a length of bool": (lambda told, _: told.update(length=True), "length=True: expected"),
    "no texts": (lambda told, _: told.update(batch=0), "batch=0: expected an integer from 1"),
    "a window of part of a key": (
        lambda told, _: told["windows"][0].__setitem__(1, 0.5), "window=0.5: expected an integer",
    ),
    "more windows than masks": (
        lambda told, _: told["windows"].extend([["a", None]] * 200), "that do not fit the cache",
    ),
    "layers of no window": (
        lambda told, _: told.update(layers=["a", "b"]), "of the kind 'a', and the file has",
    ),
    "fewer layers than caches": (
        lambda told, _: told["layers"].pop(), "2 shapes of caches and 1 layers",
    ),
    "layers of another kind": (
        lambda told, _: told["layers"].reverse(), "that do not fit the cache",
    ),
    "a longer window": (
        lambda told, _: told["windows"][1].__setitem__(1, 24), "that do not fit the cache",
    ),
    "no window": (
        lambda told, _: told["windows"][1].__setitem__(1, None), "that do not fit the cache",
    ),
    "a long text of rings": (rings, "bytes of working"),
    "bits": (lambda told, _: told.update(bits=[8, 5]), "expected two numbers, each 4 or 8"),
    "rows": (lambda told, _: told["programs"].update({"3": {}}), "of '3' tokens, expected one of"),
    "no program of one token": (lambda told, _: told["programs"].pop("1"), "of one token"),
    "its own memory": (
        lambda told, _: told["programs"]["1"]["bytes"].__setitem__(0, 2**40), "bytes of working",
    ),
    "a negative memory": (
        lambda told, _: told["programs"]["1"]["bytes"].__setitem__(0, -1), "of memory: expected",
    ),
    "other logits": (
        lambda told, _: told["programs"]["1"]["results"][0].__setitem__(1, "int64"), "int64",
    ),
    "logits without memory": (
        lambda told, _: told["programs"]["1"]["results"][0].__setitem__(
            slice(2, 4), [[1, 1, 2**40], [0, 0, 0]]
        ),
        "a result that exceeds its",
    ),
    "a result nobody gets": (
        lambda told, _: told["programs"]["1"]["results"].append(
            told["programs"]["1"]["results"][0]
        ),
        "too many values",
    ),
    "a long cache": (long, r"with 1099511627776 tokens needs"),
    "work": (again, r"operations, and .* explain at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_refused(name: str, path: Path, tmp_path: Path) -> None:
    text, tensors = read(path)
    change, message = CHANGES[name]
    told = json.loads(text)
    change(told, tensors)
    with (tmp_path / "changed").open("wb") as file:
        write_tensors(file, tensors, {KEY: json.dumps(told)})
    with pytest.raises(ValueError, match=message):
        load_programs(tmp_path / "changed")


def test_masks_of_many_windows_are_counted(path: Path) -> None:
    """Against the memory that there is: 198 more masks of 128 x 192, each made twice, and what they
    are parts of."""
    text, tensors = read(path)
    told = json.loads(text)
    with pytest.raises(ValueError, match=r"needs ([0-9]+) bytes") as error:
        load_programs(path, max_memory=1)
    needed = int(re.findall("needs ([0-9]+) bytes", str(error.value))[0])
    load_programs(path, max_memory=needed)
    windows(told, tensors)
    with pytest.raises(ValueError, match=f"needs {needed + 198 * (2 * 128 + 4) * 192} bytes"):
        program_files.Decoder(told, tensors, needed)


def test_the_machine_is_the_default_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"max_memory is 10000"):
        load_programs(path)


def test_changed_files(path: Path) -> None:
    """Some of what `python -m tests.generate.program_files` tries: all run or are refused."""
    ends = hunt(path, 1, 200, lambda _: None)
    assert ends.total() == 200 and ends["runs"] and ends["not loaded, UserError"]


def test_an_unchanged_file_runs(path: Path) -> None:
    assert tried(*read(path)) == "runs"


def test_ctrl_c_ends_a_program() -> None:
    """Which would otherwise run for minutes."""
    program = (
        "import os, signal, threading, time, torch\n"
        "from qfx._C import Program\n"
        "from qfx.programs.bytecode import OPERATIONS\n"
        "n = 2**22\n"
        "part = lambda slot: [slot, 0, 0, 1, n, 1]\n"
        "words = [OPERATIONS.index('copy'), *part(1), *part(2)]\n"
        "p = Program([len(words), *words] * 100_000, [0, 4 * n, 4 * n], [0, 0, 0])\n"
        "a, b = torch.ones(n), torch.ones(n)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try: p.run([a.data_ptr(), b.data_ptr()])\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "interrupted\n", done.stderr


def into_slot(told: Any, tensors: Tensors, place: int) -> None:
    """The first instruction of a step writes to this slot of its program."""
    name = told["programs"]["1"]["words"]
    own = [OPERATIONS.index("copy"), *floats(place, 1), *floats(0, 1)]
    tensors[name] = torch.cat([torch.tensor([len(own), *own]), tensors[name]])


def test_a_program_writes_to_its_cache_alone(path: Path) -> None:
    text, tensors = read(path)
    described = json.loads(text)["programs"]["1"]
    held, given = len(described["constants"]), described["given"]
    places = {"weights": 1, "only to the cache": 1 + held + given.index(["input", 1])}
    for message, place in places.items():
        told, changed = json.loads(text), dict(tensors)
        into_slot(told, changed, place)
        with pytest.raises(ValueError, match=message):
            program_files.Decoder(told, changed)


def test_a_read_that_fails_leaves_all_as_it_was(path: Path) -> None:
    found, other = load_programs(path), load_programs(path)
    for each in (found, other):
        each.read(ids(1, 5))
    seen = torch.ones(1, 4, dtype=torch.int64)
    seen[0, 0] = 0
    with pytest.raises(IndexError, match="vocabulary"):
        found.read(ids(1, 4) + 500, seen)
    assert torch.equal(found.read(ids(1, 3)), other.read(ids(1, 3)))


def test_ids_of_a_decoder(path: Path) -> None:
    found = load_programs(path)
    expected = found.generate(ids(1, 5), 3)
    found.reset()
    assert torch.equal(found.generate(ids(1, 5).int(), 3), expected)
