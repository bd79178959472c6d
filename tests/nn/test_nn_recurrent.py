"""LSTM, GRU and their cells with int8 weights: what PyTorch's return, in int8."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import qfx
from qfx.nn.left_float import why_left_float
from tests.conftest import same_bits

K, H = 64, 128
LAYERS = (nn.LSTM, nn.GRU)
CELLS = (nn.LSTMCell, nn.GRUCell)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, no bias": {"batch_first": True, "bias": False},
}


class Net(nn.Module):
    """A recurrent module and a linear that does not run."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(K, H, **options)
        self.head = nn.Linear(H, K)

    def forward(self, x: Any, h: Any = None) -> Any:
        return self.rnn(x, h)


def tensors(result: Any) -> list[Tensor]:
    """Returns the float tensors of a result."""
    leaves = torch.utils._pytree.tree_leaves(result)
    if isinstance(result, tuple) and isinstance(result[0], PackedSequence):
        leaves = [result[0].data, *tensors(result[1])]
    return [t for t in leaves if isinstance(t, Tensor)]


def close(got: Any, expected: Any) -> None:
    """The error of int8 with a scale for each row is near 40 dB below the outputs of such sizes."""
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - b).double().norm() <= 0.05 * b.double().norm()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_have_the_shapes_dtypes_and_values_of_torch(
    kind: Any, dtype: torch.dtype, options: str
) -> None:
    net = Net(kind, **OPTIONS[options]).to(dtype).eval()
    int8 = qfx.quantize_(copy.deepcopy(net))
    assert type(int8.rnn) is getattr(qfx.nn, kind.__name__)
    empty = (0, 7, K) if net.rnn.batch_first else (7, 0, K)
    for shape in ((7, 3, K), (1, 1, K), (5, K), empty):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            expected = net(x)
            close(int8(x), expected)
            close(int8(x, expected[1]), net(x, expected[1]))


@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: Any) -> None:
    net = Net(kind).eval()
    int8 = qfx.quantize_(copy.deepcopy(net))
    assert type(int8.rnn) is getattr(qfx.nn, kind.__name__)
    for shape in ((3, K), (K,), (0, K)):
        x = torch.randn(shape)
        state = net(x)
        close(int8(x), state)
        close(int8(x, state), net(x, state))


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_have_the_bits_of_each_alone(kind: Any) -> None:
    int8 = qfx.quantize_(Net(kind, bidirectional=True, num_layers=2).eval())
    x, lengths = torch.randn(7, 3, K), [3, 7, 1]
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    with torch.no_grad():
        y, last = int8(packed)
        padded, found = pad_packed_sequence(y)
        assert found.tolist() == lengths
        for b, length in enumerate(lengths):
            one, end = int8(x[:length, b : b + 1])
            assert same_bits(padded[:length, b : b + 1], one)
            for t, e in zip(tensors(last), tensors(end), strict=True):
                assert same_bits(t[:, b : b + 1], e)
        again, _ = int8(packed, last)
        assert again.data.shape == y.data.shape


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_the_linears_that_stay_float_compute_as_torch_does(kind: Any) -> None:
    """A first layer in int8 and a second in float; or the product of the input in float."""
    for skip in (["*_l1*"], ["*ih*"]):
        if kind in CELLS and skip == ["*_l1*"]:
            continue
        options = {} if kind in CELLS else {"num_layers": 2, "bidirectional": True}
        net = Net(kind, **options).eval()
        int8 = qfx.quantize_(copy.deepcopy(net), qfx.Config(skip=[*skip, "head"]))
        assert type(int8.rnn).__module__ == "qfx.nn.recurrent"
        x = torch.randn(3, K) if kind in CELLS else torch.randn(5, 3, K)
        with torch.no_grad():
            close(int8(x), net(x))


