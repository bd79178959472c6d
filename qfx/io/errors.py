"""UserError, the class of errors that users cause, and the quoting of names in messages."""

from __future__ import annotations


class UserError(ValueError):
    """Raised for a wrong argument or file of the user; the message says what is allowed instead."""


def printable(text: str) -> str:
    r"""Returns `text` with every unprintable character replaced by its escape: a line break becomes
    `\n`.

    Names of modules may contain any character. Control characters would move the cursor or colour a
    terminal, direction marks reorder a line, and lone surrogates cannot be written at all.
    """
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
