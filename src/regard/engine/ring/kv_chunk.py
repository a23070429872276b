"""Chunks: some queries with some keys, computed by one rank at one step; and how rows of chunks are merged."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32
from regard.base.spans import Spans
from regard.engine.blocked import Blocked
from regard.engine.kernel import Kernel, KernelProblem, pays
from regard.engine.kernel.attention import forward
from regard.engine.problem import Engine, Problem
from regard.engine.rows import with_remainder
from regard.pieces.contents import split_tensors
from regard.pieces.normalizer import Normalizer, RowStatistic

#: Output (B, H, I, E) and row statistic, one or more tensors (B, H, I), of some queries.
Rows = tuple[Tensor, RowStatistic]


def chunk_attention(whole: Attention) -> Attention:
    """The pieces of a chunk, without position encoding and sink.

    Prepared keys contain their positions. A sink belongs to the whole row, and is added after the last merge.
    """
    normalizer = whole.normalizer.of_part()
    return Attention(whole.score, bias=whole.bias, mask=whole.mask, normalizer=normalizer, dropout=whole.dropout)


class KVChunk(Problem):
    """A problem of some queries and keys, prepared by the ranks that hold them."""

    @staticmethod
    def of(
        attention: Attention, prepared: Prepared, value: Tensor, queries: Spans, keys: Spans, seed: int | None = None
    ) -> KVChunk:
        """Prepared queries at consecutive positions, and prepared keys with values at any positions.

        `attention` is that of `chunk_attention`, and `seed` decides the dropout, if there is one. The ring has refused
        pieces that hide gradients (`ring._checked`).
        """
        (B, H, I, D), (_, G, J, E) = prepared.query.shape, value.shape
        positions = Positions(queries.intervals[0][0], keys)
        piece_tensors, template = split_tensors(attention)
        sizes = Sizes(B, H, G, I, J, D, E)
        facts: dict[str, Any] = {"piece_tensors": piece_tensors, "template": template, "hides_gradients": False}
        return KVChunk.from_prepared(
            attention=attention, prepared=prepared, value=value, positions=positions, sizes=sizes, seed=seed, **facts
        )

    def attend(self) -> Rows:
        """The output (B, H, I, E) over these keys alone, in float32 at least, and its row statistic, without gradients.

        A query that may attend to none of these keys has output 0, and the `empty_statistic` of the normalizer.
        """
        if self.runs_kernel:
            terms = KernelProblem.of(self)
            output, logsumexp = forward(terms.setting(), terms.inputs(), torch.float32)
            row_statistic: RowStatistic = (logsumexp,)
        else:
            result = Blocked().run(self)
            assert result.row_statistic is not None
            output, row_statistic = result.output, result.row_statistic
        self.plan_cache.clear()  # its entries refer to the chunk, and a cycle would keep the tensors alive
        row_statistic = with_remainder(self.attention, self.prepared, self.positions, self.grid, row_statistic)
        return at_least_float32(output), row_statistic

    @cached_property
    def runs_kernel(self) -> bool:
        """Whether the compiled kernels compute the chunk."""
        return pays(self) and KernelProblem.of(self).refusal is None

    @property
    def engine(self) -> Engine:
        """The engine that computes the chunk."""
        return Kernel() if self.runs_kernel else Blocked()


def merge(normalizer: Normalizer, rows: Rows, new_rows: Rows) -> None:
    """Add to `rows`, in place, the results of the same queries for other keys.

    Each of the two outputs is an average over its own keys; `share` is the part that these keys have of all.
    """
    (output, statistic), (new_output, new_statistic) = rows, new_rows
    merged = normalizer.merge(statistic, new_statistic)
    factors = normalizer.share(statistic, merged), normalizer.share(new_statistic, merged)
    output.mul_(factors[0][..., None]).addcmul_(new_output, factors[1][..., None])
    for number, merged_number in zip(statistic, merged, strict=True):
        number.copy_(merged_number)
