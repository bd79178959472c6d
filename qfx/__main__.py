"""`python -m qfx`, the same as the command `qfx`."""

from qfx.command.app import app

if __name__ == "__main__":
    app(prog_name="qfx")
