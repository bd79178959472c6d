"""int8_attention: time and error on every instruction set of this machine, against
F.scaled_dot_product_attention in float32, and against another build of qfx.

All take turns, in seconds of the processor where one thread is asked for, so that what else runs
counts less. Errors are of the outputs of queries that see none of the keys that are made larger.
    python -m benchmarks.attention [--threads 1] [--only 512,MiniLM] [--beside CHECKOUT] [--save]
    python -m benchmarks.attention --errors [--models] [--beside CHECKOUT] [--save]
`--beside`: a checkout of this project with an extension of its own in its .venv.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import keep_memory, machine, merge
from qfx import _C

SECONDS = 4e-3  # of a sample
FLOAT, HERE, BESIDE = "float32", "here", "beside"
Row = dict[str, Any]

# A process of another checkout: reads a line, runs, writes a line.
WORKER = """
import json, sys, time, torch
import qfx
from qfx import _C
torch.set_num_threads(int(sys.argv[1]))
clock = time.process_time if sys.argv[1] == "1" else time.perf_counter
for line in sys.stdin:
    path, isa, out, seconds = json.loads(line)
    q, k, v, mask, causal = torch.load(path)
    _C.set_isa(isa)
    def run():
        how = (mask, q.shape[-1] ** -0.5, causal, torch.float32)
        return torch.ops.qfx.int8_attention(q, k, v, *how)
    with torch.inference_mode():
        torch.save(run(), out)
        run()
        started, count = clock(), 0
        while count == 0 or clock() - started < seconds:
            run()
            count += 1
        spent = (clock() - started) / count
    print(json.dumps(spent), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """q [*B, H, M, D], k, v [*B, G, N, D], heads of the features of a token as models make them."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False

    @classmethod
    def random(cls, name: str, batch: int, heads: int, tokens: int, d: int, **how: Any) -> Case:
        of_keys, generator = how.pop("of_keys", heads), torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(batch, tokens, h, d, generator=generator).transpose(1, 2)
            for h in (heads, of_keys, of_keys)
        )
        return cls(name, q, k, v, **how)

    @property
    def shape(self) -> str:
        heads = (f"{self.q.shape[-3]}/{self.k.shape[-3]}", *map(str, self.q.shape[-2:]))
        return "x".join((str(self.q.shape[0]), *heads))

    def in_float(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, self.mask, is_causal=self.causal, enable_gqa=True
        )

    def in_int8(self) -> Tensor:
        how = (self.mask, self.q.shape[-1] ** -0.5, self.causal, torch.float32)
        return torch.ops.qfx.int8_attention(self.q, self.k, self.v, *how)

    def exact(self) -> Tensor:
        mask = (
            self.mask.double()
            if self.mask is not None and self.mask.is_floating_point()
            else self.mask
        )
        doubles = replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double(), mask=mask)
        return doubles.in_float()


def padding(batch: int, tokens: int) -> Tensor:
    """Sequences of half to all of the tokens."""
    lengths = torch.linspace(tokens // 2, tokens, batch).long()
    return (torch.arange(tokens) < lengths[:, None])[:, None, None]


def shapes() -> Iterator[Case]:
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
        yield Case.random(str(tokens), 1, 12 if tokens <= 1024 else 4, tokens, 64)
    yield Case.random("MiniLM", 8, 12, 128, 32, mask=padding(8, 128))
    yield Case.random("ViT", 1, 12, 197, 64)
    yield Case.random("Whisper", 1, 8, 1500, 64)
    yield Case.random("SmolLM2", 1, 9, 512, 64, of_keys=3, causal=True)
    yield Case.random("Llama", 1, 32, 512, 128, of_keys=8, causal=True)


# --- another build ---


class Other:
    """int8_attention of another checkout, in a process of its own."""

    def __init__(self, checkout: Path, threads: int) -> None:
        python = checkout / ".venv/bin/python"
        self.process = subprocess.Popen(
            [python, "-c", WORKER, str(threads)], cwd=checkout,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()
        self.isas = _C.isas()

    def load(self, case: Case) -> None:
        """The other build knows no heads that share keys."""
        k, v = (t.repeat_interleave(case.q.shape[-3] // t.shape[-3], -3) for t in (case.k, case.v))
        torch.save((case.q, k, v, case.mask, case.causal), self._file("in"))

    def run(self, isa: str, seconds: float = 0.0) -> tuple[float, Tensor]:
        """Seconds of a call, and its result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([self._file("in"), isa, self._file("out"), seconds]),
              file=self.process.stdin, flush=True)  # fmt: skip
        return json.loads(self.process.stdout.readline()), torch.load(self._file("out"))

    def attend(self, case: Case) -> Tensor:
        self.load(case)
        return self.run(_C.isa())[1]

    def _file(self, name: str) -> str:
        return str(Path(self.folder.name) / name)


