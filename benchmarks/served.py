"""Throughput of vLLM with and without qfx: tokens a second, seconds to the first token, memory.

Each way is a process of an interpreter that has vLLM and qfx (docs/vllm.md), which stays alive, and
they answer the same requests in turns: prompts of mixed lengths, 32 new tokens each, without
sharing of prefixes. `first_s`: the median over requests that were sent together. `--prompt`: the
length of all prompts instead.
    python -m benchmarks served --python .venv-vllm/bin/python [--models smollm2] [--ways ...]
        [--requests 1,8,32] [--prompt 4096] [--rounds 3] [--threads 1] [--save]
"""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compressed import compressed
from benchmarks.decode_models import MODELS, text
from benchmarks.question import Question, Row, chosen
from benchmarks.worker import ask

LENGTHS, NEW = (16, 32, 64, 128, 192, 256), 32  # tokens: of the prompts in turn, new ones
KEY = ("model", "way", "requests")
LOG = 400  # characters of a log that are shown


class Served(NamedTuple):
    """A way to serve a model: arguments of `vllm.LLM`, and whether the checkpoint is the one of
    int8 codes in the form of compressed-tensors."""

    arguments: dict[str, Any]
    compressed: bool = False
    environment: Mapping[str, str] = {}


def _qfx(scheme: str, **more: Any) -> Served:
    options = {"quantization_config": {"quant_method": "qfx", "scheme": scheme}}
    return Served({"dtype": "bfloat16", "hf_overrides": options, **more})


INT8_CACHE = {"kv_cache_dtype": "int8_per_token_head"}


WAYS = {
    "bfloat16": Served({"dtype": "bfloat16"}),
    "float32": Served({"dtype": "float32"}),
    "compressed-tensors W8A8": Served({"dtype": "bfloat16"}, compressed=True),
    "compressed-tensors W8A8, qfx": Served(
        {"dtype": "bfloat16"},
        compressed=True,
        environment={"VLLM_DISABLED_KERNELS": "CPUInt8ScaledMMLinearKernel"},
    ),
    "qfx w8a8": _qfx("w8a8"),
    "qfx w4a8": _qfx("w4a8"),
    "qfx w8a8, int8 cache": _qfx("w8a8", **INT8_CACHE),
    "bfloat16, int8 cache": Served({"dtype": "bfloat16", **INT8_CACHE}),
    "bfloat16, AVX2": Served({"dtype": "bfloat16"}, environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "qfx w8a8, AVX2": _qfx("w8a8")._replace(environment={"QFX_CPU_ISA": "avx2"}),
}


class Engine:
    """A process that serves one model in one way."""

    def __init__(self, way: Served, folder: Path, python: str, threads: int, most: int) -> None:
        folder = compressed(folder) if way.compressed else folder
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("served_engine.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **settings, **way.environment},
        )  # fmt: skip
        self.ask({"model": str(folder), "max_model_len": most, **way.arguments})

    def ask(self, question: Any) -> Any:
        """Returns the answer to a line of JSON. Raises RuntimeError, with the end of what the
        process printed, if it ends instead."""
        try:
            return ask(self.process, question)
        except RuntimeError as why:
            raise RuntimeError(f"vLLM ended: ...{str(why)[-LOG:]}") from None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def prompts(folder: Path, requests: int, length: int = 0) -> list[list[int]]:
    """Returns texts of `length` tokens, of mixed ones if it is 0, as ids of tokens."""
    lengths = (length,) if length else LENGTHS
    told = text(folder, requests, max(lengths)).tolist()
    return [ids[: lengths[i % len(lengths)]] for i, ids in enumerate(told)]


def rows(model: str, options: Namespace) -> list[Row]:
    """Returns a row for each way and number of requests, of medians over rounds."""
    folder, length = MODELS[model](), options.prompt
    how = (folder, options.python, options.threads, max(512, length + NEW))
    model += f", prompts of {length:,} tokens" if length else ""
    engines: dict[str, Engine] = {}
    found: list[Row] = []
    try:
        for name in chosen(options.ways, WAYS):
            try:
                engines[name] = Engine(WAYS[name], *how)
            except RuntimeError as why:
                row = {"model": model, "way": name, "reason": str(why)}
                found += [{**row, "requests": count} for count in options.requests]
        for count in options.requests:
            asked = {"prompts": prompts(folder, count, length), "new": NEW}
            for engine in engines.values():
                engine.ask(asked)  # memory is taken, and graphs of this size exist
            answers: dict[str, list[Row]] = {name: [] for name in engines}
            for _ in range(options.rounds):
                for name, engine in engines.items():
                    answers[name].append(engine.ask(asked))
            found += [_row(model, name, count, each) for name, each in answers.items()]
    finally:
        for engine in engines.values():
            engine.end()
    return found


def _row(model: str, name: str, count: int, answers: list[Row]) -> Row:
    seconds = median(a["seconds"] for a in answers)
    return {
        "model": model,
        "way": name,
        "requests": count,
        "tokens_per_s": round(count * NEW / seconds, 1),
        "first_s": round(median(a["first_s"] for a in answers), 3),
        "mb": round(answers[-1]["mb"]),
    }


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the rows of each model."""
    for model in chosen(options.models, MODELS):
        yield rows(model, options)


QUESTION = Question(
    "How fast is vLLM with and without qfx?",
    tables,
    KEY,
    {
        "models": ["smollm2", "qwen3"],
        "ways": [*WAYS],
        "requests": [1, 8, 32],
        "prompt": 0,
        "python": ".venv-vllm/bin/python",
    },
    rounds=3,
)
