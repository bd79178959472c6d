"""The Dynamo backend: `torch.compile(model, backend="qfx", options={...})`.

clone -> match -> plan -> rewrite -> fuse -> inner compiler; a wrapper feeds the packed weights
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor

from qfx.canonical import rewrite
from qfx.capture import clone
from qfx.config import Config, parse_options
from qfx.cost import MachineCost
from qfx.frame import known_names, prefixes
from qfx.fuse import fuse
from qfx.match import match
from qfx.plan import Plan, check_patterns, decide
from qfx.provide import Slot, as_placeholders
from qfx.scheme import QSpec
from qfx.weights import CACHE, pack, stamp

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]
# What a defect of our own pass can raise. User errors are raised before the pass starts.
PASS_FAULTS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError)


def qfx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compiles one captured graph with its matmuls in int8 where that is legal and faster.

    `options`: the fields of `qfx.Config` (`scheme`, `skip`, `only`, `minimum_gain`, `inner`); other
    names go to Inductor. `mode`: as for Inductor. Raises ValueError for an unknown option or for a
    pattern that matches nothing. What stays float is reported by `qfx.explain` with its reason.
    """
    config, inner_options = parse_options(options)
    inner = _inner_compiler(config, inner_options, mode)
    copy = clone(gm)
    try:
        plan, slots = _int8(copy, config)
    except PASS_FAULTS as fault:
        _warn_of_fault(fault)
        return inner(clone(gm), example_inputs)
    _record(plan, copy)
    if not slots:
        return inner(copy, example_inputs)
    feed, sources = _drop_unused_inputs(copy, slots)
    examples = _example_inputs(feed, sources, example_inputs)
    return _fed(inner(copy, examples), feed, sources)


def _int8(gm: fx.GraphModule, config: Config) -> tuple[Plan, list[Slot]]:
    plan = plan_of(gm, config)
    slots: list[Slot] = []
    fuse(rewrite(gm, plan, as_placeholders(gm, slots)))
    return plan, slots


def plan_of(gm: fx.GraphModule, config: Config, check: bool = True) -> Plan:
    """Match and decide. Raises ValueError for a pattern that matches nothing, if `check`."""
    matches = match(gm, prefixes())
    if check:
        check_patterns(config, known_names(matches))
    return decide(matches, config, MachineCost())


def _inner_compiler(config: Config, options: dict[str, Any], mode: str | None) -> Compiled:
    if config.inner == "eager":
        return _run_as_it_is
    if config.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    return lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches or None)


def _run_as_it_is(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    for node in gm.graph.nodes:
        node.meta.clear()  # what Dynamo recorded refers to the parameters
    return gm.forward


def _warn_of_fault(fault: BaseException) -> None:
    log.debug("the int8 pass failed", exc_info=fault)
    what = f"{type(fault).__name__}: {str(fault).partition(chr(10))[0]}"
    warnings.warn(
        f"qfx failed on a graph and left it float: {what}. "
        'Please report it with the output of TORCH_LOGS="+qfx".',
        stacklevel=2,
    )


def _record(plan: Plan, gm: fx.GraphModule) -> None:
    log.info("plan\n%s", plan)
    log.debug("graph\n%s", gm.graph)
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "qfx_graph", "encoding": "string"},
        payload_fn=lambda: f"{plan}\n\n{gm.graph}",
    )
    recording = [e for e in plan.entries if "gradients are being recorded" in e.reason]
    if recording and not plan.quantized:
        warnings.warn(
            f"qfx left {len(recording)} matmuls float because gradients are being recorded; "
            "run the model under torch.no_grad() or torch.inference_mode() for int8",
            stacklevel=2,
        )


# --- the inputs of the rewritten graph ---

Feed = tuple["int | tuple[int, int]", ...]  # an argument, or (packed weight, part of it)


class Source(NamedTuple):
    """A packed weight: which argument holds the weight, and how it is packed.

    Holds no nodes: they would keep the graph, and what Dynamo recorded in it, alive.
    """

    argument: int
    transposed: bool
    spec: QSpec


Sources = tuple[Source, ...]


def _drop_unused_inputs(gm: fx.GraphModule, slots: list[Slot]) -> tuple[Feed, Sources]:
    """Removes graph inputs that only int8 sites read; says where each remaining one comes from."""
    parts = {node: (s, p) for s, slot in enumerate(slots) for p, node in enumerate(slot.nodes)}
    originals = [n for n in gm.graph.nodes if n.op == "placeholder" and n not in parts]
    position = {node: i for i, node in enumerate(originals)}
    sources = tuple(Source(position[s.weight], s.transposed, s.spec) for s in slots)
    feed: list[int | tuple[int, int]] = []
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        if node in parts:
            feed.append(parts[node])
        elif node.users or not isinstance(_recorded(node), Tensor):
            feed.append(position[node])
        else:
            gm.graph.erase_node(node)
            node.meta.clear()  # the graph still knows the node, and this refers to the parameter
    gm.recompile()
    return tuple(feed), sources


def _recorded(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _example_inputs(feed: Feed, sources: Sources, inputs: Sequence[Any]) -> list[Any]:
    fake_mode = detect_fake_mode(inputs)
    packed = []
    for source in sources:
        weight = inputs[source.argument]
        if isinstance(weight, FakeTensor) or fake_mode is None:
            packed.append(CACHE.get(weight, source.transposed, source.spec))
        else:
            with fake_mode:
                fake = fake_mode.from_tensor(weight, static_shapes=True)
                packed.append(pack(fake, source.transposed, source.spec))
    return [inputs[f] if isinstance(f, int) else packed[f[0]][f[1]] for f in feed]


def _fed(compiled: Compiled, feed: Feed, sources: Sources) -> Compiled:
    """Calls `compiled` with packed weights from the cache in the places of float ones."""
    holders = [source.argument for source in sources]
    known: list[Any] = [None, -1, []]  # stamps, generation of the cache, weak packed tensors

    def packed_now(args: Sequence[Any]) -> list[Any]:
        packed = [CACHE.get(args[s.argument], s.transposed, s.spec) for s in sources]
        if not isinstance(args[holders[0]], FakeTensor):
            known[:] = [
                [stamp(args[i]) for i in holders],
                CACHE.generation,
                [tuple(map(weakref.ref, p)) for p in packed],
            ]
        return packed

    @torch._dynamo.disable
    def run(*args: Any) -> Any:
        stamps, generation, references = known
        packed: list[Any] | None = None
        if generation == CACHE.generation and stamps == [stamp(args[i]) for i in holders]:
            packed = [tuple(r() for r in pair) for pair in references]
            if any(part is None for pair in packed for part in pair):
                packed = None
        if packed is None:
            packed = packed_now(args)
        return compiled(*[args[f] if isinstance(f, int) else packed[f[0]][f[1]] for f in feed])

    return run
