"""OpenVINO GenAI as benchmarks/decode.py runs it: a stateful model, with weights in 8 or 4 bits.

The model has the same nodes as one exported by optimum-intel: keys and values are state of the
model, whose sequences `beam_idx` reorders, and weights are integers with a scale for each output or
group. The step is a call of OpenVINO's runtime, and `generate` that of an LLMPipeline on the same
file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.converted import converted
from benchmarks.decode_exported import FULL, SLIDING
from benchmarks.decode_static import Case
from benchmarks.peers import GROUP
from benchmarks.subjects import cache_of

PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers")
NAME = "openvino_model"


class Told(nn.Module):
    """The exported module: tokens [B, L], a mask [B, P + L], places [B, L] and keys and values [B,
    heads, P, D], two per layer -> logits [B, L, V] and the longer keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.window = getattr(model.config, "sliding_window", None)

    def forward(self, tokens: Tensor, mask: Tensor, places: Tensor, *past: Tensor) -> Any:
        key, query = mask.cumsum(-1)[:, None, None] - 1, places[:, None, :, None]
        seen = (key <= query) & (mask != 0)[:, None, None]
        masks = {FULL: seen}
        if self.window:
            masks[SLIDING] = seen & (key > query - self.window)
        kinds = hasattr(self.model.config, "layer_types")
        cache = cache_of(past)
        found = self.model(
            input_ids=tokens,
            attention_mask=masks if kinds else seen,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
        return found.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


class OpenVino:
    def __init__(self, weights: Callable[[Any], None], case: Case, model: Any) -> None:
        import openvino

        form = f"openvino-{weights.__name__.replace('_', '-')}-{openvino.__version__[:10]}"
        self.folder = converted(form, model, partial(_write, weights, case.folder, model))
        core, path = openvino.Core(), self.folder / f"{NAME}.xml"
        self.weights = _read(core.read_model(path), model.config)
        self.options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
        }
        self.request = core.compile_model(path, "CPU", self.options).create_infer_request()
        self.texts, self.told = case.batch, 0
        self.pipeline: Any = None

    def prefill(self, tokens: Tensor) -> Tensor:
        self.request.reset_state()
        self.told = 0
        return self.step(tokens)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        told = self.told + token.shape[1]
        given = {
            "input_ids": token.numpy(),
            "attention_mask": np.ones((self.texts, told), np.int64),
            "position_ids": np.tile(np.arange(self.told, told), (self.texts, 1)),
            "beam_idx": np.arange(self.texts, dtype=np.int32),
        }
        self.told = told
        found = self.request.infer(given, share_inputs=True, share_outputs=True)
        return torch.from_numpy(found["logits"][:, -1].copy())

    def generate(self, tokens: Tensor, new: int) -> Tensor:
        """Generates greedily and returns sequences [B, new]."""
        import openvino
        import openvino_genai as genai

        if self.pipeline is None:
            # The graph of the step: its other way, by pages, is made for many requests at once.
            options = {**self.options, "ATTENTION_BACKEND": "SDPA"}
            self.pipeline = genai.LLMPipeline(self.folder, "CPU", **options)
        told = genai.TokenizedInputs(
            openvino.Tensor(tokens.numpy()), openvino.Tensor(torch.ones_like(tokens).numpy())
        )
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        return torch.tensor(self.pipeline.generate(told, config).tokens)


def _write(weights: Callable[[Any], None], source: Path, model: Any, folder: Path) -> None:
    import openvino

    folder.mkdir()
    made = stateful(model)
    weights(made)
    openvino.save_model(made, folder / f"{NAME}.xml", compress_to_fp16=False)
    model.config.save_pretrained(folder)
    _write_tokenizer(source, folder)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Writes the tokenizer that the pipeline requires, although it receives tokens. Models of tests
    have none."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    if not (source / "tokenizer.json").exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(source)
    made = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, one in zip(("tokenizer", "detokenizer"), made, strict=True):
        openvino.save_model(one, folder / f"openvino_{name}.xml")


def stateful(model: Any) -> Any:
    """Returns an OpenVINO model of input_ids, attention_mask, position_ids and beam_idx, which
    keeps the keys and values of earlier inputs."""
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = model.config
    count = 2 * config.num_hidden_layers
    past = [torch.zeros(2, config.num_key_value_heads, 3, config.head_dim)] * count
    given = torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    example = (*given, torch.arange(3, 5).repeat(2, 1), *past)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing
        made = openvino.convert_model(Told(model), example_input=example)
    past_names, present = ([f"{w}.{i}" for i in range(count)] for w in ("past", "present"))
    _name(made.inputs, ["input_ids", "attention_mask", "position_ids", *past_names])
    _name(made.outputs, ["logits", *present])
    texts = opset13.parameter([-1], np.int32, name="beam_idx")
    _name([texts.output(0)], ["beam_idx"])
    made.add_parameters([texts])
    for port in map(made.input, past_names):
        readers = port.get_target_inputs()
        ordered = opset13.gather(port, texts, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, dict(zip(past_names, present, strict=True)))
    _start_empty(made, config)
    return made


def _name(ports: Any, names: list[str]) -> None:
    for port, name in zip(ports, names, strict=True):
        port.get_tensor().set_names({name})


def _start_empty(made: Any, config: Any) -> None:
    """Makes the initial states empty, with as many sequences as the tokens have."""
    from openvino import opset13

    tokens = opset13.shape_of(made.input("input_ids"), "i64")
    texts = opset13.gather(tokens, opset13.constant([0]), opset13.constant(0))
    rest = opset13.constant(np.array([config.num_key_value_heads, 0, config.head_dim]))
    empty = opset13.broadcast(
        opset13.constant(np.float32(0)), opset13.concat([texts, rest], axis=0)
    )
    for node in made.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    made.validate_nodes_and_infer_types()


def int4_weights(model: Any) -> None:
    """Converts weights to int4, symmetric, with a scale for each GROUP of an output, as NNCF's
    `compress_weights` does."""
    import openvino
    from openvino import opset13

    for node in model.get_ordered_ops():
        weight = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if weight is None or weight.get_type_name() != "Constant" or len(weight.shape) != 2:
            continue
        assert node.get_attributes()["transpose_b"]
        n, k = weight.shape
        groups = weight.data.reshape(n, k // GROUP, GROUP)
        peak = np.abs(groups).max(axis=2, keepdims=True)
        scale = np.where(peak > 0, peak / 7, np.float32(1)).astype(np.float32)
        codes = np.rint(groups / scale).astype(np.int8).reshape(-1, 2) & 15
        packed = (codes[:, 0] | (codes[:, 1] << 4)).astype(np.uint8)
        held = openvino.Tensor(openvino.Type.i4, openvino.Shape(groups.shape))
        held.data[:] = packed.view(np.int8)  # a tensor made of an array does not keep it
        constant = opset13.convert(opset13.constant(held), "f32")
        values = opset13.multiply(constant, opset13.constant(scale))
        whole = opset13.reshape(values, opset13.constant(np.array([n, k])), False)
        node.input(1).replace_source_output(whole.output(0))


def _read(model: Any, config: Any) -> int:
    """Returns the bytes that a step reads: all constants except the float embedding, of which it
    reads a row. The head has integers of its own."""
    nodes = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    table = [config.vocab_size, config.hidden_size]
    return sum(
        node.get_byte_size()
        for node in nodes
        if (node.get_element_type().get_type_name(), list(node.shape)) != ("f32", table)
    )
