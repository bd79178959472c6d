"""Static scales for a model with outliers: calibrated, saved as a recipe, loaded, used.

`python examples/calibrate.py` prints how many dB of noise the recipe takes away, against scales per
tensor that are found at run time and no transform.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import qfx


class Model(nn.Module):
    """Its norm makes three features stick out, as those of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        with torch.no_grad():
            self.norm.weight[[7, 80, 201]] = 40.0

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


@torch.no_grad()
def main() -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = Model().eval(), [torch.randn(8, 32, 256) for _ in range(8)]
    config = qfx.Config(scheme="w8a8-static", minimum_gain=0)
    recipe = qfx.calibrate(model, batches, config, observer="mse", progress=False)
    print(recipe)

    path = Path(tempfile.mkdtemp()) / "recipe.json"
    recipe.save(path)
    x = torch.randn(8, 32, 256)
    found = {}
    for name, options in {
        "per tensor": {"scheme": "w8a8-tensor", "minimum_gain": 0},
        "recipe": {"recipe": qfx.Recipe.load(path)},  # or the path itself
    }.items():
        torch._dynamo.reset()
        found[name] = qfx.sqnr(model(x), torch.compile(model, backend="qfx", options=options)(x))
        print(f"{name}: {found[name]:.1f} dB")
    return found["recipe"] - found["per tensor"]


if __name__ == "__main__":
    print(f"{main():.1f}")
