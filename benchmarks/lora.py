"""LoRA: seconds of a step, memory, what autograd keeps, and losses on real text.

Of SmolLM2-135M, and of random weights with the sizes of Qwen3-0.6B, whose losses say nothing.

Each way is a fresh process. It trains adapters of rank 8 on all linears but the head, 4 x 128
tokens of news a step, other ones at each step, and ends with the loss of 16 passages that no step
had.
`step_s`: median processor seconds, the first three steps left out. `base_mb`: resident memory that
loading the model added. `step_mb`: the peak of the steps above it. `tensors_mb`: the most that
tensors of one more step hold above what lives between steps.
    python -m benchmarks lora [--models SmolLM2-135M] [--ways 'float32;qfx'] [--steps 200]
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import smollm
from benchmarks.fresh import FailedError, call
from benchmarks.lora_models import FOLDERS, TRAINED
from benchmarks.peak_memory import peak_mb
from benchmarks.question import Question, Row, chosen

BATCH, TOKENS, HELD_OUT = 4, 128, 16
RATE, UNTIMED, AVERAGED = 1e-3, 3, 8  # of steps: the first, and those whose losses are averaged
ADAPTERS = {"lora_A", "lora_B"}


class Way(NamedTuple):
    """`scheme`, `backward`: of `qfx.Config`; None for a base that is not of qfx. `backend`: of
    `torch.compile`. `library`: the package that quantizes the base to int8 in the place of qfx.
    `saved`: activations in int8. `attention`: in int8. `chunked`: under `qfx.chunked_loss`."""

    dtype: torch.dtype = torch.float32
    scheme: str | None = None
    backward: str = "float"
    backend: str | None = None
    library: str = ""
    saved: bool = False
    attention: bool = False
    chunked: bool = False


BF16 = torch.bfloat16
WAYS = {
    "float32": Way(),
    "float32 Inductor": Way(backend="inductor"),
    "qfx": Way(scheme="w8a8"),
    "qfx int8 backward": Way(scheme="w8a8", backward="int8"),
    "qfx int8 backward, compiled": Way(scheme="w8a8", backward="int8", backend="qfx"),
    "qfx int8 backward, compiled, saved in int8": Way(
        scheme="w8a8", backward="int8", backend="qfx", saved=True
    ),
    "qfx int8 backward, saved in int8": Way(scheme="w8a8", backward="int8", saved=True),
    "qfx int8 backward and attention": Way(scheme="w8a8", backward="int8", attention=True),
    "qfx int8 backward and attention, saved in int8": Way(
        scheme="w8a8", backward="int8", attention=True, saved=True
    ),
    "qfx int8 backward and attention, saved in int8, loss in chunks": Way(
        scheme="w8a8", backward="int8", attention=True, saved=True, chunked=True
    ),
    "float32, loss in chunks": Way(chunked=True),
    "qfx w4a8 int8 backward": Way(scheme="w4a8", backward="int8"),
    "qfx w4a8 int8 backward and attention": Way(scheme="w4a8", backward="int8", attention=True),
    "bitsandbytes int8": Way(library="bitsandbytes"),
    "torchao int8 weights": Way(library="torchao"),
    "bfloat16": Way(BF16),
    "bfloat16 qfx int8 backward": Way(BF16, "w8a8", "int8"),
    "bfloat16 qfx int8 backward and attention": Way(BF16, "w8a8", "int8", attention=True),
    "bfloat16 qfx int8 backward and attention, saved in int8": Way(
        BF16, "w8a8", "int8", attention=True, saved=True
    ),
    "bfloat16 qfx int8 backward and attention, saved in int8, loss in chunks": Way(
        BF16, "w8a8", "int8", attention=True, saved=True, chunked=True
    ),
    "bfloat16 qfx w4a8 int8 backward and attention": Way(BF16, "w4a8", "int8", attention=True),
    "bfloat16 qfx int8 backward, compiled": Way(BF16, "w8a8", "int8", "qfx"),
    "bfloat16 qfx int8 backward, compiled, saved in int8": Way(
        BF16, "w8a8", "int8", "qfx", saved=True
    ),
}


def passages(tokenizer: Any, count: int) -> tuple[Tensor, Tensor]:
    """Returns news, one text after the other, as int64 [count, TOKENS] to train on, from the
    beginning again where they end, and [HELD_OUT, TOKENS] of others."""
    stream = [t for line in smollm.news_texts() for t in tokenizer(line).input_ids]
    rows = torch.tensor(stream[: len(stream) // TOKENS * TOKENS]).reshape(-1, TOKENS)
    held_out, rows = rows.tensor_split([HELD_OUT])
    return rows[torch.arange(count) % len(rows)], held_out


def _model(way: Way, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import qfx
    import qfx.hf

    torch.manual_seed(0)
    given = _quantization(way.library)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=way.dtype, **given)
    model.config.use_cache = False
    if way.attention:
        model.set_attn_implementation(qfx.hf.attention_function.NAME)
    for parameter in model.parameters() if not way.library else ():
        parameter.data = parameter.data.clone()  # a mapped page would keep the file resident
    if way.scheme is not None:
        model = qfx.quantize_(model, qfx.Config(scheme=way.scheme, backward=way.backward))
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def _quantization(library: str) -> dict[str, Any]:
    """Returns the arguments of from_pretrained by which another library quantizes."""
    if library == "bitsandbytes":
        from transformers import BitsAndBytesConfig

        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    return {}


def _compiled(model: Any, way: Way) -> Callable[..., Any]:
    if way.backend is None:
        return model  # type: ignore[no-any-return]
    if way.backend != "qfx":
        return torch.compile(model, backend=way.backend)
    options: Any = {"skip": [*ADAPTERS], "backward": way.backward}
    options |= {"saved_activations": "int8"} if way.saved else {}
    return torch.compile(model, backend=way.backend, options=options)


def measured(name: str, steps: int, of: str = TRAINED) -> Row:
    """Trains the model `of` in this process, the way `name`."""
    from transformers import AutoTokenizer

    import qfx

    way, folder = WAYS[name], FOLDERS[of]()
    tokenizer = AutoTokenizer.from_pretrained(smollm.converted())
    texts, others = passages(tokenizer, steps * BATCH)
    before = _memory("VmRSS")
    model = _model(way, folder)
    loaded, run = _memory("VmRSS"), _compiled(model, way)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)

    def step(ids: Tensor) -> float:
        with (
            qfx.save_in_int8() if way.saved and not way.backend else nullcontext(),
            qfx.chunked_loss(model) if way.chunked else nullcontext(),
        ):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    seconds, losses = [], []
    for ids in texts.split(BATCH):
        start = time.process_time()
        losses.append(step(ids))
        seconds.append(time.process_time() - start)
    peak = _memory("VmHWM")
    tensors = round(peak_mb(lambda: step(texts[:BATCH])))
    saved = qfx.saved_tensors(run, input_ids=texts[:BATCH], labels=texts[:BATCH]).bytes
    with torch.no_grad():
        rows = others.split(BATCH)
        held_out = mean(model.eval()(input_ids=ids, labels=ids).loss.item() for ids in rows)
    return {
        "step_s": round(median(seconds[UNTIMED:]), 3),
        "base_mb": round((loaded - before) / 1e6),
        "step_mb": round((peak - loaded) / 1e6),
        "tensors_mb": tensors,
        **({"saved_mb": round(saved / 1e6)} if way.backend or not way.saved else {}),
        "loss_first": round(mean(losses[:AVERAGED]), 4),
        "loss_middle": round(mean(losses[: steps // 2][-AVERAGED:]), 4),
        "loss_last": round(mean(losses[-AVERAGED:]), 4),
        "loss_held_out": round(held_out, 4),
        "steps": steps,
    }


def _memory(name: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the row of each way when it is done."""
    for model, way in product(chosen(options.models, FOLDERS), chosen(options.ways, WAYS)):
        base = way if model == TRAINED else f"{model}, {way}"
        try:
            yield [{"base": base, **call(measured, way, options.steps, model)}]
        except FailedError as why:
            yield [{"base": base, "reason": str(why)}]


QUESTION = Question(
    "What does a LoRA step on an int8 base cost, and what does the model learn?",
    tables,
    key=("base", "steps"),
    options={"models": [TRAINED], "ways": list(WAYS), "steps": 30},
    rounds=1,
)
