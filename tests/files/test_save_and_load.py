"""qfx.save and qfx.load: what comes back is the model that was saved, bit by bit, ties and all; an
error changes nothing; and little more memory than the file has is taken."""

from __future__ import annotations

import copy
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qfx
from qfx import Config, Recipe
from qfx.io.folder_lock import LOCK
from tests.conftest import same_bits
from tests.lib.pairs import every
from tests.lib.rounded import Net, batches, calibrated
from tests.lib.strategies import POSITIVE, SEEDS, recipes
from tests.nn.test_nn_linear import BY_VARIED, SCHEMES, K, N, outputs

IDS = torch.arange(10)
FEATURES = 64


class Kept(nn.Module):
    """Everything that a file may have to hold: ties to an embedding, a
    linear under two names, buffers in and outside of the state dict, other types, no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 128), nn.Linear(128, FEATURES, bias=False)
        self.again, self.left = self.down, nn.Linear(FEATURES, FEATURES, bias=False)
        self.head.weight = self.left.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(FEATURES)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.scant = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.register_buffer("places", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("table", torch.randn(FEATURES), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table  # type: ignore[operator]
        x = self.again(self.up(x).relu()) + self.down(self.up(-x).relu())
        return self.left(self.head(self.norm(x)))


def kept() -> nn.Module:
    torch.manual_seed(0)
    return qfx.quantize_(Kept().eval(), Config(skip=("left",)))


SKELETONS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: Kept().eval(),
    "meta": lambda: Kept().to("meta").eval(),
    "bfloat16": lambda: Kept().bfloat16().eval(),
    "compiled": lambda: torch.compile(Kept().eval(), backend="eager"),  # type: ignore[dict-item]
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype and a[n].stride() == b[n].stride()
        for n in a
        if n != "turned"
    )


@pytest.mark.parametrize("skeleton, shard_size", every(SKELETONS, [2_000_000_000, 10_000, 1]))
def test_a_model_comes_back(skeleton: str, shard_size: int, tmp_path: Path) -> None:
    model = kept()
    expected = outputs(model, IDS)
    qfx.save(model, tmp_path, shard_size=shard_size)
    loaded = qfx.load(tmp_path, SKELETONS[skeleton]())
    assert same_bits(outputs(loaded, IDS), expected) and same(tensors(loaded), tensors(model))
    assert loaded.left.weight is loaded.embed.weight and loaded.again is loaded.down
    assert isinstance(loaded.embed.weight, nn.Parameter) and not loaded.scant.requires_grad
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]


def test_what_the_folder_holds(tmp_path: Path) -> None:
    """Each tensor once, in files that safetensors reads, described whole."""
    model = torch.compile(kept(), backend="eager")
    qfx.save(model, tmp_path, shard_size=10_000)  # type: ignore[arg-type]
    said = json.loads((tmp_path / "qfx.json").read_text())
    assert {p.name for p in tmp_path.iterdir()} == {"qfx.json", LOCK, *said["files"]}
    read = {name: load_file(tmp_path / name) for name in said["files"]}
    assert all({*read[name]} == {*file["tensors"]} for name, file in said["files"].items())
    held = {name: tensor for file in read.values() for name, tensor in file.items()}
    everything = tensors(kept()) | {"left.weight": held["embed.weight"]}
    unpacked = {n: t for n, t in everything.items() if not n.endswith("packed")}
    assert {*held} | {*said["same"]} == {*unpacked} and not {*held} & {*said["same"]}
    assert all(torch.equal(held[name], unpacked[name]) for name in held)
    assert said["same"]["left.weight"] == "embed.weight" and said["derived"] == ["table"]
    assert said["same"]["down.codes" if "again.codes" in held else "again.codes"] in held
    sizes = [(sum(t.nbytes for t in file.values()), len(file)) for file in read.values()]
    assert len(sizes) > 3 and all(size <= 10_000 or count == 1 for size, count in sizes)


@BY_VARIED
def test_every_scheme_comes_back(row: str, tmp_path: Path) -> None:
    model = nn.Sequential(qfx.nn.Linear.from_float(nn.Linear(K, N), SCHEMES[row]))
    qfx.save(model, tmp_path)
    for skeleton in (nn.Sequential(nn.Linear(K, N)), nn.Sequential(nn.Linear(K, N)).to("meta")):
        assert same_bits(outputs(qfx.load(tmp_path, skeleton)), outputs(model))
        assert repr(skeleton) == repr(model)


class Signs(nn.Module):
    """A linear of one bit with a shift, of no whole bytes; one under two names; one left float."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 20), nn.Linear(20, FEATURES, bias=False)
        self.again, self.left = self.down, nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(self.again(self.up(self.down(self.up(x)))))


