"""Recipe: the decisions of calibration for each call of a matmul, as a value and as a JSON file.
Int8 codes of weights that are not rounded to nearest are in a second file beside the JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch import Tensor

from qfx.io.errors import UserError, printable
from qfx.io.recipe_files import Raw, RecipeFiles, raw_of, read_recipe, recipe_files, save_recipe
from qfx.values.rounding import Rounding
from qfx.values.scheme import list_of, rotation_of_earlier, scheme_from
from qfx.values.site_recipe import PinnedProduct, SiteRecipe, listed

VERSIONS = (1, 2)  # of the JSON; version 2 names its file of codes, which qfx 0.2 does not look for
_FOUND = ("module", "KxN", "scheme", "factor", "static scale", "outliers", "SQNR dB")
_HEAD = (*_FOUND, "divergence", "reason")
_REST = "rest_rotated"  # true in entries whose rotation does not divide K; earlier builds have none
_LATER = ("rounding", "divergence", "tokens")  # fields that are written only if they have a value


@dataclass(frozen=True)
class Recipe:
    """The result of `qfx.calibrate` or `qfx.pin`: one `SiteRecipe` for each call of a matmul. A
    recipe prints as a table.

        recipe.save("recipe.json")
        recipe = qfx.Recipe.load("recipe.json")

    Matmuls that the recipe does not name are decided as usual, unless it has `pinned`, the
    decisions on the matmuls of two activations and the attentions of a whole plan. Then everything
    that it does not name stays float. Raises ValueError if a matmul occurs twice.
    """

    sites: tuple[SiteRecipe, ...]
    pinned: tuple[PinnedProduct, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        if self.pinned is not None:
            object.__setattr__(self, "pinned", tuple(self.pinned))
        if twice := _twice(self.sites) | _twice(self.pinned or ()):
            raise UserError(
                f"recipe: it has more than one entry for {', '.join(sorted(twice))}; each name and "
                "call must be unique"
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of all matmuls that the recipe decides."""
        return frozenset(s.name for s in self.sites) | {p.name for p in self.pinned or ()}

    def __str__(self) -> str:
        lines = [*map(_line, self.sites), *map(_pinned_line, self.pinned or ())]
        known = any(site.divergence is not None for site in self.sites)
        shown = [i for i, head in enumerate(_HEAD) if known or head != "divergence"]
        table = [[line[i] for i in shown] for line in lines]
        return tabulate(table, [_HEAD[i] for i in shown], disable_numparse=True)

    def to_json(self) -> str:
        """Returns JSON text with a version and one line for each matmul; `from_json` returns an
        equal recipe. Raises ValueError for what JSON cannot hold, such as codes of weights."""
        return self._text(None)

    def _text(self, codes: str | None) -> str:
        """Returns the JSON text. `codes`: the name of the file with int8 codes of weights, or None
        if there are no such codes."""
        head = (
            '"qfx_recipe": 1' if codes is None else f'"qfx_recipe": 2, "codes": {json.dumps(codes)}'
        )
        pinned = "" if self.pinned is None else f', "pinned": {_listing(self.pinned)}'
        return f'{{{head}, "sites": {_listing(self.sites)}{pinned}}}'

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Returns the recipe of a JSON text. Raises ValueError for text that `to_json` of this
        version did not write, and for a recipe with codes, which JSON does not hold; use `save` and
        `load` for it."""
        return _recipe(raw_of(text), _no_codes)

    def save(self, path: str | Path) -> None:
        """Writes the recipe as JSON. Int8 codes of weights are written to a file beside it that is
        named by its content, such as `recipe-<16 digits>.safetensors` beside `recipe.json`.

        The recipe at `path` is replaced as a whole when the JSON is renamed, as the last step; then
        the codes of the former recipe are removed. Raises OSError, ValueError for what JSON cannot
        hold, and ImportError if there are codes but the package safetensors is missing; the old
        recipe then remains unchanged.
        """
        save_recipe(Path(path), self.files(path))

    def files(self, path: str | Path) -> RecipeFiles:
        """Returns the bytes that `save` writes for this path. Raises the same errors as `save`."""
        codes = {_key(s): s.rounding.codes for s in self.sites if s.rounding}
        return recipe_files(Path(path), codes, lambda name: f"{self._text(name)}\n")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads what `save` wrote, of this or any earlier version. Raises OSError if the file is
        missing. Raises ValueError if it is no recipe, no regular file or too large, or if the file
        of its codes is missing or was changed. Raises ImportError if it has codes and safetensors
        is missing."""
        return read_recipe(Path(path), _recipe)


