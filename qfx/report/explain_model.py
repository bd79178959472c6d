"""explain: says of every matmul of a model, on given inputs, whether it is int8 or why not, and its
kernel, error and time; and gives error and time of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from qfx.cost.device_models import current_costs
from qfx.dynamo_backend.captured_graphs import watch_compiled
from qfx.host.dynamo import uncompiled, uncompiled_module
from qfx.io.errors import printable
from qfx.match.base import FLOAT
from qfx.match.operator_calls import BINARY
from qfx.nn import BinaryLinear, Conv, Experts, Linear, LSQConv, LSQLinear, SignLinear
from qfx.nn.left_float import why_left_float
from qfx.nn.recurrent_like import pairs_of_linears
from qfx.nn.weight_bytes import weight_bytes
from qfx.report.breaks import BEFORE, break_messages, breaks_since
from qfx.report.captured_rows import AsCalled, CapturedGraphs
from qfx.report.experts_calls import ExpertsCall
from qfx.report.float_forms import int8_modules, reference_modules
from qfx.report.module_calls import ModuleCall, has_programs, measured_calls, with_calls
from qfx.report.remedies import UNSEEN
from qfx.report.report import Report
from qfx.report.report_row import Row
from qfx.report.sides import Sides
from qfx.report.whole_model import CallInputs, WholeModel, whole_model
from qfx.values.config import Config, Configurable, parse_options
from qfx.values.select import check_names, names_in
from qfx.weights.cache import CACHE
from qfx.weights.model_restore import in_training, module_of, unchanged


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Configurable = None,
    reference: nn.Module | None = None,
    **keyword_inputs: Any,
) -> Report:
    """Runs `model(*inputs, **keyword_inputs)` and reports on each of its matmuls and on the whole
    model.

    For a float model or a function, it reports what `torch.compile(model, backend="qfx")` does:
    every matmul that qfx quantizes is run in int8 on its real input and, for comparison, in float.
    For a quantized model, it reports what runs: each int8 linear and embedding is compared with its
    own dequantized weight in float32, or with the weight in `reference`. With `options`, or under
    `torch.compile`, the report also contains what compiling adds.

    `model`: a module, an `fx.GraphModule` as any other, or a function. `options`: as for the
    backend. `reference`: the float model before it was quantized, with modules of the same names.
    Its linears get the inputs that the int8 linears get, and the output of the whole model is
    compared with its output. Raises ValueError for a wrong option, and for a reference that lacks a
    module.

    The model runs once for the rows of matmuls, a quantized model twice, and then 2 to 6 times in
    int8 and in float for the row of the whole model. It runs in the mode that it is in; the report
    says so if this is training mode. Afterwards its parameters, buffers and attributes, tensors
    among the inputs, and the default random generators of torch, Python and numpy are as before,
    also if it raises. For a function that is no module, only tensors that graphs write are
    restored. Not restored are other inputs, objects that attributes hold (other than lists, dicts
    and sets), other generators, and what code that Dynamo does not capture writes into parameters.
    Such a write gives a warning, unless it goes through `.data`.
    """
    config, _ = parse_options(options)
    module = module_of(model)
    modules, before = int8_modules(module), break_messages()
    references = reference_modules(modules, reference)
    as_called = _as_called(model, modules) if options is None else None
    graphs = CapturedGraphs(config, current_costs(), as_called)
    call_inputs = _inputs(inputs, keyword_inputs)
    with unchanged(model, "explain") as kept:
        if isinstance(call_inputs, CallInputs):
            call_inputs.restored()
        watch_compiled(model, graphs.look, *inputs, **keyword_inputs)
    if isinstance(model, nn.Module):
        check_names(config, names_in(uncompiled_module(model)) | graphs.seen)
    if kept.written:
        call_inputs = (
            f"its forward writes to parameters outside of captured graphs: {kept.written[0]}"
        )
    calls = _calls(model, modules, references, call_inputs)
    graphs.seen.update(call.name for call in calls)
    graphs.seen.update(_states_in(module, graphs.seen))
    rows = with_calls(graphs.rows, calls, modules)
    if isinstance(model, nn.Module):
        rows += _unseen(model, graphs.seen)
    breaks = breaks_since(before)
    if not graphs.graphs:
        warnings.warn(f"qfx.explain saw no graph: {_why_none(breaks)}", stacklevel=2)
    elif not any(row.reason.endswith(UNSEEN) for row in rows):
        breaks = tuple(line for line in breaks if not line.startswith(BEFORE))
    sides = Sides(model, modules, reference, as_called is not None, config, graphs.costs)
    of_weights = uncompiled_module(model) if isinstance(model, nn.Module) else None
    return Report(
        tuple(rows),
        len(graphs.graphs),
        in_training(model),
        breaks,
        graphs.macs,
        weight_bytes(of_weights, graphs.int8) if of_weights is not None else None,
        weight_bytes(of_weights, graphs.seen) if of_weights is not None else None,
        _whole(sides, rows, call_inputs, graphs),
        tuple(_notes(modules, reference, as_called)),
    )


def _as_called(model: Callable[..., Any], modules: Mapping[str, nn.Module]) -> AsCalled | None:
    """Returns how a quantized model runs without a backend; None for a model without int8 modules,
    and for a model under torch.compile."""
    module = module_of(model)
    if module is None or not modules or uncompiled(model) is not model:
        return None
    return AsCalled(why_left_float(module), any(map(has_programs, module.modules())))


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallInputs | str:
    """Returns the inputs for further runs of the model, or the reason why they cannot be copied."""
    try:
        return CallInputs(args, kwargs)
    except Exception as why:  # copying the user's objects may fail with any exception
        return f"the inputs cannot be copied for another run: {_first_line(why)}"


def _calls(
    model: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    references: Mapping[str, nn.Module],
    call_inputs: CallInputs | str,
) -> list[ModuleCall | ExpertsCall]:
    module = module_of(model)
    if module is None or not modules or not isinstance(call_inputs, CallInputs):
        return []
    with unchanged(model, "explain"), torch.no_grad():
        args, kwargs = call_inputs.restored()
        run = partial(uncompiled(model), *args, **kwargs)
        states = {name for _, name in pairs_of_linears(module)}
        at_once = {name: m for name, m in modules.items() if name not in states}
        return measured_calls(module, at_once, references, run)


def _whole(
    sides: Sides, rows: Sequence[Row], call_inputs: CallInputs | str, graphs: CapturedGraphs
) -> WholeModel:
    """Returns the SQNR and the times of a whole call, or why they are unknown."""
    if not isinstance(call_inputs, CallInputs):
        return WholeModel(why_not=call_inputs)
    if not graphs.graphs and not sides.modules:
        return WholeModel(why_not="no graph was captured")
    if sides.reference is None and all(row.scheme == FLOAT for row in rows):
        return WholeModel(why_not="all of it is float")
    if sides.reference is None and not sides.modules and graphs.own_operators:
        return WholeModel(why_not="it calls int8 operators itself: give explain a reference")
    try:
        with CACHE.temporary():
            return whole_model(sides.model, call_inputs, sides.in_float, sides.in_int8)
    except Exception as why:
        return WholeModel(why_not=f"another run of it raised {_first_line(why)}")


def _first_line(why: Exception) -> str:
    what, *_ = str(why).splitlines() or [""]
    return printable(f"{type(why).__name__}: {what}")


def _notes(
    modules: Mapping[str, nn.Module], reference: nn.Module | None, as_called: AsCalled | None
) -> Iterator[str]:
    """Yields notes about the rows of a quantized model."""
    if not modules:
        return
    if reference is None:
        yield (
            "SQNR of int8 modules: against their own weights, dequantized, in float32, so what "
            "quantizing their inputs loses; explain(..., reference=float_model) adds what the "
            "weights lost"
        )
    else:
        yield (
            "SQNR of int8 modules: against the linears of the reference model in float32, on the "
            "inputs that the int8 modules get"
        )
    if as_called is not None and as_called.programs:
        yield (
            "programs of compile_for_generate, which generate runs, compute with the same weights; "
            "the rows are of the model's modules"
        )
    elif as_called is not None:
        yield (
            "the model is explained as it is called; explain(torch.compile(model, backend='qfx'), "
            "...) says what compiling adds"
        )


def _why_none(breaks: Sequence[str]) -> str:
    if breaks:
        return f"Dynamo gives up all of this callable. It says: {' '.join(breaks)}"
    return (
        "torch.compile does not capture this callable, or has reached its recompile limit for it "
        "(torch._dynamo.reset() clears that)"
    )


def _states_in(model: nn.Module | None, seen: set[str]) -> Iterator[str]:
    """Yields the linears of the state of the recurrent modules that are in captured graphs, where
    one operator runs all their steps."""
    for _, name in pairs_of_linears(model) if model is not None else ():
        if name.rpartition(".")[0] in seen:
            yield name


def _unseen(model: nn.Module, seen: set[str]) -> Iterator[Row]:
    """Yields a row for each linear or recurrent module of the model that is in no captured graph,
    so that nothing stays float without a line in the report. `seen`: the names in captured
    graphs."""
    plain = uncompiled_module(model)
    everywhere = plain.named_modules(remove_duplicate=False)
    weights = ("weight", "weight_ih", "weight_ih_l0")
    ran = {id(m) for name, m in everywhere if seen & {name, *(f"{name}.{w}" for w in weights)}}
    for name, module in plain.named_modules():
        if name and id(module) not in ran:
            if isinstance(module, _OWN):
                scheme = str(getattr(module, "scheme", BINARY))
                yield Row(name, "", _shape(module), scheme, "", f"an int8 module, {UNSEEN}")
            elif isinstance(module, _MULTIPLIES):
                yield Row(name, "", _shape(module), "float", "", UNSEEN)


def _shape(module: nn.Module) -> str:
    if isinstance(module, _RECURRENT):
        return ""  # several matmuls
    if isinstance(module, Experts):
        return ", ".join(f"?x{part.k}x{part.n}" for part in (module.up, module.down))
    return f"?x{module.in_features}x{module.out_features}"


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_MULTIPLIES = (nn.Linear, *_RECURRENT)
_OWN = (Linear, Conv, LSQLinear, LSQConv, BinaryLinear, SignLinear, Experts)  # which multiply


def _check(config: Config, model: nn.Module, seen: set[str]) -> None:
    check_names(config, names_in(uncompiled_module(model)) | seen)
