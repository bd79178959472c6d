"""Models that the tests of commands name: small ones of each kind, as files."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from tests.lib.gguf_files import Kind, llama_gguf

WORDS = 200


def _tokenizer(folder: Path) -> None:
    words = WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", pad_token="w2"
    ).save_pretrained(folder)


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=1, bos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama(folder: Path) -> Path:
    """A language model in bfloat16, with a tokenizer of words w0, w1, ..."""
    _llama().to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(folder)
    return folder


def gguf(path: Path) -> Path:
    """The same language model in codes of 8 bits, without a tokenizer."""
    sizes = {
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.context_length": 256,
        "llama.vocab_size": WORDS,
    }
    llama_gguf(path, _llama(), [Kind.Q8_0], more=sizes)
    return path


def bert(folder: Path) -> Path:
    """A classifier of texts, without a tokenizer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def vit(folder: Path) -> Path:
    """A classifier of images."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def exported(path: Path) -> Path:
    """A program of torch.export."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    with torch.no_grad():
        program = torch.export.export(model.eval(), (torch.randn(8, 64),))
    torch.export.save(program, path)
    return path
