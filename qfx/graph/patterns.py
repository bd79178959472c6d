"""Patterns: calls of a graph, found and made in the notation in which Python writes them.

    Pattern("scale(f(t[0]), t[1], None, *rest)", calls, t="g(x)")

`calls` says which operators the names of calls mean. Another name stands for any argument, the same
wherever it stands again; `*name` for all that are left; `t[i]` for one of the results of `t`, which
a keyword may describe further; a constant for itself.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

Bound = dict[str, Any]  # by the names of a pattern: nodes, numbers, tuples of them
Calls = Mapping[str, Collection[Any]]  # by the name of a call: the operators that it may be


class Pattern:
    """What `match` compares nodes with. `through`: calls of one argument that may stand between."""

    def __init__(
        self, text: str, calls: Calls, through: Collection[Any] = (), **where: str
    ) -> None:
        self.text, self.calls, self.through = text, calls, through
        self.root = _call(text)
        self.where = {name: _call(described) for name, described in where.items()}

    def starts_at(self, node: fx.Node) -> bool:
        """Whether the node is a call of the pattern's outermost operator."""
        return self._is_call(node, self.root)

    def match(self, node: fx.Node) -> Bound | str:
        """What the names stand for, or where the node differs."""
        bound: Bound = {}
        return self._differs(self.root, node, bound) or bound

    def _is_call(self, value: Any, wanted: ast.Call) -> bool:
        return calls(value, *self.calls[_name(wanted.func)])

    def _differs(self, wanted: ast.expr, value: Any, bound: Bound) -> str | None:
        if isinstance(wanted, ast.Name):
            return self._other(wanted.id, value, bound)
        if isinstance(wanted, ast.Constant):
            same = type(value) is type(wanted.value) and value == wanted.value
            return None if same else f"{value} is not {wanted.value!r}"
        value = self._behind(value)
        if isinstance(wanted, ast.Subscript):
            part = ast.literal_eval(wanted.slice)
            if not calls(value, operator.getitem) or value.args[1] != part:
                return f"{value} is no {ast.unparse(wanted)}"
            return self._differs(wanted.value, value.args[0], bound)
        assert isinstance(wanted, ast.Call)
        if not self._is_call(value, wanted):
            return f"{value} is no call of {_name(wanted.func)}"
        return self._others(wanted.args, value.args, bound)

    def _behind(self, value: Any) -> Any:
        while self.through and calls(value, *self.through):
            value = value.args[0]
        return value

    def _other(self, name: str, value: Any, bound: Bound) -> str | None:
        if name in bound:
            return None if bound[name] is value else f"{value} is not {bound[name]}, as {name} is"
        bound[name] = value
        return self._differs(self.where[name], value, bound) if name in self.where else None

    def _others(self, wanted: list[ast.expr], values: Any, bound: Bound) -> str | None:
        rest = wanted[-1] if wanted and isinstance(wanted[-1], ast.Starred) else None
        fixed = wanted[:-1] if rest else wanted
        if len(values) < len(fixed) or (rest is None and len(values) > len(fixed)):
            return f"there are {len(values)} arguments, not {len(fixed)}"
        for tree, value in zip(fixed, values, strict=False):
            if differs := self._differs(tree, value, bound):
                return differs
        if rest is not None:
            bound[_name(rest.value)] = tuple(values[len(fixed) :])
        return None


class Template:
    """A call with names of a pattern, to be made from what they stand for, and constants. `target`:
    None where its name means several operators, and it is the same one with other arguments."""

    def __init__(self, text: str, calls: Calls) -> None:
        self.root = _call(text)
        self.name = _name(self.root.func)
        targets = tuple(calls[self.name])
        self.target = targets[0] if len(targets) == 1 else None

    def arguments(self, bound: Bound) -> tuple[Any, ...]:
        found: list[Any] = []
        for tree in self.root.args:
            if isinstance(tree, ast.Starred):
                found += bound[_name(tree.value)]
            else:
                found.append(_argument(tree, bound))
        return tuple(found)


def calls(node: Any, *targets: Any) -> bool:
    """Whether it is a call of one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _argument(tree: ast.expr, bound: Bound) -> Any:
    if isinstance(tree, ast.Name):
        return bound[tree.id]
    return _part(tree, bound) if isinstance(tree, ast.Subscript) else ast.literal_eval(tree)


def _part(tree: ast.Subscript, bound: Bound) -> Any:
    """`t[i]`: the node that already reads this result."""
    source, part = bound[_name(tree.value)], ast.literal_eval(tree.slice)
    return next(n for n in source.users if calls(n, operator.getitem) and n.args[1] == part)


def _call(text: str) -> ast.Call:
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call), f"{text} is no call"
    return tree


def _name(tree: ast.expr) -> str:
    assert isinstance(tree, ast.Name)
    return tree.id
