"""Errors that users cause, as opposed to errors of qfx."""


class UserError(ValueError):
    """A wrong option, pattern, recipe or scheme; the message says what is allowed instead."""
