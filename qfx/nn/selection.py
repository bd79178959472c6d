"""Selection: which linears of a model a module of qfx replaces, which stay float, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from qfx.host.distributed import is_sharded
from qfx.nn.conv_like import CONVOLUTIONS, is_convolution, why_no_windows
from qfx.nn.experts_like import (
    experts_fault,
    is_experts,
    products_of,
    why_adapted,
    why_not_experts,
)
from qfx.nn.hook_transfer import computed_weights, obstacles, parametrized
from qfx.nn.linear_like import (
    as_linear,
    is_embedding,
    is_linear,
    is_transposed,
    why_no_codes,
)
from qfx.nn.loading import Checked, StoredModule
from qfx.nn.qat_state import TrainedState
from qfx.nn.recurrent_like import is_recurrent, pairs_of_linears, why_not_opened
from qfx.nn.routers import mixtures, routers
from qfx.nn.weight_bytes import kinds, weight_bytes
from qfx.nn.weight_faults import too_long, unquantizable, unserved_bias, unserved_weight
from qfx.values.config import Config
from qfx.values.select import check_names, left_out

_SHOWN = 20  # names in an error or a warning


class Selection(NamedTuple):
    """The decision for each linear of a model, and for each embedding if embeddings are requested,
    by name. A shared module has several names."""

    who: str  # the function that errors, logs and warnings name
    model: nn.Module
    linears: dict[str, nn.Module]
    taken: dict[str, nn.Module]  # to be replaced
    left: dict[str, str]  # stays float because of the config; the option that says so
    missed: dict[str, str]  # stays float although the config does not ask for it; the reason
    selective: bool = True  # the config names modules (skip, only or recipe), or there is no config

    @property
    def what(self) -> str:
        """The noun for these modules in messages."""
        kinds = {
            "convolutions": lambda m: isinstance(m, CONVOLUTIONS),
            "embeddings": lambda m: isinstance(m, nn.Embedding),
            "experts": is_experts,
        }
        beside = [name for name, kind in kinds.items() if any(map(kind, self.linears.values()))]
        return " and ".join(filter(None, [", ".join(["linears", *beside[:-1]]), *beside[-1:]]))


def select_modules(
    model: nn.Module,
    config: Config,
    who: str,
    left_by_recipe: Callable[[nn.Module], str] = lambda linear: "",
    sums_overflow: bool = True,
    transposed: bool = False,
    embeddings: bool = False,
    experts: bool = False,
    convolutions: bool = False,
    recurrent: bool = False,
    fault_of_scheme: Callable[[nn.Module], str] = lambda linear: "",
) -> Selection:
    """Sorts the linears of `model` into those that are replaced and those that stay float, with the
    reason.

    Only exact `nn.Linear` modules and those of linear_like.py are taken. The weights of other
    subclasses, of parametrized linears and of the projections of nn.MultiheadAttention are read by
    code other than the forward of nn.Linear. Modules that `config.skip` and `config.only` exclude,
    and weights with NaN or infinity, stay float.

    `who`: the function that errors name. `left_by_recipe`: returns why a linear stays float, or ''.
    `sums_overflow`: refuse linears with K above 65792, whose int8 sums could overflow.
    `transposed`: also take modules with a weight [K, N]. `embeddings`: also take the embeddings of
    linear_like.py. `experts`: also take the blocks of experts of experts_like.py; their routers
    then stay float. `convolutions`: also take those of torch.nn. `recurrent`: also list recurrent
    modules of PyTorch, which stay float. `fault_of_scheme`: returns why a module cannot have its
    scheme, or ''.

    Raises ValueError if a pattern matches no module, and if there is no such linear at all.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = partial(_is_float, embeddings=embeddings, experts=experts, convolutions=convolutions)
    linears = {n: m for n, m in modules.items() if n and wanted(m)}
    if recurrent:
        linears |= {n: m for n, m in modules.items() if n and is_recurrent(m)}
    check_names(config, [*linears, *_names_of_experts(modules)])
    check_unsharded(model, who)
    selective = bool(config.skip or config.only or config.recipe)
    found = Selection(who, model, linears, {}, {}, {}, selective)
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    faults = cache(partial(why_faulty, sums_overflow))  # a shared module has several names
    for name, module in linears.items():
        if out := left_out(config, [name]) or why_no_linear(module):
            found.left[name] = out
        elif why := (
            why_adapted(module, modules[name.rpartition(".")[0]])
            or why_not_taken(module, attentions, transposed)
            or fault_of_scheme(module)
        ):
            found.missed[name] = why
        elif out := left_by_recipe(module):
            found.left[name] = out
        elif why := faults(module):
            found.missed[name] = why
        else:
            found.taken[name] = module
    _leave_routers(found)
    _leave_inputs(found)
    _leave_adapters(found)
    if not any(_is_known(m, transposed) for m in linears.values()):
        beside = f"; there is {by_reason(found.missed)}" if found.missed else ""
        trained = [n for n, m in model.named_modules() if isinstance(m, TrainedState)]
        if trained:
            beside += (
                f"; {listed(trained)} are linears with learned steps: qfx.convert deploys them"
            )
        done = [n for n, m in model.named_modules() if isinstance(m, StoredModule)]
        if done:
            beside += f"; {listed(done)} hold codes already"
        if stays := weight_bytes(model).multiplying:
            beside += f"; what multiplies and stays float: {kinds(stays)}"
        raise ValueError(f"{who}: the model has no nn.Linear inside it{beside}")
    return found


