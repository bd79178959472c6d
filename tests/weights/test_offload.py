"""Whose float values were given back, whoever reads or writes them next finds them; nothing else is
given back; and no call of the compiled model fetches them."""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.weights.cache import CACHE
from qfx.weights.offload import LEAST, is_offloaded, offload
from tests.lib.models import compiled

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux")
IDS, X = torch.arange(3), torch.randn(3, 128)


class Net(nn.Module):
    """`a` may be given back; the table is read in float, and is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 128)
        self.a, self.b = nn.Linear(128, 256), nn.Linear(256, 128)
        self.head = nn.Linear(128, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()) + self.table(ids))


@pytest.fixture
def net() -> Net:
    return Net().eval().requires_grad_(False)


def _given_back(net: nn.Module, **options: Any) -> Callable[..., Tensor]:
    fast = compiled(net, release_weights=True, **options)
    for _ in range(2):
        fast(X, IDS)
    return fast  # type: ignore[no-any-return]


def _present(tensor: Tensor) -> int:
    """How many of its whole pages are in memory."""
    size, pages = mmap.PAGESIZE, array("Q")
    first = -(-tensor.data_ptr() // size)
    end = (tensor.data_ptr() + tensor.nbytes) // size
    with open("/proc/self/pagemap", "rb", buffering=0) as account:
        account.seek(first * 8)
        pages.frombytes(account.read((end - first) * 8))
    return sum(page >> 63 for page in pages)


def test_what_only_int8_reads_is_given_back_and_no_call_fetches_it(net: Net) -> None:
    packs, fast = CACHE.packs, _given_back(net)
    for rows in (3, 5, 1):
        fast(torch.randn(rows, 128), torch.arange(rows))
    assert [is_offloaded(p) for p in (net.a.weight, net.b.weight)] == [True, True]
    assert not is_offloaded(net.table.weight)
    assert (_present(net.a.weight), _present(net.b.weight)) == (0, 0)
    assert CACHE.packs == packs + 3
    qfx.invalidate(net)  # compares all of the content
    fast(X, IDS)
    assert (_present(net.a.weight), CACHE.packs) == (0, packs + 3)


class Tokens(nn.Module):
    """Smoothed: compiling it runs it on token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 128), nn.LayerNorm(128)
        self.a, self.b = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.a(self.norm(self.table(ids)))
        torch._dynamo.graph_break()
        return self.b(h)


def test_compiling_again_leaves_no_pages() -> None:
    """Neither for other sizes, nor of a later graph of the model."""
    net = Tokens().eval().requires_grad_(False)
    fast = compiled(net, release_weights=True, scheme="w8a8", dynamic=False)
    packs = CACHE.packs
    for tokens in (3, 3, 7):
        fast(torch.arange(tokens)[None])
        assert (_present(net.a.weight), _present(net.b.weight)) == (0, 0)
    assert is_offloaded(net.a.weight) and CACHE.packs == packs + 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_modes_of_inference(mode: Callable[[], Any]) -> None:
    """Parameters that might train elsewhere are given back where nothing is recorded."""
    net = Net().eval().requires_grad_(mode is not torch.enable_grad)
    with mode():
        expected = compiled(net)(X, IDS)
        assert torch.equal(_given_back(net)(X, IDS), expected)
    assert is_offloaded(net.a.weight)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net = Net().eval()
        expected = compiled(net)(X, IDS)
        assert torch.equal(_given_back(net)(X, IDS), expected)
        assert is_offloaded(net.a.weight) and net.a.weight.is_inference()


def test_weights_that_train_stay() -> None:
    net = Net()
    fast = _given_back(net)
    fast(X, IDS).sum().backward()
    assert not is_offloaded(net.a.weight) and net.a.weight.grad is not None


# --- readers: each finds what it finds in a copy whose memory is its own ---


def _saved(net: Net) -> Tensor:
    with tempfile.TemporaryFile() as file:
        torch.save(net.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)["a.weight"]  # type: ignore[no-any-return]


