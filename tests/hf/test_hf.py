"""qfx.hf: a model of transformers is quantized as it is loaded, comes back from save_pretrained bit
by bit, and is never filled with random weights without an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

import qfx
from qfx import Config, QSpec, Scheme
from qfx.hf import QfxConfig, QfxQuantizer
from tests.conftest import same_bits
from tests.nn.test_nn_linear import FACTOR, K
from tests.nn.test_nn_linear import SCHEMES as EVERY

IDS = torch.arange(12)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def llama(tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=tied
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def bert(tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """Its head has a bias that is tied too."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()


MODELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "llama": (llama, AutoModelForCausalLM),
    "bert": (bert, AutoModelForMaskedLM),
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def int8(model: nn.Module) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, qfx.nn.Linear)}


def same_tensors(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_loading_quantizes_and_saving_brings_it_back(
    name: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """As quantize_ does after loading; and again after a second round, in one file or several."""
    make, auto = MODELS[name]
    make(tied, dtype).save_pretrained(tmp_path / "float", max_shard_size="60KB")
    read: Any = {"dtype": dtype}
    expected = auto.from_pretrained(tmp_path / "float", **read)
    qfx.quantize_(expected, Config(smoothing=False))
    model = auto.from_pretrained(tmp_path / "float", quantization_config=QfxConfig(), **read)
    assert same_bits(logits(model), logits(expected)) and same_tensors(model, expected)
    assert len(int8(model)) > 12 and not any(
        type(m) is nn.Linear or t.is_meta for m in model.modules() for t in m.parameters()
    )
    for kept, size in ((model, "50GB"), (model, "40KB"), (expected, "50GB")):
        kept.save_pretrained(tmp_path / size, max_shard_size=size)
        again = auto.from_pretrained(tmp_path / size)
        assert same_bits(logits(again), logits(model)) and same_tensors(again, model)
        assert again.dtype == dtype and not again.training
        again.save_pretrained(tmp_path / "again")
        assert same_tensors(auto.from_pretrained(tmp_path / "again"), model)
    assert len([*(tmp_path / "40KB").glob("model-*.safetensors")]) > 1


CONFIGS: dict[str, dict[str, Any]] = {
    "skip": {"skip": ["lm_head", "layers.0.*"]},
    "only": {"only": ["*_proj"], "scheme": "w8"},
    "groups": {"scheme": "w4a8"},
    "smoothing": {"smoothing": True},
    "own scheme": {"scheme": Scheme(x=QSpec(bits=4), w=QSpec(bits=3)), "backward": "float"},
}


@pytest.mark.parametrize("row", CONFIGS)
def test_a_config_says_what_it_says_to_quantize_(row: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    qfx.quantize_(expected, Config(**{"smoothing": False, **CONFIGS[row]}))
    asked = QfxConfig(**CONFIGS[row])
    asked = QfxConfig.from_dict(json.loads(asked.to_json_string()))  # as accelerate may keep it
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=asked)
    assert int8(model) == int8(expected) and same_tensors(model, expected)
    model.save_pretrained(tmp_path / "int8")
    assert same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "int8"), expected)


@pytest.mark.parametrize("row", EVERY)
def test_every_scheme_comes_back(row: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": K, "num_hidden_layers": 1, "intermediate_size": 40}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    mlp = model.model.layers[0].mlp
    assert mlp.up_proj.weight.shape == (40, len(FACTOR))
    sites = EVERY[row]
    if isinstance(sites, Scheme):
        config = Config(scheme=sites, only=("up_proj",), smoothing=False)
    else:
        name = "model.layers.0.mlp.up_proj"
        recipe = qfx.Recipe((replace(sites, name=name),))
        config = Config(recipe=recipe, only=("up_proj",), smoothing=False)
    qfx.quantize_(model, config).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_tensors(again, model) and same_bits(logits(again), logits(model))


def test_the_base_of_a_model_and_a_base_that_was_quantized(tmp_path: Path) -> None:
    """With and without the prefix that transformers gives it."""
    model = qfx.quantize_(llama())
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    assert same_tensors(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert same_tensors(AutoModel.from_pretrained(tmp_path / "base"), base)
    inner = llama(tied=False)
    qfx.quantize_(inner.model)
    inner.save_pretrained(tmp_path / "inner")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "inner")
    assert same_tensors(again, inner) and "lm_head" not in int8(again)
    wrapped = nn.Sequential(llama())
    qfx.quantize_(wrapped)
    wrapped[0].save_pretrained(tmp_path / "wrapped")  # type: ignore[operator]
    assert same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped"), wrapped[0])


def test_no_float_weight_stays_and_no_two_are_there(tmp_path: Path) -> None:
    """Each weight goes when it is quantized, before the next is read."""
    seen: list[int] = []
    alive: list[StorageWeakRef] = []
    quantize = QfxQuantizer.quantize

    def counted(self: QfxQuantizer, name: str, weight: Tensor) -> None:
        seen.append(sum(not storage.expired() for storage in alive))
        alive.append(StorageWeakRef(weight.untyped_storage()))
        quantize(self, name, weight)

    llama(tied=False).save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QfxQuantizer, "quantize", counted)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QfxConfig())
    assert len(seen) == len(int8(model)) == 15 and max(seen) <= 1


# --- never random weights ---


def saved(folder: Path) -> None:
    qfx.quantize_(llama(tied=False)).save_pretrained(folder)


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
    f"{UP}.codes holds -128": _tensors(lambda s: s[f"{UP}.codes"].fill_(-128)),
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
    command = [sys.executable, "-c", ASKS.format(first=first), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


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


REFUSED: dict[str, dict[str, Any]] = {
    "unknown scheme 'w3'": {"scheme": "w3"},
    "a scheme that is none": {"scheme": {"x": 1}},
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
    with pytest.raises(ValueError, match="is of several devices"):
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


# --- generate ---


class Operators(TorchDispatchMode):
    """Counts the operators of qfx that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "qfx"
        return func(*args, **(kwargs or {}))


def generated(model: Any, **how: Any) -> tuple[list[int], int]:
    with torch.no_grad(), Operators() as seen:
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, **how)
    return tokens[0].tolist(), seen.count


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_runs_int8(cache: str, tmp_path: Path) -> None:
    saved(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens, operators = generated(model, cache_implementation=cache)
    assert operators == 4 * len(int8(model))
    whole = IDS
    for _ in range(4):  # without a cache
        with torch.no_grad():
            whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert tokens == whole[0].tolist()


def _wrapped(model: PreTrainedModel) -> Any:
    return torch.compile(model, backend="qfx", options={"inner": "eager", "minimum_gain": 0})


def _in_place(model: PreTrainedModel) -> Any:
    model.compile(backend="qfx", options={"inner": "eager", "minimum_gain": 0})
    return model


@pytest.mark.parametrize("compile_it, runs", [(_wrapped, False), (_in_place, True)])
def test_which_compiled_models_generate_in_int8(compile_it: Any, runs: bool) -> None:
    """generate calls the module inside of torch.compile's wrapper; one that is compiled in place it
    calls compiled. If the first of these changes, docs/transformers.md does."""
    torch._dynamo.reset()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        compile_it(llama()).generate(
            IDS, max_new_tokens=2, do_sample=False, cache_implementation="static"
        )
    assert any(event.key.startswith("qfx::") for event in profiled.key_averages()) == runs