# --- time ---


def sample(run: Callable[[], Any], isa: str | None, clock: Callable[[], float]) -> float:
    if isa is not None:
        _C.set_isa(isa)
    run()
    run()
    started, count = clock(), 0
    while count == 0 or clock() - started < SECONDS:
        run()
        count += 1
    return (clock() - started) / count


def times(case: Case, other: Other | None, rounds: int) -> list[Row]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    isas = [isa for isa in _C.isas() if isa != "ref"]
    ways: dict[tuple[str, str], Callable[[], float]] = {
        ("", FLOAT): lambda: sample(case.in_float, None, clock),
        **{(isa, HERE): partial(sample, case.in_int8, isa, clock) for isa in isas},
    }
    if other is not None:
        other.load(case)
        ways |= {(isa, BESIDE): lambda i=isa: other.run(i, SECONDS)[0] for isa in isas}  # type: ignore[misc]
    found: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            found[way].append(run())
    middle = {way: median(seconds) for way, seconds in found.items()}
    in_float = middle["", FLOAT]
    rows = []
    for isa in isas:
        row = {"case": case.name, "shape": case.shape, "isa": isa}
        row |= {"float us": round(in_float * 1e6, 1), "us": round(middle[isa, HERE] * 1e6, 1)}
        row["of float"] = round(in_float / middle[isa, HERE], 2)
        if other is not None:
            row["of the other"] = round(middle[isa, BESIDE] / middle[isa, HERE], 2)
        rows.append(row)
    return rows


# --- errors ---


def sqnr(exact: Tensor, found: Tensor) -> float:
    noise = (exact - found.double()).square().sum().item()
    return 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf


def disturbed() -> Iterator[tuple[Case, Tensor]]:
    """Gaussian cases whose keys share an offset, and the queries that count."""
    tokens = 256
    case = Case.random("randn, offset of 2 sigma", 1, 4, tokens, 64)
    case = replace(case, k=case.k + 2 * torch.randn(1, 4, 1, 64))
    every, places = torch.ones(tokens, dtype=torch.bool), torch.arange(tokens)
    yield case, every
    hidden = places % 4 == 3
    for factor in (10, 100):
        larger = _larger(case, hidden, factor)
        yield replace(larger, name=f"25 % masked, {factor}x", mask=~hidden[None]), every
    causal = replace(case, causal=True)
    yield replace(causal, name="causal"), every
    last = places >= tokens - 64
    yield replace(_larger(causal, last, 10), name="causal, last 64 10x"), ~last
    last = places == tokens - 1
    yield replace(_larger(causal, last, 30), name="causal, last 30x"), ~last
    for shape in shapes():
        if shape.name in ("MiniLM", "ViT", "Whisper"):
            yield replace(shape, name=f"{shape.name}'s shape, randn"), every[:1]


def _larger(case: Case, keys: Tensor, factor: float) -> Case:
    by = torch.where(keys, factor, 1.0)[:, None]
    return replace(case, k=case.k * by, v=case.v * by)


