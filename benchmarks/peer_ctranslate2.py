"""CTranslate2 in int8, for the architectures that its converter for `transformers` supports."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.converted import converted
from benchmarks.peer import Run, UnsupportedError
from benchmarks.subjects import Decode, Encoder, Inputs

UNKNOWN = "No conversion is registered"  # how the converter's error begins


def ctranslate2_int8(model: nn.Module, inputs: Inputs) -> Run:
    """Runs a model by CTranslate2. A language model returns logits and no hidden state."""
    import ctranslate2

    if isinstance(model, Decode):
        raise UnsupportedError("CTranslate2 takes no keys and values: its cache is its own.")
    inner: Any = model.model
    folder = converted(f"ctranslate2-{ctranslate2.__version__}", inner, partial(_write, inner))
    how = {"compute_type": "int8", "inter_threads": 1, "intra_threads": torch.get_num_threads()}
    (tokens,) = inputs
    lengths = torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.int32)
    arrays = [ctranslate2.StorageView.from_array(t.int().numpy()) for t in (tokens, lengths)]
    if isinstance(model, Encoder):
        encoder = ctranslate2.Encoder(str(folder), **how)
        return lambda: (_tensor(encoder.forward_batch(*arrays).last_hidden_state),)
    generator = ctranslate2.Generator(str(folder), **how)
    return lambda: (None, _tensor(generator.forward_batch(*arrays)))


def _tensor(view: Any) -> Tensor:
    return torch.from_numpy(np.asarray(view))


class _Tokens:
    """Names of tokens for a model that has no tokenizer."""

    bos_token, eos_token, unk_token = "<1>", "<2>", "<0>"

    def __init__(self, count: int) -> None:
        self.count = count

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(i): i for i in range(self.count)}

    def convert_ids_to_tokens(self, i: int) -> str:
        return f"<{i}>"


def _write(inner: Any, folder: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    class InMemory(TransformersConverter):
        def load_model(self, *_: Any, **__: Any) -> Any:
            return _as_the_converter_expects(inner)

        def load_tokenizer(self, *_: Any, **__: Any) -> Any:
            return _Tokens(inner.config.vocab_size)

    with tempfile.TemporaryDirectory() as scratch:
        inner.config.save_pretrained(scratch)
        try:
            InMemory(scratch).convert(folder, quantization="int8")
        except ValueError as why:
            if not str(why).startswith(UNKNOWN):
                raise
            kind = type(inner.config).__name__
            raise UnsupportedError(f"CTranslate2 has no converter for {kind}.") from why


def _as_the_converter_expects(inner: Any) -> Any:
    """Returns a copy, because some loaders take the model apart. The one for BERT requires a pooler
    and an option that `transformers` 5 no longer has."""
    from transformers import BertModel
    from transformers.models.bert.modeling_bert import BertPooler

    own = copy.deepcopy(inner)
    if isinstance(own, BertModel):
        own.config.position_embedding_type = "absolute"
        own.pooler = BertPooler(own.config)
    return own
