"""Names that users choose, as text that a terminal or a page can show."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with every character that is not to be seen as its escape: a line break is `\\\\n`.

    Module names may hold anything. Control characters would move the cursor or colour a terminal,
    marks of direction reorder a line, and lone surrogates cannot be written at all.
    """
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
