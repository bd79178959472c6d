"""SavedLinears: int8 checkpoints that `save_pretrained` wrote, in vLLM. Their linears and
embeddings are loaded as they were saved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import replace_parameter

from qfx.io.errors import UserError, printable
from qfx.nn.embedding import Embedding
from qfx.nn.frozen import Frozen, prepared
from qfx.nn.linear import Linear
from qfx.nn.scheme_tensor import KEY, checked_numbers, of_numbers, read_any, scheme_of
from qfx.nn.serialized_weight import SAVED
from qfx.nn.weight_parts import OPTIONAL, frozen_of
from qfx.vllm.counting import Counts
from qfx.vllm.linears import DONE, LinearMethod
from qfx.vllm.saved_experts import PRODUCTS, SavedExpertsMethod
from qfx.vllm.saved_tensors import MARK, WHO, SavedTensors

FORMAT = 1  # of `qfx/hf/config.py`
KINDS = {"Linear": Linear, "Embedding": Embedding}
_EXPERTS = re.compile(r"experts\.(up|down)$")
logger = init_logger(f"vllm.{__name__}")  # which vLLM shows


class SavedLinears:
    """The schemes of the int8 linears and embeddings of a checkpoint, by their names in it.

    Raises UserError for a quantization_config that `save_pretrained` does not write, and for what
    is not loaded in vLLM.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        others = {name: value for name, value in config.items() if name != "quant_method"}
        self.schemes = {n: of_numbers(s) for n, s in checked_numbers(others.pop("linears")).items()}
        if others != {"format": FORMAT}:
            raise UserError(
                f"{WHO}: the quantization_config has {printable(str(others))} beside its linears, "
                f"and this qfx reads format {FORMAT}: serve the checkpoint as it was saved"
            )
        for name, scheme in self.schemes.items():
            _check(scheme, printable(name))
        self.claimed: set[str] = set()
        self.reported = False
        self.counts = Counts("int8 as saved")

    def rename(self, mapper: Any) -> None:
        """Gives the linears the names of vLLM. `mapper`: a `WeightsMapper` of vLLM."""
        self.schemes = mapper.apply_dict(self.schemes)

    def method(self, layer: nn.Module, prefix: str, parts: Sequence[str]) -> Any:
        """Returns the method for the layer of vLLM of this name, which unites `parts`; None for
        vLLM's own. Raises UserError if only some of them are int8, or by other schemes."""
        is_linear, is_head = isinstance(layer, LinearBase), isinstance(layer, ParallelLMHead)
        is_table = isinstance(layer, VocabParallelEmbedding) and not is_head
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if not (is_linear or is_head or is_table):
            self.counts.stays(prefix, layer)
            return None
        name = self._only_table() if is_table and not prefix else prefix
        scheme = self._scheme(name, parts)
        if scheme is None:
            self.counts.stays(prefix, layer)
            return UnquantizedLinearMethod() if is_linear else UnquantizedEmbeddingMethod()
        self.claimed |= {name, *parts}
        saved = read_any(scheme, f"{name}.{KEY}")["module"]
        if (saved == "Embedding") != is_table:
            kind = type(layer).__name__
            raise UserError(f"{WHO}: {printable(name)} was saved as {saved}, and is a {kind} here")
        tensors = SavedTensors(KINDS[saved], scheme, name, self.report)
        self.counts.expect(name, layer)
        return (SavedEmbeddingMethod if is_table else SavedLinearMethod)(tensors, self.counts)

    def _experts(self, layer: nn.Module, prefix: str) -> SavedExpertsMethod | None:
        names = [f"{prefix}.{product}" for product in PRODUCTS]
        if not self.schemes.keys() & {*names}:
            self.counts.stays(prefix, layer)
            return None
        if lacking := [name for name in names if name not in self.schemes]:
            raise UserError(f"{WHO}: config.json: {lacking[0]} is float beside an int8 product")
        self.claimed |= {*names}
        schemes = [self.schemes[name] for name in names]
        method = SavedExpertsMethod(layer, schemes, prefix, self.counts, self.report)
        self.counts.expect(prefix, layer)
        return method

    def _scheme(self, name: str, parts: Sequence[str]) -> Tensor | None:
        int8 = [part for part in parts if part in self.schemes]
        if name in self.schemes or not int8:
            return self.schemes.get(name)
        first = self.schemes[int8[0]]
        for part in parts:
            other = self.schemes.get(part)
            if other is None or not torch.equal(other, first):
                raise UserError(
                    f"{WHO}: {name} unites {', '.join(parts)}, and {int8[0]} is "
                    f"{_spelled(first)}, but {part} is {_spelled(other)}: quantize them alike"
                )
        return first

    def _only_table(self) -> str:
        """Returns the name of the int8 embedding, which vLLM does not say; "" for none or several.
        Then vLLM finds no parameters for them in the float ones."""
        found = [n for n, s in self.schemes.items() if read_any(s, n)["module"] == "Embedding"]
        return found[0] if len(found) == 1 else ""

    def report(self) -> None:
        """Warns, once, of int8 modules for which vLLM has no layer; called when the model has all
        its layers. Raises UserError if no layer has any of the int8 experts, whose tensors vLLM
        leaves out; some of them may belong to another rank of a pipeline."""
        rest = sorted(self.schemes.keys() - self.claimed)
        lost = next((name for name in rest if _EXPERTS.search(name)), "")
        if lost and not any(map(_EXPERTS.search, self.claimed)):
            raise UserError(
                f"{WHO}: vLLM has no layer of experts called {printable(lost)}, which is int8 in "
                "this checkpoint: quantize with skip=['experts'] and save again"
            )
        if rest and not self.reported:
            logger.warning(
                "qfx: no linear or embedding of vLLM is %s, which is int8 in this checkpoint (%d of"
                " %d are not). If it cannot be loaded (a convolution, for example): quantize with"
                " skip=[%r] and save again",
                *(rest[0], len(rest), len(self.schemes), rest[0]),
            )
        self.reported = True


