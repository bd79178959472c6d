"""The site of the documentation: it builds without warnings, and every page is in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qfx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the tools of the site need Python 3.11")
def test_it_builds_without_warnings_and_holds_every_page(tmp_path: Path) -> None:
    """A warning, such as a link that leads nowhere, is an error in mkdocs.yml. No page asks another
    host for a script."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    pages = [page for page in DOCS.rglob("*.md") if not page.name.endswith(".template.md")]
    names = {str(page.relative_to(DOCS).with_suffix(".html")) for page in pages}
    names = {name.replace("README", "index") for name in names}
    assert names <= {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*")}
    texts = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert len(texts) > 60 and not any(re.search(r'<script[^>]*src="http', t) for t in texts)
    api = (tmp_path / "site" / "api.html").read_text()
    assert [n for n in qfx.__all__ if f'id="qfx.{n}"' not in api] == ["nn", "ops"]
