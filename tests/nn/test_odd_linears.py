"""A linear whose weight or bias cannot become int8 stays float and says why; the rest of the model
is quantized, and is saved and loaded, or refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qfx

K = 64
Make = Callable[[], Tensor]


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, K), torch.randn(5, K)])


# What the linear gets -> why it stays float ('' where it becomes int8), and why it is not saved.
WEIGHTS: dict[str, tuple[Make, str, str]] = {
    "expanded": (lambda: torch.randn(1, K).expand(K, K), "", ""),
    "float64": (lambda: torch.randn(K, K).double(), "its weight is float64", ""),
    "complex": (lambda: torch.randn(K, K).cfloat(), "its weight is complex64", ""),
    "integers": (lambda: torch.randint(-3, 3, (K, K)), "its weight is int64", ""),
    "no inputs": (lambda: torch.empty(K, 0), "has no elements", ""),
    "COO": (lambda: torch.randn(K, K).to_sparse(), "layout torch.sparse_coo", "make it dense"),
    "CSR": (lambda: torch.randn(K, K).to_sparse_csr(), "torch.sparse_csr", "make it dense"),
    "nested": (_nested, "its weight is a nested tensor", "is a nested tensor, which files"),
    "meta": (lambda: torch.empty(K, K, device="meta"), "is on cpu and its weight on meta", "meta"),
    "lazy": (nn.UninitializedParameter, "its weight has no shape yet", "has no shape yet"),
}
BIASES: dict[str, tuple[Make, str, str]] = {
    "expanded": (lambda: torch.randn(1).expand(K), "", ""),
    "float16": (lambda: torch.randn(K).half(), "", ""),
    "float64": (lambda: torch.randn(K).double(), "its bias is float64", ""),
    "complex": (lambda: torch.randn(K).cfloat(), "its bias is complex64", ""),
    "integers": (lambda: torch.randint(-3, 3, (K,)), "its bias is int64", ""),
    "too short": (lambda: torch.randn(3), r"its bias has shape \[3\], expected \[64\]", ""),
    "COO": (lambda: torch.randn(K).to_sparse(), "its bias is of the layout", "make it dense first"),
    "nested": (_nested, "its bias is a nested tensor", "is a nested tensor, which files"),
    "meta": (lambda: torch.empty(K, device="meta"), "its bias is on meta and its weight", "meta"),
    "lazy": (nn.UninitializedParameter, "its bias has no shape yet", "has no shape yet"),
}
ROWS = [("weight", name, *row) for name, row in WEIGHTS.items()]
ROWS += [("bias", name, *row) for name, row in BIASES.items()]


class Beside(nn.Module):
    """An odd linear beside a plain one, which alone is called where the odd one cannot be."""

    def __init__(self, part: str, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.odd = nn.Linear(K, K), nn.Linear(K, K)
        tensor = make()
        if not isinstance(tensor, nn.Parameter):
            floats = tensor.is_floating_point() or tensor.is_complex()
            tensor = nn.Parameter(tensor, requires_grad=floats)
        setattr(self.odd, part, tensor)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plain(x)
        return self.odd(y) if isinstance(self.odd, qfx.nn.Linear) else y


@pytest.mark.parametrize(("part", "name", "make", "why", "unsaved"), ROWS)
def test_it_is_taken_or_stays_with_its_reason(
    part: str, name: str, make: Make, why: str, unsaved: str, tmp_path: Path
) -> None:
    model, x = Beside(part, make), torch.randn(3, K)
    if why:
        with pytest.warns(UserWarning, match=why):
            qfx.quantize_(model)
    else:
        qfx.quantize_(model)
    assert isinstance(model.plain, qfx.nn.Linear)
    assert isinstance(model.odd, qfx.nn.Linear) is (why == "")
    y = model(x)
    if unsaved:
        with pytest.raises(ValueError, match=rf"save: odd.{part} .*{unsaved}"):
            qfx.save(model, tmp_path / "saved")
        assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
    else:
        qfx.save(model, tmp_path / "saved")
        assert torch.equal(qfx.load(tmp_path / "saved", Beside(part, make))(x), y)
