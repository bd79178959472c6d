"""Networks of the benchmark run at a small size, with the ways that their layers allow; figures of
tasks and the file of Whisper are checked on tiny inputs. Nothing is fetched but in the long
profile."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from benchmarks import network_models, network_peers, peers, speech_model
from benchmarks import trained_networks as trained
from benchmarks.common import compiled_apart
from benchmarks.network_models import IMAGE, RANDOM, RECURRENT, TRANSFORMER, calibration
from benchmarks.network_peers import ways
from benchmarks.networks import TABLE, WAYS
from benchmarks.peer import UnsupportedError, missing
from benchmarks.results_cells import BASELINE
from tests.lib.pairs import LONG

# A small length, and sizes.
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet": (64, {"depths": (1, 1, 1, 1)}),
    "convnext": (32, {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1]}),
    "yolov8": (64, {}),
    "unet": (4, {"channels": 64}),
    "wav2vec2": (2000, {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 1}),
    "hifi": (2, {"width": 64}),
    "crnn": (32, {}),
    "lstm": (3, {"width": 64}),
}


def small(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    length, sizes = SMALL[name]
    subject = next(s for s in RANDOM if s.name.startswith(name))
    return replace(subject, length=length).build(sizes)


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_a_random_network_has_one_output_that_depends_on_its_input(name: str) -> None:
    """And other inputs for calibration, the same at each call."""
    pytest.importorskip("transformers")
    model, inputs = small(name)
    batches, again = calibration(model), calibration(model)
    assert len(batches) == network_models.CALIBRATION
    assert [x.shape for x in batches[0]] == [x.shape for x in inputs]
    assert not torch.equal(batches[0][0], inputs[0]) and torch.equal(batches[0][0], again[0][0])
    (y,), (other,) = model(*inputs), model(*batches[0])
    assert y.isfinite().all() and (y - other).std() > 0.05 * y.std() > 0


def test_every_random_network_is_here_and_names_differ() -> None:
    assert [s.name.split("-")[0] for s in RANDOM] == list(SMALL)
    assert len(TABLE) == len(RANDOM) + len(trained.TRAINED)


def test_ways_are_those_of_the_layers() -> None:
    assert BASELINE in WAYS and list(ways((IMAGE, RECURRENT, TRANSFORMER))) == WAYS
    assert [name for name in WAYS if name not in ways(())] == ["float32 eager, channels last"]


@torch.no_grad()
def test_the_recurrent_layers_of_qfx_are_int8_beside_the_convolutions() -> None:
    """And the model that the others are given stays float."""
    model, inputs = small("crnn")
    (expected,) = model(*inputs)
    (found,) = network_peers.int8({"minimum_gain": 0, "inner": "eager"}, model, inputs)()
    only_rnn = qfx.quantize_(small("crnn")[0], qfx.Config(only=["*first", "*second"]))
    assert 20 < qfx.sqnr(expected, found) < qfx.sqnr(expected, only_rnn(*inputs)[0]) < 70
    assert torch.equal(model(*inputs)[0], expected)


OTHERS = [name for name in WAYS if not name.startswith(("qfx", BASELINE, "float32 Inductor"))]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # a peer may warn
@pytest.mark.parametrize("name", OTHERS)
def test_an_installed_peer_of_networks_is_near_float(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = ways((IMAGE, RECURRENT))[name]
    if lacking := missing(way.packages):
        pytest.skip(lacking)
    monkeypatch.setattr(network_models, "CALIBRATION", 2)
    monkeypatch.setattr(peers, "compiled_apart", lambda m, _: compiled_apart(m, "aot_eager"))
    model, inputs = small("crnn")
    (expected,) = model(*inputs)
    try:
        found = way.prepare(model, inputs)()[0]
    except UnsupportedError:
        return
    assert found is not None
    db = qfx.sqnr(expected, found.float())
    assert db > 90 if "float32" in name else 10 < db < 70, db


def test_figures_of_tasks() -> None:
    scores = torch.eye(4, 8)
    other = scores.clone()
    other[1] = other[1].roll(1)
    said = {"task": "3 of 4 images with the class of float32"}
    assert trained.same_class((scores,), (other,)) == said
    near = torch.exp(-((torch.arange(360.0) - torch.tensor([[100.0], [200.0]])) ** 2))
    near[1] *= 0.4  # nobody speaks
    said = {"task": "pitch 20.0 cents from float32, at most 20"}
    assert trained.same_pitch((near,), (near.roll(1, 1),)) == said
    turned = torch.tensor([[0.5, 3**0.5 / 2], [1.0, 0.0]])
    said = {"task": "1 - cosine at most 5e-01"}
    assert trained.same_voice((torch.tensor([[1.0, 0.0]] * 2),), (turned,)) == said


@pytest.mark.parametrize("size, stride, edges", [(3, 2, (0, 1)), (5, 2, (1, 2)), (5, 1, (2, 2))])
def test_padding_is_larger_at_the_end(size: int, stride: int, edges: tuple[int, int]) -> None:
    """As TensorFlow's, which the weights were trained with."""
    pad = trained.SamePadded(torch.zeros(2, 2, size, size), stride)[0]
    assert pad.padding == edges * 2


