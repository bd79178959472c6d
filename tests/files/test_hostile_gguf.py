"""GGUF files that are truncated, damaged or hostile: each is refused by a sentence that names the
file, before anything of the skeleton changes, or is a model with finite scales."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qfx
from tests.files.test_hostile_files import changed
from tests.files.test_hostile_imports import refused
from tests.files.test_import import Net, meta, net_file
from tests.lib.gguf_files import Kind, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> bytes:
    path: Path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    net_file(path, Kind.Q4_0, Kind.Q8_0)
    return path.read_bytes()


def head(whole: bytes) -> int:
    """Where the tensors begin: behind the last name and its place."""
    return -(-(whole.index(b"up.bias") + 40) // 32) * 32


@given(st.data())
def test_any_change_of_a_gguf_file(whole: bytes, tmp_path_factory: Any, data: Any) -> None:
    places = st.integers(0, head(whole)) | st.integers(0, len(whole) - 1)
    path: Path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    path.write_bytes(changed(whole, places, data.draw))
    refused(path, meta(Net))


def test_every_truncation_of_a_gguf_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    padding = 8  # behind the last tensor
    for end in [*range(0, head(whole) + 8, 5), len(whole) - padding - 1]:
        path.write_bytes(whole[:end])
        assert refused(path, meta(Net)), end


def test_every_number_of_a_gguf_file_may_be_any(whole: bytes, tmp_path: Path) -> None:
    """Counts, lengths, types and offsets, wherever they lie."""
    path, accepted, count = tmp_path / "a.gguf", 0, 0
    for at in range(4, head(whole), 3):
        for number in (0, 2**32 - 1, 2**63, 2**64 - 32):
            raw = struct.pack("<Q", number)
            path.write_bytes(whole[:at] + raw + whole[at + 8 :])
            accepted += refused(path, meta(Net)) == ""
            count += 1
    assert count > 200 and accepted < count / 4, (count, accepted)


TYPES = {"B": 0, "I": 4, "f": 6, "Q": 10}


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_of(
    fields: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3
) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(fields))
    table = b"GGUF" + counts + b"".join(fields) + b"".join(tensors)
    return table + bytes(-len(table) % 32) + data


def field(name: bytes, kind: int, raw: bytes) -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + raw


def tensor(name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return gguf_text(name) + packed


U32, TEXT, ARRAY = 4, 8, 9
ONE = tensor(b"a", (32,))
GGUF: dict[str, bytes] = {
    "is GGUF of version 1, and 2 and 3 are read": gguf_of([], [], version=1),
    "is a big-endian GGUF file": gguf_of([], [], version=3 << 24),
    "is cut off: it has .* bytes for 4294967296 tensors": b"GGUF"
    + struct.pack("<IQQ", 3, 2**32, 0),
    "is cut off: the field a takes 9223372036854775808 bytes": gguf_of(
        [field(b"a", TEXT, struct.pack("<Q", 2**63))], []
    ),
    "the name of a field has 65537 bytes": gguf_of([gguf_text(b"a" * 65537)], []),
    "the name of a field is no text": gguf_of([field(b"\xff", U32, bytes(4))], []),
    "the field a is of type 99, which GGUF does not have": gguf_of([field(b"a", 99, b"")], []),
    "the field a is an array of type 9, which is not read": gguf_of(
        [field(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []
    ),
    "the field a takes 73786976294838206460 bytes": gguf_of(
        [field(b"a", ARRAY, struct.pack("<IQ", U32, 2**64 - 1))], []
    ),
    "the field a has 1152921504606846976 strings": gguf_of(
        [field(b"a", ARRAY, struct.pack("<IQ", TEXT, 2**60))], []
    ),
    "has the field a twice": gguf_of([field(b"a", U32, bytes(4))] * 2, []),
    "has the tensor a twice": gguf_of([], [ONE, ONE], bytes(256)),
    "the alignment 3 is no power of two": gguf_of(
        [field(b"general.alignment", U32, struct.pack("<I", 3))], []
    ),
    "a has 5 axes, and GGUF at most 4": gguf_of([], [tensor(b"a", (1,) * 5)]),
    "a is of type 77, of which the installed gguf knows nothing": gguf_of(
        [], [tensor(b"a", (32,), 77)]
    ),
    r"a is Q4_0, blocks of 32, and has a shape of \[33\]": gguf_of([], [tensor(b"a", (33,), 2)]),
    r"a is F32 \[4294967296, 4294967296\] at byte 96, 73786976294838206464 bytes": gguf_of(
        [], [tensor(b"a", (2**32, 2**32))]
    ),
    r"a is F32 \[18446744073709551615, 0\]": gguf_of([], [tensor(b"a", (0, 2**64 - 1))]),
    r"a is F32 \[32\] at byte 18446744073709551648": gguf_of(
        [], [tensor(b"a", (32,), 0, 2**64 - 32)], bytes(256)
    ),
    "a and b overlap": gguf_of([], [ONE, tensor(b"b", (32,), 0, 64)], bytes(256)),
    "is of the architecture 'gemma', and qfx.load reads llama": gguf_of(
        [field(b"general.architecture", TEXT, gguf_text(b"gemma"))], [ONE], bytes(128)
    ),
    "is one of 3 parts of a model": gguf_of(
        [field(b"split.count", U32, struct.pack("<I", 3))], [ONE], bytes(128)
    ),
    "is of the architecture None": gguf_of([], [ONE], bytes(128)),
    "says None for llama.block_count": gguf_of(
        [field(b"general.architecture", TEXT, gguf_text(b"llama"))], [ONE], bytes(128)
    ),
    "says that there are 4000000000 blocks, and has 1 tensors": gguf_of(
        [
            field(b"general.architecture", TEXT, gguf_text(b"llama")),
            field(b"llama.block_count", U32, struct.pack("<I", 4 * 10**9)),
        ],
        [ONE],
        bytes(128),
    ),
}


@pytest.mark.parametrize("phrase", GGUF)
def test_what_is_said_of_a_damaged_gguf_file(phrase: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(GGUF[phrase])
    skeleton = meta(Net)
    with pytest.raises(ValueError, match=rf"a\.gguf.*{phrase}"):
        qfx.load(tmp_path / "a.gguf", skeleton)


HEADS = "llama.attention.head_count"


def test_heads_that_do_not_fit_the_rows(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([nn.Module()])
            self.model.layers[0].self_attn = nn.Module()
            self.model.layers[0].self_attn.q_proj = nn.Linear(32, 32, bias=False)

    w = {"blk.0.attn_q.weight": (torch.randn(32, 32), Kind.Q8_0)}
    path = tmp_path / "a.gguf"
    for heads, phrase in {
        3: "blk.0.attn_q.weight has 32 rows, which do not make 3 heads of pairs",
        0: f"says 0 for {HEADS}, which is no count",
        None: f"says None for {HEADS}, which is no count",
    }.items():
        said = {"llama.block_count": 1} | ({} if heads is None else {HEADS: heads})
        write_gguf(path, w, said)
        assert phrase in refused(path, meta(One))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_scale_that_is_not_finite(kind: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    w = torch.zeros(2, 32)
    write_gguf(path, {"0.weight": (w, Kind[kind])})
    data = path.read_bytes()
    block = 34 if kind == "Q8_0" else 18
    begin = data.index(b"0.weight") + 8 + 4 + 16 + 4 + 8
    begin = -(-begin // 32) * 32 + block
    raw = torch.tensor(value).half().view(torch.int16).item()
    path.write_bytes(data[:begin] + struct.pack("<h", raw) + data[begin + 2 :])
    text = refused(path, meta(lambda: nn.Sequential(nn.Linear(32, 2, bias=False))))
    assert f"0.weight: scale holds {value} at [1, 0], which is not finite" in text


def test_schemes_that_no_operator_computes(tmp_path: Path) -> None:
    net_file(tmp_path / "a.gguf", Kind.Q8_0)
    for x, phrase in {
        None: "does not go with these activations: Scheme: float activations need",
        qfx.QSpec(group=64): "the activation has groups of 64 and the weight of 32",
    }.items():
        assert phrase in refused(tmp_path / "a.gguf", meta(Net), x=x)
    recipe = qfx.Recipe(())
    for config, phrase in {
        qfx.Config(recipe=recipe): "requantize has a recipe, which is of float weights",
        qfx.Config(skip=["nonesuch"]): "the pattern 'nonesuch' matches nothing",
    }.items():
        with pytest.raises(ValueError, match=phrase):
            qfx.load(tmp_path / "a.gguf", meta(Net), requantize=config)
