"""LSTM, GRU and their cells with int8 weights: the products of all inputs are one linear,
and the steps of a layer one operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from qfx.nn.recurrent_steps import State, run_layer

_KINDS = ("weight", "bias")


class Recurrent(nn.Module):
    """A recurrent module of PyTorch whose weights are those of linears, which `quantize_` replaces
    by int8 linears: for each layer and direction `ih_l0` of the input and `hh_l0` of the state.

    The tensors also have the names of PyTorch, such as `weight_ih_l0`, as attributes and in a state
    dict that is loaded.
    """

    FLOAT: ClassVar[type[nn.Module]]  # the class of PyTorch
    GATES: ClassVar[int]
    input_size: int
    hidden_size: int
    bias: bool

    @classmethod
    def from_float(cls, module: Any) -> Recurrent:
        """Returns a module that has the parameters of `module`, one of PyTorch, and computes the
        same in float."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name in cls._options():
            setattr(made, name, getattr(module, name))
        for name in made.linear_names(module):
            found = [module._parameters.get(f"{kind}_{name}") for kind in _KINDS]
            setattr(made, name, float_linear(*found))
        return made.train(module.training)

    @classmethod
    def _options(cls) -> tuple[str, ...]:
        return "input_size", "hidden_size", "bias"

    @staticmethod
    def linear_names(module: Any) -> list[str]:
        """Returns the names of the linears for a module of PyTorch, in the order of its weights."""
        layers = [f"_l{layer}" for layer in range(getattr(module, "num_layers", 0))] or [""]
        ends = ("", "_reverse")[: 1 + getattr(module, "bidirectional", False)]
        return [f"{kind}{at}{end}" for at in layers for end in ends for kind in ("ih", "hh")]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields the names of the linears of each layer and direction: of the input, of the
        state."""
        names = [name for name in self._modules if name.startswith("ih")]
        yield from ((name, name.replace("ih", "hh", 1)) for name in names)

    def __getattr__(self, name: str) -> Any:
        kind, _, linear = name.partition("_")
        if kind in _KINDS and linear in self.__dict__.get("_modules", ()):
            return getattr(self._modules[linear], kind)
        return super().__getattr__(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in self._modules:
            for kind in _KINDS:
                if (key := f"{prefix}{kind}_{name}") in state_dict:
                    state_dict[f"{prefix}{name}.{kind}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _layer(self, name: str) -> tuple[nn.Module, nn.Module]:
        return self._modules[f"ih{name}"], self._modules[f"hh{name}"]  # type: ignore[return-value]

    def _as_leaf(self, input: fx.Proxy, hx: Any) -> Any:
        """Returns the node of a symbolic trace that calls the module, as for those of torch.nn:
        what a call does depends on its input."""
        tracer: Any = input.tracer
        given = (input,) if hx is None else (input, hx)
        return tracer.create_proxy("call_module", tracer.path_of_module(self), given, {})

    def _zeros(self, x: Tensor, *shape: int) -> State:
        return (x.new_zeros(*shape, self.hidden_size),) * (self.GATES - 2)

    def extra_repr(self) -> str:
        made: str = self.FLOAT.extra_repr(self)  # type: ignore[arg-type]
        return made


def float_linear(weight: Any, bias: Any) -> nn.Linear:
    """Returns a linear that has these tensors."""
    n, k = weight.shape
    made = nn.Linear(k, n, bias is not None, device="meta", dtype=weight.dtype)
    made.weight = weight
    made.bias = bias
    return made


class _Layers(Recurrent):
    """LSTM or GRU. A sequence is [T, B, K], [B, T, K] with `batch_first`, [T, K] or packed."""

    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size = 0

    @classmethod
    def _options(cls) -> tuple[str, ...]:
        return *super()._options(), "num_layers", "batch_first", "dropout", "bidirectional"

    def flatten_parameters(self) -> None:
        """Does nothing; that of nn.LSTM arranges weights for cuDNN."""

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Returns the outputs and the last state, as that of nn.LSTM or nn.GRU does."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input, hx)
        if isinstance(input, PackedSequence):
            x, sizes, order, back = input
            states = self._states(hx, x, int(sizes[0]), True)
            y, last = self._run(x, tuple(_permuted(t, order) for t in states), sizes)
            packed = PackedSequence(y, sizes, order, back)
            return packed, self._hidden([_permuted(t, back) for t in last])
        self._check(input)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if batched and self.batch_first else x
        if len(x) == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        y, last = self._run(x, self._states(hx, x, x.shape[1], batched), None)
        if not batched:
            return y.squeeze(1), self._hidden([t.squeeze(1) for t in last])
        return y.transpose(0, 1) if self.batch_first else y, self._hidden(last)

    def _check(self, x: Tensor) -> None:
        kind = self.FLOAT.__name__
        if x.dim() not in (2, 3):
            raise ValueError(f"{kind}: Expected input to be 2D or 3D, got {x.dim()}D instead")
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                "input.size(-1) must be equal to input_size. Expected "
                f"{self.input_size}, got {x.shape[-1]}"
            )

    def _states(self, hx: Any, x: Tensor, batch: int, batched: bool) -> State:
        """Returns the state [layers and directions, B, H] of `hx`, the argument of the user."""
        shape = (self.num_layers * (1 + self.bidirectional), batch, self.hidden_size)
        if hx is None:
            return self._zeros(x, *shape[:2])
        states = tuple(hx) if self.GATES == 4 else (hx,)
        for i, t in enumerate(states):
            which = f"hidden[{i}]" if self.GATES == 4 else "hidden"
            if t.dim() != 2 + batched:
                form, rank = ("batched 3-D", "3-D") if batched else ("unbatched 2-D", "2-D")
                raise RuntimeError(f"For {form} input, hx should also be {rank}, got {t.dim()}-D")
            expected = shape if batched else shape[::2]
            if tuple(t.shape) != expected:
                raise RuntimeError(f"Expected {which} size {expected}, got {list(t.shape)}")
        return states if batched else tuple(t.unsqueeze(1) for t in states)

    def _run(self, x: Tensor, states: State, sizes: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        found: list[State] = []
        for layer in range(self.num_layers):
            if layer and self.dropout and self.training:
                x = F.dropout(x, self.dropout)
            outputs = []
            for end in ("", "_reverse")[: 1 + self.bidirectional]:
                state = tuple(t[len(found)] for t in states)
                linears = self._layer(f"_l{layer}{end}")
                y, last = run_layer(*linears, x, state, bool(end), sizes)
                outputs.append(y)
                found.append(last)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return x, [torch.stack(each) for each in zip(*found, strict=True)]

    def _hidden(self, states: list[Tensor]) -> Any:
        return tuple(states) if self.GATES == 4 else states[0]


def _permuted(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t.index_select(1, order)


class LSTM(_Layers):
    """An nn.LSTM with int8 weights, made by `quantize_`. y and the state have the dtype of its
    input. (L1)

    Gradients go to the input, the state and the biases. Packed sequences are supported, projections
    (`proj_size`) are not.
    """

    FLOAT, GATES = nn.LSTM, 4


class GRU(_Layers):
    """An nn.GRU with int8 weights, made by `quantize_`, in all else like `LSTM`. (L2)"""

    FLOAT, GATES = nn.GRU, 3


class _Cell(Recurrent):
    """One step of an LSTM or a GRU."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Returns the state after the step, as that of nn.LSTMCell or nn.GRUCell does."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input, hx)
        if input.dim() not in (1, 2):
            kind = self.FLOAT.__name__
            raise ValueError(f"{kind}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        states = self._states(hx, x, batched)
        _, last = run_layer(*self._layer(""), x.unsqueeze(0), states)
        last = last if batched else tuple(t.squeeze(0) for t in last)
        return last if self.GATES == 4 else last[0]

    def _states(self, hx: Any, x: Tensor, batched: bool) -> State:
        if hx is None:
            return self._zeros(x, x.shape[0])
        states = tuple(hx) if self.GATES == 4 else (hx,)
        states = states if batched else tuple(t.unsqueeze(0) for t in states)
        for t in states:
            if tuple(t.shape) != (x.shape[0], self.hidden_size):
                raise RuntimeError(
                    f"Expected hidden size {(x.shape[0], self.hidden_size)}, got {list(t.shape)}"
                )
        return states


class LSTMCell(_Cell):
    """An nn.LSTMCell with int8 weights, made by `quantize_`. (L1)"""

    FLOAT, GATES = nn.LSTMCell, 4


class GRUCell(_Cell):
    """An nn.GRUCell with int8 weights, made by `quantize_`. (L2)"""

    FLOAT, GATES = nn.GRUCell, 3
