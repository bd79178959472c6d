"""The steps of recurrent layers: at each step the product of a state and the recurrent weight, and
the gates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import module_path, parameter_name, roots, value
from qfx.graph.recurrent_bodies import LAYERS
from qfx.graph.views import View, constant_behind
from qfx.host.tensors import tree_leaves
from qfx.match.base import Match
from qfx.match.site import Site
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, Scheme
from qfx.values.select import left_out

_LAYER = "a recurrent layer"
_INSTEAD = "qfx.quantize_(model) makes nn.LSTM and nn.GRU int8 there too"
PARAMETERS = "qfx_parameters"  # metadata of a recurrent layer: the names of its weights
_WEIGHT = re.compile(r"weight_([ih]h(?:_l\d+(?:_reverse)?)?)")
WHOLE = "qfx_whole"  # metadata of a recurrent layer that stays as it is: why


@dataclass(frozen=True, kw_only=True)
class RecurrentSteps(Match):
    """T steps of a recurrent layer, `batch`, each a matmul of the state [M, K] with the weight [N,
    K].

    `site`: the state before the first step, the recurrent weight and its bias. `arguments`: those
    of the node, by name.
    """

    site: Site
    arguments: Mapping[str, Any]
    k: int | None = None
    n: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return replace(self.site, path=self.path).names

    @property
    def left(self) -> tuple[fx.Node, View]:
        return self.site.left

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        return self.site.weights

    @property
    def float_type(self) -> torch.dtype:
        return self.site.float_type

    def recording(self) -> RecurrentSteps:
        return replace(self, trains=True, site=self.site.recording())


def recurrent_steps(
    site: Site, arguments: Mapping[str, Any], shape: tuple[int, ...] | None
) -> Match | str:
    """Returns the match of the steps of a layer. `shape`: of the weight after its view."""
    x, h = value(arguments["x"]), value(site.x)
    if shape is None or x is None or h is None:
        return "the steps of a recurrent layer of unknown shapes"
    n, k = shape
    site = replace(site, m=h.shape[0], k=k, n=n, out_dtype=h.dtype)
    return RecurrentSteps(
        node=site.node, path=site.path, trains=site.trains, site=site, arguments=arguments,
        batch=x.shape[0], m=h.shape[0], k=k, n=n,
    )  # fmt: skip


def path_of_cell(path: str, parameter: str) -> str:
    """Returns the path of a matmul whose weight is `parameter`, in the module `path`: in a
    recurrent layer or cell that of its linear in `qfx.nn`, `rnn.ih_l0` for `rnn.weight_ih_l0`."""
    owner, _, name = parameter.rpartition(".")
    found = _WEIGHT.fullmatch(name)
    return f"{path}.{found[1]}".lstrip(".") if found and owner == path else path


def why_no_steps(scheme: Scheme) -> str | None:
    """Returns why the steps of a recurrent layer are not int8 in this scheme, or None."""
    x = scheme.x
    if x is None or scheme.calibrated or scheme.w.axes == PER_COLUMN:
        return f"the steps of a recurrent layer, which {scheme} does not serve"
    if x.axes == PER_TENSOR and not x.group:
        return f"{scheme} has one scale for all rows, and rows of a state are independent"
    return None


def why_all_stay(config: Config) -> str | None:
    """Returns why no recurrent layer becomes int8 under this configuration, or None."""
    if config.recipe is not None and config.recipe.pinned is not None:
        return "the pinned plan does not name it"
    if config.guard is not None:
        return f"guard={config.guard}: the steps of a recurrent layer have no bound"
    return None


def stays_whole(node: fx.Node, config: Config, prefixes: Mapping[str, str], training: bool) -> bool:
    """Whether a call of torch.lstm or torch.gru stays as it is, because its steps would not become
    int8. The reason is then noted in its metadata."""
    if node.target not in LAYERS:
        return False
    node.meta[WHOLE] = next(_reasons(node, config, prefixes, training), "")
    return bool(node.meta[WHOLE])


def _reasons(
    node: fx.Node, config: Config, prefixes: Mapping[str, str], training: bool
) -> Iterator[str]:
    results = [t for t in tree_leaves(value(node)) if isinstance(t, torch.Tensor)]
    if training or any(t.requires_grad for t in results):
        yield f"{_LAYER} where gradients are recorded: {_INSTEAD}"
    if any(t.device.type != "cpu" for t in results):
        yield f"{_LAYER} on {results[0].device}, where its steps have no kernel"
    params = _params(node)
    constants = [constant_behind(w) for w in params if isinstance(w, fx.Node)]
    found = [constant[0] for constant in constants if not isinstance(constant, str)]
    if not params or len(found) != len(params):
        yield f"{_LAYER} of a packed sequence, or whose weights are computed: {_INSTEAD}"
        return
    names = [parameter_name(root, prefixes) for weight in found for root in roots(weight)]
    node.meta[PARAMETERS] = tuple(names)
    if why := left_out(config, [*filter(None, (module_path(node, prefixes), *names))]):
        yield why
    if why := why_all_stay(config):
        yield why
    shapes = [value(weight).shape for weight in found if value(weight) is not None]
    states = [int(shape[1]) for shape in shapes if len(shape) == 2][1::2]
    if why := why_no_steps(config.chosen) or why_few_features(min(states, default=None)):
        yield why


def _params(node: fx.Node) -> Sequence[Any]:
    found = node.args[2] if len(node.args) > 2 else node.kwargs.get("params")
    return found if isinstance(found, list | tuple) else ()
