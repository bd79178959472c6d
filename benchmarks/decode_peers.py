"""Other libraries that decode on a CPU, for benchmarks/decode.py; none is required."""

from __future__ import annotations

from functools import partial

from benchmarks.decode_llama_cpp import LlamaCpp
from benchmarks.decode_ways import Way

PEERS: dict[str, Way] = {
    "llama.cpp Q8_0": Way(partial(LlamaCpp, "Q8_0"), ("gguf",)),
    "llama.cpp Q4_0": Way(partial(LlamaCpp, "Q4_0"), ("gguf",)),
}
