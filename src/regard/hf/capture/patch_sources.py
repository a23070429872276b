"""The queries, keys, values and head outputs of a watched run, from which another run is patched."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.hf.capture.captured_calls import Capture, ModuleCalls
from regard.maps.attention_map import AttentionMap
from regard.shapes import at_least_float32, grouped_values

#: Bytes of weights that are computed at once.
BYTES = 32 << 20


@torch.no_grad()
def queries_or_keys(calls: ModuleCalls, part: str, path: str) -> Tensor:
    """The queries (B, H, n, D) of all calls of a module, or the keys (B, G, n, D) of the last one."""
    captures = [call for call in calls.calls if isinstance(call, Capture)]
    if len(captures) < len(calls.calls):
        raise RegardError(f"Patch(part={part!r}): the watch kept no {part} of {path}, only its weights. Give a tensor.")
    return captures[-1].keys.tensor if part == "key" else torch.cat([call.query for call in captures], 2)


@torch.no_grad()
def head_outputs(weights: AttentionMap, value: Tensor) -> Tensor:
    """W . values of one call, (B, H, I, E), in blocks of rows."""
    B, H, I, J = weights.shape
    size = max(1, BYTES // (8 * B * H * max(1, J)))
    blocks = [weights.tile(rows=slice(top, top + size)) for top in range(0, I, size)]
    return torch.cat([grouped_values(w, at_least_float32(value).to(w.dtype)) for w in blocks], 2).to(value.dtype)
