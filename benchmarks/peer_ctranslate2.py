"""CTranslate2 in int8, for the architectures that its converter for `transformers` supports."""

from __future__ import annotations

import atexit
import copy
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.converted import converted
from benchmarks.peer import Run, UnsupportedError
from benchmarks.subjects import Decode, Encoder, Inputs, Prefill

UNKNOWN = "No conversion is registered"  # how the converter's error begins


def ctranslate2_int8(model: nn.Module, inputs: Inputs) -> Run:
    """Runs a model by CTranslate2. It keeps a cache of its own: each call runs the next token of a
    generation, after a past that grows by one. A language model returns logits and no hidden state.
    """
    import ctranslate2

    inner: Any = model.model
    folder = converted(f"ctranslate2-{ctranslate2.__version__}", inner, partial(_write, inner))
    return RUNS[type(model)](folder, model, inputs)


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


def _threads() -> dict[str, Any]:
    return {"compute_type": "int8", "inter_threads": 1, "intra_threads": torch.get_num_threads()}


def _arrays(tokens: Tensor) -> tuple[Any, Any]:
    """Returns tokens [B, L] and their lengths [B] as CTranslate2's arrays."""
    import ctranslate2

    lengths = torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.int32)
    of = ctranslate2.StorageView.from_array
    return of(tokens.int().numpy()), of(lengths.numpy())


def _tensor(view: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.asarray(view))


def _encode(folder: Path, model: nn.Module, inputs: Inputs) -> Run:
    import ctranslate2

    encoder = ctranslate2.Encoder(str(folder), **_threads())
    arrays = _arrays(*inputs)
    return lambda: (_tensor(encoder.forward_batch(*arrays).last_hidden_state),)


def _prefill(folder: Path, model: nn.Module, inputs: Inputs) -> Run:
    import ctranslate2

    generator = ctranslate2.Generator(str(folder), **_threads())
    arrays = _arrays(*inputs)
    return lambda: (None, _tensor(generator.forward_batch(*arrays)))


def _decode(folder: Path, model: Any, inputs: Inputs) -> Run:
    import ctranslate2

    if len(model.told) != 1:
        raise UnsupportedError(
            f"CTranslate2 is led through one text at a time here, and these are {len(model.told)}."
        )
    config = model.model.config
    prompt = [*model.told[0], int(inputs[0])]
    generator = ctranslate2.Generator(str(folder), **_threads())
    generate = partial(
        generator.generate_batch,
        [[_Tokens(config.vocab_size).convert_ids_to_tokens(i) for i in prompt]],
        include_prompt_in_result=False,
        max_length=config.max_position_embeddings - len(prompt),
        end_token=[],  # nothing ends it
        return_logits_vocab=True,
    )
    steps = Steps(generate)
    atexit.register(steps.close)
    return lambda: (None, steps.next()[None, None])


class Steps:
    """A generation controlled token by token: it waits in its callback until the next token is
    requested. A new call after a cached prompt would also time a copy of the keys and values."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self.generate = generate
        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.logits: Tensor | None = None
        self.closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def next(self) -> Tensor:
        """Returns logits [V] after one more token; the first call also reads the prompt.

        Raises RuntimeError if the generation has ended, for example because no positions are left.
        """
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.asked.release()
        self.done.acquire()
        if self.logits is None:
            raise RuntimeError("CTranslate2 has ended its generation: there is no further token")
        return self.logits

    def close(self) -> None:
        self.closed = True
        self.asked.release()
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            self.generate(callback=self._token)
        finally:
            self.logits = None
            self.done.release()

    def _token(self, result: Any) -> bool:
        if not self.closed:
            self.logits = _tensor(result.logits).flatten().clone()  # the next step writes there
            self.done.release()
            self.asked.acquire()
        return self.closed


RUNS: dict[type, Callable[[Path, Any, Inputs], Run]] = {
    Encoder: _encode,
    Prefill: _prefill,
    Decode: _decode,
}
