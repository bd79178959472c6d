"""Files of graphs of fixed shapes: the bits of the program, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from qfx.files.tensor_file import write_tensors
from qfx.generate import load_program, load_programs, save_program
from qfx.generate.decoder import KEY
from qfx.programs import build
from tests.generate.program_files import read
from tests.lib.encoders import encoder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("programs") / "encoder"
    save_program(encoder()[0], found)
    return found


def test_a_program_read_again_has_its_bits(path: Path) -> None:
    runner, tokens = encoder()
    for each in (tokens, tokens.flip(1)):
        assert all(map(torch.equal, load_program(path)(each), runner(each)))


def words_again(graph: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors[graph["words"]] = tensors[graph["words"]].repeat(100_000)


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "memory": (lambda g, _: g["bytes"].__setitem__(0, 2**39), "bytes of working memory"),
    "an input": (lambda g, _: g["inputs"][0].__setitem__(1, [2, -1]), "-1 bytes of memory"),
    "a large input": (lambda g, _: g["inputs"][0][1].append(2**38), "expected an integer from 0"),
    "a result": (lambda g, _: g["results"][0].__setitem__(4, 2**40), "exceeds its"),
    "no words": (lambda g, _: g.pop("words"), "words"),
    "work": (words_again, "operations, and .* explain at most"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_refused(name: str, path: Path, tmp_path: Path) -> None:
    text, tensors = read(path)
    told = json.loads(text)
    CHANGES[name][0](told["graph"], tensors)
    with (tmp_path / "changed").open("wb") as file:
        write_tensors(file, tensors, {KEY: json.dumps(told)})
    with pytest.raises(ValueError, match=CHANGES[name][1]):
        load_program(tmp_path / "changed")


def test_files_of_the_other_kind_and_memory(path: Path) -> None:
    with pytest.raises(ValueError, match="of fixed shapes: load_program reads it"):
        load_programs(path)
    with pytest.raises(ValueError, match="for the inputs and results, and max_memory is 1"):
        load_program(path, max_memory=1)


def test_what_pytorch_runs_is_not_saved(tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x: x.cumsum(0))
    with pytest.raises(ValueError, match=r"PyTorch runs .*cumsum"):
        save_program(build(_in_aten(gm), [torch.ones(3)]), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def _in_aten(gm: fx.GraphModule) -> fx.GraphModule:
    return torch.export.export(gm, (torch.ones(3),)).module()  # type: ignore[return-value]
