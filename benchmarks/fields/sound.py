"""Networks for speech and sound, with the channels and kernels of the real ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

# --- recognition ---


class DeepSpeech(nn.Module):
    """Deep Speech 2: two 2-D convolutions, bidirectional GRUs, and letters."""

    def __init__(self, mels: int = 80, width: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.layers = nn.GRU(32 * mels // 4, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, x: Tensor) -> Tensor:
        found = self.convs(x[:, None])
        return self.head(self.layers(found.flatten(1, 2).transpose(1, 2))[0])


class Transducer(nn.Module):
    """RNN-T: an encoder and a predictor of LSTMs, joined for every pair of their steps."""

    def __init__(self, mels: int = 80, width: int = 640, letters: int = 1024) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4 * mels, width, 4, batch_first=True)
        self.letters = nn.Embedding(letters, 256)
        self.predictor = nn.LSTM(256, width, 1, batch_first=True)
        self.joint = nn.ModuleList(nn.Linear(width, 512) for _ in range(2))
        self.head = nn.Linear(512, letters)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        heard = self.joint[0](self.encoder(x)[0])
        read = self.joint[1](self.predictor(self.letters(ids))[0])
        return self.head(torch.tanh(heard[:, :, None] + read[:, None]))


class Separable(nn.Module):
    """A block of QuartzNet: depthwise 1-D convolutions, each followed by one of kernel 1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, repeats: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        k = inputs
        for _ in range(repeats):
            pad = kernel // 2
            layers += [nn.Conv1d(k, k, kernel, padding=pad, groups=k, bias=False)]
            layers += [nn.Conv1d(k, outputs, 1, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
            k = outputs
        self.layers = nn.Sequential(*layers[:-1])
        self.short = nn.Sequential(nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.short(x))


def quartznet(mels: int = 64) -> nn.Module:
    first = nn.Conv1d(mels, 256, 33, 2, 16, bias=False)
    blocks = [Separable(256, 256, 33), Separable(256, 512, 51), Separable(512, 512, 75)]
    last = [nn.Conv1d(512, 1024, 1), nn.BatchNorm1d(1024), nn.ReLU(), nn.Conv1d(1024, 29, 1)]
    return nn.Sequential(first, nn.BatchNorm1d(256), nn.ReLU(), *blocks, *last)


class VoiceActivity(nn.Module):
    """A detector of voice: a few 1-D convolutions and an LSTM cell for each piece of sound."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.spectrum = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.convs = nn.ModuleList(nn.Conv1d(k, n, 3, s, 1) for k, n, s in sizes)
        self.cell, self.head = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = self.spectrum(x[:, None]).chunk(2, 1)
        y = torch.sqrt(real**2 + imaginary**2)
        for conv in self.convs:
            y = F.relu(conv(y))
        state, _ = self.cell(y[..., -1])
        return torch.sigmoid(self.head(F.relu(state)[..., None]))


# --- synthesis ---


class ResidualStack(nn.Module):
    """A block of HiFi-GAN: dilated 1-D convolutions under weight norm."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Module:
            pad = dilation * (kernel - 1) // 2
            layer = nn.Conv1d(channels, channels, kernel, 1, pad, dilation)
            return weight_norm(layer)

        self.dilated = nn.ModuleList(conv(dilation) for dilation in (1, 3, 5))
        self.plain = nn.ModuleList(conv(1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.dilated, self.plain, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Mean(nn.ModuleList):
    """Calls modules with the same input, and returns the mean of their results."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self]).mean(0)


class HifiGan(nn.Module):
    """HiFi-GAN V1: transposed convolutions up to the samples, and residual stacks."""

    def __init__(self, mels: int = 80, width: int = 512) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(mels, width, 7, padding=3))
        self.ups, self.stacks = nn.ModuleList(), nn.ModuleList()
        for at, (rate, kernel) in enumerate(((8, 16), (8, 16), (2, 4), (2, 4))):
            inputs, outputs = width >> at, width >> (at + 1)
            up = nn.ConvTranspose1d(inputs, outputs, kernel, rate, (kernel - rate) // 2)
            self.ups.append(weight_norm(up))
            self.stacks.append(Mean(ResidualStack(outputs, k) for k in (3, 7, 11)))
        self.last = weight_norm(nn.Conv1d(width >> 4, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, stacks in zip(self.ups, self.stacks, strict=True):
            x = stacks(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.last(F.leaky_relu(x)))


class Tacotron(nn.Module):
    """Tacotron 2: an encoder of convolutions and a bidirectional LSTM, a decoder of LSTM cells with
    attention, and a network that corrects the spectrogram."""

    def __init__(self, letters: int = 148, mels: int = 80, steps: int = 8) -> None:
        super().__init__()
        self.letters, self.mels, self.steps = nn.Embedding(letters, 512), mels, steps
        self.encoder = nn.Sequential(*(self._conv(512, 512, nn.ReLU()) for _ in range(3)))
        self.lstm = nn.LSTM(512, 256, 1, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(mels, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.attention, self.decoder = nn.LSTMCell(768, 1024), nn.LSTMCell(1536, 1024)
        self.query, self.key = nn.Linear(1024, 128), nn.Linear(512, 128)
        self.score, self.frame = nn.Linear(128, 1), nn.Linear(1536, mels)
        sizes = (mels, 512, 512, 512, 512, mels)
        convs = (self._conv(k, n, nn.Tanh()) for k, n in pairwise(sizes))
        self.postnet = nn.Sequential(*convs)

    @staticmethod
    def _conv(inputs: int, outputs: int, last: nn.Module) -> nn.Module:
        conv = nn.Conv1d(inputs, outputs, 5, padding=2)
        return nn.Sequential(conv, nn.BatchNorm1d(outputs), last)

    def forward(self, ids: Tensor) -> Tensor:
        text = self.lstm(self.encoder(self.letters(ids).transpose(1, 2)).transpose(1, 2))[0]
        keys, batch = self.key(text), len(ids)
        frame, context = text.new_zeros(batch, self.mels), text.new_zeros(batch, 512)
        first = second = (text.new_zeros(batch, 1024), text.new_zeros(batch, 1024))
        frames = []
        for _ in range(self.steps):
            first = self.attention(torch.cat([self.prenet(frame), context], -1), first)
            scores = self.score(torch.tanh(self.query(first[0])[:, None] + keys))
            context = (scores.softmax(1) * text).sum(1)
            second = self.decoder(torch.cat([first[0], context], -1), second)
            frame = self.frame(torch.cat([second[0], context], -1))
            frames.append(frame)
        mels = torch.stack(frames, -1)
        return mels + self.postnet(mels)


class NextBlock(nn.Module):
    """A ConvNeXt block over time: depthwise convolution, norm, two linears."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).transpose(1, 2))
        return x + self.down(F.gelu(self.up(y))).transpose(1, 2)


class Vocos(nn.Module):
    """Vocos: ConvNeXt blocks over a spectrogram, and a linear to the frequencies of the sound."""

    def __init__(self, mels: int = 100, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(mels, width, 7, padding=3)
        self.blocks = nn.Sequential(*(NextBlock(width, 1536) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1026)

    def forward(self, x: Tensor) -> Tensor:
        size, phase = self.head(self.norm(self.blocks(self.first(x)).transpose(1, 2))).chunk(2, -1)
        return size.clamp(max=5.0).exp() * torch.cos(phase)


def frames(mels: int, count: int, last: bool = False) -> dict[str, Any]:
    """Returns a spectrogram [1, mels, count], or [1, count, mels] if `last`."""
    return {"x": torch.randn(1, count, mels) if last else torch.randn(1, mels, count)}
