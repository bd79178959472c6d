"""OwnForward: base class of an object that replaces the forward of a model and keeps the original
one."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any


class OwnForward:
    """Calls a model's own forward. It refers to the model weakly, so that `del model` frees it at
    once.

    A copy or a pickle of the model includes a copy of this object, which refers to the copied
    model.
    """

    def __init__(self, model: Any, inner: Callable[..., Any]) -> None:
        """Stores the model and its forward `inner`, a method of the model or any other function."""
        self._model, self._inner = weakref.ref(model), _unbound(model, inner)

    @property
    def model(self) -> Any:
        """The model. Raises ReferenceError if it was freed."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of these steps is gone: keep it while you call it")
        return model

    @property
    def inner(self) -> Callable[..., Any]:
        """The model's own forward."""
        return MethodType(self._inner, self.model) if self._of_model() else self._inner

    def by_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model's own forward, in a way that torch.compile can trace."""
        own = (self.model,) if self._of_model() else ()
        return self._inner(*own, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": self.model, "_inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        model, inner = state["_model"], state["_inner"]
        self._model, self._inner = weakref.ref(model), _unbound(model, inner)

    def _of_model(self) -> bool:
        return isinstance(self._inner, FunctionType)


def _unbound(model: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a method of the model; anything else unchanged."""
    if isinstance(inner, MethodType) and inner.__self__ is model:
        return inner.__func__  # type: ignore[return-value]
    return inner
