"""The pages name the activations of the table, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qfx.graph.activations import ACTIVATIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
# page -> the part of it that lists activations, and how each begins there
LISTS = {
    "coverage.md": (r"\n\| a bias, then (.*?)\|", r"`(\w+)`"),
    "numerics.md": (r"\n- \*\*\(E2\)\*\*(.*?)\n\n", r"`([a-z]\w*)\(v\) ="),
}


def _listed(page: str, text: str) -> list[str]:
    part, item = LISTS[page]
    (found,) = re.findall(part, text, re.DOTALL)
    return re.findall(item, found)


@pytest.mark.parametrize("page", LISTS)
def test_the_page_lists_the_activations(page: str) -> None:
    assert _listed(page, (DOCS / page).read_text()) == list(ACTIVATIONS)[1:]


@pytest.mark.parametrize("name", list(ACTIVATIONS)[1:])
@pytest.mark.parametrize("page", LISTS)
def test_an_activation_that_a_page_lacks_is_seen(page: str, name: str) -> None:
    text = re.sub(rf"`{name}\b", "`", (DOCS / page).read_text())
    assert name not in _listed(page, text)
