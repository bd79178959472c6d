"""What `make site` adds to the pages of docs/: a page of all public names with their docstrings.
Links to files outside of docs/, which the site does not have, become text."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./(?:README|CONTRIBUTING|CHANGELOG)\.md\)")
_HEAD = """# Functions and classes
Every public name of qfx, as its docstring describes it.
"""
_OTHERS = ("hf.QfxConfig", *(f"generate.{n}" for n in ("load_programs", "save_programs")))
_MODULES = {"nn", "ops"}


def on_config(config: Any) -> Any:
    """Called by mkdocs with mkdocs.yml: adds the decisions, in their order, to the navigation."""
    pages = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{page.name}" for page in pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs before it reads the pages."""
    package = ast.parse((Path(config.config_file_path).parent / "qfx" / "__init__.py").read_text())
    values = {
        node.targets[0].id: node.value
        for node in package.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    names = [name for name in ast.literal_eval(values["__all__"]) if name not in _MODULES]
    blocks = [f"::: qfx.{name}\n" for name in (*names, *_OTHERS)]
    files.append(File.generated(config, "api.md", content="\n".join([_HEAD, *blocks])))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page."""
    if "/" in page.file.src_uri:
        return markdown.replace("](.)", "](../README.md)")
    markdown = _OUTSIDE.sub(r"\1", markdown)
    return markdown.replace("](decisions)", "](decisions/0001-three-outputs-of-quantize.md)")
