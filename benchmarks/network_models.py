"""Networks of convolutions and of recurrent layers with random weights, at the sizes of the real
ones: benchmarks/networks.py measures them.

Their layers are those of the census (benchmarks/fields) and of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fields import detection, diffusion, sequences, sound, vision
from benchmarks.question import Row
from benchmarks.subjects import Inputs, Outputs, Sizes, Subject

CALIBRATION = 30  # inputs, of peers that calibrate
IMAGE, RECURRENT, TRANSFORMER = "image", "recurrent", "transformer"
LETTERS = 4000


class Network(nn.Module):
    """A network whose outputs are joined to one tensor, in a tuple. `draw()` returns other inputs
    of the same kind, for the calibration of peers."""

    def __init__(self, inner: nn.Module, draw: Callable[[], Inputs]) -> None:
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, *inputs: Tensor) -> Outputs:
        found = self.inner(*inputs)
        if isinstance(found, list):
            found = torch.cat([part.flatten(1) for part in found], 1)
        return (found if isinstance(found, Tensor) else found[0],)


def calibration(model: nn.Module) -> Sequence[Inputs]:
    """Returns inputs of a Network, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [model.draw() for _ in range(CALIBRATION)]  # type: ignore[operator]


@dataclass(frozen=True)
class NetworkSubject(Subject):
    """A network of the benchmark. `traits`: what it consists of, which decides how it is run.
    `judge(expected, found)`: figures of the task, of real weights."""

    traits: tuple[str, ...] = ()
    judge: Callable[[Outputs, Outputs], Row] = lambda expected, found: {}


@torch.no_grad()
def drawn(inner: nn.Module, draw: Callable[[], Inputs]) -> tuple[nn.Module, Inputs]:
    """Returns a network that reads random inputs. Its batch norms give features a root mean square
    of a third, because otherwise they would vanish layer by layer. They subtract nothing: the
    differences between places, which are small, would be amplified with their errors.
    """

    def divide(norm: Any, inputs: Inputs) -> None:
        norm.running_var.copy_(9 * inputs[0].square().mean((0, 2, 3)))

    norms = [m for m in inner.eval().modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(divide) for norm in norms]
    if hooks:
        inner(*draw())
    for hook in hooks:
        hook.remove()
    return Network(inner, draw), draw()


def from_image(make: Callable[..., nn.Module]) -> Callable[..., tuple[nn.Module, Inputs]]:
    def build(batch: int, pixels: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
        return drawn(make(**sizes), lambda: (torch.randn(batch, 3, pixels, pixels),))

    return build


def resnet(**sizes: Any) -> nn.Module:
    features = vision.ResNet(**sizes)
    return vision.Classifier(features, features.channels)


def convnext(**sizes: Any) -> nn.Module:
    """Returns ConvNeXt-T by default. Its layers are scaled by 1: the 1e-6 at the start of training
    would hide them."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"layer_scale_init_value": 1.0, "num_labels": 1000, **sizes}
    return ConvNextForImageClassification(ConvNextConfig(**sizes))


def unet_block(batch: int, places: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Returns a residual block of Stable Diffusion with the embedding of the step's time."""
    channels = sizes.get("channels", 320)
    block = diffusion.TimedBlock(channels, channels, 4 * channels)
    image = (batch, channels, places, places)
    return drawn(block, lambda: (torch.randn(image), torch.randn(batch, 4 * channels)))


def wav2vec2(batch: int, samples: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    model = Wav2Vec2Model(Wav2Vec2Config(apply_spec_augment=False, **sizes))
    return drawn(model, lambda: (torch.randn(batch, samples),))


def hifi_gan(batch: int, frames: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Returns HiFi-GAN V1, with transposed convolutions that keep the variance of features."""
    model = sound.HifiGan(**sizes)
    for up in model.ups:
        assert isinstance(up, nn.ConvTranspose1d)
        up.weight = up.weight.detach() * (6 * up.stride[0]) ** 0.5  # weight norm divides it
    return drawn(model, lambda: (torch.randn(batch, 80, frames),))


class LineReader(sequences.Crnn):
    """A CRNN that returns logits: a logarithm of probabilities is mostly a constant."""

    def forward(self, x: Tensor) -> Tensor:
        steps = self.convs(x).squeeze(2).permute(2, 0, 1)
        return self.head(self.second(self.middle(self.first(steps)[0]))[0])


def crnn(batch: int, width: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    model = LineReader(**sizes)
    nn.init.zeros_(model.head.bias)
    return drawn(model, lambda: (torch.randn(batch, 1, 32, width),))


def lstm(batch: int, steps: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Returns a language model: an embedding, two layers of 512 by default, and a head."""
    width = sizes.get("width", 512)
    model = sequences.RecurrentModel(nn.LSTM, width, width, 2, LETTERS, False)
    nn.init.zeros_(model.head.bias)
    return drawn(model, lambda: (torch.randint(LETTERS, (batch, steps)),))


def _image(name: str, make: Callable[..., nn.Module], pixels: int) -> NetworkSubject:
    return NetworkSubject(f"{name}-1x{pixels}", from_image(make), 1, pixels, (IMAGE,))


RANDOM = (
    _image("resnet-50", resnet, 224),
    _image("convnext-tiny", convnext, 224),
    _image("yolov8-s", detection.Yolo, 320),
    NetworkSubject("unet-block-1x64", unet_block, 1, 64, (IMAGE,)),
    NetworkSubject("wav2vec2-1x16000", wav2vec2, 1, 16000, (TRANSFORMER,)),
    NetworkSubject("hifi-gan-1x32", hifi_gan, 1, 32),
    NetworkSubject("crnn-1x160", crnn, 1, 160, (IMAGE, RECURRENT)),
    NetworkSubject("lstm-512-1x100", lstm, 1, 100, (RECURRENT,)),
)
