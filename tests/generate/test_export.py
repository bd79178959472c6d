"""The programs of a model as a file, and the decoder that runs them."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qfx
from qfx.files.tensor_file import table_of, tensors_together, write_tensors
from qfx.generate import load_programs, save_programs
from qfx.generate.decoder import KEY
from qfx.programs.emit import EMIT
from tests.lib.decoders import decoder, ids

LENGTH, NEW = 208, 6


@pytest.fixture(scope="module")
def model() -> Any:
    return qfx.compile_for_generate(decoder("gemma3"), "w4a8", max_length=LENGTH, value_bits=4)


@pytest.fixture(scope="module")
def path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("programs") / "two.safetensors"
    save_programs(model, found, batch_size=2)
    return found


def said(model: Any, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    text: torch.Tensor = model.generate(
        tokens, attention_mask=seen, max_new_tokens=NEW, do_sample=False
    )
    return text[:, tokens.shape[1] :]


@pytest.mark.parametrize("length", [1, 9, 150])
def test_it_says_what_the_model_does(length: int, model: Any, path: Path) -> None:
    tokens = ids(2, length)
    decoder = load_programs(path)
    assert torch.equal(decoder.generate(tokens, NEW), said(model, tokens, torch.ones_like(tokens)))
    decoder.reset()
    assert torch.equal(decoder.generate(tokens, NEW), said(model, tokens, torch.ones_like(tokens)))


def test_padding(model: Any, path: Path) -> None:
    tokens, seen = ids(2, 21), torch.ones(2, 21, dtype=torch.int64)
    seen[1, :7] = 0
    decoder, logits = load_programs(path), []
    logits.append(decoder.read(tokens, seen))
    for _ in range(NEW - 1):
        logits.append(decoder.read(logits[-1].argmax(-1)[:, None]))
    found = torch.stack([each.argmax(-1) for each in logits], 1)
    assert torch.equal(found, said(model, tokens, seen))


def test_an_end(path: Path) -> None:
    tokens = ids(2, 9)
    whole = load_programs(path).generate(tokens, NEW)
    eos = int(whole[0, 1])
    text = load_programs(path).generate(tokens, NEW, eos=eos)
    for row, full in zip(text, whole, strict=True):
        end = next((i for i, token in enumerate(full.tolist()) if token == eos), NEW)
        shown = full[: text.shape[1]].clone()
        shown[end:] = eos
        assert torch.equal(row, shown)


def test_no_more_than_there_is_room_for(path: Path) -> None:
    decoder = load_programs(path)
    decoder.read(ids(2, LENGTH - 3))
    decoder.read(ids(2, 3))
    with pytest.raises(ValueError, match=f"1 tokens after {LENGTH} do not fit into"):
        decoder.read(ids(2, 1))


def test_what_it_does_not_read(path: Path) -> None:
    decoder = load_programs(path)
    for tokens in (ids(1, 4), ids(2, 4)[0], ids(2, 4)[:, :0]):
        with pytest.raises(ValueError, match=r"expected \[2, T\], T at least 1"):
            decoder.read(tokens)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\), expected \(2, 4\)"):
        decoder.read(ids(2, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="new=0"):
        decoder.generate(ids(2, 4), 0)
    assert decoder.seen == 0


def test_transformers_is_not_needed(path: Path) -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch; from qfx.generate import load_programs\n"
        f"d = load_programs({str(path)!r}); print(d.generate(torch.full((2, 5), 7), 4).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "[2, 4]" in done.stdout, done.stderr


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    model = qfx.compile_for_generate(decoder("mixtral"), max_length=64)
    save_programs(model, tmp_path / "mixture", batch_size=2)
    tokens = ids(2, 9)
    text = load_programs(tmp_path / "mixture").generate(tokens, NEW)
    assert torch.equal(text, said(model, tokens, torch.ones_like(tokens)))


def test_models_that_have_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="compile_for_generate"):
        save_programs(decoder("llama"), tmp_path / "none")
    monkeypatch.delitem(EMIT, torch.ops.aten.topk.default)
    experts = qfx.compile_for_generate(decoder("mixtral"), max_length=32)
    with pytest.raises(ValueError, match=r"PyTorch runs aten.topk"):
        save_programs(experts, tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def _shorter(told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    name = told["programs"]["1"]["words"]
    tensors[name] = tensors[name][:-3]


def _elsewhere(told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    words = tensors[told["programs"]["1"]["words"]]
    words[3] = 2**40


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "another format": lambda told, _: told.update(format=1),
    "no programs": lambda told, _: told.pop("programs"),
    "a number": lambda told, _: told.update(length="long"),
    "no length": lambda told, _: told.update(length=0),
    "no texts": lambda told, _: told.update(batch=-1),
    "no such weight": lambda told, _: told["programs"]["1"]["constants"].__setitem__(0, "none"),
    "a weight of another size": lambda told, t: t.update(
        {told["programs"]["1"]["constants"][0]: torch.zeros(3, dtype=torch.uint8)}
    ),
    "a type": lambda told, _: told["programs"]["1"]["inputs"][0].__setitem__(0, "nn"),
    "a result that is too long": lambda told, _: told["programs"]["1"]["results"][0][2].append(99),
    "words that end too early": _shorter,
    "words that lead elsewhere": _elsewhere,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(damage: str, path: Path, tmp_path: Path) -> None:
    table = table_of(path)
    told = json.loads(table.metadata[KEY])
    tensors = tensors_together(table)
    DAMAGE[damage](told, tensors)
    with (tmp_path / "damaged").open("wb") as file:
        write_tensors(file, tensors, {KEY: json.dumps(told)})
    with pytest.raises(ValueError, match="program"):
        load_programs(tmp_path / "damaged")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as file:
        write_tensors(file, {"a": torch.zeros(3)}, {})
    with pytest.raises(ValueError, match="holds no programs"):
        load_programs(tmp_path / "other")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_a_copy_goes_on_from_what_was_read(again: Callable[[Any], Any], path: Path) -> None:
    decoder = load_programs(path)
    decoder.read(ids(2, 20))
    copied = again(decoder)
    step = decoder.read(ids(2, 1, 5))
    decoder.read(ids(2, 3, 6))  # which the copy has not read
    assert copied.seen == 20 and torch.equal(copied.read(ids(2, 1, 5)), step)
    copied.reset()
    assert copied.seen == 0 and decoder.seen == 24
