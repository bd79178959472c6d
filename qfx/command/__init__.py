"""The command `qfx`: what a user asks of an installation in a shell."""
