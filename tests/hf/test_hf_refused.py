"""qfx.hf: no linear of a model of transformers gets random weights without an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import qfx
from qfx import Config
from qfx.hf import QfxConfig
from tests.hf.test_hf import int8, llama, saved
from tests.lib.fresh_process import run_python


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _said(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return damage


UP = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    f"no file of the model has {UP}.codes": _tensors(lambda s: s.pop(f"{UP}.codes")),
    f"no file of the model has {UP}.scheme": _tensors(lambda s: s.pop(f"{UP}.scheme")),
    f"{UP}.scale holds 0.0 at": _tensors(lambda s: s[f"{UP}.scale"].zero_()),
    f"{UP}.codes holds -?[0-9]+, which is outside -64..63": _tensors(
        lambda s: s[f"{UP}.scheme"].__setitem__(7, 7)
    ),
    "ignore_mismatched_sizes|above report": _tensors(
        lambda s: s.update({f"{UP}.scale": torch.ones(7)})
    ),
    f"{UP}.factor is missing": _said(lambda q: q["linears"][UP].__setitem__(14, 0)),
    f"{UP}.scheme has format 2": _said(lambda q: q["linears"].update({UP: [2, 1]})),
    "`linears` that are not lists of numbers": _said(lambda q: q["linears"].update({UP: "xs8r"})),
    "does not say which linears are int8": _said(lambda q: q.pop("linears")),
    "of format 7, and this qfx reads qfx of format 1": _said(lambda q: q.update(format=7)),
    r"none of the 1 int8 linears of config.json \(elsewhere": _said(
        lambda q: q.update(linears={"elsewhere": [1, 1, 8]})
    ),
    "model.norm is an int8 linear, and it is a LlamaRMSNorm": _said(
        lambda q: q["linears"].update({"model.norm": [1, 1, 8]})
    ),
}  # fmt: skip


@pytest.mark.parametrize("phrase", DAMAGES)
def test_a_damaged_folder_is_refused(phrase: str, tmp_path: Path) -> None:
    saved(tmp_path)
    DAMAGES[phrase](tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=phrase):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_linear_that_config_json_leaves_out_is_not_filled_at_random(tmp_path: Path) -> None:
    saved(tmp_path)
    _said(lambda q: q["linears"].pop(UP))(tmp_path)
    with pytest.raises(RuntimeError, match="above report"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


ASKS = """
import sys
import transformers
{first}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.lm_head).__module__)
"""


def _asked(first: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_python(ASKS.format(first=first), str(folder))


def test_without_qfx_hf_loading_is_an_error_and_not_random_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    without, imported = _asked("", tmp_path), _asked("import qfx.hf", tmp_path)
    assert without.returncode and "Unknown quantization type, got qfx" in without.stderr
    assert "RuntimeError" in without.stderr and "lm_head.weight" in without.stderr
    assert imported.stdout == "qfx.nn.linear\n", imported.stderr


def test_qfx_does_not_import_transformers() -> None:
    code = "import sys, torch, qfx; qfx.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4))); "
    code += "print([m for m in ('transformers', 'qfx.hf', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    code = "import sys; sys.modules['transformers'] = None; import qfx.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'qfx.hf needs transformers 5 or later: pip install "qfx[hf]" brings it' in done.stderr


def test_with_an_earlier_transformers_saving_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qfx.hf.attach", None)
    with pytest.warns(UserWarning, match=r"random weights\. qfx\.save keeps the model"):
        qfx.quantize_(llama(), Config(smoothing=False))


REFUSED: dict[str, dict[str, Any]] = {
    "unknown scheme 'w3'": {"scheme": "w3"},
    "an invalid scheme": {"scheme": {"x": 1}},
    "skip 'nonesuch'|nonesuch": {"skip": ["nonesuch"]},
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_wrong_options_are_refused(phrase: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=phrase):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=QfxConfig(**REFUSED[phrase])
        )


def test_several_devices_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names several devices"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=QfxConfig(),
            device_map={"model": "cpu", "lm_head": "disk"},
            offload_folder=tmp_path,
        )
    one = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QfxConfig(), device_map="cpu"
    )
    assert len(int8(one)) == 15


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.json")
    return "pipe.json"


def _large(folder: Path) -> str:
    with (folder / "large.json").open("wb") as file:
        file.truncate(2**28 + 1)
    return "large.json"


def _link(folder: Path) -> str:
    (folder / "link.json").symlink_to("/dev/zero")
    return "link.json"


# What config.json names as a recipe: why it is not read.
RECIPES: dict[str, Callable[[Path], str]] = {
    "names '/dev/zero', which is no file inside of its folder": lambda f: "/dev/zero",
    "names '../recipe.json', which is no file inside of its folder": lambda f: "../recipe.json",
    "names 'link.json', a link that leads out of it": _link,
    "pipe.json is a pipe, expected a regular file": _pipe,
    "large.json has 268435457 bytes, and at most 268435456 are read": _large,
}


@pytest.mark.parametrize("phrase", RECIPES)
def test_a_recipe_that_config_json_names_lies_in_the_folder(phrase: str, tmp_path: Path) -> None:
    saved(tmp_path)
    name = RECIPES[phrase](tmp_path)
    _said(lambda q: q.update(recipe=name))(tmp_path)
    with pytest.raises(ValueError, match=phrase):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_recipe_in_the_folder_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    recipe = qfx.Recipe((qfx.SiteRecipe(UP, 0, 4, 2, None),))
    recipe.save(tmp_path / "recipe.json")
    _said(lambda q: q.update(recipe="recipe.json"))(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.hf_quantizer.quantization_config.config.recipe == recipe
    with pytest.raises(ValueError, match="/dev/zero is a device, expected a regular file"):
        QfxConfig(recipe="/dev/zero")


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    """What a save_pretrained that was cut off leaves: some files are those of an earlier model."""
    for name in ("a", "b"):
        qfx.quantize_(llama(tied=False)).save_pretrained(tmp_path / name, max_shard_size="40KB")
    shards = sorted(path.name for path in (tmp_path / "a").glob("model-*.safetensors"))
    assert len(shards) > 2
    shutil.copy(tmp_path / "a" / shards[1], tmp_path / "b")
    with pytest.raises(ValueError, match=f"{shards[1]} is of save .*did not end"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a")
