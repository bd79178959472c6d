"""The library of programs computes the bits that Python does, whatever the number of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import qfx
from qfx.generate import load_program, load_programs, save_program, save_programs
from tests.kernels.emulation import missing_to_build
from tests.lib.builds import programs_prefix
from tests.lib.c_programs import CError, CLibrary
from tests.lib.decoders import decoder, ids
from tests.lib.encoders import encoder

CASES = {  # model, options of compile_for_generate, batch size
    "gemma3": ("w4a8", {"max_length": 192}, 1),  # two kinds of layers, one of them rings
    "mixtral": (None, {"max_length": 300}, 3),
    "gpt2": (None, {"max_length": 20}, 1),  # shorter than the largest step
}
STEPS = (3, 1, 130, 1, 5, 17, 16, 1, 4, 2, 9)  # tokens of successive reads


@pytest.fixture(scope="module")
def library() -> CLibrary:
    if missing := missing_to_build():
        pytest.skip(missing)
    return CLibrary(programs_prefix() / "lib" / "libqfx_programs.so")


@pytest.fixture(scope="module", params=CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scheme, options, batch = CASES[request.param]
    model = qfx.compile_for_generate(
        decoder(request.param), *([scheme] if scheme else []), **options
    )
    found = tmp_path_factory.mktemp("programs") / "model.safetensors"
    save_programs(model, found, batch_size=batch)
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_decoder_has_the_bits_of_python(library: CLibrary, path: Path, threads: int) -> None:
    library.set_threads(threads)
    expected, found = load_programs(path), library.load(path)
    about = found.decoder()
    assert (about.batch, about.length) == (expected.batch, expected.length)
    for number, count in enumerate(STEPS):
        if expected.seen + count <= expected.length:
            tokens = (ids(about.batch, count) + number) % about.vocabulary
            assert torch.equal(found.read(tokens), expected.read(tokens))
    assert found.decoder().seen == expected.seen > 0


def test_padding_and_new_sequences(library: CLibrary, path: Path) -> None:
    expected, found = load_programs(path), library.load(path)
    tokens = ids(expected.batch, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for _ in range(2):
        assert torch.equal(found.read(tokens, mask), expected.read(tokens, mask))
        assert torch.equal(found.read(tokens[:, :1]), expected.read(tokens[:, :1]))
        found.reset()
        expected.reset()
    assert found.decoder().seen == 0


def test_a_read_that_fails_leaves_all_as_it_was(library: CLibrary, path: Path) -> None:
    found, other = library.load(path), library.load(path)
    tokens = ids(found.decoder().batch, 5)
    found.read(tokens), other.read(tokens)
    with pytest.raises(CError, match="none of the 96 of the vocabulary") as error:
        found.read(tokens[:, :4] + 500)
    assert error.value.status == "argument"
    with pytest.raises(CError, match=r"1000 tokens after 5 do not fit into a cache of"):
        found.read(ids(len(tokens), 1000))
    assert torch.equal(found.read(tokens[:, :3]), other.read(tokens[:, :3]))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("programs") / "encoder.safetensors"
    save_program(encoder()[0], found)
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_encoder_has_the_bits_of_python(library: CLibrary, encoded: Path, threads: int) -> None:
    library.set_threads(threads)
    runner, tokens = encoder()
    found, loaded = library.load(encoded), load_program(encoded)
    assert found.kinds("inputs") == [(torch.int64, [2, 64], 1024)]
    assert [sizes for _, sizes, _ in found.kinds("results")] == [[2, 64], [2, 64, 128]]
    for each in (tokens, tokens.flip(1)):
        expected = runner(each)
        for results in (found.run(each), loaded(each)):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_programs_run_at_the_same_time(library: CLibrary, encoded: Path) -> None:
    library.set_threads(3)
    runner, tokens = encoder()
    expected = runner(tokens)[1]
    programs = [library.load(encoded) for _ in range(4)] * 2  # two calls for each

    def same(program: object) -> bool:
        return all(torch.equal(program.run(tokens)[1], expected) for _ in range(20))  # type: ignore[attr-defined]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(same, programs))


def test_a_forked_process_has_threads_of_its_own(library: CLibrary, encoded: Path) -> None:
    library.set_threads(3)
    program, (_, tokens) = library.load(encoded), encoder()
    expected = program.run(tokens)[1]
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(program.run(tokens)[1].numpy()) == bytes(expected.numpy()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_caller_can_do_wrong(library: CLibrary, encoded: Path, path: Path) -> None:
    graph, model = library.load(encoded), library.load(path)
    for wrong, message in (
        (lambda: graph.decoder(), "is a graph of fixed shapes"),
        (lambda: graph.reset(), "is a graph of fixed shapes"),
        (lambda: model.run(), "is a language model"),
        (lambda: graph.run(torch.zeros(200, dtype=torch.int8)[1:]), "input 0 is at an address"),
        (lambda: graph.run(torch.empty(0)), "input 0 is null, expected 1024 bytes of int64"),
        (lambda: model.read(ids(1, 0)), "count=0: expected at least 1|tokens is null"),
        (lambda: library.set_threads(0), "from 1 to 1024"),
        (lambda: library.set_threads(1025), "count=1025: expected a number of threads"),
        (lambda: library.load(encoded, -1), "max_memory is negative"),
        (lambda: library.call("qfx_program_load", None, 0, None), "program is null"),
        (lambda: library.call("qfx_program_input", graph.handle, 3, b"0" * 40), "none of the 1"),
    ):
        with pytest.raises(CError, match=message) as error:
            wrong()  # type: ignore[no-untyped-call]
        assert error.value.status == "argument"
    library.c.qfx_program_free(None)
    assert library.c.qfx_program_inputs(None) == -1


def test_the_number_of_threads_of_the_environment() -> None:
    program = (
        "import sys; from pathlib import Path; from tests.lib.c_programs import CLibrary\n"
        "try: CLibrary(Path(sys.argv[1])).load('none')\n"
        "except Exception as why: print(why)\n"
    )
    library = programs_prefix() / "lib" / "libqfx_programs.so"
    for value, message in (("x", "QFX_NUM_THREADS=x: expected"), ("2", "No such file")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(library)],
            env=os.environ | {"QFX_NUM_THREADS": value}, capture_output=True, text=True,
        )  # fmt: skip
        assert message in done.stdout, done.stderr


def test_it_needs_the_cpp_library_alone_and_shows_its_functions_alone() -> None:
    path = str(programs_prefix() / "lib" / "libqfx_programs.so")
    told = subprocess.run(["readelf", "-dW", "--dyn-syms", path], capture_output=True, text=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(\w+)", told.stdout))
    assert needed <= {"libstdc", "libm", "libgcc_s", "libc", "libpthread", "ld"}
    lines = [line for line in told.stdout.splitlines() if " UND " not in line]
    shown = {line.split()[-1] for line in lines if " GLOBAL " in line or " WEAK " in line}
    header = (programs_prefix() / "include" / "qfx" / "programs.h").read_text()
    assert shown == set(re.findall(r"QFX_API [\w ]*?\*?\s?\*?(qfx_\w+)\(", header))


def test_the_header_is_c(tmp_path: Path) -> None:
    include = programs_prefix() / "include"
    (tmp_path / "a.c").write_text("#include <qfx/programs.h>\nint main(void) { return 0; }\n")
    options = ["-std=c99", "-pedantic-errors", "-Wall", "-Werror", "-fsyntax-only", f"-I{include}"]
    subprocess.run(["cc", *options, str(tmp_path / "a.c")], check=True)
