"""Recurrent networks, recommenders, graphs and time series, with the sizes of the real ones."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.fields.vision import ConvNorm

# --- reading of text lines, and recurrent networks ---


class Crnn(nn.Module):
    """CRNN: a line of text as an image, two bidirectional LSTMs, and letters for CTC."""

    def __init__(self, letters: int = 97) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(ConvNorm(128, 256, 3), ConvNorm(256, 256, 3), nn.MaxPool2d((2, 1))),
            *(ConvNorm(256, 512, 3), ConvNorm(512, 512, 3), nn.MaxPool2d((2, 1))),
            *(nn.Conv2d(512, 512, 2), nn.BatchNorm2d(512), nn.ReLU(inplace=True)),
        )
        self.first = nn.LSTM(512, 256, bidirectional=True)
        self.middle = nn.Linear(512, 256)
        self.second = nn.LSTM(256, 256, bidirectional=True)
        self.head = nn.Linear(512, letters)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.convs(x).squeeze(2).permute(2, 0, 1)
        return self.head(self.second(self.middle(self.first(steps)[0]))[0]).log_softmax(-1)


class RecurrentModel(nn.Module):
    """An embedding, recurrent layers, and a linear for each step: a language model or a tagger."""

    def __init__(
        self,
        kind: type[nn.LSTM] | type[nn.GRU],
        inputs: int,
        width: int,
        layers: int,
        outputs: int,
        both: bool,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5000, inputs)
        self.layers = kind(inputs, width, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(width * (1 + both), outputs)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids))[0])


class Translator(nn.Module):
    """A GRU reads, an LSTM cell with attention writes."""

    def __init__(self, width: int = 512, tokens: int = 4000) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(tokens, width), nn.Embedding(tokens, width)
        self.encoder = nn.GRU(width, width // 2, 2, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.joined, self.head = nn.Linear(2 * width, width), nn.Linear(width, tokens)

    def forward(self, ids: Tensor, written: Tensor) -> Tensor:
        read, target = self.encoder(self.source(ids))[0], self.target(written)
        state = (read.mean(1), torch.zeros_like(read[:, 0]))
        context, found = read[:, -1], []
        for step in range(target.shape[1]):
            state = self.cell(torch.cat([target[:, step], context], -1), state)
            scores = torch.bmm(read, state[0][:, :, None]).softmax(1)
            context = (scores * read).sum(1)
            found.append(torch.tanh(self.joined(torch.cat([state[0], context], -1))))
        return self.head(torch.stack(found, 1))


# --- recommenders, graphs, time series ---


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for k, n in pairwise(sizes):
        layers += [nn.Linear(k, n), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """DLRM: dense features, tables of embeddings, products of all pairs of them, and an MLP."""

    def __init__(self, dense: int = 13, tables: int = 26, width: int = 128) -> None:
        super().__init__()
        self.bottom = mlp(dense, 512, 256, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = mlp(width + pairs, 1024, 1024, 512, 256, 1)
        self.rows, self.columns = torch.tril_indices(tables + 1, tables + 1, -1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        found = [table(ids[:, at, None]) for at, table in enumerate(self.tables)]
        every = torch.stack([first, *found], 1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([first, pairs], -1))


class DeepCross(nn.Module):
    """DCN-V2: layers that multiply the input by a linear of the state, beside an MLP."""

    def __init__(self, fields: int = 26, width: int = 16, dense: int = 13, layers: int = 3) -> None:
        super().__init__()
        size = fields * width + dense
        self.table, self.fields = nn.Embedding(1000 * fields, width), fields
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.deep, self.head = mlp(size, 768, 768), nn.Linear(size + 768, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = torch.cat([self.table(ids).flatten(1), dense], -1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return self.head(torch.cat([x, self.deep(first)], -1))


class TwoTowers(nn.Module):
    """A tower for users, one for items, and the products of both."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, width) for _ in range(2))
        self.towers = nn.ModuleList(mlp(8 * width, 512, 256, 128) for _ in range(2))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        pairs = zip(self.towers, self.tables, (users, items), strict=True)
        found = (tower(table(ids).flatten(1)) for tower, table, ids in pairs)
        user, item = (F.normalize(f, dim=-1) for f in found)
        return user @ item.T


