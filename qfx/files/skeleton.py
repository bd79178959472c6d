"""Checks that the tensors of files fit a skeleton (the float model that they are loaded into), and
puts them there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qfx.files.expert_blocks import blocks_of, experts_from, products_in, renamed
from qfx.files.model_state import derived_buffers, ties
from qfx.files.replaced import Replaced, kind_in, linear_names, quantized_as, replaced
from qfx.files.tensor_file import TensorEntry
from qfx.io.errors import UserError, printable
from qfx.nn.linear import Linear
from qfx.nn.loading import Checked, fault_of
from qfx.nn.replace import replace
from qfx.nn.selection import Selection, listed, refuse
from qfx.nn.stored_modules import STORED, Stored, StoredKind, notify_listeners


@dataclass(frozen=True)
class Fitted:
    """The decisions for loading files into a skeleton.

    `linears`: the modules and products of experts that are replaced, by all of their names;
    `kinds`: the class that replaces each; `blocks`: the experts of these products; `parts`: the
    number of stored tensors of each; `schemes`: the texts of their schemes in the manifest, None
    without a manifest. `same`: name in the state dict -> name under which the same tensor is
    stored. `derived`: buffers outside the state dict that are loaded; `left`: stored buffers that
    are not needed. `was`: the tensors that are replaced, by name.
    """

    linears: Mapping[str, Replaced]
    kinds: Mapping[str, StoredKind]
    blocks: Mapping[str, nn.Module]
    parts: Mapping[str, int]
    schemes: Mapping[str, str] | None
    same: Mapping[str, str]
    derived: Collection[str]
    left: Collection[str]
    was: Mapping[str, Any]

    def is_part(self, name: str) -> bool:
        """Whether a tensor of this name belongs to a linear without float weight."""
        owner, _, part = name.rpartition(".")
        return owner in self.kinds and part in self.kinds[owner].PARTS

    def device(self, name: str) -> torch.device:
        """Returns the device on which the tensor of this name is put."""
        tensor = self.was.get(name)
        known = isinstance(tensor, Tensor) and not tensor.is_meta
        return tensor.device if known and tensor is not None else torch.device("cpu")


def fitted(
    skeleton: nn.Module,
    entries: Mapping[str, TensorEntry],
    at: str,
    *,
    linears: Mapping[str, str] | None,
    same: Mapping[str, str],
    derived: Sequence[str],
) -> Fitted:
    """Checks that the tensors of files fit the skeleton, with quantized weights for `linears`, and
    plans the loading.

    Raises ValueError, with the name `at` of the file. If there is no manifest, so that `linears` is
    None, int8 linears are found by the names of their tensors, and `same` by the ties of the
    skeleton.
    """
    _check_same(same, entries, at)
    products = products_in(skeleton)
    stored = {**entries, **{n: entries[first] for n, first in same.items()}}
    names = linear_names(skeleton, products, stored, linears)
    of_experts = {name: products[name] for name in names if name in products}
    state = renamed(skeleton.state_dict(), of_experts)
    beside = derived_buffers(skeleton, state)
    if linears is None:
        weights = {f"{name}.weight" for name in names}
        tied = ties(skeleton, state).items()
        same = {n: first for n, first in tied if n not in entries and n not in weights}
    stored = {**entries, **{n: entries[first] for n, first in same.items() if first in entries}}
    taken = {name: replaced(skeleton, products, name, stored, at) for name in names}
    kinds = {name: kind for name in taken if (kind := kind_in(name, stored))}
    parts = {name: _parts(name, kinds, same, entries, at) for name in taken}
    blocks = blocks_of([n for n in taken if n in products], skeleton, at)
    modules = {n: m for n, m in taken.items() if isinstance(m, nn.Module)}
    for kind in STORED:
        of_kind = {name: linear for name, linear in modules.items() if kinds[name] is kind}
        make = partial(quantized_as, kind)
        refuse(Selection("load", skeleton, {}, of_kind, {}, {}), make, instead="")
    refuse(Selection("load", skeleton, blocks, blocks, {}, {}), Linear.from_float, instead="")
    _check_names(state, stored, kinds, derived, at)
    _check_kinds(state, stored, taken, at)
    left = [n for n in derived if n not in beside or not _fits(stored[n], beside[n])]
    kept = [n for n in derived if n not in left]
    _check_values(skeleton, beside, kept, at)
    return Fitted(taken, kinds, blocks, parts, linears, same, kept, left, {**state, **beside})


def _check_same(same: Mapping[str, str], entries: Mapping[str, TensorEntry], at: str) -> None:
    for name, first in same.items():
        if name in entries or first not in entries:
            raise UserError(
                f"{at}: {printable(name)} is said to be {printable(first)}, and the files do "
                "not agree"
            )


def _parts(
    name: str,
    kinds: Mapping[str, StoredKind],
    same: Mapping[str, str],
    entries: Collection[str],
    at: str,
) -> int:
    """Returns the number of stored tensors of this linear, or of the linear that is stored in its
    place if both are the same module."""
    kind = kinds[name]
    other = _stored_by(name, kind, same)
    present = [part for part in kind.PARTS if f"{other}.{part}" in entries]
    if other != name:
        alike = all(same.get(f"{name}.{part}") == f"{other}.{part}" for part in present)
        if kinds.get(other) is not kind or not alike or kind.PARTS[1] not in present:
            raise UserError(
                f"{at}: {printable(name)} is said to be the linear {printable(other)}, and the "
                "files do not agree"
            )
    return len(present)


def _check_names(
    state: Collection[str],
    stored: Collection[str],
    taken: Mapping[str, StoredKind],
    derived: Collection[str],
    at: str,
) -> None:
    parts = {f"{name}.{part}" for name, kind in taken.items() for part in kind.PARTS}
    wanted = {*state} - {f"{name}.weight" for name in taken}
    stored_names = {*stored} - parts - {*derived}
    if unknown := [name for name in derived if name not in stored]:
        raise UserError(f"{at} says that there is {printable(listed(unknown))}, and there is not")
    if missing := sorted(wanted - stored_names):
        raise UserError(
            f"{at} is of another model, or incomplete: it lacks {printable(listed(missing))}, "
            "which the skeleton has"
        )
    if more := sorted(stored_names - wanted):
        raise UserError(
            f"{at} is of another model: it has {printable(listed(more))}, which the skeleton lacks"
        )


def _check_kinds(
    state: Mapping[str, Any], stored: Mapping[str, TensorEntry], taken: Collection[str], at: str
) -> None:
    for name, tensor in state.items():
        if name.rpartition(".")[0] in taken and name.endswith(".weight"):
            continue
        if isinstance(tensor, Tensor) and not _fits(stored[name], tensor):
            given = stored[name]
            raise UserError(
                f"{at}: {printable(name)} is {given.dtype} {list(given.shape)}, and in the skeleton"
                f" {tensor.dtype} {list(tensor.shape)}"
            )


def _fits(entry: TensorEntry, tensor: Tensor) -> bool:
    """Whether a stored tensor can replace `tensor`: the shapes are equal, and so are the dtypes, or
    both are floats. A bfloat16 model may be loaded into a float32 skeleton."""
    a, b = entry.dtype, tensor.dtype
    floats = a.is_floating_point and b.is_floating_point
    return entry.shape == tuple(tensor.shape) and (a == b or floats)


def _check_values(
    skeleton: nn.Module, beside: Mapping[str, Tensor], given: Collection[str], at: str
) -> None:
    """Raises UserError if a tensor outside of the state dict would be left on the meta device."""
    for name, buffer in beside.items():
        if buffer.is_meta and name not in given:
            raise UserError(
                f"{at} does not have the buffer {printable(name)}, which on the meta device has no "
                "values: make the skeleton on the CPU"
            )
    for owner, module in skeleton.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UserError(
                    f"{at}: the attribute {name!r} of {owner or 'the model'} is a tensor on the "
                    "meta device, and no file has it: make the skeleton on the CPU, or make it a "
                    "buffer"
                )


def fill(
    skeleton: nn.Module,
    plan: Fitted,
    made: Mapping[str, Stored],
    rest: Mapping[str, Tensor],
    at: str,
) -> nn.Module:
    """Puts all modules and tensors into the skeleton and returns it. Modules that can check their
    part of a state dict (`Checked`) do so before anything is changed; raises UserError if one
    refuses it."""
    whole = {**rest, **{n: rest[f] for n, f in plan.same.items() if f in rest}}
    state = {n: t for n, t in whole.items() if n not in plan.derived and n not in plan.left}
    for name, module in skeleton.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if isinstance(module, Checked) and (fault := fault_of(module, state, prefix)):
            raise UserError(f"{at}: {fault}")
    by = {name: _stored_by(name, kind, plan.same) for name, kind in plan.kinds.items()}
    linears = {n: m for n, m in plan.linears.items() if isinstance(m, nn.Module)}
    each = {n: made[by[n]] for n in linears} | experts_from(plan.blocks, made, by.__getitem__)
    taken = {**linears, **plan.blocks}
    replace(Selection("load", skeleton, taken, dict(taken), {}, {}), each)
    notify_listeners(skeleton)
    skeleton.load_state_dict(state, strict=False, assign=True)
    for name in plan.derived:
        _put(skeleton, name, whole[name])
    for name, tensor in _tied(skeleton, plan):
        _put(skeleton, name, tensor)
    return skeleton


def _stored_by(linear: str, kind: StoredKind, same: Mapping[str, str]) -> str:
    codes = f"{linear}.{kind.PARTS[1]}"
    return same.get(codes, codes).rpartition(".")[0]


def _tied(skeleton: nn.Module, plan: Fitted) -> Iterator[tuple[str, Tensor]]:
    for name, first in plan.same.items():
        owner, _, last = first.rpartition(".")
        module = skeleton.get_submodule(owner)
        tensor: Tensor | None = module._parameters.get(last)
        tensor = module._buffers.get(last) if tensor is None else tensor
        if tensor is not None:
            yield name, tensor


def _put(skeleton: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    setattr(skeleton.get_submodule(owner), last, tensor)
