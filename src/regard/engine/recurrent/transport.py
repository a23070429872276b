"""Weights of a recurrence: w_ij = q_i . A_i ... A_{j+1} k_j, for any queries, by a scan from late tokens to early ones.

A query x that stands after a chunk sees the keys of the chunk through three factors, which hold no value and no state:

    weights = x K^T            K: keys, transported to the end of the chunk past all later tokens
    x' = x decay - (x U^T) W   x' stands before the chunk

They take O(n) memory, and are computed once. A row of n weights takes O(n) time; a tile takes the scan from its rows to
its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.base.shapes import at_least_float32, in_one_dtype, to_device
from regard.engine.kernel.transport import MOST_ROWS, compiled_weights
from regard.engine.recurrent.chunks import Chunks, Kind, Tokens, solve
from regard.pieces.transition import Steps

#: Tokens of a chunk. For a single row twice as many halve the number of steps of a scan.
CHUNK = 64
#: Chunks of all heads whose factors are computed at once.
RUN = 512


@dataclass(frozen=True)
class Factors:
    """The factors of chunks of all heads: `keys` K, `erase` U (None: U = K), `address` W, and `total`, the decay.

    Shapes: (Z, c, C, D) each, and (Z, c, 1, 1 or D) for the decay. Without `address` nothing is erased.
    """

    keys: Tensor
    erase: Tensor | None
    address: Tensor | None
    total: Tensor

    def before(self, query: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """The weights (Z, R, C) of queries (Z, R, D) that stand after a chunk, and the queries before it."""
        weights = torch.bmm(query, self.keys[:, chunk].mT)
        erased = weights if self.erase is None else torch.bmm(query, self.erase[:, chunk].mT)
        query = query * self.total[:, chunk]
        return weights, query if self.address is None else query.baddbmm_(erased, self.address[:, chunk], alpha=-1)


class Transport:
    """The weights of `Steps` with one head for each query head."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps.detach()
        self.kind = Kind(steps.reads_before, steps.erases_before)
        B, H, self.num_queries, self.width = steps.query.shape
        self.Z, self.num_keys = B * H, steps.key.shape[2]
        self.first = self.num_keys - self.num_queries  # the token of the first query
        self.size = min(CHUNK, 1 << max(0, self.num_keys - 1).bit_length())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return at_least_float32(self.steps.query).dtype

    def _tokens(self, chunks: range, with_queries: bool) -> Chunks:
        """The `Chunks` of some chunks, whose tensors are (Z * c, C, ...); zeros fill the last chunk.

        Without queries only what keys and states need is computed.
        """
        part = slice(chunks.start * self.size, chunks.stop * self.size)
        of_keys = [getattr(self.steps, name) for name in Steps.ON_COLS]
        if of_keys[1] is None:
            of_keys[1] = of_keys[0].new_zeros(()).expand(*of_keys[0].shape[:3], 1)  # no decay: g = 0
        key, log_decay, address, erase = (None if x is None else self._in_chunks(x, part, 0) for x in of_keys)
        assert key is not None and log_decay is not None
        query = self._in_chunks(self.steps.query, part, self.first) if with_queries else None
        tensors = (query, key, log_decay, address, erase)
        present = iter(in_one_dtype(*(x for x in tensors if x is not None)))
        return Chunks(Tokens(*(None if x is None else next(present) for x in tensors)), self.kind)  # type: ignore[arg-type]

    def _in_chunks(self, x: Tensor, part: slice, first: int) -> Tensor:
        """The tokens of `part` from x (B, H, n, W), whose first entry is token `first`, as (Z * c, C, W).

        Tokens that x has not are zeros: those before the first query, and those that fill the last chunk.
        """
        start, stop = max(part.start - first, 0), max(min(part.stop - first, x.shape[2]), 0)
        inside = x[:, :, start:stop].reshape(self.Z, stop - start, x.shape[3])
        before = max(first - part.start, 0) if stop > start else part.stop - part.start  # without a token: all zeros
        after = part.stop - part.start - before - (stop - start)
        inside = torch.nn.functional.pad(at_least_float32(inside), (0, 0, before, after))
        return inside.reshape(-1, self.size, x.shape[3])

    @cached_property
    def factors(self) -> Factors:
        """The factors of all chunks, computed run by run."""
        count = -(-self.num_keys // self.size)
        step = max(1, RUN // max(1, self.Z))
        runs = [self._factors_of(range(c, min(c + step, count))) for c in range(0, count, step)]
        if len(runs) == 1:
            return runs[0]
        parts = zip(*((run.keys, run.erase, run.address, run.total) for run in runs), strict=True)
        return Factors(*(None if part[0] is None else torch.cat(part, 1) for part in parts))  # type: ignore[arg-type]

    def _factors_of(self, part: range) -> Factors:
        """The factors of some chunks.

        A query x past a chunk reads x K^T - x U^T (I + B)^-1 A of the values (`Chunks.solved` has the letters), so
        the factor K is K - A^T (I + B)^-T U, and the factor U is (I + B)^-T U. If u is k, both are (I + A)^-T K.
        """
        chunks = self._tokens(part, with_queries=False)
        keys, erase = chunks.writes, None
        if chunks.addresses is not None and chunks.tokens.erase is None:
            keys = solve(chunks.erased[0], keys, transposed=True)
        elif chunks.addresses is not None:
            keys, erase = keys.split(self.size, 1)
            erase = solve(chunks.erased[1], erase, transposed=True)
            keys = keys - chunks.erased[0].tril(-1).mT @ erase
        factors = (keys, erase, chunks.addresses, chunks.total.mT)
        return Factors(*(None if x is None else x.view(self.Z, len(part), *x.shape[1:]) for x in factors))  # type: ignore[arg-type]

    def _own_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        """For the queries of a chunk: weights on its keys (Z, C, C), and queries before the chunk (Z, C, D).

        As in `_factors_of`, with what each query reads of its chunk in place of K and U. Later keys have weights of 0.
        """
        chunks = self._tokens(range(chunk, chunk + 1), with_queries=True)
        read, query = chunks.read, chunks.queries
        assert read is not None and query is not None
        if chunks.addresses is None:
            return read, query
        if chunks.tokens.erase is None:
            read = solve(chunks.erased[0], read.mT, transposed=True).mT.tril()
            return read, query - read @ chunks.addresses
        of_keys, of_erase = read.split(self.size, 2)
        of_erase = solve(chunks.erased[1], of_erase.mT, transposed=True).mT
        return (of_keys - of_erase @ chunks.erased[0].tril(-1)).tril(), query - of_erase @ chunks.addresses

    def few_rows(self, rows: Tensor, until: int) -> Tensor | None:
        """Weights (B, H, R, J) of few queries by the compiled kernels, without factors; 0 on tokens before `until`.

        Those are not computed. `rows` are ascending indices of queries, on the host. None where the kernels cannot run.
        """
        steps, tokens = self.steps, rows + self.first
        is_plain = self.kind == Kind() and steps.erase is None and steps.query.device.type == "cpu"
        if not is_plain or (steps.log_decay is not None and steps.log_decay.shape[3] > 1) or len(rows) > MOST_ROWS:
            return None
        no_decay = steps.key.new_ones(()).expand(*steps.key.shape[:3], 1)
        decay = no_decay if steps.log_decay is None else steps.log_decay.exp()
        weights = compiled_weights(steps.query[:, :, rows], steps.key, decay, steps.address, tokens, until)
        if weights is not None and steps.own is not None:
            weights[:, :, torch.arange(len(rows), device="cpu"), tokens] += steps.own[:, :, rows]
        return weights

    def sweep(self, rows: Tensor, until: int) -> Iterator[tuple[int, Tensor]]:
        """For each chunk, from the last that a row sees to the chunk of key `until`: its first key and the weights.

        `rows` are ascending indices of queries, at least one, on the host. Weights are (Z, rows, C); the last chunk may
        end after the last key, with weights of 0.
        """
        tokens = rows + self.first
        chunk_of_row = tokens // self.size
        query = torch.zeros(self.Z, len(rows), self.width, dtype=self.dtype, device=self.steps.query.device)
        first = int(chunk_of_row[0])
        # row r is 0 until the scan reaches its chunk, and then the query transported before all visited chunks
        for chunk in reversed(range(until // self.size, int(chunk_of_row[-1]) + 1)):
            if chunk < first:
                weights, query = self.factors.before(query, chunk)
            else:
                # rows from `here` on stand in this chunk, and rows from `later` on in later ones
                here, later = torch.searchsorted(chunk_of_row, tokens.new_tensor([chunk, chunk + 1])).tolist()
                weights = query.new_zeros(self.Z, len(rows), self.size)
                weights[:, later:], query[:, later:] = self.factors.before(query[:, later:], chunk)
                inside, before = self._own_chunk(chunk)
                at = to_device(tokens[here:later] - chunk * self.size, query.device)
                weights[:, here:later], query[:, here:later] = inside[:, at], before[:, at]
                self._add_own(weights[:, here:later], rows[here:later], at)
            yield chunk * self.size, weights

    def _add_own(self, weights: Tensor, rows: Tensor, at: Tensor) -> None:
        """Add what each query adds to the weight on its own token, `Steps.own`. `at`: this token in its chunk."""
        if self.steps.own is not None:
            own = self.steps.own[:, :, to_device(rows, weights.device)].reshape(self.Z, len(rows), 1).to(weights.dtype)
            weights.scatter_add_(2, at[None, :, None].expand(self.Z, -1, -1), own)
