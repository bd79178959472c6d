"""sentence-transformers with an int8 encoder, beside its own backends: texts a second, distance
from float32, memory.

The model is MiniLM, trained. Each way is a process, which stays alive, and they encode the same
texts in turns: sentences of news in batches of 32, whole news in batches of 32, and sentences one
by one. PyTorch and qfx run in the interpreter `--python`, the backends ONNX and OpenVINO, which
need an older transformers, in `--peers`; docs/measuring.md has the lines that install both.
    python -m benchmarks sentences [--peers .venv-sentences/bin/python] [--texts sentences]
        [--ways 'qfx compiled,OpenVINO int8'] [--rounds 7] [--threads 1] [--save]
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.converted import made
from benchmarks.question import Question, Row, chosen
from benchmarks.sentences_engine import WAYS
from benchmarks.smollm import news_texts
from benchmarks.worker import ask
from examples import minilm

ENGINE = Path(__file__).with_name("sentences_engine.py")
BASELINE = "float32"
LOG = 300  # characters of an error that are shown
# What sentence-transformers reads besides the files of transformers.
MODULES = {
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
CALIBRATION = 300  # sentences at the end of the news, none of which is measured


class Texts(NamedTuple):
    """Texts that are encoded together, `batch` of them at a time."""

    texts: list[str]
    batch: int


def sentences() -> list[str]:
    """Returns the sentences of 300 news texts."""
    return [s for text in news_texts() for s in re.split(r'(?<=[.?!])\s+(?=[A-Z"])', text)]


TEXTS = {
    "sentences": lambda: Texts(sentences()[:512], 32),
    "news": lambda: Texts(news_texts()[:64], 32),
    "one by one": lambda: Texts(sentences()[512:640], 1),
}


def model_folder() -> Path:
    """Returns the folder of MiniLM as sentence-transformers reads it; downloaded once."""
    modules = {f"{minilm.MODEL_FOLDER}/{name}": sha for name, sha in MODULES.items()}
    files = {**minilm.SHA256[minilm.MODEL], **modules}
    return minilm.fetch(minilm.MODEL, files) / minilm.MODEL_FOLDER


def exported(form: str, python: str) -> Path:
    """Returns the folder of the model with the files of a backend, made at the first call. Raises
    RuntimeError, with the last line of what was printed, if that fails."""
    path = minilm.cache_folder() / "peers" / f"sentences-{form}"
    return made(path, partial(_export, form, model_folder(), python))


def _export(form: str, source: Path, python: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as texts:
        (Path(texts) / "train.txt").write_text("\n".join(sentences()[-CALIBRATION:]))
        command = [python, str(ENGINE), "export", form, str(source), str(target), texts]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(1))
    if done.returncode:
        raise RuntimeError(f"Its export ended: {_last(done.stderr)}")


def _last(printed: str) -> str:
    """Returns the last line, which is that of an error."""
    return printed.strip().split("\n")[-1][-LOG:]


def _environment(threads: int) -> dict[str, str]:
    numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**os.environ, **numbers, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class Encoder:
    """A process that encodes texts in one way. Raises RuntimeError or OSError if it cannot."""

    def __init__(self, name: str, options: Namespace) -> None:
        form = WAYS[name].form
        python = options.peers if form else options.python
        folder = exported(form, python) if form else model_folder()
        self.process = subprocess.Popen(
            [python, str(ENGINE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=_environment(options.threads),
        )  # fmt: skip
        self.ask({"way": name, "folder": str(folder), "threads": options.threads})

    def ask(self, question: Any) -> Any:
        """Returns the answer to a line of JSON."""
        try:
            return ask(self.process, question)
        except RuntimeError as why:
            raise RuntimeError(f"Its process ended: {_last(str(why))}") from None

    def encode(self, texts: Texts, save: str = "") -> Row:
        answer: Row = self.ask({"texts": texts.texts, "batch": texts.batch, "save": save})
        return answer

    def embeddings(self, texts: Texts) -> Tensor:
        """Returns the embeddings, float64 [texts, features]."""
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            self.encode(texts, file.name)
            return torch.from_numpy(numpy.load(file.name)).double()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the rows of each set of texts."""
    kept = {BASELINE, *chosen(options.ways, WAYS)}
    judged = minilm.load()
    encoders: dict[str, Encoder] = {}
    pearson: dict[str, float] = {}
    reasons: dict[str, str] = {}
    try:
        for way in [way for way in WAYS if way in kept]:
            try:
                encoders[way] = Encoder(way, options)
                found = encoders[way].embeddings(Texts(judged.texts, 32))
                pearson[way] = round(minilm.pearson_to_human(found, judged.human), 4)
            except (RuntimeError, OSError) as why:
                encoders.pop(way, None)
                reasons[way] = str(why)
        if BASELINE in reasons:
            raise SystemExit(f"{BASELINE}, with which all are compared: {reasons[BASELINE]}")
        for name in chosen(options.texts, TEXTS):
            rows = measured(encoders, TEXTS[name](), options.rounds)
            yield [
                *({"texts": name, "way": w, **r, "pearson": pearson[w]} for w, r in rows.items()),
                *({"texts": name, "way": way, "reason": why} for way, why in reasons.items()),
            ]
    finally:
        for encoder in encoders.values():
            encoder.end()


def measured(encoders: dict[str, Encoder], texts: Texts, rounds: int) -> dict[str, Row]:
    """Returns the figures of each encoder: medians over rounds in which they take turns."""
    found = {name: encoder.embeddings(texts) for name, encoder in encoders.items()}  # and compiles
    answers: dict[str, list[Row]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encoder in encoders.items():
            answers[name].append(encoder.encode(texts))
    speed = {
        n: len(texts.texts) / median(a["seconds"] for a in each) for n, each in answers.items()
    }
    return {
        name: {
            "texts_per_s": round(speed[name], 1),
            "speedup": round(speed[name] / speed[BASELINE], 2),
            **_closeness(found[name], found[BASELINE]),
            "mb": round(each[-1]["mb"]),
            "peak_mb": round(each[-1]["peak_mb"]),
            "graphs": each[-1]["graphs"],
        }
        for name, each in answers.items()
    }


def _closeness(found: Tensor, expected: Tensor) -> Row:
    cosine = F.cosine_similarity(found, expected)
    return {
        "cosine_min": round(float(cosine.min()), 5),
        "cosine_mean": round(float(cosine.mean()), 5),
    }


QUESTION = Question(
    "How fast is sentence-transformers with an int8 encoder, compared with its own backends?",
    tables,
    key=("texts", "way"),
    options={
        "texts": list(TEXTS),
        "ways": list(WAYS),
        "python": ".venv/bin/python",
        "peers": ".venv-sentences/bin/python",
    },
    rounds=7,
)
