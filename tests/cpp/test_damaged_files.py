"""Files from anywhere: the library of programs refuses with a sentence what Python refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qfx.files.tensor_file import write_tensors
from qfx.generate import save_program
from qfx.generate.decoder import KEY
from qfx.io.safe_read import parsed
from tests.cpp.test_c_api import library  # noqa: F401  (a fixture)
from tests.generate import program_files
from tests.generate.program_files import Tensors, changed, read
from tests.generate.test_program_files import CHANGES, into_slot
from tests.lib.c_programs import CError, CLibrary
from tests.lib.decoders import ids
from tests.lib.encoders import encoder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_files.saved(tmp_path_factory.mktemp("programs"))


def written(path: Path, text: str, tensors: Tensors) -> Path:
    with path.open("wb") as file:
        write_tensors(file, tensors, {KEY: text})
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_what_python_refuses(
    name: str,
    path: Path,
    tmp_path: Path,
    library: CLibrary,  # noqa: F811
) -> None:
    text, tensors = read(path)
    told = json.loads(text)
    CHANGES[name][0](told, tensors)
    with pytest.raises(CError) as error:
        library.load(written(tmp_path / "changed", json.dumps(told), tensors))
    assert error.value.status == "refused" and len(error.value.text) > 60


def test_memory_is_limited_to_the_byte(path: Path, library: CLibrary) -> None:  # noqa: F811
    with pytest.raises(CError, match="bytes, and max_memory is 1"):
        library.load(path, 1)
    with pytest.raises(CError, match=r"it needs [0-9]+ bytes of memory") as error:
        library.load(path, path.stat().st_size)
    needed = int(error.value.text.partition("it needs ")[2].split()[0])
    library.load(path, needed)
    with pytest.raises(CError, match="it needs"):
        library.load(path, needed - 1)
    with pytest.raises(ValueError, match=f"needs {needed} bytes"):
        program_files.Decoder(json.loads(read(path)[0]), read(path)[1], needed - 1)


def test_programs_write_to_their_cache_alone(
    path: Path,
    tmp_path: Path,
    library: CLibrary,  # noqa: F811
) -> None:
    text, tensors = read(path)
    described = json.loads(text)["programs"]["1"]
    held, given = len(described["constants"]), described["given"]
    places = {"its weights": 1, "only to the cache": 1 + held + given.index(["input", 1])}
    for message, place in places.items():
        told, own = json.loads(text), dict(tensors)
        into_slot(told, own, place)
        with pytest.raises(CError, match=message):
            library.load(written(tmp_path / "changed", json.dumps(told), own))


def header(change: Callable[[str], str | bytes]) -> Callable[[bytes], bytes]:
    """Changes the header of a file, and its length."""

    def whole(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = change(data[8 : 8 + length].decode())
        text = found if isinstance(found, bytes) else found.encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return whole


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "fewer than 8 bytes"),
    "a longer header": (lambda d: b"\xff" * 8 + d[8:], "its header has 18446744073709551615 bytes"),
    "cut off": (lambda d: d[:-1], "and its header says"),
    "longer": (lambda d: d + b"0", "and its header says"),
    "a list": (header(lambda t: "[]"), "its header is a list of 0, expected an object"),
    "deep": (header(lambda t: "[" * 10**6), "nested too deeply"),
    "many": (header(lambda t: "[" + "0," * 2**21 + "0]"), "too many values"),
    "open": (header(lambda t: t.rstrip()[:-1]), "an object does not end"),
    "more": (header(lambda t: t + "1"), "there is more after its end"),
    "twice": (header(lambda t: '{"a": 1, "a": 1}'), "a key stands twice"),
    "no number": (header(lambda t: '{"a": 01}'), "a number begins with 0"),
    "an escape": (header(lambda t: r'{"\x": 1}'), "an unknown escape"),
    "a surrogate": (header(lambda t: r'{"\ud800": 1}'), "half a surrogate pair"),
    "a control character": (header(lambda t: '{"a\n": 1}'), "a control character"),
    "a zero byte": (header(lambda t: "{\0}"), "a key is not a string"),
    "no value": (header(lambda t: '{"a": nul}'), "a value was expected"),
    "a gap": (
        header(lambda t: t.replace('"data_offsets": [0,', '"data_offsets": [1,', 1)), "bytes, and",
    ),
    "no type": (header(lambda t: t.replace('"U8"', '"U9"')), "of type 'U9'"),
    "a large shape": (
        header(lambda t: t.replace('"shape": [', '"shape": [281474976710656, 281474976710656, ')),
        "is too large",
    ),
    "a negative shape": (
        header(lambda t: t.replace('"shape": [', '"shape": [-1, ')), "is -1, expected an integer",
    ),
    "no programs": (header(lambda t: t.replace(KEY, "qfx_other")), "it holds no programs"),
    "no words": (header(lambda t: t.replace('"I64"', '"U64"')), "instructions of type U64"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damages(name: str, path: Path, tmp_path: Path, library: CLibrary) -> None:  # noqa: F811
    change, message = DAMAGES[name]
    (tmp_path / "changed").write_bytes(change(path.read_bytes()))
    with pytest.raises(CError, match=message) as error:
        library.load(tmp_path / "changed")
    assert error.value.status == "refused"
    assert str(tmp_path)[:40] in error.value.text


def test_what_is_no_file(tmp_path: Path, library: CLibrary) -> None:  # noqa: F811
    for path, message in (("/dev/zero", "no file"), (tmp_path, "a folder"), ("none", "No such")):
        with pytest.raises(CError, match=message) as error:
            library.load(path)
        assert error.value.status == "file"


def ends(library: CLibrary, path: Path, text: str, tensors: Tensors) -> tuple[str, str]:  # noqa: F811
    """Whether a changed decoder runs in Python and in C++."""
    python = program_files.tried(text, tensors).partition(",")[0]
    try:
        found = library.load(written(path, text, tensors))
        about = found.decoder()
        logits = found.read(ids(about.batch, 5))
        for _ in range(2):
            logits = found.read(logits.argmax(-1)[:, None])
        found.reset()
        found.read(ids(about.batch, min(about.length, 130)))
    except CError as why:
        return python, "not loaded" if "_load" in why.text else "not run"
    return python, "runs"


def test_changed_files(path: Path, tmp_path: Path, library: CLibrary) -> None:  # noqa: F811
    """Files with random changes run in both, or in neither."""
    text, tensors = read(path)
    draw = random.Random(1)
    differ = []
    for _ in range(60):
        case = changed(text, tensors, draw)
        try:
            parsed(case[0], "no programs")
        except ValueError:
            continue
        python, c = ends(library, tmp_path / "changed", *case)
        if python != c:
            differ.append((python, c))
    assert differ == []


def test_a_graph_of_other_sizes(tmp_path: Path, library: CLibrary) -> None:  # noqa: F811
    save_program(encoder()[0], tmp_path / "encoder")
    text, tensors = read(tmp_path / "encoder")
    for change, message in (
        (lambda g: g["bytes"].__setitem__(0, 2**39), "bytes of working memory"),
        (lambda g: g["inputs"].append(g["inputs"][0] * 2), "has 4 fields, expected 2"),
        (lambda g: g["given"].append(["input", 0]), "two slots have the same memory"),
        (lambda g: g["results"][0].__setitem__(4, 2**40), "a result that exceeds its"),
        (lambda g: g["results"].pop(), "writes to memory that is no result"),
        (lambda g: g.update(words="none"), "it has no tensor 'none'"),
        (lambda g: g["constants"].append("none"), "it has no tensor 'none'"),
        (lambda g: g.pop("made"), "it does not say 'made'"),
    ):
        told = json.loads(text)
        change(told["graph"])  # type: ignore[no-untyped-call]
        with pytest.raises(CError, match=message):
            library.load(written(tmp_path / "changed", json.dumps(told), tensors))
    assert torch.is_tensor(tensors[told["graph"]["words"]])
