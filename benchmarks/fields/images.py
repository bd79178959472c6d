"""Networks for detection, segmentation, diffusion and the decoding of images, with the channels and
kernels of the real ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fields.vision import ConvNorm, Gate, ResNet

# --- detection and segmentation ---


class CrossStage(nn.Module):
    """C2f of YOLOv8: half of the channels pass through bottlenecks, all results are joined."""

    def __init__(self, inputs: int, outputs: int, count: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first = ConvNorm(inputs, outputs, activation=nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ConvNorm(half, half, 3, activation=nn.SiLU) for _ in range(2)))
            for _ in range(count)
        )
        self.last = ConvNorm((2 + count) * half, outputs, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.first(x).chunk(2, 1)]
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """YOLOv8-s: a backbone, a path up and down, and a head for each of three scales."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()

        def down(inputs: int, outputs: int) -> nn.Module:
            return ConvNorm(inputs, outputs, 3, 2, nn.SiLU)

        self.stem = nn.Sequential(down(3, 32), down(32, 64), CrossStage(64, 64, 1))
        self.third = nn.Sequential(down(64, 128), CrossStage(128, 128, 2))
        self.fourth = nn.Sequential(down(128, 256), CrossStage(256, 256, 2))
        self.fifth = nn.Sequential(down(256, 512), CrossStage(512, 512, 1))
        self.pooled = ConvNorm(512, 256, activation=nn.SiLU)
        self.joined = ConvNorm(1024, 512, activation=nn.SiLU)
        self.up = nn.ModuleList([CrossStage(768, 256, 1), CrossStage(384, 128, 1)])
        self.down = nn.ModuleList([down(128, 128), down(256, 256)])
        self.after = nn.ModuleList([CrossStage(384, 256, 1), CrossStage(768, 512, 1)])
        self.heads = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    ConvNorm(inputs, width, 3, activation=nn.SiLU),
                    ConvNorm(width, width, 3, activation=nn.SiLU),
                    nn.Conv2d(width, outputs, 1),
                )
                for width, outputs in ((64, 64), (128, classes))
            )
            for inputs in (128, 256, 512)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        third = self.third(self.stem(x))
        fourth = self.fourth(third)
        pools = [self.pooled(self.fifth(fourth))]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        fifth = self.joined(torch.cat(pools, 1))
        middle = self.up[0](torch.cat([F.interpolate(fifth, scale_factor=2.0), fourth], 1))
        fine = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2.0), third], 1))
        middle = self.after[0](torch.cat([self.down[0](fine), middle], 1))
        coarse = self.after[1](torch.cat([self.down[1](middle), fifth], 1))
        found = zip(self.heads, (fine, middle, coarse), strict=True)
        return [torch.cat([part(x) for part in head], 1) for head, x in found]


class RetinaNet(nn.Module):
    """RetinaNet: a feature pyramid of 256 channels on ResNet-50, and two heads of four layers."""

    def __init__(self, classes: int = 80, anchors: int = 9) -> None:
        super().__init__()
        self.body = ResNet()
        self.lateral = nn.ModuleList(nn.Conv2d(k, 256, 1) for k in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(3))
        self.heads = nn.ModuleList(self._head(n * anchors) for n in (classes, 4))

    @staticmethod
    def _head(outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(256, outputs, 3, padding=1))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = [layer(f) for layer, f in zip(self.lateral, self.body(x)[1:], strict=True)]
        for at in (1, 0):
            features[at] = features[at] + F.interpolate(features[at + 1], scale_factor=2.0)
        smooth = [layer(f) for layer, f in zip(self.smooth, features, strict=True)]
        return [head(f) for f in smooth for head in self.heads]


