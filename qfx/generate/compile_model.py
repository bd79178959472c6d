"""compile_for_generate: makes a transformers model run the steps of `generate` as programs, one for
each bucket (number of tokens of a step)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin

from qfx.generate.cross_steps import CrossSteps, positions_of, written_layers
from qfx.generate.layout import CacheLayout, with_rings, without_rings
from qfx.generate.model_state import PREPARES_CACHE
from qfx.generate.steps import Steps
from qfx.hf.kv_layer import KVLayer
from qfx.hf.layer_kinds import layer_kinds, windows
from qfx.nn import quantize_
from qfx.nn.stored_modules import stored_linears
from qfx.nn.weight_bytes import weight_bytes
from qfx.ops.kv_blocks import TOKENS
from qfx.values.config import Configurable

log = logging.getLogger(__name__)


def compile_for_generate(
    model: Any,
    config: Configurable = None,
    *,
    max_length: int = 2048,
    batch_sizes: Sequence[int] = (1,),
    key_bits: int = 8,
    value_bits: int = 8,
    logits_dtype: torch.dtype | None = None,
    max_source_length: int | None = None,
) -> Any:
    """Makes the model decode with int8 programs; returns the model, changed in place. A program is
    a list of instructions that run in C++, without PyTorch.

        model = compile_for_generate(model, "w4a8", max_length=1024)
        model.generate(**inputs)

    `model`: a decoder or encoder-decoder of transformers with float32, bfloat16, float16 or
    quantized weights, in eval mode, on the CPU, or a wrapper of PEFT or torch.compile around one.
    With 16-bit weights a step computes in float32.

    `config`: how its weights are quantized (`qfx.quantize_`), the name of a scheme or a Config.
    None means "w8a8" for a float model, and does not change a model that is already quantized.

    `max_length`: the largest number of tokens of prompt and output together. `batch_sizes`: the
    batch sizes for which programs are built now. Smaller batches are padded to one of them;
    programs for larger batches are built at their first use. `max_source_length`: for an
    encoder-decoder, the largest number of positions of the encoder's output; by default as many as
    its configuration allows, or `max_length` but at least 512 if the configuration does not say.
    The model's modules compute the encoder and the first tokens of the decoder, programs the later
    steps. `logits_dtype`: the dtype of the logits that programs return, by default that of the
    model; they are computed in float32.

    After this, `model.generate(...)` stores keys and values in int8, or in 4 bits with `key_bits`
    or `value_bits` 4, and runs each step as a program. Other programs process the prompt, several
    tokens at a time. The modules are used for calls that need more than logits (hidden states,
    attentions, labels), for other kinds of caches, for gradients and under autocast. If no program
    can be built for the model, the modules are always used, and a warning says why.

    Raises ValueError, before anything is changed, for a model that cannot have an int8 cache or
    that contains sparse or nested tensors, for a model in training mode, and for invalid arguments.
    """
    inner = _inside(model)
    _check(inner, max_length, batch_sizes, logits_dtype)
    if max_source_length is not None:
        _check_length("max_source_length", max_source_length)
    sizes = sorted(set(batch_sizes))
    length = -(-max_length // TOKENS) * TOKENS
    former = inner.__dict__.get("forward")
    before = former.inner if isinstance(former, Steps) else inner.forward
    bits, spans = (key_bits, value_bits), windows(inner.config)
    steps: Callable[..., Steps] = Steps
    if inner.config.is_encoder_decoder:
        source = max_source_length or positions_of(inner.config, "source")
        source = source or max(max_length, 512)
        steps = partial(CrossSteps, source_length=source)
        layers = written_layers(inner, before, length, bits)
        layout = without_rings(length, spans, len(layers))
    else:
        layout = with_rings(length, spans, layer_kinds(inner.config))
        layers = _written_layers(inner, before, layout, bits)
    if config is not None or not any(stored_linears(inner)):
        quantize_(inner, config)
    else:
        log.info("compile_for_generate: %s", weight_bytes(inner))
    inner.forward = steps(inner, before, layout, layers, sizes, logits_dtype)
    if hasattr(inner, PREPARES_CACHE):
        setattr(inner, PREPARES_CACHE, inner.forward.prepare_cache)
    inner.forward.prepare()
    if inner.generation_config.use_cache is False:
        log.warning(
            "generate of %s keeps no cache and reads the whole text for each token, since its "
            "configuration has use_cache=False: pass use_cache=True",
            type(inner).__name__,
        )
    return model


def _written_layers(
    model: Any, forward: Callable[..., Any], layout: CacheLayout, bits: tuple[int, int]
) -> list[KVLayer]:
    """Returns the layers of a cache into which the model has written one token. They show the
    numbers of heads and features of each layer. Raises ValueError if the model does not write to
    the cache."""
    cache = Cache(layers=[KVLayer(layout.length, *bits) for _ in layout.layers])  # type: ignore[arg-type]
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        forward(input_ids=token, past_key_values=cache, use_cache=True)
    if not all(layer.is_initialized for layer in cache.layers):  # type: ignore[union-attr]
        raise ValueError(
            f"{type(model).__name__} writes no keys and values to a cache that generate passes: it "
            "cannot have one in int8"
        )
    return cache.layers  # type: ignore[return-value]


def _inside(model: Any) -> Any:
    """Returns the model inside wrappers of PEFT or torch.compile, whose `generate` calls that of
    the model."""
    for name in ("_orig_mod", "get_base_model"):
        found = getattr(model, name, None)
        if found is not None:
            return _inside(found if isinstance(found, torch.nn.Module) else found())
    return model


def _check(model: Any, max_length: int, batch_sizes: Any, logits_dtype: torch.dtype | None) -> None:
    generates = isinstance(model, GenerationMixin)
    if not generates:
        raise ValueError(
            f"{type(model).__name__} is no model of transformers that generates, as "
            "AutoModelForCausalLM and AutoModelForSeq2SeqLM load them"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"of the layout {tensor.layout}"
            raise ValueError(f"{name} is {kind}, and programs read dense tensors alone")
    _check_length("max_length", max_length)
    if logits_dtype is not None and not logits_dtype.is_floating_point:
        raise ValueError(f"logits_dtype={logits_dtype}: expected a float type")
    several = isinstance(batch_sizes, Sequence) and len(batch_sizes) > 0
    if not several or not all(type(size) is int and size >= 1 for size in batch_sizes):
        raise ValueError(f"batch_sizes={batch_sizes}: expected batch sizes, as (1, 8)")


def _check_length(name: str, length: Any) -> None:
    if type(length) is not int or length < 1:
        raise ValueError(f"{name}={length!r}: expected a number of tokens, at least 1")
