"""Selection by name: which modules and parameters the patterns `skip` and `only` and the recipe of
a `Config` refer to."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn

from qfx.io.errors import UserError, printable
from qfx.values.config import Config


def names_in(module: nn.Module) -> set[str]:
    """Returns the names that patterns may refer to in a module: its modules, parameters and
    buffers, by all their names."""
    named = chain(
        module.named_modules(remove_duplicate=False),
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {name for name, _ in named if name}


def fits(pattern: str, candidates: Iterable[str]) -> bool:
    """Whether the pattern, which may contain wildcards, equals a run of whole components of one of
    the dotted names `candidates`."""
    shapes = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, shape) for name in candidates for shape in shapes)


def left_out(config: Config, candidates: Sequence[str]) -> str | None:
    """Returns why the patterns of `config` leave a matmul or a module with the names `candidates`
    float; None if they do not."""
    for pattern in config.skip:
        if fits(pattern, candidates):
            return f"skipped by the pattern {pattern!r}"
    if config.only and not any(fits(pattern, candidates) for pattern in config.only):
        return f"not among only={list(config.only)}"
    return None


def check_names(config: Config, known: Iterable[str]) -> None:
    """Raises ValueError if a pattern of `config` or the name of a matmul in its recipe fits none of
    the `known` names, and if the scheme has static scales but there is no recipe."""
    known = sorted(set(known))
    listed = ", ".join(map(printable, known[:50])) + (" ..." if len(known) > 50 else "")
    for option in ("skip", "only"):
        for pattern in getattr(config, option):
            if not fits(pattern, known):
                raise UserError(
                    f"{option}: the pattern {pattern!r} matches nothing; there is: {listed}"
                )
    if config.recipe is None and config.chosen.calibrated:
        raise UserError(
            f"the scheme {config.scheme} has static scales, which only a recipe holds: give one, "
            'options={"recipe": qfx.calibrate(model, batches)}'
        )
    missing = [s.name for s in config.recipe.sites if s.name not in known] if config.recipe else []
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        first = printable(", ".join(missing[:5]))
        raise UserError(f"recipe: the model has no {first}{more}; there is: {listed}")
