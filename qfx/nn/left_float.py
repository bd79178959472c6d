"""Says why linears of a quantized model are float: by the reasons that were noted when the model
was quantized or, for a model that was loaded, by inspecting the linears again."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import nn

from qfx.nn.conv_like import CONVOLUTIONS
from qfx.nn.experts_like import is_experts, why_not_by_scheme
from qfx.nn.linear_like import is_linear, sizes_of
from qfx.nn.loading import Checked
from qfx.nn.recurrent_like import is_recurrent
from qfx.nn.selection import why_faulty, why_no_linear, why_not_taken
from qfx.values.config import Config
from qfx.values.limits import why_few_features, why_few_inputs
from qfx.values.select import left_out

_NOTED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def note_left_float(linears: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> None:
    """Remembers in this process why linears stay float. `linears` and `reasons`: the modules and
    the reasons, by name."""
    _NOTED.update({linears[name]: reason for name, reason in reasons.items()})


def note_of_children(module: nn.Module, opened: nn.Module) -> None:
    """Remembers why a module stays float that was `opened`, so that its linears were its children:
    for the reason of the last of them that has one."""
    reasons = [_NOTED[child] for child in opened.children() if child in _NOTED]
    if reasons:
        _NOTED[module] = reasons[-1]


def why_left_float(model: nn.Module) -> dict[str, str]:
    """Returns, by name, the reason why each float linear of a quantized model is float."""
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    config = _config_of(model)
    return {
        name: _NOTED.get(module) or _found_again(name, module, attentions, config)
        for name, module in model.named_modules(remove_duplicate=False)
        if _may_be_left(module)
    }


def _may_be_left(module: nn.Module) -> bool:
    wanted = isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_linear(module)
    wanted = wanted or is_experts(module) or is_recurrent(module)
    return wanted and not isinstance(module, Checked)


def _found_again(
    name: str, module: nn.Module, attentions: list[nn.MultiheadAttention], config: Config
) -> str:
    return (
        left_out(config, [name])
        or why_no_linear(module)
        or why_not_taken(module, attentions, True)
        or (is_experts(module) and why_not_by_scheme(module, config.chosen))
        or (not is_experts(module) and why_few_features(sizes_of(module)[0]))
        or (not is_experts(module) and why_few_inputs(sizes_of(module)[0], [name]))
        or why_faulty(True, module)
        or "a float module"
    )


def _config_of(model: nn.Module) -> Config:
    """Returns the config by which transformers quantized the model, or an empty one."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    config = getattr(settings, "config", None)
    return config if isinstance(config, Config) else Config()
