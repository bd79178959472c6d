"""The house: the modules of a package, what each imports, and which private names it uses.

python -m tests.project.house # rooms, modules, floors, arrows, circles, private uses, import time
"""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parents[2] / "qfx"
# Private by their spelling, but documented: by Python, or by PyTorch for subclasses of nn.Module.
DOCUMENTED = frozenset({
    "_replace", "_asdict", "_fields", "_make",
    "_buffers", "_parameters", "_modules", "_apply", "_save_to_state_dict", "_load_from_state_dict",
})  # fmt: skip


@dataclass(frozen=True)
class Module:
    """One file. `imports`: modules of the package, by their dotted paths in it."""

    tree: ast.Module
    imports: frozenset[str]


def modules(package: Path) -> dict[str, Module]:
    """Dotted path in the package, '' for the package itself -> module. A room's own file, which
    imports nothing but what is in the room, counts under the room's name."""
    trees = {_dotted(file, package): ast.parse(file.read_text()) for file in package.rglob("*.py")}
    return {
        name: Module(tree, frozenset(_imported(tree, trees) - {name}))
        for name, tree in trees.items()
    }


def _dotted(file: Path, package: Path) -> str:
    return (
        ".".join(file.relative_to(package).with_suffix("").parts)
        .removesuffix("__init__")
        .strip(".")
    )


def _imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Those at the head of a file and in functions; not those for types alone."""
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in typing:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import) and node not in typing:
            names |= {alias.name for alias in node.names}
    return {n.removeprefix("qfx.") for n in names if n.startswith("qfx.")} & {*known}


def circles(house: Mapping[str, Module]) -> list[list[str]]:
    """One circle of imports, sorted, if there is any."""
    try:
        TopologicalSorter({name: m.imports for name, m in house.items()}).prepare()
    except CycleError as error:
        return [sorted(set(error.args[1]))]
    return []


def private_uses(module: Module, own: Collection[str] | None = None) -> list[str]:
    """Underscored names of other libraries that a module imports or reads, sorted.

    `own`: underscored attributes that the package defines itself.
    """
    own = _own_names() if own is None else own
    found = set[str]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            said = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            said += [alias.name for alias in node.names]
            found |= {p for name in said if (p := _private_part(name)) and not name.startswith("_")}
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            root = node.value
            found.add(f"torch.{node.attr}" if getattr(root, "id", "") == "torch" else node.attr)
    return sorted(found - {"qfx._C"})


def _private_part(name: str) -> str:
    """Of torch._dynamo.exc, torch._dynamo."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if _is_private(part)), None)
    known = parts[0] == "torch" and at is not None
    return ".".join(parts[: (at or 0) + 1]) if known else ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def _own_names() -> frozenset[str]:
    """What the classes and modules of qfx define under an underscore, and what is documented."""
    found = set(DOCUMENTED)
    for module in modules(PACKAGE).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if getattr(node.value, "id", "") in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(n for n in found if _is_private(n))


def floors(house: Mapping[str, Module]) -> int:
    """How many imports stand on each other at most, of a house without circles."""

    @cache
    def height(name: str) -> int:
        return 1 + max(map(height, house[name].imports), default=0)

    return max(map(height, house))


def _import_s(statement: str) -> float:
    """CPU seconds of a fresh interpreter, the median of five."""
    found = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", statement], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(found)


def main(package: Path) -> None:
    house = modules(package)
    rooms = {name.split(".")[0] for name in house if "." in name}
    outside = [m for n, m in house.items() if n.split(".")[0] != "host"]
    flat = [name for name in house if name and "." not in name and name not in rooms]
    found = circles(house)
    facts = {
        "modules": len(house),
        "rooms": len(rooms),
        "modules outside rooms": len(flat),
        "arrows between modules": sum(len(m.imports) for m in house.values()),
        "floors": "?" if found else floors(house),
        "circles": found or "none",
        "private names of torch outside host": sum(len(private_uses(m)) for m in outside),
    }
    if package == PACKAGE:
        facts["import qfx above import torch, CPU s"] = round(
            _import_s("import qfx") - _import_s("import torch"), 2
        )
    for fact, value in facts.items():
        print(f"{fact:40} {value}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if sys.argv[1:] else PACKAGE)
