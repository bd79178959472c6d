"""What Inductor makes of a graph on a GPU, found where there is none.

    python -m tests.cuda.inductor SCHEME...

Prints a JSON object with an object for each scheme: `launches`, the kernels and operators that the
code calls, in order; `codes`, how many int8 matrices it allocates; `kernels`, for each Triton
kernel, the divisions in its PTX for sm_90 and the bytes of stack of its machine code. Needs Triton,
which compiles without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.device_interface as devices
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.functional as F
import triton
from torch import Tensor, fx, nn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

import qfx
from qfx.host.inductor import inductor, settings
from qfx.ops import FAKES
from tests.cuda import objects as cuda_objects
from tests.cuda.graphs import as_if_built, fake, on_cuda

CAPABILITY = (9, 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, total_memory=141 * 2**30, L2_cache_size=60 * 2**20,
)  # fmt: skip
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)
_LAUNCH = re.compile(r"(triton)_\w+\.run\(|= torch\.ops\.qfx\.(\w+)\.default\(")


class Block(nn.Module):
    """A norm whose output q and k read, and a product of two outputs that o reads."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.q, self.k = (nn.Linear(features, inner, bias=False) for _ in range(2))
        self.o = nn.Linear(inner, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = F.rms_norm(x, self.scale.shape, self.scale)
        return x + self.o(F.silu(self.q(read)) * self.k(read))


def pretend() -> None:
    """PyTorch and Triton find an H200, as far as compiling asks."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: H200  # type: ignore[assignment, return-value]
    devices.CudaInterface.get_device_properties = staticmethod(lambda *_: H200)
    devices.CudaInterface.get_compute_capability = staticmethod(lambda *_: 90)  # type: ignore[assignment]
    devices.caching_worker_current_devices["cuda"] = 0
    devices.caching_worker_device_properties["cuda"] = [H200]
    fake_tensor.init_gpu_context = lambda *_: None
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_device_capability=lambda *_: CAPABILITY, is_active=lambda: True,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    as_if_built(pytest.MonkeyPatch())


def as_aten(gm: fx.GraphModule, x: Tensor) -> tuple[fx.GraphModule, list[Tensor]]:
    """The rewritten graph in Inductor's operators, and fake inputs on a GPU: x, the constants."""
    mode = FakeTensorMode()
    names = [n.target for n in gm.graph.nodes if n.op == "get_attr"]
    constants = {name: fake(mode, _attribute(gm, name)) for name in names}

    def run(x: Tensor, *tensors: Tensor) -> Any:
        given = dict(zip(constants, tensors, strict=True))

        class WithConstants(fx.Interpreter):
            def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
                return given[target]

        return WithConstants(gm).run(x)

    inputs = [fake(mode, x), *constants.values()]
    with mode:
        return make_fx(run, decomposition_table=select_decomp_table())(*inputs), inputs


def _attribute(gm: fx.GraphModule, path: str) -> Tensor:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    return found.detach()  # type: ignore[no-any-return]


def code_of(aten: fx.GraphModule, inputs: list[Tensor]) -> str:
    """The module that Inductor would run."""
    inductor({}, None, [getattr(torch.ops.qfx, name) for name in FAKES], "")
    graph = GraphLowering(aten, example_inputs=inputs)
    mode = inputs[0].fake_mode  # type: ignore[attr-defined]
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        torch._inductor.config.patch(settings(aten, {"aten", "prims", "qfx"})),
    ):
        graph.run(*inputs)
        code, *_ = graph.codegen()
    return code.value


def kernels_of(code: str, folder: Path) -> list[dict[str, Any]]:
    """What Triton makes of each kernel, with the first configuration that would be tried."""
    found = []
    for name, source in _KERNEL.findall(code):
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        with _compilations() as compiled:
            tuner._precompile_config(tuner.configs[0])
        made = compiled[0].asm
        (cubin := folder / f"{name}.cubin").write_bytes(made["cubin"])
        (stack,) = cuda_objects.memory_of_kernels(cubin).values()
        divisions = sorted(set(re.findall(r"\b(?:div|rcp)\.[a-z.]*f32", made["ptx"])))
        found.append({"name": name, "divisions": divisions, "stack": stack})
    return found


@contextmanager
def _compilations() -> Iterator[list[Any]]:
    """What Triton returns meanwhile; Inductor itself keeps only what it launches."""
    results: list[Any] = []
    compiler = triton.compile

    def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
        results.append(compiler(*args, **kwargs))
        return results[-1]

    with mock.patch.object(triton, "compile", compile_and_keep):
        yield results


def made(module: nn.Module, x: Tensor, scheme: str) -> dict[str, Any]:
    with torch.no_grad():
        config = qfx.Config(scheme=scheme, minimum_gain=0)
        gm, _ = qfx.rewrite(on_cuda(qfx.trace(module, x)), config)
        code = code_of(*as_aten(gm, x))
    body = code[code.index("def call(") :]
    with tempfile.TemporaryDirectory() as folder:
        kernels = kernels_of(code, Path(folder))
    launches = [kernel or operator for kernel, operator in _LAUNCH.findall(body)]
    codes = len(re.findall(r"empty_strided_cuda\(\(\d+, \d+\), \(\d+, 1\), torch\.int8\)", body))
    return {"launches": launches, "codes": codes, "kernels": kernels}


def main() -> None:
    pretend()
    module, x = Block(4096, 1024).bfloat16(), torch.randn(64, 4096, dtype=torch.bfloat16)
    print(json.dumps({scheme: made(module, x, scheme) for scheme in sys.argv[1:]}))


if __name__ == "__main__":
    main()
