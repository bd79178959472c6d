"""Converts the model of another tool to a state dict of qfx. A linear takes the integers of the
file if it can hold them; otherwise it is quantized again if requested, or stays float."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qfx.files.foreign.weight import (
    Activations,
    ForeignGrid,
    ForeignWeight,
    parts_of,
    scheme_of,
    unkept,
)
from qfx.files.model_state import ties
from qfx.files.tensor_file import TensorEntry
from qfx.io.errors import UserError, printable
from qfx.nn.frozen_state import TENSORS, kinds, scheme_tensor
from qfx.nn.linear import Linear
from qfx.nn.scheme_tensor import KEY, LENGTH
from qfx.values.config import Config
from qfx.values.scheme import PER_COLUMN, QSpec, Scheme
from qfx.values.select import check_names, left_out

log = logging.getLogger(__name__)


class Item(NamedTuple):
    """A tensor of a model of another tool.

    `shape`, `dtype`: the shape and dtype of its float values, which `floats` reads. `kind`: the
    name of its format in the file, '' for a plain tensor. `grid`: the format of its integers; None
    if it has none, or if qfx does not know their format. `weight` reads the integers; None without
    a `grid`. `x`: how the file quantizes activations, or how qfx does if the file does not say.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    floats: Callable[[], Tensor]
    kind: str = ""
    grid: ForeignGrid | None = None
    weight: Callable[[], ForeignWeight] | None = None
    x: QSpec | None = QSpec(symmetric=False)


class Foreign(NamedTuple):
    """A model of another tool. `at`: the name of its file, for error messages. `items`: its
    tensors, by their names in the skeleton; tensors that the skeleton lacks have the name of the
    file."""

    at: str
    items: Mapping[str, Item]


