"""Forms of recurrent layers: `Steps` of a recurrence or a `Convolution`; of several calls, and of several heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import Convolution, convolution_map
from regard.maps.transported_map import TransportedMap
from regard.pieces.transition import Steps

Form = TypeVar("Form", Steps, Convolution)
#: Fields with an entry for each query, and fields without an entry for each token.
OF_QUERIES, FIXED = ("query", "own", "out_gate"), ("taps",)


def with_last_queries(form: Form, num_queries: int) -> Form:
    """The form with its last queries alone, and all its tokens."""
    last = {name: x[:, :, x.shape[2] - num_queries :] for name, x in _tensors(form).items() if name in OF_QUERIES}
    return replace(form, **last)


def map_of(form: Steps | Convolution, num_queries: int) -> AttentionMap:
    """The map of the last queries over all tokens of a form."""
    form = with_last_queries(form, num_queries)  # type: ignore[type-var]
    return TransportedMap.of_steps(form) if isinstance(form, Steps) else convolution_map(form)


def joined(forms: Sequence[Form], orders: Sequence[Tensor | None]) -> Form:
    """One form from forms of consecutive tokens; an order is the batch entry that each entry continues."""
    parts = [_reordered(form, order) for form, order in zip(forms, orders, strict=True)]
    return _together(parts, {name: 2 for name in _tensors(parts[0]) if name not in FIXED})


def heads_joined(forms: Sequence[Form]) -> Form:
    """One form from forms of the heads of one layer."""
    return _together(forms, {name: 0 if name in FIXED else 1 for name in _tensors(forms[0])})


def _together(forms: Sequence[Form], axes: dict[str, int]) -> Form:
    """One form whose tensors are joined along these axes."""
    if len(forms) == 1:
        return forms[0]
    return replace(
        forms[0], **{name: torch.cat([getattr(form, name) for form in forms], axis) for name, axis in axes.items()}
    )


def _reordered(form: Form, order: Tensor | None) -> Form:
    """The form with its batch entries in another order."""
    if order is None:
        return form
    return replace(form, **{name: x[order] for name, x in _tensors(form).items() if name not in FIXED})


def _tensors(form: Steps | Convolution) -> dict[str, Tensor]:
    """The fields of a form that are tensors, by name."""
    values = {field.name: getattr(form, field.name) for field in fields(form)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
