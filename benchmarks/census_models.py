"""The models of the census, by field: the list is the same before and after qfx learns a kind of
operation.

Layers have the sizes of real models, and most models have few of them; weights are random. Models
of `transformers` are in benchmarks/fields/released.json, the others are written in that folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fields import detection, diffusion, sequences, sound, vision
from benchmarks.fields.vision import Classifier, sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: configurations are made here

Inputs = dict[str, Any]
Build = Callable[[], tuple[nn.Module, Inputs]]
RELEASED = json.loads((Path(__file__).parent / "fields" / "released.json").read_text())


def _ids(count: int, most: int = 4000, rows: int = 1) -> Tensor:
    return torch.randint(3, most, (rows, count))


def _sound(count: int) -> Tensor:
    return torch.randn(1, count) / 4


def _forecast() -> Inputs:
    past, future = (1, 55), (1, 24)
    return {
        "past_values": torch.rand(past),
        "past_time_features": torch.randn(*past, 2),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.rand(future),
        "future_time_features": torch.randn(*future, 2),
    }


INPUTS: dict[str, Callable[[], Inputs]] = {  # of models of transformers
    "ids": lambda: {"input_ids": _ids(128, 33)},
    "few ids": lambda: {"input_ids": _ids(32)},
    "both ids": lambda: {"input_ids": _ids(128), "decoder_input_ids": _ids(32)},
    "pixels": lambda: {"pixel_values": torch.randn(1, 3, 224, 224)},
    "small pixels": lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
    "video": lambda: {"pixel_values": torch.randn(1, 4, 3, 224, 224)},
    "samples": lambda: {"input_values": _sound(16000)},
    "samples and ids": lambda: {"input_values": _sound(16000), "decoder_input_ids": _ids(32)},
    "mel and ids": lambda: {
        "input_features": torch.randn(1, 80, 200),
        "decoder_input_ids": _ids(32),
    },
    "short sound": lambda: {"input_values": _sound(9600)[:, None]},
    "letters": lambda: {"input_ids": _ids(24, 38)},
    "series": lambda: {"past_values": torch.randn(1, 336, 7)},
    "forecast": _forecast,
}


def released(name: str) -> tuple[nn.Module, Inputs]:
    """Returns a model of transformers with random weights, and its inputs."""
    import transformers

    row = RELEASED["models"][name]
    model_class = getattr(transformers, row["model"])
    config = model_class.config_class(
        **{**RELEASED["sizes"][row["sizes"]], **row.get("differs", {})}
    )
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
    return model_class(config), INPUTS[row["inputs"]]()


def _of(make: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> Build:
    return lambda: (make(), inputs())


def _image(make: Callable[[], nn.Module], side: int = 224) -> Build:
    """A model that takes one image as its only input."""
    return lambda: (sequence([make()]), vision.images(side))


def _released(*names: str) -> dict[str, Build]:
    return {name: partial(released, name) for name in names}


_TAGGER = partial(sequences.RecurrentModel, both=True)

FIELDS: dict[str, dict[str, Build]] = {
    "language models": _released("llama", "qwen3", "gemma3", "gpt2", "phi3", "olmoe", "mamba"),
    "text encoders and translation": _released(
        "bert", "modernbert", "deberta-v2", "squeezebert", "esm-2", "t5", "marian"
    ),
    "vision transformers": _released(
        "vit", "dinov2", "siglip", "beit", "swin", "pvt-v2", "videomae"
    ),
    "convolutional vision": {
        "resnet-50": _image(lambda: Classifier(vision.ResNet(), 2048)),
        "resnext-50": _image(lambda: Classifier(vision.ResNet(groups=32), 2048)),
        "mobilenet-v3": _image(vision.mobilenet_v3),
        "efficientnet-b0": _image(vision.efficientnet_b0),
        "vgg-16": _image(vision.vgg_16),
        "densenet": _image(vision.densenet),
        "video-resnet-18": _of(
            lambda: sequence([vision.video_resnet_18()]),
            lambda: {"x": torch.randn(1, 3, 8, 112, 112)},
        ),
        **_released("convnext"),
    },
    "detection and segmentation": {
        "yolov8-s": _image(detection.Yolo, 320),
        "retinanet": _image(detection.RetinaNet),
        "deeplab-v3": _image(detection.DeepLab, 128),
        "unet": _image(detection.UNet, 128),
        **_released("segformer", "yolos", "sam"),
    },
    "diffusion and image decoders": {
        "latent-diffusion": _of(
            diffusion.LatentDiffusion,
            lambda: {
                **diffusion.noise(4, 32),
                "time": torch.randn(1, 320),
                "text": torch.randn(1, 77, 768),
            },
        ),
        "latent-decoder": _of(diffusion.LatentDecoder, lambda: diffusion.noise(4, 16)),
        "dit": _of(
            diffusion.DiffusionTransformer,
            lambda: {**diffusion.noise(4, 32), "time": torch.randn(1, 256)},
        ),
        "dcgan": _of(
            lambda: sequence([diffusion.image_generator()]), lambda: diffusion.noise(100, 1, 16)
        ),
        "esrgan": _image(diffusion.super_resolution, 48),
        **_released("swin2sr"),
    },
    "speech recognition": {
        **_released("whisper", "wav2vec2", "hubert", "conformer", "moonshine"),
        "deep-speech-2": _of(sound.DeepSpeech, lambda: sound.frames(80, 100)),
        "rnn-t": _of(
            sound.Transducer, lambda: {**sound.frames(320, 50, last=True), "ids": _ids(12, 1000)}
        ),
        "quartznet": _of(lambda: sequence([sound.quartznet()]), lambda: sound.frames(64, 200)),
        "voice-activity": _of(sound.VoiceActivity, lambda: {"x": _sound(1024)}),
    },
    "speech synthesis and codecs": {
        "hifi-gan": _of(sound.HifiGan, lambda: sound.frames(80, 32)),
        "tacotron-2": _of(sound.Tacotron, lambda: {"ids": _ids(48, 148)}),
        "vocos": _of(sound.Vocos, lambda: sound.frames(100, 128)),
        **_released("vits", "encodec", "dac", "mimi"),
    },
    "OCR and recurrent networks": {
        "crnn": _of(sequences.Crnn, lambda: {"x": torch.randn(1, 1, 32, 160)}),
        "text-detector": _image(detection.text_detector, 256),
        **_released("trocr-encoder", "trocr"),
        "lstm-language-model": _of(
            lambda: sequences.RecurrentModel(nn.LSTM, 512, 512, 2, 4000, False),
            lambda: {"ids": _ids(64)},
        ),
        "lstm-tagger": _of(lambda: _TAGGER(nn.LSTM, 300, 256, 2, 17), lambda: {"ids": _ids(64)}),
        "gru-encoder": _of(lambda: _TAGGER(nn.GRU, 300, 512, 2, 128), lambda: {"ids": _ids(64)}),
        "gru-translator": _of(sequences.Translator, lambda: {"ids": _ids(32), "written": _ids(12)}),
    },
    "recommenders, graphs and time series": {
        "dlrm": _of(
            sequences.Dlrm,
            lambda: {"dense": torch.randn(64, 13), "ids": torch.randint(1000, (64, 26))},
        ),
        "dcn-v2": _of(
            sequences.DeepCross,
            lambda: {"dense": torch.randn(64, 13), "ids": torch.randint(26000, (64, 26))},
        ),
        "two-towers": _of(
            sequences.TwoTowers,
            lambda: {name: torch.randint(2000, (64, 8)) for name in ("users", "items")},
        ),
        "sasrec": _of(sequences.SequentialChoice, lambda: {"ids": _ids(50, rows=4)}),
        "gcn": _of(
            sequences.GraphConvolution,
            lambda: {"x": torch.rand(500, 1433), "edges": torch.rand(500, 500) / 500},
        ),
        "gat": _of(
            sequences.GraphAttention,
            lambda: {
                "x": torch.rand(500, 500),
                **{end: torch.randint(500, (2000,)) for end in ("source", "target")},
            },
        ),
        "n-beats": _of(sequences.NBeats, lambda: {"x": torch.randn(64, 96)}),
        "tcn": _of(sequences.TemporalConvolution, lambda: {"x": torch.randn(8, 16, 96)}),
        "deepar": _of(sequences.DeepAr, lambda: {"x": torch.randn(8, 48, 8)}),
        **_released("patchtst", "time-series-transformer"),
    },
}


def build(field: str, name: str) -> tuple[nn.Module, Inputs]:
    """Returns the model in eval mode and its inputs, the same at each call."""
    torch.manual_seed(0)
    model, inputs = FIELDS[field][name]()
    return model.eval(), inputs
