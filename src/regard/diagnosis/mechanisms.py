"""Which mechanisms of the catalog give the weights that were measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.catalog import mechanisms
from regard.diagnosis.calling import Caller
from regard.diagnosis.scores import Product, product_of
from regard.diagnosis.weights import Measurement, close, measure, with_identities

#: Mechanisms whose masks have too many settings to try.
UNTRIED = {"block_local", "dilated", "longformer", "bigbird", "tree", "shared_prefix", "neighborhood", "sliding_tiles"}


@torch.no_grad()
def equal_mechanisms(measurement: Measurement, num_heads: int) -> tuple[str, ...]:
    """Names of the catalog with the same weights; the usual name of such a function comes first.

    `num_heads` decides whether that is multi-head attention.
    """
    product = product_of(measurement)
    measured = measurement.weights.nan_to_num()
    names = [
        name
        for name in mechanisms()
        if any(close(weights, measured, 1e-5) for weights in _candidates(name, measurement, product))
    ]
    is_square = measurement.query.shape[2] == measurement.key.shape[2]
    usual = ["masked", "multi_head" if num_heads > 1 else "self_attention" if is_square else "cross"]
    return tuple(sorted(names, key=lambda name: (name not in usual, name)))


@torch.no_grad()
def learned_mechanism(caller: Caller) -> tuple[str, ...]:
    """The mechanism of a module whose score has matrices; empty if it is none of them.

    A copy with identities for the matrices has q . k for scores, or a function of q + k alone: the same vector added to
    q and subtracted from k changes nothing then.
    """
    if len(caller.roles.inputs) == 1 or not isinstance(caller.function, nn.Module):
        return ()
    query, key, value = caller.sizes.sample(0, caller.dtype)
    shift = torch.linspace(-1, 1, query.shape[-1], dtype=query.dtype)
    for name, joined in (("bahdanau", False), ("luong_concat", True)):
        try:
            module = with_identities(caller.function, joined)
            assert module is not None
            other = replace(caller, function=module)
            measurement = measure(other, (query, key, value))
            shifted = measure(other, (query + shift, key - shift, value))
        except Exception:  # the copy may not run
            continue
        # equal weights tell nothing
        if measurement is None or shifted is None or measurement.weights.std(-1).max() < 1e-3:
            continue
        product = product_of(measurement)
        if product is not None and product.kind == "dot" and math.isclose(product.factor, 1.0, rel_tol=1e-3):
            return ("luong_general",)
        if close(measurement.weights, shifted.weights):
            return (name,)
    return ()


def _candidates(name: str, measurement: Measurement, product: Product | None) -> Iterator[Tensor]:
    """The weights of a mechanism with each of the settings that the measured weights suggest.

    `name` is that of the mechanism in the catalog, here and below.
    """
    heads, tensors = measurement.weights.shape[1], (measurement.query.double(), measurement.key.double())
    query, key = (_Numbers(x.shape, x.contiguous().numpy().tobytes(), x) for x in tensors)
    for settings in _settings(name, measurement, product):
        weights = _weights(name, heads, tuple(settings.items()), query, key)
        if weights is not None:
            yield weights


@dataclass(frozen=True)
class _Numbers:
    """A tensor as a key of a cache: equal shapes and numbers are equal keys."""

    shape: tuple[int, ...]
    numbers: bytes = field(repr=False)
    tensor: Tensor = field(repr=False, compare=False)


@lru_cache(maxsize=1024)  # a check measures several times with the same queries and keys, and so does the next check
def _weights(
    name: str, heads: int, settings: tuple[tuple[str, Any], ...], query: _Numbers, key: _Numbers
) -> Tensor | None:
    """The weights of a mechanism, (B, H, I, J); None if it has parameters to learn, or does not take these sizes.

    `heads` is their number, and `settings` are the names and values of its arguments.
    """
    entry, width = mechanisms()[name], query.shape[-1]
    sizes = {"width": width, "query_dim": width, "key_dim": width, "num_heads": heads}
    names = inspect.signature(entry.build).parameters
    given = {name: value for name, value in (entry.tiny | sizes).items() if name in names}
    try:
        attention = entry.build(**given | dict(settings))
        if any(True for _ in attention.parameters()):
            return None
        return attention.double()(query.tensor, key.tensor, key.tensor).weights.dense()
    except RegardError:
        return None


def _settings(name: str, measurement: Measurement, product: Product | None) -> list[dict[str, Any]]:
    """The arguments of a mechanism that the measured weights suggest, one dict for each way to build it.

    An empty list leaves the mechanism out: it is `UNTRIED`, or the weights rule it out.
    """
    if name in UNTRIED:
        return []
    factor = product.factor if product is not None and product.factor > 0 else None
    is_scaled = factor is not None and math.isclose(factor, measurement.query.shape[-1] ** -0.5, rel_tol=1e-3)
    kept = int((measurement.weights > 1e-6).sum(-1).max())
    special: dict[str, list[dict[str, Any]]] = {
        "cosine": [{"factor": factor}] if factor else [],
        "soft_lookup": [{"temperature": 1 / factor}] if factor and not is_scaled else [],
        "sliding_window": [{"size": size} for size in range(2, kept + 1)],
        "top_k": [{"k": kept}] if kept < measurement.weights.shape[-1] else [],
        "sparse": [{"alpha": 1.5}, {"alpha": 2.0}],
        "rope": [{"interleaved": False}, {"interleaved": True}],
        "softcap": [{"cap": cap, "is_causal": c} for cap in (20.0, 30.0, 50.0) for c in (True, False)],
    }
    either = [{"is_causal": True}, {"is_causal": False}]
    return special.get(name, either if "is_causal" in inspect.signature(mechanisms()[name].build).parameters else [{}])
