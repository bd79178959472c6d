"""Networks for diffusion and the decoding of images, with the channels and kernels of the real
ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        self.queries = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(2))
        self.keys, self.vals = (
            nn.ModuleList(nn.Linear(k, channels, bias=False) for k in (channels, text))
            for _ in range(2)
        )
        self.merge = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.gated, self.last = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def _attend(self, at: int, x: Tensor, other: Tensor) -> Tensor:
        every = (self.queries[at](x), self.keys[at](other), self.vals[at](other))
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


def noise(channels: int, side: int, count: int = 1) -> dict[str, Any]:
    return {"x": torch.randn(count, channels, side, side)}
