"""The codes of a recipe: what they are, and the file beside it that has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qfx
from qfx import PER_COLUMN, QSpec, Recipe, Rounding, Scheme
from qfx.io.folder_lock import LOCK
from tests.conftest import same_bits
from tests.lib.rounded import Net, batches, calibrated, nearest, run


@pytest.fixture(scope="module")
def net() -> Net:
    return Net().eval()


@pytest.fixture(scope="module")
def recipe(net: Net) -> Recipe:
    return calibrated(net)


def test_a_recipe_and_its_codes_come_back(tmp_path: Path, net: Net, recipe: Recipe) -> None:
    path = tmp_path / "recipe.json"
    recipe.save(path)
    codes = codes_of_file(tmp_path)
    assert {*tmp_path.iterdir()} == {path, codes, tmp_path / LOCK}
    again, x = Recipe.load(path), batches()[0]
    assert again == recipe and hash(again) == hash(recipe)
    assert same_bits(run(net, path, x), run(net, recipe, x))  # type: ignore[arg-type]
    recipe.save(path)  # over its own files
    recipe.save(tmp_path / "other.v2")
    assert Recipe.load(tmp_path / "other.v2") == recipe
    assert (tmp_path / codes.name.replace("recipe", "other.v2")).exists()


def codes_of_file(folder: Path) -> Path:
    (path,) = folder.glob("recipe-*.safetensors")
    return path


def _truncated(folder: Path, recipe: Recipe) -> None:
    path = codes_of_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _of_a_model(folder: Path, recipe: Recipe) -> None:
    save_file({"a[0]": torch.ones(2)}, codes_of_file(folder))


def _other_codes(folder: Path, recipe: Recipe) -> None:
    first, *rest = recipe.sites
    assert first.rounding
    other = replace(first.rounding, codes=-first.rounding.codes)
    _exchanged(folder, Recipe((replace(first, rounding=other), *rest)))


def _fewer_codes(folder: Path, recipe: Recipe) -> None:
    _exchanged(folder, Recipe(recipe.sites[1:]))


def _exchanged(folder: Path, other: Recipe) -> None:
    other.save(folder / "other.json")
    (codes,) = folder.glob("other-*.safetensors")
    codes.replace(codes_of_file(folder))


def _edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Recipe], Any]:
    def edit(folder: Path, recipe: Recipe) -> None:
        raw = json.loads((folder / "recipe.json").read_text())
        change(raw)
        (folder / "recipe.json").write_text(json.dumps(raw))

    return edit


DAMAGES: dict[str, Callable[[Path, Recipe], Any]] = {
    r"recipe-\w{16}\.safetensors, which is not there": lambda f, r: codes_of_file(f).unlink(),
    r"recipe-\w{16}\.safetensors is no whole file of a recipe's codes": _truncated,
    r"recipe-\w{16}\.safetensors is no file of a recipe's codes": _of_a_model,
    "is no name of a file of codes beside it": _edited(
        lambda raw: raw.update(codes=f"../{raw['codes']}")
    ),
    "recipe of a: the file of codes beside the recipe belongs to another recipe": _other_codes,
    "recipe of a: the file of codes beside the recipe has none for it": _fewer_codes,
    "recipe of a: rounded by 'best'; there is gptq": _edited(
        lambda raw: raw["sites"][0]["rounding"].update(method="best")
    ),
}


@pytest.mark.parametrize("phrase", DAMAGES)
def test_other_files_are_refused(phrase: str, tmp_path: Path, recipe: Recipe) -> None:
    recipe.save(tmp_path / "recipe.json")
    DAMAGES[phrase](tmp_path, recipe)
    with pytest.raises(ValueError, match=phrase):
        Recipe.load(tmp_path / "recipe.json")


def test_a_model_beside_the_recipe_is_not_written_over(tmp_path: Path, recipe: Recipe) -> None:
    """By the name that codes had in qfx 0.2, or by one that they could have now."""
    paths = [tmp_path / f"recipe{end}.safetensors" for end in ("", "-0123456789abcdef")]
    for path in paths:
        save_file({"a[0]": torch.ones(2)}, path)
    before = [path.read_bytes() for path in paths]
    recipe.save(tmp_path / "recipe.json")
    nearest(recipe).save(tmp_path / "recipe.json")
    assert [path.read_bytes() for path in paths] == before
    assert {*tmp_path.iterdir()} == {*paths, tmp_path / "recipe.json", tmp_path / LOCK}


def test_json_alone_has_no_codes(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"codes in a second file, .*: use Recipe\.load"):
        Recipe.from_json(recipe.to_json())


def test_only_codes_need_safetensors(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "recipe.json", nearest(recipe)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    plain.save(path)
    assert Recipe.load(path) == plain
    with pytest.raises(ImportError, match=r"pip install \"qfx\[rounding\]\""):
        recipe.save(path)
    assert Recipe.load(path) == plain
    asked = "import sys, qfx; sys.exit('safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked]).returncode == 0


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "it cannot have codes": {"scheme": None},
    "leave rounding=None": {"scheme": Scheme(w=QSpec(axes=PER_COLUMN))},
    r"its codes have shape \[1, 2\], and N=1 K=3 needs": {"k": 3},
    "codes go from -8 to 7, and xs8r_ws4r has codes between -7 and 7": {
        "scheme": Scheme(w=QSpec(bits=4))
    },
    "codes go from -8 to 7, and xs8r_wa3r has codes between -4 and 3": {
        "scheme": Scheme(w=QSpec(bits=3, symmetric=False))
    },
}


@pytest.mark.parametrize("phrase", IMPOSSIBLE)
def test_codes_that_do_not_fit(phrase: str) -> None:
    rounding = Rounding("a", "gptq", "", torch.tensor([[-8, 7]], dtype=torch.int8))
    good: dict[str, Any] = {"name": "a", "call": 0, "n": 1, "k": 2, "scheme": Scheme()}
    qfx.SiteRecipe(**good, rounding=rounding)
    with pytest.raises(ValueError, match=f"recipe of a: .*{phrase}"):
        qfx.SiteRecipe(**{**good, **IMPOSSIBLE[phrase]}, rounding=rounding)


@pytest.mark.parametrize("codes", [torch.ones(2, 2), torch.ones(2, dtype=torch.int8)], ids=str)
def test_codes_are_a_matrix_of_int8(codes: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected int8 \[N, K\] or \[E, N, K\] on the CPU"):
        Rounding("a", "gptq", "", codes)