def _in_a_child(net: Net) -> Tensor:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, net.a.weight[5].numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    return torch.frombuffer(bytearray(os.read(read, 4 * 128)), dtype=torch.float32)


def _report(net: Net) -> Tensor:
    rows = qfx.explain(net, X, IDS, options={"minimum_gain": 0}).rows
    return torch.tensor([row.sqnr_db for row in rows])


def _shared(net: Net) -> Tensor:
    return net.share_memory().a.weight


READERS: dict[str, Callable[[Net], Tensor]] = {
    "forward": lambda net: net(X, IDS),
    "module": lambda net: net.a(X),
    "state_dict": lambda net: net.state_dict()["a.weight"],
    "save": _saved,
    "deepcopy": lambda net: copy.deepcopy(net).a(X),
    "to": lambda net: copy.deepcopy(net).to(torch.float64).a.weight,
    "numpy": lambda net: torch.from_numpy(net.a.weight.numpy().copy()),
    "embedding": lambda net: F.embedding(IDS, net.a.weight),
    "view": lambda net: net.a.weight.t()[3:5] + 1,
    "fork": _in_a_child,
    "share_memory": _shared,
    "another_backend": lambda net: torch.compile(net, backend="aot_eager")(X, IDS),
    "left_float": lambda net: compiled(net, skip=["a"])(X, IDS),
    "another_packing": lambda net: compiled(net, scheme="w4a8")(X, IDS),
    "explain": _report,
    "quantize_": lambda net: qfx.quantize_(net)(X, IDS),
    "rewrite": lambda net: qfx.rewrite(qfx.trace(net))[0](X, IDS),
    "trace_and_calibrate": lambda net: qfx.calibrate(net, [(X, IDS)]).sites[0].sqnr_db,
}


@pytest.mark.parametrize("reader", READERS)
def test_readers(net: Net, reader: str) -> None:
    other = copy.deepcopy(net)
    fast = _given_back(net)
    expected = fast(X, IDS)
    found, own = (torch.as_tensor(READERS[reader](each)) for each in (net, other))
    assert torch.equal(found, own)
    if reader != "quantize_":
        assert torch.equal(fast(X, IDS), expected)


# --- writers: the model is then the new one, and its memory goes again ---


def _step(net: Net) -> None:
    net.a.weight.grad = torch.ones_like(net.a.weight)
    torch.optim.SGD([net.a.weight], lr=0.5).step()


def _unseen(net: Net) -> None:
    net.a.weight.data[7, 7] = 9.0
    qfx.invalidate(net)


WRITERS: dict[str, Callable[[Net], object]] = {
    "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
    "assigned": lambda net: net.load_state_dict(
        Net().requires_grad_(False).state_dict(), assign=True
    ),
    "in_place": lambda net: net.a.weight.mul_(2),
    "data": lambda net: setattr(net.a.weight, "data", torch.randn(256, 128)),
    "step": _step,
    "told_of": _unseen,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writers(net: Net, writer: str) -> None:
    fast = _given_back(net)
    WRITERS[writer](net)
    expected = compiled(copy.deepcopy(net))(X, IDS)
    for _ in range(3):
        assert torch.equal(fast(X, IDS), expected)
    assert is_offloaded(net.a.weight) and _present(net.a.weight) == 0


def test_threads_that_call_at_once(net: Net) -> None:
    expected = compiled(copy.deepcopy(net))(X, IDS)
    fast = compiled(net, release_weights=True)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: fast(X, IDS), range(16))]
    assert all(torch.equal(each, expected) for each in found)
    assert is_offloaded(net.a.weight)


# --- what stays ---

LARGE = (256, 256)


def _view() -> tuple[Tensor, Any]:
    whole = torch.randn(2, *LARGE)
    return whole[1], whole


def _twice() -> tuple[Tensor, Any]:
    weight = torch.randn(LARGE)
    return weight, weight.detach()


