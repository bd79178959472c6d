"""Files that are truncated, damaged, hostile or another's: each is refused by a sentence that names
the file, before anything of the skeleton changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from tests.conftest import same_bits
from tests.lib.mutations import mutated
from tests.nn.test_nn_linear import outputs

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
HEAD = 8  # bytes of a file before its table


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 2, bias=False)
        self.c = nn.Linear(2, 2, bias=False)
        self.register_buffer("on", torch.tensor([True, False, True]))
        self.register_buffer("shift", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) + self.shift * self.on[:2]  # type: ignore[operator]


def skeleton() -> nn.Module:
    return Small().to("meta")


def made(sign: float = 1.0) -> nn.Module:
    """Two linears int8, one of one bit."""
    model = Small()
    model.a.weight.data.mul_(sign)
    model.c = qfx.nn.SignLinear.from_float(model.c)  # type: ignore[assignment]
    return qfx.quantize_(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    qfx.save(made(), path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    return outputs(qfx.load(folder, skeleton()), X)


def data_of(folder: Path) -> Path:
    """The one file of tensors of a saved folder."""
    (path,) = folder.glob("model-*.safetensors")
    return path


def refused_or(path: Path, named: Path, accepted: Callable[[nn.Module], bool]) -> str:
    """What was said of it, '' where it was loaded."""
    model = skeleton()
    before = {name: id(module) for name, module in model.named_modules()}
    try:
        qfx.load(path, model)
    except ValueError as why:
        text = str(why)
        assert str(named) in text and all(c.isprintable() for c in text), text
        assert {name: id(module) for name, module in model.named_modules()} == before
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
        return text
    assert accepted(model)
    return ""


def changed(data: bytes, places: st.SearchStrategy[int], draw: Any) -> bytes:
    """Some bytes are others, or left out, or there twice."""
    at, length = draw(places), draw(st.sampled_from([1, 2, 8, 100, len(data)]))
    kind = draw(st.sampled_from(["flip", "cut", "twice", "zero", "ones", "end"]))
    piece = data[at : at + length]
    new = {
        "flip": bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + piece[1:],
        "cut": b"",
        "twice": piece * 2,
        "zero": bytes(len(piece)),
        "ones": b"\xff" * len(piece),
        "end": b"",
    }[kind]
    return data[:at] + new + (b"" if kind == "end" else data[at + len(piece) :])


@given(st.data())
def test_any_change_of_the_tensors_is_refused(
    folder: Path, expected: Tensor, tmp_path_factory: Any, data: st.DataObject
) -> None:
    path: Path = tmp_path_factory.mktemp("damaged")
    whole = data_of(folder).read_bytes()
    new = changed(whole, st.integers(0, len(whole) - 1), data.draw)
    shutil.copy(folder / "qfx.json", path)
    name = data_of(folder).name
    (path / name).write_bytes(new)
    said = refused_or(path, path, lambda m: new == whole)
    assert said == "" if new == whole else name in said


@given(st.data())
def test_a_forged_digest_does_not_help(
    folder: Path, expected: Tensor, tmp_path_factory: Any, data: st.DataObject
) -> None:
    """Whoever can write the file can write what is said of it. What is then accepted has the types
    and shapes of the skeleton, and codes and scales that quantizing makes."""
    path: Path = tmp_path_factory.mktemp("forged")
    whole = data_of(folder).read_bytes()
    table = HEAD + int.from_bytes(whole[:HEAD], "little")
    places = st.integers(0, table - 1) | st.integers(table, len(whole) - 1)
    forge(folder, path, changed(whole, places, data.draw))
    refused_or(path, path, usable)


def usable(model: nn.Module) -> bool:
    whole = {n: (t.dtype, t.shape) for n, t in Small().state_dict().items()}
    linears = [m for m in model.modules() if isinstance(m, qfx.nn.Linear)]
    assert len(linears) == 2 and isinstance(model.c, qfx.nn.SignLinear)
    assert outputs(model, X).shape == (3, 2) and bool((model.c.scale > 0).all())
    for module in linears:
        assert bool((module.scale > 0).all()) and int(module.codes.abs().max()) <= 127
    rest = {n: t for n, t in model.state_dict().items() if n in whole}
    return all(whole[n][1] == t.shape and not t.is_meta for n, t in rest.items())


def forge(folder: Path, path: Path, data: bytes) -> None:
    said = json.loads((folder / "qfx.json").read_text())
    digest = hashlib.sha256(data).hexdigest()
    name = data_of(folder).name
    said["files"][name] |= {"size": len(data), "sha256": digest}
    (path / "qfx.json").write_text(json.dumps(said))
    (path / name).write_bytes(data)


def header(folder: Path) -> tuple[dict[str, Any], bytes]:
    whole = data_of(folder).read_bytes()
    end = HEAD + int.from_bytes(whole[:HEAD], "little")
    return json.loads(whole[HEAD:end]), whole[end:]


def file_of(table: str, data: bytes) -> bytes:
    text = table.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(HEAD, "little") + text + data


def test_any_change_of_the_table_is_refused_or_harmless(folder: Path, tmp_path: Path) -> None:
    """Every type, shape and offset is another, left out or there twice, digests forged."""
    table, data = header(folder)
    few = {n: table[n] for n in ("__metadata__", "b.scale", "b.codes", "on")}
    rest = {n: v for n, v in table.items() if n not in few}
    inner = json.dumps(rest)[1:-1]
    count = accepted = 0
    for text in mutated(json.dumps(few)):
        if len(text) > 20_000 or not text.startswith("{") or not text.endswith("}"):
            continue
        count += 1
        joined = f"{text[:-1]}{', ' if len(text) > 2 else ''}{inner}}}"
        forge(folder, tmp_path, file_of(joined, data))
        accepted += refused_or(tmp_path, tmp_path, usable) == ""
    assert count > 1000 and accepted < count / 10, (count, accepted)


def test_any_change_of_the_description_is_refused_or_harmless(
    folder: Path, expected: Tensor, tmp_path: Path
) -> None:
    shutil.copy(data_of(folder), tmp_path)
    count = accepted = 0
    for text in mutated((folder / "qfx.json").read_text()):
        count += 1
        (tmp_path / "qfx.json").write_bytes(text.encode("utf-8", "surrogatepass"))

        def alike(model: nn.Module) -> bool:
            return same_bits(outputs(model, X), expected)

        accepted += refused_or(tmp_path, tmp_path, alike) == ""
    assert count > 1000 and accepted < count / 10, (count, accepted)


def _table(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], Any]:
    def damage(folder: Path, path: Path) -> None:
        table, data = header(folder)
        change(table)
        forge(folder, path, file_of(json.dumps(table), data))

    return damage


def _said(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], Any]:
    def damage(folder: Path, path: Path) -> None:
        shutil.copy(data_of(folder), path)
        said = json.loads((folder / "qfx.json").read_text())
        change(said)
        (path / "qfx.json").write_text(json.dumps(said))

    return damage


def _bytes(at: str, value: bytes) -> Callable[[Path, Path], Any]:
    """The first bytes of a tensor, digests forged."""

    def damage(folder: Path, path: Path) -> None:
        table, data = header(folder)
        begin = table[at]["data_offsets"][0]
        data = data[:begin] + value + data[begin + len(value) :]
        forge(folder, path, file_of(json.dumps(table), data))

    return damage


def _twice(folder: Path, path: Path) -> None:
    table, data = header(folder)
    text = json.dumps(table)
    forge(folder, path, file_of(f'{text[:-1]}, "on": {json.dumps(table["on"])}}}', data))


def _in_two_files(folder: Path, path: Path) -> None:
    other = "model-0123456789abcdef.safetensors"
    _said(lambda said: said["files"].update({other: _file(said)}))(folder, path)
    shutil.copy(data_of(folder), path / other)


def _of_another(folder: Path, path: Path) -> None:
    qfx.save(made(-1.0), path)
    data_of(path).replace(path / data_of(folder).name)
    shutil.copy(folder / "qfx.json", path)


def _file(said: dict[str, Any]) -> dict[str, Any]:
    (file,) = said["files"].values()
    return file  # type: ignore[no-any-return]


def _seven_bytes(folder: Path, path: Path) -> None:
    shutil.copy(folder / "qfx.json", path)
    (path / data_of(folder).name).write_bytes(b"1234567")


SHA = "0" * 64
ONE_BIT_OF_X = b"".join(n.to_bytes(4, "little") for n in (1, 4, 1))
DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    "qfx.json names it": lambda f, p: shutil.copy(f / "qfx.json", p),
    r"model-\w{16}\.safetensors has 7 bytes, and qfx.json says": _seven_bytes,
    r"model-\w{16}\.safetensors has changed since it was saved": _of_another,
    "overflow computing buffer size": _table(lambda t: t["on"].update(shape=[2**40, 2**40])),
    "invalid offset": _table(lambda t: t["on"].update(data_offsets=[2**60, 2**60 + 3])),
    "is of type F4, which this qfx does not read": _table(
        lambda t: t["on"].update(dtype="F4", shape=[6])
    ),
    r"z has a shape of \[0, 18446744073709551615\]": _table(
        lambda t: t.update(z={"dtype": "I8", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]})
    ),
    "'on' stands twice in one object": _twice,
    "does not hold what qfx.json says": _said(
        lambda s: _file(s)["tensors"].append("more")
    ),
    "in two files": _in_two_files,
    "SHA-256 is .*, and qfx.json says 0000": _said(
        lambda s: _file(s).update(sha256=SHA)
    ),
    "is no name of a file of a saved model": _said(
        lambda s: s["files"].update({"../model.safetensors": _file(s)})
    ),
    "has format 3, and this qfx reads formats 1 and 2": _said(lambda s: s.update(qfx_model=3)),
    r"model-\w{16}\.safetensors is no name of a file": _said(lambda s: s.update(qfx_model=1)),
    r"\['colour'\] is missing or not known": _said(lambda s: s.update(colour=1)),
    r"\['same'\] is missing or not known": _said(lambda s: s.pop("same")),
    "a is xa8r_ws8r_h64, and qfx.json says xs8r_ws8r": _said(
        lambda s: s["linears"].update(a="xs8r_ws8r")
    ),
    "nonesuch is an int8 linear, and the skeleton has nothing": _said(
        lambda s: s["linears"].update(nonesuch="xs8r_ws8r")
    ),
    "b is said to be the linear a, and the files do|b.codes is said to be a.codes": _said(
        lambda s: s["same"].update({"b.codes": "a.codes"})
    ),
    "more is said to be nonesuch": _said(lambda s: s["same"].update(more="nonesuch")),
    "says that there is more, and there is not": _said(lambda s: s["derived"].append("more")),
    "holds a byte that is no bool": _bytes("on", b"\2"),
    r"a.scale holds nan at \[0\], which is not finite and positive": _bytes(
        "a.scale", b"\0\0\xc0\x7f"
    ),
    r"a\.codes holds -?\d+, which is outside -64\.\.63": _bytes(
        "a.scheme", struct.pack("<8i", 1, 1, 8, 0, 0, 0, 0, 7)
    ),
    "a.scheme has format 9": _bytes("a.scheme", b"\x09\0\0\0"),
    "c.signs holds 4, which is outside 0..3": _bytes("c.signs", b"\4"),
    "c.scheme does not say what linears of one bit say": _bytes("c.scheme", ONE_BIT_OF_X),
    "c.scheme is that of a LSQLinear, not of a SignLinear": _bytes("c.scheme", b"\1\0\0\0\2"),
    r"c has signs \[1, 2\], and the linear of the skeleton a weight \[2, 2\]": _table(
        lambda t: t["c.signs"].update(shape=[1, 2])
    ),
    r"c.signs is torch.int8 \[2, 1\], expected torch.uint8": _table(
        lambda t: t["c.signs"].update(dtype="I8")
    ),
    "c.x_scale holds -.* finite and positive": _bytes("c.x_scale", b"\0\0\x80\xbf"),
    "c is 1 bit, and qfx.json says xs8r_ws8r": _said(lambda s: s["linears"].update(c="xs8r_ws8r")),
    "c.signs is said to be a.codes": _said(lambda s: s["same"].update({"c.signs": "a.codes"})),
    "is no text": lambda f, p: (p / "qfx.json").write_bytes(b"\xff{}"),
    "it is not JSON": lambda f, p: (p / "qfx.json").write_bytes(b"{"),
    "has no qfx_model": lambda f, p: (p / "qfx.json").write_bytes(b"[]"),
    "has no qfx.json, so qfx.save did not write it": lambda f, p: None,
    "from_pretrained reads after `import qfx.hf`": lambda f, p: (
        (p / "config.json").write_text("{}")
    ),
}  # fmt: skip


@pytest.mark.parametrize("phrase", DAMAGES)
def test_what_is_said_of_a_damaged_folder(phrase: str, folder: Path, tmp_path: Path) -> None:
    DAMAGES[phrase](folder, tmp_path)
    said = refused_or(tmp_path, tmp_path, lambda m: False)
    with pytest.raises(ValueError, match=phrase):
        raise ValueError(said)


def test_a_folder_may_be_named_by_its_description(folder: Path, expected: Tensor) -> None:
    assert same_bits(outputs(qfx.load(folder / "qfx.json", skeleton()), X), expected)