Attend = Callable[[Case], Tensor]


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Models' attentions are computed by `attend`."""
    inner = F.scaled_dot_product_attention

    def replaced(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Tensor:
        mask, causal = how.get("attn_mask"), bool(how.get("is_causal", False))
        assert (
            not rest
            and not how.get("dropout_p")
            and how.get("scale") in (None, q.shape[-1] ** -0.5)
        )
        F.scaled_dot_product_attention = inner
        y = attend(Case("", q, k, v, mask, causal))
        F.scaled_dot_product_attention = replaced  # type: ignore[assignment]
        return y

    F.scaled_dot_product_attention = replaced  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = inner


def real_queries(case: Case) -> Tensor:
    """[B, 1, M]: those that some row sees as keys, and so are no padding."""
    if case.mask is None or case.causal:
        return torch.ones(1, 1, case.q.shape[-2], dtype=torch.bool)
    allowed = case.mask if case.mask.dtype == torch.bool else case.mask > -1e4
    return allowed.expand(-1, -1, *[case.q.shape[-2]] * 2).any(-2)


def models() -> dict[str, Callable[[], Any]]:
    """Trained models on texts: runs of them."""
    from benchmarks import smollm
    from examples import minilm

    language, tokenizer = smollm.load()
    ((tokens, _),) = smollm.passages(tokenizer, 12, 1, 512)
    data = minilm.load()
    inputs = {name: t[:8] for name, t in data.inputs.items()}
    return {
        "SmolLM2, 512 tokens": lambda: language.model(tokens, use_cache=False),
        "MiniLM, padded": lambda: data.model(**inputs),
    }


def divergence(attend: Attend, passages: int = 2, length: int = 1024) -> float:
    """Mean KL of SmolLM2's next tokens from those with float attention, all else in float."""
    from benchmarks import smollm

    language, tokenizer = smollm.load()
    total = 0.0
    for tokens, _ in smollm.passages(tokenizer, 12, passages, length):
        expected = language.model(tokens, use_cache=False).logits.log_softmax(-1)
        with attending(attend):
            found = language.model(tokens, use_cache=False).logits.log_softmax(-1)
        kl = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
        total += kl.double().mean().item()
    return total / passages


def errors(case: Case, counts: Tensor, other: Other | None) -> dict[str, float]:
    """SQNR of the rows that count; instruction sets have the same bits."""
    exact = case.exact()
    counts = counts.expand(exact.shape[:-1])
    found = {HERE: case.in_int8()}
    if other is not None:
        found[BESIDE] = other.attend(case)
    return {name: sqnr(exact[counts], y[counts]) for name, y in found.items()}


def error_rows(other: Other | None, of_models: bool) -> list[Row]:
    rows: list[Row] = [
        {"case": case.name, **{k: round(x, 1) for k, x in errors(case, counts, other).items()}}
        for case, counts in disturbed()
    ]
    return rows + (model_rows(other) if of_models else [])


def model_rows(other: Other | None) -> list[Row]:
    rows: list[Row] = []
    for name, run in models().items():
        found: list[dict[str, float]] = []

        def judged(case: Case, found: list[dict[str, float]] = found) -> Tensor:
            found.append(errors(case, real_queries(case), other))
            return case.in_float()

        with attending(judged):
            run()
        for what, pick in (("worst", min), ("median", median)):
            of = {k: round(pick(f[k] for f in found), 1) for k in found[0]}
            rows.append({"case": f"{name}, {what} of {len(found)}", **of})
    ways: dict[str, Attend] = {HERE: Case.in_int8}
    if other is not None:
        ways[BESIDE] = other.attend
    kl = {name: round(divergence(attend), 6) for name, attend in ways.items()}
    return [*rows, {"case": "SmolLM2, divergence", **kl}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names of cases")
    parser.add_argument("--beside", type=Path, help="another checkout, with a build of its own")
    parser.add_argument("--errors", action="store_true", help="in decibels, not times")
    parser.add_argument("--models", action="store_true", help="of trained models too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    other = Other(options.beside.resolve(), options.threads) if options.beside else None
    names = [name for name in options.only.split(",") if name]
    with torch.inference_mode():
        if options.errors:
            rows = error_rows(other, options.models)
        else:
            cases = (c for c in shapes() if not names or c.name in names)
            rows = [row for c in cases for row in times(c, other, options.rounds)]
            rows = [{**r, "threads": options.threads} for r in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        what = "attention-errors" if options.errors else "attention"
        key = ("case",) if options.errors else ("case", "isa", "threads")
        print(f"wrote {merge(what, rows, key)}")


if __name__ == "__main__":
    main()
