"""A linear whose weight or bias cannot become int8 stays float and says why; the rest of the model
is quantized, and is saved and loaded, or refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import qfx
from tests.lib.decoders import decoder

K = 64
Make = Callable[[], Tensor]


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, K), torch.randn(5, K)])


def _subclass(*shape: int) -> Make:
    return lambda: TwoTensor(torch.randn(shape), torch.randn(shape))


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
    "float8": (lambda: torch.randn(K, K).to(torch.float8_e4m3fn), "its weight is float8", ""),
    "subclass": (_subclass(K, K), "its weight is a TwoTensor", "is a TwoTensor, a tensor subclass"),
    "view": (lambda: torch.randn(3 * K, K)[K : 2 * K], "", ""),
    "transposed": (lambda: torch.randn(K, K).t(), "", ""),
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
    "every other": (lambda: torch.randn(2 * K)[::2], "", ""),
    "subclass": (_subclass(K), "its bias is a TwoTensor", "is a TwoTensor, a tensor subclass"),
    "meta": (lambda: torch.empty(K, device="meta"), "its bias is on meta and its weight", "meta"),
    "lazy": (nn.UninitializedParameter, "its bias has no shape yet", "has no shape yet"),
}


def odd_pairs(weight: str) -> list[tuple[str, str, str]]:
    """Each bias -> its name, why the linear stays float, and why the model is not saved."""
    _, why, unsaved = WEIGHTS[weight]
    pairs = []
    for bias, (_, bias_why, bias_unsaved) in BIASES.items():
        words = "|".join(filter(None, (unsaved, bias_unsaved)))
        if weight == "meta":  # beside it the bias is what is wrong
            pairs.append((bias, "" if bias == "meta" else bias_why or why, words))
        else:
            pairs.append((bias, why or bias_why, words))
    return pairs


def parameter(tensor: Tensor) -> nn.Parameter:
    floats = tensor.is_floating_point() or tensor.is_complex()
    return (
        tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=floats)
    )


class Beside(nn.Module):
    """An odd linear beside a plain one, which alone is called where the odd one cannot be."""

    def __init__(self, weight: str, bias: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.odd = nn.Linear(K, K), nn.Linear(K, K)
        self.odd.weight, self.odd.bias = (
            parameter(WEIGHTS[weight][0]()),
            parameter(BIASES[bias][0]()),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plain(x)
        calls = isinstance(self.odd, qfx.nn.Linear) and not self.odd.bias.is_meta
        return self.odd(y) if calls else y


def saved_and_loaded(model: nn.Module, again: nn.Module, folder: Path, name: str, no: str) -> None:
    """The model gives the same bits after loading, or is refused before anything is written."""
    x = torch.randn(3, K)
    if no:
        with pytest.raises(ValueError, match=rf"^save: {name}.*({no})"):
            qfx.save(model, folder)
        assert not folder.exists() or not list(folder.iterdir())
    else:
        qfx.save(model, folder)
        assert torch.equal(qfx.load(folder, again)(x), model(x))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_it_is_taken_or_stays_with_its_reason(weight: str, tmp_path: Path) -> None:
    for i, (bias, why, unsaved) in enumerate(odd_pairs(weight)):
        model = Beside(weight, bias)
        with pytest.warns(UserWarning, match=why) if why else nullcontext():
            qfx.quantize_(model)
        assert isinstance(model.plain, qfx.nn.Linear)
        assert isinstance(model.odd, qfx.nn.Linear) is (why == ""), (weight, bias)
        again = Beside(weight, bias)
        saved_and_loaded(model, again, tmp_path / str(i), r"odd\.(weight|bias) ", unsaved)


# What is no linear's -> why it is not saved.
TENSORS: dict[str, tuple[Make, str]] = {
    "complex": (lambda: torch.randn(K).cfloat(), ""),
    "conjugate": (lambda: torch.randn(K).cfloat().conj(), ""),
    "a scalar": (lambda: torch.tensor(3.0), ""),
    "bool": (lambda: torch.ones(K, dtype=torch.bool), ""),
    "expanded": (lambda: torch.randn(1, K).expand(K, K), ""),
    "complex32": (lambda: torch.zeros(K, dtype=torch.complex32), "complex32, which files do not"),
    "MKLDNN": (lambda: torch.randn(K, K).to_mkldnn(), "make it dense first"),
    "subclass": (_subclass(K), "is a TwoTensor, a tensor subclass"),
    "COO": BIASES["COO"][::2],
    "nested": BIASES["nested"][::2],
    "meta": BIASES["meta"][::2],
    "lazy": BIASES["lazy"][::2],
}


def _beside(kind: Callable[[], nn.Module], name: str) -> Callable[[nn.Module, Tensor], None]:
    def place(model: nn.Module, tensor: Tensor) -> None:
        part = kind()
        setattr(part, name, parameter(tensor))
        model.add_module("e", part)

    return place


PLACES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "an embedding": _beside(lambda: nn.Embedding(3, 3), "weight"),
    "a norm": _beside(lambda: nn.LayerNorm(K), "weight"),
    "a convolution": _beside(lambda: nn.Conv1d(3, 3, 1), "weight"),
    "a recurrent layer": _beside(lambda: nn.LSTM(3, 3), "weight_hh_l0"),
    "a parameter": lambda m, t: m.register_parameter("e", parameter(t)),
    "a buffer": lambda m, t: m.register_buffer("e", t),
    "a derived buffer": lambda m, t: m.register_buffer("e", t, persistent=False),
    "a buffer of the linear": lambda m, t: m[0].register_buffer("e", t),  # type: ignore[operator]
}


@pytest.mark.parametrize("place", PLACES)
def test_odd_tensors_beside_a_linear(place: str, tmp_path: Path) -> None:
    def built(make: Make) -> nn.Module:
        torch.manual_seed(0)
        model = Plain(nn.Linear(K, K))
        PLACES[place](model, make())
        return model

    for name, (make, unsaved) in TENSORS.items():
        model = qfx.quantize_(built(make))
        assert isinstance(model[0], qfx.nn.Linear)  # type: ignore[index]
        saved_and_loaded(model, built(make), tmp_path / name, r"(0\.)?e[. ]", unsaved)


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "explain": lambda m, x: qfx.explain(m, x, options={"minimum_gain": 0}),
    "calibrate": lambda m, x: qfx.calibrate(m, [x], qfx.Config(minimum_gain=0), progress=False),
    "prepare_qat": lambda m, x: qfx.prepare_qat(m, x),
    "torch.compile": lambda m, x: torch.compile(m, backend="qfx", options={"inner": "eager"})(x),
}


@pytest.mark.parametrize("call", CALLS)
def test_odd_tensors_of_models_that_run(call: str) -> None:
    """A model that has one and never calls it runs as without it."""
    for make, _ in TENSORS.values():
        model = Plain(nn.Linear(K, K)).eval()
        PLACES["a parameter"](model, make())
        with torch.no_grad():
            CALLS[call](model, torch.randn(3, K))
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["COO", "CSR"])
def test_a_decoder_with_sparse_weights_is_refused_before_it_is_changed(name: str) -> None:
    model = decoder("llama", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    make = {"COO": Tensor.to_sparse, "CSR": Tensor.to_sparse_csr}[name]
    mlp.up_proj.weight = parameter(make(mlp.up_proj.weight.detach()))
    with pytest.raises(
        ValueError, match=f"mlp.up_proj.weight is of the layout torch.*{name.lower()}"
    ):
        qfx.compile_for_generate(model, max_length=32)
    assert type(mlp.down_proj) is nn.Linear and "forward" not in vars(model)


class Plain(nn.Sequential):
    """Calls its linear alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[0](x)
        return y
