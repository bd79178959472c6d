"""The C++ examples, built against an installed qfx, print and write what Python computes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import qfx
from qfx.generate import load_programs, save_program, save_programs
from tests.kernels.emulation import missing_to_build
from tests.lib.builds import BUILD, one_process, programs_prefix
from tests.lib.decoders import decoder, ids
from tests.lib.encoders import bert, encoder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cpp"


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(folder: Path, target: str, *paths: str) -> Path:
    """The folder of the built examples, which find qfx in the first path."""
    if missing := missing_to_build():
        pytest.skip(missing)
    with one_process(folder):
        prefix = f"-DCMAKE_PREFIX_PATH={';'.join(paths)}"
        run("cmake", "-S", EXAMPLES, "-B", folder, "-G", "Ninja", prefix)
        run("cmake", "--build", folder, "--target", target)
    return folder


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where qfx was moved to after it was installed."""
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    shutil.copytree(programs_prefix(), moved)
    return built(BUILD / "cpp-examples", "all", str(moved))


@pytest.mark.parametrize("threads", [1, 2])
def test_generate(
    examples: Path, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFX_NUM_THREADS", str(threads))
    model = qfx.compile_for_generate(decoder("llama"), max_length=64)
    save_programs(model, tmp_path / "model")
    tokens = ids(1, 5)
    expected = load_programs(tmp_path / "model").generate(tokens, 12)[0].tolist()
    found = run(examples / "generate", tmp_path / "model", 12, *tokens[0].tolist())
    assert [int(word) for word in found.split()] == expected
    done = subprocess.run(
        [examples / "generate", tmp_path / "model", "1", "96"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "token 96 is none of the 96" in done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_bert(
    examples: Path, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention, of transformers' own code."""
    monkeypatch.setenv("QFX_NUM_THREADS", str(threads))
    runner, tokens = bert()
    assert runner.outside == []
    save_program(runner, tmp_path / "encoder")
    (tmp_path / "input").write_bytes(tokens.numpy().tobytes())
    run(examples / "encode", tmp_path / "encoder", tmp_path / "input", tmp_path / "result")
    expected = b"".join(result.numpy().tobytes() for result in runner(tokens))
    assert (tmp_path / "result").read_bytes() == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_encode(
    examples: Path, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFX_NUM_THREADS", str(threads))
    runner, tokens = encoder()
    save_program(runner, tmp_path / "encoder")
    (tmp_path / "input").write_bytes(tokens.numpy().tobytes())
    told = run(examples / "encode", tmp_path / "encoder", tmp_path / "input", tmp_path / "result")
    assert told == "input: int64 2 64\nresult: float32 2 64\nresult: float32 2 64 128\n"
    expected = b"".join(result.numpy().tobytes() for result in runner(tokens))
    assert (tmp_path / "result").read_bytes() == expected


def test_package(tmp_path: Path) -> None:
    try:
        prefix = qfx.cmake_prefix_path()
    except FileNotFoundError as why:
        pytest.skip(str(why))
    if not (Path(prefix) / "lib" / "libqfx.so").exists():
        pytest.skip(f"no operators for C++ in {prefix}")
    example = built(BUILD / "cpp-package", "package", prefix, torch.utils.cmake_prefix_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU()).eval()
    x = torch.randn(8, 256)
    with torch.no_grad():
        gm, _ = qfx.rewrite(torch.export.export(model, (x,)), qfx.Config(minimum_gain=0))
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(gm, (x,)), package_path=str(tmp_path / "model.pt2")
        )
        expected = gm(x)
        assert not expected.equal(model(x))
    (tmp_path / "input").write_bytes(x.numpy().tobytes())
    run(example / "package", package, 8, 256, tmp_path / "input", tmp_path / "result")
    assert (tmp_path / "result").read_bytes() == expected.numpy().tobytes()