def _names_of_experts(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the names of blocks of experts and of their products, which recipes name."""
    for name, module in modules.items():
        if name and is_experts(module):
            yield name
            yield from (f"{name}.{product.name}" for product in products_of(module))


def _leave_routers(found: Selection) -> None:
    """Leaves linears float that choose among experts that are taken: an error there sends a token
    to another expert."""
    for name in mixtures(found.model):
        taken = any(each == name or each.startswith(f"{name}.") for each in found.taken)
        for router in routers(found.model, name) if taken else ():
            if found.taken.pop(router, None) is not None:
                found.left[router] = f"it chooses among the experts of {name}"


def _leave_adapters(found: Selection) -> None:
    """Leaves the linears of PEFT's adapters float: they train, and codes do not. Modules that PEFT
    trains whole become int8, as after training."""
    for name, module in found.model.named_modules(remove_duplicate=False):
        for part in {*getattr(module, "adapter_layer_names", ())} - {"modules_to_save"}:
            inside = f"{name}.{part}." if name else f"{part}."
            for linear in [each for each in found.taken if each.startswith(inside)]:
                del found.taken[linear]
                found.left[linear] = "an adapter, which trains; merge_and_unload makes it int8"


def _leave_inputs(found: Selection) -> None:
    """Leaves linears of the input of recurrent layers float whose recurrent product stays float:
    PyTorch computes both together."""
    for of_input, of_state in pairs_of_linears(found.model):
        if of_state not in found.taken and found.taken.pop(of_input, None) is not None:
            found.left[of_input] = f"{of_state} stays float, and the layer is computed as a whole"


def _is_float(module: nn.Module, embeddings: bool, experts: bool, convolutions: bool) -> bool:
    """Whether `module` is a linear, or an embedding if `embeddings`, or a block of experts if
    `experts`, or a convolution if `convolutions`, and not a module of qfx."""
    wanted = isinstance(module, nn.Linear) or is_linear(module)
    wanted = wanted or (embeddings and isinstance(module, nn.Embedding))
    wanted = wanted or (experts and is_experts(module))
    wanted = wanted or (convolutions and isinstance(module, CONVOLUTIONS))
    return wanted and not isinstance(module, Checked)


def _is_known(module: nn.Module, transposed: bool) -> bool:
    """Whether modules of this kind are taken."""
    linear = is_linear(module) and (transposed or not is_transposed(module))
    linear = linear or is_convolution(module)
    return linear or is_embedding(module) or is_experts(module)


def check_unsharded(model: nn.Module, who: str) -> None:
    """Raises ValueError if FSDP shards the model."""
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            f"{who}: FSDP shards the model and keeps account of its parameters: call {who} first, "
            "and shard the model afterwards"
        )


def why_not_taken(
    module: nn.Module,
    attentions: Sequence[nn.MultiheadAttention],
    transposed: bool,
) -> str:
    """Returns why no module of qfx can replace this module; '' if one can."""
    if is_experts(module):
        return why_not_experts(module)
    if is_recurrent(module):
        return why_not_opened(module) or "only qfx.quantize_ takes it"
    if parametrize.is_parametrized(module):
        return parametrized(module, next(iter(module.parametrizations)))  # type: ignore
    weight = module._parameters.get("weight")
    if weight is not None and is_lazy(weight):
        kind = type(module).__name__
        return f"{kind}: its weight has no shape yet, run the model once first"
    if any(module is attention.out_proj for attention in attentions):
        return "nn.MultiheadAttention reads its weight itself; torch.compile runs it in int8"
    if isinstance(module, nn.Embedding):
        return why_no_codes(module)
    if isinstance(module, CONVOLUTIONS):
        return _why_no_kernels(module)
    if not is_linear(module):
        return f"{type(module).__name__}, a subclass of nn.Linear"
    if is_transposed(module) and not transposed:
        return f"{type(module).__name__}, whose weight is [K, N]: qfx.quantize_ takes it"
    return unserved_weight(weight) or unserved_bias(module._parameters.get("bias"), _matrix(module))


def why_no_linear(module: nn.Module) -> str:
    """Returns why a convolution is no linear of windows; '' if it is one, and for other modules."""
    return why_no_windows(module) if isinstance(module, CONVOLUTIONS) else ""


def _why_no_kernels(module: nn.Module) -> str:
    """Returns why no `qfx.nn.Conv` can replace this convolution; '' if one can."""
    if not is_convolution(module):
        return f"{type(module).__name__}, a subclass of a convolution"
    if why := unserved_weight(module._parameters.get("weight")):
        return why
    for why in computed_weights(module):
        return why
    matrix = _matrix(module)
    return unserved_weight(matrix) or unserved_bias(module._parameters.get("bias"), matrix)


def _matrix(module: nn.Module) -> Tensor | None:
    """Returns the weight as a matrix with an output's elements in a row. That of a convolution has
    not the order of its windows."""
    weight = module._parameters.get("weight")
    if not isinstance(module, CONVOLUTIONS) or weight is None:
        return as_linear(module)._parameters.get("weight")
    return weight.detach().transpose(0, 1 if module.transposed else 0).flatten(1)


def why_faulty(sums_overflow: bool, module: nn.Module) -> str:
    """Returns why the weight of a linear, an embedding or experts cannot be quantized; '' if it
    can. Reads the values of the weight."""
    if is_experts(module):
        return experts_fault(module)
    weight = _matrix(module)
    return (too_long(weight) if sums_overflow else "") or unquantizable(weight)


def refuse(
    found: Selection,
    make: Callable[[Any], nn.Module],
    instead: str = "\nor leave them out: qfx.Config(skip={})",
    faults: Callable[[Any], Iterable[str]] = lambda linear: (),
) -> None:
    """Raises ValueError if a selected linear cannot be replaced by a module that `make` returns.
    The message names all such linears.

    `make` is also given a linear and a convolution of one feature, for the names of the attributes
    that its modules have. `instead` is appended to the message and says what else can be done.
    `faults` returns further reasons for a linear.
    """
    names_of = cache(lambda windows: dir(make(blank_module(windows))))
    reasons = defaultdict(list)
    for name, linear in found.taken.items():
        known = names_of(is_convolution(linear))
        own = (*obstacles(linear, known), *_offloaded(found.model, name, linear))
        for reason in own or faults(linear):
            reasons[reason].append(name)
    if reasons:
        lines = "".join(f"\n  {listed(names)}: {reason}" for reason, names in reasons.items())
        out = [n for n in found.taken if any(n in names for names in reasons.values())]
        raise ValueError(
            f"{found.who}: {len(out)} of {len(found.taken)} {found.what} cannot be replaced as "
            f"they are, and nothing was changed:{lines}{instead.format(out)}"
        )


def blank_module(convolution: bool) -> nn.Module:
    """Returns a linear or a convolution of one feature, without taking random numbers."""
    kind, sizes = (nn.Conv1d, (1, 1, 1)) if convolution else (nn.Linear, (1, 1))
    made: Any = kind(*sizes, bias=False, device="meta", dtype=torch.float32)  # type: ignore
    made.weight = nn.Parameter(torch.ones(sizes, dtype=torch.float32, device="cpu"))
    return made  # type: ignore[no-any-return]


def _offloaded(model: nn.Module, name: str, linear: nn.Module) -> Iterator[str]:
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:i])) for i in range(len(parts)))
    own = linear.parameters(recurse=False)
    offloaded = any(p.is_meta for p in own) and "_hf_hook" not in vars(linear)
    if offloaded and any("_hf_hook" in vars(module) for module in above):
        yield (
            "accelerate keeps its weight elsewhere: accelerate.hooks.remove_hook_from_module(model,"
            " recurse=True) first, and dispatch or offload the model afterwards"
        )


def by_reason(reasons: Mapping[str, str]) -> str:
    """Groups the names by their reason: "name, name (reason); name (reason)"."""
    found = defaultdict(list)
    for name, reason in reasons.items():
        found[reason].append(name)
    return "; ".join(f"{listed(names)} ({reason})" for reason, names in found.items())


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
