"""Whether a part of a model that takes token ids may be given embeddings in their place.

Where a graph was captured it shows that (`qfx.match.token_flow`). Without one, only signatures and
parameters tell: those of the part, and of the modules around it.
"""

from __future__ import annotations

import inspect
import re

from torch import nn

from qfx.host.tensors import storage_id

_EMBEDDINGS = re.compile("embed")  # as inputs_embeds
_IDS = re.compile("ids|token")  # as input_ids, decoder_input_ids, tokens
_FLOATS = re.compile("pixel|image|video|audio|feature|input_values")  # as pixel_values


def why_fed(part: nn.Module, around: nn.Module) -> str:
    """Why the module `around` may call `part`, which is inside it, with embeddings; '' where
    nothing suggests that it does.

    A part without an argument for embeddings is always given ids. Another one may be given
    embeddings where the module around it computes something itself and takes floats by name, or
    takes nothing by name that could be ids.
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
    """Names of the arguments of its forward; none for a container, which has no forward."""
    if type(module).forward is nn.Module.forward:
        return []
    try:
        return [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):
        return []
