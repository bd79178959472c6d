"""SavedTensors: the tensors that an int8 checkpoint has for one layer of vLLM, as parameters that
vLLM's loaders fill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from qfx.io.errors import UserError, printable
from qfx.nn.loading import StoredModule
from qfx.nn.scheme_tensor import KEY, LENGTH
from qfx.nn.state_checks import Kind

WHO = "qfx in vLLM"
MARK = "weight"  # saved next to the codes, int8 [N]: see `qfx/hf/state_dict.py`
OF_ROWS = ("codes", "row_codes", "scale", "zero_point", "minimum", MARK)  # [N] or [N, ..]
OF_COLUMNS = ("factor", "shift")  # [K]


class SavedTensors:
    """The saved tensors of one layer: a linear, several that are united in rows, or an embedding.

    `register` creates a parameter for each, which has the shape that the scheme requires, and the
    attributes by which vLLM's loader of the layer finds this rank's rows and columns. United
    linears must have the same scheme and columns. `taken` returns what was loaded, checked.

    `began` is called with each tensor that is loaded.
    """

    def __init__(
        self, kind: type[StoredModule], scheme: Tensor, name: str, began: Callable[[], None]
    ) -> None:
        self.kind, self.scheme, self.name, self.began = kind, scheme, name, began
        self.size = (0, 0)
        self.shards: dict[str, set[Any]] = {}  # by part: those of the united that were loaded

    def register(
        self, layer: nn.Module, sizes: Sequence[int], k: int, loader: Callable[..., Any]
    ) -> None:
        """Registers parameters of `layer`, for the weight [N, K] of this rank. `sizes`: the rows of
        each of the united, N together. `loader`: vLLM's."""
        self.size = n, _ = sum(sizes), k
        kinds: dict[str, Kind] = {KEY: (torch.int32, (LENGTH,)), MARK: (torch.int8, (n,))}
        kinds |= self.kind.kinds(self.scheme, f"{self.name}.{KEY}", n, k)
        self.shards = {part: set() for part in kinds}
        for part, (dtype, shape) in kinds.items():
            empty = torch.empty(shape, dtype=dtype, device=current_platform.device_type)
            made = nn.Parameter(empty, requires_grad=False)
            of_part = _dims(part, shape, len(sizes)) | {"weight_loader": self._loads(part, loader)}
            for attribute, value in of_part.items():
                setattr(made, attribute, value)
            layer.register_parameter(part, made)

    def _loads(self, part: str, loader: Callable[..., Any]) -> Callable[..., None]:
        """Returns what loads a tensor into the parameter of `part`, and checks it: a function,
        whose first argument is called `param`, as vLLM requires to load again."""

        def load(param: nn.Parameter, loaded: Tensor, *shard: Any, **named: Any) -> None:
            self.began()
            again = part not in OF_ROWS and self.shards[part]
            before = param.detach().clone() if again else None
            try:
                loader(param, loaded, *shard, **named)
            except (AssertionError, RuntimeError) as why:
                raise self._misfit(part, param, loaded) from why
            if loaded.dtype != param.dtype:
                raise self._misfit(part, param, loaded)
            if param.is_meta:  # vLLM counts what it is going to load
                return
            if before is not None and not torch.equal(before, param.detach()):
                raise UserError(
                    f"{WHO}: {self.name} unites linears with another {part} each: quantize them "
                    "with one, or without smoothing (qfx.Config(smoothing=False))"
                )
            self.shards[part].add((*shard, *named.values()))

        return load

    def _misfit(self, part: str, param: Tensor, loaded: Tensor) -> UserError:
        return UserError(
            f"{WHO}: {self.name}.{part} is {loaded.dtype} {list(loaded.shape)}, which does not "
            f"fit {param.dtype} {list(param.shape)}, as the scheme in config.json says"
        )

    def taken(self, layer: nn.Module) -> Any:
        """Returns the state that `StoredModule.taken_from` made of the loaded tensors. Raises
        UserError for tensors that are in no file, and for those that do not fit each other."""
        most = max(map(len, self.shards.values())) or 1
        absent = [part for part, shards in self.shards.items() if len(shards) < most]
        if absent:
            names = ", ".join(f"{self.name}.{part}" for part in absent)
            raise UserError(f"{WHO}: no file of the model has all of {names}")
        self.shards = {part: set() for part in self.shards}  # for when vLLM loads again
        loaded: dict[str, Tensor] = {part: getattr(layer, part).detach() for part in self.shards}
        if not torch.equal(loaded[KEY].cpu(), self.scheme):
            raise UserError(
                f"{WHO}: {self.name} has another scheme in its file than in config.json: save the "
                "model again"
            )
        _fill_padding(loaded["scale"], layer)
        del loaded[MARK]
        parts = {f"{self.name}.{part}": tensor for part, tensor in loaded.items()}
        try:
            return self.kind.taken_from(parts, f"{self.name}.", *self.size)
        except ValueError as why:
            raise UserError(f"{WHO}: {printable(str(why))}") from None


def _dims(part: str, shape: Sequence[int], united: int) -> dict[str, Any]:
    """Returns the attributes of a parameter by which vLLM's loaders find a rank's part of it, and
    know how many elements files have for it."""
    if part in OF_ROWS:
        return {"output_dim": 0} | ({"input_dim": 1} if len(shape) == 2 else {})
    every = {"ignore_warning": True, "weight_loader_numel": united * math.prod(shape)}
    return every | ({"input_dim": 0} if part in OF_COLUMNS else {})


def _fill_padding(scale: Tensor, layer: nn.Module) -> None:
    """Sets the scales of the rows by which vLLM pads a vocabulary, whose codes it sets to zero.
    Those of low-bit codes may be zero."""
    held = getattr(layer, "shard_indices", None)
    if held is not None and scale.dtype == torch.float32:
        scale[held.num_org_elements :] = 1
