"""Other ways to run a model fast on a CPU, for the whole-model benchmark; none is required."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.common import compiled_apart
from benchmarks.linear_peers import ZENTORCH, codes_of
from benchmarks.peer import Run, UnsupportedError, Way
from benchmarks.peer_ctranslate2 import ctranslate2_int8
from benchmarks.subjects import Decode, Inputs, Outputs

GROUP = 64  # activations that share a scale in OpenVINO: the fastest group, as exact as larger ones


# --- PyTorch's own, and torchao ---


def torch_dynamic(model: nn.Module, inputs: Inputs) -> Run:
    """Runs torch's dynamic quantization; weights and activations have 7 bits if the CPU has no
    VNNI."""
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return lambda: quantized(*inputs)


def frozen(
    backend: str, model: nn.Module, inputs: Inputs, autocast: bool = False, **settings: Any
) -> Run:
    """Runs a compiled model whose weights are frozen. Without that, autocast would convert them at
    each call. `settings`: those of Inductor."""
    from torch._inductor import config

    compiled = compiled_apart(model, backend)

    def run() -> Outputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compiled(*inputs)

    with config.patch({"freezing": True, **settings}):
        run()
    return run


def bfloat16_parameters(model: nn.Module, inputs: Inputs) -> Run:
    """Runs a model whose parameters and inputs are bfloat16, so that LayerNorm has no float32
    either."""
    given = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    return frozen("inductor", copy.deepcopy(model).bfloat16(), given)


# What torchao's documentation sets on CPUs beside freezing.
RECIPE = {"cpp_wrapper": True, "max_autotune": True, "cpp.enable_concat_linear": True}


def torchao_compiled(settings: dict[str, Any], model: nn.Module, inputs: Inputs) -> Run:
    """Runs torchao with frozen weights, as its documentation recommends on CPUs.
    `set_inductor_config` is meant for GPUs, and would change Inductor for every candidate."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return frozen("inductor", quantized, inputs, **settings)


# --- zentorch ---


def zentorch(model: nn.Module, inputs: Inputs, int8: bool = False, autocast: bool = False) -> Run:
    """Runs AMD's backend of torch.compile, on a copy of the model because it reorders weights in
    place. Its pass would stay in Inductor, for every later candidate. It prepacks no int8 weights:
    with K > N the product of a prepacked one is wrong."""
    from zentorch import _C

    if not _C.is_avx512_supported():
        raise UnsupportedError("zentorch needs AVX-512.")
    if isinstance(model, Decode):
        raise UnsupportedError("The attention of zentorch fails with one query.")
    own = copy.deepcopy(model)
    linears = [(name, m) for name, m in own.named_modules() if isinstance(m, nn.Linear)]
    for name, linear in linears if int8 else ():
        own.set_submodule(name, ZentorchLinear(linear))
    with mock.patch.dict(os.environ, {"ZENTORCH_WEIGHT_PREPACK": str(int(not int8))}):
        return frozen("zentorch", own, inputs, autocast, joint_custom_post_pass=None)


class ZentorchLinear(nn.Module):
    """A linear with int8 weights, one scale for each output, and one for each token at run time."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scales = codes_of(linear.weight.detach())
        self.codes, self.scales = nn.Buffer(codes), nn.Buffer(scales.flatten())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        run = torch.ops.zentorch.zentorch_dynamic_qlinear
        return run(x.contiguous(), self.codes, self.scales, self.bias)


# --- ONNX Runtime ---


def onnx_float(model: nn.Module, inputs: Inputs) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return session_of(onnx_file(model, inputs, Path(folder)), inputs)


def onnx_dynamic(
    weights: str,
    reduce_range: bool,
    model: nn.Module,
    inputs: Inputs,
    kinds: Sequence[str] | None = None,
) -> Run:
    """Runs ONNX Runtime's dynamic quantization: weights per channel, where `weights` is QInt8 or
    QUInt8, and uint8 activations per tensor. `kinds`: operators, all that it knows by default."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        proto = onnx.load(onnx_file(model, inputs, Path(folder)))
        del proto.graph.value_info[:]  # of the float graph: quantize_dynamic trips over them
        int8 = Path(folder) / "int8.onnx"
        weight_type = QuantType.from_string(weights)
        quantize_dynamic(
            proto,
            int8,
            op_types_to_quantize=kinds,
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=weight_type,
        )
        return session_of(int8, inputs)


