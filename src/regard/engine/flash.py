"""The one door to torch's fused attention kernels, and the rows of a problem given to them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import Prepared
from regard.engine.blocks import Block, starts_causal
from regard.engine.problem import Problem
from regard.engine.runs import Run
from regard.engine.transforms import HIDDEN_GRADIENTS
from regard.pieces.bias import AdditiveBias
from regard.pieces.grid import Grid, along_diagonals
from regard.pieces.mask import Mask
from regard.pieces.normalizer import LearnedSink, RowStatistic, Softmax, some_coarse
from regard.shapes import at_least_float32, group, has_numbers, in_one_dtype


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Fused softmax attention: output (B, H, I, E), and the log-sum-exp (B, H, I) where the kernel tells it.

    `causal` aligns the first query with the first key (top-left). `mask` is additive, of the
    query's dtype, and broadcasts. The kernel needs one width for keys and values: the narrower
    is padded with zeros, which changes neither scores nor outputs. An empty row gives output 0
    and the log-sum-exp -inf, where the CPU kernel itself says 0.
    """
    if _folds(query, key, causal, mask):
        return _folded(query, key, value, scale, mask)
    out_width = value.shape[-1]
    width = max(query.shape[-1], out_width)
    query, key, value = (_as_rows(_pad(x, width)) for x in (query, key, value))
    if returns_row_statistic(query):
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        output, logsumexp = _with_empty_rows(output, logsumexp.detach(), query, key, mask)
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        logsumexp = None
        if mask is not None:
            output = output.masked_fill(mask.isneginf().all(-1, keepdim=True), 0.0)
    return output[..., :out_width], logsumexp


def flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from what `flash` returned: nothing of the forward pass is computed again."""
    if _folds(query, key, causal, mask):
        G = key.shape[1]
        grad, inner, output = (group(x, G) for x in (grad, query, output))
        total = group(logsumexp[..., None], G)[..., 0]
        parts = flash_gradients(grad, inner, key, value, output, total, scale=scale, mask=mask)
        return parts[0].reshape(query.shape), parts[1], parts[2]
    width, out_width = query.shape[-1], value.shape[-1]
    padded = (_as_rows(_pad(x, max(width, out_width))) for x in (grad, query, key, value, output))
    empty = logsumexp.isneginf()  # where the kernel itself says 0
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, logsumexp.masked_fill(empty, 0.0), 0.0, causal, attn_mask=mask, scale=scale
    )
    return parts[0][..., :width], parts[1][..., :width], parts[2][..., :out_width]


def _folds(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> bool:
    """Whether the query heads of a group can be rows of one head."""
    return query.shape[1] != key.shape[1] and not causal and (mask is None or query.shape[2] == mask.shape[1] == 1)


def _folded(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The query heads of a group as rows of one head: the kernel would read their keys once for each of them."""
    B, H, I, _ = query.shape
    output, logsumexp = flash(group(query, key.shape[1]), key, value, scale=scale, mask=mask)
    output = output.reshape(B, H, I, output.shape[-1])
    return output, logsumexp if logsumexp is None else logsumexp.reshape(B, H, I)


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _as_rows(x: Tensor) -> Tensor:
    """The vectors as contiguous rows that do not overlap; copied if they are not.

    The kernel assumes that channels have stride 1 and that vectors do not overlap, and checks neither.
    """
    *_, length, width = x.shape
    whole = width == 1 or x.stride(-1) == 1
    apart = length == 1 or x.stride(-2) >= width
    return x if whole and apart else x.contiguous()


def returns_row_statistic(query: Tensor) -> bool:
    """Whether the private CPU operator that also returns the log-sum-exp can be used."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


#: Rows whose mask is looked at together, to learn whether it leaves them anything.
FEW_ROWS = 64


def _with_empty_rows(
    output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Set the log-sum-exp to -inf in empty rows; set it and the output to NaN in rows of NaN scores.

    In both the kernel reports a log-sum-exp and an output of 0, so only rows with 0 are checked.
    """
    suspects, is_known = logsumexp == 0, has_numbers(logsumexp)
    if is_known and not suspects.any():
        return output, logsumexp
    if mask is not None:
        empty = None if is_known else mask.isneginf().all(-1)
        logsumexp = (
            _mark_empty(logsumexp, suspects, mask) if empty is None else logsumexp.masked_fill(empty, -torch.inf)
        )
    undefined = (logsumexp == 0) & ~(query.isfinite().all(-1) & key.isfinite().all())
    if is_known and not undefined.any():
        return output, logsumexp
    return output.masked_fill(undefined[..., None], torch.nan), logsumexp.masked_fill(undefined, torch.nan)


