"""A JSON parser for untrusted text, stricter than that of Python."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from qfx.io.errors import UserError


def parsed(text: str, refusal: str) -> Any:
    """Parses a JSON text. Raises UserError, whose message begins with `refusal`, for invalid JSON,
    for text that is nested too deeply, and for an object with a repeated key."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise UserError(f"{refusal}: {twice[0]!r} stands twice in one object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as why:
        raise UserError(f"{refusal}: it is not JSON, {why}") from None
    except RecursionError:
        raise UserError(f"{refusal}: it is nested too deeply") from None
    except UserError:
        raise
    except ValueError as why:  # a number of thousands of digits
        raise UserError(f"{refusal}: {why}") from None
