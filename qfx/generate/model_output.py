"""The outputs of steps: logits and a cache in the classes that models of transformers return."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput


class EncoderOutput(BaseModelOutput):
    """The output of an encoder. Some models read fields that their encoders return and this class
    lacks: these are None."""

    attention_mask = router_logits = None


def decoder_only_output(logits: Tensor, cache: Cache) -> CausalLMOutputWithPast:
    """Returns the output of a decoder. Bypasses the constructor of its class, which reads all
    fields several times and takes as long as a layer."""
    found = CausalLMOutputWithPast.__new__(CausalLMOutputWithPast)
    found["logits"], found["past_key_values"] = logits, cache
    return found


def encoder_decoder_output(logits: Tensor, cache: Cache, source: Tensor) -> Seq2SeqLMOutput:
    """Returns the output of an encoder-decoder. `source`: the encoder's output."""
    found = Seq2SeqLMOutput.__new__(Seq2SeqLMOutput)
    found["logits"], found["past_key_values"] = logits, cache
    found["encoder_last_hidden_state"] = source
    return found


def selected_logits(logits: Tensor, keep: int | Tensor) -> Tensor:
    """Returns the logits that `keep`, which is transformers' logits_to_keep, selects."""
    if isinstance(keep, int) and (keep == 0 or keep >= logits.shape[1]):
        return logits
    return logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
