"""int8 experts of models of transformers: quantized as they are loaded, saved, and loaded again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging

import qfx
from qfx.hf import QfxConfig
from qfx.nn import Experts
from qfx.nn.experts_like import is_experts
from qfx.nn.stacked_weight import StackedWeight
from tests.conftest import same_bits
from tests.lib.experts_blocks import BY_MODEL, IDS, SIZES, E, J, model_of
from tests.lib.fresh_process import run_python

AUTO = transformers.AutoModelForCausalLM
PLAIN = qfx.Config(smoothing=False)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def load(folder: Path, **given: Any) -> Any:
    return AUTO.from_pretrained(folder, **given)


def quantized(folder: Path, config: QfxConfig | None = None, **given: Any) -> Any:
    return load(folder, quantization_config=config or QfxConfig(), **given)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(IDS).logits
    return y


def same_tensors(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)


def blocks(model: nn.Module) -> list[Any]:
    """The blocks of experts, in order, in int8 or float."""
    return [m for m in model.modules() if isinstance(m, Experts) or is_experts(m)]


def are_int8(model: nn.Module) -> list[bool]:
    return [isinstance(m, Experts) for m in blocks(model)]


def saved(name: str, folder: Path, change: Callable[[Any], Any] = lambda model: None) -> Any:
    """Writes a checkpoint in float, of several files, with biases that are not 0."""
    model = model_of(name)
    for at, parameter in model.named_parameters():
        if "bias" in at:
            nn.init.normal_(parameter)
    change(model)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@BY_MODEL
def test_a_checkpoint_becomes_what_quantize_makes_and_comes_back(
    name: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """In the dtype that it is stored in, and in float32; from one file or several."""
    saved(name, tmp_path / "float", lambda model: model.to(stored))
    for dtype in {stored, torch.float32}:
        expected = qfx.quantize_(load(tmp_path / "float", dtype=dtype), PLAIN)
        model = quantized(tmp_path / "float", dtype=dtype)
        assert all(are_int8(model)) and model.dtype == dtype
        assert same_tensors(model, expected)
    if name != "jamba":  # PyTorch's own Mamba rounds by the places of its tensors in memory
        assert same_bits(logits(model), logits(expected))
    for kept, size in ((model, "60KB"), (expected, "50GB")):
        kept.save_pretrained(tmp_path / size, max_shard_size=size)
        again = load(tmp_path / size)
        assert same_tensors(again, model) and all(are_int8(again))
        assert again.dtype == dtype and not again.training
        again.save_pretrained(tmp_path / "again")
        assert same_tensors(load(tmp_path / "again"), model)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_each_expert_is_quantized_alone(name: str, tmp_path: Path) -> None:
    """What transformers stacks of a checkpoint with each expert apart is never whole in memory."""
    saved(name, tmp_path, lambda model: model.bfloat16())
    seen: list[int] = []
    make = StackedWeight.from_each

    def counted(weights: Any, *given: Any) -> StackedWeight:
        assert iter(weights) is iter(weights)  # made one at a time
        return make((seen.append(w.numel()) or w for w in weights), *given)  # type: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackedWeight, "from_each", counted)
        patch.setattr(torch, "stack", _small(torch.stack))
        model = quantized(tmp_path, dtype=torch.bfloat16)
    assert len(seen) == 2 * 2 * E and all(are_int8(model))


def _small(stack: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def stacked(tensors: Any, *given: Any, **how: Any) -> Tensor:
        assert len(tensors) == 1
        return stack(tensors, *given, **how)

    return stacked


@pytest.mark.parametrize("scheme", ["w8a8-groups", "w5a8", "w4a8"])
def test_other_schemes_come_back(scheme: str, tmp_path: Path) -> None:
    saved("gpt-oss", tmp_path / "float")
    model = quantized(tmp_path / "float", QfxConfig(scheme))
    expected = qfx.quantize_(load(tmp_path / "float"), qfx.Config(scheme=scheme, smoothing=False))
    assert same_tensors(model, expected)
    model.save_pretrained(tmp_path / "int8")
    assert same_tensors(load(tmp_path / "int8"), expected)


# Options: which blocks of two are int8, and whether the attention is.
OPTIONS: dict[str, tuple[dict[str, Any], list[bool], bool]] = {
    "skip a block": ({"skip": ["layers.0.mlp.experts"]}, [False, True], True),
    "skip experts": ({"skip": ["experts"]}, [False, False], True),
    "only experts": ({"only": ["experts"]}, [True, True], False),
    "only a block": ({"only": ["layers.1.mlp.experts"]}, [False, True], False),
    "a scheme that is not for experts": ({"scheme": "w8"}, [False, False], True),
    "smoothing": ({"smoothing": True}, [True, True], True),
}


@pytest.mark.filterwarnings("ignore:.* 2 of 11 linears and experts stay float")
@pytest.mark.parametrize("row", OPTIONS)
@pytest.mark.parametrize("name", ["olmoe", "gpt-oss"])
def test_options_say_which_experts_are_int8(name: str, row: str, tmp_path: Path) -> None:
    options, int8, attention = OPTIONS[row]
    saved(name, tmp_path / "float")
    expected = qfx.quantize_(
        load(tmp_path / "float"), qfx.Config(**{"smoothing": False, **options})
    )
    model = quantized(tmp_path / "float", QfxConfig(**options))
    assert same_tensors(model, expected) and are_int8(model) == int8
    q_proj = model.model.layers[0].self_attn.q_proj
    assert isinstance(q_proj, qfx.nn.Linear) == attention
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert same_tensors(again, expected) and are_int8(again) == int8


def test_a_router_that_is_a_linear_stays_float(tmp_path: Path) -> None:
    sizes = {"num_experts": E, "moe_intermediate_size": J, "num_dense_layers": 0, "head_dim": 16}
    config = transformers.AfmoeConfig(**SIZES | sizes)
    transformers.AfmoeForCausalLM(config).save_pretrained(tmp_path / "float")
    model = quantized(tmp_path / "float")
    model.save_pretrained(tmp_path / "int8")
    for each in (model, load(tmp_path / "int8")):
        mlp = each.model.layers[0].mlp
        assert type(mlp.router.gate) is nn.Linear and isinstance(mlp.experts, Experts)
        assert isinstance(mlp.shared_experts.up_proj, qfx.nn.Linear)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_a_block_with_a_weight_that_is_not_finite_stays_float(
    name: str, part: str, tmp_path: Path
) -> None:
    """As a whole, whichever product is read first."""

    def damage(model: Any) -> None:
        getattr(model.model.layers[1].mlp.experts, part).data[2, 3, 4] = torch.nan

    before = blocks(saved(name, tmp_path / "float", damage))[1]
    with pytest.warns(UserWarning, match=r"layers.1.mlp.experts .*NaN or infinity"):
        model = quantized(tmp_path / "float", QfxConfig())
    assert are_int8(model) == [True, False]
    for at, parameter in blocks(model)[1].named_parameters():
        assert torch.equal(parameter.nan_to_num(), before.get_parameter(at).nan_to_num())
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert are_int8(again) == [True, False]


def _pop(part: str, folder: Path, expert: str = "") -> None:
    """Removes the tensors of a product, or of one expert of it, from the files of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    gone = {n for n in said["weight_map"] if f"layers.1.mlp.experts{expert}" in n and part in n}
    assert gone
    for file in {said["weight_map"].pop(name) for name in gone}:
        state = {n: t for n, t in load_file(folder / file).items() if n not in gone}
        save_file(state, folder / file, metadata={"format": "pt"})
    index.write_text(json.dumps(said))


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_a_product_that_no_file_has_is_made_anew_as_transformers_does(
    part: str, tmp_path: Path
) -> None:
    """It warns of it; and the other product is that of the file."""
    before = saved("gpt-oss", tmp_path)
    _pop(f"{part}", tmp_path)
    model = quantized(tmp_path)
    other = {"gate_up_proj": "down", "down_proj": "up"}[part]
    expected = Experts.from_float(blocks(before)[1], "w8a8").state_dict()
    found = blocks(model)[1].state_dict()
    assert same_bits(found[f"{other}.codes"], expected[f"{other}.codes"])