@dataclass
class Imported:
    """The decision for each tensor of a model of another tool.

    `kept`: the schemes of linears that hold the integers of the file. `requantized`: the schemes of
    linears that are quantized again. All other items become floats.
    """

    foreign: Foreign
    kept: dict[str, Scheme]
    requantized: dict[str, Scheme]
    items: dict[str, Item]
    lost: dict[str, float] = field(default_factory=dict)  # |w' - w| / |w| of those in `requantized`

    @property
    def at(self) -> str:
        return self.foreign.at

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors that a state dict of the model would contain."""
        found: dict[str, TensorEntry] = {}
        for name, item in self.items.items():
            owner = name.removesuffix(".weight")
            scheme = self.kept.get(owner) or self.requantized.get(owner)
            if scheme is None:
                found[name] = TensorEntry(item.dtype, item.shape, 0)
                continue
            fields = _fields(scheme, item.grid if owner in self.kept else None)
            found[f"{owner}.{KEY}"] = TensorEntry(torch.int32, (LENGTH,), 0)
            for part, (dtype, shape) in kinds(scheme, fields, *item.shape).items():
                found[f"{owner}.{part}"] = TensorEntry(dtype, shape, 0)
        return found

    def tensors(self) -> Iterator[tuple[Path, str, Tensor]]:
        for name, item in self.items.items():
            owner = name.removesuffix(".weight")
            if owner in self.kept:
                for part, tensor in self._kept(name, item).items():
                    yield item.path, f"{owner}.{part}", tensor
            elif owner in self.requantized:
                for part, tensor in self._requantized_parts(owner, item).items():
                    yield item.path, f"{owner}.{part}", tensor
            else:
                yield item.path, name, item.floats()
        if self.lost:
            self._log_requantized()

    def _kept(self, name: str, item: Item) -> dict[str, Tensor]:
        assert item.weight is not None
        try:
            return parts_of(item.weight(), self.kept[name.removesuffix(".weight")].x)
        except UserError:
            raise
        except ValueError as why:
            raise UserError(f"{printable(str(item.path))}: {printable(name)}: {why}") from None

    def _requantized_parts(self, owner: str, item: Item) -> dict[str, Tensor]:
        values = item.floats().float()
        holder = nn.Linear(1, 1, bias=False, device="meta", dtype=torch.float32)
        holder.weight = nn.Parameter(values, requires_grad=False)
        scheme = self.requantized[owner]
        linear = Linear.from_float(holder, scheme)
        change = torch.linalg.vector_norm(linear.weight.sub(values))
        self.lost[owner] = float(change / torch.linalg.vector_norm(values).clamp_min(1e-38))
        state = {n: t for n, t in linear.state_dict().items() if n in TENSORS}
        return state | {KEY: scheme_tensor(scheme, {**state, "factor": linear.factor})}

    def _log_requantized(self) -> None:
        lines = "".join(
            f"\n  {printable(name)} ({self.items[f'{name}.weight'].kind}): "
            f"{self.requantized[name]}, off by {lost:.2%} of its norm"
            for name, lost in self.lost.items()
        )
        log.warning(
            "load: %s linears of %s were quantized again:%s", len(self.lost), self.at, lines
        )


def _fields(scheme: Scheme, kept: ForeignGrid | None) -> dict[str, Any]:
    """Returns the fields of the scheme tensor that `scheme` does not determine. `kept`: the format
    of the file if its integers are kept, None if the linear is quantized again."""
    fields = {"factor": scheme.w.axes == PER_COLUMN, "x_zero_point": False, "shift": False}
    half = kept.half if kept else torch.bfloat16
    return {**fields, "minimum": kept is not None and kept.minimum, "half": half}


def imported(
    foreign: Foreign, skeleton: nn.Module, x: Activations, requantize: Config | None
) -> Imported:
    """Decides for each tensor how it is loaded into `skeleton`. Reads no weight.

    `x`: how activations are quantized, "file" for the choice of the file. `requantize`: how linears
    are quantized that the file stores in a format that no linear of qfx can hold; None if such a
    linear is an error.

    Raises UserError for a scheme that no operator computes, and for a `requantize` with a recipe.
    Without `requantize`, raises UserError for a format that qfx does not know, and
    NotImplementedError for a format that is not supported yet.
    """
    linears = _linears(skeleton)
    if requantize is not None:
        _check_config(requantize, linears)
    found = Imported(foreign, {}, {}, _with_ties(foreign.items, skeleton, linears))
    for name, item in found.items.items():
        owner = name.removesuffix(".weight")
        if owner in linears and name != owner and item.kind:
            _decide(found, owner, item, x, requantize)
    return found


def _decide(
    found: Imported, owner: str, item: Item, x: Activations, requantize: Config | None
) -> None:
    why = "has a grid that no linear holds" if item.grid is None else unkept(item.grid)
    here = f"{found.at}: {printable(owner)}.weight is {item.kind}, which"
    if not why:
        assert item.grid is not None
        try:
            found.kept[owner] = scheme_of(item.grid, item.x if x == "file" else x)  # type: ignore
        except ValueError as reason:
            raise UserError(f"{here} does not go with these activations: {reason}") from None
    elif requantize is None:
        error = UserError if item.grid is None else NotImplementedError
        raise error(
            f"{here} {why}: requantize=qfx.Config() quantizes such linears again, and says what "
            "that loses"
        )
    elif not left_out(requantize, [owner]):
        found.requantized[owner] = requantize.chosen.at(item.shape[1])


def _linears(skeleton: nn.Module) -> dict[str, nn.Linear]:
    modules = skeleton.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if type(module) is nn.Linear}


def _check_config(config: Config, linears: Mapping[str, nn.Linear]) -> None:
    if config.recipe is not None:
        raise UserError("load: requantize has a recipe, which is of float weights: leave it out")
    check_names(config, linears)


def _with_ties(
    items: Mapping[str, Item], skeleton: nn.Module, linears: Mapping[str, nn.Linear]
) -> dict[str, Item]:
    """Returns the items, completed for output layers that are tied to an embedding. The file may
    contain the tied weight only under the name of the embedding, quantized. Then the output layer
    gets the same item and can stay quantized, and the embedding becomes float. Large tensors come
    first, so that they are loaded while little memory is in use."""
    found = dict(items)
    for name, first in ties(skeleton, skeleton.state_dict()).items():
        for absent, present in ((name, first), (first, name)):
            known = present in items and items[present].kind and absent not in items
            if known and absent.removesuffix(".weight") in linears:
                found[absent] = items[present]
    return dict(sorted(found.items(), key=lambda item: -prod(item[1].shape)))
