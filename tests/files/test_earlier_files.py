"""Files of earlier builds and of others: a state dict of a quantized model loads, all else is
refused by name."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import qfx
from tests.conftest import same_bits
from tests.files.test_hostile_files import Small, X, data_of, skeleton
from tests.lib.rounded import Net, calibrated, run
from tests.nn.test_nn_linear import outputs


def earlier(
    change: Callable[[dict[str, Tensor]], Any] = lambda state: None,
) -> dict[str, Tensor]:
    """The state dict of a quantized model, as people have saved it."""
    state = {n: t.clone() for n, t in qfx.quantize_(Small()).state_dict().items()}
    change(state)
    return state


def test_a_state_dict_of_safetensors_loads(tmp_path: Path) -> None:
    """It has no buffers beside it, so the skeleton must have them."""
    path = tmp_path / "state.safetensors"
    save_file((earlier()), path)
    expected = outputs(qfx.quantize_(Small()), X)
    assert same_bits(outputs(qfx.load(path, Small()), X), expected)
    with pytest.raises(ValueError, match=r"state\.safetensors does not have the buffer shift"):
        qfx.load(path, skeleton())


def test_a_state_dict_without_the_names_that_ties_repeat_loads(tmp_path: Path) -> None:
    """As safetensors asks for, which takes no tensor under two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
            self.left, self.mid = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
            self.left.weight = self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.left(self.head(self.mid(self.embed(ids))))

    ids, model = torch.arange(5), qfx.quantize_(Tied(), qfx.Config(skip=("left",)))
    state = {n: t for n, t in model.state_dict().items() if n != "left.weight"}
    save_file(state, tmp_path / "state.safetensors")
    with torch.device("meta"):
        without_values = Tied()
    for made in (Tied(), without_values):
        with torch.no_grad():
            loaded = qfx.load(tmp_path / "state.safetensors", made)
            assert torch.equal(loaded(ids), model(ids))
        assert loaded.left.weight is loaded.embed.weight


def _write(data: bytes, name: str = "model.safetensors") -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        (path / name).write_bytes(data)
        return path / name

    return write


def _torch_save(path: Path) -> Path:
    torch.save(earlier(), path / "model.pt")
    return path / "model.pt"


