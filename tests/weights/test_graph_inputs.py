"""The wrapper sees every change of a weight, asks the cache only then, and keeps nothing alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import qfx
from qfx import _C
from qfx.ops.packing import Constant, Packing
from qfx.weights.cache import CACHE
from qfx.weights.graph_inputs import GraphInputs, PackedPart, WeightSource, with_packed_weights
from tests.lib.pairs import pairs

X = torch.randn(3, 8)
SPEC = Packing(qfx.QSpec(), guarded=True)  # of two tensors


def _wrapper(weights: int) -> Callable[..., Any]:
    """Of the function that returns its inputs: x, then each packed weight and its error."""
    parts = [PackedPart(source, part) for source in range(weights) for part in range(2)]
    sources = tuple(WeightSource(1 + i, (), SPEC) for i in range(weights))
    return with_packed_weights(lambda *inputs: inputs, GraphInputs((0, *parts), sources))


# --- snapshots ---


def _alias(w: Tensor) -> None:
    w.data = torch.from_numpy(w.detach().numpy())


def _view_behind(w: Tensor) -> None:
    w.data = torch.empty(0).set_(w.untyped_storage(), 8, (7, 8))


def _swap(w: Tensor) -> None:
    torch.utils.swap_tensors(w, nn.Parameter(torch.randn(8, 8)))


def _freed(w: Tensor) -> None:
    w.untyped_storage().resize_(0)


def _exchanged(w: Tensor) -> None:
    w.data, w.keep = torch.randn(8, 8), w.data  # type: ignore[attr-defined]


CHANGED: dict[str, Callable[[Tensor], object]] = {
    "in_place": lambda w: w.mul_(2),
    "through_a_view": lambda w: w.view(-1)[3:4].zero_(),
    "through_detach": lambda w: w.detach().zero_(),
    "set": lambda w: w.set_(torch.randn(8, 8)),
    "data": _exchanged,
    "data_of_the_same_memory": _alias,
    "data_of_the_same_storage": _view_behind,
    "swap_tensors": _swap,
    "shared_memory": lambda w: w.share_memory_(),
    "freed": _freed,
}


def _computes(w: Tensor) -> None:
    with torch.enable_grad():
        (X @ w).sum().backward()


def _collects(w: Tensor) -> None:
    """The Python object of the storage is not held by anyone here."""
    gc.collect()


UNCHANGED: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda w: None,
    "gradient": _computes,
    "frozen": lambda w: w.requires_grad_(False),
    "views": lambda w: (w.t(), w.detach(), w.data, w.view(-1), w.numpy(force=True)),
    "garbage_collected": _collects,
    "optimizer_made": lambda w: torch.optim.SGD([w], lr=0.1),
}


@pytest.fixture(params=["inductor", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How addresses are read: by Inductor's function, or, should it go, by `data_ptr`."""
    if request.param == "python":
        name = "_torchinductor_pyobject_tensor_data_ptr"
        monkeypatch.delattr(torch._C._dynamo.guards, name)


@pytest.fixture(params=["first", "last"])
def place(request: pytest.FixtureRequest) -> int:
    """Which of three weights is meant."""
    return {"first": 0, "last": 2}[request.param]


@pytest.mark.parametrize(
    "name, place, reader",
    pairs(CHANGED, ["first", "last"], ["inductor", "python"]),
    indirect=["place", "reader"],
)
def test_a_changed_weight_is_noticed(name: str, place: int, reader: None) -> None:
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    snapshot = _C.Snapshot((X, *weights), [1, 2, 3])
    assert snapshot.unchanged((X, *weights))
    with torch.no_grad():
        CHANGED[name](weights[place])
    unchanged = snapshot.unchanged((X, *weights))
    assert not unchanged  # pytest would print the arguments of a call, and one has no memory


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", UNCHANGED)
def test_an_unchanged_weight_is_known(name: str) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    snapshot = _C.Snapshot((X, weight), [1])
    UNCHANGED[name](weight)
    assert snapshot.unchanged((X, weight))


@pytest.mark.usefixtures("reader")
def test_a_version_tells_of_an_element_that_no_sample_has() -> None:
    weight = nn.Parameter(torch.randn(96, 64))
    snapshot = _C.Snapshot((weight,), [0])
    weight.data[95, 63] += 1
    assert snapshot.unchanged((weight,))
    with torch.no_grad():
        weight[95, 63] += 1
    assert not snapshot.unchanged((weight,))


def test_another_tensor_with_the_same_storage_is_another() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    assert not _C.Snapshot((weight,), [0]).unchanged((nn.Parameter(weight.data),))


def test_the_other_arguments_may_change() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    assert _C.Snapshot((X, weight), [1]).unchanged((X + 1, weight))
    assert not _C.Snapshot((X, weight), [1]).unchanged((X,))


