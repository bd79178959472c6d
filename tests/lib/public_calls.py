"""Calls of the public functions on small models, each returning its tensors and texts.

`CALLS[name](folder)` makes models and inputs, with explicit dtypes and devices, and returns the
call: a function without arguments, whose result `tests/project/test_defaults.py` compares bit by
bit.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qfx
from qfx.ops import REFERENCES
from qfx.values.scheme import PER_COLUMN, PER_ROW, PER_TENSOR
from tests.lib.models import compiled
from tests.lib.rows import ROWS, results

K, N = 64, 96
Call = Callable[[], Any]
CALLS: dict[str, Callable[[Path], Call]] = {}
Q = qfx.QSpec
SCHEMES: dict[str, Any] = {
    "w8a8": "w8a8",
    "asymmetric": "w8a8-asymmetric",
    "weights": qfx.Scheme(x=None),
    "w4": "w4",
    "w4a8": "w4a8",
    "groups": qfx.Scheme(w=Q(group=32)),
    "columns": qfx.Scheme(w=Q(axes=PER_COLUMN)),
    "both": qfx.Scheme(Q(group=32), Q(5, group=32, packed=True)),
    "rotated": qfx.Scheme(rotation=64),
}
CALIBRATIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "gptq": {"rounding": "gptq"},
    "sequential": {"rounding": "gptq-sequential"},
    "metric": {"metric": lambda model: -float(model(rows(7)).square().mean()), "max_drop": 0.01},
    "labels": {"max_divergence": 0.1, "loss": "labels"},
    "direction": {"max_divergence": 0.1, "loss": "direction"},
    "bits": {"max_bits": 6.0, "also": ["w4a8"]},
}


def call(make_call: Callable[[Path], Call]) -> Callable[[Path], Call]:
    CALLS[make_call.__name__] = make_call
    return make_call


def rows(seed: int = 0, count: int = 12, k: int = K) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, k, generator=random, dtype=torch.float32, device="cpu")


def mlp(seed: int = 0) -> nn.Sequential:
    """Returns a float32 model on the CPU in which one channel of the first weight is much
    larger."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).eval()
    with torch.no_grad():
        model[0].weight[:, 5] *= 40
    return model


class Text(nn.Module):
    """A model whose only input is token ids, as smoothing without data requires."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(50, K), mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.table(ids))  # type: ignore[no-any-return]


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output, and the parameters after a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    return [y.detach(), *(p.detach() for p in model.parameters())]


def text_of(recipe: qfx.Recipe) -> list[Any]:
    """Returns the content of a recipe's file, with the codes."""
    return [(str(s), s.scheme, s.scale, s.zero_point, s.factor, s.sqnr_db, s.divergence, s.outliers,
             None if s.rounding is None else s.rounding.codes) for s in recipe.sites]  # fmt: skip


@call
def tensors(folder: Path) -> Call:
    x = rows()
    axes = [Q(), Q(axes=PER_TENSOR), Q(axes=PER_COLUMN), Q(symmetric=False)]
    specs = [*axes, Q(4, group=32), Q(4, group=32, packed=True)]

    def run() -> Any:
        found: list[Any] = []
        for spec in specs:
            codes = qfx.quantize(x, spec)
            found += [codes, qfx.dequantize(codes), qfx.quantization_error(x, spec)]
            found += [qfx.quantize_dequantize_(x.clone(), spec), qfx.sqnr(x, x + 1)]
        return found

    return run


@call
def operators(folder: Path) -> Call:
    """Runs one or two rows of each operator, by its kernel and by its reference."""
    chosen: dict[str, list[Any]] = {}
    for row in ROWS:
        if len(chosen.setdefault(row.op, [])) < 2 and 0 not in (*row.leading, row.k, row.n):
            chosen[row.op].append(row.arguments())

    def run() -> Any:
        ops = [(op, given) for op, each in chosen.items() for given in each]
        return [[results(op, f, given) for f in (getattr(torch.ops.qfx, op), REFERENCES[op])]
                for op, given in ops]  # fmt: skip

    return run


