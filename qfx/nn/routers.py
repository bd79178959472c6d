"""Routers: modules that choose among experts, beside a block of experts or a list of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from qfx.nn.experts_like import is_experts, products_of

_NAMES = {"gate", "router"}  # of modules that choose among a block of transformers


def mixtures(model: nn.Module) -> Iterator[str]:
    """Yields the names of blocks of experts, and of module lists that are called experts."""
    for name, module in model.named_modules(remove_duplicate=False):
        listed = isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2].lower()
        if is_experts(module) or (listed and len(module) > 1):
            yield name


def routers(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Returns, by name, the modules that choose among the experts `name`: modules beside them that
    have a weight [E, K] for E experts of K inputs. Beside a block, they are called a router."""
    beside, _, last = name.rpartition(".")
    experts = model.get_submodule(name)
    shapes, names = _choosing(experts)
    found = {}
    for at, module in model.get_submodule(beside).named_modules():
        weight, parts = getattr(module, "weight", None), set(at.split("."))
        chooses = isinstance(weight, nn.Parameter) and tuple(weight.shape) in shapes
        if chooses and (names is None or parts & names) and last not in parts:
            found[f"{beside}.{at}" if beside else at] = module
    return found


def _choosing(experts: nn.Module) -> tuple[set[tuple[int, int]], set[str] | None]:
    """Returns the shapes that the weight of a router has, and its names if these are known."""
    if is_experts(experts):
        count, _, k = products_of(experts)[0].weights.shape
        return {(count, k)}, _NAMES
    assert isinstance(experts, nn.ModuleList)
    linears = [m for m in experts[0].modules() if isinstance(m, nn.Linear)]
    return {(len(experts), linear.in_features) for linear in linears}, None
