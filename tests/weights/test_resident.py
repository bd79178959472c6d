"""A served model takes at most 1.2 times its int8 bytes, beside what was resident before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAYERS, FEATURES = 6, 2048  # 101 MB in float32
INT8 = LAYERS * FEATURES * FEATURES
# A twin without size shows first what code, caches and the compiled graph take.
SCRIPT = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import nn
import qfx

way, path, layers, features = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def model(features):
    linears = [nn.Linear(features, features, bias=False) for _ in range(layers)]
    return nn.Sequential(*linears).eval()

def served(model, features):
    if way == "quantize_":
        run = qfx.quantize_(model)
    else:
        options = {"inner": "eager", "minimum_gain": 0, "release_weights": way == "released"}
        run = torch.compile(model, backend="qfx", options=options)
    with torch.no_grad():
        for rows in (2, 2, 5, 5):
            run(torch.ones(rows, features))
    return run

twin = served(model(64), 64)
before = resident()
if path:
    with torch.device("meta"):
        large = model(features)
    large.load_state_dict(load_file(path), assign=True)
else:
    large = model(features)
large = served(large, features)
print(resident() - before)
"""


def _grown(way: str, path: object) -> int:
    command = [sys.executable, "-c", SCRIPT, way, str(path), str(LAYERS), str(FEATURES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = pytest.importorskip("safetensors.torch")
    path = tmp_path_factory.mktemp("resident") / "model.safetensors"
    weights = {f"{i}.weight": torch.randn(FEATURES, FEATURES) for i in range(LAYERS)}
    files.save_file(weights, path)
    return path


pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux")


@pytest.mark.parametrize("way", ["released", "quantize_"])
@pytest.mark.parametrize("mapped", [False, True], ids=["in_memory", "mapped"])
def test_a_served_model_is_little_more_than_its_codes(way: str, mapped: bool, file: Path) -> None:
    assert _grown(way, file if mapped else "") <= 1.2 * INT8
