"""Calls of a backend that an edit changes.

The backend computes the call as it is, so rows and heads that no edit selects keep their bits. The selected rows of the
selected heads are computed again with the edit: as one call of `regard.attend` if whole heads change by masks and
biases only, and otherwise in blocks of rows, from scores to weights to outputs, in linear memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.attention import Prepared, scores
from regard.attention_output import attend_listeners
from regard.base.context import ContextItems
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, grouped_values, has_numbers, without_autocast
from regard.edits.layer_edits import Pairs
from regard.hf.calls import AttentionCall, MaskCache, Translation, Untranslatable, translate
from regard.pieces.contents import autograd_records
from regard.pieces.grid import Grid

#: Bytes of scores that are computed at once.
BYTES = 32 << 20
#: The backend that also returns the weights.
EAGER = "eager"
#: The most pairs of an edit of which the mask is asked before.
FEW_PAIRS = 4096


class CallEditor(Protocol):
    """Changes the calls of one model while a block of `regard.edit` is open."""

    def selects(self, module: nn.Module) -> bool:
        """Whether an edit selects some of the heads of a module."""
        ...

    def softmax_inputs(self, module: nn.Module) -> tuple[Any, Any] | None:
        """The arguments of a selected module that runs now, if it may compute a softmax itself; None for others."""
        return None

    def module_given(self, module: nn.Module) -> Any:
        """The call of such a module (a `GivenCall`, capture/value_probe.py), so that its weights can be measured.

        None if a call of attention inside it was edited, or if its weights may not be measured.
        """
        return None

    def edited(self, call: AttentionCall) -> AttentionCall:
        """The call with patched queries, keys and values, and with the edits of its weights."""
        ...

    def patched(self, call: AttentionCall, output: Tensor) -> Tensor:
        """The output (B, I, H, E) of the call with patched heads."""
        ...


#: The editors of this thread, the innermost block last.
editors: ContextItems[CallEditor] = ContextItems("editors")
_masks = MaskCache()


def edited_call(call: AttentionCall) -> AttentionCall:
    """The call as the open edits change it; the call itself if none does."""
    for editor in editors:
        call = editor.edited(call)
    return call


def patched_output(call: AttentionCall, output: Any) -> tuple[AttentionCall, Any]:
    """The call with the patched outputs of its heads, if an edit patched some, and what the backend returned with them.

    A backend returns outputs (B, I, H, E), or a tuple or list of these and the weights.
    """
    first, *others = output if isinstance(output, tuple | list) else (output,)
    changed = first
    for editor in editors:
        changed = editor.patched(call, changed)
    if changed is first:
        return call, output
    return replace(call, patched=changed), (changed, *others) if isinstance(output, tuple | list) else changed


def run_edited(call: AttentionCall, compute: Callable[[], Any]) -> Any:
    """What the backend returns for an edited call. `compute` runs the backend without the edits."""
    rows = rows_of(call)
    if call.edits is None or not rows.any:
        return compute()
    translation = translated(call)
    with attend_listeners.computing(), without_autocast(call.query.device):  # this call of `attend` is not reported
        # `attend` computes whole heads, if no edit follows the softmax and the backend returns no weights.
        if call.backend != EAGER and rows.is_whole and translation.edits is None:
            seen = translation.attention(translation.query, call.key, call.value, positions=translation.positions)
            edited = seen.output.transpose(1, 2)
            if rows.is_all_heads and rows.is_all_entries:
                return edited.contiguous(), None
            return with_rows(compute(), rows, edited[rows.batch][:, :, rows.heads], None)
        output, weights = computed(call, translation, rows)
    return with_rows(compute(), rows, output.transpose(1, 2), weights)


def translated(call: AttentionCall) -> Translation:
    """The attention of an edited call; a `RegardError` if it is not known."""
    with as_mistakes(call.module):
        return translate(replace(call, to_run=True), _masks)


@contextmanager
def as_mistakes(module: object) -> Iterator[None]:
    """Raise a `RegardError` if a call that an edit selects is not known well enough to be edited."""
    try:
        yield
    except Untranslatable as reason:
        backend = getattr(getattr(module, "config", None), "_attn_implementation", EAGER)
        remedy = "" if backend in (EAGER, "sdpa") else " Set attn_implementation='sdpa' or 'eager' for this model."
        raise RegardError(
            f"edit: the attention of {type(module).__name__} cannot be edited: {reason}.{remedy}"
        ) from None


def allows_one(call: AttentionCall, pairs: Pairs, start: int, first: int) -> bool:
    """Whether the mask of a call allows one of the pairs; True if there are too many to ask for each, or if torch.vmap
    hides the numbers of the mask.

    `start` and `first` are the numbers of the first query and key of the call in the whole sequence.
    """
    (B, H, I, _), J = call.query.shape, call.key.shape[2]
    queries = pairs.queries.among(range(start, start + I))
    keys = pairs.keys.among(range(first, first + J))
    if len(queries) * len(keys) > FEW_PAIRS:
        return True
    translation = call.known or translated(replace(call, edits=None))
    mask = translation.attention.mask
    if mask is None:
        return True
    whole = Grid.whole(translation.positions, B, H, I, call.query.device)
    at = torch.tensor([n - start for n in queries]), torch.tensor([n - first for n in keys])
    entries = whole.batch[pairs.batch.contain(whole.batch)]
    allowed = mask.allowed(Grid(entries, whole.head, whole.query[at[0]], whole.key[at[1]]))
    return not has_numbers(allowed) or bool(allowed.any())


@dataclass(frozen=True, eq=False)
class EditedRows:
    """The batch entries, the heads, and the indices of queries that a call has to compute again."""

    batch: list[int]
    heads: list[int]
    queries: list[int]
    num_batch: int
    num_heads: int
    num_queries: int

    @property
    def any(self) -> bool:
        return bool(self.batch and self.heads and self.queries)

    @property
    def is_whole(self) -> bool:
        """Whether every query is computed again."""
        return len(self.queries) == self.num_queries

    @property
    def is_all_heads(self) -> bool:
        return len(self.heads) == self.num_heads

    @property
    def is_all_entries(self) -> bool:
        return len(self.batch) == self.num_batch


def rows_of(call: AttentionCall) -> EditedRows:
    """The batch entries, heads and queries that some edit of the call selects.

    All of these entries, heads and queries are computed together, also where no single edit selects a combination.
    """
    B, H, I, _ = call.query.shape
    batch: set[int] = set()
    heads: set[int] = set()
    queries: set[int] = set()
    for pairs in pairs_of(call):
        start = call.edits.start if call.edits is not None else 0
        selected = [n - start for n in pairs.queries.among(range(start, start + I))]
        if selected:
            batch |= set(pairs.batch.among(range(B)))
            heads |= set(pairs.heads.among(range(H)))
            queries |= set(selected)
    return EditedRows(sorted(batch), sorted(heads), sorted(queries), B, H, I)


def all_rows(call: AttentionCall) -> EditedRows:
    """All batch entries, heads and queries of a call."""
    B, H, I, _ = call.query.shape
    return EditedRows(list(range(B)), list(range(H)), list(range(I)), B, H, I)


def pairs_of(call: AttentionCall) -> list[Pairs]:
    """The pairs of each edit of the call."""
    return [] if call.edits is None else [edit.pairs for edit in call.edits.edits.edits]


def computed(call: AttentionCall, translation: Translation, rows: EditedRows) -> tuple[Tensor, Tensor | None]:
    """Outputs (entries, heads, rows, E) of these rows, and their weights if the backend returns weights."""
    attention, positions = translation.attention, translation.positions
    B, H, I, _ = call.query.shape
    whole = Grid.whole(positions, B, H, I, call.query.device)
    if isinstance(attention.normalizer, nn.Module) and not rows.is_all_heads:  # it has a number for every head
        output, weights = computed(call, translation, replace(rows, heads=list(range(H))))
        return output[:, rows.heads], None if weights is None else weights[:, rows.heads]
    heads, batch = torch.tensor(rows.heads), torch.tensor(rows.batch)
    prepared = Prepared.of(attention, translation.query, call.key, positions).select(batch, heads)
    value = call.value if rows.is_all_entries else call.value[batch]
    value = value if rows.is_all_heads else value[:, heads // (H // call.key.shape[1])]  # each head has its own now

    def block(queries: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the weights of some rows; `tensors` are those of the prepared call, and its values.

        They are arguments so that checkpointing finds their gradients.
        """
        tile, v = prepared.with_tensors(tensors[:-1]).tile(queries, slice(None)), tensors[-1]
        device = queries.device
        grid = Grid(batch.to(device), heads.to(device), whole.query[queries], whole.key)
        s, columns = scores(attention, tile, grid), torch.arange(len(whole.key), device=device)
        weights, _ = attention.normalizer.normalize_rows(s, columns)
        weights = F.dropout(translation.edited(weights, grid, whole), attention.dropout, attention.training)
        return grouped_values(weights, at_least_float32(v).to(weights.dtype)).to(call.value.dtype), weights

    tensors = (*prepared.tensors(), value)
    parts = [_run_block(block, queries, tensors, call) for queries in _blocks(rows, call)]
    outputs, weights = zip(*parts, strict=True)
    return torch.cat(outputs, 2), torch.cat(weights, 2).to(call.query.dtype) if call.backend == EAGER else None


