"""Ways to run networks of convolutions and recurrent layers: float32 in both layouts, qfx, and the
int8 of other libraries; none of these is required.

Peers with static scales are calibrated on the same 30 inputs, which are not the measured one.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qfx
from benchmarks.models import compiled, eager
from benchmarks.network_models import IMAGE, TRANSFORMER, calibration
from benchmarks.peer import Run, Way
from benchmarks.peers import ONNX, frozen, onnx_dynamic, onnx_file, onnx_float, openvino, session_of
from benchmarks.results_cells import BASELINE
from benchmarks.subjects import Inputs
from qfx import _C

RNNS = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell)


def last(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Returns the model and its images with channels last in memory."""
    images = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs]
    own: Any = copy.deepcopy(model)
    return own.to(memory_format=torch.channels_last), tuple(images)


def eager_last(model: nn.Module, inputs: Inputs) -> Run:
    return eager(*last(model, inputs))


def int8(options: dict[str, Any], model: nn.Module, inputs: Inputs) -> Run:
    """Runs qfx. `quantize_` replaces recurrent layers, whatever the cost model predicts for them;
    the rest is compiled."""
    if names := [name for name, m in model.named_modules() if isinstance(m, RNNS)]:
        model = qfx.quantize_(copy.deepcopy(model), qfx.Config(only=tuple(names)))
    return compiled(partial(qfx.backend, options=options), model, inputs)


def torch_dynamic(model: nn.Module, inputs: Inputs) -> Run:
    """Runs torch's dynamic quantization of linears and recurrent layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        kinds = {nn.Linear, *RNNS}
        quantized = torch.ao.quantization.quantize_dynamic(model, kinds, dtype=torch.qint8)
    return lambda: quantized(*inputs)


def torchao_static(model: nn.Module, inputs: Inputs) -> Run:
    """Runs the quantization of exported graphs for Inductor on x86, which is now torchao's: static
    scales, weights per channel, frozen. Recurrent layers stay float."""
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
    for batch in calibration(model):
        prepared(*batch)
    converted = move_exported_model_to_eval(convert_pt2e(prepared))
    return frozen("inductor", converted, inputs)


class Reader:
    """Inputs in the form in which ONNX Runtime asks for them."""

    def __init__(self, names: Sequence[str], batches: Sequence[Inputs]) -> None:
        self.left = iter([{n: x.numpy() for n, x in zip(names, b, strict=True)} for b in batches])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.left, None)


def onnx_static(model: nn.Module, inputs: Inputs) -> Run:
    """Runs ONNX Runtime's static quantization in its usual form: quantize and dequantize nodes,
    int8 weights per channel, uint8 activations per tensor between the least and the largest value
    of the calibration. Recurrent layers stay float."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        exported, file = Path(folder) / "whole.onnx", Path(folder) / "ready.onnx"
        proto = onnx.load(onnx_file(model, inputs, Path(folder)))
        names = [i.name for i in proto.graph.input]
        onnx.save(proto, exported)  # with its weights, which what follows does not find elsewhere
        quant_pre_process(exported, file, skip_symbolic_shape=True)
        int8_file = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            file,
            int8_file,
            Reader(names, calibration(model)),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        return session_of(int8_file, inputs)


def nncf_static(transformer: bool, model: nn.Module, inputs: Inputs) -> Run:
    """Runs OpenVINO after NNCF's quantization with its defaults, for transformers with their type,
    and with one scale for each tensor of activations, as the other peers have. By default each
    channel before a depthwise convolution has its own, up to its largest value in the calibration:
    two photographs leave many channels of EfficientNet-Lite0 near zero, others then exceed them.
    """

    def change(converted: Any) -> Any:
        import nncf
        from nncf.quantization.advanced_parameters import QuantizationParameters

        batches = [[x.numpy() for x in batch] for batch in calibration(model)]
        kind = nncf.ModelType.TRANSFORMER if transformer else None
        whole = QuantizationParameters(per_channel=False)
        advanced = nncf.AdvancedQuantizationParameters(activations_quantization_params=whole)
        how = {"subset_size": len(batches), "model_type": kind, "advanced_parameters": advanced}
        with redirect_stdout(StringIO()):  # its bars of progress
            return nncf.quantize(converted, nncf.Dataset(batches), **how)

    return openvino(change, model, inputs)


def ways(traits: Sequence[str]) -> dict[str, Way]:
    """Returns the ways to run a network that has these traits."""
    best = _C.isas()[0]
    kinds: Sequence[str] = ("MatMul", "Gemm", "LSTM")
    found: dict[str, Way | None] = {
        BASELINE: Way(eager),
        "float32 eager, channels last": Way(eager_last) if IMAGE in traits else None,
        "float32 Inductor": Way(partial(compiled, "inductor")),
        "float32 Inductor, frozen": Way(partial(frozen, "inductor")),
        "qfx": Way(partial(int8, {}), best),
        "qfx, minimum_gain=0": Way(partial(int8, {"minimum_gain": 0}), best),
        "bfloat16 Inductor": Way(partial(frozen, "inductor", autocast=True)),
        "torch quantize_dynamic": Way(torch_dynamic),
        "torchao static": Way(torchao_static, packages=("torchao",)),
        "ONNX Runtime float32": Way(onnx_float, packages=ONNX),
        "ONNX Runtime int8 static": Way(onnx_static, packages=ONNX),
        "ONNX Runtime int8 dynamic": Way(
            partial(onnx_dynamic, "QInt8", False, kinds=kinds), packages=ONNX
        ),
        "OpenVINO float32": Way(partial(openvino, lambda model: None), packages=("openvino",)),
        "OpenVINO int8": Way(
            partial(nncf_static, TRANSFORMER in traits), packages=("openvino", "nncf")
        ),
    }
    return {name: way for name, way in found.items() if way is not None}
