"""A graph rewritten by hand: traced, one layer left out, printed, and run.

`python examples/rewrite_graph.py` prints how many of the model's linears are int8, in percent.
"""

import torch
from torch import nn

import qfx


@torch.no_grad()
def main() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).eval()
    x = torch.randn(32, 64)

    config = qfx.Config(scheme="w8a8-symmetric", skip=["4"], minimum_gain=0)
    graph = qfx.trace(model, x)  # or torch.export.export(model, (x,)).module(), or any FX graph
    readable, plan = qfx.rewrite(graph, config, canonical=True)  # three operators for each linear
    fused, _ = qfx.rewrite(graph, config)
    print(plan)
    print(fused.graph)
    assert torch.equal(readable(x), fused(x))  # fusing changes no bit
    return 100 * plan.quantized / plan.total


if __name__ == "__main__":
    print(f"{main():.1f}")