def test_a_packed_sequence_meets_a_layer_that_stays_float() -> None:
    net = Net(nn.GRU, num_layers=2, bidirectional=True).eval()
    int8 = qfx.quantize_(copy.deepcopy(net), qfx.Config(skip=["*_l1*"]))
    packed = pack_padded_sequence(torch.randn(7, 3, K), torch.tensor([7, 3, 1]))
    with torch.no_grad():
        close(int8(packed), net(packed))


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_copies_pickles_and_files_compute_the_same(kind: Any, tmp_path: Path) -> None:
    net = Net(kind).eval()
    int8 = qfx.quantize_(copy.deepcopy(net))
    x = torch.randn(5, 3, K) if kind in LAYERS else torch.randn(3, K)
    expected = tensors(int8(x))
    qfx.save(int8, tmp_path / "model")
    with torch.device("meta"):
        skeleton = Net(kind).eval()
    others = [
        copy.deepcopy(int8),
        pickle.loads(pickle.dumps(int8)),
        qfx.load(tmp_path / "model", Net(kind).eval()),
        qfx.load(tmp_path / "model", skeleton),
        _loaded(qfx.quantize_(Net(kind).eval()), int8.state_dict()),
        _loaded(qfx.quantize_(Net(kind).eval()), net.state_dict()),
    ]
    for other in others:
        assert type(other.rnn) is type(int8.rnn)
        for a, b in zip(tensors(other(x)), expected, strict=True):
            assert same_bits(a, b)


def _loaded(model: nn.Module, state: dict[str, Any]) -> nn.Module:
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    return model


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    qfx.save(qfx.quantize_(Net(nn.LSTM)), tmp_path / "model")
    other = Net(nn.LSTM, num_layers=2)
    before = other.rnn
    with pytest.raises(ValueError, match="is of another model, or incomplete"):
        qfx.load(tmp_path / "model", other)
    assert other.rnn is before


def test_tensors_have_the_names_of_torch() -> None:
    net = Net(nn.LSTM, bidirectional=True)
    int8 = qfx.quantize_(copy.deepcopy(net))
    for name, parameter in net.rnn.named_parameters():
        found = getattr(int8.rnn, name)
        assert found.shape == parameter.shape
        assert (found.detach() - parameter.detach()).abs().max() <= 0.02
    with pytest.raises(AttributeError, match="weight_ih_l7"):
        int8.rnn.weight_ih_l7  # noqa: B018
    assert int8.rnn.hidden_size == H and int8.rnn.flatten_parameters() is None
    assert "(rnn): LSTM(\n    64, 128, bidirectional=True" in str(int8)


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_symbolic_traces_call_the_module(kind: Any) -> None:
    """As they call that of torch.nn, whose steps depend on the input."""
    int8 = qfx.quantize_(Net(kind).eval())
    x = torch.randn(5, 3, K) if kind in LAYERS else torch.randn(3, K)
    traced = torch.fx.symbolic_trace(int8, concrete_args={"h": None})
    rewritten, _ = qfx.rewrite(int8)
    for module in (traced, rewritten):
        for a, b in zip(tensors(module(x)), tensors(int8(x)), strict=True):
            assert same_bits(a, b)


def test_memory_is_a_quarter() -> None:
    net = Net(nn.LSTM, num_layers=2)
    before = sum(p.nbytes for p in net.rnn.parameters())
    int8 = qfx.quantize_(net)
    state = int8.rnn.state_dict()
    after = sum(t.nbytes for name, t in state.items() if name.rpartition(".")[2] in ("codes",))
    biases = sum(t.nbytes for name, t in state.items() if name.endswith("bias"))
    assert after == (before - biases) // 4
    packed = sum(m.packed.nbytes for m in int8.rnn.children())
    assert packed <= 0.27 * (before - biases)