STAYS: dict[str, tuple[Callable[[], tuple[Tensor, Any]], str]] = {
    "a_view": (_view, "it is a view of 262144 of the 524288 bytes of other memory"),
    "shared": (_twice, "2 tensors share its memory"),
    "small": (lambda: (torch.randn(64, 64), None), f"it has 16384 bytes, fewer than {LEAST}"),
    "gaps": (lambda: (torch.randn(256, 512)[:, ::2], None), "it has gaps, or shows elements twice"),
    "expanded": (lambda: (torch.randn(256).expand(LARGE), None), "it has gaps, or shows"),
    "meta": (lambda: (torch.empty(LARGE, device="meta"), None), "it is not in the memory of"),
    "sparse": (lambda: (torch.randn(LARGE).to_sparse(), None), "it is not in the memory of"),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_stays(case: str) -> None:
    (weight, kept), why = STAYS[case][0](), STAYS[case][1]
    before = weight.untyped_storage().data_ptr() if case not in ("sparse", "meta") else 0
    assert offload(weight).startswith(why)
    assert case == "sparse" or not is_offloaded(weight)
    assert not before or weight.untyped_storage().data_ptr() == before
    del kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shown", [lambda w: w, lambda w: w.t()])
def test_values_and_strides_are_as_before(
    dtype: torch.dtype, shown: Callable[[Tensor], Tensor]
) -> None:
    weight = nn.Parameter(shown(torch.randn(256, 384, dtype=dtype)))
    expected, version = weight.detach().clone(), weight._version
    assert offload(weight) == ""
    assert is_offloaded(weight) and _present(weight) == 0
    assert torch.equal(weight, expected) and weight._version == version
    assert weight.stride() == expected.stride() and weight.requires_grad


def _mapped(folder: Path) -> Tensor:
    path, values = folder / "weights", torch.randn(2, *LARGE)
    path.write_bytes(values.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), False, values.nbytes)
    return torch.empty(0).set_(storage, 0, values.shape)  # type: ignore[call-overload,no-any-return]


def test_pages_of_a_file_go_where_they_came_from(tmp_path: Path) -> None:
    """Also of a view, for nothing of the tensor changes."""
    whole = _mapped(tmp_path)
    expected, address = whole.clone(), whole.data_ptr()
    assert offload(whole[1]) == ""
    assert whole.data_ptr() == address and _present(whole[1]) == 0
    assert torch.equal(whole, expected)


def test_pages_that_were_written_to_are_no_files(tmp_path: Path) -> None:
    whole = _mapped(tmp_path)
    whole[1, 5, 5] = 7
    assert offload(whole[1]).startswith("it is a view")
    assert whole[1, 5, 5] == 7
    assert offload(whole) == "" and whole[1, 5, 5] == 7


def test_the_file_goes_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weight = torch.randn(LARGE)
    assert offload(weight) == ""
    assert [*tmp_path.iterdir()] == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del weight
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("folder", "why"), [("nowhere", "No such file"), ("/dev/shm", r"is in memory \(tmpfs\)")]
)
def test_where_no_file_can_be_weights_stay_with_a_warning(
    net: Net, monkeypatch: pytest.MonkeyPatch, folder: str, why: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    expected, fast = compiled(copy.deepcopy(net))(X, IDS), compiled(net, release_weights=True)
    with pytest.warns(UserWarning, match=f"release_weights: float weights stay.*{why}") as told:
        assert torch.equal(fast(X, IDS), expected)
    assert len(told) == 1 and not is_offloaded(net.a.weight)
    assert torch.equal(fast(X, IDS), expected)


def test_memory_decides_and_not_time(net: Net) -> None:
    options: dict[str, Any] = {"minimum_gain": 1e5, "release_weights": True}
    report = qfx.explain(net, X, IDS, options=options)
    assert report.quantized == 3
    assert all("release_weights" in row.reason for row in report.rows)