def test_an_expert_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    saved("olmoe", tmp_path)
    _pop("down_proj", tmp_path, expert=".3.")
    with pytest.raises((RuntimeError, ValueError), match=r"above report|ignore_mismatched_sizes"):
        quantized(tmp_path)


def test_the_base_of_a_model(tmp_path: Path) -> None:
    """With and without the prefix that transformers gives it."""
    model = qfx.quantize_(model_of("qwen3-moe"), PLAIN)
    model.save_pretrained(tmp_path / "head")
    base = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert same_tensors(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert same_tensors(transformers.AutoModel.from_pretrained(tmp_path / "base"), base)


def test_copies_of_a_loaded_model_are_saved(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "float")
    model = quantized(tmp_path / "float")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    assert same_tensors(load(tmp_path / "copy"), model)
    qfx.save(model, tmp_path / "folder")
    with torch.device("meta"):
        skeleton = type(model)(model.config).eval()
    assert same_bits(logits(qfx.load(tmp_path / "folder", skeleton)), logits(model))


UP = "model.layers.0.mlp.experts.up"


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _said(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"]["linears"])
        (folder / "config.json").write_text(json.dumps(config))

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    f"no file of the model has {UP}.codes": _tensors(lambda s: s.pop(f"{UP}.codes")),
    f"{UP}.scale holds 0.0 at": _tensors(lambda s: s[f"{UP}.scale"][3].zero_()),
    "ignore_mismatched_sizes|above report": _tensors(
        lambda s: s.update({f"{UP}.codes": s[f"{UP}.codes"][:3].clone()})
    ),
    "experts has experts in int8, and no codes of .*experts.up": _said(lambda q: q.pop(UP)),
    f"{UP}.scheme has format 2": _said(lambda q: q.update({UP: [2, 1]})),
    f"{UP}.scheme is that of a SignLinear": _said(lambda q: q[UP].__setitem__(1, 4)),
    "(?s)ignore_mismatched_sizes|above report .*": _said(
        lambda q: [q.pop(n) for n in (UP, UP.replace("up", "down"))]
    ),
}


@pytest.mark.parametrize("phrase", DAMAGES)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_damaged_folder_is_refused(name: str, phrase: str, tmp_path: Path) -> None:
    qfx.quantize_(model_of(name), PLAIN).save_pretrained(tmp_path)
    DAMAGES[phrase](tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=phrase):
        load(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granite"])
def test_without_qfx_experts_are_not_filled_at_random(name: str, tmp_path: Path) -> None:
    """transformers alone finds tensors of other shapes by the names of the float experts."""
    qfx.quantize_(model_of(name), qfx.Config(only=["experts"])).save_pretrained(tmp_path)
    code = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = run_python(code, str(tmp_path))
    assert done.returncode and "ignore_mismatched_sizes" in done.stderr
