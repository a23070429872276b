"""The queries and keys of a watched run, from which another run is patched."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.hf.capture.captured_calls import Capture, ModuleCalls


@torch.no_grad()
def queries_or_keys(calls: ModuleCalls, part: str, path: str) -> Tensor:
    """The queries (B, H, n, D) of all calls of a module, or the keys (B, G, n, D) of the last one."""
    captures = [call for call in calls.calls if isinstance(call, Capture)]
    if len(captures) < len(calls.calls):
        raise RegardError(f"Patch(part={part!r}): the watch kept no {part} of {path}, only its weights. Give a tensor.")
    return captures[-1].keys.tensor if part == "key" else torch.cat([call.query for call in captures], 2)
