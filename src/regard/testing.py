"""Tests of your own attention: `assert_attention` fails with the report of `regard.check`, in any test runner.

Import it for a test: `from regard.testing import assert_attention`. It is no name of `regard` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from regard.base.other_libraries import answers_for
from regard.diagnosis import check

__all__ = ["assert_attention"]


def assert_attention(function: Callable[..., Any] | nn.Module, /, *inputs: Any, **options: Any) -> None:
    """Pass if `regard.check(function, *inputs, **options)` finds everything right.

    If it finds a mistake, or could not check what the function computes, raise an AssertionError whose text is the
    report. `options` are those of `regard.check`: `like` names what the function should be, and `mask` and `scale` say
    what is meant.

    >>> import torch
    >>> def attention(q, k, v):
    ...     return (q @ k.mT).softmax(-1) @ v
    >>> assert_attention(attention, like="luong_dot")
    >>> try:
    ...     assert_attention(attention, like="scaled_dot_product")
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[0])
    attention: 1 mistake: the scores are not scaled
    """
    report = check(function, *inputs, **options)
    if not report.ok:
        raise AssertionError(str(report))


__getattr__ = answers_for("regard.testing", __all__)
