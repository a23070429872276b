"""The values that a function closes over, and the names that its code uses."""

from __future__ import annotations

from functools import cache
from types import CodeType, FunctionType
from typing import Any


def closure_values(function: FunctionType) -> dict[str, Any]:
    """The values that a function closes over, by name; None for a name that has no value yet.

    >>> closure_values((lambda n: lambda i: i + n)(3))
    {'n': 3}
    """
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            values[name] = None
    return values


@cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in code, and in the functions inside it.

    >>> global_names((lambda i: abs(i.real) + min(i)).__code__)
    ('abs', 'real', 'min')
    """
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in global_names(constant))
    return tuple(dict.fromkeys((*code.co_names, *inner)))
