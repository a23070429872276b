"""Which mechanisms of the catalog give the weights that were measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Mechanism
from regard.base.errors import RegardError
from regard.catalog import CatalogEntry, mechanisms
from regard.diagnosis.calling import Caller, with_function
from regard.diagnosis.scores import Product, product_of
from regard.diagnosis.weights import Measurement, close, measure, with_identities


@torch.no_grad()
def equal_mechanisms(measurement: Measurement, num_heads: int) -> tuple[str, ...]:
    """Names of the catalog with the same weights; the usual name of such a function comes first."""
    product = product_of(measurement)
    names = [
        name
        for name, entry in mechanisms().items()
        if any(_same(a, measurement) for a in _built(entry, measurement, product))
    ]
    is_square = measurement.query.shape[2] == measurement.key.shape[2]
    usual = ["masked", "multi_head" if num_heads > 1 else "self_attention" if is_square else "cross"]
    return tuple(sorted(names, key=lambda name: (name not in usual, name)))


@torch.no_grad()
def learned_mechanism(caller: Caller) -> tuple[str, ...]:
    """The mechanism of a module whose score has matrices: with identities for them it shows q . k, or q + k alone."""
    if len(caller.roles.inputs) == 1 or not isinstance(caller.function, nn.Module):
        return ()
    query, key, value = caller.sizes.sample(0, caller.dtype)
    shift = torch.linspace(-1, 1, query.shape[-1], dtype=query.dtype)
    for name, joined in (("bahdanau", False), ("luong_concat", True)):
        try:
            module = with_identities(caller.function, joined)
            assert module is not None
            other = with_function(caller, module)
            measurement = measure(other, (query, key, value))
            shifted = measure(other, (query + shift, key - shift, value))
        except Exception:  # the copy may not run
            continue
        if measurement is None or shifted is None or measurement.weights.std(-1).max() < 1e-3:
            continue
        product = product_of(measurement)
        if product is not None and product.kind == "dot" and math.isclose(product.factor, 1.0, rel_tol=1e-3):
            return ("luong_general",)
        if close(measurement.weights, shifted.weights):
            return (name,)
    return ()


def _same(attention: Mechanism, measurement: Measurement) -> bool:
    try:
        weights = attention.double()(
            measurement.query.double(), measurement.key.double(), measurement.key.double()
        ).weights.dense()
    except RegardError:
        return False  # it does not take these sizes
    return close(weights, measurement.weights.nan_to_num(), 1e-5)


def _built(entry: CatalogEntry, measurement: Measurement, product: Product | None) -> Iterator[Mechanism]:
    """The mechanism with the settings that the weights suggest; none if it has parameters to learn."""
    width, names = measurement.query.shape[-1], inspect.signature(entry.build).parameters
    heads = measurement.weights.shape[1]
    sizes = {"width": width, "query_dim": width, "key_dim": width, "num_heads": heads}
    given = {name: value for name, value in (entry.tiny | sizes).items() if name in names}
    for settings in _settings(entry.name, measurement, product):
        try:
            attention = entry.build(**given | settings)
        except RegardError:
            continue
        if not any(True for _ in attention.parameters()):
            yield attention


def _settings(name: str, measurement: Measurement, product: Product | None) -> list[dict[str, Any]]:
    factor = product.factor if product is not None and product.factor > 0 else None
    kept = int((measurement.weights > 1e-6).sum(-1).max())
    special: dict[str, list[dict[str, Any]]] = {
        "cosine": [{"factor": factor}] if factor else [],
        "soft_lookup": [{"temperature": 1 / factor}] if factor and not _is_scaled(factor, measurement.query) else [],
        "sliding_window": [{"size": size} for size in range(2, kept + 1)],
        "top_k": [{"k": kept}] if kept < measurement.weights.shape[-1] else [],
        "sparse": [{"alpha": 1.5}, {"alpha": 2.0}],
        "rope": [{"interleaved": False}, {"interleaved": True}],
        "softcap": [{"cap": cap, "is_causal": c} for cap in (20.0, 30.0, 50.0) for c in (True, False)],
        "block_local": [],
        "dilated": [],
        "longformer": [],
        "bigbird": [],
        "tree": [],
        "shared_prefix": [],
        "neighborhood": [],
        "sliding_tiles": [],
    }
    either = [{"is_causal": True}, {"is_causal": False}]
    return special.get(name, either if "is_causal" in inspect.signature(mechanisms()[name].build).parameters else [{}])


def _is_scaled(factor: float, query: Tensor) -> bool:
    return math.isclose(factor, query.shape[-1] ** -0.5, rel_tol=1e-3)