def onnx_file(model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    path = folder / "float.onnx"
    torch.onnx.export(model, inputs, path, dynamo=True, verbose=False)
    return path


def session_of(path: Path, inputs: Inputs) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return lambda: _tensors(session.run(None, feeds))


# --- OpenVINO ---


def openvino(change: Callable[[Any], Any], model: nn.Module, inputs: Inputs) -> Run:
    """Runs OpenVINO. `change` changes the converted model, or returns another."""
    import openvino

    converted = openvino.convert_model(torch.export.export(model, inputs))
    converted = change(converted) or converted
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
    }
    request = openvino.Core().compile_model(converted, "CPU", options).create_infer_request()
    feeds = [x.numpy() for x in inputs]

    def run() -> Outputs:
        found = request.infer(feeds, share_inputs=True, share_outputs=True)
        return _tensors(found[i] for i in range(len(found)))

    return run


def int8_weights(model: Any) -> None:
    """Converts the weights of an OpenVINO model to int8, symmetric, one scale for each output; the
    CPU plugin then quantizes activations at run time. NNCF's `compress_weights` writes the same
    nodes."""
    import numpy as np
    from openvino import opset13

    for node in model.get_ordered_ops():
        weight = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if weight is None or weight.get_type_name() != "Constant" or len(weight.shape) != 2:
            continue
        k_axis = 1 if node.get_attributes()["transpose_b"] else 0
        peak = np.abs(weight.data).max(axis=k_axis, keepdims=True)
        scale = np.where(peak > 0, peak / 127, np.float32(1))  # the row of a padding token is zero
        codes = opset13.constant(np.rint(weight.data / scale).astype(np.int8))
        product = opset13.multiply(opset13.convert(codes, "f32"), opset13.constant(scale))
        node.input(1).replace_source_output(product.output(0))


def _tensors(arrays: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, arrays))


ONNX = ("onnx", "onnxruntime", "onnxscript")
PEERS: dict[str, Way] = {
    "bfloat16 Inductor": Way(partial(frozen, "inductor", autocast=True)),
    "bfloat16 Inductor, bfloat16 parameters": Way(bfloat16_parameters),
    "torch quantize_dynamic": Way(torch_dynamic),
    "torchao W8A8": Way(partial(torchao_compiled, {}), packages=("torchao",)),
    "torchao W8A8 by its recipe": Way(partial(torchao_compiled, RECIPE), packages=("torchao",)),
    "zentorch float32": Way(zentorch, packages=ZENTORCH),
    "zentorch bfloat16": Way(partial(zentorch, autocast=True), packages=ZENTORCH),
    "zentorch int8": Way(partial(zentorch, int8=True), packages=ZENTORCH),
    "ONNX Runtime float32": Way(onnx_float, packages=ONNX),
    "ONNX Runtime int8": Way(partial(onnx_dynamic, "QInt8", False), packages=ONNX),
    "ONNX Runtime 7-bit weights": Way(partial(onnx_dynamic, "QInt8", True), packages=ONNX),
    "ONNX Runtime uint8 weights": Way(partial(onnx_dynamic, "QUInt8", False), packages=ONNX),
    "OpenVINO float32": Way(partial(openvino, lambda model: None), packages=("openvino",)),
    "OpenVINO int8": Way(partial(openvino, int8_weights), packages=("openvino",)),
    "CTranslate2 int8": Way(ctranslate2_int8, packages=("ctranslate2",)),
}