ONES = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(0))


def signs(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    config = Config(skip=("left",))
    model = qfx.prepare_binary(Signs().eval(), scale * ONES, config=config, shift=True)
    for module in (model.up, model.down):
        module.shift.data.normal_()  # type: ignore[union-attr, operator]
    return qfx.convert(model)


SIGNS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: Signs().eval(),
    "meta": lambda: Signs().to("meta").eval(),
    "bfloat16": lambda: Signs().bfloat16().eval(),
    "converted alike": lambda: signs(2.0),
}


@pytest.mark.parametrize("skeleton, shard_size", every(SIGNS, [2_000_000_000, 1]))
def test_linears_of_one_bit_come_back(skeleton: str, shard_size: int, tmp_path: Path) -> None:
    """From a folder, of an earlier build too, which did not say which they are, and from a file."""
    model = signs()
    expected, folder = outputs(model, ONES), tmp_path / "folder"
    qfx.save(model, folder, shard_size=shard_size)
    said = json.loads((folder / "qfx.json").read_text())
    assert said["linears"] == {name: "1 bit" for name in ("up", "down", "again")}
    assert not said["derived"] and said["same"]["again.signs"] == "down.signs"
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "state.safetensors")
    for path in (folder, tmp_path / "state.safetensors"):
        loaded = qfx.load(path, SIGNS[skeleton]())
        assert same_bits(outputs(loaded, ONES), expected) and repr(loaded) == repr(model)
        assert same(loaded.state_dict(), model.state_dict())
        assert loaded.again is loaded.down or path != folder
    (folder / "qfx.json").write_text(json.dumps({**said, "linears": {}}))
    assert same_bits(outputs(qfx.load(folder, SIGNS[skeleton]()), ONES), expected)


def test_the_layout_in_files_of_earlier_builds_is_left_there(tmp_path: Path) -> None:
    """They have the packed signs of one processor as a buffer, and say little of shared linears:
    a model that was converted alike takes them."""
    model, at = signs(), "up.packed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qfx.files.model_state.stored_weights", lambda model: iter(()))
        qfx.save(model, tmp_path)
    said = json.loads((tmp_path / "qfx.json").read_text())
    assert at in said["derived"] and not said["linears"]
    loaded = qfx.load(tmp_path, signs(2.0))
    assert same_bits(outputs(loaded, ONES), outputs(model, ONES))
    with pytest.raises(ValueError, match=r"model-\w{16}\.safetensors: again\.scale is missing"):
        qfx.load(tmp_path, Signs())


@given(st.data(), st.sampled_from([1, 48, 64, 130]), POSITIVE, st.booleans(), SEEDS)
def test_any_recipe_comes_back(
    tmp_path_factory: Any, data: st.DataObject, k: int, n: int, bias: bool, seed: int
) -> None:
    folder, generator = tmp_path_factory.mktemp("model"), torch.Generator().manual_seed(seed)
    linear, x = nn.Linear(k, n, bias), torch.randn(3, k, generator=generator)
    model = nn.Sequential(qfx.nn.Linear.from_float(linear, data.draw(recipes(n, k))))
    qfx.save(model, folder)
    loaded = qfx.load(folder, nn.Sequential(nn.Linear(k, n, bias, device="meta")))
    assert same_bits(outputs(loaded, x), outputs(model, x))


def test_a_recipe_travels_with_the_model(tmp_path: Path) -> None:
    """Its codes are those of the model, so they are not stored twice."""
    net = Net().eval()
    recipe, x = calibrated(net), batches()[0]
    model = qfx.quantize_(copy.deepcopy(net), Config(recipe=recipe, skip=("b",)))
    qfx.save(model, tmp_path, recipe=recipe)
    loaded = qfx.load(tmp_path, Net().to("meta").eval())
    assert same_bits(outputs(loaded, x), outputs(model, x))
    again = qfx.Recipe.load(tmp_path / "recipe.json")
    assert {s.name for s in again.sites if s.rounding} == {"b"} and again.names == recipe.names
    qfx.save(model, tmp_path)
    assert not (tmp_path / "recipe.json").exists()


