"""Libraries in which people have their models, by the lines of docs/libraries.md: pipelines of
transformers and sentence-transformers, with texts of all lengths."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

import qfx
from qfx.hf import QfxConfig
from qfx.ops.single_tensors import sqnr
from tests.lib.int8_calls import int8_matmuls

TEXT = "the river rises by two metres each spring and nobody asked who would pay for it"
WORDS = TEXT.split()
TEXTS = [" ".join(WORDS[i % 5 : i % 5 + 2 + i % 11]) for i in range(14)]  # 2 to 12 words
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
LINEARS = 14  # of a classifier: six of each layer, the pooler, the head
# Compiled by no C++ compiler; the plans are the same.
COMPILE: dict[str, Any] = {
    "backend": "qfx", "dynamic": True, "options": {"minimum_gain": 0, "inner": "eager"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            made[kind] = str(written(kind, tmp_path_factory.mktemp(kind)))
        return made[kind]

    return folder


def written(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = {
        "encoder": lambda: BertModel(BertConfig(**SIZES)),
        "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES)),
        "ranker": lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)),
        "decoder": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None)),
    }[kind]()
    model.save_pretrained(folder)
    names = ["[PAD]", "[UNK]", *dict.fromkeys(WORDS)]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    fast.save_pretrained(folder)
    return folder


def ran_int8(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call returns, and how many int8 matmuls it ran."""
    found, counts = int8_matmuls(call)
    return found, sum(n for name, n in counts.items() if name.startswith("qfx::linear"))


def encoded(model: SentenceTransformer) -> tuple[Tensor, int]:
    call = lambda: model.encode(TEXTS, batch_size=4, convert_to_tensor=True)  # noqa: E731
    found, count = ran_int8(call)
    return found.clone(), count


def sentences(folder: str, **kwargs: Any) -> SentenceTransformer:
    return SentenceTransformer(folder, device="cpu", **kwargs)


