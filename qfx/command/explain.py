"""`qfx explain`: what qfx does to each matmul of a model, without changing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import qfx
from qfx.command.open_model import OpenedModel


def explained(opened: OpenedModel, options: dict[str, Any] | None) -> qfx.Report:
    """Returns the report on a model, as `qfx.explain` makes it."""
    return qfx.explain(opened.model, *opened.args, options=options, **opened.kwargs_without_cache)


def shown(report: qfx.Report, html: Path | None, as_json: bool) -> str:
    """Returns the report as text or JSON, after writing the page to `html`."""
    if html is not None:
        report.save_html(html)
    return json.dumps(report.to_dict(), indent=2) if as_json else str(report)
