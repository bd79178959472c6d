"""The subcommands of `qfx` that take a model: each kind of model, each form, and wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import qfx._C as _C
from qfx.command.app import app
from qfx.command.errors import CommandError
from tests.command import models

SMALL = ("--tokens", "32")


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def run(*words: object) -> str:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return models.llama(folder / "llama")


MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "llama": (models.llama, SMALL),
    "bert": (models.bert, ()),  # with fewer positions than tokens by default
    "vit": (models.vit, ()),
    "program.pt2": (models.exported, ()),
    "model.gguf": (models.gguf, SMALL),
}


@pytest.mark.parametrize("name", MODELS)
def test_explain_reports_on_every_kind(name: str, tmp_path: Path) -> None:
    make, words = MODELS[name]
    model = make(tmp_path / name)
    found = json.loads(run("explain", model, *words, "--json", "--html", tmp_path / "a.html"))
    assert found["matmuls"] == len([r for r in found["rows"] if not r["lookup"]]) > 1
    assert found["int8_matmuls"] == 0 or found["whole"]["sqnr_db"] > 20
    assert f"{found['int8_matmuls']} of {found['matmuls']}" in (tmp_path / "a.html").read_text()


def test_explain_takes_the_options_of_the_backend(llama: Path) -> None:
    found = json.loads(run("explain", llama, *SMALL, "--skip", "lm_head", "--json"))
    (head,) = [row for row in found["rows"] if row["module"] == "lm_head"]
    assert head["scheme"] == "float" and "skip" in head["reason"]


@pytest.fixture(scope="module")
def int8(llama: Path, folder: Path) -> Path:
    told = run("quantize", llama, folder / "int8", "--scheme", "w4a8", "--skip", "lm_head")
    assert told.startswith(f"wrote {folder / 'int8'}, ")
    return folder / "int8"


def test_a_quantized_folder_is_one_of_transformers(int8: Path, llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(int8)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.config.quantization_config.quant_method == "qfx"
    assert len(model.config.quantization_config.linears) == 14
    assert AutoTokenizer.from_pretrained(int8)("w3 w4")["input_ids"] == [3, 4]
    told = json.loads(run("verify", int8, "--reference", llama, "--json"))
    assert 10 < float(told["SQNR, dB"]) < 60


@pytest.mark.parametrize("form", ["qfx", "programs", "exported", "onnx"])
def test_every_form_is_written(int8: Path, form: str, tmp_path: Path) -> None:
    suffix = {"qfx": "", "programs": ".safetensors", "exported": ".pt2", "onnx": ".onnx"}[form]
    out = tmp_path / f"model{suffix}"
    told = run("convert", int8, out, "--to", form, "--max-length", 64, *SMALL)
    assert out.exists() and "MB" in told


def test_an_exported_model_of_transformers_is_read_by_another_process(
    int8: Path, tmp_path: Path
) -> None:
    """Its outputs are a class that only transformers knows."""
    run("convert", int8, tmp_path / "model.pt2", "--to", "exported", *SMALL)
    command = [sys.executable, "-m", "qfx", "explain", str(tmp_path / "model.pt2"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["int8_matmuls"] == 15


@pytest.mark.parametrize("form", ["qfx", "transformers"])
def test_codes_of_a_gguf_file_are_kept(form: str, llama: Path, tmp_path: Path) -> None:
    file, out = models.gguf(tmp_path / "a.gguf"), tmp_path / "out"
    run("convert", file, out, "--to", form, *SMALL)
    told = json.loads(run("verify", out, "--reference", llama, "--json"))
    assert 20 < float(told["SQNR, dB"]) < 60


def test_a_folder_of_save_needs_its_skeleton(int8: Path, llama: Path, tmp_path: Path) -> None:
    run("convert", int8, tmp_path / "saved", "--to", "qfx")
    result = call("explain", tmp_path / "saved")
    assert result.exit_code == 1 and "--like" in result.stderr
    found = json.loads(run("explain", tmp_path / "saved", "--like", llama, *SMALL, "--json"))
    assert found["int8_matmuls"] > 0


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_programs_have_one_hash_on_every_instruction_set(name: str, tmp_path: Path) -> None:
    make, words = MODELS[name]
    out = tmp_path / "programs.safetensors"
    run("convert", make(tmp_path / name), out, "--to", "programs", "--max-length", 64, *words)
    before = _C.isa()
    found: dict[str, Any] = json.loads(run("verify", out, "--json"))
    assert [*found] == _C.isas() and len(set(found.values())) == 1 and _C.isa() == before
    run("verify", out, "--expect", found[before])
    wrong = call("verify", out, "--expect", "0" * 64)
    assert wrong.exit_code == 1 and "not those of the hash" in wrong.stderr


def test_generate_continues_a_text(llama: Path) -> None:
    found = json.loads(run("generate", llama, "w3 w4 w5", "--new", 8, "--json"))
    assert 1 <= found["tokens"] <= 8 and found["first_s"] > 0
    assert set(found["text"].split()) <= {f"w{i}" for i in range(models.WORDS)}
    printed = call("generate", llama, "w3 w4 w5", "--new", 8)
    assert printed.stdout.strip() == found["text"] and "tokens" in printed.stderr


def test_generate_runs_a_file_of_programs(llama: Path, tmp_path: Path) -> None:
    """The same tokens as the model that it was made of, and an end where the text ends."""
    out, prompt = tmp_path / "programs.safetensors", "w3 w4 w5"
    run("convert", llama, out, "--to", "programs", "--max-length", 64)
    expected = json.loads(run("generate", llama, prompt, "--new", 8, "--scheme", "w8a8", "--json"))
    found = json.loads(run("generate", out, prompt, "--new", 8, "--like", llama, "--json"))
    assert (found["text"], found["tokens"]) == (expected["text"], expected["tokens"])
    for words, why in [((), "--like"), (("--like", llama, "--scheme", "w4a8"), "codes already")]:
        refused = call("generate", out, prompt, *words)
        assert refused.exit_code == 1 and why in refused.stderr
    too_long = call("generate", out, "w3 " * 65, "--like", llama)
    assert too_long.exit_code == 1 and "do not fit into a cache of 64" in too_long.stderr


def test_bench_runs_each_way(tmp_path: Path) -> None:
    rows = json.loads(run("bench", models.exported(tmp_path / "p.pt2"), "--rounds", 1, "--json"))
    assert [row["way"] for row in rows] == ["eager", "Inductor", "qfx", "qfx, inner=program"]
    assert all(row["call_s"] > 0 and not row["reason"] for row in rows)


WRONG = {
    "no path": (("explain", "./nothing"), "./nothing does not exist"),
    "an empty folder": (("explain", "{folder}"), "has neither config.json"),
    "another file": (("explain", "{file}"), "is none of"),
    "programs": (("explain", "{file}.safetensors"), "qfx generate"),
    "no program": (("verify", "{file}.safetensors"), "file.safetensors"),
    "no GGUF": (("explain", "{file}.gguf"), ""),
    "no exported program": (("explain", "{file}.pt2"), ""),
    "no reference": (("verify", "{file}.pt2"), "--reference"),
    "a form": (("convert", "{llama}", "{folder}/new", "--to", "tar"), "none of the forms"),
    "a folder that exists": (("convert", "{llama}", "{folder}", "--to", "qfx"), "exists"),
    "no folder for it": (("convert", "{llama}", "{folder}/a/b", "--to", "qfx"), "does not exist"),
    "a scheme": (("quantize", "{llama}", "{folder}/new", "--scheme", "w1"), "w1"),
    "a name to skip": (("explain", "{llama}", "--skip", "nothing"), "nothing"),
    "too many tokens": (("explain", "{llama}", "--tokens", "4000"), "256 positions"),
    "an exported program": (("quantize", "{file}.pt2", "{folder}/new"), "convert"),
}


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_TRACEBACK", "1")
    result = call("explain", "./nothing")
    assert result.exit_code == 1 and isinstance(result.exception, CommandError)
    assert isinstance(result.exc_info, tuple) and result.exc_info[2] is not None


def test_generate_says_why_there_is_no_tokenizer(llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    result = call("generate", tmp_path, "text")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert "no language model with a tokenizer (" in result.stderr


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name: str, llama: Path, tmp_path: Path) -> None:
    words, expected = WRONG[name]
    for suffix in ("", ".safetensors", ".gguf", ".pt2"):
        (tmp_path / f"file{suffix}").write_bytes(b"12345678" * 4)
    (tmp_path / "empty").mkdir()
    places = {"folder": tmp_path / "empty", "file": tmp_path / "file", "llama": llama}
    result = call(*(word.format_map(places) for word in words))
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("qfx: ") and result.stderr.count("\n") == 1
    assert expected in result.stderr
