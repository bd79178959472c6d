"""What programs did."""

from __future__ import annotations

from typing import Any

import pytest

from qfx.generate.steps import Steps


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens [B, T] of each call behind a prompt that programs answered."""
    calls: list[tuple[int, ...]] = []
    read = Steps._read

    def noted(steps: Steps, request: Any) -> Any:
        begins = request.cache.get_seq_length() == 0
        found = read(steps, request)
        if found is not None and not begins:
            calls.append(tuple(request.tokens.shape))
        return found

    monkeypatch.setattr(Steps, "_read", noted)
    return calls
