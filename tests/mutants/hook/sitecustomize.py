"""Read by Python at its start where this folder is on PYTHONPATH: `import qfx` means the tree that
this file is in, whatever is installed."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

TREE = str(Path(__file__).resolve().parents[3])


class FromThisTree:
    """Asked before the hook of an editable installation, which would answer first."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "qfx":
            return PathFinder.find_spec(name, [TREE])
        return PathFinder.find_spec(name, path) if name.startswith("qfx.") else None


sys.meta_path.insert(0, FromThisTree)
