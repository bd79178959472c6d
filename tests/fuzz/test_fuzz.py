"""Random programs through torch.compile(backend="qfx") stay within an a-priori bound of eager's.

What is checked: `checking.py`. What is drawn: `grammar.py`. A failure prints the program;
`python -m tests.fuzz.draft SEED` prints it again, `python -m tests.fuzz.hunt FIRST LAST` runs more.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx import _C
from qfx.dynamo_backend import backend
from qfx.graph.views import apply
from qfx.match import matching
from qfx.ops.packing import Packing
from qfx.ops.storage import packed_values, values_of
from qfx.plan import policy
from qfx.rewriting import canonical, codes
from qfx.weights import cache
from tests.conftest import UseCosts, on_threads
from tests.fuzz.checking import Mismatch, Seen, check, counting
from tests.fuzz.draft import Draft, program, shortest
from tests.fuzz.finish import finish
from tests.fuzz.grammar import ACTIVATIONS, IN_PLACE, OPS, PRODUCTS
from tests.fuzz.graphs import Program
from tests.fuzz.held import HELD, PUT_ON
from tests.fuzz.hold import add_batch_norm, add_linear
from tests.lib.costs import Prices
from tests.lib.pairs import LONG

SEEDS_EACH = 20
CHUNKS = 250 if LONG else 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Programs are small; waking a second thread costs more than they do."""
    with on_threads(1):
        yield


@pytest.fixture(autouse=True)
def int8_gains(use_costs: UseCosts) -> None:
    """int8 is always worth it."""
    use_costs(Prices(2.0))


def check_all(seeds: Iterable[int], **how: Any) -> Seen:
    seen = Seen()
    for seed in seeds:
        seen += check(program(seed), trains=seed % 4 == 0, **how)
        torch._dynamo.reset()
    return seen


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    """The grammar says of every matmul whether it becomes int8; the floor keeps the grammar busy,
    and the median says that the bound is worth something."""
    seen = check_all(range(chunk * SEEDS_EACH, (chunk + 1) * SEEDS_EACH))
    print(seen)
    assert seen.int8 >= SEEDS_EACH and seen.ratio < 0.2 and seen.new >= SEEDS_EACH / 3


def test_random_programs_through_inductor() -> None:
    several = (seed for seed in itertools.count() if program(seed).int8 > 1)
    print(seen := check_all(itertools.islice(several, 10 if LONG else 4), inner="inductor"))
    assert seen.int8 >= (10 if LONG else 4)


@pytest.mark.parametrize("name", OPS)
def test_each_operation(name: str) -> None:
    """Every row of the grammar can be drawn, and what it says of int8 is true."""
    check(shortest(name, OPS[name]), trains=name in PRODUCTS)


@pytest.mark.parametrize(
    ("change", "held"), [*((c, "attribute") for c in PUT_ON), *(("nothing", h) for h in HELD)]
)
def test_each_module(change: str, held: str) -> None:
    check(_with_module(lambda d: add_linear(d, d.some(), change, held)), trains=True)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms(training: bool) -> None:
    check(_with_module(lambda d: d.training is training and add_batch_norm(d)), trains=True)


def _with_module(add: Callable[[Draft], bool]) -> Program:
    drafts = (Draft(seed) for seed in range(1000))
    return finish(next(draft for draft in drafts if add(draft)))


