"""The weights of any function of q, k and v: its output is linear in the values, so unit values read the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.calling import NO_ARGUMENTS, Caller, Inputs, copy_of, declared_heads, split_heads

#: Values that differ by less are equal: also functions that compute in float32 must pass.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Measurement:
    """Measured weights (B, H, I, J), and the query and key (B, H, n, D) of each head, which its scores compare.

    `value_heads` names for each head the head of the values that it sums, if there are fewer; `key_groups`
    (B, G, J, D) are then their keys. The weights of a query whose output is NaN are NaN.
    """

    weights: Tensor
    query: Tensor
    key: Tensor
    value_heads: tuple[int, ...] = ()
    key_groups: Tensor | None = None

    @classmethod
    def of_groups(cls, weights: Tensor, query: Tensor, key_groups: Tensor, value_heads: tuple[int, ...]) -> Measurement:
        """The measurement with keys (B, G, J, D) for H heads: head h has those of `value_heads[h]`."""
        if value_heads == tuple(range(key_groups.shape[1])):
            return cls(weights, query, key_groups)
        return cls(weights, query, key_groups[:, list(value_heads)], value_heads, key_groups)


def close(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether all numbers are equal up to rounding; NaN equals NaN."""
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@torch.no_grad()
def measure(caller: Caller, inputs: Inputs, extra: Mapping[str, Any] = NO_ARGUMENTS) -> Measurement | None:
    """The weights that a call uses, or those intended if a mistake is undone; None if outputs do not determine them.

    Here and below `inputs` are query, key and value, and `extra` are further arguments of the call by name.
    """
    by_role = _by_unit_values if len(caller.roles.inputs) == 3 else _by_solving
    measurement = by_role(caller, inputs, extra)
    if measurement is None or caller.undone.weights is None:
        return measurement
    return replace(measurement, weights=caller.undone.weights(measurement.weights))


def _by_unit_values(caller: Caller, inputs: Inputs, extra: Mapping[str, Any]) -> Measurement | None:
    """Weights from one call for each key, with values that are 1 at this key and 0 elsewhere.

    The output for values of 0 is subtracted, as it does not come from the values. None if the output is not weights
    times values.
    """
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
    if query.shape[1] == 1:
        query, key, value = (x[:, 0] for x in inputs)
        declared = declared_heads(caller.function)
        return _by_channel_groups(by_channel[:, 0], output[:, 0], query, key, value, declared)
    weights = by_channel[:, :, 0]
    if not close(by_channel, weights[:, :, None].expand_as(by_channel)):
        return None
    sources = _sources(weights, value[..., : output.shape[-1]], output)
    return Measurement.of_groups(weights, query, key, sources) if sources else None


def _sources(weights: Tensor, values: Tensor, outputs: Tensor) -> tuple[int, ...]:
    """For each n the m with weights_n @ values_m = outputs_n, its own if that fits; empty if one has none.

    Shapes (B, N, I, J), (B, M, J, E) and (B, N, I, E).
    """
    expected = torch.einsum("bnij,bmje->bnmie", weights.nan_to_num().double(), values.double())
    wanted = outputs.nan_to_num().double()[:, :, None].expand_as(expected)
    fits = torch.isclose(expected, wanted, rtol=TOLERANCE, atol=TOLERANCE).transpose(0, 2).flatten(2).all(-1).mT
    if not fits.any(-1).all():
        return ()
    own = torch.eye(*fits.shape, dtype=torch.bool) & fits
    return tuple(torch.where(own.any(-1, keepdim=True), own, fits).int().argmax(-1).tolist())


def _by_channel_groups(
    by_channel: Tensor, output: Tensor, query: Tensor, key: Tensor, value: Tensor, declared: list[int]
) -> Measurement | None:
    """Weights where heads have no axis: channels of the output with the same weights are one head.

    `by_channel` (B, C, I, J) are the weights of each channel, `output` is (B, I, C), and the inputs are (B, n, D).
    `declared` are numbers of heads that the function may have. None if heads have different widths, or if a channel of
    the output sums no single channel of the values.
    """
    sources = _sources(by_channel, value.mT[..., None], output.mT[..., None])
    groups: list[list[int]] = []
    for channel in range(by_channel.shape[1]):
        same = next((g for g in groups if close(by_channel[:, g[0]], by_channel[:, channel])), None)
        if same is None:
            groups.append([channel])
        else:
            same.append(channel)
    if len(groups) - 1 in declared:  # the heads of a pruned module fill fewer channels than its output has
        groups = [group for group in groups if by_channel[:, group[0]].any()]
    if not sources or len({len(group) for group in groups}) > 1:
        return None
    # a head has the queries in the channels of its output, and the keys in the channels of its values
    weights = torch.stack([by_channel[:, group[0]] for group in groups], 1)
    of_values = [tuple(sources[channel] for channel in group) for group in groups]
    # queries of another width do not show which channels a head compares: each gets as many as output and query have
    if query.shape[-1] != by_channel.shape[1]:
        width = min(query.shape[-1], by_channel.shape[1])
        groups, of_values = [list(range(width))] * len(groups), [sources[:width]] * len(groups)
    # nor do values of another width than the keys: each head gets its part of all channels
    if value.shape[-1] != key.shape[-1]:
        width = min(query.shape[-1], key.shape[-1]) // len(groups)
        groups = [list(range(h * width, (h + 1) * width)) for h in range(len(groups))]
        of_values = [tuple(group) for group in groups]
    # heads that sum the same values share a group of keys; `own` is the group of each head
    distinct = list(dict.fromkeys(of_values)) if len(set(of_values)) > 1 else of_values
    key_groups = torch.stack([key[..., list(channels)] for channels in distinct], 1)
    of_query = torch.stack([query[..., group] for group in groups], 1)
    own = [i if distinct[i : i + 1] == [c] else distinct.index(c) for i, c in enumerate(of_values)]
    return Measurement.of_groups(weights, of_query, key_groups, tuple(own))