REFUSED: dict[str, tuple[Any, str]] = {
    "projection": (lambda: nn.LSTM(K, H, proj_size=32), r"projected to 32 features \(proj_size\)"),
    "rnn": (lambda: nn.RNN(K, H), "nn.RNN, for whose steps there is no operator"),
    "cell": (lambda: nn.RNNCell(K, H), "nn.RNNCell, for whose steps there is no operator"),
    "subclass": (lambda: _Own(K, H), "_Own, a subclass of nn.LSTM"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.LSTM(K, H), "weight_hh_l0"),
        "its weight_hh_l0 is parametrized",
    ),
    "weight norm": (
        lambda: nn.utils.weight_norm(nn.LSTM(K, H), "weight_hh_l0"),
        "its weight_hh_l0 is no parameter, but computed before each call",
    ),
    "own forward": (lambda: _with_forward(nn.GRU(K, H)), "its forward is its own"),
}


class _Own(nn.LSTM):
    pass


def _with_forward(module: Any) -> Any:
    module.forward = lambda x, h=None: nn.GRU.forward(module, x, h)
    return module


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_float_has_a_reason(case: str) -> None:
    make, reason = REFUSED[case]
    net = Net(nn.LSTM)
    net.rnn = rnn = make()
    with pytest.warns(UserWarning, match=reason):
        qfx.quantize_(net)
    assert net.rnn is rnn and isinstance(net.head, qfx.nn.Linear)
    assert [why for name, why in why_left_float(net).items() if name == "rnn"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (qfx.Config(skip=["rnn"]), "skipped by the pattern 'rnn'"),
        (qfx.Config(skip=["*.hh_l0"]), "skipped by the pattern '*.hh_l0'"),
        (qfx.Config(only=["head"]), "not among only=['head']"),
    ],
)
def test_patterns_name_modules_and_their_linears(config: qfx.Config, reason: str) -> None:
    net = Net(nn.LSTM)
    rnn = net.rnn
    qfx.quantize_(net, config)
    assert net.rnn is rnn and why_left_float(net)["rnn"] == reason
    assert type(qfx.quantize_(Net(nn.LSTM), qfx.Config(only=["rnn"])).rnn) is qfx.nn.LSTM


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("w8", "float activations"), (qfx.Scheme(x=qfx.QSpec(axes=(0, 1))), "one scale for all rows")],
)
def test_schemes_without_an_operator_for_steps(scheme: Any, reason: str) -> None:
    net = Net(nn.GRU)
    with pytest.warns(UserWarning, match=f"rnn.hh_l0 .*{reason}"):
        qfx.quantize_(net, qfx.Config(scheme=scheme))
    assert type(net.rnn) is nn.GRU and isinstance(net.head, qfx.nn.Linear)


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8-groups"])
def test_other_weights(scheme: str) -> None:
    net = Net(nn.LSTM).eval()
    int8 = qfx.quantize_(copy.deepcopy(net), scheme)
    assert type(int8.rnn) is qfx.nn.LSTM
    x = torch.randn(5, 2, K)
    for a, b in zip(tensors(int8(x)), tensors(net(x)), strict=True):
        assert (a - b).norm() <= 0.2 * b.norm()


def test_a_faulty_model_is_left_as_it_is() -> None:
    net = Net(nn.LSTM)
    rnn = net.rnn
    with pytest.raises(ValueError, match="matches nothing"):
        qfx.quantize_(net, qfx.Config(skip=["nothing"]))
    assert net.rnn is rnn


