"""Warns where a method of a compiled model runs nothing of qfx.

`torch.compile(model, backend="qfx")` compiles `forward` and returns a wrapper. Every other method
of the wrapper is the model's own and calls the model's own `forward`, in float.
"""

from __future__ import annotations

import warnings
from weakref import WeakSet

from torch import nn

from qfx.host.dynamo import is_compiled_in_place

METHODS = (
    "generate", "encode", "encode_query", "encode_document", "predict", "rank",
    "get_text_features", "get_image_features", "get_audio_features",
)  # fmt: skip
_warned: WeakSet[nn.Module] = WeakSet()


def warn_of_method(name: str, model: nn.Module) -> None:
    """Warns, once for each model, unless the method runs something of qfx: an int8 module, or a
    forward that was replaced or compiled in place."""
    if model in _warned or any(_runs_int8(each) for each in model.modules()):
        return
    _warned.add(model)
    own = type(model).__name__
    also = ", or compile its step by qfx.compile_for_generate(model)" if name == "generate" else ""
    warnings.warn(
        f'torch.compile(model, backend="qfx").{name} runs nothing of qfx: it is a method of the '
        f"{own} inside, whose forward is not compiled. Compile that model in place, "
        f'model.compile(backend="qfx"){also}.',
        stacklevel=4,
    )


def _runs_int8(module: nn.Module) -> bool:
    ours = type(module).__module__.startswith("qfx.")
    return ours or "forward" in vars(module) or is_compiled_in_place(module)
