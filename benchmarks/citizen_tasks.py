"""The outcome of the lines in `benchmarks/typed.py`: each task is run, and compared with float32.

A task that ran counts as silently wrong if its result has less than half of the effect of the
float32 one, or if bits differ that should be the same. Each task has a process of its own, after
the preceding tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lora import measure, tiny
from benchmarks.resident import forget_peak, peak, resident
from benchmarks.typed import FLOAT, Library, Model, load
from qfx.ops.single_tensors import sqnr

Row = dict[str, Any]
HALF = 0.5


@dataclass(frozen=True)
class Work:
    """The folder of a float32 model, and a folder for what tasks leave for later ones. Its file
    tokens.pt has token ids `batch` [B, L] and `prompt` [1, P]."""

    model: str
    folder: str
    new_tokens: int
    steps: int

    def tokens(self, kind: str) -> Tensor:
        ids: Tensor = torch.load(Path(self.folder) / "tokens.pt", weights_only=True)[kind]
        return ids

    def keep(self, library: str, task: str, value: Any) -> None:
        torch.save(value, self._file(library, task))

    def kept(self, library: str, task: str) -> Any:
        """Returns what the task stored, or None if it failed."""
        file = self._file(library, task)
        return torch.load(file, weights_only=True) if file.exists() else None

    def of(self, library: str, what: str) -> Path:
        """Returns a folder for one library."""
        return Path(self.folder) / f"{library}, {what}"

    def _file(self, library: str, task: str) -> Path:
        return Path(self.folder) / f"{library}, {task}.pt"


def works(**figures: Any) -> Row:
    return {"outcome": "works", **figures}


def wrong(said: str, **figures: Any) -> Row:
    """Returns the row of a task that raised nothing but is wrong."""
    return {"outcome": "silently wrong", "said": said, **figures}


def logits(model: Model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits.float()
    return found


def agreement(expected: Tensor, found: Tensor) -> float:
    """Returns the fraction of likeliest tokens that agree."""
    return (expected.argmax(-1) == found.argmax(-1)).float().mean().item()


def quantize(name: str, library: Library, work: Work) -> Row:
    found = logits(library.quantize(Path(work.model)), work.tokens("batch"))
    if name == FLOAT:
        work.keep(name, "quantize", found)
        return works()
    expected = work.kept(FLOAT, "quantize")
    if torch.equal(found, expected):
        return wrong("the logits are those of float32: nothing is quantized")
    same = agreement(expected, found)
    figures = {"sqnr_db": round(sqnr(expected, found), 1), "agreement": round(same, 3)}
    if same < HALF:
        return wrong(f"{100 * same:.0f} % of the likeliest tokens are float32's", **figures)
    return works(**figures)


def save(name: str, library: Library, work: Work) -> Row:
    model = library.quantize(Path(work.model))
    before = logits(model, work.tokens("batch"))
    library.save(model, work.of(name, "saved"))
    work.keep(name, "save", before)
    size = sum(file.stat().st_size for file in _weights(name, work))
    return works(file_mb=round(size / 1e6, 1))


def _weights(name: str, work: Work) -> list[Path]:
    return sorted(work.of(name, "saved").rglob("*.safetensors"))


def load_again(name: str, library: Library, work: Work) -> Row:
    """Measures loading. The peak is that of loading and the first token, because some libraries map
    the file and read it then. A tiny model was loaded before, so that imports do not count."""
    before_saving = work.kept(name, "save")
    if before_saving is None:
        return {"outcome": "nothing to load"}
    rehearsal = tiny(work.of(name, "tiny"))
    library.save(library.quantize(rehearsal), work.of(name, "tiny saved"))
    library.load(work.of(name, "tiny saved"))
    before = resident()
    forget_peak()
    model = library.load(work.of(name, "saved"))
    logits(model, work.tokens("prompt")[:, :1])
    growth = peak() - before
    found = logits(model, work.tokens("batch"))
    size = sum(file.stat().st_size for file in _weights(name, work))
    figures = {"peak_of_file": round(growth / size, 2)}
    if not torch.equal(found, before_saving):
        distance = sqnr(before_saving, found)
        return wrong(f"other logits than before it was saved: {distance:.1f} dB", **figures)
    return works(**figures)


def generate(name: str, library: Library, work: Work) -> Row:
    model, prompt = library.quantize(Path(work.model)), work.tokens("prompt")
    library.generate(model, prompt, 2)
    start = time.process_time()
    text = library.generate(model, prompt, work.new_tokens)
    seconds = time.process_time() - start
    new = text[0, prompt.shape[1] :]
    likeliest = logits(load(Path(work.model)), text)[0, prompt.shape[1] - 1 : -1].argmax(-1)
    same = int((new == likeliest).sum())
    figures = {"tokens_per_s": round(len(new) / seconds, 1), "as_float": same, "of": len(new)}
    if same < HALF * len(new):
        return wrong(f"float32 would choose {same} of the {len(new)} tokens", **figures)
    return works(**figures)


def fine_tune(name: str, library: Library, work: Work) -> Row:
    model, trained, row = measure(library, Path(work.model), work.tokens("batch"), work.steps)
    model.save_pretrained(work.of(name, "adapter"))
    fall = trained.losses[0] - trained.losses[-1]
    gradient = torch.cat([g.flatten().float() for g in trained.gradients])
    work.keep(name, "fine-tune", {"fall": fall, "gradient": gradient})
    expected = work.kept(FLOAT, "fine-tune")
    cosine = F.cosine_similarity(gradient, expected["gradient"], dim=0).item()
    figures = {key: round(value, 3) for key, value in row.items()} | {"cosine": round(cosine, 3)}
    dead = sum(not g.any() for g in trained.gradients)
    if dead or fall < HALF * expected["fall"]:
        return wrong(
            f"{dead} of {len(trained.gradients)} adapters have no gradient; the loss falls by "
            f"{fall:.2f}, float32's by {expected['fall']:.2f}",
            **figures,
        )
    return works(**figures)


def merge(name: str, library: Library, work: Work) -> Row:
    from peft import PeftModel

    if not work.of(name, "adapter").exists():
        return {"outcome": "nothing to merge"}
    ids = work.tokens("batch")
    model = PeftModel.from_pretrained(library.quantize(Path(work.model)), work.of(name, "adapter"))
    with torch.no_grad():
        adapted = model(input_ids=ids, labels=ids)
        with model.disable_adapter():
            base = model(input_ids=ids, labels=ids).loss
        merged = library.merge(model)(input_ids=ids, labels=ids)
    kept = ((base - merged.loss) / (base - adapted.loss)).item()
    figures = {
        "loss_base": round(base.item(), 3),
        "loss_adapted": round(adapted.loss.item(), 3),
        "loss_merged": round(merged.loss.item(), 3),
        "kept": round(kept, 3),
        "sqnr_db": round(sqnr(adapted.logits.float(), merged.logits.float()), 1),
    }
    if kept < HALF:
        return wrong(f"{100 * kept:.0f} % of what the loss fell by is kept", **figures)
    return works(**figures)


Task = Callable[[str, Library, Work], Row]
# The tasks, and what of a library is typed for each.
TASKS: dict[str, tuple[Task, str]] = {
    "quantize": (quantize, "quantize"),
    "save": (save, "save"),
    "load": (load_again, "load"),
    "generate": (generate, "generate"),
    "fine-tune": (fine_tune, "adapt"),
    "merge": (merge, "merge"),
}
