"""What users did wrong, told apart from what qfx did wrong."""


class UserError(ValueError):
    """A wrong option, pattern, recipe or scheme; the message says what there is instead."""
