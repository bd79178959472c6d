"""A transformer encoder compiled to int8; nothing in it changes.

`python examples/compile_model.py` prints what became of each matmul, and the signal to noise ratio
of its output against float32, in dB.
"""

import torch
from torch import nn

import qfx


@torch.no_grad()
def main() -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = torch.randn(4, 64, 256)

    options = {"minimum_gain": 0}  # everything legal, so that every machine prints the same table
    fast = torch.compile(model, backend="qfx", options=options)
    print(qfx.explain(model, x, options=options))
    return qfx.sqnr(model(x), fast(x))


if __name__ == "__main__":
    print(f"{main():.1f}")
