"""Errors of int8_attention in decibels, for the outputs of queries that see none of the enlarged
keys, and their effect on trained models. `benchmarks.attention --errors` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import qfx
from benchmarks.attention_cases import Case, Other, shapes

Row = dict[str, Any]
HERE, BESIDE = "here", "beside"


def disturbed() -> Iterator[tuple[Case, Tensor]]:
    """Yields Gaussian cases whose keys share an offset, and the queries that are evaluated."""
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
    """Computes the attentions of models by `attend` inside the context."""
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
    """Returns, [B, 1, M], which queries some row sees as keys, so that they are no padding."""
    if case.mask is None or case.causal:
        return torch.ones(1, 1, case.q.shape[-2], dtype=torch.bool)
    allowed = case.mask if case.mask.dtype == torch.bool else case.mask > -1e4
    return allowed.expand(-1, -1, *[case.q.shape[-2]] * 2).any(-2)


def models() -> dict[str, Callable[[], Any]]:
    """Returns functions that run trained models on texts."""
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
    """Returns the mean KL of SmolLM2's next tokens from those with float attention, all else in
    float."""
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
    """Returns the SQNR of the evaluated rows. All instruction sets have the same bits."""
    exact = case.exact()
    counts = counts.expand(exact.shape[:-1])
    found = {HERE: case.in_int8()}
    if other is not None:
        found[BESIDE] = other.attend(case)
    return {name: qfx.sqnr(exact[counts], y[counts]) for name, y in found.items()}


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