def _check(scheme: Tensor, name: str) -> None:
    """Raises UserError for what is not loaded."""
    where = f"{WHO}: config.json: {name}"
    try:
        fields = read_any(scheme, where)
        if fields["module"] == "Linear":
            scheme_of(fields, where)
    except ValueError as why:
        raise UserError(str(why)) from None
    if fields["module"] not in KINDS:
        raise UserError(
            f"{where} was saved by a {fields['module']}, and vLLM serves int8 linears and "
            "embeddings: convert the model with qfx.convert and save it again"
        )


def _spelled(scheme: Tensor | None) -> str:
    return "float" if scheme is None else str(scheme_of(read_any(scheme, KEY), KEY))


class SavedLinearMethod(LinearMethod):
    """Loads the saved tensors of one linear or head, and packs them when all have been read."""

    uses_meta_device = False

    def __init__(self, saved: SavedTensors, counts: Counts) -> None:
        self.saved = saved
        scheme = scheme_of(read_any(saved.scheme, saved.name), saved.name)
        super().__init__(scheme, saved.name, counts)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        k = input_size_per_partition
        for unit, what in (self.scheme.group, "group"), (self.scheme.rotation, "rotated block"):
            if k != input_size and unit and k % unit:
                raise UserError(
                    f"{WHO}: {self.name} has K={input_size}, of which each rank would get {k}, and "
                    f"that cuts a {what} of {unit}: choose another --tensor-parallel-size"
                )
        self.saved.register(layer, output_partition_sizes, k, attributes["weight_loader"])

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, DONE, False):
            return
        state, (n, k) = self.saved.taken(layer), self.saved.size
        packed = frozen_of(state, k).packed
        for part in (KEY, *SAVED):
            if part in self.saved.shards:
                delattr(layer, part)
        replace_parameter(layer, MARK, packed)
        self.how = prepared(state.scheme, n)
        self.counts.packed(self.name, n * k)
        setattr(layer, DONE, True)

    def frozen(self, layer: nn.Module) -> Frozen:
        """Returns the packed weight, and the tensors by which its input is quantized."""
        beside: list[Any] = [getattr(layer, name, None) for name in OPTIONAL]
        return Frozen(layer.weight, *beside)  # type: ignore[arg-type]

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Leaves the head as it is: saved int8 heads have tensors of their own."""
        return layer


class SavedEmbeddingMethod(LinearMethodBase):  # type: ignore[misc]  # untyped without vLLM
    """Loads the codes and scales of an int8 embedding, and returns rows as floats. (Q5)"""

    def __init__(self, saved: SavedTensors, counts: Counts) -> None:
        self.saved, self.counts = saved, counts
        self.dtype = torch.float32

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        self.dtype = params_dtype
        size, loader = input_size_per_partition, attributes["weight_loader"]
        self.saved.register(layer, output_partition_sizes, size, loader)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not getattr(layer, DONE, False):
            self.saved.taken(layer)
            self.counts.packed(self.saved.name, layer.row_codes.numel())  # type: ignore[operator,union-attr]
            setattr(layer, DONE, True)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        codes, scale = F.embedding(ids, layer.row_codes), F.embedding(ids, layer.scale[:, None])
        return (codes.to(torch.float32) * scale).to(self.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise UserError(
            f"{WHO}: the head of this model is its embedding {self.saved.name}, which is int8 in "
            "this checkpoint: quantize without embeddings='int8' and save again"
        )
