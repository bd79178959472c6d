"""Modules in other processes: what is sent is what they hold, in memory that is shared."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

import qfx
from tests.conftest import same_bits
from tests.lib.prepared import REPLACE, X, model
from tests.nn.test_nn_linear import BY_VARIED, SCHEMES, K, N, outputs


def answer(queue: Any, model: nn.Module, x: Tensor) -> None:
    torch.set_num_threads(1)
    queue.put(outputs(model, x).numpy())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_model_answers_in_another_process(method: str) -> None:
    """Of spawn codes were sent that had gone: "bad value(s) in fds_to_keep"."""
    sent = nn.Sequential(*(qfx.convert(REPLACE["prepare_binary"](model()))), qfx.quantize_(model()))
    expected = outputs(sent, X)
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=answer, args=(queue, sent, X))
    process.start()
    assert same_bits(torch.from_numpy(queue.get(timeout=60)), expected)
    process.join()
    assert process.exitcode == 0 and same_bits(outputs(sent, X), expected)


@BY_VARIED
def test_what_is_sent_is_shared(row: str) -> None:
    module = qfx.nn.Linear.from_float(nn.Linear(K, N), SCHEMES[row])
    again = pickle.loads(ForkingPickler.dumps(module))
    assert repr(again) == repr(module) and same_bits(outputs(again), outputs(module))
    assert again.packed.is_shared() and module.packed.is_shared()
    assert {*again.state_dict()} == {*module.state_dict()}
