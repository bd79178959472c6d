"""MiniLM on 32 news texts of 128 tokens, one thread: float32 eager, float32 Inductor and qfx."""

import copy
import time
from statistics import median

import torch
import torch.nn.functional as F
from minilm import embed, load, pearson_to_human
from tabulate import tabulate

import qfx

BATCH, ROUNDS = 32, 9
# The shapes are fixed, so a program may stand in the place of Inductor, which saves seconds.
COMPILERS = {
    "float32 Inductor": {"backend": "inductor"},
    "qfx int8": {"backend": "qfx", "options": {"inner": "program"}},
}
HEAD, TAIL = slice(BATCH), slice(-BATCH, None)


def embed_all(model, inputs, count):
    """float32 [count, 384], in two overlapping batches of the one shape that is compiled."""
    head, tail = (embed(model, {k: v[part] for k, v in inputs.items()}) for part in (HEAD, TAIL))
    return torch.cat([head, tail[2 * BATCH - count :]])


def milliseconds(model, inputs):
    start = time.perf_counter()
    model(**inputs)
    return (time.perf_counter() - start) * 1e3


torch.set_num_threads(1)
data = load(tokens=128)
batch = {k: v[HEAD] for k, v in data.inputs.items()}
models, found, first = {"float32 eager": data.model}, {}, {}
for name, how in COMPILERS.items():
    models[name] = torch.compile(copy.deepcopy(data.model), **how)
with torch.inference_mode():
    for name, model in models.items():
        first[name] = milliseconds(model, batch) / 1e3
        found[name] = embed_all(model, data.inputs, len(data.texts))
    rounds = [{n: milliseconds(m, batch) for n, m in models.items()} for _ in range(ROUNDS)]
    report = qfx.explain(copy.deepcopy(data.model), **batch)
ms = {n: median(r[n] for r in rounds) for n in models}
rows = [["ms per batch", *(f"{ms[n]:.0f}" for n in models)]]
for name in ("float32 Inductor", "float32 eager"):
    rows.append([f"speed-up over {name}", *(f"{ms[name] / ms[n]:.2f}x" for n in models)])
people = (pearson_to_human(e, data.human) for e in found.values())
rows.append(["Pearson with people, 1225 pairs", *(f"{p:.4f}" for p in people)])
cosines = (F.cosine_similarity(e, found["float32 eager"]).mean() for e in found.values())
rows.append(["mean cosine to float32", *(f"{c:.5f}" for c in cosines)])
rows.append(["seconds to the first result", *(f"{first[n]:.1f}" for n in models)])
print(f"MiniLM, {BATCH} x 128 tokens, one thread, median of {ROUNDS} interleaved rounds")
print(tabulate(rows, ["", *models], disable_numparse=True), str(report).splitlines()[-1], sep="\n")
