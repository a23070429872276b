"""torch's fused attention kernels: forward, backward, and blocks of a problem as calls of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import Prepared
from regard.base.shapes import at_least_float32, group, has_numbers, in_one_dtype
from regard.base.versions import shares_key_heads
from regard.engine.blocks import Block, starts_causal
from regard.engine.problem import Problem
from regard.engine.rows import finished_rows
from regard.engine.strided_blocks import BlockRun
from regard.engine.transforms import HIDDEN_GRADIENTS
from regard.pieces.bias import is_additive
from regard.pieces.grid import Grid, along_diagonals
from regard.pieces.mask import Mask
from regard.pieces.normalizer import LogSumExpNormalizer, RowStatistic, any_coarse


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Fused softmax attention: output (B, H, I, E) and log-sum-exp (B, H, I), None if the kernel does not return it.

    `scale` is the factor of the scores. `causal` aligns the first query with the first key (top-left). `mask` is
    additive, has the dtype of the query, and broadcasts. The kernel needs keys and values of one width: the narrower
    are padded with zeros, which changes neither scores nor outputs. An empty row has output 0 and log-sum-exp -inf (the
    CPU kernel returns 0).
    """
    (B, H, I, D), out_width, kernel = query.shape, value.shape[-1], _cpu_kernel() if query.is_cpu else None
    is_folded = _folds(query, key, causal, mask)
    if is_folded:  # a group as rows of one head: its keys are read once, not once for each query head
        query = group(query, key.shape[1])
    if out_width != D:
        query, key, value = (_pad(x, max(D, out_width)) for x in (query, key, value))
    query, key, value = [x if x.is_contiguous() else _as_rows(x) for x in (query, key, value)]
    if kernel is not None:
        key, value = _for_all_heads(key, query), _for_all_heads(value, query)
        output, logsumexp = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        output, logsumexp = _with_empty_rows(output, logsumexp.detach(), query, key, mask)
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        logsumexp = None
        if mask is not None:
            output = output.masked_fill(mask.isneginf().all(-1, keepdim=True), 0.0)
    if out_width < D:
        output = output[..., :out_width]
    if not is_folded:
        return output, logsumexp
    return output.reshape(B, H, I, out_width), logsumexp if logsumexp is None else logsumexp.reshape(B, H, I)


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
    """Gradients of query, key and value from the output and log-sum-exp of `flash`; those of shared heads are sums.

    `grad` (B, H, I, E) is the gradient of the output. Rows of -inf have gradients of 0, and so have rows of inf.
    Other arguments are those of `flash`.
    """
    if _folds(query, key, causal, mask):
        G = key.shape[1]
        grad, grouped_query, output = (group(x, G) for x in (grad, query, output))
        logsumexp = group(logsumexp[..., None], G)[..., 0]
        grads = flash_gradients(grad, grouped_query, key, value, output, logsumexp, scale=scale, mask=mask)
        return grads[0].reshape(query.shape), grads[1], grads[2]
    width, out_width, G = query.shape[-1], value.shape[-1], key.shape[1]
    key, value = (_for_all_heads(x, query) for x in (key, value))
    padded = (_as_rows(_pad(x, max(width, out_width))) for x in (grad, query, key, value, output))
    empty = logsumexp.isneginf()  # the kernel expects 0 there
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, logsumexp.masked_fill(empty, 0.0), 0.0, causal, attn_mask=mask, scale=scale
    )
    if key.shape[1] != G:  # the gradient of a shared head is the sum over its group
        grads = grads[0], *(x.unflatten(1, (G, -1)).sum(2) for x in grads[1:])
    return grads[0][..., :width], grads[1][..., :width], grads[2][..., :out_width]


