"""Convolutional networks for images and videos, with the channels and kernels of the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """A convolution with "same" padding for odd kernels, batch norm, and an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        activation: type[nn.Module] | None = nn.ReLU,
        groups: int = 1,
        dilation: int = 1,
    ) -> None:
        padding = dilation * (kernel - 1) // 2
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
        last = [activation(inplace=True)] if activation else []  # type: ignore[call-arg]
        super().__init__(conv, nn.BatchNorm2d(outputs), *last)


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3, 1x1 and the residual."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, groups: int) -> None:
        super().__init__()
        outputs = 4 * width if groups == 1 else 2 * width
        self.first = ConvNorm(inputs, width)
        self.second = ConvNorm(width, width, 3, stride, groups=groups, dilation=dilation)
        self.last = ConvNorm(width, outputs, activation=None)
        changes = stride > 1 or inputs != outputs
        self.short = ConvNorm(inputs, outputs, 1, stride, None) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.second(self.first(x))) + self.short(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50, or ResNeXt-50 with 32 groups. Returns the features of its four stages."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 4, 6, 3),
        dilations: Sequence[int] = (1, 1, 1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages, inputs = nn.ModuleList(), 64
        for at, (depth, dilation) in enumerate(zip(depths, dilations, strict=True)):
            width = (64 if groups == 1 else 128) << at
            blocks = []
            for block in range(depth):
                stride = 2 if at and not block and dilation == 1 else 1
                blocks.append(Bottleneck(inputs, width, stride, dilation, groups))
                inputs = 4 * width if groups == 1 else 2 * width
            self.stages.append(nn.Sequential(*blocks))
        self.channels = inputs

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.stem(x), []
        for stage in self.stages:
            found.append(x := stage(x))
        return found


class Classifier(nn.Module):
    """A network of features, their mean over all places, and a linear."""

    def __init__(self, features: nn.Module, channels: int, classes: int = 1000) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        last = found[-1] if isinstance(found, list) else found
        return self.head(last.mean(tuple(range(2, last.dim()))))


class Gate(nn.Module):
    """Squeeze and excitation: a factor for each channel, from the mean of all places."""

    def __init__(self, channels: int, inner: int, last: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return x * self.last(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """An inverted residual of mobile networks: 1x1 to more channels, depthwise, 1x1 to fewer."""

    def __init__(
        self,
        inputs: int,
        inner: int,
        outputs: int,
        kernel: int,
        stride: int,
        activation: type[nn.Module],
        gate: int = 0,
        gate_end: type[nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *([ConvNorm(inputs, inner, activation=activation)] if inner != inputs else []),
            ConvNorm(inner, inner, kernel, stride, activation, groups=inner),
            *([Gate(inner, gate, gate_end())] if gate else []),
            ConvNorm(inner, outputs, activation=None),
        )
        self.same = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x if self.same else self.block(x)


# kernel, inner and outer channels, channels of the gate, whether hardswish, stride
_MOBILE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 24, 0, 2),
    (5, 120, 40, 32, 0, 1), (5, 120, 40, 32, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 480, 112, 120, 1, 1),
    (3, 672, 112, 168, 1, 1), (5, 672, 160, 168, 1, 2), (5, 960, 160, 240, 1, 1),
    (5, 960, 160, 240, 1, 1),
)  # fmt: skip


def mobilenet_v3() -> nn.Module:
    layers: list[nn.Module] = [ConvNorm(3, 16, 3, 2, nn.Hardswish)]
    inputs = 16
    for kernel, inner, outputs, gate, hard, stride in _MOBILE:
        act = nn.Hardswish if hard else nn.ReLU
        layers.append(Inverted(inputs, inner, outputs, kernel, stride, act, gate, nn.Hardsigmoid))
        inputs = outputs
    layers += [ConvNorm(160, 960, activation=nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000))


# blocks, factor of channels, outer channels, kernel, stride
_EFFICIENT = (
    (1, 1, 16, 3, 1), (2, 6, 24, 3, 2), (2, 6, 40, 5, 2), (3, 6, 80, 3, 2), (3, 6, 112, 5, 1),
    (4, 6, 192, 5, 2), (1, 6, 320, 3, 1),
)  # fmt: skip


def efficientnet_b0() -> nn.Module:
    layers: list[nn.Module] = [ConvNorm(3, 32, 3, 2, nn.SiLU)]
    inputs = 32
    for count, factor, outputs, kernel, stride in _EFFICIENT:
        for block in range(count):
            inner, step = inputs * factor, 1 if block else stride
            shape = (inputs, inner, outputs, kernel, step)
            layers.append(Inverted(*shape, nn.SiLU, inputs // 4))
            inputs = outputs
    layers += [ConvNorm(320, 1280, activation=nn.SiLU), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, 1000))


def vgg_16() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


class DenseBlock(nn.Module):
    """Layers of DenseNet-121: each adds 32 channels to those before it."""

    def __init__(self, inputs: int, count: int, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + at * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(inputs + at * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for at in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> nn.Module:
    """DenseNet-121 with 6, 12, 12 and 8 layers in its blocks."""
    layers: list[nn.Module] = [ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for at, count in enumerate((6, 12, 12, 8)):
        layers.append(DenseBlock(channels, count))
        channels += 32 * count
        if at < 3:
            half = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), half, nn.AvgPool2d(2)]
            channels //= 2
    return Classifier(nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()), channels)


class VideoBlock(nn.Module):
    """A block of ResNet-18 for videos: two convolutions of 3x3x3."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        shapes = ((inputs, stride), (outputs, 1))
        convs = [nn.Conv3d(k, outputs, 3, s, 1, bias=False) for k, s in shapes]
        self.first = nn.Sequential(convs[0], nn.BatchNorm3d(outputs), nn.ReLU(inplace=True))
        self.last = nn.Sequential(convs[1], nn.BatchNorm3d(outputs))
        one = nn.Conv3d(inputs, outputs, 1, stride, bias=False)
        changes = stride > 1
        self.short = nn.Sequential(one, nn.BatchNorm3d(outputs)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.first(x)) + self.short(x))


def video_resnet_18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)]
    layers += [nn.BatchNorm3d(64), nn.ReLU(inplace=True)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        layers += [VideoBlock(inputs, outputs, 1 if outputs == 64 else 2)]
        layers += [VideoBlock(outputs, outputs, 1)]
        inputs = outputs
    return Classifier(nn.Sequential(*layers), 512, 400)


def images(side: int = 224, count: int = 1) -> dict[str, Any]:
    return {"x": torch.randn(count, 3, side, side)}


def sequence(layers: Iterable[nn.Module]) -> nn.Module:
    """Returns a module that takes its input as `x`."""
    return Only(nn.Sequential(*layers))


class Only(nn.Module):
    """Calls a module with its only input, which is named `x` here."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)
