"""Whisper, evaluated on speech: how far the distribution of each next token is from float's, after
the tokens that the float model transcribed before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks import smollm, whisper
from benchmarks.judged import Figures, Judged, divergence
from benchmarks.speech import RATE, recording, spoken

WORDS = 50  # of a text: about 20 of the 30 seconds that the model hears


def speech(clips: int = 12, others: int = 16) -> Judged:
    """Returns Whisper with one recording and `clips` synthesized news texts in one batch. It is
    calibrated on `others`, two at a time, after their own words."""
    model, tokenizer = whisper.load()
    texts = [" ".join(t.split()[:WORDS]) for t in smollm.news_texts()[: clips + others]]
    vocabulary = tokenizer.get_vocab()
    *prompt, end = (vocabulary[name] for name in (*whisper.PROMPT, whisper.END))
    features = _features([recording(), *spoken(texts)])
    heard, spare = features[: clips + 1], features[clips + 1 :]
    wanted = _task(prompt, whisper.transcripts(model.model, heard, prompt, end))
    written = tokenizer.encode_batch([f" {t}" for t in texts[clips:]], add_special_tokens=False)
    batches = [
        (spare[i : i + 2], *_task(prompt, [[*w.ids, end] for w in written[i : i + 2]]).inputs)
        for i in range(0, others, 2)
    ]
    return Judged.of(model, [(heard, *wanted.inputs)], partial(_speech, wanted), batches)


def _features(sounds: list[Any]) -> Tensor:
    from transformers import WhisperFeatureExtractor

    found = WhisperFeatureExtractor()(sounds, sampling_rate=RATE, return_tensors="pt")
    return found.input_features


def _task(prompt: list[int], rows: Sequence[list[int]]) -> smollm.Task:
    return smollm.task([[*prompt, *row] for row in rows], [len(prompt)] * len(rows))


def _speech(task: smollm.Task, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Figures:
    """Returns the figures. `same transcripts %`: clips in which each likeliest token is float's, so
    that the model would transcribe the same words by itself."""
    (logits,), (wanted,) = outputs, expected
    found = divergence(task, logits, wanted)
    same = (logits.argmax(-1) == wanted.argmax(-1)) | ~task.real
    return {
        "KL": found["KL"],
        "top-1 %": found["top-1 %"],
        "same transcripts %": 100 * float(same.all(-1).float().mean()),
    }
