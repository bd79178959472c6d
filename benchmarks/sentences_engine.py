"""A sentence encoder that answers lines of JSON, run by benchmarks/sentences.py in an environment
that has sentence-transformers: first a way and a folder, then texts. `export FORM FOLDER TARGET
TEXTS` writes the files of a backend instead.

Each way is what a user of sentence-transformers types, with the number of threads in addition.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_MB = 1024  # KB


def loaded(folder: str, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu", **options)


def eager(folder: str, threads: int, **options: Any) -> Any:
    return loaded(folder, model_kwargs=options)


def bfloat16(folder: str, threads: int) -> Any:
    import torch

    return eager(folder, threads, dtype=torch.bfloat16)


def int8(folder: str, threads: int) -> Any:
    import qfx.hf

    return eager(folder, threads, quantization_config=qfx.hf.QfxConfig())


def compiled(load: Callable[..., Any], backend: str) -> Callable[[str, int], Any]:
    def prepare(folder: str, threads: int) -> Any:
        model = load(folder, threads)
        model.compile(backend=backend, dynamic=True)
        return model

    return prepare


def onnx(folder: str, threads: int, **options: Any) -> Any:
    from onnxruntime import SessionOptions

    session = SessionOptions()
    session.intra_op_num_threads, session.inter_op_num_threads = threads, 1
    options |= {"session_options": session, "provider": "CPUExecutionProvider"}
    return loaded(folder, backend="onnx", model_kwargs=options)


def onnx_int8(folder: str, threads: int) -> Any:
    return onnx(folder, threads, file_name=f"model_qint8_{onnx_isa()}.onnx")


def openvino(folder: str, threads: int, **options: Any) -> Any:
    options["ov_config"] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    return loaded(folder, backend="openvino", model_kwargs=options)


def openvino_int8(folder: str, threads: int) -> Any:
    return openvino(folder, threads, file_name="openvino_model_qint8_quantized.xml")


class Way(NamedTuple):
    """`prepare(folder, threads)` returns a SentenceTransformer. `form`: the files that it reads,
    '' for the model's own."""

    prepare: Callable[..., Any]
    form: str = ""


WAYS = {
    "float32": Way(eager),
    "bfloat16": Way(bfloat16),
    "float32 Inductor": Way(compiled(eager, "inductor")),
    "bfloat16 Inductor": Way(compiled(bfloat16, "inductor")),
    "qfx int8 weights": Way(int8),
    "qfx int8 weights compiled": Way(compiled(int8, "qfx")),
    "qfx compiled": Way(compiled(eager, "qfx")),
    "qfx compiled bfloat16": Way(compiled(bfloat16, "qfx")),
    "ONNX": Way(onnx, "onnx"),
    "ONNX int8": Way(onnx_int8, "onnx-int8"),
    "OpenVINO": Way(openvino, "openvino"),
    "OpenVINO int8": Way(openvino_int8, "openvino-int8"),
}


def onnx_isa() -> str:
    """Returns the name that sentence-transformers has for the int8 instructions of this CPU."""
    if platform.machine() in ("aarch64", "arm64"):
        return "arm64"
    flags = Path("/proc/cpuinfo").read_text().split()
    known = {"avx512_vnni": "avx512_vnni", "avx512f": "avx512"}
    return next((name for flag, name in known.items() if flag in flags), "avx2")


def export(form: str, folder: str, target: str, texts: str) -> None:
    """Writes the folder `target`: the model with the files of a backend. `texts`: a folder with
    train.txt, which static quantization reads."""
    import sentence_transformers as st

    backend = form.partition("-")[0]
    model = loaded(folder, backend=backend)
    model.save_pretrained(target)
    if form == "onnx-int8":
        st.export_dynamic_quantized_onnx_model(model, onnx_isa(), target)
    if form == "openvino-int8":
        st.export_static_quantized_openvino_model(
            model, None, target, dataset_name=texts,
            dataset_config_name="default", dataset_split="train", column_name="text",
        )  # fmt: skip


def memory() -> dict[str, float]:
    """Returns the resident memory of this process, now and at its peak."""
    status = Path("/proc/self/status").read_text()
    fields = {"mb": "VmRSS:", "peak_mb": "VmHWM:"}
    return {name: int(status.split(key)[1].split()[0]) / _MB for name, key in fields.items()}


def encoded(model: Any, texts: list[str], batch: int, save: str, threads: int) -> dict[str, float]:
    """Returns the processor seconds that the texts take, or the elapsed ones for several threads.
    Writes the embeddings to the file `save`, if it has a name."""
    import numpy
    from torch._dynamo.utils import counters

    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    found = model.encode(texts, batch_size=batch, show_progress_bar=False)
    seconds = clock() - start
    if save:
        numpy.save(save, found)
    return {"seconds": seconds, "graphs": counters["stats"]["unique_graphs"], **memory()}


def main() -> None:
    given = json.loads(sys.stdin.readline())
    threads = given["threads"]
    import torch

    torch.set_num_threads(threads)
    model = WAYS[given["way"]].prepare(given["folder"], threads)
    print("#", json.dumps(memory()), flush=True)
    for line in sys.stdin:
        print("#", json.dumps(encoded(model, **json.loads(line), threads=threads)), flush=True)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are split by this thread, too
    if sys.argv[1:2] == ["export"]:
        export(*sys.argv[2:])
    else:
        main()
