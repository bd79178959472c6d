"""The programs of a model, built from its current weights and settings, and again when these
change."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch import Tensor

from qfx.generate.buckets import MOST_ROWS
from qfx.generate.build_lock import building_alone
from qfx.generate.float32_steps import float32_vectors
from qfx.generate.model_state import settings_of, tensors_of, values_of, why_none
from qfx.generate.program_cache import read_or_build
from qfx.generate.step_graph import step_graph
from qfx.generate.step_modules import equal_factors
from qfx.host.source_text import released_source_texts
from qfx.nn.contiguous_weights import make_contiguous
from qfx.programs import Runner, build
from qfx.programs.inputs import Bound

# Batch size, tokens of a step, and the sizes of the leading axes of positions.
Sizes = tuple[int, int, tuple[int, ...]]
# In addition, the default dtype, which models read.
Key = tuple[int, int, tuple[int, ...], torch.dtype]
_log = logging.getLogger("qfx.generate.steps")


class ModelPrograms:
    """The programs of a model.

    `runners`: the programs that were built. `why_none`: why the model can have no programs, or
    None. The methods take `steps`, the object that replaces the model's forward; storing it here
    would keep the weights of a deleted model in memory.
    """

    def __init__(self) -> None:
        self.runners: dict[Key, Runner] = {}
        self.why_none: str | None = None
        self.state: Any = None
        self.tensors: tuple[Tensor, ...] = ()
        self.vectors: dict[str, Tensor] = {}
        self.dtype = torch.float32  # the dtype of the model
        self.reported: set[str] = set()
        self.lock = threading.RLock()

    def look(self, model: Any) -> None:
        """Discards the programs if the model was changed since they were built."""
        with self.lock:
            tensors = tensors_of(model)
            state = (values_of(tensors), settings_of(model))
            if state == self.state:
                return
            self.runners.clear()
            make_contiguous(model)
            self.state = values_of(tensors), settings_of(model)
            self.tensors = tensors
            self.vectors, self.dtype = float32_vectors(model), model.dtype
            self._without_programs(model, why_none(model))

    def _without_programs(self, model: Any, why: str | None) -> None:
        self.why_none = why
        if why is not None and why not in self.reported:
            self.reported.add(why)
            _log.warning(
                "the modules of %s generate, without programs: %s", type(model).__name__, why
            )

    def runner(
        self, steps: Any, sizes: Sizes, inputs: tuple[Tensor, ...], bound: Bound
    ) -> Runner | None:
        """Returns the program of `sizes`, built if necessary; None if the model can have none.

        `inputs`: the inputs of a step except the tensors of the cache. `bound`: the tensors of the
        cache, which follow them.
        """
        key = (*sizes, torch.get_default_dtype())
        found = self.runners.get(key)
        if found is not None or self.why_none is not None:
            return found
        alone = [t.clone() for t in inputs]  # not views of the caller's tensors
        with building_alone():  # threads whose programs exist do not wait
            found = self.runners.get(key)
            if found is None and self.why_none is None:
                found = self._build(steps, key, (*alone, *bound.tensors))
        return found

    def _build(self, steps: Any, key: Key, inputs: tuple[Tensor, ...]) -> Runner | None:
        _log.info("building the program of batch size %d, %d tokens a step", *key[:2])
        state = self.state
        try:
            runner = self._made(steps, inputs, key[1] > MOST_ROWS)
        except Exception as why:  # the model's code may fail to export with any exception
            self._without_programs(steps.model, f"{type(why).__name__}: {why}".split("\n\n")[0])
            return None
        with self.lock:
            if self.state is state:  # the model has not changed meanwhile
                self.runners[key] = runner
        if runner.outside:
            _log.info("PyTorch runs %s of it", ", ".join(sorted({*runner.outside})))
        return runner

    def _made(self, steps: Any, inputs: tuple[Tensor, ...], one: bool) -> Runner:
        how: dict[str, Any] = {"forward": steps.inner, "layout": steps.layout, "one": one}
        how |= {"source": steps.source, "factors": equal_factors(steps.model)}

        @released_source_texts()
        def make() -> Runner:
            graph = step_graph(steps.model, vectors=self.vectors, inputs=inputs, **how)
            return build(graph, inputs)

        return read_or_build(steps.model, steps, inputs, make, self.vectors, **how)
