"""Run by test_kill_points.py, with faults: each scenario replaces what is in a folder, and is ended
at every system call that changes a file. Prints how many there were."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import qfx
from qfx.io.atomic_write import write_text
from qfx.io.folder_lock import LOCK
from tests.lib.faults import Kind, ended
from tests.lib.rounded import Net

EARLIER = Path(__file__).parent / "earlier"
EVERY = os.environ.get("QFX_TEST_PROFILE") == "long"  # else one in six of the errors
Action = Callable[[Path], object]


class Scenario(NamedTuple):
    """`begin` makes the folder, `save` replaces what it holds, `state` says what it holds."""

    begin: Action
    save: Action
    state: Action


def skeleton() -> nn.Module:
    return Net().to("meta").eval()


OLD = qfx.load(EARLIER / "whole", skeleton())
OLD_RECIPE = qfx.Recipe.load(EARLIER / "whole" / "recipe.json")


def _new() -> nn.Module:
    net = Net().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.neg_()
    return qfx.quantize_(net, qfx.Config(skip=("b",)))


def _other_recipe() -> qfx.Recipe:
    (site,) = (s for s in OLD_RECIPE.sites if s.rounding)
    rest = tuple(s for s in OLD_RECIPE.sites if s is not site)
    rounding = replace(site.rounding, codes=-site.rounding.codes)  # type: ignore[type-var, union-attr]
    return qfx.Recipe((replace(site, rounding=rounding), *rest))


NEW, NEW_RECIPE = _new(), _other_recipe()


def state(folder: Path) -> object:
    return model_state(folder), recipe_state(folder)


def model_state(folder: Path) -> str:
    if not (folder / "qfx.json").exists():
        return "none"
    digest = hashlib.sha256()
    for name, tensor in qfx.load(folder, skeleton()).state_dict().items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def recipe_state(folder: Path) -> str:
    try:
        recipe = qfx.Recipe.load(folder / "recipe.json")
    except FileNotFoundError:
        return "none"
    codes = [s.rounding.json_entry["codes"] for s in recipe.sites if s.rounding]
    return f"{codes}"


def _saved(folder: Path) -> None:
    qfx.save(OLD, folder, recipe=OLD_RECIPE, shard_size=5000)


def _earlier(folder: Path) -> None:
    shutil.copytree(EARLIER / "whole", folder)


def _recipe(folder: Path) -> None:
    folder.mkdir(parents=True)
    OLD_RECIPE.save(folder / "recipe.json")


def _text(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_text(folder / "page.html", "old" * 1000)


def _with_recipe(folder: Path) -> None:
    qfx.save(NEW, folder, recipe=NEW_RECIPE)


SCENARIOS = {
    "a first save": Scenario(lambda folder: None, _with_recipe, state),
    "other shards and recipe": Scenario(_saved, _with_recipe, state),
    "a folder of qfx 0.2": Scenario(_earlier, _with_recipe, state),
    "a model without a recipe": Scenario(_saved, lambda f: qfx.save(NEW, f), state),
    "the same once more": Scenario(_saved, _saved, state),
    "a recipe": Scenario(_recipe, lambda f: NEW_RECIPE.save(f / "recipe.json"), recipe_state),
    "a recipe of qfx 0.2": Scenario(
        _earlier, lambda f: NEW_RECIPE.save(f / "recipe.json"), recipe_state
    ),
    "one file": Scenario(
        _text, lambda f: write_text(f / "page.html", "new" * 1000),
        lambda f: (f / "page.html").read_text(),
    ),
}  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    found = folder.iterdir() if folder.exists() else ()
    return {path.name: path.read_bytes() for path in found if path.name != LOCK}


def check(scenario: Scenario, folder: Path, name: str) -> str:
    """Fails at each call of a scenario, by each kind of fault, and saves once more after each."""
    begin = folder / "begin"
    scenario.begin(begin)
    old, old_files = scenario.state(begin), files(begin)
    clean = _copy(begin, folder / "clean")
    total = ended(lambda: scenario.save(clean), Kind.COUNT).calls
    new, new_files = scenario.state(clean), files(clean)
    seen: Counter[str] = Counter()
    clean = _copy(begin, clean)
    kill = ended(lambda: scenario.save(clean), Kind.KILL, 1 << 30).calls
    for kind, last in ((Kind.KILL, kill), (Kind.ERROR, total), (Kind.FULL, total)):
        step = 1 if EVERY or kind is Kind.KILL else 6
        for at in range(1, last + 1, step):
            where = f"{name}, {kind.name} at {at} of {last}"
            place = _copy(begin, folder / "place")
            end = ended(lambda place=place: scenario.save(place), kind, at)  # type: ignore[misc]
            found = scenario.state(place)
            assert found in (old, new), where
            seen[f"{kind.name} {'new' if found == new else 'old'}"] += 1
            assert end.killed == (kind is Kind.KILL), (where, end)
            if kind is not Kind.KILL:
                assert str(place) in end.error if end.error else found == new, (where, end)
            if kind is Kind.FULL or (kind is Kind.ERROR and end.error):
                names = set(files(place))
                assert names in ({*old_files}, {*new_files}), (where, names)
            if EVERY or at % 4 == 1:
                scenario.save(place)
                assert scenario.state(place) == new and files(place) == new_files, where
    return f"{name}: {dict(seen)}"


def _copy(begin: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    if begin.exists():
        shutil.copytree(begin, to)
    return to


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each, scenario in SCENARIOS.items():
        print(check(scenario, Path(sys.argv[1]) / each.replace(" ", "_"), each))
