"""Convolutions of groups of channels, each with a weight of its own; in a depthwise convolution a
group is one channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from qfx.graph.views import View
from qfx.match.base import Match
from qfx.match.site import Site
from qfx.values.limits import FEWEST_OUTPUTS

MOST_AXES = 2  # of a depthwise convolution


@dataclass(frozen=True, kw_only=True)
class GroupedConvolution(Match):
    """A convolution in `groups` groups of channels. `site`: the convolution, whose view gives the
    weights of all outputs, [N, K], with the K = taps * channels of a group."""

    site: Site
    groups: int
    k: int
    n: int

    @property
    def depthwise(self) -> bool:
        """Whether each output reads the channel of its own number."""
        return self.n == self.groups and self.k == self.taps

    @property
    def taps(self) -> int:
        return math.prod(self.windows[0])

    @property
    def windows(self) -> tuple[Any, ...]:
        """The arguments kernel, stride, padding and dilation of im2col."""
        ((_, arguments),) = self.site.x_view
        return arguments

    @property
    def out(self) -> fx.Node:
        return self.site.out

    @property
    def names(self) -> tuple[str, ...]:
        return replace(self.site, path=self.path).names

    @property
    def left(self) -> tuple[fx.Node, View] | None:
        return self.site.x, ()

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        return self.site.weights

    @property
    def float_type(self) -> torch.dtype:
        return self.site.float_type

    def recording(self) -> GroupedConvolution:
        return replace(self, trains=True, site=self.site.recording())


def grouped_convolution(site: Site, groups: int) -> Match | str:
    """Returns the match of a convolution in groups, or the reason why it stays float."""
    if site.k is None or site.n is None:
        return "a grouped convolution of unknown shapes"
    found = GroupedConvolution(
        node=site.node, path=site.path, trains=site.trains, m=site.m, k=site.k, n=site.n,
        site=site, groups=groups,
    )  # fmt: skip
    if found.depthwise:
        return why_no_depthwise(*found.windows) or found
    if site.n // groups < FEWEST_OUTPUTS or site.k == found.taps:
        return f"a convolution in {groups} groups of {site.n // groups} outputs each"
    return found


def why_no_depthwise(kernel: Sequence[int], *windows: Sequence[int]) -> str | None:
    """Returns why a depthwise convolution with these windows has no int8 form, or None."""
    dilation = windows[-1]
    if len(kernel) > MOST_AXES:
        return f"a depthwise convolution over {len(kernel)} axes"
    return "a depthwise convolution with a dilation along lines" if dilation[-1] != 1 else None