def test_hooks_and_attributes_stay_with_the_module() -> None:
    net = Net(nn.LSTM, num_layers=2)
    seen: list[int] = []
    handle = net.rnn.register_forward_hook(lambda module, given, result: seen.append(1))
    net.rnn.own, net.other = "mine", net.rnn
    net.rnn.extra = nn.Parameter(torch.ones(1))
    int8 = qfx.quantize_(net)
    int8(torch.randn(2, 1, K))
    assert seen == [1] and int8.rnn.own == "mine" and int8.other is int8.rnn
    assert "rnn.extra" in dict(int8.named_parameters())
    handle.remove()
    int8(torch.randn(2, 1, K))
    assert seen == [1]


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_go_to_the_input_the_state_and_the_biases(kind: Any) -> None:
    net = Net(kind)
    int8 = qfx.quantize_(copy.deepcopy(net))
    results = []
    for model in (net, int8):
        x = torch.randn(5, 3, K, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y, _ = model(x)
        y.square().sum().backward()
        results.append([x.grad, model.rnn.bias_hh_l0.grad, model.rnn.bias_ih_l0.grad])
    for a, b in zip(*results[::-1], strict=True):
        assert a is not None and b is not None
        assert (a - b).norm() <= 0.1 * b.norm()


def test_dropout_between_layers_in_training_only() -> None:
    int8 = qfx.quantize_(Net(nn.LSTM, num_layers=2, dropout=0.5))
    x = torch.randn(5, 3, K)
    first, second = int8(x)[0], int8(x)[0]
    assert not torch.equal(first, second)
    int8.eval()
    assert torch.equal(int8(x)[0], int8(x)[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_wrong_inputs_are_refused_as_by_torch(kind: Any) -> None:
    net = Net(kind).eval()
    int8 = qfx.quantize_(copy.deepcopy(net))
    state = torch.zeros(1, 3, H)
    states = (state, state) if kind is nn.LSTM else state
    flat = (state[0], state[0]) if kind is nn.LSTM else state[0]
    for x, h in (
        (torch.zeros(2, 3, 4, K), None),
        (torch.zeros(2, 3, K + 1), None),
        (torch.zeros(2, 4, K), states),
        (torch.zeros(2, 3, K), flat),
        (torch.zeros(0, 3, K), None),
    ):
        for model in (net, int8):
            with pytest.raises((RuntimeError, ValueError)) as error:
                model(x, h)
        assert str(error.value)


def test_compiled_without_breaks_for_any_length() -> None:
    """One graph for several lengths, with one operator for all steps."""
    int8 = qfx.quantize_(Net(nn.LSTM, num_layers=2, bidirectional=True).eval())
    compiled = torch.compile(int8, backend="qfx", fullgraph=True, dynamic=True,
                             options={"inner": "aot_eager"})  # fmt: skip
    with torch.no_grad():
        for steps in (3, 50, 1000):
            x = torch.randn(steps, 2, K)
            for a, b in zip(tensors(compiled(x)), tensors(int8(x)), strict=True):
                assert same_bits(a, b)


@pytest.mark.parametrize("kind", (*LAYERS, *CELLS))
def test_few_inputs_over_orders_of_magnitude_stay_float(kind: Any) -> None:
    """Features of 1e-5 and of 1 in one row, and weights that make them equal, do not fit into 8
    bits; a state does. The same by quantize_ and under torch.compile."""
    few, net = 40, nn.Sequential(kind(40, H))
    powers = torch.logspace(-5, 0, few)
    for name, p in net.named_parameters():
        if "ih" in name and p.dim() == 2:
            p.data /= powers
    x = powers * torch.rand(*(6, 3)[isinstance(net[0], nn.RNNCellBase) :], few)
    int8 = qfx.quantize_(copy.deepcopy(net))
    torch._dynamo.reset()
    with torch.no_grad():
        expected = net(x)
        for got in (int8(x), torch.compile(net, backend="qfx", options={"minimum_gain": 0})(x)):
            for a, b in zip(tensors(got), tensors(expected), strict=True):
                assert qfx.sqnr(b, a) > 30
    first = "0.ih" if isinstance(net[0], nn.RNNCellBase) else "0.ih_l0"
    reason = f"K={few}: below 64 features the input of a recurrent layer stays float"
    assert why_left_float(int8) == {first: reason}
    n = int8.get_submodule(first).weight.shape[0]
    recipe = qfx.Recipe((qfx.SiteRecipe(first, 0, n, few, qfx.Scheme()),))
    by_hand = qfx.quantize_(net, qfx.Config(recipe=recipe))
    assert isinstance(by_hand.get_submodule(first), qfx.nn.Linear)
