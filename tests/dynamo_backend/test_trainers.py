"""Three steps by the trainers that people have run in int8, the way that docs/training.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tests.lib.models import compiled

OPTIONS = {"minimum_gain": 0, "scheme": "w8a8-asymmetric", "inner": "eager"}
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def by_hand(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("order", ["compiled first", "prepared first"])
def test_accelerate(order: str) -> None:
    accelerator, model = Accelerator(cpu=True), net()
    prepare = accelerator.prepare_model
    model = prepare(compiled(model)) if order == "compiled first" else compiled(prepare(model))
    optimizer: Any = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for _ in range(3):
        loss = model(X).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == by_hand(compiled(net())) != by_hand(net())
    assert losses[2] < losses[0]


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=50, num_attention_heads=2, max_position_embeddings=16, **sizes)
    return BertForSequenceClassification(config)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    usual = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(str(folder), max_steps=3, logging_steps=1, **usual, **more)


DATA = [{"input_ids": torch.arange(i, i + 8), "labels": torch.tensor(i % 2)} for i in range(24)]


def logged(model: nn.Module, folder: Path) -> list[float]:
    trainer = Trainer(model=model, args=arguments(folder), train_dataset=DATA)  # type: ignore
    trainer.train()
    trainer.save_model(str(folder))
    return [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """Compiled in place, since it reads the names of forward's arguments."""
    model = bert()
    model.compile(backend="qfx", options=OPTIONS)
    steps, plain = logged(model, tmp_path), logged(bert(), tmp_path)
    assert len(steps) == 3 and steps != plain
    saved = BertForSequenceClassification.from_pretrained(tmp_path)
    assert saved.state_dict().keys() == model.state_dict().keys()


def test_what_the_page_says_is_refused(tmp_path: Path) -> None:
    """Whoever reads this fail may write shorter lines there."""
    for make in (lambda: Accelerator(dynamo_backend="qfx"),
                 lambda: logged_by_option(tmp_path)):  # fmt: skip
        with pytest.raises(ValueError, match="'QFX' is not a valid DynamoBackend"):
            make()
    with pytest.raises(ValueError, match="batch received was empty"):
        logged(compiled(bert()), tmp_path)


def logged_by_option(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # what TrainingArguments leaves behind
        for name in ("BACKEND", "MODE"):
            patch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        args = arguments(folder, torch_compile_backend="qfx")
        Trainer(model=bert(), args=args, train_dataset=DATA).train()  # type: ignore[arg-type]


def test_a_container_of_torch_is_not_compiled_in_place() -> None:
    """Dynamo does not look into torch.nn's own forwards: as the page says."""
    model = net()
    expected = model(X)
    model.compile(backend="qfx", options=OPTIONS)
    assert torch.equal(model(X), expected) and not torch.equal(compiled(net())(X), expected)