def _mark_empty(logsumexp: Tensor, suspects: Tensor, mask: Tensor) -> Tensor:
    """The log-sum-exp with -inf in those of the suspected rows that may attend to no key."""
    rows = suspects.flatten(0, 1).any(0).nonzero().flatten()
    logsumexp = logsumexp.clone()  # autograd keeps the kernel's own for the backward pass
    for some in rows.split(FEW_ROWS):
        empty = mask.expand(*mask.shape[:2], logsumexp.shape[2], -1)[:, :, some].isneginf().all(-1)
        logsumexp[:, :, some] = logsumexp[:, :, some].masked_fill(empty, -torch.inf)
    return logsumexp


class FlashRows:
    """Rows of one problem as calls of the fused kernel: biases and mask become one additive tensor."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def returns_row_statistic(self) -> bool:
        return returns_row_statistic(self.problem.query)

    @cached_property
    def refusal(self) -> str | None:
        """Why the kernel cannot compute these rows, or None: it can."""
        p, attention = self.problem, self.problem.attention
        if p.scale is None:
            return "its weights are no softmax of scaled dot products"
        for bias in attention.bias:
            if not isinstance(bias, AdditiveBias):
                return f"{type(bias).__name__} does not add to the scores, so it cannot be given as a mask"
        if p.learns_bias:
            return "gradients must reach the bias, and the kernel turns dense for a mask that requires them"
        if p.hides_gradients:
            return HIDDEN_GRADIENTS
        if p.dropout:
            return "it could not drop the same weights again in the backward pass"
        if attention.normalizer.row_sum is None and (self._learns_sink or not self.returns_row_statistic):
            return "the sink acts through the log-sum-exp, which the kernel does not tell with gradients"
        if attention.normalizer.row_sum is None and some_coarse(torch.as_tensor(self._normalizer.sink)):
            return "beside so large a sink the kernel's log-sum-exp is too coarse to tell the sink's share"
        return None

    @property
    def _learns_sink(self) -> bool:
        return self.problem.learns

    def attend_block(self, block: Block, tile: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic | None]:
        """Output and statistic of the rows of a block."""
        causal = self.is_causal(block)
        query, key, value, dtype = *self._inputs(tile, value), value.dtype
        mask, flipped = (None, False) if causal else self._mask(block, tile, query.dtype)
        if flipped:
            query = query.flip(2)
        output, logsumexp = flash(query, key, value, scale=self._scale, causal=causal, mask=mask)
        if flipped:
            output, logsumexp = output.flip(2), logsumexp if logsumexp is None else logsumexp.flip(2)
        return self._finished(output, logsumexp, dtype)

    @property
    def remembers(self) -> bool:
        """Whether output and statistic are all that `gradients` needs; a sink has scaled the output."""
        return self.returns_row_statistic and self._normalizer.row_sum is not None

    def gradients(
        self, block: Block, tile: Prepared, value: Tensor, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a block's value, query and key, from the output and statistic of its rows."""
        causal = self.is_causal(block)
        query, key, value = self._inputs(tile, value)
        mask, flipped = (None, False) if causal else self._mask(block, tile, query.dtype)
        rows = [x.to(query.dtype) for x in (grad, query, output)]
        if flipped:
            rows, logsumexp = [x.flip(2) for x in rows], logsumexp.flip(2)
        grad, query, output = rows
        for_query, for_key, for_value = flash_gradients(
            grad, query, key, value, output, logsumexp, scale=self._scale, causal=causal, mask=mask
        )
        return for_value, for_query.flip(2) if flipped else for_query, for_key

    def attend_run(self, run: Run, prepared: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic]:
        """Output (B, H, I, E) and statistic of all rows of a run, one call for each batch entry."""
        block, causal, dtype = run.first, self.is_causal(run.first), value.dtype
        query, key, value = self._inputs(prepared, value)
        mask = None
        if not causal:
            columns = block.index(key.device)
            mask, flipped = self._mask(block, prepared.tile(block.rows, columns), query.dtype)
            mask = mask.flip(2) if mask is not None and flipped else mask
        found = []
        for entry in range(query.shape[0])[block.entries]:
            views = run.views(query[entry], key[entry], value[entry])
            output, logsumexp = flash(*views, scale=self._scale, causal=causal, mask=mask)
            assert logsumexp is not None, "the kernel inside the blocks tells its statistic"
            found.append((output.transpose(0, 1).flatten(1, 2), logsumexp.transpose(0, 1).flatten(1, 2)))
        outputs, totals = (torch.stack(parts) for parts in zip(*found, strict=True))
        output, row_statistic = self._finished(outputs, totals, dtype)
        assert row_statistic is not None
        return output, row_statistic

    @property
    def _scale(self) -> float:
        assert self.problem.scale is not None
        return self.problem.scale

    def is_causal(self, block: Block) -> bool:
        """Whether the kernel's own causal flag serves this block."""
        return not self.problem.attention.bias and starts_causal(block, self.problem.positions)

    def _inputs(self, tile: Prepared, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = tile.query, tile.key, value
        if self.problem.attention.bias or tile.query.dtype != value.dtype:
            query, key, value = in_one_dtype(*map(at_least_float32, inputs))
            return query, key, value
        return inputs

    def _finished(
        self, output: Tensor, logsumexp: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, RowStatistic | None]:
        if logsumexp is None:
            return output.to(dtype), None
        (total,) = self._normalizer.with_sink((logsumexp,))
        if self._normalizer.row_sum is None:
            output = output * torch.exp(logsumexp - total)[..., None].to(output.dtype)
        return output.to(dtype), (total,)

    @property
    def _normalizer(self) -> Softmax | LearnedSink:
        normalizer = self.problem.attention.normalizer
        assert isinstance(normalizer, Softmax | LearnedSink)
        return normalizer

    def floats_per_pair(self, block: Block) -> int:
        """Floats that mask and biases of a block hold for a pair, all batch entries and heads; 0 on a diagonal."""
        attention, s = self.problem.attention, self.problem.sizes
        if (block.full and not attention.bias) or self.on_diagonal(block):
            return 0
        batch, heads = 1, s.H if attention.bias else 1
        if block.mask is not None:
            of_mask = self._shape(block.mask)
            batch, heads = of_mask[0], max(heads, of_mask[1])
        states = (*self.problem.prepared.rows, *self.problem.prepared.cols)
        return (batch if all(state is None for state in states) else s.B) * heads

    def _shape(self, mask: Mask) -> torch.Size:
        """Of what the mask answers for one pair; blocks share a few masks, which are asked once."""
        known = self.problem.plan_cache.setdefault("shapes", {})
        if id(mask) not in known:  # the mask is kept, so that no other takes its number
            known[id(mask)] = mask, mask.allowed(self.problem.grid.tile(slice(0, 1), slice(0, 1))).shape
        return known[id(mask)][1]

    def on_diagonal(self, block: Block) -> bool:
        """Whether mask and biases depend on j - i alone, and queries and keys are one stretch each."""
        attention, keys = self.problem.attention, self.problem.positions.keys
        relative = all(bias.relative for bias in attention.bias)
        relative &= block.mask is None or block.mask.relative
        return relative and len(keys.intervals) == len(block.columns.intervals) == 1

    def _mask(self, block: Block, tile: Prepared, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """Mask and biases of a block as one additive tensor, and whether its rows are in reverse order.

        If they depend on j - i alone, the tensor is a view of its I + J - 1 diagonals, so it holds no I x J numbers.
        """
        if block.full and not self.problem.attention.bias:
            return None, False
        grid = self.problem.grid.tile(block.rows, block.columns).entries(block.entries)
        if not self.on_diagonal(block):
            return self._additive(block, tile, grid).to(dtype), False
        distances = grid.distances()
        assert distances is not None, "on a diagonal queries and keys are one stretch each"
        by_distance = self._additive(block, tile, grid.line(distances)).to(dtype).contiguous()
        return along_diagonals(by_distance[:, :, 0], len(grid.query)), True

    def _additive(self, block: Block, tile: Prepared, grid: Grid) -> Tensor:
        attention = self.problem.attention
        precision = torch.promote_types(tile.query.dtype, torch.float32)
        total = torch.zeros(1, 1, len(grid.query), len(grid.key), device=grid.device, dtype=precision)
        for bias, rows, cols in zip(attention.bias, tile.rows, tile.cols, strict=True):
            total = bias.transform(total, grid, rows, cols)
        if self._normalizer.temperature != 1:
            total = total / self._normalizer.temperature
        if block.mask is None:
            return total
        return total.masked_fill(~block.mask.allowed(grid), -torch.inf)