def _by_solving(caller: Caller, inputs: Inputs, extra: Mapping[str, Any]) -> Measurement | None:
    """Weights from output = weights x values, where the values are the keys, so they cannot be chosen.

    None if no number of heads has an exact solution.
    """
    query, key, _ = inputs
    key = query if caller.roles.is_self else key
    output = caller(query, key, key, extra).output
    for solve in (_solve, _solve_by_groups):
        for num_heads in _numbers_of_heads(caller, key, output):
            of_output, of_query, of_key = (split_heads(x, num_heads) for x in (output, query, key))
            width = min(of_query.shape[-1], of_output.shape[-1])
            solved = solve(of_output, of_key[..., : of_output.shape[-1]])
            if solved is not None:
                return Measurement.of_groups(solved[0], of_query[..., :width], of_key[..., :width], solved[1])
    return None


def _numbers_of_heads(caller: Caller, key: Tensor, output: Tensor) -> list[int]:
    """The numbers of heads to try: heads with at least as many channels as there are keys.

    With fewer channels the equations would not determine the weights. Keys (B, G, J, D) that have heads already are not
    split. `output` is (B, H, I, C).
    """
    if key.shape[1] > 1:
        return [1]
    options = [*declared_heads(caller.function), 1, 2, 4, 8, 16]
    fits = [
        h for h in options if not (key.shape[-1] % h or output.shape[-1] % h) and output.shape[-1] // h >= key.shape[2]
    ]
    return list(dict.fromkeys(fits))


def _solve(output: Tensor, value: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """Weights with weights @ value = output for each head, and the head of values of each; None if there are none.

    `output` is (B, H, I, D) and `value` (B, H, J, D). Rows of NaN have weights of NaN.
    """
    missing = output.isnan().any(-1, keepdim=True)
    if missing.all() or output.shape[-1] > value.shape[-1]:
        return None
    weights = output.nan_to_num().double() @ torch.linalg.pinv(value.double())
    is_exact = close(weights @ value.double(), output.nan_to_num())
    return (weights.masked_fill(missing, torch.nan), tuple(range(value.shape[1]))) if is_exact else None


def _solve_by_groups(output: Tensor, value: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """As `_solve`, where a head may use the values of another one.

    None also for one head, and for values (B, G, J, D) whose width D is at most J.
    """
    # without more channels than keys, any values would have a solution
    if output.shape[1] == 1 or value.shape[-1] <= value.shape[2]:
        return None
    weights, heads = [], []
    for h in range(output.shape[1]):
        solutions = ((g, _solve(output[:, h : h + 1], value[:, g : g + 1])) for g in range(value.shape[1]))
        g, solved = next(((g, s) for g, s in solutions if s is not None), (h, None))
        if solved is None:
            return None
        weights.append(solved[0])
        heads.append(g)
    return torch.cat(weights, 1), tuple(heads)


def measured(caller: Caller) -> tuple[Caller, Measurement] | None:
    """The function, or a copy of the module with identities for its matrices, whose weights can be measured; and these.

    If this does not suffice, norms are identities too. None if none of them can be measured.
    """
    inputs = caller.sizes.sample(0, caller.dtype)
    for function in (caller.function, with_identities(caller.function), without_norms(caller.function)):
        if function is None:
            continue
        other = replace(caller, function=function)
        try:
            measurement = measure(other, inputs)
        except Exception:  # the copy may not run
            continue
        if measurement is not None:
            return other, measurement
    return None


@torch.no_grad()
def with_identities(function: Callable[..., Any], joined: bool = False) -> nn.Module | None:
    """A copy of a module whose matrices are identities and whose biases are 0: it attends to its inputs themselves.

    `joined`: a layer for two concatenated vectors adds them. None for a function that is no module.
    """
    if not isinstance(function, nn.Module):
        return None
    module = copy_of(function)
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


def without_norms(function: Callable[..., Any]) -> nn.Module | None:
    """As `with_identities`, and layers whose class is called a norm do nothing; None if there are none."""
    module = with_identities(function)
    norms = [] if module is None else [n for n, m in module.named_modules() if n and type(m).__name__.endswith("Norm")]
    for name in norms:
        module.set_submodule(name, nn.Identity())  # type: ignore[union-attr]
    return module if norms else None


def _identity(rows: int, columns: int, is_linear: bool) -> Tensor:
    """An identity (rows, columns); several below each other if one matrix is for query, key and value.

    Several beside each other add the parts of a concatenated input. `is_linear`: it is the weight of an `nn.Linear`.
    """
    if rows > columns and rows % columns == 0 and (is_linear or rows == 3 * columns):
        return torch.eye(columns).repeat(rows // columns, 1)
    if columns > rows and columns % rows == 0 and not is_linear:
        return torch.eye(rows).repeat(1, columns // rows)
    return torch.eye(rows, columns)


def _set_identity_by_heads(parameter: Tensor) -> None:
    """Make an identity of matrices (C, H, D), (H, C, D) or (H, D, C) with H D = C; others stay as they are."""
    first, second, third = parameter.shape
    if first == second * third:
        parameter.copy_(torch.eye(first).view_as(parameter))
    elif second == first * third:
        parameter.copy_(torch.eye(second).view(second, first, third).transpose(0, 1))
    elif third == first * second:
        parameter.copy_(torch.eye(third).view_as(parameter))
