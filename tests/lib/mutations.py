"""Mutations of a JSON text: every text that differs from it in one place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def mutated(text: str) -> Iterator[str]:
    """Yields the text with one value replaced by each of VALUES, omitted, repeated, or followed by
    another."""
    yield from map(text_of, mutations(json.loads(text, object_pairs_hook=Object)))


class Raw(str):
    """JSON text that is written as it is."""


class Object(list[Any]):
    """The pairs of a JSON object, which may repeat a key."""


def text_of(tree: Any) -> str:
    if isinstance(tree, Object):
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(text_of, tree)) + "]"
    return str(tree) if isinstance(tree, Raw) else json.dumps(tree)


DIGITS, DEPTH = "9" * 400, 100_000
VALUES = [
    *("null", "true", "false", "0", "1", "-1", "2", "7", "64", "8.0", "0.5", "1e999", "-1e999"),
    *("NaN", "1e-320", "1e-40", "1e39", DIGITS, f"-{DIGITS}", "9" * 5000, str(2**63), "-0.0"),
    *('""', '"a"', '"8"', '"nan"', '"\\ud800"', '"\\u001b[2J\\n"', '"int8"', '"\\u0000"'),
    *("[]", "[1]", "[0]", "[0, 1]", "[1.0]", "[true]", "[[]]", '["a"]', "[null]", "[1, 1, 1]"),
    *("{}", '{"a": 1}', '{"bits": 8}', "[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH, "[" * 40, ""),
]


def mutations(tree: Any) -> Iterator[Any]:
    """Yields the tree with one node replaced, omitted, repeated or added."""
    yield from map(Raw, VALUES)
    if not isinstance(tree, list):
        return
    for i, item in enumerate(tree):
        named = isinstance(tree, Object)
        for value in mutations(item[1] if named else item):
            put = (item[0], value) if named else value
            yield type(tree)([*tree[:i], put, *tree[i + 1 :]])
        yield type(tree)([*tree[:i], *tree[i + 1 :]])
        yield type(tree)([*tree, item])
    yield type(tree)([*tree, ("colour", Raw("1")) if isinstance(tree, Object) else Raw("1")])
