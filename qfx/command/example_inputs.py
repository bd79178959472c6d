"""Inputs with which a model of transformers is run, made from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfx.command.errors import CommandError

TEXT = (
    "The city council met on Tuesday to discuss the new bridge. Engineers said that the river "
    "rises by two metres each spring, and that the piers must stand on rock. A farmer from the "
    "other bank asked who would pay for the road. Nobody answered at once. "
)
_TOKENS = 128
_SECOND = 16_000  # samples of sound


def example_inputs(
    model: nn.Module, config: Any, tokenizer: Any, text: str, batch: int, tokens: int | None
) -> dict[str, Any]:
    """Returns keyword inputs of one call: int64 [batch, tokens] of the text, repeated, or of random
    numbers if there is no tokenizer; else float images, sounds or spectrograms of the sizes that
    the configuration names. Raises CommandError for a model with other inputs."""
    generator = torch.Generator().manual_seed(0)
    name = str(getattr(model, "main_input_name", "input_ids"))
    sizes = _sizes(config)
    inputs: dict[str, Any]
    if name == "input_ids":
        ids = _ids(sizes, tokenizer, text, batch, tokens, generator)
        inputs = {name: ids, "attention_mask": torch.ones_like(ids)}
    elif name == "pixel_values":
        side = sizes.get("image_size") or 224
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        shape = (batch, sizes.get("num_channels") or 3, height, width)
        inputs = {name: noise(shape, generator)}
    elif name == "input_values":
        inputs = {name: noise((batch, _SECOND), generator)}
    elif name == "input_features" and "num_mel_bins" in sizes:
        frames = 2 * (sizes.get("max_source_positions") or 1500)
        inputs = {name: noise((batch, sizes["num_mel_bins"], frames), generator)}
    else:
        raise CommandError(f"{type(model).__name__} takes {name}, for which no inputs are known")
    if getattr(config, "is_encoder_decoder", False):
        start = sizes.get("decoder_start_token_id") or 0
        inputs["decoder_input_ids"] = torch.full((batch, 1), start, dtype=torch.int64, device="cpu")
    return _in_dtype(inputs, model)


def _sizes(config: Any) -> dict[str, Any]:
    """Returns the numbers of a configuration and of its parts; the outer ones win."""
    found = config.to_dict()
    parts = [part for part in found.values() if isinstance(part, dict)]
    return {**{k: v for part in parts for k, v in part.items()}, **found}


def noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns float32 values of a normal distribution."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def numbers(below: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns int64 values from 0 on, below a bound."""
    return torch.randint(below, tuple(shape), generator=generator, dtype=torch.int64, device="cpu")


def _ids(
    sizes: dict[str, Any],
    tokenizer: Any,
    text: str,
    batch: int,
    tokens: int | None,
    generator: torch.Generator,
) -> Tensor:
    longest = sizes.get("max_position_embeddings") or tokens or _TOKENS
    if tokens is None:
        tokens = min(_TOKENS, longest)
    if tokens > longest:
        raise CommandError(f"the model has {longest} positions: --tokens {tokens} is too many")
    if tokenizer is None:
        return numbers(sizes["vocab_size"], (batch, tokens), generator)
    found = tokenizer(text, add_special_tokens=True)["input_ids"]
    if not found:
        raise CommandError("the text has no tokens")
    repeated = (found * -(-tokens // len(found)))[:tokens]
    return torch.tensor([repeated] * batch, dtype=torch.int64, device="cpu")


def _in_dtype(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
