"""The tensors that a watch keeps of a call; those of a static cache are copied, since the next step writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.hf.calls import DIRECT, AttentionCall, Translation


def call_tensors(
    call: AttentionCall, translation: Translation, with_values: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys, and values if they are kept; keys and values of a static cache are copies."""
    tensors = translation.query, call.key, call.value
    query, key, value = tensors if torch.is_grad_enabled() else (tensor.detach() for tensor in tensors)
    value = value if with_values else None
    if not _is_static(call):
        return query, key, value
    return query, key.clone(), None if value is None else value.clone()


def _is_static(call: AttentionCall) -> bool:
    """Whether keys and values belong to a cache that is written in place."""
    if hasattr(call.key, "_dynamo_static_input_type"):
        return True
    place = call.key.untyped_storage().data_ptr()
    return call.backend == DIRECT and any(b.untyped_storage().data_ptr() == place for b in call.module.buffers())
