"""QfxConfig: the quantization options for a model of transformers, and their part of its
config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from qfx.io.errors import UserError, printable
from qfx.io.safe_read import inside, relative
from qfx.nn.scheme_tensor import checked_numbers
from qfx.values.config import Config
from qfx.values.recipe import Recipe
from qfx.values.scheme import Scheme, scheme_from

METHOD = "qfx"
FORMAT = 1


@register_quantization_config(METHOD)
class QfxConfig(QuantizationConfigMixin):
    """Quantization options for `from_pretrained(..., quantization_config=QfxConfig(...))`.

    `scheme`, `skip`, `only`, `backward`, `embeddings` and `recipe` (or its path) are the options of
    `qfx.Config`. A recipe that a config.json names is a file inside the model's folder. `smoothing`
    is also an option of `qfx.Config`, but False by default: its factors require the whole float
    model, so with it quantization starts only after the whole model is loaded. `linears` is for
    saved models: the int8 linears and embeddings, with the numbers of their scheme
    (`qfx/nn/scheme_tensor.py`).

        AutoModelForCausalLM.from_pretrained(name, quantization_config=QfxConfig("w4a8"))

    Raises ValueError or TypeError for invalid options, and for another `format` or `quant_method`.
    """

    def __init__(
        self,
        scheme: str | Scheme | Mapping[str, Any] = "w8a8",
        skip: Any = (),
        only: Any = (),
        backward: str = "float",
        smoothing: bool = False,
        recipe: Recipe | str | Path | None = None,
        embeddings: str | None = None,
        linears: Mapping[str, list[int]] | None = None,
        format: int = FORMAT,
        quant_method: str = METHOD,
    ) -> None:
        if type(format) is not int or format != FORMAT or quant_method != METHOD:
            raise UserError(
                f"the quantization_config has {printable(repr(quant_method))} of format "
                f"{printable(repr(format))}, and this qfx reads qfx of format {FORMAT}"
            )
        self.quant_method: Any = METHOD
        self.format = FORMAT
        self.recipe_name: str | None = None
        self.linears = None if linears is None else checked_numbers(linears)
        self.config = Config(
            scheme=_scheme(scheme),
            skip=skip,
            only=only,
            backward=backward,
            smoothing=smoothing,
            embeddings=embeddings,
            recipe=Recipe.load(recipe) if isinstance(recipe, str | Path) else recipe,
        )

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Returns the options in the dict of a config.json. The file may come from anyone, so a
        recipe that it names is only read later, by `read_recipe`. Raises ValueError for a recipe
        outside of the model's folder."""
        fields = dict(config_dict)
        named = fields.get("recipe")
        if not isinstance(named, str | Path):
            return super().from_dict(fields, return_unused_kwargs, **kwargs)
        del fields["recipe"]
        found = super().from_dict(fields, return_unused_kwargs, **kwargs)
        config = found[0] if return_unused_kwargs else found
        config.recipe_name = str(relative(str(named), "the quantization_config"))
        return found

    def read_recipe(self, folder: Path) -> None:
        """Reads the recipe that config.json of `folder` names. Raises ValueError or OSError."""
        if self.recipe_name is not None:
            recipe = Recipe.load(inside(folder, self.recipe_name))
            self.config = replace(self.config, recipe=recipe)

    def to_dict(self) -> dict[str, Any]:
        """Returns the dict for config.json. For an int8 model it names the int8 linears with the
        numbers of their scheme; everything else is in the model's tensors."""
        fields: dict[str, Any] = {"quant_method": METHOD, "format": FORMAT}
        if self.linears is not None:
            return fields | {"linears": self.linears}
        c = self.config
        scheme = asdict(c.scheme) if isinstance(c.scheme, Scheme) else c.scheme
        how = {"scheme": scheme, "skip": [*c.skip], "only": [*c.only]}
        how |= {"embeddings": c.embeddings} if c.embeddings else {}  # unknown to earlier versions
        return fields | how | {"backward": c.backward, "smoothing": c.smoothing}


def _scheme(raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        return raw
    try:
        return scheme_from(dict(raw))
    except (TypeError, KeyError, AttributeError) as why:
        raise UserError(f"the quantization_config has an invalid scheme: {why}") from None