def _recipe(pattern: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        calibrated(Net().eval()).save(path / "recipe.json")
        (found,) = path.glob(pattern)
        return found

    return write


def _shard(path: Path) -> Path:
    qfx.save(qfx.quantize_(Small()), path)
    return data_of(path)


OTHERS: dict[str, Callable[[Path], Path]] = {
    r"is a file of torch\.save, which qfx\.load does not read: quantize_ the model": _torch_save,
    "is a recipe, and no model: qfx.Recipe.load reads it": _recipe("recipe.json"),
    "holds the codes of a recipe: qfx.Recipe.load reads it": _recipe("recipe-*.safetensors"),
    "is one file of a saved folder": _shard,
    "is GGUF of version 0, and 2 and 3 are read": _write(b"GGUF" + bytes(100)),
    "is no model that qfx.save wrote": _write(b'{"a": 1}', "config.json"),
    "is no whole file of tensors: .*header too small": _write(b""),
    "header too large": _write(b"\xff" * 100),
    "'a.scheme' is not there.*an earlier qfx did not save it": _write(
        save(earlier(lambda s: s.pop("a.scheme")))
    ),
    "a.scale is missing": _write(save(earlier(lambda s: s.pop("a.scale")))),
    r"it lacks a\.weight, b\.weight": _write(
        save({"on": torch.ones(3) > 0, "a.bias": torch.ones(6)})
    ),
    "a.codes is torch.int16": _write(
        save(earlier(lambda s: s.update({"a.codes": s["a.codes"].short()})))
    ),
}  # fmt: skip


@pytest.mark.parametrize("phrase", OTHERS)
def test_other_files_are_refused_by_name(phrase: str, tmp_path: Path) -> None:
    path = OTHERS[phrase](tmp_path)
    model = Small()
    with pytest.raises(ValueError, match=phrase) as found:
        qfx.load(path, model)
    assert str(path) in str(found.value) and not any(
        isinstance(m, qfx.nn.Linear) for m in model.modules()
    )


def test_what_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        qfx.load(tmp_path / "nowhere", Small())


EARLIER = Path(__file__).parent / "earlier"  # what qfx 0.2 saved: under fixed names


@pytest.mark.parametrize("name", ["whole", "shards"])
def test_folders_of_fixed_names_load_and_are_replaced(name: str, tmp_path: Path) -> None:
    shutil.copytree(EARLIER / name, tmp_path, dirs_exist_ok=True)
    read: dict[str, Tensor] = {}
    for path in tmp_path.glob("model*.safetensors"):
        read |= load_file(path)
    model = qfx.load(tmp_path, Net().to("meta").eval())
    state = {n: t for n, t in model.state_dict().items() if n in read}
    assert state.keys() == read.keys() and all(same_bits(state[n], read[n]) for n in read)
    recipe = qfx.Recipe.load(tmp_path / "recipe.json") if name == "whole" else None
    assert recipe is None or {s.name for s in recipe.sites if s.rounding} == {"b"}
    qfx.save(model, tmp_path, recipe=recipe)
    assert not [p for p in tmp_path.iterdir() if not re.search(r"json|lock|-\w{16}\.s", p.name)]
    again = qfx.load(tmp_path, Net().to("meta").eval()).state_dict()
    assert all(same_bits(again[n], read[n]) for n in read)
    assert recipe is None or qfx.Recipe.load(tmp_path / "recipe.json") == recipe


def test_recipes_of_fixed_names_load_and_are_replaced(tmp_path: Path) -> None:
    for name in ("recipe.json", "recipe.safetensors"):
        shutil.copy(EARLIER / "whole" / name, tmp_path)
    recipe = qfx.Recipe.load(tmp_path / "recipe.json")
    recipe.save(tmp_path / "recipe.json")
    assert not (tmp_path / "recipe.safetensors").exists()
    assert qfx.Recipe.load(tmp_path / "recipe.json") == recipe


def test_blocks_of_earlier_builds_stay() -> None:
    """64 divides neither K of these two linears, so the build that saved them rotated K = 240 in
    blocks of 16 and K = 40 not at all. The model, codes and static scales of a recipe, and what
    they returned then."""
    folder = EARLIER / "blocks"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(240, 40), nn.ReLU(), nn.Linear(40, 8)).eval()
    values = load_file(folder / "values.safetensors")
    x = values.pop("x")
    model = qfx.load(folder, copy.deepcopy(net).to("meta"))
    assert [str(model[i].scheme) for i in (0, 2)] == ["xa8r_ws8r_h16", "xa8r_ws8r"]
    assert same_bits(model(x).detach(), values["model"])
    for name in ("recipe", "static"):
        recipe = qfx.Recipe.load(folder / f"{name}.json")
        assert [site.scheme and site.scheme.rotation for site in recipe.sites] == [16, 0]
        assert same_bits(run(copy.deepcopy(net), recipe, x), values[name])
        assert "rest_rotated" not in (folder / f"{name}.json").read_text()


def test_a_recipe_says_that_the_rest_is_rotated(tmp_path: Path) -> None:
    """Where the rotation does not divide K; builds that would rotate otherwise refuse it then."""
    scheme = qfx.Config().chosen
    sites = [qfx.SiteRecipe(str(k), 0, 8, k, scheme) for k in (128, 240, 40)]
    recipe = qfx.Recipe(tuple(sites))
    text = recipe.to_json()
    assert text.count('"rest_rotated": true') == 2
    assert qfx.Recipe.from_json(text) == recipe
    without = qfx.Recipe.from_json(text.replace(', "rest_rotated": true', ""))
    assert [str(site.scheme) for site in without.sites] == [
        "xa8r_ws8r_h64", "xa8r_ws8r_h16", "xa8r_ws8r",
    ]  # fmt: skip
