"""The weights of any function of q, k and v: its output is linear in the values, so unit values read the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.calling import NO_ARGUMENTS, Caller, Inputs, with_function
from regard.diagnosis.signatures import HEADS

#: Values that differ by less are equal: also functions that compute in float32 must pass.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Measurement:
    """Measured weights (B, H, I, J), and the query and key (B, H, n, D) of each head, which its scores compare.

    The weights of a query whose output is NaN are NaN.
    """

    weights: Tensor
    query: Tensor
    key: Tensor


def close(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether all numbers are equal up to rounding; NaN equals NaN."""
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@torch.no_grad()
def measure(caller: Caller, inputs: Inputs, extra: Mapping[str, Any] = NO_ARGUMENTS) -> Measurement | None:
    """The weights that a call uses; None if they do not follow from its outputs."""
    if len(caller.roles.inputs) == 3:
        return _by_unit_values(caller, inputs, extra)
    return _by_solving(caller, inputs, extra)


def _by_unit_values(caller: Caller, inputs: Inputs, extra: Mapping[str, Any]) -> Measurement | None:
    """One call for each key, with values that are 1 at this key and 0 elsewhere."""
    query, key, value = inputs
    base = caller(query, key, torch.zeros_like(value), extra).output
    columns = []
    for j in range(key.shape[2]):
        unit = torch.zeros_like(value)
        unit[:, :, j] = 1
        columns.append(caller(query, key, unit, extra).output - base)
    by_channel = torch.stack(columns, -1).permute(0, 1, 3, 2, 4)  # (B, H, channel, I, J)
    output = caller(query, key, value, extra).output - base
    if output.shape[-1] > value.shape[-1]:
        return None
    expected = torch.einsum("bhcij,bhjc->bhic", by_channel.nan_to_num(), value[..., : output.shape[-1]])
    if not close(expected, output.nan_to_num()):
        return None
    if query.shape[1] > 1:
        weights = by_channel[:, :, 0]
        return (
            Measurement(weights, query, key) if close(by_channel, weights[:, :, None].expand_as(by_channel)) else None
        )
    return _by_channel_groups(by_channel[:, 0], query[:, 0], key[:, 0])


def _by_channel_groups(by_channel: Tensor, query: Tensor, key: Tensor) -> Measurement | None:
    """Channels with the same weights are one head."""
    groups: list[list[int]] = []
    for channel in range(by_channel.shape[1]):
        same = next((g for g in groups if close(by_channel[:, g[0]], by_channel[:, channel])), None)
        if same is None:
            groups.append([channel])
        else:
            same.append(channel)
    if len({len(group) for group in groups}) > 1:
        return None
    weights = torch.stack([by_channel[:, group[0]] for group in groups], 1)
    if query.shape[-1] != by_channel.shape[1]:
        groups = [list(range(by_channel.shape[1]))] * len(groups)
    return Measurement(weights, *(torch.stack([x[..., group] for group in groups], 1) for x in (query, key)))


def _by_solving(caller: Caller, inputs: Inputs, extra: Mapping[str, Any]) -> Measurement | None:
    """Weights from output = weights x values, where the values are the keys, so they cannot be chosen."""
    query, key, _ = inputs
    key = query if caller.roles.is_self else key
    output = caller(query, key, key, extra).output
    for num_heads in _numbers_of_heads(caller, key, output):
        parts = [_heads(x, num_heads) for x in (output, key, query, key)]
        parts[1] = parts[1][..., : parts[0].shape[-1]]
        solved = _solve(*parts[:2])
        if solved is not None:
            width = min(parts[2].shape[-1], parts[0].shape[-1])
            return Measurement(solved, parts[2][..., :width], parts[3][..., :width])
    return None


def _numbers_of_heads(caller: Caller, key: Tensor, output: Tensor) -> list[int]:
    if key.shape[1] > 1:
        return [1]
    declared = [n for name in HEADS if isinstance(n := getattr(caller.function, name, None), int) and n > 0]
    options = [*declared, 1, 2, 4, 8, 16]
    fits = [
        h for h in options if not (key.shape[-1] % h or output.shape[-1] % h) and output.shape[-1] // h >= key.shape[2]
    ]
    return list(dict.fromkeys(fits))


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] > 1 else x[:, 0].unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _solve(output: Tensor, value: Tensor) -> Tensor | None:
    """Weights with weights @ value = output, or None if there are none."""
    missing = output.isnan().any(-1, keepdim=True)
    if missing.all() or output.shape[-1] > value.shape[-1]:
        return None
    weights = output.nan_to_num().double() @ torch.linalg.pinv(value.double())
    is_exact = close(weights @ value.double(), output.nan_to_num())
    return weights.masked_fill(missing, torch.nan) if is_exact else None


def readable(caller: Caller) -> Caller | None:
    """The function, or a copy of the module with identities for its matrices, whose weights can be measured."""
    inputs = caller.sizes.sample(0, caller.dtype)
    for function in (caller.function, with_identities(caller.function)):
        if function is None:
            continue
        other = with_function(caller, function)
        try:
            if measure(other, inputs) is not None:
                return other
        except Exception:  # the copy may not run
            continue
    return None


@torch.no_grad()
def with_identities(function: Callable[..., Any], joined: bool = False) -> nn.Module | None:
    """A copy of a module whose matrices are identities and whose biases are 0: it attends to its inputs themselves.

    `joined`: a layer for two concatenated vectors adds them.
    """
    if not isinstance(function, nn.Module):
        return None
    module = copy.deepcopy(function)
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.copy_(_identity(*parameter.shape, is_linear=id(parameter) in linear and not joined))
        elif parameter.ndim == 3:
            _set_identity_by_heads(parameter)
    for name, parameter in module.named_parameters():
        if name.endswith("bias") and parameter.ndim == 1:
            parameter.zero_()
    return module


def _identity(rows: int, columns: int, is_linear: bool) -> Tensor:
    """An identity, or several of them if one matrix is for query, key and value."""
    if rows > columns and rows % columns == 0 and (is_linear or rows == 3 * columns):
        return torch.eye(columns).repeat(rows // columns, 1)
    if columns > rows and columns % rows == 0 and not is_linear:
        return torch.eye(rows).repeat(1, columns // rows)
    return torch.eye(rows, columns)


def _set_identity_by_heads(parameter: Tensor) -> None:
    """For matrices (H, C, D) or (C, H, D) with H D = C."""
    first, second, third = parameter.shape
    if first == second * third:
        parameter.copy_(torch.eye(first).view_as(parameter))
    elif second == first * third:
        parameter.copy_(torch.eye(second).view(second, first, third).transpose(0, 1))
    elif third == first * second:
        parameter.copy_(torch.eye(third).view_as(parameter))
