"""Models with int8 convolutions: what quantize_ takes and leaves, and saving, loading, copying."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import qfx
from qfx.nn.weight_bytes import weight_bytes
from tests.conftest import same_bits

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Own(nn.Conv2d):
    pass


class Net(nn.Module):
    """A stem, a padded and a patch convolution, a transposed one, and a linear. The mean has the
    same bits in every layout: its sum is rounded from float64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.patches = nn.Conv2d(16, 32, 2, stride=2, bias=False)
        self.up = nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.patches(torch.relu(self.norm(self.stem(x)))))
        y: Tensor = self.head(x.double().mean((2, 3)).to(x.dtype))
        return y


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def output(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(x)
    return y


def int8() -> nn.Module:
    return qfx.quantize_(net())


# A convolution -> what becomes of it, and whether that is warned of.
TAKEN: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "3x3": (lambda: nn.Conv2d(16, 8, 3), "Conv xa8r_ws8r_h16", False),
    "pixels": (lambda: nn.Conv2d(24, 8, 1), "Conv xa8r_ws8r_h64", False),
    "1-D": (lambda: nn.Conv1d(32, 8, 4, stride=2), "Conv xa8r_ws8r_h16", False),
    "3-D": (lambda: nn.Conv3d(16, 8, 2), "Conv xa8r_ws8r_h16", False),
    "transposed": (lambda: nn.ConvTranspose1d(16, 8, 4, stride=2), "Conv xa8r_ws8r_h16", False),
    "few": (lambda: nn.Conv1d(1, 8, 3), "K=3: below 8 features int8 takes more", False),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), "each output reads one channel", False),
    "grouped": (lambda: nn.Conv2d(8, 8, 3, groups=2), "of 2 groups of channels", False),
    "dilated": (lambda: nn.ConvTranspose1d(8, 8, 3, dilation=2), "a dilated transposed", False),
    "own": (lambda: Own(8, 8, 3), "Own, a subclass of a convolution", True),
    "own, grouped": (lambda: Own(8, 8, 3, groups=2), "of 2 groups of channels", False),
    "float64": (lambda: nn.Conv1d(8, 8, 3).double(), "its weight is float64", True),
    "lazy": (lambda: nn.LazyConv2d(8, 3), "LazyConv2d: its weight has no shape yet", True),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Conv1d(8, 8, 3)),
        "its weight is parametrized (_WeightNorm)",
        True,
    ),
    "weight norm by hook": (
        lambda: nn.utils.weight_norm(nn.Conv1d(8, 8, 3)),
        "weight_norm computes its weight before each call",
        True,
    ),
}


@pytest.mark.parametrize("row", TAKEN)
def test_what_becomes_of_a_convolution(row: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words, warned = TAKEN[row]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, for old hooks and lazy modules
        conv = make()
    model = nn.ModuleDict({"big": nn.Linear(64, 64), "c": conv})
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "qfx"):
        warnings.simplefilter("always")
        qfx.quantize_(model)
    assert isinstance(model["c"], qfx.nn.Conv) == words.startswith("Conv ")
    assert words in caplog.text and len(caught) == warned
    assert not warned or words in str(caught[0].message)


def test_patterns_name_convolutions() -> None:
    found = qfx.quantize_(net(), qfx.Config(skip=["stem", "up"]))
    kinds = {name: type(module).__name__ for name, module in found.named_children()}
    assert kinds == {
        "stem": "Conv2d", "norm": "BatchNorm2d", "patches": "Conv", "up": "ConvTranspose2d",
        "head": "Linear",
    }  # fmt: skip
    with pytest.raises(ValueError, match="middle"):
        qfx.quantize_(net(), qfx.Config(skip=["middle"]))


def test_a_model_of_convolutions_alone() -> None:
    model = qfx.quantize_(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()))
    assert isinstance(model[0], qfx.nn.Conv)  # type: ignore[index]
    with pytest.raises(ValueError, match="0 hold codes already"):
        qfx.quantize_(model)


def test_the_summary_counts_the_float_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qfx"):
        model = int8()
    floats = sum(m.weight.numel() for m in net().children() if not isinstance(m, nn.BatchNorm2d))
    assert weight_bytes(model).quantized == 4 * floats
    shapes = dict(line.split()[:2] for line in caplog.text.splitlines() if " Conv xa8r" in line)
    assert shapes == {"stem": "27x16", "patches": "64x32", "up": "128x64"}
    assert "4 of 4 linears and convolutions replaced" in caplog.text


