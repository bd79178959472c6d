"""Training to the end with each option of int8 training, three seeds each: does it end where float
ends?

`digits`: the vision transformer of benchmarks/digits.py, accuracy in percent and negative log
likelihood of images it was not trained on. `decoder`: a small Llama on the bytes of news, whose
loss of other news is the likelihood. Each way is a fresh process. The weights of the model train,
in float. Int8 products are compiled, with what is combined with them; attention in int8 and
`save_in_int8` alone are eager.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import digits, smollm
from benchmarks.fresh import call
from benchmarks.question import Question, Row, chosen

SEEDS = (0, 1, 2)
BATCH, LENGTH, STEPS, RATE = 8, 128, 500, 3e-3  # of the decoder
HELD_OUT = 64  # sequences


class Way(NamedTuple):
    """`backward`: of a model that qfx compiles, attention too; "" for an eager float model.
    `attention`, `saved`: whether attention is int8 and activations are saved in int8."""

    backward: str = ""
    attention: bool = False
    saved: bool = False


WAYS = {
    "float32": Way(),
    "int8": Way("float"),
    "int8, backward too": Way("int8"),
    "attention in int8": Way(attention=True),
    "saved in int8": Way(saved=True),
    "attention in int8, saved in int8": Way(attention=True, saved=True),
    "all together": Way("int8", attention=True, saved=True),
}


def _run_of(model: nn.Module, way: Way) -> Callable[..., Any]:
    import qfx

    if way.attention:
        given: Any = qfx.nn.functional.scaled_dot_product_attention
        if way.backward:  # 16 tokens are below the break-even of compiled graphs
            given = torch.compiler.disable(given)
        F.scaled_dot_product_attention = given
    if way.backward:
        options: Any = {"backward": way.backward, "minimum_gain": 0}
        options |= {"saved_activations": "int8"} if way.saved else {}
        return torch.compile(model, backend="qfx", options=options)

    def run(*args: Any) -> Any:
        with qfx.save_in_int8() if way.saved else nullcontext():
            return model(*args)

    return run


def of_digits(way: str, seed: int) -> tuple[float, float]:
    """Returns the accuracy and the negative log likelihood after training with this seed."""
    train, test = digits.Data.load()
    torch.manual_seed(seed)
    model = digits.DigitsViT()
    digits.train(_run_of(model, WAYS[way]), model, train, epochs=30, rate=4e-3, seed=seed)
    score = digits.score(model, test)
    return score.accuracy, score.nll


class Decoder(nn.Module):
    """A Llama for bytes: [B, L] -> the mean loss of each next byte."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=128, intermediate_size=352, num_hidden_layers=2, vocab_size=256,
            num_attention_heads=2, num_key_value_heads=1, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def of_decoder(way: str, seed: int) -> tuple[None, float]:
    """Returns the loss of held-out news after training with this seed."""
    text = "\n".join(smollm.news_texts()).encode()
    rows = torch.tensor([*text[: len(text) // LENGTH * LENGTH]]).reshape(-1, LENGTH)
    held_out, rows = rows.tensor_split([HELD_OUT])
    torch.manual_seed(seed)
    model = Decoder()
    run = _run_of(model, WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for chosen_rows in torch.randint(len(rows), (STEPS, BATCH)):
        optimizer.zero_grad()
        run(rows[chosen_rows]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return None, mean(model(ids).item() for ids in held_out.split(BATCH))


SUBJECTS: dict[str, Callable[[str, int], tuple[float | None, float]]] = {
    "digits": of_digits,
    "decoder": of_decoder,
}


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the row of each way when its seeds are done."""
    for subject in chosen(options.subjects, SUBJECTS):
        for way in chosen(options.ways, WAYS):
            ends = [call(SUBJECTS[subject], way, seed) for seed in SEEDS]
            accuracies, losses = ([end[i] for end in ends] for i in (0, 1))
            yield [
                {
                    "subject": subject,
                    "way": way,
                    "loss": round(mean(losses), 4),
                    "losses": ", ".join(f"{loss:.4f}" for loss in losses),
                    **({"accuracy": mean(accuracies)} if accuracies[0] is not None else {}),
                }
            ]


QUESTION = Question(
    "Does training with int8 end where float ends?",
    tables,
    key=("subject", "way"),
    options={"subjects": list(SUBJECTS), "ways": list(WAYS)},
    rounds=1,
)