def _for_all_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values (B, G, ...), repeated for each query head where torch's CPU kernel cannot share them."""
    if shares_key_heads():
        return x
    return x[:, :, None].expand(-1, -1, query.shape[1] // x.shape[1], -1, -1).flatten(1, 2)  # a view if H = G


def _folds(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> bool:
    """Whether query heads that share a key head become rows of one head; if not, the kernel shares the key head."""
    return query.shape[1] != key.shape[1] and not causal and (mask is None or query.shape[2] == mask.shape[1] == 1)


def _pad(x: Tensor, width: int) -> Tensor:
    """Vectors with zeros up to a width."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _as_rows(x: Tensor) -> Tensor:
    """The vectors as contiguous rows that do not overlap; a copy if they are laid out otherwise.

    The kernel assumes this layout and does not check it. It also gives its output the order of axes of the query, so
    a batch or head axis with a stride below the width would come between the channels.
    """
    (batch_stride, head_stride, row_stride, channel_stride), (B, H, length, width) = x.stride(), x.shape
    has_contiguous_rows = width == 1 or channel_stride == 1
    has_separate_rows = length == 1 or row_stride >= width
    has_separate_heads = H == 1 or head_stride == 0 or head_stride >= width
    has_separate_batches = B == 1 or batch_stride == 0 or batch_stride >= width
    is_read = has_contiguous_rows and has_separate_rows and has_separate_heads and has_separate_batches
    return x if is_read else x.contiguous()


def returns_row_statistic(query: Tensor) -> bool:
    """Whether the private CPU operator that also returns the log-sum-exp can be used."""
    return query.is_cpu and _cpu_kernel() is not None


@cache
def _cpu_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The private operator; `torch` has it without the look-up of `torch.ops`, which takes 5 microseconds."""
    return getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)


#: Rows whose mask is read at once, to find the empty ones.
FEW_ROWS = 64


def _with_empty_rows(
    output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Set the log-sum-exp to -inf in empty rows; set it and the output to NaN in rows of NaN scores.

    `output` (B, H, I, E) and `logsumexp` (B, H, I) are those of the kernel, and `query`, `key` and `mask` what it was
    given. For both kinds of rows it returns 0, so only rows with 0 are checked. Scores are NaN only with a query or a
    key of the same head that is not finite.
    """
    is_known = has_numbers(logsumexp)  # not while torch exports: then nothing may depend on numbers
    if is_known and logsumexp.all():  # no row has 0
        return output, logsumexp
    suspects = logsumexp == 0
    if mask is not None:
        empty = None if is_known else mask.isneginf().all(-1)
        logsumexp = (
            _mark_empty(logsumexp, suspects, mask) if empty is None else logsumexp.masked_fill(empty, -torch.inf)
        )
    has_finite_keys = key.isfinite().flatten(2).all(-1, keepdim=True)  # (B, G, 1)
    has_finite_keys = has_finite_keys.repeat_interleave(query.shape[1] // key.shape[1], 1)
    undefined = (logsumexp == 0) & ~(query.isfinite().all(-1) & has_finite_keys)
    if is_known and not undefined.any():
        return output, logsumexp
    return output.masked_fill(undefined[..., None], torch.nan), logsumexp.masked_fill(undefined, torch.nan)


def _mark_empty(logsumexp: Tensor, suspects: Tensor, mask: Tensor) -> Tensor:
    """Set the log-sum-exp to -inf in those of the `suspects` (B, H, I) that may attend to no key.

    The mask of a few rows is read at a time, for all batch entries and heads.
    """
    suspected_rows = suspects.flatten(0, 1).any(0).nonzero().flatten()
    logsumexp = logsumexp.clone()  # autograd saved the tensor of the kernel for the backward pass
    for rows in suspected_rows.split(FEW_ROWS):
        empty = mask.expand(*mask.shape[:2], logsumexp.shape[2], -1)[:, :, rows].isneginf().all(-1)
        logsumexp[:, :, rows] = logsumexp[:, :, rows].masked_fill(empty, -torch.inf)
    return logsumexp


class FlashRows:
    """Blocks of one problem as calls of the fused kernel: biases and mask become one additive tensor."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def returns_row_statistic(self) -> bool:
        return returns_row_statistic(self.problem.query)

    @cached_property
    def refusal(self) -> str | None:
        """Why the kernel cannot compute the problem; None if it can."""
        p, attention = self.problem, self.problem.attention
        if p.scale is None:
            return "its weights are no softmax of scaled dot products"
        for bias in attention.bias:
            if not is_additive(bias):
                return f"{type(bias).__name__} does not add to the scores, so it cannot be given as a mask"
        if p.learns_bias:
            return "the bias requires gradients, which the fused kernel does not support"
        if p.hides_gradients:
            return HIDDEN_GRADIENTS
        if p.dropout:
            return "it could not drop the same weights again in the backward pass"
        sink = self._normalizer.sink
        if sink is not None and (p.learns or not self.returns_row_statistic):
            return "the sink needs the log-sum-exp with gradients, and the kernel does not return them"
        if sink is not None and any_coarse(sink):
            return "the sink is so large that the log-sum-exp of the kernel is too coarse for its share of the row"
        return None

    def attend_block(self, block: Block, tile: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic | None]:
        """Output and statistic of the rows of a block; the statistic is None if the kernel does not return it.

        `tile` and `value` have the queries and keys of the block. A mask with its rows in reverse order (`_mask`) gets
        its queries in reverse order, and so come the results.
        """
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
    def has_gradients(self) -> bool:
        """Whether `gradients` can use the output and the statistic. Not with a sink, which scaled the output."""
        return self.returns_row_statistic and self._normalizer.sink is None

    def gradients(
        self, block: Block, tile: Prepared, value: Tensor, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a block's value, query and key, from the results of its rows and the gradient of the output."""
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

    def attend_run(self, run: BlockRun, prepared: Prepared, value: Tensor) -> tuple[Tensor, RowStatistic]:
        """Output (B, H, I, E) and statistic of the I = count x size rows of a run, with one call for each batch entry.

        A run is `count` blocks of `size` queries that differ only by a shift (`BlockRun`), so mask and biases of the
        first are those of all. In a call the blocks stand on the batch axis: views (count, heads, size, width).
        """
        block, causal, dtype = run.first, self.is_causal(run.first), value.dtype
        query, key, value = self._inputs(prepared, value)
        mask = None
        if not causal:
            columns = block.index(key.device)
            mask, flipped = self._mask(block, prepared.tile(block.rows, columns), query.dtype)
            # one copy of the mask of one block; `attend_block` flips its queries instead
            mask = mask.flip(2) if mask is not None and flipped else mask
        results = []
        for entry in range(query.shape[0])[block.entries]:
            views = run.views(query[entry], key[entry], value[entry])
            output, logsumexp = flash(*views, scale=self._scale, causal=causal, mask=mask)
            assert logsumexp is not None, "the kernel of the blocks returns the log-sum-exp"
            # (count, H, size, ...) -> (H, I, ...)
            results.append((output.transpose(0, 1).flatten(1, 2), logsumexp.transpose(0, 1).flatten(1, 2)))
        outputs, logsumexps = (torch.stack(parts) for parts in zip(*results, strict=True))
        output, row_statistic = self._finished(outputs, logsumexps, dtype)
        assert row_statistic is not None
        return output, row_statistic

    @property
    def _scale(self) -> float:
        """The factor of q . k, divided by the temperature."""
        assert self.problem.scale is not None
        return self.problem.scale

    def is_causal(self, block: Block) -> bool:
        """Whether the causal flag of the kernel is the mask of this block.

        The kernel multiplies the -inf of hidden keys by the scale, so the flag needs a positive one.
        """
        p, scale = self.problem, self.problem.scale
        is_positive = scale is None or scale >= torch.finfo(torch.float32).tiny
        return is_positive and not p.attention.bias and starts_causal(block, p.positions)

    def _inputs(self, tile: Prepared, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value in one dtype. Biases are added in this dtype, so with them it is float32 at least."""
        inputs = tile.query, tile.key, value
        if self.problem.attention.bias or tile.query.dtype != value.dtype:
            query, key, value = in_one_dtype(*map(at_least_float32, inputs))
            return query, key, value
        return inputs

    def _finished(
        self, output: Tensor, logsumexp: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, RowStatistic | None]:
        """The output in a dtype, and the statistic, after the sink is added."""
        if logsumexp is None:
            return output.to(dtype), None
        output, row_statistic = finished_rows(self._normalizer, output, (logsumexp,))
        return output.to(dtype), row_statistic

    @property
    def _normalizer(self) -> LogSumExpNormalizer:
        """The softmax: its temperature and sink."""
        normalizer = self.problem.attention.normalizer.as_softmax
        assert normalizer is not None
        return normalizer

    def floats_per_pair(self, block: Block) -> int:
        """Floats that the additive tensor of a block holds for a pair, over all batch entries and heads.

        0 if the block needs none, or only one number for each diagonal.
        """
        if (block.full and not self.problem.attention.bias) or self.on_diagonal(block):
            return 0
        of_mask = (1, 1) if block.mask is None else self._shape(block.mask)
        of_biases = self._bias_shape()
        return max(of_mask[0], of_biases[0]) * max(of_mask[1], of_biases[1])

    def _bias_shape(self) -> torch.Size:
        """The shape of the sum of the biases for one pair, evaluated once."""
        p, one = self.problem, slice(0, 1)
        if "bias shape" not in p.plan_cache:
            p.plan_cache["bias shape"] = self._biases(p.prepared.tile(one, one), p.grid.tile(one, one)).shape
        return p.plan_cache["bias shape"]

    def _shape(self, mask: Mask) -> torch.Size:
        """The shape of `mask.allowed` for one pair, evaluated once for each mask: blocks share a few masks."""
        shapes = self.problem.plan_cache.setdefault("shapes", {})
        if id(mask) not in shapes:  # the dictionary keeps the mask, so that no other mask gets its id
            shapes[id(mask)] = mask, mask.allowed(self.problem.grid.first_pair()).shape
        return shapes[id(mask)][1]

    def on_diagonal(self, block: Block) -> bool:
        """Whether mask and biases depend on j - i alone, and keys have consecutive positions, as queries have."""
        keys, pieces = self.problem.positions.keys, self.problem.attention.bias
        relative = all(bias.relative for bias in pieces) and (block.mask is None or block.mask.relative)
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
        assert distances is not None, "on a diagonal queries and keys are contiguous"
        by_distance = self._additive(block, tile, grid.line(distances)).to(dtype).contiguous()
        return along_diagonals(by_distance[:, :, 0], len(grid.query)), True

    def _additive(self, block: Block, tile: Prepared, grid: Grid) -> Tensor:
        """What is added to the scores of the pairs of `grid`, (B or 1, H or 1, I, J), in float32 at least.

        -inf where the mask forbids a pair. Biases are divided by the temperature, as `_scale` is.
        """
        total = self._biases(tile, grid)
        if self._normalizer.temperature != 1:
            total = total / self._normalizer.temperature
        if block.mask is None:
            return total
        return total.masked_fill(~block.mask.allowed(grid), -torch.inf)

    def _biases(self, tile: Prepared, grid: Grid) -> Tensor:
        """The sum of the biases for the pairs of `grid`, (B or 1, H or 1, I, J)."""
        precision = torch.promote_types(tile.query.dtype, torch.float32)
        total = torch.zeros(1, 1, len(grid.query), len(grid.key), device=grid.device, dtype=precision)
        for bias, rows, cols in zip(self.problem.attention.bias, tile.rows, tile.cols, strict=True):
            total = bias.transform(total, grid, rows, cols)
        return total
