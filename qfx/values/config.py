"""Config: the options of qfx, checked on creation, and how `options={...}` is parsed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from qfx.host.inductor import known_options
from qfx.io.errors import UserError
from qfx.values.recipe import Recipe
from qfx.values.scheme import BACKWARD, PER_TENSOR, QSpec, Scheme

ASYMMETRIC = QSpec(symmetric=False)
PACKED = QSpec(bits=4, symmetric=False, group=64, packed=True)  # docs/decisions/0033
PRESETS = {
    "w8a8": Scheme(x=ASYMMETRIC, rotation=64),  # docs/decisions/0010
    "w8a8-symmetric": Scheme(),
    "w8a8-asymmetric": Scheme(x=ASYMMETRIC),
    "w8a8-tensor": Scheme(x=replace(ASYMMETRIC, axes=PER_TENSOR)),
    "w8a8-static": Scheme(x=QSpec(axes=PER_TENSOR, static=True), rotation=64),
    "w8a8-groups": Scheme(x=QSpec(group=64), w=QSpec(group=64), rotation=64),
    "w8": Scheme(x=None),
    "w7a7": Scheme(x=QSpec(bits=7), w=QSpec(bits=7), rotation=64),
    "w5a8": Scheme(w=replace(PACKED, bits=5), rotation=64),
    "w4a8": Scheme(w=PACKED, rotation=64),
    "w5": Scheme(x=None, w=replace(PACKED, bits=5)),
    "w4": Scheme(x=None, w=PACKED),
}
INNER = ("inductor", "aot_eager", "eager", "program")


@dataclass(frozen=True)
class Config:
    """The options of qfx: which matmuls become int8, and how.

        config = qfx.Config(scheme="w8a8", skip=["lm_head"], minimum_gain=1.2)

    `scheme`: a name of `PRESETS` or a `Scheme`. `recipe`: the decisions of calibration; the matmuls
    that it names follow it, the others follow `scheme`. `skip`, `only`: patterns for module paths
    and parameter names (`lm_head`, `layers.0.*`); with `only`, nothing else becomes int8; `skip`
    overrides `only` and the recipe. `minimum_gain`: a matmul becomes int8 if its predicted float
    time divided by its predicted int8 time is at least this; 0 quantizes all that int8 suits
    (docs/limits.md). `inner`: the compiler of the rewritten graph.

    `backward`: how gradients are computed when the model trains, "float" or "int8" with stochastic
    rounding. `guard`: rows of activations whose relative error in int8 may exceed this number,
    according to the bound (B5) of docs/numerics.md, run in float; None for no guard. `smoothing`:
    in a model whose input is token ids, channels of activations and weights are balanced before
    both are rotated, by what the model computes from seeded ids ((R4) of docs/numerics.md).
    `release_weights`: under `torch.compile`, the memory of packed float weights is freed, by
    writing them to files if necessary, and all matmuls with such weights that int8 supports are
    int8, whatever their gain (docs/serving.md). `embeddings`: "int8" replaces each nn.Embedding by
    a table of int8 codes, with `quantize_` only. `saved_activations`: what a compiled training step
    keeps for the backward pass, "float" or "int8" with stochastic rounding, by Inductor only
    (docs/training.md). Raises ValueError or TypeError for an invalid option.
    """

    scheme: str | Scheme = "w8a8"
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    minimum_gain: float = 1.1
    inner: str = "inductor"
    backward: str = "float"
    recipe: Recipe | None = None
    guard: float | None = None
    smoothing: bool = True
    release_weights: bool = False
    embeddings: str | None = None
    saved_activations: str = "float"

    @classmethod
    def of(cls, given: Configurable) -> Config:
        """Returns the Config given by a Config, a name of `PRESETS`, a `Scheme`, a mapping of
        fields, or None for the default. Raises TypeError for anything else, and the errors of
        Config for invalid options."""
        if isinstance(given, Config):
            return given
        if isinstance(given, str | Scheme):
            return cls(scheme=given)
        if isinstance(given, Mapping):
            return parse_options(given, inner=False)[0]
        if given is None:
            return cls()
        raise TypeError(
            f"expected a qfx.Config, the name of a scheme ({', '.join(PRESETS)}), a qfx.Scheme, a "
            f"dict of options or None, got {type(given).__name__}: {str(given)[:60]}"
        )

    @property
    def recipe_names(self) -> frozenset[str]:
        """The names of the matmuls in the recipe; empty without a recipe."""
        return self.recipe.names if self.recipe else frozenset()

    @property
    def by_name(self) -> bool:
        """Whether the name of a matmul matters: a recipe has values for each name, and a guard
        counts the rows for each name."""
        return self.recipe is not None or self.guard is not None

    def __post_init__(self) -> None:
        for name in ("skip", "only"):
            patterns = getattr(self, name)
            listed = isinstance(patterns, list | tuple | set | frozenset)
            if not listed or not all(isinstance(p, str) for p in patterns):
                raise TypeError(f"option {name!r} takes a list of patterns, got {patterns!r}")
            object.__setattr__(self, name, tuple(patterns))
        known = isinstance(self.scheme, str) and self.scheme in PRESETS
        if not isinstance(self.scheme, Scheme) and not known:
            raise UserError(f"unknown scheme {self.scheme!r}; the presets are {', '.join(PRESETS)}")
        if self.inner not in INNER:
            raise UserError(
                f"unknown inner compiler {self.inner!r}; choose from {', '.join(INNER)}"
            )
        if self.backward not in BACKWARD:
            raise UserError(
                f"unknown backward {self.backward!r}; choose from {', '.join(BACKWARD)}"
            )
        if not isinstance(self.recipe, Recipe | None):
            raise TypeError(f"option 'recipe' takes a qfx.Recipe, got {self.recipe!r}")
        self.chosen  # noqa: B018  (a preset may have no int8 backward)
        gain = self.minimum_gain
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 <= gain < 1e6:
            raise UserError(
                f"minimum_gain={gain!r} is not a ratio of times (0 quantizes all that int8 suits)"
            )

        for name in ("smoothing", "release_weights"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"option {name!r} is True or False, got {getattr(self, name)!r}")
        if self.embeddings not in (None, "int8"):
            raise UserError(
                f'embeddings={self.embeddings!r}: expected "int8", or None to leave them float'
            )
        if self.saved_activations not in BACKWARD:
            raise UserError(
                f"unknown saved_activations {self.saved_activations!r}; choose from "
                f"{', '.join(BACKWARD)}"
            )
        if self.saved_activations == "int8" and self.inner in ("eager", "aot_eager"):
            raise UserError(
                'saved_activations="int8" is for the inner compiler "inductor", not '
                f"{self.inner!r}; eager code runs under qfx.save_in_int8()"
            )
        guard = self.guard
        if guard is not None and (
            isinstance(guard, bool) or not isinstance(guard, int | float) or not 0 < guard < 1e6
        ):
            raise UserError(
                f"guard={guard!r} is not a relative error above 0, as 0.05 is (None for no guard)"
            )

    @property
    def chosen(self) -> Scheme:
        """The scheme of the matmuls that no recipe names."""
        if isinstance(self.scheme, Scheme):
            return self.scheme
        return replace(PRESETS[self.scheme], backward=self.backward)


Configurable: TypeAlias = Config | Scheme | str | Mapping[str, Any] | None  # see `Config.of`


def parse_options(options: Configurable, inner: bool = True) -> tuple[Config, dict[str, Any]]:
    """Splits `options` into qfx's Config and the options of the inner compiler, Inductor, which are
    only allowed if `inner` is true. Options that are not a mapping are passed to `Config.of`.

    A path as `recipe` is replaced by the recipe in that file. The option `guard_filter_fn` is
    ignored: it is PyTorch's own and not passed to backends. Raises ValueError for a name that is
    neither an option of qfx nor of Inductor, with the nearest names.
    """
    if not isinstance(options, Mapping | None):
        return Config.of(options), {}
    ours = {f.name for f in fields(Config)}
    options = {k: v for k, v in (options or {}).items() if k != "guard_filter_fn"}
    mine = {k: v for k, v in options.items() if k in ours}
    if isinstance(mine.get("recipe"), str | Path):
        mine["recipe"] = Recipe.load(mine["recipe"])
    rest = {k.replace("-", "_"): v for k, v in options.items() if k not in ours}
    config = Config(**mine)
    if config.embeddings is not None and inner:
        raise UserError(
            f"embeddings={config.embeddings!r} is for qfx.quantize_, which replaces modules; a "
            "compiled graph looks rows up in the table that its model has"
        )
    known = known_options() if rest and inner else {}
    for name in rest:
        if name not in known or not inner or config.inner != "inductor":
            near = difflib.get_close_matches(name, [*ours, *known], n=3)
            hint = f", did you mean {' or '.join(near)}?" if near else "."
            others = f"; others are those of the inner compiler {config.inner!r}, which has no such"
            raise UserError(
                f"unknown option {name!r}{hint} Options of qfx are {', '.join(sorted(ours))}"
                f"{others + ' option' if inner else ''}"
            )
    return config, rest
