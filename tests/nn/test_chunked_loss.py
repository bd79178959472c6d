"""qfx.chunked_loss: losses and gradients are those of all logits, which are never held; everything
else reads plain logits."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import qfx
from qfx.nn import chunked_cross_entropy
from qfx.nn.deferred_logits import DeferredLogits
from tests.lib.live_bytes import most_bytes

CLASSES = 3000
LABELS = torch.randint(0, CLASSES, (2, 40), generator=torch.Generator().manual_seed(0))
LABELS[0, :7] = -100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK", 33 * CLASSES)


class Model(nn.Module):
    """A body, a head, and a loss of both."""

    def __init__(self, head: nn.Module, loss: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head, self.loss = nn.Linear(32, 48), head, loss
        self.x = torch.randn(2, 40, 32)

    def forward(self) -> Any:
        return self.loss(self.lm_head(self.body(self.x)))


def head(kind: str) -> nn.Module:
    torch.manual_seed(1)
    linear = nn.Linear(48, CLASSES, bias=kind == "with a bias")
    if kind.startswith("int8"):
        backward = "int8" if kind.endswith("backward") else "float"
        config = qfx.Config(backward=backward)
        return qfx.quantize_(nn.Sequential(linear.requires_grad_(False)), config)[0]
    if kind == "adapters":
        adapted: Any = get_peft_model(nn.Sequential(linear), LoraConfig(target_modules=["0"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        return adapted.base_model.model[0]  # type: ignore[no-any-return]
    return linear.requires_grad_(kind != "frozen")


def step(model: nn.Module, chunked: bool) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(2)
    if chunked:
        with qfx.chunked_loss(model, model.lm_head):  # type: ignore[arg-type]
            loss = model()
    else:
        loss = model()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def same(model: nn.Module, tolerance: float = 1e-5) -> None:
    """The loss and the gradients in chunks are those of all logits."""
    (expected, gradients), (loss, found) = step(model, False), step(model, True)
    assert loss.dtype == expected.dtype and torch.allclose(loss, expected, rtol=tolerance)
    assert len(found) == len(gradients) > 0
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


def mean(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), LABELS.view(-1))


HEADS = ("float", "with a bias", "frozen", "int8", "adapters")


@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_are_those_of_all_logits(kind: str) -> None:
    model = Model(head(kind), mean)
    same(model)
    model.body.requires_grad_(False)
    if kind in ("float", "adapters"):
        same(model)  # of the head alone


def test_stochastic_gradients_of_an_int8_head() -> None:
    model = Model(head("int8 backward"), mean)
    (expected, gradients), (loss, found) = step(model, False), step(model, True)
    assert torch.allclose(loss, expected)
    assert torch.cosine_similarity(found[0].ravel(), gradients[0].ravel(), 0) > 0.97


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "of transformers": lambda y: F.cross_entropy(y.float().view(-1, CLASSES), LABELS.view(-1)),
    "shifted": lambda y: F.cross_entropy(
        y[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].reshape(-1)
    ),
    "flat": lambda y: F.cross_entropy(y[:, 1:].flatten(0, 1), LABELS[:, 1:].flatten()),
    "sum": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.ravel(), reduction="sum") / 7,
    "smoothed": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.ravel(), label_smoothing=0.1),
    "another index": lambda y: F.cross_entropy(
        y.reshape(80, CLASSES), LABELS.clamp(min=0).ravel(), ignore_index=0
    ),
    "a module": lambda y: nn.CrossEntropyLoss()(y.view(-1, y.shape[-1]), LABELS.ravel()),
    "by name": lambda y: F.cross_entropy(input=y.view(-1, CLASSES), target=LABELS.ravel()),
    "one sequence": lambda y: F.cross_entropy(y[1], LABELS[1]),
    "where it is": lambda y: F.cross_entropy(y.to("cpu").view(-1, CLASSES), LABELS.ravel()),
    "two losses": lambda y: mean(y) + F.cross_entropy(y[0], LABELS[1], reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_need_no_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(head("float"), LOSSES[name])
    same(model)
    monkeypatch.setattr(DeferredLogits, "computed", None)
    step(model, True)


READS: dict[str, Callable[[Tensor], Any]] = {
    "each row's loss": lambda y: F.cross_entropy(
        y.view(-1, CLASSES), LABELS.ravel(), reduction="none"
    ).sum(),
    "class weights": lambda y: F.cross_entropy(
        y.view(-1, CLASSES), LABELS.ravel(), weight=torch.linspace(1, 2, CLASSES)
    ),
    "classes before tokens": lambda y: F.cross_entropy(y.transpose(1, 2), LABELS),
    "probabilities": lambda y: F.cross_entropy(
        y.view(-1, CLASSES), F.one_hot(LABELS.clamp(min=0).ravel(), CLASSES).float()
    ),
    "softcapped": lambda y: mean(torch.tanh(y / 30) * 30),
    "scaled": lambda y: mean(y * 0.5),
    "scaled from the left": lambda y: mean(0.5 * y),
    "regularised": lambda y: mean(y) + 1e-4 * y.logsumexp(-1).square().mean(),
    "a metric first": lambda y: mean(y) * (1 + 0 * (y.argmax(-1) == LABELS).float().mean()),
    "fewer classes": lambda y: F.cross_entropy(y[..., :2999].flatten(0, 1), LABELS.ravel() % 2999),
    "other classes": lambda y: mean(y[..., torch.arange(CLASSES).flip(0)]),
    "chosen tokens": lambda y: F.cross_entropy(y[LABELS >= 0], LABELS[LABELS >= 0]),
    "negative log likelihood": lambda y: F.nll_loss(
        F.log_softmax(y, -1).view(-1, CLASSES), LABELS.ravel()
    ),
}


def _written(y: Tensor) -> Tensor:
    y = y.view(2, 40, CLASSES)
    rows = y[:, :20]
    y[..., :100] = -30.0
    return mean(y) + F.cross_entropy(rows.flatten(0, 1), LABELS[:, :20].flatten())


def _written_after_a_copy(y: Tensor) -> Tensor:
    rows = y[:, :-1].contiguous()
    y.mul_(0)
    return F.cross_entropy(rows.view(-1, CLASSES), LABELS[:, 1:].flatten())


def _perplexity_without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        perplexity = mean(y).exp()
    return mean(y) + 0 * perplexity


def _stacked(y: Tensor) -> Tensor:
    return mean(torch.cat([y[:1], y[1:]]))


MORE_READS = {
    "written": _written,
    "written after a copy": _written_after_a_copy,
    "perplexity": _perplexity_without_gradients,
    "stacked": _stacked,
}


@pytest.mark.parametrize("name", [*READS, *MORE_READS])
def test_what_reads_logits_gets_them(name: str) -> None:
    functions = {**READS, **MORE_READS}
    same(Model(head("float"), functions[name]))


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 2**32))
def test_sizes_of_chunks(rows: int, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    linear, target = nn.Linear(16, 40), torch.randint(-1, 40, (rows,))
    x = torch.randn(rows, 16, requires_grad=True)
    chunked_cross_entropy.CHUNK, before = 40 * chunk, chunked_cross_entropy.CHUNK
    try:
        how = (40, torch.float32, -1, 0.0, False, [*linear.parameters()])
        loss = chunked_cross_entropy.chunked_cross_entropy(linear, x, target, *how)
    finally:
        chunked_cross_entropy.CHUNK = before
    expected = F.cross_entropy(linear(x), target, ignore_index=-1, reduction="sum")
    assert torch.allclose(loss, expected, rtol=1e-5)
    of = [x, *linear.parameters()]
    found, exact = torch.autograd.grad(3 * loss, of), torch.autograd.grad(3 * expected, of)
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_and_autocast(dtype: torch.dtype) -> None:
    model = Model(head("float"), LOSSES["of transformers"])
    with torch.autocast("cpu", dtype):
        same(model, 0.03)
    model.to(dtype)
    model.x = model.x.to(dtype)
    same(model, 0.03)


def test_memory_is_that_of_a_chunk() -> None:
    """Of 40 chunks: less than those of four."""
    model = Model(
        head("frozen"), lambda y: F.cross_entropy(y, LABELS.clamp(min=0).repeat(16, 1).ravel())
    )
    model.x = torch.randn(40 * 32, 32)
    step(model, True)
    whole = 4 * CLASSES * len(model.x)
    assert most_bytes(lambda: step(model, False)) > whole
    assert most_bytes(lambda: step(model, True)) < whole / 5


def llama(**kwargs: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": CLASSES}
    config = LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=2, **kwargs)
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_with_adapters_on_int8(tied: bool) -> None:
    model = qfx.quantize_(llama(tie_word_embeddings=tied))
    peft: Any = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    ids = LABELS.clamp(min=0)
    exact = peft(input_ids=ids, labels=LABELS)
    exact.loss.backward()
    expected = [p.grad.clone() for p in peft.parameters() if p.grad is not None]
    peft.zero_grad()
    with qfx.chunked_loss(peft), qfx.save_in_int8():
        out = peft(input_ids=ids, labels=LABELS)
    assert out.logits is None and out["loss"] is out.loss and "logits" not in out
    out.loss.backward()
    found = [p.grad for p in peft.parameters() if p.grad is not None]
    assert torch.allclose(out.loss, exact.loss) and len(found) == len(expected)
    both = [torch.cat([g.ravel() for g in each]) for each in (expected, found)]
    assert torch.cosine_similarity(*both, 0) > 0.999


def test_other_calls_are_as_before() -> None:
    model = llama()
    ids = LABELS.clamp(min=0)
    compiled = torch.compile(model, backend="eager")
    with qfx.chunked_loss(model):
        with torch.no_grad():
            assert type(model(ids).logits) is Tensor
            model.generate(ids[:1, :4], max_new_tokens=2)
        model.requires_grad_(False)
        assert type(model(ids).logits) is Tensor
        model.requires_grad_(True)
        assert type(compiled(ids).logits) is type(model(ids).logits) is Tensor
        assert "forward" not in vars(model.lm_head)
    assert type(model(ids).logits) is Tensor and "forward" not in vars(model.lm_head)


def test_a_forward_that_was_replaced_is_called_and_comes_back() -> None:
    model, calls = Model(head("float"), mean), list[int]()
    own = model.lm_head.forward

    def forward(x: Tensor) -> Tensor:
        calls.append(len(x))
        return own(x)  # type: ignore[no-any-return]

    model.lm_head.forward = forward  # type: ignore[method-assign]
    same(model)
    assert model.lm_head.forward is forward and calls == [2, 33, 33, 14]
    with pytest.raises(ZeroDivisionError), qfx.chunked_loss(model, model.lm_head):
        raise ZeroDivisionError
    assert model.lm_head.forward is forward


def test_hooks_of_the_head_see_its_logits() -> None:
    model, seen = Model(head("float"), mean), list[Any]()
    model.lm_head.register_forward_hook(lambda module, inputs, y: seen.append(y.mean()))
    same(model)
    assert torch.allclose(*seen) and type(seen[1]) is Tensor


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (None, "Linear does not say which.*head=model.lm_head"),
        (nn.ReLU(), "is ReLU; heads are nn.Linear"),
    ],
)
def test_models_without_a_head_are_refused(head: nn.Module | None, text: str) -> None:
    with pytest.raises(ValueError, match=text), qfx.chunked_loss(nn.Linear(2, 2), head):
        pass


def test_a_model_without_a_loss_returns_plain_logits() -> None:
    wraps = (lambda y: y, lambda y: (y, 1), lambda y: {0: [y]}, lambda y: OrderedDict(y=y))
    for wrap in wraps:
        model = Model(head("float"), wrap)
        with qfx.chunked_loss(model, model.lm_head):
            (found,) = tree_leaves(model())[:1]
        assert type(found) is Tensor and found.requires_grad
        assert torch.equal(found, tree_leaves(model())[0])


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.expand(ctx.shape)


def test_functions_that_hide_from_torch_function_are_refused() -> None:
    """Not: lose the gradient."""
    model = Model(head("float"), lambda y: Fused.apply(y) + 0)
    with qfx.chunked_loss(model, model.lm_head):
        loss = model()
    with pytest.raises(RuntimeError, match="a gradient came to logits that were not computed"):
        (loss + model.body.weight.sum()).backward()


def test_logits_that_were_not_kept_say_so() -> None:
    kept: list[Tensor] = []
    model = Model(head("float"), lambda y: [kept.append(y), mean(y)][1])
    step(model, True)
    with pytest.raises(RuntimeError, match="their loss was computed in chunks"):
        kept[0].sum()


def _metric_without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        right = (y.argmax(-1) == LABELS).float().mean()
    return mean(y) + 0 * right


def test_a_metric_without_gradients_cuts_nothing() -> None:
    same(Model(head("float"), _metric_without_gradients))


def test_logits_of_which_no_loss_was_computed_are_returned_beside_a_loss() -> None:
    model = Model(head("float"), lambda y: y)
    model.loss = lambda y: (mean(y), model.lm_head(model.body(model.x) * 2))
    with qfx.chunked_loss(model, model.lm_head):
        _, found = model()
    assert type(found) is Tensor and torch.equal(found, model()[1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing_behind(error: type[BaseException]) -> None:
    def fails(y: Tensor) -> Tensor:
        raise error

    model = Model(head("float"), fails)
    with pytest.raises(error), qfx.chunked_loss(model, model.lm_head):
        model()
    assert "forward" not in vars(model.lm_head) and not model._forward_hooks


def test_contexts_in_each_other() -> None:
    model = Model(head("float"), mean)
    with qfx.chunked_loss(model, model.lm_head):
        same(model)
        assert "forward" not in vars(model.lm_head)
    same(model)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_that_of_the_head(inside: bool) -> None:
    """Autocast around the head alone, or around all but the head."""

    class Mixed(Model):
        def forward(self) -> Any:
            h = self.body(self.x)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                y = self.lm_head(h.float())
            return mean(y.float()), y.dtype

    model = Mixed(head("float"), mean)
    found = []
    for chunked in (False, True):
        context = qfx.chunked_loss(model, model.lm_head) if chunked else nullcontext()
        with context, torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            found.append(model())
    (exact, dtype), (loss, other) = found
    assert dtype == other == (torch.bfloat16 if inside else torch.float32)
    assert torch.allclose(loss, exact, rtol=1e-5)


def test_an_input_that_was_changed_in_place_is_refused() -> None:
    model = Model(head("frozen"), mean)

    def changed(y: Tensor) -> Tensor:
        with torch.no_grad():
            y.x.relu_()  # type: ignore[attr-defined]
        return mean(y)

    model.loss = changed
    with pytest.raises(RuntimeError, match="input of the head was changed in place"):
        step(model, True)


def test_a_head_without_gradients_of_its_own() -> None:
    """Adapters that are merged train, but the head does not use them."""
    model = llama()
    peft: Any = get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"]))
    peft.merge_adapter()
    ids = LABELS.clamp(min=0)
    with qfx.chunked_loss(peft):
        found = peft(input_ids=ids, labels=LABELS).loss
    assert torch.allclose(found, peft(input_ids=ids, labels=LABELS).loss)


def test_a_head_with_a_weight_of_a_graph_computes_its_logits() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.utils.weight_norm(nn.Linear(48, CLASSES))
    same(Model(normed, mean))


def test_a_compiled_head_computes_its_logits() -> None:
    model = Model(head("float"), mean)
    model.lm_head.compile(backend="eager")
    same(model)


def test_a_model_without_values() -> None:
    model = llama().to("meta")
    ids = LABELS.clamp(min=0).to("meta")
    with qfx.chunked_loss(model):
        assert model(input_ids=ids, labels=ids).logits.is_meta


def test_a_compiled_model_computes_its_logits() -> None:
    """Given as the wrapper that torch.compile returns."""
    model: Any = torch.compile(llama(), backend="eager")
    ids = LABELS.clamp(min=0)
    exact = model(input_ids=ids, labels=ids)
    with qfx.chunked_loss(model):
        found = model(input_ids=ids, labels=ids)
    assert torch.equal(found.loss, exact.loss) and torch.equal(found.logits, exact.logits)


def test_a_dtype_that_rounds_logits_computes_them() -> None:
    same(Model(head("float"), lambda y: mean(y.to(torch.bfloat16).float())))


def test_no_row_counts() -> None:
    """The loss is NaN, as that of all logits, and the gradients are zero."""
    nothing = torch.full((80,), -100)
    model = Model(head("float"), lambda y: F.cross_entropy(y.view(-1, CLASSES), nothing))
    loss, grads = step(model, True)
    assert loss.isnan() and all(not grad.any() for grad in grads)


def test_a_parameter_that_the_head_does_not_use() -> None:
    linear: Any = head("float")
    linear.spare = nn.Parameter(torch.ones(3))
    model = Model(linear, mean)
    same(model)
    assert linear.spare.grad is None


def test_a_head_that_was_replaced_or_given_for_one_call() -> None:
    model = llama()
    ids = LABELS.clamp(min=0)
    with qfx.chunked_loss(model):
        model.requires_grad_(False)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.lm_head.weight.grad is not None
        given = {"lm_head.weight": model.lm_head.weight.detach().clone().requires_grad_()}
        torch.func.functional_call(model, given, (ids,), {"labels": ids}).loss.backward()
    assert torch.equal(given["lm_head.weight"].grad, model.lm_head.weight.grad)


def test_a_copy_made_inside_is_a_model_of_its_own() -> None:
    model = llama()
    with qfx.chunked_loss(model):
        other = copy.deepcopy(model)
    assert other(LABELS.clamp(min=0), labels=LABELS).logits is not None
    nn.init.zeros_(other.lm_head.weight)
    assert not other(LABELS.clamp(min=0)).logits.any()


def test_backward_hooks_of_the_head_run() -> None:
    model, seen = Model(head("float"), mean), list[Any]()
    model.lm_head.register_full_backward_hook(lambda module, of_x, of_y: seen.append(of_y[0].shape))
    same(model)
    assert seen == 2 * [(2, 40, CLASSES)]


def test_a_head_that_trains_on_few_tokens_computes_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradients take more than the logits would."""
    monkeypatch.setattr(DeferredLogits, "of", None)
    model = Model(head("float"), lambda y: F.cross_entropy(y[0], LABELS[0, :35]))
    model.x = model.x[:, :35]
    step(model, True)


def test_the_loss_is_summed_in_float32_and_float32_under_autocast() -> None:
    model = Model(head("frozen"), lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.ravel()))
    with torch.autocast("cpu", torch.float16):
        assert step(model, True)[0].dtype == torch.float32
    model.to(torch.bfloat16)
    model.x = torch.randn(1, 2**14, 32, dtype=torch.bfloat16)
    model.loss = lambda y: F.cross_entropy(y[0], LABELS.ravel()[7:8].expand(2**14))
    (exact, _), (found, _) = step(model, False), step(model, True)
    assert torch.allclose(found, exact, rtol=0.01)


def test_second_gradients_are_refused() -> None:
    model = Model(head("float"), mean)
    with qfx.chunked_loss(model, model.lm_head):
        loss = model()
    (grad,) = torch.autograd.grad(loss, model.body.weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="A chunked loss has no second derivative: its"):
        grad.square().sum().backward()