class DeepLab(nn.Module):
    """DeepLabV3: ResNet-50 with dilation, and pyramids of dilated convolutions."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.body = ResNet(dilations=(1, 1, 2, 4))
        rates = ((1, 1), (3, 12), (3, 24), (3, 36))
        self.parts = nn.ModuleList(ConvNorm(2048, 256, k, dilation=rate) for k, rate in rates)
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(2048, 256))
        self.joined = nn.Sequential(ConvNorm(1280, 256), ConvNorm(256, 256, 3))
        self.head = nn.Conv2d(256, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        last = self.body(x)[-1]
        whole = self.whole(last).expand(-1, -1, *last.shape[2:])
        found = self.head(self.joined(torch.cat([*(part(last) for part in self.parts), whole], 1)))
        return F.interpolate(found, scale_factor=8.0, mode="bilinear")


class UNet(nn.Module):
    """U-Net with 64 to 512 channels and transposed convolutions, as for medical images."""

    def __init__(self, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        sizes = [width << at for at in range(depth)]

        def double(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(ConvNorm(inputs, outputs, 3), ConvNorm(outputs, outputs, 3))

        self.down = nn.ModuleList(map(double, [3, *sizes], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in sizes[-2::-1])
        self.after = nn.ModuleList(double(2 * n, n) for n in sizes[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for at, block in enumerate(self.down):
            kept.append(x := block(F.max_pool2d(x, 2) if at else x))
        for up, after, other in zip(self.up, self.after, kept[-2::-1], strict=True):
            x = after(torch.cat([up(x), other], 1))
        return self.head(x)


# --- diffusion and decoders ---


class TimedBlock(nn.Module):
    """A residual block of a diffusion network: group norm, silu, 3x3, with the step's time."""

    def __init__(self, inputs: int, outputs: int, times: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, n) for n in (inputs, outputs))
        self.convs = nn.ModuleList(nn.Conv2d(n, outputs, 3, padding=1) for n in (inputs, outputs))
        self.time = nn.Linear(times, outputs) if times else None
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.convs[0](F.silu(self.norms[0](x)))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        return self.convs[1](F.silu(self.norms[1](y))) + self.short(x)


