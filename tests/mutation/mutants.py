"""mutmut's mutants of the lines that changed."""

from __future__ import annotations

import difflib
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.pragma_handling import IgnoredCode


@dataclass(frozen=True)
class LineMutant:
    """A mutant of the file `where`: its whole `text`, and the lines that it changes."""

    where: str
    text: str
    lines: tuple[int, ...]
    diff: str

    @property
    def place(self) -> str:
        return f"{self.where}:{self.lines[0]}"


def _one_string(node: cst.BaseString) -> Iterable[cst.CSTNode]:
    """mutmut also makes mutants that differ in upper and lower case."""
    return islice(mutators.operator_string(node), 1)


def _control(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    """What mutmut lacks: `if a` -> `if not a`, `a and b` -> `a`, `b`, `return a` -> `return None`,
    `call()` -> `...`"""
    match node:
        case cst.If():
            inner = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            yield node.with_changes(test=cst.UnaryOperation(cst.Not(), inner))
        case cst.BooleanOperation():
            yield from (node.left, node.right)
        case cst.Return(value=cst.BaseExpression()):
            yield node.with_changes(value=cst.Name("None"))
        case cst.Expr(value=cst.Call()):
            yield node.with_changes(value=cst.Ellipsis())


OPERATORS = (
    *(row for row in mutators.mutation_operators if row[1] is not mutators.operator_string),
    (cst.BaseString, _one_string),
    (cst.CSTNode, _control),
)


class _Visitor(file_mutation.MutationVisitor):
    """mutmut leaves out decorated functions, which it would have to copy inside their module."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        plain = node.with_changes(decorators=()) if isinstance(node, cst.FunctionDef) else node
        return super()._skip_node_and_children(plain)


def mutants_of(where: str, code: str, changed: set[int]) -> Iterator[LineMutant]:
    """The mutants of a file that change one of its lines `changed` (from 1)."""
    wrapper = MetadataWrapper(cst.parse_module(code))
    visitor = _Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module, spans, texts = wrapper.visit(visitor), wrapper.resolve(PositionProvider), {code}
    for mutation in visitor.mutations:
        span = spans.get(mutation.original_node)
        if span and changed.isdisjoint(range(span.start.line, span.end.line + 1)):
            continue
        text = module.deep_replace(mutation.original_node, mutation.mutated_node).code
        if text not in texts:
            texts.add(text)
            diff = [*difflib.unified_diff(code.splitlines(), text.splitlines(), n=0, lineterm="")]
            lines = sorted({line for text in diff for line in _numbers(text, "-")})
            if changed.intersection(lines):
                shown = [line for line in diff[2:] if not line.startswith("@@")]
                yield LineMutant(where, text, tuple(lines), "\n".join(shown))


def _numbers(line: str, sign: str) -> range:
    """The lines of the old (-) or new (+) file in a diff's `@@ -1,2 +1 @@`."""
    found = re.match(rf"@@ .*?{re.escape(sign)}(\d+)(?:,(\d+))?.* @@", line)
    return range(int(found[1]), int(found[1]) + int(found[2] or 1)) if found else range(0)


def changed_lines(root: Path, base: str) -> dict[str, set[int]]:
    """File of qfx/ -> its lines that are not in the commit `base`."""
    words = ("git", "diff", "-U0", "--no-color", "--diff-filter=d", base, "--", "qfx/*.py")
    output = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout
    lines, where = defaultdict[str, set[int]](set), ""
    for line in output.splitlines():
        where = line.removeprefix("+++ b/") if line.startswith("+++ b/") else where
        lines[where].update(_numbers(line, "+"))
    return {where: found for where, found in lines.items() if found}


def evenly(mutants: Iterable[LineMutant]) -> list[LineMutant]:
    """A random order in which each line has one mutant before any has its second."""
    draw, lines = random.Random(0), defaultdict[str, list[LineMutant]](list)
    for mutant in mutants:
        lines[mutant.place].append(mutant)
    groups = [draw.sample(group, len(group)) for group in lines.values()]
    rounds = zip_longest(*draw.sample(groups, len(groups)))
    return [mutant for each in rounds for mutant in each if mutant]