@call
def functions(folder: Path) -> Call:
    x, w, step = rows(), rows(1, N), rows(2, N, 1).abs() / 100

    def run() -> Any:
        leaf = w.clone().requires_grad_()
        y = qfx.nn.functional.linear(x, leaf)
        y.sum().backward()
        best = qfx.nn.functional.best_step(w, 8, True, PER_ROW)
        return (
            y.detach(),
            leaf.grad,
            best,
            qfx.nn.functional.lsq_linear(x, w, None, None, step, qfx.Scheme()),
        )

    return run


@call
def quantize_(folder: Path) -> Call:
    models, x = {name: mlp() for name in SCHEMES}, rows()
    text, tokens = Text().eval(), torch.arange(50)

    def run() -> Any:
        found: list[Any] = [qfx.quantize_(text)(tokens), text.state_dict()]
        for name, model in models.items():
            qfx.quantize_(model, qfx.Config(scheme=SCHEMES[name]))
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.sum().backward()
            found += [y.detach(), leaf.grad, model.state_dict(), model[0].weight]
        return found

    return run


@call
def modules(folder: Path) -> Call:
    """Copies, pickles, loads and resets modules, and runs one after `invalidate`."""
    first, second = (qfx.quantize_(mlp(seed), qfx.Config(scheme="w4a8")) for seed in (0, 1))
    binary, x = qfx.prepare_binary(mlp(), rows()).eval(), rows()

    def run() -> Any:
        found = [copy.deepcopy(first)(x), pickle.loads(pickle.dumps(first))(x)]
        second.load_state_dict(first.state_dict())
        second[2].reset_parameters()
        with torch.no_grad():
            found += [second(x), binary(x)]
            binary[0].weight.data.numpy()[0] = 1
            qfx.invalidate(binary)
            return [*found, binary(x)]

    return run


@call
def prepare_qat(folder: Path) -> Call:
    schemes = (qfx.Scheme(), qfx.Scheme(Q(axes=PER_TENSOR)), qfx.Scheme(backward="int8"))
    models, x = [mlp().train() for _ in schemes], rows()

    def run() -> Any:
        found: list[Any] = []
        for model, scheme in zip(models, schemes, strict=True):
            qfx.prepare_qat(model, x, config=qfx.Config(scheme=scheme), shift=True)
            found += trained(model, x)
            found += [qfx.convert(model.eval())(x).detach(), model.state_dict()]
        return found

    return run


@call
def prepare_binary(folder: Path) -> Call:
    model, x = mlp().train(), rows()

    def run() -> Any:
        qfx.prepare_binary(model, x, shift=True)
        found = trained(model, x)
        return [*found, qfx.convert(model.eval())(x).detach(), model.state_dict()]

    return run


def _calibrate(name: str) -> Callable[[Path], Call]:
    def make_call(folder: Path) -> Call:
        model, batches = mlp(), [rows(i) for i in range(4)]
        config = qfx.Config(minimum_gain=0, scheme="w8a8")
        return lambda: text_of(
            qfx.calibrate(model, batches, config, progress=False, **CALIBRATIONS[name])
        )

    return make_call


CALLS |= {f"calibrate, {name}": _calibrate(name) for name in CALIBRATIONS}


@call
def calibrate_static(folder: Path) -> Call:
    model, x, config = mlp(), rows(), qfx.Config(minimum_gain=0, scheme="w8a8-static")

    def run() -> Any:
        found: list[Any] = []
        for observer in ("minmax", "percentile", "entropy"):
            recipe = qfx.calibrate(model, [x], config, observer=observer, progress=False)
            found.append(text_of(recipe))
        recipe.save(folder / "recipe.json")
        again = qfx.Recipe.load(folder / "recipe.json")
        y = qfx.quantize_(copy.deepcopy(model), qfx.Config(recipe=again))(x).detach()
        with torch.no_grad():
            return [*found, text_of(again), y, compiled(model, recipe=again)(x)]

    return run


@call
def plans(folder: Path) -> Call:
    model, x, options = mlp(), rows(), {"minimum_gain": 0}
    graph = torch.fx.symbolic_trace(model)

    def run() -> Any:
        traced = qfx.trace(model)
        rewritten = qfx.rewrite(graph, qfx.Config(minimum_gain=0))
        report = qfx.explain(model, x, options=options)
        said = [(r.module, r.scheme, r.sqnr_db, r.input_rms) for r in report.rows]
        with torch.no_grad():
            y = rewritten[0](x)
        return [str(traced), str(qfx.pin(model, x, options=options)), said, y]

    return run