class SequentialChoice(nn.Module):
    """SASRec: a causal transformer over the items that a user chose."""

    def __init__(self, width: int = 128, items: int = 4000) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Parameter(torch.zeros(64, width))
        layer = nn.TransformerEncoderLayer(width, 2, 512, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count)
        found = self.layers(self.items(ids) + self.places[:count], mask, is_causal=True)
        return found @ self.items.weight.T


class GraphConvolution(nn.Module):
    """GCN with the sizes of Cora: a linear, then the mean of the neighbours, twice."""

    def __init__(self, inputs: int = 1433, width: int = 64, classes: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.second(F.relu(edges @ self.first(x)))


class GraphAttention(nn.Module):
    """Layers of GAT over a list of edges: each node attends to its neighbours."""

    def __init__(self, inputs: int = 500, width: int = 32, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        inner, self.heads = width * heads, heads
        sizes = [inputs] + [inner] * layers
        self.linears = nn.ModuleList(nn.Linear(k, inner) for k in sizes[:-1])
        self.scores = nn.ParameterList(torch.randn(2, heads, width) / 8 for _ in range(layers))
        self.head = nn.Linear(inner, 3)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for linear, (a, b) in zip(self.linears, self.scores, strict=True):
            y = linear(x).unflatten(-1, (self.heads, -1))
            given, taken = (y * a).sum(-1), (y * b).sum(-1)
            weight = F.leaky_relu(given[source] + taken[target], 0.2).exp()
            total = torch.zeros_like(given).index_add(0, target, weight)
            messages = y[source] * (weight / total[target])[..., None]
            x = F.elu(torch.zeros_like(y).index_add(0, target, messages).flatten(1))
        return self.head(x)


class NBeats(nn.Module):
    """N-BEATS: blocks of four linears, each of which forecasts what those before left."""

    def __init__(self, past: int = 96, future: int = 24, width: int = 512, blocks: int = 4) -> None:
        super().__init__()
        self.past, self.future = past, future
        hidden = [width] * 4
        self.blocks = nn.ModuleList(mlp(past, *hidden, past + future) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        forecast = x.new_zeros(len(x), self.future)
        for block in self.blocks:
            back, ahead = block(x).split([self.past, self.future], -1)
            x, forecast = x - back, forecast + ahead
        return forecast


class CausalBlock(nn.Module):
    """A block of a TCN: two dilated causal convolutions under weight norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.pad = (kernel - 1) * dilation
        convs = [nn.Conv1d(k, outputs, kernel, dilation=dilation) for k in (inputs, outputs)]
        self.convs = nn.ModuleList(weight_norm(conv) for conv in convs)
        self.short = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs:
            y = F.relu(conv(F.pad(y, (self.pad, 0))))
        return F.relu(y + self.short(x))


class TemporalConvolution(nn.Module):
    """TCN: causal blocks with dilations of 1, 2, 4 and 8."""

    def __init__(self, inputs: int = 16, width: int = 128, outputs: int = 16) -> None:
        super().__init__()
        sizes = [inputs] + [width] * 4
        self.blocks = nn.Sequential(*(CausalBlock(sizes[at], width, 5, 1 << at) for at in range(4)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).transpose(1, 2))


class DeepAr(nn.Module):
    """DeepAR: an LSTM over past values, and the parameters of a distribution for each step."""

    def __init__(self, inputs: int = 8, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.LSTM(inputs, width, layers, batch_first=True)
        self.mean, self.spread = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)[0]
        return self.mean(found), F.softplus(self.spread(found))
