"""PEFT's adapters on a base that `quantize_` made int8, by PEFT's own calls: they train, are saved,
loaded, merged, taken out again, and nothing of it is lost without a word."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import qfx
from qfx.ops.single_tensors import sqnr
from tests.lib.models import compiled
from tests.lib.pairs import LONG

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 50}
IDS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "v_proj", "down_proj"]
Q = qfx.QSpec
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {},
    "rows alone": {"smoothing": False, "scheme": qfx.Scheme()},
    "rotated": {"smoothing": False, "scheme": qfx.Scheme(rotation=64)},
    "asymmetric": {"scheme": "w8a8-asymmetric"},
    "weights alone": {"scheme": qfx.Scheme(x=None)},
    "groups": {"scheme": qfx.Scheme(w=Q(group=64))},
    "columns": {"scheme": qfx.Scheme(w=Q(axes=qfx.PER_COLUMN))},
    "int8 gradients": {"scheme": qfx.Scheme(backward="int8")},
    "4 bits": {"scheme": "w4a8"},
    "5 bits, groups of both": {"scheme": qfx.Scheme(Q(group=32), Q(5, group=32, packed=True))},
    "4 bits, weights alone": {"scheme": "w4"},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def in_float(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **TINY)
    return LlamaForCausalLM(config).to(dtype)


def base(name: str = "default", dtype: torch.dtype = torch.float32) -> nn.Module:
    return qfx.quantize_(in_float(dtype), qfx.Config(skip=["lm_head"], **SCHEMES[name]))


def adapted(model: nn.Module, *, r: int = 8, targets: Any = TARGETS, **more: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=r, lora_alpha=32, target_modules=targets, **more))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def codes(model: nn.Module) -> dict[str, Tensor]:
    """What is held of the int8 weights, by their names without adapters."""
    return {
        f"{name.removesuffix('.base_layer')}.{part}": tensor.clone()
        for name, module in model.named_modules()
        if isinstance(module, qfx.nn.Linear)
        for part, tensor in module.state_dict().items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model: Any, call: Callable[..., Any] | None = None, steps: int = 20) -> list[float]:
    """The loss of each step, next tokens of IDS."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=5e-3), []
    for _ in range(steps):
        loss = (model if call is None else call)(IDS, labels=IDS).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(name: str = "default") -> Any:
    model = adapted(base(name))
    train(model, steps=8)
    return model.eval()


@pytest.mark.parametrize("name", SCHEMES)
def test_adapters_train_are_merged_and_taken_out(name: str, tmp_path: Path) -> None:
    model = adapted(base(name))
    before = codes(model)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0] and losses[-1] == min(losses)
    assert same(codes(model), before)
    y = logits(model.eval())
    model.merge_adapter()
    merged = logits(model)
    # of few bits no less than the base itself lost; rounding at random has twice its variance
    least = min(25, sqnr(logits(in_float().eval()), logits(base(name).eval())) - 3)
    assert sqnr(y, merged) > least and not torch.equal(y, merged)
    model.unmerge_adapter()
    assert same(codes(model), before) and torch.equal(logits(model), y)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(name), tmp_path).eval()
    assert torch.equal(logits(loaded), y)
    unloaded = model.merge_and_unload(safe_merge=True)
    assert torch.equal(logits(unloaded), merged)
    assert not any("lora" in part for part, _ in unloaded.named_modules())


def test_a_base_has_no_float_copy() -> None:
    """Of the linears that adapters sit on a byte an element, and 8 an output feature."""
    model = adapted(base())
    train(model, steps=2)
    for module in model.modules():
        if isinstance(module, qfx.nn.Linear):
            tensors = [*module.parameters(), *module.buffers()]
            n, k = -(-module.out_features // 32) * 32, -(-module.in_features // 64) * 64
            assert sum(t.nbytes for t in tensors) <= n * k + 8 * n + 4 * k + 64


@pytest.mark.parametrize("inner", ["eager", "aot_eager"] if LONG else ["aot_eager"])
def test_compiled_steps_are_those_of_eager(inner: str) -> None:
    """The base's linears are the same operators; adapters stay float."""
    eager, model = adapted(base("rows alone")), adapted(base("rows alone"))
    f = compiled(model, inner=inner, skip=["lora_A", "lora_B", "lm_head"])
    expected, got = train(eager, steps=4), train(model, f, steps=4)
    assert torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-4)
    eager.eval(), model.eval()
    with torch.no_grad():
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(model, change)()
            assert sqnr(logits(model), f(IDS).logits) > 60


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_mixed_dtypes(how: str) -> None:
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = adapted(base(dtype=dtype))

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")

    losses = train(model, autocast()(model.__call__))
    assert losses[-1] < 0.9 * losses[0]
    with autocast():
        y = logits(model.eval())
        model.merge_adapter()
        assert y.dtype == torch.bfloat16 and sqnr(y.float(), logits(model).float()) > 25
        model.unmerge_adapter()
        assert torch.equal(logits(model), y)


def test_several_adapters() -> None:
    model = trained()
    first, before = logits(model), codes(model)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("second")
    train(model, steps=8)
    model.eval()
    second = logits(model)
    with model.disable_adapter():
        bare = logits(model)
    assert torch.equal(bare, logits(base().eval())) and not torch.equal(first, second)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    model.merge_adapter()
    assert sqnr(both, logits(model)) > 25
    with model.disable_adapter():  # takes them out
        assert torch.equal(logits(model), bare)
    assert same(codes(model), before)
    model.merge_adapter(["second"])
    model.unmerge_adapter()
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)


