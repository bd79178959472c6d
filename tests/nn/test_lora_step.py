"""A LoRA step with everything in int8, as people take it: adapters on a frozen base with int8
gradients and int8 attention, in float32 and bfloat16, with what trainers do around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import qfx
import qfx.hf
from tests.lib.int8_calls import int8_matmuls

IDS = torch.randint(0, 100, (4, 48), generator=torch.Generator().manual_seed(0))
SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 100}
INT8 = {"scheme": "w8a8", "attention": "qfx_sdpa"}


def model(
    dtype: torch.dtype = torch.float32, scheme: str | None = None, attention: str = "sdpa"
) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZE, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    base = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(dtype)
    if scheme is not None:
        base = qfx.quantize_(base, qfx.Config(scheme=scheme, backward="int8"))
    made = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # zeros at first, behind which nothing has a gradient
            nn.init.normal_(parameter, std=0.02)
    return made.train()


def loss_of(made: Any, ids: Tensor = IDS) -> Tensor:
    loss: Tensor = made(input_ids=ids, labels=ids).loss
    return loss


def gradients(made: nn.Module) -> Tensor:
    found = [p.grad.float().ravel() for p in made.parameters() if p.grad is not None]
    return torch.cat(found)


def plain(made: Any) -> None:
    loss_of(made).backward()


def accumulated(made: Any) -> None:
    for ids in IDS.chunk(2):
        (loss_of(made, ids) / 2).backward()


def clipped(made: Any) -> None:
    plain(made)
    assert torch.nn.utils.clip_grad_norm_(made.parameters(), 1e6).isfinite()


def checkpointed(made: Any) -> None:
    made.enable_input_require_grads()
    made.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    plain(made)


def under_autocast(made: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(made)
    loss.backward()


def saved_in_int8(made: Any) -> None:
    with qfx.save_in_int8():
        loss = loss_of(made)
    loss.backward()


def compiled(made: Any) -> None:
    options = {"skip": ["lora_A", "lora_B"], "backward": "int8", "inner": "eager"}
    loss_of(torch.compile(made, backend="qfx", options=options)).backward()


def compiled_autograd(made: Any) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss_of(made).backward(), backend="eager")()


STEPS: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        plain, accumulated, clipped, checkpointed, under_autocast, saved_in_int8, compiled,
        compiled_autograd,
    )
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_near_those_of_float(dtype: torch.dtype, scheme: str, step: str) -> None:
    exact, made = model(), model(dtype, scheme, "qfx_sdpa")
    plain(exact)
    STEPS[step](made)
    torch._dynamo.reset()
    limit = 0.98 if scheme == "w8a8" else 0.9
    assert torch.cosine_similarity(gradients(made), gradients(exact), 0) > limit


def test_all_of_it_is_int8() -> None:
    """Per layer: 7 linears and an attention, forward and backward, but for the gradient of the
    embedded tokens, which nobody asks for. The first step measures attention's gradients."""
    made = model(**INT8)
    plain(made)
    _, found = int8_matmuls(plain, made)
    assert found["qfx::int8_attention"] == found["qfx::int8_attention_backward"] == 2
    assert found["qfx::linear_ste"] >= 2 * 7 - 3 and found["qfx::frozen_gradient"] >= 2 * 7 - 3


def test_checkpointing_changes_no_bit() -> None:
    grads = []
    for step in (plain, checkpointed):
        made = model(**INT8)
        if step is plain:
            made.enable_input_require_grads()
        torch.manual_seed(3)
        step(made)
        grads.append(gradients(made))
    assert torch.equal(*grads)


def test_an_optimizer_in_the_backward_pass() -> None:
    """Each parameter steps as soon as it has its gradient: the same as steps afterwards."""
    ends = []
    for during in (False, True):
        made = model(**INT8)
        trained = [p for p in made.parameters() if p.requires_grad]
        each = {p: torch.optim.SGD([p], lr=0.1) for p in trained}
        if during:
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: each[p].step())  # noqa: B023
        torch.manual_seed(3)
        plain(made)
        for optimizer in () if during else each.values():
            optimizer.step()
        ends.append(torch.cat([p.detach().ravel() for p in trained]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("saved", [False, True])
def test_it_learns_as_float_does(saved: bool) -> None:
    """Thirty steps on the same tokens."""
    losses = []
    for made in (model(), model(**INT8)):
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(30):
            with qfx.save_in_int8() if saved else nullcontext():
                loss = loss_of(made)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] < 3.5 and abs(losses[1] - losses[0]) < 0.15
