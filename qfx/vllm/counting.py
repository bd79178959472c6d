"""Counts: which layers of a model that vLLM loads become int8, in one line of its log."""

from __future__ import annotations

from collections import Counter

from torch import nn
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # which vLLM shows


class Counts:
    """The layers that vLLM asked a quantization method about, and the weights of those that were
    packed. One line of the log has the sums when the last layer has been packed. `scheme`: for that
    line."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.waiting: dict[str, str] = {}  # the kind of each layer that will be packed
        self.int8: Counter[str] = Counter()
        self.floats: Counter[str] = Counter()
        self.weights = 0

    def expect(self, name: str, layer: nn.Module) -> None:
        """Notes a layer that will be packed when its weight has been read."""
        self.waiting[name] = type(layer).__name__

    def stays(self, name: str, layer: nn.Module, why: str = "") -> None:
        """Notes a layer that stays float. `why`: for the log, if options or the layer decide it."""
        self.floats[type(layer).__name__] += 1
        if why:
            logger.info("qfx: %s stays float: %s", name, why)

    def packed(self, name: str, weights: int) -> None:
        """Notes that a layer with so many weights has been packed."""
        if kind := self.waiting.pop(name, ""):  # not again when vLLM loads weights once more
            self.int8[kind] += 1
            self.weights += weights
            self._ended()

    def unpacked(self, name: str, why: str) -> None:
        """Notes that a layer stays float after all, and warns."""
        logger.warning("qfx: %s stays float: %s", name, why)
        if kind := self.waiting.pop(name, ""):
            self.floats[kind] += 1
            self._ended()

    def _ended(self) -> None:
        if not self.waiting:
            logger.info("%s", self)

    def __str__(self) -> str:
        return (
            f"qfx: {self.weights:,} weights are {self.scheme}, of {_listed(self.int8)}; "
            f"float are {_listed(self.floats)}, and layers that no method of vLLM quantizes"
        )


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counted.items())) or "none"
