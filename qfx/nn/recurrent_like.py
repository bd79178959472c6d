"""Recognizes recurrent modules of PyTorch, and says why one of them stays float."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from qfx.host.gpu_build import has_kernel
from qfx.host.modules import has_old_backward_hook, state_hooks
from qfx.nn.hook_transfer import parametrized
from qfx.nn.recurrent import GRU, LSTM, GRUCell, LSTMCell, Recurrent
from qfx.nn.weight_faults import unserved_weight
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, Scheme
from qfx.values.site_recipe import SiteRecipe

OPENED: dict[type[nn.Module], type[Recurrent]] = {
    kind.FLOAT: kind for kind in (LSTM, GRU, LSTMCell, GRUCell)
}


def is_recurrent(module: nn.Module) -> bool:
    """Whether `module` is a recurrent module of PyTorch, whose weights belong to no linear."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase)


def shape_text(module: Any) -> str:
    """Returns K and N of the first product, for logs."""
    kinds = ((nn.LSTM, nn.LSTMCell), 4), ((nn.GRU, nn.GRUCell), 3)
    gates = next((count for kind, count in kinds if isinstance(module, kind)), 1)
    return f"{module.input_size}x{gates * module.hidden_size}"


def why_not_opened(module: Any) -> str:
    """Returns why no module of qfx can replace this recurrent module; '' if one can."""
    return next(_reasons(module), "")


def _reasons(module: Any) -> Iterator[str]:
    kind = type(module).__name__
    if parametrize.is_parametrized(module):
        yield parametrized(module, next(iter(module.parametrizations)))
        return
    if type(module) not in OPENED:
        of = next(base.__name__ for base in type(module).__mro__ if base.__module__[:5] == "torch")
        subclass = f"{kind}, a subclass of nn.{of}, whose steps its own code may change"
        yield f"nn.{kind}, for whose steps there is no operator" if kind == of else subclass
        return
    if size := getattr(module, "proj_size", 0):
        yield f"its state is projected to {size} features (proj_size), by a third product"
    rows = OPENED[type(module)].GATES * module.hidden_size
    for name in OPENED[type(module)].linear_names(module):
        weight = module._parameters.get(f"weight_{name}")
        if weight is None:
            yield f"its weight_{name} is no parameter, but computed before each call"
        elif is_lazy(weight):
            yield f"its weight_{name} has no shape yet"
        elif why := unserved_weight(weight):
            yield f"{why} (weight_{name})"
        elif weight.dim() != 2 or weight.shape[0] != rows:
            yield f"its weight_{name} has shape {list(weight.shape)}, not that of its gates"
        elif not weight.is_meta and not has_kernel("lstm", weight.device):
            yield f"it is on {weight.device}, where its steps have no kernel"
    if "forward" in vars(module):
        yield "its forward is its own, not that of its class"
    if any(state_hooks(module)) or has_old_backward_hook(module):
        yield "it has hooks on its state dict or of register_backward_hook, which would be lost"


def pairs_of_linears(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of both linears of each recurrent layer of `model`: of the input, of the
    state."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Recurrent):
            yield from ((f"{name}.{ih}", f"{name}.{hh}") for ih, hh in module.pairs())


def linears_of_recurrent(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linears that float recurrent modules of `model` would have, by name. They have
    the parameters of these modules."""
    return {
        f"{name}.{linear}": child
        for name, module in model.named_modules(remove_duplicate=False)
        if is_recurrent(module) and not why_not_opened(module)
        for linear, child in OPENED[type(module)].from_float(module).named_children()
    }


def why_no_recurrence(how: Scheme | SiteRecipe | None) -> str:
    """Returns why the products of a state are not quantized in this way; '' if they can be."""
    scheme = how.scheme if isinstance(how, SiteRecipe) else how
    if scheme is None:
        return ""
    x, end = scheme.x, "and recurrent layers have no operator for them"
    if x is None:
        return f"{scheme} has float activations, {end}"
    if x.static:
        return f"{scheme} has static scales, {end}"
    if x.axes == PER_TENSOR and not x.group:
        return f"{scheme} has one scale for all rows of the state, {end}"
    if scheme.w.axes == PER_COLUMN or (isinstance(how, SiteRecipe) and how.factor is not None):
        return f"{scheme} has factors of columns, {end}"
    return ""
