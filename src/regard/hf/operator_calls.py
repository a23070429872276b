"""Calls of the backend as calls of the operator `regard::attention`: which ones it computes, and its arguments.

torch's compiler traces these functions, so they are plain Python that it can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.context import ContextItems
from regard.engine.kernel.engine import LARGEST_WIDTH
from regard.engine.kernel.operator import OperatorTerms
from regard.engine.kernel.structures import DTYPES
from regard.hf.calls import HARMLESS, PACKING, UNDERSTOOD, CallObserver
from regard.hf.masks.graph_masks import GraphMask

#: Observers of the calls in this context that break a graph of torch.compile.
graph_breaks: ContextItems[CallObserver] = ContextItems("graph breaks")


def fits_operator(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the operator can compute a call of the backend, whose mask it can express."""
    widths_fit = max(query.shape[-1], value.shape[-1]) <= LARGEST_WIDTH and query.shape[-1] == key.shape[-1]
    is_shared = query.shape[1] % key.shape[1] == 0
    is_cpu = query.device.type == key.device.type == value.device.type == "cpu"
    dtypes_fit = query.dtype in DTYPES and query.dtype == key.dtype == value.dtype
    return widths_fit and is_shared and is_cpu and dtypes_fit and _options_fit(query, options)


def _options_fit(query: Tensor, options: dict[str, Any]) -> bool:
    """Whether the operator can express all options of a call that may change its weights."""
    for name, given in options.items():
        is_read = given is not None and given is not False
        if is_read and name not in UNDERSTOOD and name not in HARMLESS and name not in PACKING:
            return False
    if options.get("output_attentions") or options.get("position_bias") is not None:
        return False
    if isinstance(options.get("scaling"), Tensor) or isinstance(options.get("softcap"), Tensor):
        return False
    sinks = options.get("s_aux")
    return sinks is None or sinks.numel() == query.shape[1]


def call_operator(
    operator: Callable[..., Any],
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: GraphMask | None,
    options: dict[str, Any],
    owner: Tensor | None = None,
) -> Tensor:
    """The output of the backend, (B, I, H, E), for queries (B, H, I, D), by `regard::attention` or its function.

    Without a mask the call is causal if its options or its module say so; a window is part of the mask. By `owner`
    observers of a graph find the module that calls. `fits_operator` has accepted the call.
    """
    scale, sinks = options.get("scaling"), options.get("s_aux")
    if mask is None:
        is_causal = options.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # As in torch, a causal call gives the first query the position of the first key.
        mask = GraphMask(0, 0, is_causal and query.shape[2] > 1, 0, None, None)
    offset, start = (mask.start, 0) if isinstance(mask.start, Tensor) else (None, mask.start)
    dropout = float(options.get("dropout") or 0.0)
    terms = OperatorTerms(
        real=mask.real,
        groups=mask.groups,
        offset=offset,
        seed=torch.randint(2**31, ()) if dropout else None,
        owner=owner,
        start=start,
        first=mask.first,
        is_causal=mask.is_causal,
        window=mask.window,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        cap=float(options.get("softcap") or 0.0),
        dropout=dropout,
    )
    output, _ = operator(query, key, value, None if sinks is None else sinks.reshape(-1).float(), *terms)
    return output.transpose(1, 2)


def owner_of(module: nn.Module) -> Tensor | None:
    """The first parameter of a module, which identifies it inside a graph; None if it has none.

    It is detached: the operator gives it no gradients.
    """
    first = next(module.parameters(), None)
    return None if first is None else first.detach()