# --- defects that random programs found, each as the smallest model that had it ---


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(8))
        self.register_buffer("frozen", torch.randn(8, 8))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Through(Model):
    """Its buffers are inputs of the graph like others, with symbolic sizes where those have."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Found(NamedTuple):
    run: Callable[[Any, Tensor], Tensor]
    int8: int = 1
    kind: type[Model] = Model
    dynamic: bool = False


FOUND = {
    "columns_of_a_weight": Found(lambda s, x: x @ s.w[:, 2:]),
    "a_detached_weight": Found(lambda s, x: x @ s.v @ s.w.detach(), int8=2),
    "a_frozen_weight_with_a_bias_that_trains": Found(lambda s, x: x @ s.frozen + s.bias),
    "addmm_of_activations": Found(
        lambda s, x: torch.addmm(100 * s.bias.detach(), x, x.sin()), int8=0
    ),
    "a_part_of_a_weight_of_symbolic_sizes": Found(
        lambda s, x: x @ s.frozen.split([3, 5])[1].t(), kind=Through, dynamic=True
    ),
    "heads_of_a_weight_of_symbolic_sizes": Found(
        lambda s, x: torch.einsum("sk,hdk->hsd", x, s.frozen.unflatten(0, (4, 2))),
        kind=Through, dynamic=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("error")
def test_found_by_random_programs(name: str) -> None:
    """Values within a tenth, gradients where eager has them, and int8."""
    values, gradients = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        found = FOUND[name]
        model, x = found.kind(found.run), torch.randn(8, 8)
        options: Any = {"minimum_gain": 0, "inner": "eager"}
        fast = torch.compile(
            model, backend=qfx.backend, dynamic=found.dynamic or None, options=options
        )
        y, ran = counting(fast if compiled else model, [x])
        assert ran.linear == compiled * found.int8
        values.append(y.detach())
        if y.requires_grad:
            y.sum().backward()
        gradients.append({n for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] == gradients[1]
    assert (values[1] - values[0]).norm() < 0.1 * values[0].norm()


# --- broken passes ---


def _scale_too_large(patch: pytest.MonkeyPatch) -> None:
    """The scale of the first row of every packed weight is 1.5 times too large."""
    pack = cache.pack

    def wrong(weight: Tensor, view: Any, packing: Packing) -> cache.Packed:
        packed, (n, k) = pack(weight, view, packing), apply(view, weight).shape
        kind = (packing.spec, packing.group)
        values = values_of(packed.weight, *kind, n, k)
        scale = values.scale.clone()
        scale[:1] *= 1.5
        return packed._replace(weight=packed_values(values._replace(scale=scale), *kind))

    patch.setattr(cache, "pack", wrong)


def _writes_unseen(patch: pytest.MonkeyPatch) -> None:
    """Codes are shared across writes to what they are codes of."""
    patch.setattr(codes, "writes", lambda node: False)


def _written_weights_unseen(patch: pytest.MonkeyPatch) -> None:
    """Weights that the graph changes are packed before it does."""
    patch.setattr(matching, "written_roots", lambda graph: set())


def _stale_weights(patch: pytest.MonkeyPatch) -> None:
    """A packed weight does not notice that its weight changed."""
    patch.setattr(cache._CachedWeight, "knows", lambda *_: True)


def _unseen_writes(patch: pytest.MonkeyPatch) -> None:
    """Nor does a call notice a write that bumped no version."""
    patch.setattr(_C.Snapshot, "unchanged", _C.Snapshot.same_tensors)


def _without(part: str, instead: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Sites lose a part of their epilogue."""
    grow = matching.with_epilogue

    def mutant(patch: pytest.MonkeyPatch) -> None:
        lossy = lambda *a: dataclasses.replace(grow(*a), **{part: instead})  # noqa: E731
        patch.setattr(matching, "with_epilogue", lossy)

    return mutant


def _attends_to_all(patch: pytest.MonkeyPatch) -> None:
    """Attentions lose what says which keys count."""
    attend = canonical.attend
    blind = lambda a, *rest: attend(  # noqa: E731
        dataclasses.replace(a, mask=None, causal=False), *rest
    )
    patch.setattr(canonical, "attend", blind)


def _attends_twice_as_sharply(patch: pytest.MonkeyPatch) -> None:
    """Scores are twice what they should be."""
    attend = canonical.attend
    sharp = lambda a, *rest: attend(  # noqa: E731
        dataclasses.replace(a, scale=2 * a.scale), *rest
    )
    patch.setattr(canonical, "attend", sharp)


def _patterns_unread(patch: pytest.MonkeyPatch) -> None:
    """Nothing is skipped."""
    patch.setattr(policy, "left_out", lambda *a: None)


def _layers_share_decisions(patch: pytest.MonkeyPatch) -> None:
    """What is decided for a module holds for all that share its code."""
    patch.setattr(backend, "compile_per_layer", lambda *a: None)


class Mutant(NamedTuple):
    """A broken pass, which programs may show it, and whether by numbers or by what is int8."""

    patch: Callable[[pytest.MonkeyPatch], None]
    shown_by: Callable[[Program], bool] = lambda p: p.int8 > 0
    by: str = "away, bound"


COUNTS = "int8 matmuls, expected"
MUTANTS = {
    "scale_too_large": Mutant(_scale_too_large),
    "writes_unseen": Mutant(_writes_unseen, lambda p: p.int8 > 1 and p.has(IN_PLACE)),
    "written_weights_unseen": Mutant(_written_weights_unseen, lambda p: p.writes_weights),
    "stale_weights": Mutant(_stale_weights),
    "unseen_writes": Mutant(
        _unseen_writes, lambda p: p.int8 > 0 and p.change in ("behind", "memory")
    ),
    "attends_to_all": Mutant(_attends_to_all, lambda p: p.attentions > 0),
    "attends_twice_as_sharply": Mutant(_attends_twice_as_sharply, lambda p: p.attentions > 0),
    "no_bias": Mutant(_without("bias", None)),
    "no_activation": Mutant(_without("activation", "none"), lambda p: p.has(ACTIVATIONS)),
    "patterns_unread": Mutant(_patterns_unread, lambda p: p.chosen is not None, COUNTS),
    "layers_share_decisions": Mutant(
        _layers_share_decisions, lambda p: p.breaks and p.chosen is not None, COUNTS
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_pass_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the seeds that every run tries."""
    MUTANTS[name].patch(monkeypatch)
    programs = (program(seed) for seed in range(25 * SEEDS_EACH))
    assert any(MUTANTS[name].by in _mismatch(p) for p in programs if MUTANTS[name].shown_by(p))


def _mismatch(p: Program) -> str:
    torch._dynamo.reset()
    try:
        check(p)
    except Mismatch as mismatch:
        return str(mismatch)
    return ""
