"""Dynamo beside the frame that it compiles: guards, compiling anew, what it says, what it wraps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn


def tie_to_objects(sources: Iterable[Any]) -> None:
    """Ties the graph that is being compiled to the objects that these sources of Dynamo give."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def local_source(name: str) -> Any:
    """The source of a local variable of the compiled frame."""
    from torch._dynamo.source import LocalSource

    return LocalSource(name)


def compile_anew(code: CodeType) -> None:
    """Forgets what was compiled of this code, so that its next call is captured again."""
    from torch._dynamo.eval_frame import reset_code  # a second to import

    reset_code(code)


@contextmanager
def without_skip_marks() -> Iterator[None]:
    """A context in which Dynamo tries again to capture code that it failed to capture before, and
    which leaves no such code behind.

    Dynamo marks a code object at the first failure and skips it silently from then on. All modules
    of a class share the code of their forward, and all modules of torch.nn that are compiled
    themselves share that of a wrapper: after an nn.LSTM no nn.Sequential would be captured.
    """
    _clear_skip_marks()
    try:
        yield
    finally:
        _clear_skip_marks()


def _clear_skip_marks() -> None:
    """Of the code that Dynamo has looked at. Code that its author marked never gets that far."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.convert_frame import input_codes, output_codes  # a second to import

    default = eval_frame._FrameAction.DEFAULT
    for reference in [*input_codes.seen]:
        code = reference()
        if code is not None and code not in output_codes:
            strategy = eval_frame._FrameExecStrategy(default, default)
            eval_frame.set_code_exec_strategy(code, strategy)


def said_of_breaks() -> Counter[str]:
    """What Dynamo has said of code that it does not capture, since someone cleared it."""
    from torch._dynamo.utils import counters  # a second to import

    kinds = ("graph_break", "unimplemented")  # a function was cut, or given up as a whole
    return sum((Counter(counters[kind]) for kind in kinds), Counter[str]())


def control_flow() -> tuple[type[BaseException], ...]:
    """What PyTorch raises inside a backend to be caught by Dynamo: no fault of anybody's."""
    from torch._dynamo import exc

    return exc.RestartAnalysis, exc.SkipFrame


def aot_eager() -> Callable[..., Any]:
    """The backend that traces backwards and compiles nothing."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model under `torch.compile(model)` or `model.compile()`."""
    model = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    if getattr(model, "_compiled_call_impl", None) is not None:
        return model.forward  # type: ignore[union-attr]
    return model


def uncompiled_module(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)