def _recipe(raw: Raw, codes: Callable[[], Mapping[str, Tensor]]) -> Recipe:
    version = raw["qfx_recipe"]
    if type(version) is not int or version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise UserError(
            f"the recipe has version {version!r}, and this qfx reads versions {known}: use the qfx "
            "that saved it, or a newer one"
        )
    known_parts = {"qfx_recipe", "sites", "pinned"} | ({"codes"} if version == 2 else set())
    if unknown := sorted(raw.keys() - known_parts):
        raise UserError(
            f"the recipe has unknown keys {', '.join(map(repr, unknown))}: a newer qfx may have "
            "written it"
        )
    try:
        pinned = raw.get("pinned")
        products = None if pinned is None else tuple(map(_product, list_of(pinned)))
        return Recipe(tuple(_site(site, codes) for site in list_of(raw["sites"])), products)
    except (TypeError, KeyError, AttributeError) as why:
        what = f"the key {why} is missing" if isinstance(why, KeyError) else str(why)
        raise UserError(f"the recipe has an entry that cannot be read: {what}") from None


def _no_codes() -> Mapping[str, Tensor]:
    raise UserError(
        "the recipe has codes in a second file, which from_json cannot read: use Recipe.load"
    )


def _twice(values: Sequence[SiteRecipe | PinnedProduct]) -> set[str]:
    counts = Counter((value.name, value.call) for value in values)
    return {str(value) for value in values if counts[value.name, value.call] > 1}


def _line(site: SiteRecipe) -> Sequence[str]:
    factor, scale = site.factor, site.scale
    spread = "" if factor is None else f"{min(factor):.3g} to {max(factor):.3g}"
    zero = "" if site.zero_point is None else f", zero {site.zero_point}"
    return (
        str(site),
        f"{site.k}x{site.n}" if site.tokens is None else f"{len(site.tokens)} of {site.k}x{site.n}",
        str(site.scheme or "float"),
        spread,
        "" if scale is None else f"{scale:.4g}{zero}",
        listed(site.outliers),
        "" if site.sqnr_db is None else f"{site.sqnr_db:.1f}",
        "" if site.divergence is None else f"{site.divergence:.2g}",
        printable("; ".join(filter(None, [site.reason, str(site.rounding or "")]))),
    )


def _pinned_line(product: PinnedProduct) -> Sequence[str]:
    token = "float, attention_decode" if product.decodes else str(product.scheme or "float")
    return (str(product), "", token, *[""] * (len(_HEAD) - 4), "of two activations")


def _listing(values: Sequence[SiteRecipe | PinnedProduct]) -> str:
    lines = ",\n".join(json.dumps(_raw(value)) for value in values)
    return f"[\n{lines}\n]"


def _raw(value: SiteRecipe | PinnedProduct) -> dict[str, Any]:
    """Returns the fields of a value as JSON; of a rounding, only what identifies the codes."""
    if isinstance(value, PinnedProduct):
        return asdict(value)
    raw = asdict(replace(value, rounding=None))
    for name in _LATER:
        if raw[name] is None:  # so that earlier builds can read the recipe
            del raw[name]
    if value.scheme and value.scheme.rotation and value.k % value.scheme.rotation:
        raw[_REST] = True
    return raw if value.rounding is None else {**raw, "rounding": value.rounding.json_entry}


def _key(site: SiteRecipe) -> str:
    """Returns the name that the codes of this matmul's weight have in the file of codes."""
    return f"{site.name}[{site.call}]"


def _site(raw: dict[str, Any], codes: Callable[[], Mapping[str, Tensor]]) -> SiteRecipe:
    known = {f.name for f in fields(SiteRecipe)}
    if unknown := sorted(raw.keys() - known - {_REST}):
        raise TypeError(f"a site has unknown fields {', '.join(unknown)}")
    scheme, factor, rounding = raw["scheme"], raw["factor"], raw.get("rounding")
    site = SiteRecipe(
        **{
            **{name: raw[name] for name in raw.keys() & known},
            "rounding": None,
            "scheme": None if scheme is None else scheme_from(scheme),
            "tokens": None if raw.get("tokens") is None else tuple(list_of(raw["tokens"])),
            "factor": None if factor is None else tuple(list_of(factor)),
            "outliers": tuple(list_of(raw.get("outliers", []))),  # earlier builds wrote none
        }
    )
    if site.scheme and raw.get(_REST) is not True:
        site = replace(site, scheme=rotation_of_earlier(site.scheme, site.k))
    return site if rounding is None else replace(site, rounding=_rounding(site, rounding, codes()))


def _rounding(site: SiteRecipe, raw: Any, codes: Mapping[str, Tensor]) -> Rounding:
    if not isinstance(raw, dict) or {*raw} != {"method", "weight", "codes"}:
        raise TypeError(f"rounding={raw!r} must have the keys method, weight and codes")
    if _key(site) not in codes:
        raise UserError(
            f"recipe of {site}: the file of codes beside the recipe has none for it: copy both "
            "files of a recipe, or calibrate again"
        )
    found = Rounding(str(site), raw["method"], raw["weight"], codes[_key(site)])
    if found.json_entry != raw:
        raise UserError(
            f"recipe of {site}: the file of codes beside the recipe belongs to another recipe: "
            "copy both files of a recipe, or calibrate again"
        )
    return found


def _product(raw: dict[str, Any]) -> PinnedProduct:
    scheme = raw["scheme"]
    return PinnedProduct(**{**raw, "scheme": None if scheme is None else scheme_from(scheme)})
