"""Accesses Dynamo, except for the compiled frame: guards, recompilation, its messages, PyTorch's
structured trace, and the wrappers of compiled models."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_captured_here: ContextVar[bool] = ContextVar("captured_here", default=False)


def tie_to_objects(sources: Iterable[Any]) -> None:
    """Adds guards to the graph being compiled: it is compiled again if one of these Dynamo sources
    refers to another object."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def local_source(name: str) -> Any:
    """Returns Dynamo's source of a local variable of the compiled frame."""
    from torch._dynamo.source import LocalSource

    return LocalSource(name)


def captures_recurrent() -> bool:
    """Whether Dynamo captures nn.LSTM and nn.GRU. Otherwise it ends the graph before them, and
    PyTorch runs them."""
    from torch._dynamo import config  # a second to import

    return bool(config.allow_rnn)


def capture_recurrent() -> None:
    """Makes Dynamo capture nn.LSTM and nn.GRU in the capture that begins, until it ends: a function
    given to `before_captures` may call it. Captures in other threads are not affected."""
    from torch._dynamo import config  # a second to import
    from torch._dynamo.callback import callback_handler

    if not config.allow_rnn:
        config.allow_rnn = True
        if _leave_recurrent not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_leave_recurrent)
        _captured_here.set(True)


def _leave_recurrent(arguments: Any) -> None:
    if _captured_here.get():
        from torch._dynamo import config

        config.allow_rnn = False
        _captured_here.set(False)


def before_captures(function: Callable[[Any], None]) -> None:
    """Calls `function` before Dynamo captures a Python function, with the backend as torch.compile
    wrapped it, also after `torch._dynamo.reset()`. The modules that run are then on the stack."""
    from torch._dynamo.callback import callback_handler  # a second to import

    def called(arguments: Any) -> None:
        backend = _backend_that_captures()
        if backend is not None:
            function(backend)

    called.of = function  # type: ignore[attr-defined]
    if not isinstance(callback_handler.start_callbacks, _Callbacks):
        callback_handler.start_callbacks = _Callbacks(callback_handler.start_callbacks)
    callback_handler.register_start_callback(called)


class _Callbacks(list[Any]):
    """Dynamo's callbacks. A reset of Dynamo clears them, except for those of `before_captures`."""

    def clear(self) -> None:
        kept = [each for each in self if hasattr(each, "of")]
        super().clear()
        self.extend(kept)


def _backend_that_captures() -> Any:
    from torch._dynamo.eval_frame import innermost_backend

    frame: FrameType | None = sys._getframe()
    while frame is not None and "compiler_fn" not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else innermost_backend(frame.f_locals["compiler_fn"])


def discard_compiled(code: CodeType) -> None:
    """Discards the compiled code of a Python function, so that its next call is captured again."""
    from torch._dynamo.eval_frame import reset_code  # a second to import

    reset_code(code)


@contextmanager
def without_skip_marks() -> Iterator[None]:
    """Makes Dynamo try again, inside the `with` block, to capture code that it failed to capture
    before; afterwards no code is marked as failed.

    Dynamo marks a code object at the first failure and skips it silently from then on. All modules
    of a class share the code of their forward, and all modules of torch.nn that are compiled
    directly share that of a wrapper: after an nn.LSTM no nn.Sequential would be captured.
    """
    _clear_skip_marks()
    try:
        yield
    finally:
        _clear_skip_marks()


def _clear_skip_marks() -> None:
    """Clears the marks of the code that Dynamo has inspected. Code that its author marked is never
    inspected."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.convert_frame import input_codes, output_codes  # a second to import

    default = eval_frame._FrameAction.DEFAULT
    for reference in [*input_codes.seen]:
        code = reference()
        if code is not None and code not in output_codes:
            strategy = eval_frame._FrameExecStrategy(default, default)
            eval_frame.set_code_exec_strategy(code, strategy)


def break_counters() -> Counter[str]:
    """Returns Dynamo's messages about code that it did not capture, with the number of occurrences
    of each since Dynamo's counters were last cleared."""
    from torch._dynamo.utils import counters  # a second to import

    kinds = ("graph_break", "unimplemented")  # a function was split, or given up as a whole
    return sum((Counter(counters[kind]) for kind in kinds), Counter[str]())


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to PyTorch's structured trace, which `TORCH_TRACE` writes and tlparse shows.
    `text` is called only if a trace is written."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )


def control_flow() -> tuple[type[BaseException], ...]:
    """Returns the classes of exceptions that PyTorch raises inside a backend for Dynamo to catch;
    they are not defects."""
    from torch._dynamo import exc

    return exc.RestartAnalysis, exc.SkipFrame


def aot_eager() -> Callable[..., Any]:
    """Returns the backend aot_eager, which traces forward and backward graphs and compiles
    nothing."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager


def before_methods(names: Iterable[str], function: Callable[[Any, str, nn.Module], None]) -> None:
    """Calls `function(backend, name, model)` where a method of one of these names is called on what
    `torch.compile(model)` returned. Such a method belongs to `model`, which is not compiled."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend  # a second to import

    read, watched = OptimizedModule.__getattr__, frozenset(names)

    def __getattr__(self: Any, name: str) -> Any:
        found = read(self, name)
        if name not in watched or not callable(found):
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            backend = innermost_backend(self.dynamo_ctx.callback)
            function(backend, name, self._orig_mod)
            return found(*args, **kwargs)

        return method

    OptimizedModule.__getattr__ = __getattr__  # type: ignore[method-assign]


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the model without `torch.compile(model)` or `model.compile()` around it."""
    model = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    return model.forward if is_compiled_in_place(model) else model  # type: ignore[union-attr]


def is_compiled_in_place(model: Any) -> bool:
    """Whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


def uncompiled_module(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)
