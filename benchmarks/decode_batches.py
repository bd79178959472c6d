"""Steps of several sequences at once: tokens per second by batch size, context and dtype.

A float32 and a bfloat16 model with the same weights decode by programs, in turn, beside llama.cpp.
The cache of programs is filled with random keys and values: reading sixteen sequences of 4,096
tokens would take longer than all steps. llama.cpp reads real text, of at most `--peer-tokens` in
total. With one thread the times are processor seconds.
    python -m benchmarks.decode_batches [--model qwen3] [--batch 1,8] [--context 128,1024,4096]
        [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

import qfx
from benchmarks.bandwidth import rate, readers, weights
from benchmarks.common import Timing, keep_memory, machine, merge
from benchmarks.decode import Worker
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_static import Case, load
from qfx.nn.stored_modules import stored_linears
from qfx.programs.streaming import TRIALS

STEPS, TURN = 12, 3  # timed steps of a round, and those before them
LLAMA = "llama.cpp Q8_0"
KEY = ("model", "way", "batch", "context", "threads")
Row = dict[str, Any]


class Texts:
    """Sequences with a context of `context` random tokens each."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        from transformers import DynamicCache

        self.model = model
        self.token = torch.full((batch, 1), 7)
        self.cache: Any = DynamicCache(config=model.config)
        self._step()
        layer: Any
        for layer in self.cache.layers:
            drawn = torch.randn(2, batch, layer.shape[0], context - 1, layer.shape[1])
            layer.update(*drawn)
        self.run(TRIALS)  # in which programs choose how weights are fetched

    def _step(self) -> None:
        self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)

    def run(self, steps: int) -> list[float]:
        """Returns the seconds of each step."""
        found = []
        for _ in range(steps):
            start = _now()
            self._step()
            found.append(_now() - start)
            self.cache.crop(-1)
        return found


def _now() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def models(folder: Path) -> dict[str, Any]:
    """Returns the quantized models, by the dtype of what stays float."""
    case = Case(folder, 1, 1, 1)
    return {
        "qfx w8a8": qfx.quantize_(load(case)),
        "qfx w8a8 bfloat16": qfx.quantize_(load(case).to(torch.bfloat16)),
    }


def read_mb(model: Any, batch: int, context: int) -> tuple[float, float]:
    """Returns the megabytes that a step has to read: int8 weights, and the keys and values that its
    layers see."""
    stored = {t.data_ptr(): t.nbytes for _, m in stored_linears(model) for t in m.buffers()}
    config, steps = model.config, model.forward
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(steps.shapes)
    held = 0
    for kind, (heads, d) in zip(kinds, steps.shapes, strict=True):
        seen = min(context, config.sliding_window) if kind == "sliding_attention" else context
        held += seen * heads * sum(d * bits // 8 + (4 if bits == 8 else 8) for bits in steps.bits)
    return sum(stored.values()) / 1e6, batch * held / 1e6


def measure(
    name: str, made: dict[str, Any], batches: list[int], context: int, rounds: int, peer: int
) -> list[Row]:
    """Returns a row for each way and batch size. `share`: the fraction of the gain over one
    sequence that the bytes allow, each at the read bandwidth measured at the same time."""
    threads = torch.get_num_threads()
    for model in made.values():
        qfx.compile_for_generate(model, max_length=context + 16, batch_sizes=batches)
    rows: list[Row] = []
    for batch in batches:
        head = {"model": name, "batch": batch, "context": context, "threads": threads}
        seconds, read = _rounds(MODELS[name](), made, batch, context, rounds, peer)
        for way, samples in seconds.items():
            step = Timing.of(samples)
            row = {"way": way, **head, "step_ms": round(1e3 * step.median, 3)}
            row |= {"tokens_s": round(batch / step.median, 1), "spread": round(step.spread, 3)}
            if way in made:
                row["weights_mb"], row["cache_mb"] = read_mb(made[way], batch, context)
                row["read_gb_s"] = round(read, 2)
                row["of_read"] = round(_read_ms(row) / (1e3 * step.median), 3)
                alone = [r for r in (*rows, row) if r["way"] == way and r["batch"] == 1]
                row |= _share(alone[0], row) if alone else {}
            rows.append(row)
    return rows


def _rounds(
    folder: Path, made: dict[str, Any], batch: int, context: int, rounds: int, peer_tokens: int
) -> tuple[dict[str, list[float]], float]:
    """Returns the seconds of a step by way, one for each round, and the GB/s of reading memory."""
    turn, read = cycle(weights(512)), list[float]()
    texts = {way: Texts(model, batch, context) for way, model in made.items()}
    seconds: dict[str, list[float]] = {way: [] for way in texts}
    with tempfile.TemporaryDirectory() as place:
        peers = []
        if batch * context <= peer_tokens:
            case, path = Case(folder, batch, context, STEPS + TURN), Path(place) / "text"
            torch.save(text(folder, batch, context + case.new), path)
            peers.append(Worker(LLAMA, case, path, torch.get_num_threads()))
        for _ in range(rounds):
            for way, each in texts.items():
                seconds[way].append(median(each.run(STEPS + TURN)[TURN:]))
            for peer in peers:
                if answer := peer.ask("round"):
                    seconds.setdefault(LLAMA, []).append(answer["step_s"])
            rates = [[rate(reader, turn) for _ in range(5)] for reader in readers().values()]
            read.append(max(map(median, rates)))
        for peer in peers:
            peer.process.communicate()
            if peer.reason:
                print(f"no {LLAMA}: {peer.reason}")
    return seconds, median(read)


def _read_ms(row: Row) -> float:
    """Returns the milliseconds to read the weights and the caches of a step."""
    return (row["weights_mb"] + row["cache_mb"]) / row["read_gb_s"]


def _share(one: Row, many: Row) -> Row:
    """Returns `gain`: tokens per second over those of one sequence; `allowed`: the gain that the
    bytes of a step allow; `share`: their ratio."""
    allowed = many["batch"] / one["batch"] * _read_ms(one) / _read_ms(many)
    gain = many["tokens_s"] / one["tokens_s"]
    return {
        "gain": round(gain, 2),
        "allowed": round(allowed, 2),
        "share": round(gain / allowed, 3),
    }


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--batch", type=_numbers, default=[1, 4, 8, 16])
    parser.add_argument("--context", type=_numbers, default=[128, 1024, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-tokens", type=int, default=8192, help="more: without the peer")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    several = (options.rounds, options.peer_tokens)
    host = machine()
    print(host)
    with torch.no_grad():
        made = models(MODELS[options.model]())
        for context in options.context:
            rows = measure(options.model, made, options.batch, context, *several)
            print(tabulate(rows, headers="keys"), flush=True)
            if options.save:
                rows = [{**row, "commit": host["commit"]} for row in rows]
                print(f"wrote {merge('decode-batches', rows, KEY)}")


if __name__ == "__main__":
    main()
