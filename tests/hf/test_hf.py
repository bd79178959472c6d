"""qfx.hf: a model of transformers is quantized as it is loaded, comes back from save_pretrained bit
by bit, and is never filled with random weights without an error."""

from __future__ import annotations

import copy
import json
import re
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
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

import qfx
from qfx import Config, QSpec, Scheme
from qfx.hf import QfxConfig, QfxQuantizer
from tests.conftest import same_bits
from tests.nn.test_nn_linear import BY_VARIED, FACTOR, K
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


def test_a_tied_weight_that_is_stored_by_the_name_of_the_head_loads(tmp_path: Path) -> None:
    """Of tensors that share memory a file has one, of either name."""
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    qfx.quantize_(expected, Config(smoothing=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QfxConfig())
    assert same_bits(logits(model), logits(expected)) and same_tensors(model, expected)


CONFIGS: dict[str, dict[str, Any]] = {
    "skip": {"skip": ["lm_head", "layers.0.*"]},
    "only": {"only": ["*_proj"], "scheme": "w8"},
    "4 bits": {"scheme": "w4a8"},
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


@BY_VARIED
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


@pytest.mark.parametrize("how", ["prepare_qat", "prepare_binary"])
def test_what_is_converted_or_loaded_comes_back(how: str, tmp_path: Path) -> None:
    """It came back as random float weights, with a warning."""
    model = llama(tied=False)
    with torch.no_grad():
        getattr(qfx, how)(model, IDS, config=Config(skip=("lm_head",)))
    qfx.convert(model).save_pretrained(tmp_path / "converted")
    qfx.save(model, tmp_path / "folder")
    qfx.load(tmp_path / "folder", llama(tied=False)).save_pretrained(tmp_path / "loaded")
    for name in ("converted", "loaded"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert same_tensors(again, model) and same_bits(logits(again), logits(model))
        assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]


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

    def counted(self: QfxQuantizer, name: str, weight: Tensor) -> bool:
        seen.append(sum(not storage.expired() for storage in alive))
        alive.append(StorageWeakRef(weight.untyped_storage()))
        return quantize(self, name, weight)

    llama(tied=False).save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QfxQuantizer, "quantize", counted)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QfxConfig())
    assert len(seen) == len(int8(model)) == 15 and max(seen) <= 1


PICTURES = {"image_size": 32, "patch_size": 8, **SIZES}
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Tensor]]] = {
    "an encoder and a decoder that share": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
        ),
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "layers that are one": (
        lambda: AlbertForMaskedLM(AlbertConfig(**SIZES, embedding_size=32)),
        {"input_ids": IDS},
    ),
    "names that files have otherwise": (
        lambda: LlavaForConditionalGeneration(
            LlavaConfig(
                text_config=LlamaConfig(**SIZES),
                vision_config=CLIPVisionConfig(**PICTURES),
                image_token_index=95,
            )
        ),
        {"input_ids": IDS},
    ),
}


@pytest.mark.parametrize("row", OTHERS)
def test_other_architectures(row: str, tmp_path: Path) -> None:
    """By transformers, by a copy of what it loaded, and by qfx.save through meta."""
    make, inputs = OTHERS[row]
    torch.manual_seed(0)
    model = make().eval()
    kind, config = type(model), copy.deepcopy(model.config)

    def outputs(model: Any) -> Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    model.save_pretrained(tmp_path / "float")
    expected = kind.from_pretrained(tmp_path / "float")
    qfx.quantize_(expected, Config(smoothing=False))
    expected.save_pretrained(tmp_path / "made")
    read = kind.from_pretrained(tmp_path / "float", quantization_config=QfxConfig())
    copy.deepcopy(read).save_pretrained(tmp_path / "read")
    qfx.save(read, tmp_path / "folder")
    with torch.device("meta"):
        skeleton = kind(config).eval()
    loaded = qfx.load(tmp_path / "folder", skeleton)
    for each in (read, *(kind.from_pretrained(tmp_path / n) for n in ("made", "read")), loaded):
        assert same_bits(outputs(each), outputs(expected)) and int8(each) == int8(expected)


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


def saved(folder: Path) -> None:
    qfx.quantize_(llama(tied=False)).save_pretrained(folder)


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_that_is_not_finite_stays_float(tied: bool, tmp_path: Path) -> None:
    """One that is read from the file, and one that is tied and known only when all is loaded."""
    model = llama(tied)
    bad = ("model.layers.1.mlp.up_proj", "lm_head")
    for name in bad:
        model.get_submodule(name).weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "float")
    with pytest.warns(UserWarning, match="2 of 15 linears stay float .* NaN or infinity"):
        loaded: Any = LlamaForCausalLM.from_pretrained(
            tmp_path / "float", quantization_config=QfxConfig(smoothing=False)
        )
    floats = [n for n, m in loaded.named_modules() if type(m) is nn.Linear]
    assert sorted(floats) == sorted(bad)
    loaded.save_pretrained(tmp_path / "int8")
    again: Any = LlamaForCausalLM.from_pretrained(tmp_path / "int8")
    assert [n for n, m in again.named_modules() if type(m) is nn.Linear] == floats
    for name in bad:
        assert torch.equal(
            again.get_submodule(name).weight.isnan(), model.get_submodule(name).weight.isnan()
        )


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux")
def test_no_page_of_the_float_file_stays_in_memory(tmp_path: Path) -> None:
    """Weights are read through a mapping of the file. As long as it is mapped, each page that was
    read counts as memory of the process, unless it is dropped."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 2048}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=QfxConfig())
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 2**25 and resident_pages(tmp_path / "model.safetensors") < 0.1 * size
    assert isinstance(model.model.layers[0].mlp.up_proj, qfx.nn.Linear)


def resident_pages(file: Path) -> int:
    """The bytes of a file that are in memory through mappings of this process."""
    found, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_file = line.endswith(str(file))
        elif of_file and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found
