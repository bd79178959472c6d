"""Exports to ONNX, and ONNX Runtime. A test that imports this module is skipped where they are not
installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx

WHY = "the extra `onnx` is not installed"
onnx = pytest.importorskip("onnx", reason=WHY)
onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)


def exported(
    model: nn.Module, inputs: Any, dims: Any, weights: str = "uint8", optimize: bool = True
) -> Any:
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=dims)
    table = qfx.onnx_translation_table(weights)
    how = {"opset_version": 21, "optimize": optimize, "verbose": False}
    return torch.onnx.export(program, custom_translation_table=table, **how)


class Session:
    """ONNX Runtime with the model of a file, on one thread of the CPU."""

    def __init__(self, model: Any, path: Path) -> None:
        model.save(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.optimized_model_filepath = str(path) + ".optimized"
        self.running = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        nodes = onnx.load(options.optimized_model_filepath).graph.node
        self.operators = [node.op_type for node in nodes]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        names = [each.name for each in self.running.get_inputs()]
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in self.running.run(None, given)]
