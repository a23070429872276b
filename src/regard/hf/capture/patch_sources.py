"""The queries and keys of a watched run, from which another run is patched."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.captured_calls import Capture, ModuleCalls


def check_steps(calls: ModuleCalls, path: str) -> None:
    """Refuse calls that read whole texts one after the other: no token of theirs is one token of a run."""
    if any(I == J > 1 for _, _, I, J in (call.map.shape for call in calls.calls[1:])):
        raise RegardError(
            f"ActivationPatch(source=seen): {path} read a whole text {len(calls.calls)} times (layers that share a "
            "module, "
            "several runs, or a generation without a cache), so it is not known which of them is meant. Watch one run, "
            "or give a tensor, such as seen.head_output(layer, call=n)."
        )


@torch.no_grad()
def queries_or_keys(calls: ModuleCalls, part: str, path: str) -> Tensor:
    """The queries (B, H, n, D) of all calls of a module, or the keys (B, G, n, D) of the last one."""
    captures = [call for call in calls.calls if isinstance(call, Capture)]
    if len(captures) < len(calls.calls):
        raise RegardError(
            f"ActivationPatch(part={part!r}): the watch kept no {part} of {path}, only its weights. Give a tensor."
        )
    return captures[-1].keys.tensor if part == "key" else torch.cat([call.query for call in captures], 2)
