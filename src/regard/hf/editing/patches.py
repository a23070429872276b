"""Patches: a part of the heads and tokens of a call is that of another run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.edits.layer_edits import Pairs, of_layer
from regard.edits.values import ActivationPatch
from regard.edits.where import Indices
from regard.hf.calls import AttentionCall
from regard.hf.capture import WatchedAttention

#: The parts of a call that belong to keys, and to heads of keys.
OF_KEYS = ("key", "value")


@dataclass(frozen=True, eq=False)
class CallPatch:
    """What a patch puts into one call: values (entries or 1, heads, tokens, D) at these places of a tensor.

    The places are batch entries, heads, and the indices `rows` of tokens.
    """

    batch: list[int]
    heads: list[int]
    rows: list[int]
    values: Tensor


def with_patches(tensor: Tensor, patches: list[CallPatch]) -> Tensor:
    """A copy of a tensor (B, H, n, D) with patches, in their order."""
    tensor = tensor.clone()
    for patch in patches:
        places = patch.batch, patch.heads, patch.rows
        batch, heads, rows = (torch.tensor(one, device=tensor.device) for one in places)
        tensor[batch[:, None, None], heads[:, None], rows] = patch.values.to(tensor)
    return tensor


def patches_of(edit: ActivationPatch, heads: Indices, call: AttentionCall, path: str, start: int) -> list[CallPatch]:
    """What a patch puts into a call, whose first token (query or key) has the number `start`.

    There is one for each set of batch entries with the same tokens; none if the call has none of the tokens. The source
    has values of all tokens of its run, for every batch entry, for the selected ones, or one for all of them. `path` is
    that of the module of the call.
    """
    tensor = {"query": call.query, "key": call.key, "value": call.value, "output": call.query}[edit.part]
    chosen = heads.among(range(call.query.shape[1]))
    if edit.part in OF_KEYS:
        chosen = _key_heads(edit, chosen, call, path)
    width = call.value.shape[3] if edit.part == "output" else tensor.shape[3]
    source, selected, patches = None, edit.where.entries(len(tensor)), []
    for pairs in Pairs.of(edit.where, heads, len(tensor)):
        tokens = pairs.keys if edit.part in OF_KEYS else pairs.queries
        numbers = tokens.among(range(start, start + tensor.shape[2]))
        if not numbers:
            continue
        if source is None:
            source = _checked(edit, source_of(edit, path), (len(tensor), len(selected), tensor.shape[1], width))
        if numbers[-1] >= source.shape[2]:
            raise RegardError(_other_length(edit, source.shape[2], numbers[-1] + 1))
        entries = pairs.batch.among(range(len(tensor)))
        of_source = entries if len(source) == len(tensor) else [selected.index(entry) for entry in entries]
        values = source if len(source) == 1 else source[of_source]
        rows = [number - start for number in numbers]
        patches.append(CallPatch(entries, chosen, rows, values[:, chosen][:, :, numbers]))
    return patches


def _key_heads(edit: ActivationPatch, heads: list[int], call: AttentionCall, path: str) -> list[int]:
    """The key heads of query heads; all query heads that share one must be selected. `path` is that of the module."""
    share = call.query.shape[1] // call.key.shape[1]
    key_heads = sorted({head // share for head in heads})
    missing = [head for head in range(call.query.shape[1]) if head // share in key_heads and head not in heads]
    if missing:
        group = [head for head in range(call.query.shape[1]) if head // share == missing[0] // share]
        raise RegardError(
            f"edit: {edit!r} selects one of the heads {', '.join(map(str, group))} of {path}, which share one key and "
            f"value head, so a patch of the {edit.part} changes all of them. Select all: Where(heads={group})."
        )
    return key_heads


def _checked(edit: ActivationPatch, source: Any, sizes: tuple[int, int, int, int]) -> Tensor:
    """The source (B, selected entries or 1, H, n, D); a `RegardError` if it does not fit the call.

    `sizes` are B, the number of selected batch entries, H and D of the patched tensor.
    """
    B, num_selected, H, D = sizes
    if not isinstance(source, Tensor) or source.ndim not in (3, 4) or not source.is_floating_point():
        kind = f"{source.dtype} of shape {tuple(source.shape)}" if isinstance(source, Tensor) else type(source).__name__
        raise RegardError(
            "ActivationPatch(source=...): expected the seen of a watch, or a tensor (batch, heads, tokens, width), "
            f"got {kind}."
        )
    source = source if source.ndim == 4 else source[None]
    if source.shape[0] not in (1, B, num_selected) or source.shape[1] != H or source.shape[3] != D:
        raise RegardError(
            f"ActivationPatch(part={edit.part!r}): the source has shape {tuple(source.shape)} (batch, heads, tokens, "
            f"width), and this run has batch {B}, {H} heads and width {D}."
        )
    return source


def check_length(edit: ActivationPatch, path: str, length: int) -> None:
    """Refuse a source of another length, if the patch takes all its tokens."""
    tokens = edit.where.keys if edit.part in OF_KEYS else edit.where.queries
    source = source_of(edit, path)
    if tokens is None and source.shape[-2] != length:
        raise RegardError(_other_length(edit, source.shape[-2], length))


def _other_length(edit: ActivationPatch, own: int, needed: int) -> str:
    """The error for a source of `own` tokens where `needed` tokens are patched."""
    which = "keys" if edit.part in OF_KEYS else "queries"
    return (
        f"ActivationPatch(part={edit.part!r}): the run to patch from has {own} tokens, and this one has at least "
        f"{needed}, so tokens do not correspond. Give texts of the same length, or select tokens: Where({which}=...)."
    )


def source_of(edit: ActivationPatch, path: str) -> Any:
    """The tensor of one layer that a patch reads."""
    if isinstance(edit.source, WatchedAttention):
        return edit.source.patch_source(edit.part, path)
    return of_layer("ActivationPatch", edit.source, path)
