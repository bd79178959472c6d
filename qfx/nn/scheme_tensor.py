"""The scheme of a module as one small tensor in its state dict.

`scheme` int32 [32]: the format number, then one number for each row of FIELDS, then zeros. It is a
tensor so that every tool that stores a state dict stores it. Its shape never changes, so that a
checkpoint that is read into the tensors of another module brings its own scheme. New rows are
appended to FIELDS, and 0 in a new row means what files had before: older files stay readable, and
an older build refuses numbers that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.io.errors import UserError
from qfx.values.scheme import BACKWARD, PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme

FORMAT = 1
LENGTH = 32
KEY = "scheme"
_COUNT = None  # the field holds the number itself
_NO_YES = (False, True)
_SPEC: dict[str, tuple[Any, ...] | None] = {
    "bits": _COUNT,  # 0: there is no such operand, its other fields are 0 too
    "symmetric": _NO_YES,
    "axes": (PER_ROW, PER_TENSOR, PER_COLUMN),
    "group": _COUNT,
    "static": _NO_YES,
}
# Each field, and the values that its number is an index of.
FIELDS: dict[str, tuple[Any, ...] | None] = {
    "module": ("", "Linear", "LSQLinear", "BinaryLinear", "SignLinear", "Embedding", "LSQConv"),
    **{f"x.{name}": values for name, values in _SPEC.items()},
    **{f"w.{name}": values for name, values in _SPEC.items()},
    "backward": BACKWARD,
    "rotation": _COUNT,
    "factor": _NO_YES,  # whether there is a factor [K]
    "x_zero_point": _NO_YES,  # whether the static zero point of x is given
    "shift": _NO_YES,  # whether there is a shift [K]
    "w.packed": _NO_YES,
    "minimum": _NO_YES,  # whether groups have a minimum [N, G] in place of a zero point
    "half": (torch.bfloat16, torch.float16),  # the type of packed scales and minimums
    # the type of an embedding's rows
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def written(module: str, fields: Mapping[str, Any]) -> Tensor:
    """Returns the scheme tensor of a module of class `module`. `fields`: values of FIELDS; those
    that are not given are 0. The tensor is always on the CPU, whatever the default device is."""
    values = {"module": module, **fields}
    numbers = [_number(FIELDS[name], values.pop(name, None)) for name in FIELDS]
    assert not values, values
    padded = [FORMAT, *numbers, *[0] * (LENGTH - 1 - len(FIELDS))]
    return torch.tensor(padded, dtype=torch.int32, device="cpu")


def _number(values: tuple[Any, ...] | None, value: Any) -> int:
    if value is None:
        return 0
    return int(value) if values is _COUNT else values.index(value)


def of_numbers(numbers: Sequence[int]) -> Tensor:
    """Returns the scheme tensor that has these numbers, and zeros after them. It is on the CPU."""
    padded = [*numbers, *[0] * (LENGTH - len(numbers))]
    return torch.tensor(padded, dtype=torch.int32, device="cpu")


def checked_numbers(linears: Any) -> dict[str, list[int]]:
    """Returns the `linears` of the quantization_config in a config.json: the numbers of a scheme,
    by name. Raises UserError if they are anything else."""
    good = isinstance(linears, Mapping) and all(
        isinstance(name, str)
        and isinstance(numbers, list)
        and len(numbers) <= LENGTH
        and all(type(number) is int and abs(number) < 2**31 for number in numbers)
        for name, numbers in linears.items()
    )
    if not good:
        raise UserError("the quantization_config has `linears` that are not lists of numbers")
    return dict(linears)


def read(tensor: Any, name: str, module: str) -> dict[str, Any]:
    """Returns the values of FIELDS, by field, in a scheme tensor that a module of class `module`
    saved. `name`: the key of the tensor in the state dict, for messages.

    Raises ValueError if a module of another class saved it, and in the cases of `read_any`.
    """
    found = read_any(tensor, name)
    if found["module"] != module:
        raise ValueError(f"{name} is that of a {found['module']}, not of a {module}")
    if module != "Embedding" and found["dtype"] != torch.float32:
        raise ValueError(f"{name} has {found['dtype']} for dtype, which embeddings alone have")
    return found


def read_any(tensor: Any, name: str) -> dict[str, Any]:
    """Returns the values of FIELDS, by field, in a scheme tensor that any module saved. Raises
    ValueError for another format and for numbers without a meaning."""
    numbers = _numbers(tensor, name)
    for i, number in enumerate(numbers[1 + len(FIELDS) :], 1 + len(FIELDS)):
        if number:
            raise ValueError(
                f"{name} has {number} in place {i}, which this version of qfx does not know"
            )
    return {
        field: _value(numbers[i], values, f"{name} has {numbers[i]} for {field}")
        for i, (field, values) in enumerate(FIELDS.items(), 1)
    }


def _numbers(tensor: Any, name: str) -> list[int]:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of type {type(tensor).__name__}, expected a tensor")
    if not has_values(tensor):
        raise ValueError(f"{name} has no values, so nothing says what the codes mean")
    usual = tensor.dtype == torch.int32 and tensor.layout == torch.strided and tensor.dim() == 1
    numbers = tensor.tolist() if usual else []
    if numbers and numbers[0] != FORMAT:
        raise ValueError(
            f"{name} has format {numbers[0]}, and this qfx reads format {FORMAT}: use the qfx that "
            "saved it, or a newer one"
        )
    if len(numbers) != LENGTH:
        shape = list(tensor.shape)
        raise ValueError(f"{name} is {tensor.dtype} {shape}, expected torch.int32 [{LENGTH}]")
    return numbers


def _value(number: int, values: tuple[Any, ...] | None, what: str) -> Any:
    if values is _COUNT and number >= 0:
        return number
    if values is _COUNT or not 0 <= number < len(values):
        raise ValueError(f"{what}, which this version of qfx does not know")
    return values[number]


def fields_of(scheme: Scheme) -> dict[str, Any]:
    """Returns the values of those FIELDS that belong to a scheme."""
    specs = {"x": scheme.x, "w": scheme.w}
    each = {f"{o}.{n}": v for o, spec in specs.items() if spec for n, v in asdict(spec).items()}
    each = {name: value for name, value in each.items() if name in FIELDS}
    return {**each, "backward": scheme.backward, "rotation": scheme.rotation}


def scheme_of(fields: Mapping[str, Any], name: str) -> Scheme:
    """Returns the `Scheme` that `fields` describes. `fields`: the values of a scheme tensor, by the
    names in FIELDS. Raises ValueError, whose message begins with `name`, if the values are not a
    valid scheme."""
    try:
        x, w = (_spec(fields, operand) for operand in ("x", "w"))
        if w is None:
            raise ValueError("it has no weight")
        return Scheme(x, w, fields["backward"], fields["rotation"])
    except ValueError as why:
        raise ValueError(f"{name}: {why}") from None


def _spec(fields: Mapping[str, Any], operand: str) -> QSpec | None:
    parts = {part: fields[f"{operand}.{part}"] for part in _SPEC}
    if parts["bits"]:
        return QSpec(**parts, packed=fields.get(f"{operand}.packed", False))
    if any(parts[part] != (_SPEC[part] or (0,))[0] for part in _SPEC):
        raise ValueError(f"{operand} has no bits but other parts")
    return None


def of_earlier(prefix: str, what: str) -> str:
    """Returns the error message for a state dict that contains the tensors `what` but no scheme."""
    key = repr(prefix + KEY)
    return (
        f"{key} is not there, and nothing else says under which scheme {what} were made: an "
        "earlier qfx did not save it. If it is the scheme that the module has, say so: "
        f"state_dict[{key}] = model.state_dict()[{key}]"
    )