def test_a_storage_in_the_place_of_a_dead_one_is_another() -> None:
    """Same tensor, address and version; the storage's Python object may be at its old address."""
    memory = np.zeros((8, 8), np.float32)
    weight = nn.Parameter(torch.from_numpy(memory))
    for _ in range(20):
        snapshot = _C.Snapshot((weight,), [0])
        weight.data = torch.empty(0)
        weight.data = torch.from_numpy(memory)
        assert not snapshot.unchanged((weight,))


def test_weights_made_in_inference_mode_have_no_version() -> None:
    with torch.inference_mode():
        weight = torch.randn(8, 8)
    snapshot = _C.Snapshot((weight,), [0])
    assert snapshot.unchanged((weight,))
    weight.data = torch.randn(8, 8)  # no longer made in inference mode, still without versions
    assert not snapshot.unchanged((weight,))
    assert _C.Snapshot((weight,), [0]).unchanged((weight,))


def test_a_snapshot_keeps_nothing_alive() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    snapshot = _C.Snapshot((weight,), [0])
    tensor, storage = weakref.ref(weight), weakref.ref(weight.untyped_storage())
    del weight
    assert tensor() is None and storage() is None
    assert not snapshot.unchanged((X,))


# --- what a snapshot looks at ---


def _regions() -> dict[str, Tensor]:
    """Tensors that lie in memory in many ways, each in a larger one of its own."""
    f32, bf16 = torch.float32, torch.bfloat16
    return {
        "small": torch.zeros(64)[3:40],
        "matrix": torch.zeros(100, 300, 64)[7],
        "transposed": torch.zeros(300, 200)[:, :].t(),
        "columns": torch.zeros(300, 200)[:, 40:100],
        "few_columns": torch.zeros(3000, 20)[:, 4:7],
        "every_other": torch.zeros(400, 100)[::2],
        "every_other_column": torch.zeros(100, 400)[:, ::2],
        "unaligned": torch.zeros(20000, dtype=bf16)[5:-3],
        "odd": torch.zeros(1001, 77, dtype=bf16)[:, :76],
        "expanded": torch.zeros(4000)[7:].expand(5, 3993),
        "three_axes": torch.zeros(12, 40, 100, dtype=f32).permute(2, 0, 1)[:, 1:],
        "scalar": torch.zeros(3)[1],
        "empty": torch.zeros(0, 8),
    }


REGIONS = _regions()


def _places(tensor: Tensor, part: Tensor) -> Tensor:
    """Where the elements of `part` lie in the storage of `tensor`."""
    elements = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return elements.as_strided(part.shape, part.stride(), part.storage_offset()).reshape(-1)


@pytest.mark.parametrize("name", REGIONS)
def test_a_snapshot_looks_at_the_tensor_and_at_nothing_else(name: str) -> None:
    tensor = REGIONS[name]
    behind = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).data
    snapshot = _C.Snapshot((tensor,), [0])
    behind.fill_(-0.0)  # a sign alone
    behind[_places(tensor, tensor)] = 0.0
    assert snapshot.unchanged((tensor,))
    behind.zero_()
    thirds = tensor.chunk(3, int(torch.tensor(tensor.stride()).argmax())) if tensor.dim() else ()
    for part in (tensor, *thirds):
        behind[_places(tensor, part)] = -0.0
        assert snapshot.unchanged((tensor,)) == (part.numel() == 0)
        behind.zero_()
    assert snapshot.unchanged((tensor,))