class ImageAttention(nn.Module):
    """A transformer block over the places of an image, which also attends to a text."""

    def __init__(self, channels: int, text: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, channels), heads
        self.into, self.out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.attend = nn.ModuleList(
            nn.ModuleList(nn.Linear(k, channels, bias=False) for k in (channels, k, k))
            for k in (channels, text)
        )
        self.merge = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.gated, self.last = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def _attend(self, at: int, x: Tensor, other: Tensor) -> Tensor:
        query, key, val = self.attend[at]
        every = (query(x), key(other), val(other))
        parts = [f.unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in every]
        return self.merge[at](F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        places = self.into(self.norm(image))
        x = places.flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self._attend(0, y, y)
        x = x + self._attend(1, self.norms[1](x), text)
        value, gate = self.gated(self.norms[2](x)).chunk(2, -1)
        x = x + self.last(value * F.gelu(gate))
        return self.out(x.transpose(1, 2).reshape(places.shape)) + image


class LatentDiffusion(nn.Module):
    """The U-Net of Stable Diffusion 1, with two of its four scales: 320 and 640 channels."""

    def __init__(self, sizes: tuple[int, int] = (320, 640), text: int = 768) -> None:
        super().__init__()
        a, b = sizes
        times = 4 * a
        self.time = nn.Sequential(nn.Linear(a, times), nn.SiLU(), nn.Linear(times, times))
        self.first, self.last = nn.Conv2d(4, a, 3, padding=1), nn.Conv2d(a, 4, 3, padding=1)
        self.down = nn.Conv2d(a, a, 3, 2, 1)
        self.up = nn.Conv2d(b, b, 3, padding=1)
        shapes = ((a, a), (a, b), (b, b), (2 * b, b), (b + a, a))
        self.blocks = nn.ModuleList(TimedBlock(*shape, times) for shape in shapes)
        self.attention = nn.ModuleList(ImageAttention(n, text) for n in (a, b, b, b, a))
        self.norm = nn.GroupNorm(32, a)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        t = self.time(time)

        def block(at: int, x: Tensor) -> Tensor:
            return self.attention[at](self.blocks[at](x, t), text)

        fine = block(0, self.first(x))
        coarse = block(1, self.down(fine))
        coarse = block(3, torch.cat([block(2, coarse), coarse], 1))
        up = self.up(F.interpolate(coarse, scale_factor=2.0))
        return self.last(F.silu(self.norm(block(4, torch.cat([up, fine], 1)))))


class LatentDecoder(nn.Module):
    """The decoder of the latents of Stable Diffusion: residual blocks and upsampling."""

    def __init__(self, sizes: tuple[int, ...] = (512, 512, 256, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(4, sizes[0], 3, padding=1)]
        inputs = sizes[0]
        for at, outputs in enumerate(sizes):
            layers += [TimedBlock(inputs, outputs), TimedBlock(outputs, outputs)]
            inputs = outputs
            if at < len(sizes) - 1:
                layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(inputs, inputs, 3, padding=1)]
        last = nn.Conv2d(inputs, 3, 3, padding=1)
        self.layers = nn.Sequential(*layers, nn.GroupNorm(32, inputs), nn.SiLU(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DiffusionTransformer(nn.Module):
    """DiT-B/2: blocks whose norms are scaled and shifted by the step's time."""

    def __init__(self, depth: int = 2, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.changes = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(depth))
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(depth)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head, self.width = nn.Linear(width, 32), width

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, t = self.patches(x).flatten(2).transpose(1, 2), self.time(time)
        for change, attend, mlp in zip(self.changes, self.attend, self.mlp, strict=True):
            a, b, c, d, e, f = change(F.silu(t))[:, None].chunk(6, -1)
            y = F.layer_norm(x, (self.width,)) * (1 + a) + b
            x = x + c * attend(y, y, y, need_weights=False)[0]
            x = x + f * mlp(F.layer_norm(x, (self.width,)) * (1 + d) + e)
        return self.head(x)


def image_generator(latent: int = 100, width: int = 64) -> nn.Module:
    """Returns the generator of DCGAN: transposed convolutions of 4x4."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(latent, 8 * width, 4, 1, 0, bias=False)]
    for inputs, outputs in ((8, 4), (4, 2), (2, 1)):
        layers += [nn.BatchNorm2d(inputs * width), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(inputs * width, outputs * width, 4, 2, 1, bias=False)]
    last = nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True), last, nn.Tanh())


class DenselyJoined(nn.Module):
    """A dense block of ESRGAN: five convolutions, each of all features before it."""

    def __init__(self, width: int = 64, growth: int = 32) -> None:
        super().__init__()
        sizes = [(width + at * growth, growth) for at in range(4)] + [(width + 4 * growth, width)]
        self.convs = nn.ModuleList(nn.Conv2d(k, n, 3, padding=1) for k, n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for conv in self.convs[:-1]:
            parts.append(F.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(parts, 1))


def super_resolution(blocks: int = 2, width: int = 64) -> nn.Module:
    """Returns ESRGAN with few blocks: four times as many pixels on each side."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    layers += [DenselyJoined(width) for _ in range(3 * blocks)]
    for _ in range(2):
        layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1)]
        layers += [nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))


def text_detector() -> nn.Module:
    """Returns a detector of text lines like DBNet: features, a gate, and transposed convolutions
    that return to the size of the image."""
    features = [ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2)):
        features += [ConvNorm(inputs, outputs, 3, stride), ConvNorm(outputs, outputs, 3)]
    head = [Gate(256, 64, nn.Sigmoid()), ConvNorm(256, 64, 3), nn.Upsample(scale_factor=4.0)]
    for outputs in (64, 1):
        head.append(nn.ConvTranspose2d(64, outputs, 2, 2))
    return nn.Sequential(*features, *head)


def noise(channels: int, side: int, count: int = 1) -> dict[str, Any]:
    return {"x": torch.randn(count, channels, side, side)}
