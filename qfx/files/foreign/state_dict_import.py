"""Converts the model of another tool to a state dict of qfx. A linear takes the integers of the
file if it can hold them; otherwise it is quantized again if requested, or stays float."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qfx.files.expert_blocks import products_in
from qfx.files.foreign.item import Item
from qfx.files.foreign.weight import (
    Activations,
    ForeignGrid,
    parts_of,
    scheme_of,
    unkept,
)
from qfx.files.model_state import ties
from qfx.files.tensor_file import TensorEntry
from qfx.io.errors import UserError, printable
from qfx.nn.experts_like import why_no_experts_scheme
from qfx.nn.frozen_state import TENSORS, kinds, scheme_tensor
from qfx.nn.linear import Linear
from qfx.nn.scheme_tensor import KEY, LENGTH
from qfx.nn.stacked_weight import StackedWeight
from qfx.values.config import Config
from qfx.values.scheme import PER_COLUMN, Scheme
from qfx.values.select import check_names, left_out

log = logging.getLogger(__name__)


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
    linears that are quantized again. All other items become floats. `products`: the int8 names of
    the products of experts, by the names of their parameters.
    """

    foreign: Foreign
    kept: dict[str, Scheme]
    requantized: dict[str, Scheme]
    items: dict[str, Item]
    products: Mapping[str, str]
    lost: dict[str, float] = field(default_factory=dict)  # |w' - w| / |w| of those in `requantized`

    @property
    def at(self) -> str:
        return self.foreign.at

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors that a state dict of the model would contain."""
        found: dict[str, TensorEntry] = {}
        for name, item in self.items.items():
            owner = self.owner(name)
            scheme = self.kept.get(owner) or self.requantized.get(owner)
            if scheme is None:
                found[name] = TensorEntry(item.dtype, item.shape, 0)
                continue
            fields = _fields(scheme, item.grid if owner in self.kept else None)
            found[f"{owner}.{KEY}"] = TensorEntry(torch.int32, (LENGTH,), 0)
            *experts, n, k = item.shape
            for part, (dtype, shape) in kinds(scheme, fields, n, k).items():
                found[f"{owner}.{part}"] = TensorEntry(dtype, (*experts, *shape), 0)
        return found

    def owner(self, name: str) -> str:
        """Returns the name of the linear, or of the product of experts, of a weight."""
        return self.products.get(name) or name.removesuffix(".weight")

    def tensors(self) -> Iterator[tuple[Path, str, Tensor]]:
        for name, item in self.items.items():
            owner = self.owner(name)
            if owner in self.kept:
                for part, tensor in self._kept(name, owner, item).items():
                    yield item.path, f"{owner}.{part}", tensor
            elif owner in self.requantized:
                for part, tensor in self._requantized_parts(owner, item).items():
                    yield item.path, f"{owner}.{part}", tensor
            else:
                yield item.path, name, item.floats()
        if self.lost:
            self._log_requantized()

    def _kept(self, name: str, owner: str, item: Item) -> dict[str, Tensor]:
        try:
            parts = parts_of(item.integers(), self.kept[owner].x)
        except UserError:
            raise
        except ValueError as why:
            raise UserError(f"{printable(str(item.path))}: {printable(name)}: {why}") from None
        if item.each is None:
            return parts
        e, n, _ = item.shape
        return {p: t if p == KEY else t.reshape(e, n, *t.shape[1:]) for p, t in parts.items()}

    def _requantized_parts(self, owner: str, item: Item) -> dict[str, Tensor]:
        scheme = self.requantized[owner]
        if item.each is not None:
            each = (values.float() for values in item.experts())
            stack = StackedWeight.from_each(each, item.shape, scheme)
            made = (stack.dequantized(e) for e in range(stack.experts))
            self.lost[owner] = _loss(zip(made, item.experts(), strict=True))
            return stack.saved()
        values = item.floats().float()
        holder = nn.Linear(1, 1, bias=False, device="meta", dtype=torch.float32)
        holder.weight = nn.Parameter(values, requires_grad=False)
        linear = Linear.from_float(holder, scheme)
        self.lost[owner] = _loss([(linear.weight, values)])
        state = {n: t for n, t in linear.state_dict().items() if n in TENSORS}
        return state | {KEY: scheme_tensor(scheme, {**state, "factor": linear.factor})}

    def _log_requantized(self) -> None:
        kinds_of = {self.owner(name): item.kind for name, item in self.items.items()}
        lines = "".join(
            f"\n  {printable(owner)} ({kinds_of[owner]}): "
            f"{self.requantized[owner]}, off by {lost:.2%} of its norm"
            for owner, lost in self.lost.items()
        )
        log.warning(
            "load: %s linears of %s were quantized again:%s", len(self.lost), self.at, lines
        )


def _loss(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns |w' - w| / |w| of weights w' that were made of w, for several pairs together."""
    off = norm = 0.0
    for made, values in pairs:
        off += float(torch.linalg.vector_norm(made.sub(values.float()))) ** 2
        norm += float(torch.linalg.vector_norm(values.float())) ** 2
    return math.sqrt(off) / max(math.sqrt(norm), 1e-38)


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
    experts = products_in(skeleton)
    blocks = {name.rpartition(".")[0] for name in experts}
    if requantize is not None:
        _check_config(requantize, [*linears, *blocks])
    products = {f"{name.rpartition('.')[0]}.{p.name}": name for name, p in experts.items()}
    items = _with_ties(foreign.items, skeleton, linears)
    found = Imported(foreign, {}, {}, items, products)
    for name, item in items.items():
        owner = found.owner(name)
        taken = (owner in linears and name != owner) or (name in products and item.each)
        if taken and item.kind:
            _decide(found, name, item, x, requantize)
    return found


def _decide(
    found: Imported, name: str, item: Item, x: Activations, requantize: Config | None
) -> None:
    why = "has a grid that no linear holds" if item.grid is None else unkept(item.grid)
    here, owner = f"{found.at}: {printable(name)} is {item.kind}, which", found.owner(name)
    if not why:
        assert item.grid is not None
        try:
            scheme = scheme_of(item.grid, item.x if x == "file" else x)  # type: ignore[arg-type]
            _check_experts(item, scheme)
        except ValueError as reason:
            raise UserError(f"{here} does not go with these activations: {reason}") from None
        found.kept[owner] = scheme
    elif requantize is None:
        error = UserError if item.grid is None else NotImplementedError
        raise error(
            f"{here} {why}: requantize=qfx.Config() quantizes such linears again, and says what "
            "that loses"
        )
    elif not left_out(requantize, [owner.rpartition(".")[0] if item.each else owner]):
        scheme = requantize.chosen.at(item.shape[-1])
        try:
            _check_experts(item, scheme)
        except ValueError as reason:
            raise UserError(f"{here} cannot be requantized: {reason}") from None
        found.requantized[owner] = scheme


def _check_experts(item: Item, scheme: Scheme) -> None:
    if item.each and (why := why_no_experts_scheme(scheme)):
        raise ValueError(why)


def _linears(skeleton: nn.Module) -> dict[str, nn.Linear]:
    modules = skeleton.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if type(module) is nn.Linear}


def _check_config(config: Config, linears: Collection[str]) -> None:
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