@pytest.mark.parametrize("name", REGIONS)
def test_a_sample_is_six_cache_lines_or_all_of_a_tensor(name: str) -> None:
    """At least, also where no run of bytes is as long as a line."""
    tensor = REGIONS[name]
    count = len(_places(tensor, tensor).unique())
    least = min(count, 6 * 64 // tensor.element_size())
    assert least <= _C.sample_size(tensor) <= count


@pytest.mark.parametrize("name", REGIONS)
def test_the_content_is_all_of_a_tensor(name: str) -> None:
    tensor = REGIONS[name].contiguous()
    before = _C.content(tensor)
    assert before == _C.content(tensor.clone())
    flat = tensor.view(-1)
    for i in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
        flat[i] = -0.0
        assert _C.content(tensor) != before
        flat[i] = 0.0


def test_other_devices_have_no_content() -> None:
    assert _C.content(torch.empty(3, device="meta")) is None


# --- gathering ---


def test_gather_takes_arguments_and_referents() -> None:
    packed = [torch.zeros(1), torch.ones(1)]
    references = tuple(map(weakref.ref, packed))
    gather = _C.Gather([1, -2, 0, -1, -2])
    inputs = gather(("a", "b"), references)
    assert [id(i) for i in inputs] == [id(i) for i in ("b", packed[1], "a", packed[0], packed[1])]
    del inputs
    packed.pop()
    assert gather(("a", "b"), references) is None


def test_gather_refuses_what_is_not_there() -> None:
    for order in ([1], [-1]):
        with pytest.raises(IndexError):
            _C.Gather(order)(("a",), ())


def test_the_order_is_what_gather_of_a_feed_does() -> None:
    graph_inputs = GraphInputs(
        (2, PackedPart(1, 0), 0, PackedPart(0, 1)),
        (WeightSource(1, (), SPEC), WeightSource(3, (), SPEC)),
    )
    found = [CACHE.get(torch.randn(8, 8), (), SPEC) for _ in graph_inputs.sources]
    references = tuple(weakref.ref(tensor) for packed in found for tensor in packed.tensors)
    arguments = ("a", "b", "c", "d")
    expected = graph_inputs.gather(arguments, [packed.tensors for packed in found])
    inputs = _C.Gather(graph_inputs.order())(arguments, references)
    assert [id(i) for i in inputs] == [id(e) for e in expected]


# --- the wrapper ---


def test_layers_that_share_the_call_do_not_displace_each_other(
    unasked: Callable[[], None],
) -> None:
    layers = [[torch.randn(8, 8) for _ in range(2)] for _ in range(3)]
    f = _wrapper(2)
    first = [f(X, *weights)[1:] for weights in layers]
    unasked()
    for weights, known in zip(2 * layers, 2 * first, strict=True):
        assert [id(t) for t in f(X, *weights)[1:]] == [id(t) for t in known]


def test_sets_of_weights_that_died_are_forgotten() -> None:
    f, weights = _wrapper(1), [torch.randn(8, 8) for _ in range(50)]
    for weight in weights:  # at once, so that none has the identity of another
        f(X, weight)
    del weight
    weights.clear()
    f(X, torch.randn(8, 8))
    known = inspect.getclosurevars(inspect.unwrap(f)).nonlocals["as_before"]
    assert len(inspect.getclosurevars(known).nonlocals["known"]) == 1


FACTOR, ZERO = Constant((0.5, 2.0)), Constant((3,), torch.int32)


@pytest.mark.parametrize("weights", [0, 2])
def test_constants_are_fed_after_packed_weights_and_stay(weights: int) -> None:
    parts = [PackedPart(source, part) for source in range(weights) for part in range(2)]
    sources = tuple(WeightSource(1 + i, (), SPEC) for i in range(weights))
    constants = (PackedPart(weights, 1), PackedPart(weights, 0))
    graph_inputs = GraphInputs((0, *parts, *constants), sources, (FACTOR, ZERO))
    f = with_packed_weights(lambda *inputs: inputs, graph_inputs)
    given = [torch.randn(8, 8) for _ in range(weights)]
    for _ in range(2):
        *_, zero, factor = first = f(X, *given)
        assert (zero.tolist(), zero.dtype) == ([3], torch.int32)
        assert (factor.tolist(), factor.dtype) == ([0.5, 2.0], torch.float32)
    assert [id(t) for t in f(X, *given)] == [id(t) for t in first]
    mode = FakeTensorMode()
    with mode:
        fake = f(*map(mode.from_tensor, (X, *given)))
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in fake)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and from then on nobody may ask the cache."""

    def refuse(*_: object) -> None:
        raise AssertionError("the cache was asked")

    yield lambda: monkeypatch.setattr(CACHE, "get", refuse)


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_the_cache_is_asked_once(mode: Callable[[], Any], unasked: Callable[[], None]) -> None:
    with mode():
        weights = [torch.randn(8, 8) for _ in range(3)]
        f = _wrapper(3)
        first = f(X, *weights)
        unasked()
        again = f(X + 1, *weights)
    assert not torch.equal(first[0], again[0])
    assert [id(t) for t in first[1:]] == [id(t) for t in again[1:]]


def test_the_cache_is_asked_after_an_invalidation(unasked: Callable[[], None]) -> None:
    weight = torch.randn(8, 8)
    f = _wrapper(1)
    f(X, weight)
    unasked()
    qfx.invalidate(weight)
    with pytest.raises(AssertionError, match="the cache was asked"):
        f(X, weight)


def test_packed_weights_die_with_the_weight_not_with_the_wrapper() -> None:
    weight = torch.randn(8, 8)
    f = _wrapper(1)
    packed = [weakref.ref(t) for t in f(X, weight)[1:]]
    assert None not in [r() for r in packed]
    del weight
    len(CACHE)  # forgets the dead
    assert [r() for r in packed] == [None, None]
    other = torch.randn(8, 8)
    assert torch.equal(f(X, other)[1], qfx.weights.cache.pack(other, (), SPEC).weight)


def test_fake_arguments_are_packed_as_fakes_and_forgotten() -> None:
    weight = torch.randn(8, 8)
    f = _wrapper(1)
    real = f(X, weight)
    mode = FakeTensorMode()
    with mode:
        fake = f(mode.from_tensor(X), mode.from_tensor(weight))
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in fake)
    assert [t.shape for t in fake] == [t.shape for t in real]
    assert f(X, weight)[1] is real[1]


def test_threads_that_change_weights_and_call() -> None:
    """Each thread has its own weight in the one wrapper; none sees another's."""
    f = _wrapper(1)

    def work(seed: int) -> bool:
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(20):
            weight.mul_(1.5)
            expected = qfx.weights.cache.pack(weight, (), SPEC)
            if not all(map(torch.equal, f(X, weight)[1:], expected.tensors)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
