"""Networks for detection and segmentation, with the channels and kernels of the real ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fields.vision import ConvNorm, Gate, ResNet


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


class Joined(nn.ModuleList):
    """Calls modules with the same input, and joins their channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self], 1)


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
            Joined(
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
        return [head(x) for head, x in zip(self.heads, (fine, middle, coarse), strict=True)]


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