def test_a_base_quantized_below_adapters_is_merged() -> None:
    """The base of a model that had its adapters before: they went lost in the merge."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **TINY)
    model = adapted(LlamaForCausalLM(config))
    train(model, steps=8)
    qfx.quantize_(model.eval(), qfx.Config(skip=["lora_A", "lora_B", "lm_head"]))
    y = logits(model)
    with model.disable_adapter():
        assert sqnr(y, logits(model)) < 10
    model.merge_adapter()
    assert sqnr(y, logits(model)) > 25
    model.unmerge_adapter()
    assert torch.equal(logits(model), y)


METHODS: dict[str, Any] = {
    "all-linear": lambda: LoraConfig(target_modules="all-linear", init_lora_weights=False),
    "rslora": lambda: LoraConfig(use_rslora=True, target_modules=TARGETS, init_lora_weights=False),
    "dora": lambda: LoraConfig(use_dora=True, target_modules=TARGETS, init_lora_weights=False),
    "loha": lambda: LoHaConfig(target_modules=TARGETS, init_weights=False),
    "ia3": lambda: IA3Config(
        target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "oft": lambda: OFTConfig(
        target_modules=TARGETS, init_weights=False, oft_block_size=16, use_cayley_neumann=False
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_merged(name: str) -> None:
    """Whoever assigns `weight.data` is heard."""
    torch.manual_seed(0)
    model = get_peft_model(base(), METHODS[name]()).eval()
    bare, y = logits(base().eval()), logits(model)
    model.merge_adapter()
    assert sqnr(y, logits(model)) > 25 > sqnr(y, bare)
    model.unmerge_adapter()
    assert sqnr(y, logits(model)) > 25
    if name not in ("ia3", "oft"):  # they multiply, which makes half a step another's
        assert torch.equal(logits(model.unload()), bare)


def test_an_init_that_takes_the_adapter_from_the_base() -> None:
    """PiSSA writes the rest of the weight back: the sum is what it was, within rounding."""
    y = logits(base().eval())
    assert sqnr(y, logits(adapted(base(), init_lora_weights="pissa").eval())) > 25


def test_a_broken_adapter_is_refused_and_nothing_is_changed() -> None:
    model = trained()
    before = codes(model)
    model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight.data[0, 0] = (
        torch.nan
    )
    with pytest.raises(ValueError, match="seems to be broken"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    assert same(codes(model), before)


def test_what_is_merged_is_kept_by_files_and_copies(tmp_path: Path) -> None:
    model = trained().merge_and_unload()
    y = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), y)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = base().eval()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(logits(again), y)


# What PEFT trains whole, and what is skipped for it.
HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "classifier": ({"task_type": "SEQ_CLS"}, "classifier"),
    "bert.pooler": ({"modules_to_save": ["pooler"]}, "*pooler.dense"),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_trains_is_left_float(head: str) -> None:
    """Of an int8 one the bias alone was trained, without a word."""
    more, skip = HEADS[head]

    def classifier(**config: Any) -> Any:
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(num_hidden_layers=1, **TINY))
        model = qfx.quantize_(model, qfx.Config(**config))
        return adapted(model, targets=["query", "value"], **more)

    with pytest.raises(ValueError, match=r"train a module whole .* holds Linear\(in_features=64"):
        classifier()
    trained = [n for n, p in classifier(skip=[skip]).named_parameters() if p.requires_grad]
    assert any(f"{head}.modules_to_save.default." in n and n.endswith("weight") for n in trained)


def test_a_head_that_was_trained_whole_becomes_int8() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=1, **TINY))
    model = adapted(model, targets=["query"], task_type="SEQ_CLS").eval()
    y = logits(model)
    qfx.quantize_(model, qfx.Config(skip=["lora_*"]))
    assert sqnr(y, logits(model)) > 25
    head = model.base_model.model.classifier
    assert isinstance(head.modules_to_save["default"], qfx.nn.Linear)


def test_asking_a_linear_without_weight_to_train_warns() -> None:
    for module in (qfx.nn.Linear(4, 4), qfx.nn.SignLinear(4, 4, bias=False)):
        bias = ", its bias does" if module.bias is not None else ""
        with pytest.warns(UserWarning, match=rf"weight is codes and does not train{bias}\. What"):
            module.requires_grad_()
        model, quantized = nn.Sequential(module), isinstance(module, qfx.nn.Linear)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.requires_grad_(False).requires_grad_()
        assert len(said) == quantized and not any("does not" not in str(w.message) for w in said)


def test_code_that_makes_modules_is_compiled_while_wrappers_are_watched() -> None:
    """The hook that hears of PEFT's wrappers hears of every module, those of traced code too."""
    qfx.quantize_(nn.Sequential(nn.Linear(64, 32)))
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):  # which makes one
        torch.compile(lambda: model(x).sum().backward(), backend="eager")()
    assert torch.equal(model.bias.grad, torch.full((8,), 2.0))


def test_convolutions_below_adapters_become_int8() -> None:
    """The adapters train; PEFT neither puts one on an int8 convolution nor merges it, and says
    so."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1))
    x = torch.randn(2, 3, 8, 8)
    model = adapted(copy.deepcopy(net), targets=["0", "2"], init_lora_weights=False)
    with torch.no_grad():
        exact = model(x)
    qfx.quantize_(model, qfx.Config(skip=["lora_*"]))
    y = model(x)
    assert sqnr(exact, y.detach()) > 30
    y.square().mean().backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in model.named_parameters() if "lora_" in n} and trained
    bases = [layer.base_layer for layer in (model.base_model.model[0], model.base_model.model[2])]
    assert [type(base) for base in bases] == [qfx.nn.Conv] * 2
    with pytest.raises(RuntimeError):
        model.merge_adapter()
    assert torch.equal(model(x), y)
    with pytest.raises(ValueError, match=r"Target module Conv\(.* is not supported"):
        adapted(qfx.quantize_(net), targets=["0"])
