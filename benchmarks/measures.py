"""Measurements of one model for `benchmarks/architectures.py`: coverage, inference, training."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qfx
from benchmarks.question import Row
from benchmarks.zoo import Inputs
from qfx.match.matching import match
from qfx.ops.single_tensors import sqnr
from qfx.plan.plan import Plan
from qfx.report.report import Report

NOISE_DRAWS = 5
MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "dot")}
MATMULS |= {"aten::convolution", "aten::_grouped_mm", "mkldnn::_linear_pointwise"}


# --- coverage ---


def coverage(model: nn.Module, inputs: Inputs, inner: str) -> Row:
    """Returns what `explain` lists, and what ran without being listed. No compiler is involved."""
    ran = linears_that_run(model, inputs)
    torch._dynamo.reset()
    report = qfx.explain(model, options={"minimum_gain": 0}, **inputs)
    named = dict(model.named_modules(remove_duplicate=False))
    seen = {named.get(row.module) for row in report.rows}
    return {
        "int8": report.quantized,
        "matmuls": report.total,
        "graphs": report.graphs,
        "linears": len(ran),
        "skipped": sorted(name for module, name in ran.items() if module not in seen),
        "unlisted": unlisted(model, inputs),
        "reasons": reasons(report),
        "noise_db": round(noise_db(model, inputs, report), 2),
    }


def linears_that_run(model: nn.Module, inputs: Inputs) -> dict[nn.Module, str]:
    """Returns every nn.Linear and Conv1D (a linear stored transposed) that a float forward
    calls."""
    from transformers.pytorch_utils import Conv1D

    names: dict[nn.Module, str] = {
        m: n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)
    }
    called: list[nn.Module] = []
    hooks = [m.register_forward_pre_hook(lambda m, _: called.append(m)) for m in names]
    _run_hooked(model, inputs, hooks)
    return {module: names[module] for module in called}


def _run_hooked(model: nn.Module, inputs: Inputs, hooks: Sequence[Any]) -> Any:
    with torch.no_grad():
        outputs = model(**inputs)
    for hook in hooks:
        hook.remove()
    return outputs


def reasons(report: Report) -> dict[str, int]:
    """Counts why matmuls stayed float, without the names of single nodes and this machine's
    times."""
    found = (row.reason or "no reason" for row in report.rows if row.scheme == "float")
    names = (re.sub(r"computed by \w+", "computed", reason) for reason in found)
    return dict(Counter(re.sub(r"int8 would be .*", "int8 would be slower", n) for n in names))


def unlisted(model: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Counts graph nodes that multiply matrices internally and that qfx does not recognize as
    matmuls."""
    found: Counter[str] = Counter()

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with torch.autograd.profiler.profile() as record:
                result = super().run_node(n)
            has_body = any(a.op == "get_attr" for a in n.all_input_nodes)  # listed node by node
            multiplies = MATMULS & {event.name for event in record.function_events}
            if multiplies and not has_body and n not in known:
                found[torch.overrides.resolve_name(n.target) or str(n.target)] += 1
            return result

    def watched(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        known.update(m.node for m in match(gm))
        return torch._dynamo.disable(lambda *arguments: Watch(gm).run(*arguments))

    known: set[fx.Node] = set()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=watched, dynamic=False)(**inputs)
    return dict(found)


def noise_db(model: nn.Module, inputs: Inputs, report: Report) -> float:
    """Returns the SQNR of the float model with white noise on the outputs of its linears and
    convolutions.

    The noise at each is as strong as its own int8 error. The result is the median of several draws.
    """
    strength = {row.module: row.sqnr_db for row in report.rows if row.sqnr_db is not None}

    def noisy(output: Any, decibel: float) -> Tensor | None:
        if not isinstance(output, Tensor):
            return None  # a router: its scores are one output of several
        noise = torch.randn_like(output)
        return output + noise * output.norm() / noise.norm() * 10 ** (-decibel / 20)

    def draw(seed: int) -> float:
        torch.manual_seed(seed)
        hooks = [
            module.register_forward_hook(lambda m, i, o, d=strength[name]: noisy(o, d))
            for name, module in model.named_modules()
            if name in strength and not list(module.children())
        ]
        return sqnr(expected, main_output(_run_hooked(model, inputs, hooks)))

    expected = main_output(_run_hooked(model, inputs, ()))
    return median(draw(seed) for seed in range(NOISE_DRAWS))


# --- results and gradients ---


def inference(model: nn.Module, inputs: Inputs, inner: str) -> Row:
    fast = compiled(model, inner)
    with torch.no_grad():
        expected, found = main_output(model(**inputs)), main_output(fast(**inputs))
    tokens = zip(expected.flatten(0, -2), found.flatten(0, -2), strict=True)
    return {
        "sqnr_db": round(sqnr(expected, found), 2),
        "median_token_db": round(median(sqnr(e, f) for e, f in tokens), 2),
    }


def training(model: nn.Module, inputs: Inputs, inner: str) -> Row:
    """Measures one step: the cosine of all parameter gradients; None if no matmul was int8 in
    it."""
    model.train()
    expected = gradients(model, model, inputs)
    with plans() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, compiled(model, inner), inputs)
    int8 = sum(plan.quantized for plan in seen.values())
    cosine = F.cosine_similarity(_flat(expected), _flat(found), dim=0).item()
    return {
        "int8_in_training": int8,
        "gradient_cosine": round(cosine, 5) if int8 else None,
        "lost": sorted(n for n, g in expected.items() if g.any() and not found[n].any()),
        "warnings": sorted({str(w.message) for w in caught if str(w.message).startswith("qfx")}),
    }


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten().double() for t in tensors.values()])


def gradients(model: nn.Module, run: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the gradient of every parameter; zeros if autograd has none because the parameter is
    unused."""
    model.zero_grad()
    loss(model, run, inputs).backward()
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def loss(model: nn.Module, run: Any, inputs: Inputs) -> Tensor:
    """Returns a language model's own loss, else a fixed random projection of the main output."""
    own = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
    if type(model).__name__.endswith(own):
        return run(**inputs, labels=inputs.get("decoder_input_ids", inputs.get("input_ids"))).loss
    output = main_output(run(**inputs))
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum()


def main_output(outputs: Any) -> Tensor:
    """Returns logits, or the last hidden state: the first tensor that the model names."""
    return next(v for v in outputs.values() if isinstance(v, Tensor))


def compiled(model: nn.Module, inner: str) -> Any:
    torch._dynamo.reset()
    options: dict[str, Any] = {"minimum_gain": 0, "inner": inner}
    return torch.compile(model, backend="qfx", options=options)


@contextmanager
def plans() -> Iterator[dict[Any, Plan]]:
    """Collects the plans that the backend logs while it compiles, the last one of each compilation,
    because Dynamo may restart one."""
    seen: dict[Any, Plan] = {}

    def collect(_: str, plan: Plan) -> None:
        seen[torch._guards.CompileContext.current_compile_id()] = plan

    with mock.patch.object(logging.getLogger("qfx.dynamo_backend.backend"), "info", collect):
        yield seen


PARTS = (coverage, inference, training)
