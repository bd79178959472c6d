"""Symmetric and asymmetric activations: error and time of both, on every linear of MiniLM.

The inputs are the model's own on 8 news texts. SQNR is that of the linear's output against a
float64 product, in dB; both sides share the same 8-bit weights.
    python -m benchmarks.symmetry [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.common import Candidate, interleaved, machine, save
from examples.minilm import load
from qfx.ops.code import Code
from qfx.ops.layout import Layout

TEXTS = 8
KINDS = {"symmetric": True, "asymmetric": False}
OPS = torch.ops.qfx


def linear_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the input of each nn.Linear of `model`, [tokens, K]; padding tokens are left out."""
    real = inputs["attention_mask"].bool()
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            (x,) = arguments
            seen[name] = x[real] if x.shape[:2] == real.shape else x

        return hook

    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(keep(name)) for name, m in linears]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def in_int8(linear: nn.Linear) -> Callable[[Tensor, bool], Tensor]:
    """Returns `linear` with 8-bit weights, as a function of x and of the activations' symmetry."""
    codes_nk, scale_n1, _ = OPS.quantize(linear.weight, list(Code()))
    given = (OPS.pack_weight(codes_nk, scale_n1), list(Layout(linear.out_features)), linear.bias)
    return lambda x, symmetric: OPS.linear_dynamic(
        x, *given, list(Code(symmetric=int(symmetric))), "none", torch.float32
    )


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Returns the signal-to-quantization-noise ratio in dB."""
    return (10 * torch.log10(exact.square().sum() / (found - exact).square().sum())).item()


def measure(name: str, linear: nn.Linear, x: Tensor, rounds: int) -> dict[str, Any]:
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    run = in_int8(linear)
    candidates = {kind: Candidate(partial(run, x, flag)) for kind, flag in KINDS.items()}
    times = interleaved(candidates, rounds)
    row: dict[str, Any] = {"site": name, "shape": "x".join(map(str, (*x.shape, len(exact.T))))}
    for kind, flag in KINDS.items():
        row[f"{kind}_db"] = round(sqnr(run(x, flag).double(), exact), 2)
        row[f"{kind}_us"] = round(times[kind].median * 1e6, 1)
    return row


def by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns means over the layers: sites are of one kind if only the layer's number differs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = ".".join("*" if part.isdigit() else part for part in row["site"].split("."))
        groups.setdefault(kind, []).append(row)
    groups["all"] = rows
    figures = [f"{kind}_{unit}" for unit in ("db", "us") for kind in KINDS]
    return [
        {"site": kind, "count": len(group)} | {f: mean(r[f] for r in group) for f in figures}
        for kind, group in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = load(tokens=128)
    with torch.inference_mode():
        seen = linear_inputs(data.model, {k: v[:TEXTS] for k, v in data.inputs.items()})
        linears = dict(data.model.named_modules())
        rows = [measure(name, linears[name], x, options.rounds) for name, x in seen.items()]
    print(machine())
    print(tabulate(by_kind(rows), headers="keys", floatfmt=".1f"))
    if options.save:
        print(f"wrote {save('symmetry', rows)}")


if __name__ == "__main__":
    main()
