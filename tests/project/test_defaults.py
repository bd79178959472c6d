"""The default dtype and the default device are the user's: no public function asks for them.

Each call of `CALLS` runs under each default, and gives the bits that it gives without one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx
from qfx.host.tensors import tree_leaves
from tests.lib import model_calls, public_calls
from tests.lib.public_calls import Call

CALLS = public_calls.CALLS | model_calls.CALLS
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICES = (None, "cpu", "meta")
# transformers itself reads no file while the default device is meta, with qfx or without.
NOT_OURS = {("from_pretrained", "meta")}
LONG = os.environ.get("QFX_TEST_PROFILE") == "long"
Default = tuple[torch.dtype, str | None]
# Dtypes and devices are asked for in different places: the quick profile has each once.
ALONE = [(dtype, None) for dtype in DTYPES[1:]] + [(torch.float32, d) for d in DEVICES[1:]]
DEFAULTS = [(dtype, device) for dtype in DTYPES for device in DEVICES] if LONG else ALONE
ROWS = [(n, *each) for n in CALLS for each in DEFAULTS if (n, each[1]) not in NOT_OURS]


@contextmanager
def default(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def leaves(found: Any) -> list[Any]:
    return [t.detach() if isinstance(t, Tensor) else t for t in tree_leaves(found)]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def ran(make: Callable[[Path], Call], folder: Path, dtype: torch.dtype, device: str | None) -> Any:
    run = make(folder)
    torch.manual_seed(0)
    with default(dtype, device):
        found = run()
    torch._dynamo.reset()
    return leaves(found)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """What calls give without a default, as they are asked for."""
    return {}


@pytest.mark.parametrize(("name", "dtype", "device"), ROWS, ids=lambda v: str(v).split(".")[-1])
def test_it_gives_the_same_bits(
    name: str, dtype: torch.dtype, device: str | None, expected: Any, tmp_path: Path
) -> None:
    if name not in expected:
        (tmp_path / "without").mkdir()
        expected[name] = ran(CALLS[name], tmp_path / "without", torch.float32, None)
    found = ran(CALLS[name], tmp_path, dtype, device)
    assert len(found) == len(expected[name]) > 0
    differing = [
        i for i, pair in enumerate(zip(found, expected[name], strict=True)) if not same(*pair)
    ]
    assert differing == []


MADE = {
    "Linear": lambda: qfx.nn.Linear(8, 4, scheme=qfx.Scheme()),
    "LSQLinear": lambda: qfx.nn.LSQLinear(8, 4, shift=True),
    "BinaryLinear": lambda: qfx.nn.BinaryLinear(8, 4, shift=True),
    "SignLinear": lambda: qfx.nn.SignLinear(8, 4),
}


@pytest.mark.parametrize("name", MADE)
def test_new_modules_are_float32_and_lie_where_new_modules_of_torch_lie(name: str) -> None:
    kinds = {n: t.dtype for n, t in MADE[name]().state_dict().items()}
    for dtype, device in ((dtype, device) for dtype in DTYPES for device in DEVICES):
        with default(dtype, device):
            state = MADE[name]().state_dict()
        assert {n: t.dtype for n, t in state.items()} == kinds
        assert {t.device.type for n, t in state.items() if n != "scheme"} == {device or "cpu"}


def test_what_transformers_does_not_read_by_itself(tmp_path: Path) -> None:
    model_calls.decoder("llama").save_pretrained(tmp_path)
    with default(torch.float32, "meta"), pytest.raises((RuntimeError, NotImplementedError)):
        model_calls.AutoModelForCausalLM.from_pretrained(tmp_path, **model_calls.STATED)
