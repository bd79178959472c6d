"""The default dtype and the default device are the user's: no public function asks for them.

Each call of `CALLS` runs under each default, and gives the bits that it gives without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx
from qfx.host.tensors import tree_leaves, watched
from qfx.weights.smoothing.factors import factors_of
from tests.lib import model_calls, public_calls
from tests.lib.pairs import LONG, every
from tests.lib.public_calls import Call

CALLS = public_calls.CALLS | model_calls.CALLS
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICES = (None, "cpu", "meta")
# transformers itself reads no file while the default device is meta, with qfx or without.
NOT_OURS = {("from_pretrained", "meta")}
# A call by itself fails on meta whatever its type, and in another type wherever it lies: each call
# has one default of both. The long profile has them all.
SOME = [(torch.float16, "meta"), (torch.float64, "meta"), (torch.bfloat16, "cpu")]
DEFAULTS = list(product(DTYPES, DEVICES)) if LONG else SOME
ROWS = [(n, *each) for n, each in every(CALLS, DEFAULTS) if (n, each[1]) not in NOT_OURS]


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
    "Embedding": lambda: qfx.nn.Embedding(8, 4),
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


def test_a_default_device_watches_nothing() -> None:
    """It is a mode to PyTorch; programs are kept on disk under one too."""
    with default(torch.float32, "cpu"):
        assert not watched()
        with torch.overrides.TorchFunctionMode():
            assert watched()


@pytest.mark.parametrize("name", ["gptq", "direction", "bits"])
def test_calibration_computes_without_the_callers_autocast(name: str, tmp_path: Path) -> None:
    """What the only linear reads is float32 with autocast and without."""
    model = torch.nn.Sequential(public_calls.mlp()[0]).eval()
    config = qfx.Config(minimum_gain=0)
    given = {"progress": False, **public_calls.CALIBRATIONS[name]}
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            recipe = qfx.calibrate(model, [public_calls.rows()], config, **given)
        found.append(leaves(public_calls.text_of(recipe)))
    assert all(map(same, *found)) and len(found[0]) > 8


def test_writes_to_a_weight_are_taken_back_under_autocast() -> None:
    linear = qfx.quantize_(public_calls.mlp())[0]
    codes, changes = (
        linear.state_dict()["codes"].clone(),
        [public_calls.rows(i, 96) for i in (1, 2)],
    )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for change in (*changes, *(-change for change in changes)):
            linear.weight.data += change
    assert torch.equal(linear.state_dict()["codes"], codes)


def test_smoothing_without_data_is_the_same_in_inference_mode() -> None:
    model = public_calls.Text().eval()
    with torch.inference_mode():
        found = sorted(factors_of(model).values())
    assert found == sorted(factors_of(public_calls.Text().eval()).values()) and found
