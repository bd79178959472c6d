"""A table over models of transformers: python -m tests.generate.families [FAMILY ...].

Each is a small model with random weights, in float32, bfloat16 and float16. Columns: what serves
`generate` (programs, programs between parts that PyTorch runs, or modules); SQNR in dB of logits
behind a prompt against the float32 model; the likeliest tokens that are those of float32, in
percent, and beside it those of the plain 16-bit model; greedy tokens, of 24, up to the first that
differs from float32 modules which hold the same int8 weights and an int8 cache (an encoder is
then in float32 too, so that a 16-bit model may come to another text).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import qfx
from qfx.hf import KVCache
from tests.lib.decoders import DECODERS, EXPERTS, GROUPED, IN_GROUPS, OWN_NAMES, SIZES, decoder, ids
from tests.lib.encoder_decoders import ENCODER_DECODERS, encoder_decoder, int8_cache, source

NEW, PROMPT = 24, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADED = SIZES | GROUPED | {"head_dim": 16}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", SIZES | GROUPED),
    "biogpt": ("BioGpt", SIZES),
    "cohere2": ("Cohere2", SIZES | GROUPED),
    "ernie4.5": ("Ernie4_5", HEADED),
    "glm": ("Glm", HEADED),
    "glm4": ("Glm4", HEADED),
    "gpt-bigcode": ("GPTBigCode", OWN_NAMES),
    "granite": ("Granite", SIZES | GROUPED),
    "olmo": ("Olmo", SIZES | GROUPED),
    "olmo3": ("Olmo3", SIZES | GROUPED),
    "persimmon": ("Persimmon", SIZES),
    "phi": ("Phi", SIZES),
    "dots1": ("Dots1", HEADED | EXPERTS | IN_GROUPS | {"n_shared_experts": 1}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        HEADED | EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    ),
    "flex-olmo": ("FlexOlmo", SIZES | GROUPED | EXPERTS | {"num_experts": 4}),
    "granite-moe": ("GraniteMoe", SIZES | GROUPED | EXPERTS | {"num_local_experts": 4}),
    "hunyuan-moe": ("HunYuanMoEV1", HEADED | {"num_experts": 4, "moe_topk": 2}),
    "minimax-m2": ("MiniMaxM2", HEADED | EXPERTS | {"num_local_experts": 4}),
    "olmoe": ("Olmoe", SIZES | GROUPED | EXPERTS | {"num_experts": 4}),
    "phimoe": ("Phimoe", SIZES | GROUPED | {"num_local_experts": 4}),
    "qwen2-moe": (
        "Qwen2Moe",
        SIZES | GROUPED | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3-moe": ("Qwen3Moe", SIZES | GROUPED | EXPERTS | {"num_experts": 4}),
    "seed-oss": ("SeedOss", HEADED),
    "smollm3": ("SmolLM3", SIZES | GROUPED),
    "starcoder2": ("Starcoder2", SIZES | GROUPED),
}


def _tokens(logits: Tensor) -> Tensor:
    return logits.float().argmax(-1)


def _share(a: Tensor, b: Tensor) -> float:
    return 100 * float((a == b).double().mean())


def _db(expected: Tensor, found: Tensor) -> float:
    error = (found.double() - expected.double()).square().sum()
    return float(10 * (expected.double().square().sum() / error).log10())


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    """By the cache that generate would pass, 16 tokens at a time: [B, T, V]."""
    cache: Any = transformers.DynamicCache()
    name, how = "input_ids", {}
    if model.config.is_encoder_decoder:
        given = _source(model, len(tokens))
        cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
        name, how = "decoder_input_ids", {"attention_mask": given.get("attention_mask")}
        how["encoder_outputs"] = model.get_encoder()(**given)
    parts = [
        model(**{name: part}, past_key_values=cache, use_cache=True, **how).logits
        for part in tokens.split(16, 1)
    ]
    return torch.cat(parts, 1)


def _source(model: Any, texts: int) -> dict[str, Tensor]:
    """In the type of the model."""
    given = source(model, texts)
    return {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in given.items()}


def _greedy(model: Any, **others: Any) -> list[int]:
    if model.config.is_encoder_decoder:
        found = model.generate(**_source(model, 1), max_new_tokens=NEW, do_sample=False, **others)
        return list(found[0, -NEW:].tolist())
    prompt = ids(1, PROMPT, 5)
    how = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **how, **others)
    return list(found[0, PROMPT:].tolist())


def _same(model: Any) -> int:
    """Greedy tokens up to the first that its float32 modules, with the same int8 weights, do not
    give."""
    found = _greedy(model)
    modules = copy.deepcopy(model)
    vars(modules).pop("forward")
    encodes = model.config.is_encoder_decoder
    cache = int8_cache(len(model.forward.shapes)) if encodes else KVCache(model.config)
    expected = _greedy(modules.float(), past_key_values=cache)
    return next((i for i in range(NEW) if found[i : i + 1] != expected[i : i + 1]), NEW)


def _made(name: str) -> nn.Module:
    if name in DECODERS:
        return decoder(name)  # type: ignore[no-any-return]
    if name in ENCODER_DECODERS:
        return encoder_decoder(name)  # type: ignore[no-any-return]
    kind, sizes = MORE[name]
    torch.manual_seed(0)
    endings = ("ForCausalLM", "LMHeadModel")
    found = (getattr(transformers, kind + ending, None) for ending in endings)
    model: nn.Module = next(filter(None, found))(getattr(transformers, kind + "Config")(**sizes))
    return model.float().eval()


def rows(names: list[str]) -> Iterator[str]:
    for name in names:
        base, text = _made(name), ids(4, 48, 9)
        expected = _logits(base, text)
        for dtype in DTYPES:
            model: Any = copy.deepcopy(base).to(dtype)
            own = (
                ""
                if dtype == torch.float32
                else f"{_share(_tokens(_logits(model, text)), _tokens(expected)):.1f}"
            )
            try:
                qfx.compile_for_generate(model, max_length=64, logits_dtype=torch.float32)
            except ValueError as why:
                yield f"| {name} | {dtype} | refused: {why} | | | | |"
                break
            logits = _logits(model, text)
            outside = {o for r in model.forward.runners.values() for o in r.outside}
            by = "programs and PyTorch" if outside else "programs"
            by = "modules" if model.forward.why_none else by
            agree = _share(_tokens(logits), _tokens(expected))
            short = str(dtype).removeprefix("torch.")
            yield (
                f"| {name} | {short} | {by} | {_db(expected, logits):.1f} | {agree:.1f} | {own} | "
                f"{_same(model)} |"
            )


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = sys.argv[1:] or [*sorted({*DECODERS, *MORE}), *ENCODER_DECODERS]
    print(
        "| model | dtype | served by | dB | agree | alone | same |\n|---|---|---|---|---|---|---|"
    )
    for row in rows(names):
        print(row, flush=True)


if __name__ == "__main__":
    main()
