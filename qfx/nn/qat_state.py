"""The state dict of a module that trains its quantization, and the checks of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.nn.loading import Checked, Mismatched
from qfx.nn.scheme_tensor import KEY, of_earlier, read
from qfx.nn.state_checks import State, check_kind
from qfx.values.limits import FLOATS


class TrainedState(Checked):
    """A module that trains with the scheme `trained_under`, which is saved with its parameters.

    Another scheme may need other parameters, which an optimizer refers to, so a state dict with
    another scheme is refused. `kind`: the name of the module in the saved scheme. `steps`: the
    parameters that have no meaning without the scheme; a state dict without any of them belongs to
    a float linear.
    """

    kind: str
    steps: tuple[str, ...]

    def trained_under(self) -> Tensor:
        """Returns the scheme as the int32 tensor that the state dict contains under `scheme`."""
        raise NotImplementedError

    def check_state(self, state: State, prefix: str) -> None:
        own = self.trained_under()
        saved_scheme = state.get(prefix + KEY)
        names = [prefix + name for name in self.steps if prefix + name in state]
        if saved_scheme is None and names:
            raise ValueError(of_earlier(prefix, " and ".join(names)))
        if saved_scheme is not None:
            saved, ours = (read(t, prefix + KEY, self.kind) for t in (saved_scheme, own))
            others = [name for name in saved if saved[name] != ours[name]]
            if others:
                each = ", ".join(f"{n}={saved[n]!r} instead of {ours[n]!r}" for n in others)
                raise ValueError(
                    f"{prefix}{KEY} says {each}: the module must be made with the scheme that the "
                    "steps were trained under"
                )
        for name in self.steps:
            if prefix + name in state:
                _check_step(state[prefix + name], prefix + name, self.get_parameter(name))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + KEY] = self.trained_under()

    def _own_keys(self) -> set[str]:
        return {KEY}

    def _mismatched(self, state: State, prefix: str, found: Any) -> Mismatched:
        return Mismatched([] if prefix + KEY in state else [prefix + KEY], [])


def _check_step(value: Any, name: str, parameter: nn.Parameter) -> None:
    """Raises ValueError unless `value` is the logarithm of a step. NaN is allowed: not yet
    fitted."""
    check_kind(value, name, (*FLOATS, torch.float64), parameter.shape)
    here = value.to_local() if hasattr(value, "to_local") else value  # a DTensor has to_local
    if has_values(here) and here.isinf().any():
        raise ValueError(f"{name} holds {here[here.isinf()][0].item()}, no logarithm of a step")
