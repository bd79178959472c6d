"""The key of a program: a digest of everything that it depends on, except the values of weights."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qfx.generate.code_fingerprint import code_fingerprints
from qfx.generate.fingerprint import Fingerprinter, NoFingerprint
from qfx.generate.model_state import NOT_OWN, attention_of, hooks_on
from qfx.generate.step_modules import is_served, named_tensors
from qfx.host.modules import global_hooks
from qfx.host.tensors import storage_id, watched
from qfx.io.digest import digest_of, own_digest
from qfx.io.disk_memo import is_switch

# Prefixes of environment variables that the libraries read.
_ENVIRONMENT = ("ATEN_", "PYTORCH_", "QFX_", "TORCH_", "TRANSFORMERS_")
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def key_of(
    model: nn.Module, steps: Any, inputs: tuple[Tensor, ...], **others: Any
) -> tuple[str, dict[str, Tensor]]:
    """Returns the key of a program, which is a digest of everything that the program depends on,
    and the model's parameters and buffers by the names that programs use for them. The key does not
    cover the values of weights.

    `steps`: the object that replaces the model's forward. `inputs`: the inputs of a step; their
    sizes and dtypes are part of the key. `others`: further values that are part of the key. Raises
    NoFingerprint, with the reason, if a value that the program may depend on has no fingerprint.
    """
    tensors = _named_tensors(model)
    total = hashlib.sha256()
    for part in _parts(model, steps, inputs, tensors, others):
        total.update(part.encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest(), tensors


def values_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names and values of parameters and buffers."""
    parts: list[str | Tensor] = []
    for name, tensor in tensors.items():
        parts += f"{name}\0", tensor
    return digest_of(*parts)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by all of their names, including those that no state dict
    contains."""
    return dict(sorted(named_tensors(model), key=itemgetter(0)))


def _parts(
    model: nn.Module,
    steps: Any,
    inputs: tuple[Tensor, ...],
    tensors: Mapping[str, Tensor],
    others: dict[str, Any],
) -> Iterator[str]:
    if watched() or global_hooks():
        raise NoFingerprint("a mode or a hook that sees all modules")
    modules = dict(model.named_modules())
    names = {id(tensor): name for name, tensor in tensors.items()}
    names |= {id(module): f"module {name!r}" for name, module in modules.items()}
    fingerprint = Fingerprinter(names | {id(steps): "programs"})
    yield from _surroundings()
    yield fingerprint([(t.dtype, t.shape, t.stride()) for t in inputs])
    yield fingerprint(others)
    yield from _tensors(tensors)
    for name, module in modules.items():
        yield f"{name!r} {_class(type(module))} {_module(module, fingerprint)}"
    kind = attention_of(model)
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        yield f"{kind} {fingerprint(table.get(kind, None))}"
    classes = [type(module) for module in modules.values()]
    homes = {base.__module__ for each in classes for base in each.__mro__}
    yield from code_fingerprints(fingerprint, homes | fingerprint.homes, classes)


def _surroundings() -> Iterator[str]:
    yield f"qfx {own_digest()}"
    yield f"torch {torch.__version__} {torch.version.git_version}"
    yield f"transformers {transformers.__version__}"
    yield f"{sys.version} {sys.flags.optimize} {platform.machine()}"
    read = {n: v for n, v in os.environ.items() if n.startswith(_ENVIRONMENT) and not is_switch(n)}
    yield repr(sorted(read.items()))
    cuda, backends = torch.backends.cuda, torch.backends
    yield repr(
        (
            torch.get_default_dtype(), torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
            backends.mkldnn.enabled, backends.mha.get_fastpath_enabled(),
        )
    )  # fmt: skip


def _tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields, for each tensor, a text with its name, dtype, shape and place in memory shared with
    others."""
    numbers: dict[int | None, int] = {}
    for name, t in tensors.items():
        if type(t) not in _TENSORS or t.layout != torch.strided or t.device.type != "cpu":
            raise NoFingerprint(f"{name} is a {type(t).__name__} on {t.device}")
        memory = numbers.setdefault(storage_id(t), len(numbers)), t.untyped_storage().nbytes()
        where = (t.shape, t.stride(), t.storage_offset(), memory)
        yield f"{name} {t.dtype} {where} {t.requires_grad} {t.is_conj()} {t.is_neg()}"


def _class(kind: type) -> str:
    """Returns the name of a class; its code is part of the fingerprint of all classes."""
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise NoFingerprint(f"the class {kind.__qualname__} of {kind.__module__}")
    return f"{kind.__module__}.{kind.__qualname__}"


def _module(module: nn.Module, fingerprint: Callable[[Any], str]) -> str:
    if hooks_on(module):
        raise NoFingerprint(f"a {type(module).__name__} has hooks")
    own = {n: v for n, v in sorted(vars(module).items()) if n not in NOT_OWN}
    missing = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is None]
    scheme = str(module.scheme) if is_served(module) else ""  # type: ignore[attr-defined]
    return fingerprint(
        (module.training, own, module._modules, missing, sorted(module._buffers), scheme)
    )
