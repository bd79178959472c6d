"""Whether a part of a model that takes token ids may be called with embeddings instead.

If a graph was captured, it shows this (`qfx.match.token_flow`). Otherwise it is derived from the
signatures and parameters of the part and of the modules around it.
"""

from __future__ import annotations

import inspect
import re

from torch import nn

from qfx.host.tensors import storage_id

_EMBEDDINGS = re.compile("embed")  # for example inputs_embeds
_IDS = re.compile("ids|token")  # for example input_ids, decoder_input_ids, tokens
_FLOATS = re.compile("pixel|image|video|audio|feature|input_values")  # for example pixel_values


def why_embeddings(part: nn.Module, around: nn.Module) -> str:
    """Returns why the module `around` may call `part`, which it contains, with embeddings instead
    of token ids; '' if nothing suggests that it does. Smoothing factors are valid only for ids.

    A part without an argument for embeddings is always called with ids. Another part may be called
    with embeddings if `around` has an argument whose name suggests floats, such as pixel_values, or
    if `around` has parameters outside of `part` and no argument whose name suggests ids.
    """
    names, kind = _arguments(around), type(around).__name__
    if not any(map(_EMBEDDINGS.search, _arguments(part))) or not names:
        return ""
    if floats := next(filter(_FLOATS.search, names), None):
        return f"{kind} takes {floats}, and may give it embeddings"
    own = {storage_id(p) for p in around.parameters()} - {storage_id(p) for p in part.parameters()}
    if own and not any(map(_IDS.search, names)):
        return f"{kind} takes no token ids, and may give it embeddings"
    return ""


def _arguments(module: nn.Module) -> list[str]:
    """Returns the names of the arguments of a module's forward; none for a container without a
    forward."""
    if type(module).forward is nn.Module.forward:
        return []
    try:
        return [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):
        return []
