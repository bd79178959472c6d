"""Patterns: calls in a graph, matched and built in the notation of Python.

    Pattern("scale(f(t[0]), t[1], None, *rest)", calls, t="g(x)")

`calls` maps the names of calls to operators. Any other name stands for an argument, the same one at
each occurrence; `*name` for all remaining arguments; `t[i]` for one of the results of `t`; `[a, b]`
for a list; a constant for itself. A keyword may describe a name further: by a call, or by
`name="node"` if it must not be a constant. Arguments that a call omits have the defaults of its
operator.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from qfx.host.operators import OpOverload, schema

Bound = dict[str, Any]  # by the names of a pattern: nodes, numbers, tuples of these
Calls = Mapping[str, Collection[Any]]  # the operators that a call of this name may be


class Pattern:
    """A pattern with which nodes are compared. `through`: calls of one argument, such as views,
    that may occur anywhere in between. `where`: descriptions of names, see above."""

    def __init__(
        self, text: str, calls: Calls, through: Collection[Any] = (), **where: str
    ) -> None:
        self.text, self.calls, self.through = text, calls, through
        self.root = _call(text)
        self.nodes = {name for name, described in where.items() if described == "node"}
        self.where = {n: _call(described) for n, described in where.items() if n not in self.nodes}

    def starts_at(self, node: fx.Node) -> bool:
        """Whether the node is a call of the pattern's outermost operator."""
        return self._is_call(node, self.root)

    def match(self, node: fx.Node) -> Bound | str:
        """Returns the value of each name of the pattern, or a text that says where the node
        differs."""
        bound: Bound = {}
        return self._differs(self.root, node, bound) or bound

    def _is_call(self, value: Any, wanted: ast.Call) -> bool:
        return calls(value, *self.calls[_name(wanted.func)])

    def _differs(self, wanted: ast.expr, value: Any, bound: Bound) -> str | None:
        if isinstance(wanted, ast.Name):
            return self._other(wanted.id, value, bound)
        if isinstance(wanted, ast.Constant):
            return None if _same(value, wanted.value) else f"{value} is not {wanted.value!r}"
        if isinstance(wanted, ast.List):
            if not isinstance(value, list | tuple):
                return f"{value} is no list"
            return self._others(wanted.elts, value, bound)
        value = self._behind(value)
        if isinstance(wanted, ast.Subscript):
            part = ast.literal_eval(wanted.slice)
            if not calls(value, operator.getitem) or value.args[1] != part:
                return f"{value} is no {ast.unparse(wanted)}"
            return self._differs(wanted.value, value.args[0], bound)
        assert isinstance(wanted, ast.Call)
        if not self._is_call(value, wanted):
            return f"{value} is no call of {_name(wanted.func)}"
        fixed = [argument for argument in wanted.args if not isinstance(argument, ast.Starred)]
        return self._others(wanted.args, _whole(value, len(fixed)), bound)

    def _behind(self, value: Any) -> Any:
        while self.through and calls(value, *self.through):
            value = value.args[0]
        return value

    def _other(self, name: str, value: Any, bound: Bound) -> str | None:
        if name in bound:
            same = _same(bound[name], value)
            return None if same else f"{value} is not {bound[name]}, as {name} is"
        bound[name] = value
        if name in self.nodes and not isinstance(value, fx.Node):
            return f"{value} is no node, as {name} is"
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
    """A call to be built from constants and from the values that a match gave to the names of a
    pattern."""

    def __init__(self, text: str, calls: Calls) -> None:
        self.root = _call(text)
        self.name = _name(self.root.func)
        (self.target,) = calls[self.name]

    def arguments(self, bound: Bound) -> tuple[Any, ...]:
        """Returns the arguments of the call; last arguments that equal the operator's defaults are
        left out."""
        found: list[Any] = []
        for tree in self.root.args:
            if isinstance(tree, ast.Starred):
                found += bound[_name(tree.value)]
            else:
                found.append(_argument(tree, bound))
        defaults = _defaults(self.target)
        while found and len(found) - 1 in defaults and _same(found[-1], defaults[len(found) - 1]):
            found.pop()
        return tuple(found)


def calls(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these functions, or a tensor method `.name`."""
    return isinstance(node, fx.Node) and called(node) in targets


def called(node: fx.Node) -> Any:
    """Returns the function that a node calls, `.name` for a method, or None if it calls neither."""
    if node.op == "call_method":
        return f".{node.target}"
    return node.target if node.op == "call_function" else None


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal; unlike in Python, True does not equal 1."""
    return a is b or (type(a) is type(b) and bool(a == b))


def _defaults(target: Any) -> dict[int, Any]:
    """Returns the default values of an operator's optional arguments, by position."""
    if not isinstance(target, OpOverload):
        return {}
    arguments = enumerate(schema(target).arguments)
    return {i: a.default_value for i, a in arguments if a.has_default_value()}


def _whole(node: fx.Node, count: int) -> tuple[Any, ...]:
    """Returns a node's arguments in order, including those passed by name. Missing ones have their
    defaults, until there are `count`."""
    named, given = _named(node), node.args
    known = _defaults(node.target) | named
    more = range(len(given), max([count, *(place + 1 for place in named)]))
    return (*given, *(known[i] for i in more)) if all(i in known for i in more) else given


def _named(node: fx.Node) -> dict[int, Any]:
    """Returns the arguments that a call of an operator passes by name: position -> value."""
    if not node.kwargs or not isinstance(node.target, OpOverload):
        return {}
    names = [argument.name for argument in schema(node.target).arguments]
    return {names.index(name): value for name, value in node.kwargs.items()}


def _argument(tree: ast.expr, bound: Bound) -> Any:
    if isinstance(tree, ast.Name):
        return bound[tree.id]
    if isinstance(tree, ast.List):
        return [_argument(element, bound) for element in tree.elts]
    return _part(tree, bound) if isinstance(tree, ast.Subscript) else ast.literal_eval(tree)


def _part(tree: ast.Subscript, bound: Bound) -> Any:
    """Returns the node of the graph for the expression `t[i]` of a pattern: the existing getitem
    node that takes result i of the node bound to `t`."""
    source, part = bound[_name(tree.value)], ast.literal_eval(tree.slice)
    return next(n for n in source.users if calls(n, operator.getitem) and n.args[1] == part)


def _call(text: str) -> ast.Call:
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call), f"{text} is no call"
    return tree


def _name(tree: ast.expr) -> str:
    assert isinstance(tree, ast.Name)
    return tree.id
