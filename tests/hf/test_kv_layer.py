"""KVLayer holds what a list of each text's tokens would, whatever is done to it in turn."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.hf.kv_layer import KVLayer
from tests.lib.strategies import SEEDS

HEADS, FEATURES = 2, 16
OPERATIONS = ("update", "update", "reorder", "select", "repeat", "crop", "make_room", "pad")


class _Texts:
    """Tokens [HEADS, columns, FEATURES] of each text; None where a column is padding."""

    def __init__(self, texts: int) -> None:
        self.rows: list[list[Tensor | None]] = [[] for _ in range(texts)]

    def select(self, indices: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in indices]


def _updated(layer: KVLayer, texts: _Texts, count: int) -> None:
    keys = torch.randn(len(texts.rows), HEADS, count, FEATURES)
    found = layer.update(keys, -keys)
    for b, row in enumerate(texts.rows):
        row += [keys[b, :, t] for t in range(count)]
        for t, token in enumerate(row):
            if token is not None:
                for read, expected in zip(found, (token, -token), strict=True):
                    assert (read[b, :, t] - expected).norm() < 0.02 * expected.norm()


def _padded(layer: KVLayer, texts: _Texts) -> None:
    """A column of which some texts hold nothing, as programs write it."""
    kept = torch.rand(len(texts.rows), 1) < 0.5
    keys = torch.randn(len(texts.rows), HEADS, 1, FEATURES)
    past = keys.new_ones(len(kept), layer.seen, dtype=torch.bool)
    layer.kept = torch.cat([past if layer.kept is None else layer.kept, kept], 1)
    places = torch.where(kept, layer.kept.sum(1, keepdim=True) - 1, -1)
    tensors = tuple(t[: layer.batch] for t in layer.tensors)
    torch.ops.qfx.kv_write(*tensors, keys, -keys, places)
    layer.seen += 1
    for b, row in enumerate(texts.rows):
        row.append(keys[b, :, 0] if kept[b] else None)


@given(st.data(), st.integers(1, 3), st.sampled_from([None, 96]), SEEDS)
def test_a_layer_holds_what_lists_would(
    data: Any, batch: int, capacity: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, texts = KVLayer(capacity), _Texts(batch)
    _updated(layer, texts, data.draw(st.integers(1, 20)))
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=12)):
        count, columns = len(texts.rows), len(texts.rows[0])
        index = st.lists(st.integers(0, count - 1), min_size=count, max_size=count)
        if operation == "update" and columns < 70:
            _updated(layer, texts, data.draw(st.integers(1, 9)))
        elif operation == "pad" and columns < 70 and capacity:
            _padded(layer, texts)
        elif operation == "reorder":
            indices = data.draw(index)
            layer.reorder_cache(torch.tensor(indices))
            texts.select(indices)
        elif operation == "select":
            indices = data.draw(index)[: data.draw(st.integers(1, count))]
            layer.batch_select_indices(torch.tensor(indices))
            texts.select(indices)
        elif operation == "repeat" and count == 1:
            layer.batch_repeat_interleave(2)
            texts.select([0, 0])
        elif operation == "crop":
            removed = data.draw(st.integers(0, columns - 1))
            layer.crop(-removed)
            texts.rows = [row[: columns - removed] for row in texts.rows]
        elif operation == "make_room":
            layer.make_room(data.draw(st.integers(count, count + 3)))
        assert layer.get_seq_length() == len(texts.rows[0])
    _updated(layer, texts, 1)


def test_reordering_beams_copies_at_most_one_block_of_each() -> None:
    layer = KVLayer(4096)
    keys = torch.randn(2, HEADS, 1000, FEATURES)
    layer.update(keys, keys)
    before = [t.clone() for t in layer.tensors]
    layer.reorder_cache(torch.tensor([1, 1]))
    changed = (layer.tensors[0] != before[0]).flatten(3).any(-1)  # [texts, HEADS, blocks]
    assert changed[0].any(0).nonzero().flatten().tolist() == [1000 // 16]
    assert not changed[1].any()