def test_shared_kernels_stay_shared() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, 3)
    )
    for each in model[1:]:
        each.weight = model[0].weight
    qfx.quantize_(model)
    assert model[0].weight is model[1].weight  # type: ignore[union-attr]
    assert model[0].weight is not model[2].weight  # whose rows have another order


def test_the_state_is_that_of_a_linear() -> None:
    model = int8()
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in model.state_dict().items() if "up" in n}
    assert shapes == {
        "up.bias": (torch.float32, (16,)),
        "up.codes": (torch.int8, (64, 128)),
        "up.scale": (torch.float32, (64,)),
        "up.scheme": (torch.int32, (32,)),
    }


def test_states_of_codes_and_of_floats() -> None:
    wanted, other = int8(), qfx.quantize_(Net().eval())
    assert not same_bits(output(wanted), output(other))
    other.load_state_dict(wanted.state_dict())
    assert same_bits(output(wanted), output(other))
    other = qfx.quantize_(Net().eval())
    other.load_state_dict(net().state_dict())
    assert same_bits(output(wanted), output(other))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model, state = int8(), net().state_dict()
    before = output(model)
    state["stem.weight"] = state["stem.weight"].flatten(1)
    with pytest.raises(
        RuntimeError, match=r"stem.weight is torch.float32 \[16, 27\], .* \[16, 3, "
    ):
        model.load_state_dict(state)
    state = dict(model.state_dict())
    state["up.codes"] = state["up.codes"][:, 1:]
    with pytest.raises(RuntimeError, match=r"up.codes is torch.int8 \[64, 127\], expected"):
        model.load_state_dict(state)
    assert same_bits(output(model), before)


def test_copies() -> None:
    model = int8()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert same_bits(output(other), output(model))
        assert other.stem.kernel_size == (3, 3) and other.stem.weight is not model.stem.weight


@pytest.mark.parametrize("scheme", ("w8a8", "w4a8", "w8a8-groups"))
def test_files(scheme: str, tmp_path: Path) -> None:
    config = qfx.Config(scheme=scheme)
    model = qfx.quantize_(net(), config)
    qfx.save(model, tmp_path / "model")
    with torch.device("meta"):
        skeleton = Net().eval()
    for start in (skeleton, net()):
        loaded = qfx.load(tmp_path / "model", start)
        assert same_bits(output(loaded), output(model))
        assert isinstance(loaded.up, qfx.nn.Conv) and loaded.up.transposed


def test_files_for_another_convolution_are_refused(tmp_path: Path) -> None:
    qfx.save(int8(), tmp_path / "model")
    for change, words in {
        "stem": (nn.Conv2d(3, 16, 5), r"stem has codes \[16, 27\], and the .* \[16, 75\]"),
        "up": (
            nn.ConvTranspose2d(32, 16, 3, dilation=2),
            "up is an int8 linear, and .* ConvTranspose2d",
        ),
        "patches": (
            nn.Conv2d(16, 32, 2, groups=8),
            "patches is an int8 linear, .* a Conv2d of that",
        ),
    }.items():
        skeleton = net()
        setattr(skeleton, change, words[0])
        with pytest.raises(ValueError, match=words[1]):
            qfx.load(tmp_path / "model", skeleton)


def test_dtypes_and_devices() -> None:
    model = int8()
    wanted, codes = output(model), model.stem.codes.clone()
    half = model.bfloat16()
    assert output(half, X.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(half.stem.codes, codes)
    assert same_bits(
        output(half.float().to(memory_format=torch.channels_last)).sign(), wanted.sign()
    )
    assert copy.deepcopy(model).to("meta").stem.weight.is_meta


def test_what_users_added_is_kept() -> None:
    model, seen = net(), list[tuple[int, ...]]()
    model.stem.register_forward_hook(lambda m, args, y: seen.append(tuple(y.shape)))
    model.stem.note = "kept"
    qfx.quantize_(model)
    output(model)
    assert seen == [(2, 16, 16, 16)] and model.stem.note == "kept"


def test_a_recipe_of_the_graph_fits_the_module() -> None:
    """Calibration sees the windows of a compiled graph in the order in which the module has
    them."""

    def made() -> Net:
        model = net()
        model.norm = nn.Identity()  # type: ignore[assignment]
        return model

    config = qfx.Config(minimum_gain=0)
    recipe = qfx.calibrate(made(), [(X,)], config, progress=False)
    assert {"stem", "patches", "up"} <= {site.name.removesuffix(".weight") for site in recipe.sites}
    model = qfx.quantize_(made(), qfx.Config(recipe=recipe))
    compiled = torch.compile(
        made(), backend="qfx", options={"minimum_gain": 0, "recipe": recipe, "inner": "eager"}
    )
    assert same_bits(output(model), output(compiled))
