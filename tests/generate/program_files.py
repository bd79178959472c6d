"""Files of programs with something changed, and what a process that loads them takes.

python -m tests.generate.program_files SEED COUNT  # loads and runs so many, each with some changes
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qfx
from qfx.files.tensor_file import table_of, tensors_together
from qfx.generate import save_programs
from qfx.generate.decoder import KEY, Decoder
from qfx.io.safe_read import parsed
from tests.lib.decoders import decoder, ids

Tensors = dict[str, Tensor]
NUMBERS = [0, 1, -1, 2, 3, 16, 64, 255, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
VALUES = [*NUMBERS, 2**64, 1e999, -1e999, float("nan"), 0.5, True, None, "", "1", [], [1], {}]


def saved(folder: Path) -> Path:
    """A small file, of two kinds of layers, one of them rings, and 4-bit weights."""
    model = qfx.compile_for_generate(decoder("gemma3"), "w4a8", max_length=192)
    save_programs(model, folder / "programs.safetensors")
    return folder / "programs.safetensors"


def read(path: Path) -> tuple[str, Tensors]:
    """Its description and its tensors."""
    table = table_of(path)
    return table.metadata[KEY], tensors_together(table)


def tried(text: str, tensors: Tensors) -> str:
    """'runs', or at what it is refused and by which error."""
    try:
        found = Decoder(parsed(text, "no programs"), tensors)
    except (ValueError, LookupError, TypeError, AttributeError) as why:  # as load_programs expects
        return f"not loaded, {type(why).__name__}: {why}"
    try:
        found.generate(ids(found.batch, 5), 3)
        found.reset()
        found.read(ids(found.batch, min(found.length, 130)))
    except (ValueError, IndexError) as why:
        return f"not run, {type(why).__name__}: {why}"
    return "runs"


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a JSON value with each of its keys."""
    if isinstance(tree, dict | list):
        for key in [*tree] if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from places(tree[key])


def changed(text: str, tensors: Tensors, draw: random.Random) -> tuple[str, Tensors]:
    """With one to three changes: of a value, of words, or of bytes of any tensor."""
    told, tensors = json.loads(text), dict(tensors)
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice([_value, _value, _words, _words, _swap, _bytes])(told, tensors, draw)
    return json.dumps(told), tensors


def _value(told: Any, _: Tensors, draw: random.Random) -> None:
    within, key = draw.choice(list(places(told)))
    within[key] = draw.choice(VALUES)


def _swap(told: Any, _: Tensors, draw: random.Random) -> None:
    every = list(places(told))
    (a, i), (b, j) = draw.choice(every), draw.choice(every)
    a[i], b[j] = json.loads(json.dumps(b[j])), json.loads(json.dumps(a[i]))


def _words(told: Any, tensors: Tensors, draw: random.Random) -> None:
    programs = told.get("programs") if isinstance(told, dict) else None
    every = programs.values() if isinstance(programs, dict) else []
    names = [each.get("words") for each in every if isinstance(each, dict)]
    words64 = {name for name, tensor in tensors.items() if tensor.dtype == torch.int64}
    known = [name for name in names if isinstance(name, str) and name in words64]
    if known:
        name = draw.choice(known)
        words = tensors[name].clone()
        for _ in range(draw.choice([1, 1, 4])):
            at = draw.randrange(len(words))
            near = min(int(words[at]), 2**62) + draw.choice([-1, 1, 16])
            words[at] = draw.choice([*NUMBERS, near, near, int(draw.choice(words.tolist()))])
        if draw.random() < 0.2:  # a part of it again
            begin, end = sorted(draw.sample(range(len(words)), 2))
            words = torch.cat([words[:end], words[begin:]])
        tensors[name] = words


def _bytes(_: Any, tensors: Tensors, draw: random.Random) -> None:
    name = draw.choice(sorted(tensors))
    raw = tensors[name].clone()
    flat = raw.view(-1).view(torch.uint8)
    for _ in range(draw.choice([1, 8])):
        flat[draw.randrange(len(flat))] = draw.randrange(256)
    tensors[name] = raw


def hunt(path: Path, seed: int, count: int, told: Callable[[str], Any] = print) -> Counter[str]:
    """How many run and how many are refused, by the kind of the error; the rest raises."""
    text, tensors = read(path)
    ends: Counter[str] = Counter()
    longest = 0.0
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        begin = time.perf_counter()
        ends[tried(*changed(text, tensors, draw)).partition(":")[0]] += 1
        took = time.perf_counter() - begin
        if took > longest:
            longest = took
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            told(f"file {number}: {took:.2f} s, peak {peak:.2f} GB")
    return ends


def main() -> None:
    seed, count = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder))
        print(f"{path.stat().st_size} bytes", flush=True)
        ends = hunt(path, seed, count, lambda line: print(line, flush=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{count} files: {dict(ends)}, peak {peak:.2f} GB")


if __name__ == "__main__":
    main()
