"""Token ids that are the same in every process, for a module that takes them and nothing else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qfx.graph.capture import attribute, value
from qfx.host.modules import has_forward_hooks

SHAPE = 8, 64  # sequences, tokens of each
_MOST_RUNS = 16  # largest number of runs of a graph that takes fewer tokens
_NAME = "input_ids"
_OFF = ("use_cache",)  # options of transformers that would only use memory
_LOOKUPS = (F.embedding, torch.ops.aten.embedding.default)


class TokenIds(NamedTuple):
    """The arguments with which a module is called on token ids.

    `argument`: the name of the argument for ids. `table` [V, *]: the table in which they are looked
    up. `shape`: the shape of the ids. `keywords`: further arguments.
    """

    argument: str
    table: Tensor
    shape: tuple[int, ...]
    keywords: dict[str, Any]

    def call(self, module: Callable[..., Any]) -> Iterator[Tensor]:
        """Runs the module on seeded ids, uniform over the vocabulary, and yields them. They have as
        many tokens as SHAPE, in several runs if a graph takes fewer."""
        runs = math.ceil(math.prod(SHAPE) / max(math.prod(self.shape), 1))
        generator = torch.Generator().manual_seed(0)
        for _ in range(min(runs, _MOST_RUNS)):
            rows = self.table.shape[0]
            ids = torch.randint(
                rows, self.shape, generator=generator, dtype=torch.int64, device="cpu"
            )
            ids = ids.to(self.table.device)
            module(**{self.argument: ids}, **self.keywords)
            yield ids


def token_ids_of(module: nn.Module) -> TokenIds | None:
    """Returns how to call a module with token ids; None for a module that needs other inputs, that
    has only embeddings, or that trains."""
    if isinstance(module, fx.GraphModule):
        return _of_graph(module)
    training = any(part.training for part in module.modules())  # a part may have dropout
    return None if training else _of_module(module)


def has_part_taking_ids(module: nn.Module) -> bool:
    """Whether the module, or a part of it, may be called with only token ids."""
    return any(token_ids_of(part) is not None for part in module.modules())


def hooked(module: nn.Module) -> bool:
    """Whether the module or one of its parts has forward hooks, so that user code would see a
    call."""
    return any(map(has_forward_hooks, module.modules()))


def _of_module(module: nn.Module) -> TokenIds | None:
    parts = list(module.modules())
    embedding = next((m for m in parts if isinstance(m, nn.Embedding)), None)
    if embedding is None or all(isinstance(m, nn.Embedding) for m in parts if not _empty(m)):
        return None
    try:
        given = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in given.items() if p.kind in by_name}
    required = [name for name, p in named.items() if p.default is p.empty]
    taking = required or [name for name in named if name == _NAME]
    if len(taking) != 1:
        return None
    off = {name: False for name in _OFF if name in named}
    return TokenIds(taking[0], embedding.weight, SHAPE, off)


def _empty(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is None


def _of_graph(gm: fx.GraphModule) -> TokenIds | None:
    inputs = gm.graph.find_nodes(op="placeholder")
    tables = [_table(gm, user) for node in inputs for user in node.users]
    table = next((t for t in tables if t is not None), None)
    if len(inputs) != 1 or table is None:
        return None
    shape = getattr(value(inputs[0]), "shape", SHAPE)
    known = all(isinstance(size, int) for size in shape)
    return TokenIds(inputs[0].name, table, tuple(shape) if known else SHAPE, {})


def _table(gm: fx.GraphModule, node: fx.Node) -> Tensor | None:
    if node.op == "call_module":
        called = gm.get_submodule(str(node.target))
        return called.weight if isinstance(called, nn.Embedding) else None
    if node.target not in _LOOKUPS:
        return None
    tables = [n for n in node.all_input_nodes if n.op == "get_attr"]
    return attribute(tables[0]) if len(tables) == 1 else None
