"""Decays inside chunks: dot products of pairs of tokens, with the decay between the two tokens.

pairs[t, s] = sum_d x_td y_sd exp(g_(s+1)d + ... + g_td). The exponents are at most 0, but each of the two factors
exp(c_t) and exp(-c_s), c the cumulative sum of g, would overflow. So no cumulative sum is ever taken back:

- A decay with one number a token is a matrix of exponents: cumulative sums down its columns, which start after s.
- A decay with one number a channel divides the chunk into halves, the halves into halves, and so on. Between two halves
  it is a product of two factors that are at most 1: from the middle to t, and from s to the middle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: A log-decay below this is a decay of 0 in every dtype.
LEAST = -1e4


@dataclass(frozen=True)
class ReadVectors:
    """Vectors (N, C, D) that read earlier tokens. If `before`, the decay of the reading token does not count."""

    vectors: Tensor
    before: bool = False


class Decays(ABC):
    """The decays of chunks of C tokens, from g (N, C, 1 or D): N chunks, all heads and batch entries.

    `total` is the decay of a whole chunk, (N, 1 or D). `rest` is the decay after each token, (N, C, 1 or D).
    """

    total: Tensor
    rest: Tensor

    @staticmethod
    def of(log_decay: Tensor) -> Decays:
        """The decays of g: one number a token, or one a channel."""
        return _ScalarDecays(log_decay) if log_decay.shape[-1] == 1 else _ChannelDecays(log_decay)

    @abstractmethod
    def since_start(self, before: bool) -> Tensor:
        """The decay from the start of the chunk to each token, with the token's own decay or (before) without."""

    @abstractmethod
    def pairs(self, rows: list[ReadVectors], cols: list[Tensor]) -> list[list[Tensor]]:
        """For each of `rows` and each of `cols` the matrix (N, C, C) of pairs; 0 above the diagonal.

        The diagonal is the plain dot product, since a token does not decay toward itself; 0 for rows that read before
        their token.
        """

    @abstractmethod
    def pair_gradients(
        self, rows: list[ReadVectors], cols: list[Tensor], grads: list[list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of rows and cols, from those of `pairs`. Entries of `grads` that `pairs` sets to 0 are ignored."""


class _ScalarDecays(Decays):
    """One decay a token."""

    def __init__(self, log_decay: Tensor) -> None:
        self.log_decay = log_decay[..., 0].clamp_min(LEAST)
        self.sums = self.log_decay.cumsum(-1)
        self.total = self.sums[:, -1:].exp()
        from_token = self.log_decay.flip(1).cumsum(1).flip(1)
        self.rest = torch.nn.functional.pad(from_token[:, 1:], (0, 1)).exp()[..., None]  # 1 after the last token
        self._between: dict[bool, Tensor] = {}

    def since_start(self, before: bool) -> Tensor:
        sums = torch.nn.functional.pad(self.sums[:, :-1], (1, 0)) if before else self.sums
        return sums.exp()[..., None]

    def between(self, before: bool) -> Tensor:
        """The decays from token s to token t, (N, C, C); 0 for later s, and if `before` also for t itself.

        Column s of the exponents sums g of the tokens after s, down to t; if `before`, down to the token before t.
        """
        if before not in self._between:
            of_rows = self.log_decay[:, :, None].expand(-1, -1, self.log_decay.shape[1])
            exponents = of_rows.tril(-1).cumsum(1)
            exponents = torch.nn.functional.pad(exponents[:, :-1], (0, 0, 1, 0)) if before else exponents
            self._between[before] = exponents.exp().tril(-1 if before else 0)
        return self._between[before]

    def pairs(self, rows: list[ReadVectors], cols: list[Tensor]) -> list[list[Tensor]]:
        return [[torch.bmm(x.vectors, y.mT).mul_(self.between(x.before)) for y in cols] for x in rows]

    def pair_gradients(
        self, rows: list[ReadVectors], cols: list[Tensor], grads: list[list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        row_grads, col_grads = [torch.zeros_like(x.vectors) for x in rows], [torch.zeros_like(y) for y in cols]
        for m, x in enumerate(rows):
            for n, y in enumerate(cols):
                dots = grads[m][n] * self.between(x.before)
                row_grads[m].baddbmm_(dots, y)
                col_grads[n].baddbmm_(dots.mT, x.vectors)
        return row_grads, col_grads


class _ChannelDecays(Decays):
    """One decay a token and channel; the number of tokens is a power of 2."""

    def __init__(self, log_decay: Tensor) -> None:
        self.decay = log_decay.exp()
        for _, *products in self._levels():  # the last level is the whole chunk
            self._through, self.rest, self._before = products
        self.total = self._through[:, -1]

    def since_start(self, before: bool) -> Tensor:
        return self._before if before else self._through

    def _levels(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """For blocks of 1, 2, 4 ... C tokens: products of decays inside each block, (N, C, D) each.

        They are: from the first token through each token; after each token; from the first token to each token without
        it. The tensors are overwritten at the next level.
        """
        through, rest, before = self.decay.clone(), torch.ones_like(self.decay), torch.ones_like(self.decay)
        N, C, D = through.shape
        size = 1
        yield size, through, rest, before
        while size < C:
            # two blocks become one: what crosses a whole half is multiplied by the decay of this half
            halves = [x.view(N, C // (2 * size), 2, size, D) for x in (through, rest, before)]
            right_total, left_total = (halves[0][:, :, half, -1:].clone() for half in (1, 0))
            halves[0][:, :, 1] *= left_total
            halves[1][:, :, 0] *= right_total
            halves[2][:, :, 1] *= left_total
            size *= 2
            yield size, through, rest, before

    def pairs(self, rows: list[ReadVectors], cols: list[Tensor]) -> list[list[Tensor]]:
        N, C, _ = self.decay.shape
        pairs = [[self.decay.new_zeros(N, C, C) for _ in cols] for _ in rows]
        for x, matrices in zip(rows, pairs, strict=True):
            for y, matrix in zip(cols, matrices, strict=True):
                if not x.before:
                    matrix.diagonal(dim1=1, dim2=2).copy_((x.vectors * y).sum(-1))
        for size, through, rest, before in self._levels():
            if size == C:
                break  # a whole chunk is the half of nothing
            left = [_half(y, size, 0) * _half(rest, size, 0) for y in cols]
            for x, matrices in zip(rows, pairs, strict=True):
                right = _half(x.vectors, size, 1) * _half(before if x.before else through, size, 1)
                for y, matrix in zip(left, matrices, strict=True):
                    _corners(matrix, size).copy_(right @ y.mT)
        return pairs

    def pair_gradients(
        self, rows: list[ReadVectors], cols: list[Tensor], grads: list[list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        row_grads, col_grads = [torch.zeros_like(x.vectors) for x in rows], [torch.zeros_like(y) for y in cols]
        for m, x in enumerate(rows):
            for n, y in enumerate(cols):
                if not x.before:  # the diagonal holds plain dot products
                    own = grads[m][n].diagonal(dim1=1, dim2=2)[..., None]
                    row_grads[m].addcmul_(own, y)
                    col_grads[n].addcmul_(own, x.vectors)
        for size, through, rest, before in self._levels():
            if size == self.decay.shape[1]:
                break
            # a corner is (right * decay_right) (left * decay_left)^T, as in `pairs`
            decay_left = _half(rest, size, 0)
            left = [_half(y, size, 0) * decay_left for y in cols]
            for m, x in enumerate(rows):
                decay_right = _half(before if x.before else through, size, 1)
                right = _half(x.vectors, size, 1) * decay_right
                for n, y in enumerate(left):
                    corner = _corners(grads[m][n], size)
                    _half(row_grads[m], size, 1).addcmul_(corner @ y, decay_right)
                    _half(col_grads[n], size, 0).addcmul_(corner.mT @ right, decay_left)
        return row_grads, col_grads


def _half(x: Tensor, size: int, half: int) -> Tensor:
    """The left (0) or right (1) halves of blocks of 2 * size tokens: (N, C, D) -> (N, C / (2 size), size, D)."""
    return x.view(x.shape[0], -1, 2, size, x.shape[2])[:, :, half]


def _corners(matrix: Tensor, size: int) -> Tensor:
    """A view of the pairs of a right half with its left half: (N, C, C) -> (N, C / (2 size), size, size)."""
    N, C, _ = matrix.shape
    blocks = matrix.view(N, C // (2 * size), 2 * size, C // (2 * size), 2 * size)
    return blocks.diagonal(dim1=1, dim2=3)[:, size:, :size].movedim(-1, 1)