def test_sentences_of_a_model_that_is_quantized_while_it_is_loaded(
    folders: Callable[[str], str], tmp_path: Path
) -> None:
    exact, none = encoded(sentences(folders("encoder")))
    model = sentences(folders("encoder"), model_kwargs={"quantization_config": QfxConfig()})
    found, count = encoded(model)
    assert (
        none == 0 and count == 4 * (LINEARS - 1) and 25 < sqnr(exact, found) < 60
    )  # batches x linears, without the head
    model.save_pretrained(str(tmp_path))
    assert torch.equal(encoded(sentences(str(tmp_path)))[0], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sentences_of_a_compiled_model(folders: Callable[[str], str], dtype: torch.dtype) -> None:
    """One graph for all lengths: another one for a single text, whose batch is 1."""
    exact, _ = encoded(sentences(folders("encoder")))
    model = sentences(folders("encoder"), model_kwargs={"dtype": dtype})
    model.compile(**COMPILE)
    counters.clear()
    found, count = encoded(model)
    assert count == 4 * (LINEARS - 1) and 25 < sqnr(exact, found.float()) < 60
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    model.encode(TEXTS[:3])
    model.encode(TEXTS[0])
    assert counters["stats"]["unique_graphs"] <= 2


def test_the_module_inside_is_called_around_what_is_compiled(
    folders: Callable[[str], str],
) -> None:
    """As the page says. Whoever reads this fail may write shorter lines there."""
    model = sentences(folders("encoder"))
    model[0].auto_model.compile(**COMPILE)
    assert encoded(model)[1] == 0
    model[0].auto_model.forward = torch.compile(model[0].auto_model.forward, **COMPILE)
    assert encoded(model)[1] == 4 * (LINEARS - 1)


@pytest.mark.parametrize("way", ["loaded", "compiled"])
def test_pairs_that_are_ranked(folders: Callable[[str], str], way: str) -> None:
    pairs = [*zip(TEXTS, TEXTS[3:] + TEXTS[:3], strict=True)]
    exact = CrossEncoder(folders("ranker"), device="cpu").predict(pairs, convert_to_tensor=True)
    given = {"model_kwargs": {"quantization_config": QfxConfig()}} if way == "loaded" else {}
    model = CrossEncoder(folders("ranker"), device="cpu", **given)
    if way == "compiled":
        model.compile(**COMPILE)
    found, count = ran_int8(lambda: model.predict(pairs, convert_to_tensor=True))
    assert count >= LINEARS and 20 < sqnr(exact, found.clone()) < 90


def classifier(way: str, folder: str) -> Any:
    if way == "loaded":
        kwargs = {"quantization_config": QfxConfig()}
        return pipeline("text-classification", folder, device="cpu", model_kwargs=kwargs)
    pipe: Any = pipeline("text-classification", folder, device="cpu")
    if way == "quantized":
        qfx.quantize_(pipe.model)
    elif way == "compiled in place":
        pipe.model.compile(**COMPILE)
    elif way == "compiled":
        pipe.model = torch.compile(pipe.model, **COMPILE)
    return pipe


@pytest.mark.parametrize("way", ["loaded", "quantized", "compiled in place", "compiled"])
def test_classification(folders: Callable[[str], str], way: str) -> None:
    """Of texts of all lengths, in batches and one by one."""
    exact = classifier("float", folders("classifier"))(TEXTS, batch_size=4)
    pipe = classifier(way, folders("classifier"))
    for size in (4, 1):
        found, count = ran_int8(lambda size=size: pipe(TEXTS, batch_size=size))
        assert count == -(-len(TEXTS) // size) * LINEARS
        assert [f["label"] for f in found] == [e["label"] for e in exact]
        assert max(abs(f["score"] - e["score"]) for f, e in zip(found, exact, strict=True)) < 0.05


def continued(pipe: Any) -> tuple[list[str], int, list[str]]:
    """Three texts with six new tokens each, the int8 matmuls, and the warnings of qfx."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, count = ran_int8(lambda: pipe(TEXTS[:3], max_new_tokens=6, do_sample=False))
    texts = [each[0]["generated_text"] for each in found]
    return texts, count, [str(w.message) for w in told if "qfx" in str(w.message)]


def test_text_of_a_model_that_is_quantized_while_it_is_loaded(
    folders: Callable[[str], str],
) -> None:
    kwargs = {"quantization_config": QfxConfig()}
    pipe = pipeline("text-generation", folders("decoder"), device="cpu", model_kwargs=kwargs)
    texts, count, told = continued(pipe)
    assert count >= 3 * 6 * 14 and told == []
    qfx.compile_for_generate(pipe.model, max_length=32)  # the same weights as programs
    again, _, told = continued(pipe)
    same = sum(a == b for a, b in zip(texts, again, strict=True))
    assert told == [] and same >= 2  # its cache is int8


@pytest.mark.parametrize("way", ["compiled", "compiled in place", "a layer in int8", "another"])
def test_the_warning_that_generate_runs_nothing_of_qfx(
    folders: Callable[[str], str], way: str
) -> None:
    pipe: Any = pipeline("text-generation", folders("decoder"), device="cpu")
    inner = pipe.model
    if way == "compiled in place":
        inner.compile(**COMPILE)
    elif way == "a layer in int8":
        qfx.quantize_(inner, qfx.Config(only=["model.layers.0"]))
    backend = {"backend": "eager"} if way == "another" else COMPILE
    pipe.model = torch.compile(inner, **backend)
    _, count, told = continued(pipe)
    assert (count == 0) is (way in ("compiled", "another"))
    if way != "compiled":
        assert told == []
        return
    (text,) = told  # once, in three calls
    assert text == (
        'torch.compile(model, backend="qfx").generate runs nothing of qfx: it is a method of the '
        "LlamaForCausalLM inside, whose forward is not compiled. Compile that model in place, "
        'model.compile(backend="qfx"), or compile its step by qfx.compile_for_generate(model).'
    )
    assert continued(pipe)[2] == []


def test_methods_of_other_models_warn_too(folders: Callable[[str], str]) -> None:
    model: Any = torch.compile(sentences(folders("encoder")), **COMPILE)
    with pytest.warns(UserWarning, match=r"encode runs nothing of qfx: it is a method of the Sent"):
        model.encode(TEXTS[:2])

    class Predictor(nn.Linear):
        def predict(self, x: Tensor) -> Tensor:
            return self(x).argmax(-1)

    with pytest.warns(
        UserWarning, match=r"predict runs nothing .* Predictor inside, .*place, \S+$"
    ):
        torch.compile(Predictor(64, 64), **COMPILE).predict(torch.ones(2, 64))