@pytest.mark.skipif(not LONG, reason="downloads 270 MB")
@torch.no_grad()
def test_trained_networks_know_what_they_see_and_hear() -> None:
    """A cat, an espresso, a human voice, and what it says."""
    subjects = {subject.name.split("-")[0]: subject for subject in trained.TRAINED}
    model, inputs = replace(subjects["efficientnet"], batch=2).build()
    cat, espresso = model(*inputs)[0].argmax(-1).tolist()
    assert cat in range(281, 286) and espresso == 967
    model, inputs = subjects["crepe"].build()
    assert int((model(*inputs)[0].amax(-1) > 0.5).sum()) >= 4
    model, inputs = subjects["voice"].build()
    assert (model(*inputs)[0] @ model(*inputs)[0].T).min() > 0.6  # it is one speaker
    model, inputs = subjects["whisper"].build()
    written = speech_model.transcript(trained.whisper(), model(*inputs)[0])
    assert len(written) > 4 and written[-1] == speech_model.END


# --- Whisper's file ---


def _tiny_whisper() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "vocab_size": 12, "num_mel_bins": 4, "init_std": 0.5}
    sizes |= {"max_source_positions": 8, "max_target_positions": 8}
    sizes |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sizes |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    config = transformers.WhisperConfig(**sizes, **speech_model.SPECIAL)
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
            for name, modules in speech_model.LAYER.items():
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
        kind = speech_model.TYPES.index(tensor.dtype)
        body += [text(name), shape, struct.pack("<BI", kind, len(data)), data]
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return b"".join([*body, struct.pack("<I", 1), alias])


@torch.no_grad()
def test_whisper_of_a_file_computes_what_it_was_written_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And writes the likeliest token after each other, up to the end."""
    model = _tiny_whisper()
    built = speech_model.built(speech_model.tensors(_file(_as_ctranslate2(model))))
    x, tokens = torch.randn(2, 4, 16), torch.tensor([[3, 4, 5], [3, 4, 6]])
    wanted = model(x, decoder_input_ids=tokens).logits
    assert torch.equal(built(x, decoder_input_ids=tokens).logits, wanted)
    with pytest.raises(ValueError, match="version 5 of its format, 6 is known"):
        speech_model.tensors(_file({}, version=5))
    written = [3, 4]
    while len(written) < 6:
        logits = model(x[:1], decoder_input_ids=torch.tensor([written])).logits
        written.append(int(logits[0, -1].argmax()))
    monkeypatch.setattr(speech_model, "PROMPT", (3, 4))
    for end, expected in (
        (-1, written[2:]),
        (written[3], written[2 : written.index(written[3], 2) + 1]),
    ):
        monkeypatch.setattr(speech_model, "END", end)
        states = model.model.encoder(x[:1]).last_hidden_state
        assert speech_model.transcript(built, states, most=4) == expected
