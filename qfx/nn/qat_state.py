"""The state dict of a module that trains its quantization, and the checks of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.nn.loading import Checked, State, check_kind, fault_of
from qfx.nn.scheme_tensor import KEY, of_earlier, read
from qfx.values.limits import FLOATS


class TrainedState(Checked):
    """A module that trains with the scheme `trained_under`, which is saved with its parameters.

    Another scheme may need other parameters, which an optimizer refers to, so a state dict with
    another scheme is refused. `kind`: the name of the module in the saved scheme. `steps`: the
    parameters that have no meaning without the scheme; a state dict without any of them is that of
    a float linear.
    """

    kind: str
    steps: tuple[str, ...]

    def trained_under(self) -> Tensor:
        """Returns the tensor that is saved as `scheme`."""
        raise NotImplementedError

    def check_state(self, state: State, prefix: str) -> None:
        own = self.trained_under()
        given = state.get(prefix + KEY)
        names = [prefix + name for name in self.steps if prefix + name in state]
        if given is None and names:
            raise ValueError(of_earlier(prefix, " and ".join(names)))
        if given is not None:
            there, here = (read(t, prefix + KEY, self.kind) for t in (given, own))
            others = [name for name in there if there[name] != here[name]]
            if others:
                each = ", ".join(f"{n}={there[n]!r} instead of {here[n]!r}" for n in others)
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

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if fault := fault_of(self, state_dict, prefix):
            errors.append(fault)
            return
        if prefix + KEY not in state_dict:
            missing.append(prefix + KEY)
        others = {key: value for key, value in state_dict.items() if key != prefix + KEY}
        super()._load_from_state_dict(others, prefix, metadata, strict, missing, unexpected, errors)


def _check_step(value: Any, name: str, parameter: nn.Parameter) -> None:
    """Raises ValueError unless `value` is the logarithm of a step. NaN is allowed: not yet
    fitted."""
    check_kind(value, name, (*FLOATS, torch.float64), parameter.shape)
    here = value.to_local() if hasattr(value, "to_local") else value  # a DTensor has to_local
    if has_values(here) and here.isinf().any():
        raise ValueError(f"{name} holds {here[here.isinf()][0].item()}, no logarithm of a step")