def _blocks(rows: EditedRows, call: AttentionCall) -> Iterator[Tensor]:
    """The indices of the rows, as many at once as `BYTES` hold, at 8 bytes for the score and the weight of a pair."""
    size = max(1, BYTES // (8 * len(rows.batch) * len(rows.heads) * max(1, call.key.shape[2])))
    yield from torch.tensor(rows.queries, device=call.query.device).split(size)


def _run_block(
    block: Any, queries: Tensor, tensors: tuple[Tensor, ...], call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """A block of rows; if it has gradients, its weights are computed again in the backward pass."""
    is_transformed = torch._C._are_functorch_transforms_active()  # torch.func has no checkpoints
    if not is_transformed and autograd_records(tensors):
        return checkpoint(block, queries, *tensors, use_reentrant=False)  # type: ignore[return-value]
    output, weights = block(queries, *tensors)
    return output, weights if call.backend == EAGER else None


def with_rows(original: Any, rows: EditedRows, output: Tensor, weights: Tensor | None) -> Any:
    """What the backend returned, with other outputs (entries, rows, heads, E) and weights (entries, heads, rows, J)."""
    first, *others = original if isinstance(original, tuple | list) else (original,)
    device, output = first.device, output.to(first.dtype)
    batch, heads, queries = (torch.tensor(part, device=device) for part in (rows.batch, rows.heads, rows.queries))
    first = first.index_put((batch[:, None, None], queries[:, None], heads), output)
    if weights is not None and others and isinstance(others[0], Tensor):
        at = batch[:, None, None], heads[:, None], queries
        others[0] = others[0].index_put(at, weights.to(others[0].dtype))
    return (first, *others) if isinstance(original, tuple | list) else first
