"""A check with a package of AOTInductor in which one bit of a packed weight was changed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx


def check_refused(package: str, gm: fx.GraphModule, x: Tensor) -> None:
    """Checks that the first call of a package with a changed bit in `gm`'s first packed weight is
    an error."""
    weight = next(b for b in gm.buffers() if b.dtype == torch.int8)
    part = bytes(weight[384:448].view(torch.uint8).tolist())  # after header, scales and sums
    run = torch._inductor.aoti_load_package(_damaged(Path(package), part))
    with pytest.raises(RuntimeError, match="its contents are not those that were packed"):
        run(x)


def _damaged(package: Path, part: bytes) -> str:
    copy = package.with_name("damaged.pt2")
    changed = bytes([part[0] ^ 4]) + part[1:]
    with zipfile.ZipFile(package) as whole, zipfile.ZipFile(copy, "w") as damaged:
        files = {info: whole.read(info) for info in whole.infolist()}
        assert sum(data.count(part) for data in files.values()) == 1
        for info, data in files.items():
            damaged.writestr(info, data.replace(part, changed))
    return str(copy)
