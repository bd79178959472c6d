"""A matmul that qfx does not know, taught to it: a library's own operator becomes int8.

`python examples/own_pattern.py` prints the signal to noise ratio of the int8 form, in dB.
"""

import torch
from torch import Tensor, nn

import qfx


@torch.library.custom_op("example::project", mutates_args=())
def project(x: Tensor, bias: Tensor, matrix: Tensor) -> Tensor:
    """x [..., K] @ matrix [K, N] + bias [N], which no backend can look into."""
    return x @ matrix + bias


@project.register_fake
def _(x: Tensor, bias: Tensor, matrix: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], matrix.shape[1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(128, 64))
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(project(x, self.bias, self.matrix))


@torch.no_grad()
def main() -> float:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(32, 128)
    assert qfx.explain(model, x).quantized == 0  # reported, and left float

    qfx.register_matmul(torch.ops.example.project, ("x", "bias", "w"), weight="kn")
    options = {"minimum_gain": 0}
    print(qfx.explain(model, x, options=options))
    torch._dynamo.reset()
    return qfx.sqnr(model(x), torch.compile(model, backend="qfx", options=options)(x))


if __name__ == "__main__":
    print(f"{main():.1f}")