def test_an_earlier_model_is_replaced_and_no_file_of_another(tmp_path: Path) -> None:
    qfx.save(kept(), tmp_path, shard_size=10_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    others = {tmp_path / "tokenizer.json"}
    for name in ("model", "model-00001-of-00002", "model-0123456789abcdef"):
        others.add(tmp_path / f"{name}.safetensors")
        save_file({"weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    before = {path: path.read_bytes() for path in others}
    qfx.save(kept(), tmp_path)
    (name,) = json.loads((tmp_path / "qfx.json").read_text())["files"]
    ours = {tmp_path / "qfx.json", tmp_path / LOCK, tmp_path / name}
    assert {*tmp_path.iterdir()} == ours | others
    assert {path: path.read_bytes() for path in others} == before


def test_a_private_folder_stays_private(tmp_path: Path) -> None:
    """Files by new names have the permissions of the description that they replace."""
    recipe = calibrated(Net().eval())
    qfx.save(kept(), tmp_path, recipe=recipe)
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    qfx.save(signs(), tmp_path, recipe=recipe)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 5 and {*modes.values()} == {0o600}, modes


OF_OTHERS = {
    "qfx.json": ("{}", "is no description of a model"),
    "recipe.json": ('{"flour": 500}', "recipe.json is no recipe of qfx"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_file_of_another_that_is_in_the_way_stays(name: str, tmp_path: Path) -> None:
    text, phrase = OF_OTHERS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=phrase):
        qfx.save(kept(), tmp_path, recipe=Recipe(()))
    assert {p.name for p in tmp_path.iterdir()} == {name, LOCK}
    assert (tmp_path / name).read_text() == text


def _with(change: Callable[[Any], Any]) -> nn.Module:
    model = kept()
    change(model)
    return model


class Stateful(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


UNSAVED: dict[str, Callable[[], Any]] = {
    r"no module of qfx in it.*qfx\.quantize_\(model\) first": lambda: Kept(),
    "a single linear": lambda: qfx.nn.Linear(4, 4),
    "extra._extra_state is of type dict": lambda: _with(
        lambda m: m.add_module("extra", Stateful(2, 2))
    ),
    "up.bias is on the meta device": lambda: _with(
        lambda m: setattr(m.up, "bias", nn.Parameter(torch.ones(128, device="meta")))
    ),
    r"places is torch\.sparse_coo": lambda: _with(
        lambda m: setattr(m, "places", torch.eye(3).to_sparse())
    ),
    r"places is torch\.float8_e8m0fnu": lambda: _with(
        lambda m: setattr(m, "places", torch.ones(3).to(torch.float8_e8m0fnu))
    ),
}  # fmt: skip


@pytest.mark.parametrize("phrase", UNSAVED)
def test_what_files_cannot_hold_is_refused(phrase: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"save: .*{phrase}"):
        qfx.save(UNSAVED[phrase](), tmp_path / "model")
    assert not (tmp_path / "model").exists()


class Bare(Kept):
    """With a tensor that nobody registers."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.empty(3, device=self.embed.weight.device)


def _skeleton(change: Callable[[Any], Any], device: str = "cpu") -> nn.Module:
    model = Kept().to(device)
    change(model)
    return model


def _bare() -> nn.Module:
    with torch.device("meta"):
        return Bare()


# Of a skeleton that is not that of the file: what is said of it.
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "it lacks none.*, which the skeleton has": lambda: _skeleton(
        lambda m: m.register_parameter("nonesuch", nn.Parameter(torch.ones(1)))
    ),
    "it has scant, which the skeleton lacks": lambda: _skeleton(lambda m: delattr(m, "scant")),
    r"places is torch\.int64 \[5\], and in the skeleton torch\.int64 \[4\]": lambda: _skeleton(
        lambda m: setattr(m, "places", torch.arange(4))
    ),
    r"places is torch\.int64 \[5\], and in the skeleton torch\.float32 \[5\]": lambda: _skeleton(
        lambda m: setattr(m, "places", torch.ones(5))
    ),
    r"up has codes \[128, 64\], and the linear of the skeleton a weight \[127, 64\]": lambda: (
        _skeleton(lambda m: setattr(m, "up", nn.Linear(64, 127)))
    ),
    "head is int8 in the skeleton already": kept,
    "up is an int8 linear, and the skeleton has a Stateful": lambda: _skeleton(
        lambda m: setattr(m, "up", Stateful(64, 128))
    ),
    "up is an int8 linear, and the skeleton has nothing": lambda: _skeleton(
        lambda m: delattr(m, "up")
    ),
    "load: 1 of 4 linears cannot be replaced.*weight_norm": lambda: _skeleton(
        lambda m: torch.nn.utils.weight_norm(m.up)
    ),
    "does not have the buffer more.*make the skeleton on the CPU": lambda: _skeleton(
        lambda m: m.register_buffer("more", torch.ones(1), persistent=False), "cpu"
    ).to("meta"),
    "the attribute 'plain' of the model is a tensor on the meta device": _bare,
}


@pytest.mark.parametrize("phrase", OTHERS)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_another_skeleton_is_refused_and_left_as_it_was(phrase: str, tmp_path: Path) -> None:
    qfx.save(kept(), tmp_path)
    skeleton = OTHERS[phrase]()
    before = {n: (id(m), {**vars(m)}.keys()) for n, m in skeleton.named_modules()}
    held = {n: id(t) for n, t in [*skeleton.named_parameters(), *skeleton.named_buffers()]}
    with pytest.raises(ValueError, match=f"(?s){phrase}"):
        qfx.load(tmp_path, skeleton)
    assert {n: (id(m), {**vars(m)}.keys()) for n, m in skeleton.named_modules()} == before
    now = {n: id(t) for n, t in [*skeleton.named_parameters(), *skeleton.named_buffers()]}
    assert now == held


def test_a_table_that_the_skeleton_makes_otherwise_stays_its_own(tmp_path: Path) -> None:
    """What is outside the state dict may have grown, or be gone."""
    qfx.save(kept(), tmp_path)
    skeleton = _skeleton(lambda m: m.register_buffer("table", torch.ones(1), persistent=False))
    assert torch.equal(qfx.load(tmp_path, skeleton).table, torch.ones(1))
    gone = _skeleton(lambda m: delattr(m, "table"))
    assert not hasattr(qfx.load(tmp_path, gone), "table")


def test_modules_that_train_come_back_and_check_their_own(tmp_path: Path) -> None:
    def prepared(bits: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        w = qfx.QSpec(bits=bits)
        return qfx.prepare_qat(model, x, config=Config(scheme=qfx.Scheme(w=w), skip=("1",)))

    x = torch.randn(3, 64)
    model = prepared(4)
    expected = model(x)
    qfx.save(model, tmp_path)
    assert torch.equal(qfx.load(tmp_path, prepared(4))(x), expected)
    other = prepared(5)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"qfx\.json: 0\.scheme says w\.bits=4 instead of 5"):
        qfx.load(tmp_path, other)
    assert all(torch.equal(other.state_dict()[n], before[n]) for n in before)


PEAK = """
import sys, torch, qfx, safetensors, qfx.files.loading
from torch import nn
def now(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))
with torch.device("meta"):
    skeleton = nn.Sequential(nn.Embedding(8192, 512), *(nn.Linear(2048, 2048) for _ in range(16)))
open("/proc/self/clear_refs", "w").write("5")
before = now("VmRSS")
qfx.load(sys.argv[1], skeleton)
print(now("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_little_more_than_the_file(tmp_path: Path) -> None:
    """A copy of all codes, or one float weight of 16 MB, would be seen."""
    linears = [nn.Linear(2048, 2048) for _ in range(16)]
    qfx.save(qfx.quantize_(nn.Sequential(nn.Embedding(8192, 512), *linears)), tmp_path)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (path,) = tmp_path.glob("model-*.safetensors")
    size = path.stat().st_size
    assert 0.9 * size < int(done.stdout) <= 1.15 * size
