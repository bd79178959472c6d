"""Defects of attention: of its kernels, and of what finds it in a graph."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ATTENDING = (
    Mutant(
        "an attention whose gradient is recorded becomes int8",
        old='return f"{what}: its gradient is recorded, and is not int8 yet"',
        new="return None",
        tests=("test_attention_that_records_gradients_stays_float",),
    ),
    Mutant(
        "keys are read before their heads were copied, though they are written meanwhile",
        old="groups != same or _written(attention, key, val):",
        new="groups != same:",
        tests=("test_heads_that_share_keys_are_int8",),
    ),
    Mutant(
        "heads of keys that alternate are taken for groups",
        old="inserted: (*batch, heads, 1, n, d),",
        new="inserted: tuple(value(inserted).shape),",
        tests=("test_heads_that_share_keys_are_int8",),
    ),
)
