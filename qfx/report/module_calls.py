"""Module calls: measures the int8 modules of a model on the inputs that they get when the model
runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import qfx._C as _C
from qfx.cost.timing import medians
from qfx.match.operator_calls import BINARY
from qfx.nn.conv import Conv
from qfx.nn.experts import Experts
from qfx.ops.single_tensors import sqnr
from qfx.report.experts_calls import ExpertsCall, experts_call
from qfx.report.float_forms import float_form
from qfx.report.report_row import Range, Row, SiteMeasurement, range_of, transform_of
from qfx.values.scheme import Scheme

_ROUNDS = 3


class ModuleCall(NamedTuple):
    """A call of an int8 module, and its measurement. `m`: the number of tokens of its input, or of
    ids. `seen`: the range of a float input, None for ids."""

    name: str
    module: Any
    m: int
    seen: Range | None
    measured: SiteMeasurement


def measured_calls(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    references: Mapping[str, nn.Module],
    run: Callable[[], Any],
) -> list[ModuleCall | ExpertsCall]:
    """Runs the model by `run` and measures each call of the int8 `modules`, in the order of the
    calls. A module is compared with the one of the same name in `references`, or else with its own
    dequantized weight, in float32 on the input that the int8 module gets. The times in float are
    measured in the dtype of the output."""
    found: list[ModuleCall | ExpertsCall] = []

    def measure(name: str, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if isinstance(module, Experts):
            found.append(experts_call(name, module, references.get(name), args))
            return
        x = args[0] if args else kwargs["input"]
        form, int8 = float_form(references.get(name, module)), partial(module.forward, x)
        float_s, int8_s = medians(partial(form.to(output.dtype).run, x), int8, rounds=_ROUNDS)
        exact_rows = form.lookup and not references  # looked up in the very table
        error = None if exact_rows else sqnr(form.run(x), int8())
        m = x.numel() if form.lookup else x.numel() // max(x.shape[-1], 1)
        if isinstance(module, Conv):
            m = output.numel() // module.out_features
        seen = None if form.lookup else range_of(x)
        found.append(ModuleCall(name, module, m, seen, SiteMeasurement(error, float_s, int8_s)))

    with ExitStack() as hooks, by_modules(model), torch.compiler.set_stance("force_eager"):
        for name, module in _once(modules):
            hook = module.register_forward_hook(
                partial(measure, name), with_kwargs=True, prepend=True
            )
            hooks.callback(hook.remove)
        run()
    return found


def _once(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields each module once, with the first of its names."""
    seen = set[int]()
    for name, module in modules.items():
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


@contextmanager
def by_modules(model: nn.Module) -> Iterator[None]:
    """Context manager inside which a model that `compile_for_generate` changed runs its modules and
    no programs."""
    compiled = [vars(m) for m in model.modules() if has_programs(m)]
    before = [attributes["forward"] for attributes in compiled]
    try:
        for attributes, forward in zip(compiled, before, strict=True):
            attributes["forward"] = forward.by_modules
        yield
    finally:
        for attributes, forward in zip(compiled, before, strict=True):
            attributes["forward"] = forward


def has_programs(module: nn.Module) -> bool:
    """Whether `compile_for_generate` has replaced the forward of the module."""
    return hasattr(vars(module).get("forward"), "by_modules")


def with_calls(
    rows: Sequence[Row],
    every: Sequence[ModuleCall | ExpertsCall],
    modules: Mapping[str, nn.Module],
) -> list[Row]:
    """Returns the rows of the captured graphs, completed by the measurements of the module calls
    that belong to them. The row of a block of experts is replaced by that of its call. Calls
    without a row in a captured graph get rows of their own: embeddings before all others, the rest
    after them, and experts at the end."""
    calls = [call for call in every if isinstance(call, ModuleCall)]
    experts = deque(call for call in every if isinstance(call, ExpertsCall))
    left: dict[int, deque[ModuleCall]] = defaultdict(deque)
    for call in calls:
        left[id(call.module)].append(call)
    captured = []
    for row in rows:
        module = modules.get(row.module)
        if isinstance(module, Experts) and experts and experts[0].name == row.module:
            captured.append(experts.popleft().row)
            continue
        waiting = left[id(module)]
        captured.append(_filled(row, waiting.popleft()) if waiting else row)
    others = [c for c in calls if c in left[id(c.module)]]
    lookups = [c for c in others if isinstance(c.module, nn.Embedding)]
    beside = [_row(c) for c in others if not isinstance(c.module, nn.Embedding)]
    return [*map(_lookup, lookups), *captured, *beside, *(call.row for call in experts)]


def _filled(row: Row, call: ModuleCall) -> Row:
    reason = row.reason.replace("operator of the model itself", f"module, {_kind(call.module)}")
    measured = call.measured._asdict() | (call.seen._asdict() if call.seen else {})
    return replace(row, **measured, measured=True, reason=reason, transform=_transform(call.module))


def _transform(module: Any) -> str:
    scheme, factor = getattr(module, "scheme", None), getattr(module, "factor", None)
    if not isinstance(scheme, Scheme):
        return ""
    return transform_of(scheme, module.in_features, isinstance(factor, Tensor))


def _row(call: ModuleCall) -> Row:
    k, n = call.module.in_features, call.module.out_features
    scheme = str(getattr(call.module, "scheme", BINARY))
    kind = "a 1-bit" if scheme == BINARY else "an int8"
    reason = f"{kind} module, {_kind(call.module)}, in code that Dynamo does not capture"
    return _filled(Row(call.name, "", f"{call.m}x{k}x{n}", scheme, _C.isa(), reason), call)


def _lookup(call: ModuleCall) -> Row:
    reason = f"an int8 table, {_kind(call.module)}: rows are looked up, nothing is multiplied"
    shape = f"{call.m} of {call.module.out_features}x{call.module.in_features}"
    row = Row(call.name, "", shape, call.module.token, "", reason, lookup=True)
    return _filled(row, call)


def _kind(module: nn.Module) -> str:
    return f"qfx.nn.{type(module).__name__}"
