"""The C++ examples on 64-bit ARM, compiled here and run by qemu, compute what Python does here."""

from __future__ import annotations

from pathlib import Path

import pytest

import qfx
from qfx.generate import load_programs, save_program, save_programs
from tests.cpp.test_cpp_examples import EXAMPLES, run
from tests.kernels import emulation
from tests.lib.builds import BUILD, one_process, programs_prefix
from tests.lib.decoders import decoder, ids
from tests.lib.encoders import encoder

CPUS = ("cortex-a53", "max")  # without instructions for products of int8, and with all


@pytest.fixture(scope="module")
def examples() -> Path:
    if missing := emulation.missing_on_aarch64():
        pytest.skip(missing)
    cross, folder = emulation.for_aarch64(), BUILD / "cpp-examples-cross"
    with one_process(folder):
        paths = f"-DCMAKE_PREFIX_PATH={programs_prefix(*cross)}", "-DCMAKE_FIND_ROOT_PATH=/"
        run("cmake", "-S", EXAMPLES, "-B", folder, "-G", "Ninja", *cross, *paths)
        run("cmake", "--build", folder, "--target", "generate", "encode")
    return folder


def on(cpu: str, *command: object) -> str:
    return run(emulation.qemu(), "-cpu", cpu, *command)


@pytest.mark.parametrize("cpu", CPUS)
def test_a_decoder_chooses_the_tokens_of_python(examples: Path, cpu: str, tmp_path: Path) -> None:
    save_programs(qfx.compile_for_generate(decoder("llama"), max_length=64), tmp_path / "model")
    tokens = ids(1, 5)
    expected = load_programs(tmp_path / "model").generate(tokens, 12)[0].tolist()
    found = on(cpu, examples / "generate", tmp_path / "model", 12, *tokens[0].tolist())
    assert [int(word) for word in found.split()] == expected


@pytest.mark.parametrize("cpu", CPUS)
def test_an_encoder_has_the_bits_of_python(examples: Path, cpu: str, tmp_path: Path) -> None:
    runner, tokens = encoder()
    save_program(runner, tmp_path / "encoder")
    (tmp_path / "input").write_bytes(tokens.numpy().tobytes())
    on(cpu, examples / "encode", tmp_path / "encoder", tmp_path / "input", tmp_path / "result")
    expected = b"".join(result.numpy().tobytes() for result in runner(tokens))
    assert (tmp_path / "result").read_bytes() == expected
