"""Grouped queries: which head of the keys and which head of the values each head of the queries uses."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.diagnosis.calling import Caller
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.scores import product_of
from regard.diagnosis.weights import Measurement, measure


def key_heads_of(measurement: Measurement) -> tuple[int, ...]:
    """For each head the head of the keys whose product with the query gives the weights; empty if some have none."""
    if measurement.key_groups is None:
        return tuple(range(measurement.weights.shape[1]))
    found = []
    for h, value_head in enumerate(measurement.value_heads):
        # the usual one first: keys and values are shared alike
        order = [value_head, *(g for g in range(measurement.key_groups.shape[1]) if g != value_head)]
        fits = (g for g in order if product_of(_one_head(measurement, h, g)) is not None)
        found.append(next(fits, -1))
    return () if -1 in found else tuple(found)


def _one_head(measurement: Measurement, head: int, key_head: int) -> Measurement:
    """The measurement of one head of the queries with one head of the keys, with axes of heads of size 1."""
    assert measurement.key_groups is not None
    weights, query = (x[:, head : head + 1] for x in (measurement.weights, measurement.query))
    return Measurement(weights, query, measurement.key_groups[:, key_head : key_head + 1])


def with_own_keys(measurement: Measurement) -> Measurement:
    """The measurement with those keys that the scores compare, where they are not those of the values."""
    key_heads = key_heads_of(measurement)
    if measurement.key_groups is None or not key_heads:
        return measurement
    return replace(measurement, key=measurement.key_groups[:, list(key_heads)])


def grouping_finding(caller: Caller, measurement: Measurement) -> CheckFinding | None:
    """Whether shared heads of keys and of values go to the same heads of queries; None if no heads are shared."""
    if measurement.key_groups is None:
        measurement = _with_half_the_key_heads(caller) or measurement
    key_heads = key_heads_of(measurement)
    if measurement.key_groups is None or not key_heads:
        return None
    of_keys, of_values = (", ".join(map(str, heads)) for heads in (key_heads, measurement.value_heads))
    if _are_shared_alike(key_heads, measurement.value_heads, isinstance(caller.function, nn.Module)):
        text = f"Key and value heads are shared by the same ones of {len(key_heads)} query heads."
        return CheckFinding("groups", "right", text)
    text = (
        f"With {len(key_heads)} heads of queries, heads {of_keys} of the keys, but {of_values} of the values are used."
    )
    remedy = "Repeat both in the same way, for example x.repeat_interleave(num_groups, dim=1), (B, H, n, D)."
    return CheckFinding("groups", "wrong", text, remedy, "keys and values are repeated for different heads")


def _are_shared_alike(key_heads: tuple[int, ...], value_heads: tuple[int, ...], is_module: bool) -> bool:
    """Whether key heads go with their value heads.

    A module may take keys and values from other channels of its input: then only the groups of query heads count.
    """
    if not is_module:
        return key_heads == value_heads
    # each head of the keys goes with one head of the values, and the other way round
    num_pairs = len(set(zip(key_heads, value_heads, strict=True)))
    return num_pairs == len(set(key_heads)) == len(set(value_heads))


def _with_half_the_key_heads(caller: Caller) -> Measurement | None:
    """The weights of a function that also takes fewer heads of keys; None if it does not."""
    s = caller.sizes
    if "h" not in caller.query_axes or len(caller.roles.inputs) < 3 or s.key_heads or s.heads % 2 or s.heads < 4:
        return None
    grouped = replace(caller, sizes=replace(s, key_heads=s.heads // 2))
    try:
        return measure(grouped, grouped.sizes.sample(0, caller.dtype))
    except Exception:  # of the user's function
        return None
