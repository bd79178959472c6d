"""The overhead of a call besides the arithmetic: the wrapper that passes packed weights, and the
rest.

The first table shows the wrapper around a function that does nothing, for several numbers of
weights, compared with that function alone. The weights are in the caches ("warm"), or 400 MB of
other memory have been read since ("cold"); "in turns" calls the wrapper with the weights of two
layers. The second table shows the layers of the call of a compiled model of small linears.
    python -m benchmarks.overhead [--weights 1,10,100,300] [--layers 10,30] [--save]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qfx
from benchmarks.common import Candidate, Timing, interleaved, machine, save
from qfx.ops.packing import Packing
from qfx.weights.feed import Feed, PackedPart, WeightSource, with_packed_weights

WIDTH = 64  # small: a layer's arithmetic is far below the cost of a call
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
Function = Callable[..., Any]
Calls = list[tuple[Function, Sequence[Any]]]
PARTS = (  # what it is, a layer of the stack that has it, one that has it not
    ("total", "Dynamo", "nothing"),
    ("Dynamo", "Dynamo", "qfx"),
    ("qfx wrapper", "qfx", "inner"),
    ("Inductor and AOTAutograd", "inner", "operators"),
    ("operators' Autograd key", "operators", "below"),
    ("operators below it", "below", "nothing"),
)


def nothing(*_: Any) -> None:
    """Does nothing: the compiled function of the first table."""


COLD = 100 * 2**20  # floats


def wrapper_rows(weights: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the microseconds per call of the wrapper for weights [size, size], beyond those of
    the wrapped function."""
    packing = Packing(qfx.QSpec())
    parts = [PackedPart(s, p) for s in range(weights) for p in range(len(packing.parts))]
    sources = tuple(WeightSource(1 + i, (), packing) for i in range(weights))
    wrapper = with_packed_weights(nothing, Feed((0, *parts), sources))
    x, other = torch.randn(1, 8), torch.zeros(COLD)
    layers = [
        (x, *(nn.Parameter(torch.randn(size, size)) for _ in range(weights))) for _ in range(2)
    ]
    turns = itertools.cycle(layers)
    candidates = {
        "bare": Candidate(lambda: nothing(*layers[0])),
        "warm": Candidate(lambda: wrapper(*layers[0])),
        "in turns": Candidate(lambda: wrapper(*next(turns))),
    }
    times = interleaved(candidates, rounds)
    cold = {f: once_cold(lambda f=f: f(*layers[0]), other, rounds) for f in (nothing, wrapper)}
    row = {"part": "wrapper", "weights": weights, "size": size}
    return [
        {**row, "state": "warm", **beyond(times["warm"], times["bare"])},
        {**row, "state": "in turns", **beyond(times["in turns"], times["bare"])},
        {**row, "state": "cold", **beyond(cold[wrapper], cold[nothing])},
    ]


def once_cold(run: Function, other: torch.Tensor, rounds: int) -> Timing:
    """Times single calls, each after other memory was read."""
    samples = []
    for _ in range(rounds):
        other.sum()
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return Timing.of(samples)


def beyond(time: Timing, below: Timing) -> dict[str, float]:
    """Returns what one layer adds to the one below it. On a busy machine only the best times are
    reliable."""
    return {
        "median_us": round((time.median - below.median) * 1e6, 2),
        "best_us": round((time.best - below.best) * 1e6, 2),
    }


# --- a model taken apart ---


class Layers(nn.Module):
    """A model of small linears in a row: x [1, WIDTH]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Recorded(TorchDispatchMode):
    """A mode that records the calls of qfx's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "qfx":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def taken_apart(model: nn.Module, x: torch.Tensor) -> dict[str, Calls]:
    """Returns each layer of the compiled model's stack, as the calls that reach it."""
    stack: dict[str, Calls] = {}

    def wrap(compiled: Function, feed: Feed, *more: Any) -> Function:
        wrapper = with_packed_weights(compiled, feed, *more)

        def outer(*arguments: Any) -> Any:
            if not stack:
                inputs = with_packed_weights(lambda *inputs: inputs, feed)(*arguments)
                stack.update({"qfx": [(wrapper, arguments)], "inner": [(compiled, inputs)]})
            return wrapper(*arguments)

        return outer

    torch._dynamo.reset()
    with patch("qfx.dynamo_backend.backend.with_packed_weights", wrap):
        f = torch.compile(model, backend="qfx", options={"minimum_gain": 0})
        f(x)
    with Recorded() as recorded:
        run(stack["inner"])
    return {"Dynamo": [(f, (x,))], **stack, "operators": recorded.calls}


def run(calls: Calls) -> None:
    for function, arguments in calls:
        function(*arguments)


def run_below_autograd(calls: Calls) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        run(calls)


def model_rows(layers: int, mode: str, rounds: int) -> list[dict[str, Any]]:
    """Returns the microseconds per call for each layer of the stack, from Dynamo down to the
    operators."""
    with MODES[mode]():
        x = torch.randn(1, WIDTH)
        stack = taken_apart(Layers(layers), x)
        assert len(stack["operators"]) >= layers, "a layer stayed float"
        candidates = {name: Candidate(partial(run, calls)) for name, calls in stack.items()}
        candidates["below"] = Candidate(partial(run_below_autograd, stack["operators"]))
        times = interleaved({**candidates, "nothing": Candidate(nothing)}, rounds)
    row = {"mode": mode, "layers": layers, "operators": len(stack["operators"])}
    return [{"part": p, **row, **beyond(times[of], times[below])} for p, of, below in PARTS]


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=integers, default=[1, 10, 100, 300])
    parser.add_argument("--sizes", type=integers, default=[8, 1024])
    parser.add_argument("--layers", type=integers, default=[10, 30])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with torch.no_grad():
        wrapper = [
            row
            for weights in options.weights
            for size in options.sizes
            for row in wrapper_rows(weights, size, options.rounds)
        ]
    model = [
        row
        for layers in options.layers
        for mode in MODES
        for row in model_rows(layers, mode, options.rounds)
    ]
    print(machine())
    print(tabulate(wrapper, headers="keys"))
    print(tabulate(model, headers="keys"))
    if options.save:
        print(f"wrote {save('overhead', [*wrapper, *model])}")


if __name__ == "__main__":
    main()
