"""Copies and state dicts of qfx.nn.Embedding: what is loaded is what was saved, or an error that
changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx
from tests.conftest import same_bits
from tests.nn.test_nn_embedding import BY_TYPE, IDS, D, V, table, tied


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_the_same(copied: Callable[[Any], Any]) -> None:
    model = tied()
    assert same_bits(copied(model)(IDS[None]), model(IDS[None]))


@BY_TYPE
def test_a_state_dict_is_taken_by_another(dtype: torch.dtype) -> None:
    """By a copy into its tensors rows keep the type that it has; assigned they bring theirs."""
    first = qfx.nn.Embedding.from_float(table(dtype))
    state = first.state_dict()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items()} == {
        "row_codes": (torch.int8, (V, D)),
        "scale": (torch.float32, (V,)),
        "scheme": (torch.int32, (32,)),
    }
    second = qfx.nn.Embedding(V, D)
    second.load_state_dict(state)
    assert same_bits(second(IDS), first.float()(IDS))
    with torch.device("meta"):
        third = qfx.nn.Embedding(V, D)
    third.load_state_dict(state, assign=True)
    assert same_bits(third(IDS), first.to(dtype)(IDS))


FAULTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "scale holds 0.0 at": lambda s: s["scale"].zero_(),
    "scheme is missing, which says": lambda s: s.pop("scheme"),
    "row_codes is missing": lambda s: s.pop("row_codes"),
    "scheme is that of a Linear": lambda s: s["scheme"].__setitem__(1, 1),
    "does not say what int8 embeddings say": lambda s: s["scheme"].__setitem__(7, 4),
    r"row_codes is torch.int8 \[49, 48\]": lambda s: s.update(row_codes=s["row_codes"][1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_changes_nothing(fault: str) -> None:
    state, made = qfx.nn.Embedding.from_float(table()).state_dict(), qfx.nn.Embedding(V, D)
    FAULTS[fault](state)
    before = made(IDS)
    with pytest.raises(RuntimeError, match=fault):
        made.load_state_dict(state)
    assert same_bits(made(IDS), before)
