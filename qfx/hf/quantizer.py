"""QfxQuantizer: quantizes or assembles the tensors that transformers passes to it as it loads a
model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer

from qfx.hf.config import METHOD, QfxConfig
from qfx.hf.expert_loading import (
    ExpertLoading,
    Weights,
    by_expert,
    is_shared_out,
    put_floats,
    with_biases,
    without,
)
from qfx.hf.save_check import check_one_save, mark_save
from qfx.hf.saved_model import PLACEHOLDERS, put_together, set_placeholders
from qfx.hf.state_dict import marked_state, scheme_numbers
from qfx.hf.tensor_parallel import LaterPlan, gathered, whole, with_weight
from qfx.host.conversions import change_conversions
from qfx.io.errors import UserError
from qfx.io.pages import trim
from qfx.nn.conv import Conv
from qfx.nn.conv_like import is_convolution
from qfx.nn.embedding import Embedding
from qfx.nn.experts import Experts
from qfx.nn.experts_like import experts_fault, is_experts
from qfx.nn.linear import Linear
from qfx.nn.linear_like import is_embedding, is_transposed
from qfx.nn.quantize_model import made, planned, quantize_
from qfx.nn.replace import replace
from qfx.nn.selection import Selection
from qfx.nn.stored_modules import notify_listeners, stored_linears
from qfx.nn.weight_faults import unquantizable, unserved_weight
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.offload import drop_file_pages

WHO = "from_pretrained"


@register_quantizer(METHOD)
class QfxQuantizer(HfQuantizer):
    """Loads a model for `from_pretrained`, and saves it for `save_pretrained`.

    From a float checkpoint, each weight is quantized when it is read, experts when those of their
    block are read, and tied weights after everything is loaded. From a saved int8 model, the
    tensors of the int8 linears are loaded and put together. transformers creates a quantizer for a
    `QfxConfig`; users do not. Raises UserError for a `device_map` with several devices and for a
    config.json that does not fit the model.
    """

    requires_calibration = False
    quantization_config: QfxConfig

    def __init__(self, quantization_config: QfxConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.found: Selection | None = None
        self.hows: dict[nn.Module, Scheme | SiteRecipe] = {}
        self.later: set[nn.Module] = set()  # tied modules, which are quantized after loading
        self.made: dict[nn.Module, Linear | Conv | Embedding | Experts] = {}
        self.experts = ExpertLoading({})
        self.parallel: LaterPlan | None = None  # only while a model is loaded

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        places = kwargs.get("device_map")
        if isinstance(places, Mapping) and (
            len({*map(str, places.values())}) > 1 or "disk" in places.values()
        ):
            raise UserError(
                f"{WHO}: device_map={places} names several devices, and qfx moves no weights "
                "between devices: load on one device, and dispatch the model afterwards"
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
            if files:
                self.quantization_config.read_recipe(files[0].parent)
            check_one_save(model.config, files)
            names = set_placeholders(model, self.quantization_config.linears)
            untie(model, names)
            self._divide([m for m in model.modules() if isinstance(m, PLACEHOLDERS)])
        elif not self.quantization_config.config.smoothing:
            self.found, self.hows = planned(model, self.quantization_config.config, WHO)
            self.experts = ExpertLoading(self.hows)
            tied = _tied_names(model)
            modules = self.found.taken.items()
            self.later = {m for name, m in modules if f"{name}.weight" in tied}
            self._divide(m for m in self.found.taken.values() if not is_experts(m))

    def _divide(self, modules: Iterable[nn.Module]) -> None:
        """Records how a tensor-parallel plan (`tp_plan`) splits these modules, to split the int8
        modules that replace them in the same way."""
        self.parallel = LaterPlan(modules)
        self.parallel.install()

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        owner, _, part = param_name.rpartition(".")
        module = self.found.taken.get(owner) if self.found is not None else None
        if module is None or module not in self.hows:
            return False
        if not self.experts.takes(module, part):
            return part == "weight" and not is_experts(module) and module not in self.later
        if is_shared_out(module):
            self._leave(module, "a tensor-parallel plan shares its weights out among ranks")
        return module in self.hows

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        found = super().update_weight_conversions(weight_conversions, model)
        return found if self.pre_quantized else by_expert(found, self.param_needs_quantization)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def quantize(self, name: str, weight: Tensor) -> bool:
        """Quantizes `weight`, as the linear or embedding `name` stores it, [N, K] or [K, N].

        The new module gets its bias after everything is loaded. Returns False if the weight cannot
        be quantized; its module then stays float.
        """
        assert self.found is not None
        linear = self.found.taken[name]
        if why := unserved_weight(weight) or unquantizable(weight):
            self._leave(linear, why)
            return False
        if is_embedding(linear):
            self.made[linear] = Embedding.from_float(linear, weight)
        elif is_convolution(linear):
            self.made[linear] = Conv.from_float(with_weight(linear, weight), self.hows[linear])
        else:
            holder = nn.Linear(1, 1, bias=False, device="meta", dtype=weight.dtype)
            turned = weight.t() if is_transposed(linear) else weight
            holder.weight = nn.Parameter(turned, requires_grad=False)
            self.made[linear] = Linear.from_float(holder, self.hows[linear])
        drop_file_pages(weight)
        linear.weight._is_hf_initialized = True  # type: ignore[union-attr]
        return True

    def quantize_product(self, name: str, value: Any) -> dict[str, Tensor]:
        """Takes the weights of a product of experts, and quantizes the block if they complete it.
        Returns, by name, the parameters that transformers is to set: those of a block that stays
        float."""
        assert self.found is not None
        owner, _, part = name.rpartition(".")
        block = self.found.taken[owner]
        made = self.experts.read(block, part, Weights.of(value))
        block._parameters[part]._is_hf_initialized = True  # type: ignore[union-attr]
        if isinstance(made, Experts):
            self.made[block] = made
        if not isinstance(made, str):
            return {}
        floats = self.experts.floats(block)
        self._leave(block, made)
        return {f"{owner}.{each}": tensor for each, tensor in floats.items()}

    def _leave(self, linear: nn.Module, why: str) -> None:
        assert self.found is not None
        for name in [n for n, m in self.found.taken.items() if m is linear]:
            del self.found.taken[name]
            self.found.missed[name] = why
        del self.hows[linear]
        if self.parallel is not None:
            self.parallel.leave(linear)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            assert self.parallel is not None
            put_together(model, self.parallel)
        elif self.found is None:
            quantize_(model, self.quantization_config.config)
        else:
            for module in [*self.hows]:
                self._finish(module)
            places = {n: self.made[m] for n, m in self.found.taken.items() if m in self.made}
            replace(self.found, places)
            trim()  # nothing refers to the float weights any more
        if self.parallel is not None:
            self.parallel.remove()
        self.found, self.hows, self.later, self.made = None, {}, set(), {}
        self.parallel, self.experts = None, ExpertLoading({})
        change_conversions(model, without)
        untie(model, [name for name, _ in stored_linears(model)])
        notify_listeners(model)
        return model

    def _finish(self, module: nn.Module) -> None:
        """Makes the int8 form of a module now that everything is loaded, unless it was made when
        its weight was read, and gives it its biases."""
        if is_experts(module):
            put_floats(module, self.experts.floats(module))
        if module not in self.made and (why := _fault(module)):
            self._leave(module, why)
            return
        if module not in self.made:
            self.made[module] = _made(module, self.hows[module])
        int8 = self.made[module]
        if isinstance(int8, Experts):
            with_biases(int8, module)
        elif not is_embedding(module):
            int8.bias = module.bias
        if self.parallel is not None:
            self.parallel.apply(module, int8, self._name(module))

    def _name(self, linear: nn.Module) -> str:
        assert self.found is not None
        return next(name for name, module in self.found.taken.items() if module is linear)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the state dict and metadata for save_pretrained.

        save_pretrained calls it before it writes any file, and writes config.json first.
        """
        with gathered(model):
            state, linears = marked_state(model), scheme_numbers(model)
        self.quantization_config.linears = linears
        model.config.quantization_config = self.quantization_config
        return state, mark_save(model.config)

    @property
    def quantized_element_size(self) -> float:
        return 1.0

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # the other parameters, such as adapters

    @property
    def is_compileable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Quantizes the weights that are to be int8, and removes them from the tensors that
    transformers puts into the model."""

    def __init__(self, quantizer: QfxQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for target, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            wanted = self.quantizer.param_needs_quantization(kwargs["model"], target)
            missing = kwargs.get("missing_keys") or set()
            if wanted and not target.endswith(".weight"):
                missing.discard(target)
                rest |= self.quantizer.quantize_product(target, value)
            elif wanted and self.quantizer.quantize(target.removesuffix(".weight"), tensor):
                missing.discard(target)
            else:
                rest[target] = value
        return rest


def _fault(module: nn.Module) -> str:
    weight: Any = None if is_experts(module) else module.weight
    return experts_fault(module) if weight is None else unquantizable(weight)


def _made(module: nn.Module, how: Any) -> Linear | Conv | Embedding | Experts:
    if is_experts(module):
        return Experts.from_float(module, how, free=True)
    return made(whole(module), how)


def _tied_names(model: Any) -> set[str]:
    tied = model.all_tied_weights_keys
    return {*tied, *tied.values()}


def untie(model: Any, int8: Any) -> None:
    """Removes int8 linears from the model's lists of tied weights, because transformers would look
    for their weights."""
    for at, owner in model.named_modules():
        tied = getattr(owner, "all_tied_weights_keys", {})
        prefix = f"{at}." if at else ""
        weights = {f"{n}.weight".removeprefix(prefix) for n in int8 if n.startswith(prefix)}
        for target in [t for t, source in tied.items() if {t, source} & weights]:
            del tied[target]
