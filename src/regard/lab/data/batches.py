"""Batches of sentence pairs of similar length, in an order fixed by a seed, divided among processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import to_device
from regard.lab.data.vocabulary import BOS, EOS, PAD

__all__ = ["Batch", "Batches", "Epoch"]

#: A source and a target as ids, without BOS and EOS.
Encoded = tuple[Sequence[int], Sequence[int]]
#: Pairs that are sorted by length together. Larger pools need less padding; smaller pools keep the order more random.
POOL = 8192


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as two tensors, padded on the right.

    source (B, S) is [x_1 .. x_S, EOS, PAD ..]; target (B, T + 1) is [BOS, y_1 .. y_T, EOS, PAD ..].

    >>> from regard.lab.data import Batch
    >>> batch = Batch.of([([7, 8], [9]), ([5], [6, 4])])
    >>> batch.target_input.tolist(), batch.target_output.tolist()  # BOS is 2, EOS is 3
    ([[2, 9, 3], [2, 6, 4]], [[9, 3, 0], [6, 4, 3]])
    """

    source: Tensor
    target: Tensor
    #: The numbers of these pairs in the pairs given to `Batches`.
    indices: tuple[int, ...] = ()

    @staticmethod
    def of(pairs: Sequence[Encoded], indices: Sequence[int] = ()) -> Batch:
        """The batch of encoded pairs.

        >>> batch = Batch.of([([7, 8], [9]), ([5], [6, 4])])
        >>> batch.source.tolist(), batch.target.tolist()
        ([[7, 8, 3], [5, 3, 0]], [[2, 9, 3, 0], [2, 6, 4, 3]])
        >>> batch.target_output.tolist(), batch.num_tokens
        ([[9, 3, 0], [6, 4, 3]], 5)
        """
        source = _padded([[*source, EOS] for source, _ in pairs])
        target = _padded([[BOS, *target, EOS] for _, target in pairs])
        return Batch(source, target, tuple(indices))

    def __len__(self) -> int:
        return self.source.shape[0]

    @property
    def target_input(self) -> Tensor:
        """The input of the decoder, (B, T): starts with BOS."""
        return self.target[:, :-1]

    @property
    def target_output(self) -> Tensor:
        """The tokens to predict, (B, T): ends with EOS; a loss ignores PAD."""
        return self.target[:, 1:]

    @cached_property
    def target_lengths(self) -> Tensor:
        """The number of tokens to predict in each row, with EOS, (B,)."""
        return (self.target_output != PAD).sum(1)

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens to predict in the batch: the divisor of a mean loss."""
        return int(self.target_lengths.sum())

    @property
    def filled(self) -> Batch:
        """This batch, or a batch of one empty pair if it has no pairs.

        A process without pairs computes it, so that all processes of a group take the same steps.

        >>> Batch.of([]).filled.target.tolist()
        [[2, 3]]
        """
        return self if len(self) else Batch.of([((), ())]).to(self.source.device)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        device = torch.device(device)
        return replace(self, source=to_device(self.source, device), target=to_device(self.target, device))


@dataclass(frozen=True, eq=False)
class Epoch(Sequence[Batch]):
    """The batches of one pass over the pairs. Indexing builds a batch.

    >>> from regard.lab.data import Batches
    >>> epoch = Batches([([5] * n, [6]) for n in range(1, 8)], sentences=2, shuffle=False).epoch()
    >>> len(epoch), len(epoch[2:]), epoch[0].indices
    (4, 2, (0, 1))
    """

    pairs: Sequence[Encoded]
    #: The numbers of the pairs of each batch of this process.
    plan: list[list[int]]

    def __len__(self) -> int:
        return len(self.plan)

    @overload
    def __getitem__(self, step: int) -> Batch: ...
    @overload
    def __getitem__(self, step: slice) -> Epoch: ...
    def __getitem__(self, step: int | slice) -> Batch | Epoch:
        if isinstance(step, slice):
            return Epoch(self.pairs, self.plan[step])
        chosen = self.plan[step]
        return Batch.of([self.pairs[index] for index in chosen], chosen)


@checked
class Batches:
    """Every pair once per epoch, in batches of similar lengths, in an order fixed by (seed, epoch).

    The size of a batch of one process is given as `tokens` or as `sentences`. `tokens` is the number of rows times the
    longest row of either side with EOS. It counts padding, because memory grows with it.

    With shard = (rank, world), the batches of all processes at a step are, together, the batch of one process with
    `world` times the size. So training with two processes equals training with one process and the double batch size.
    `shuffle=False` sorts all pairs by length, the same in every epoch.

    Each process gets every world-th row. Numbers of rows differ by at most one. Only the last batches of an epoch can
    have fewer rows than processes; then some processes get an empty batch.

    >>> pairs = [([5] * n, [6] * n) for n in (3, 9, 4, 8)]
    >>> sorted(sorted(batch.indices) for batch in Batches(pairs, sentences=2, seed=1).epoch(0))
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        pairs: Sequence[Encoded],
        *,
        tokens: int | None = None,
        sentences: int | None = None,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        shuffle: bool = True,
    ):
        self.pairs, self.seed, self.shard, self.shuffle = pairs, seed, shard, shuffle
        rank, world = shard
        if (tokens is None) == (sentences is None):
            raise RegardError("Batches: give the batch size either as tokens= or as sentences=.")
        if (size := tokens if sentences is None else sentences) is None or size < 1:
            raise RegardError(f"Batches: the batch size is {size}. Give at least 1.")
        if not 0 <= rank < world:
            raise RegardError(f"Batches: shard={shard} must be (rank, world) with 0 <= rank < world.")
        if not len(pairs):
            raise RegardError("Batches: there are no pairs. Give at least one.")
        self.size, self.by_tokens = size, sentences is None
        #: Lengths with EOS, (pairs, 2).
        self.lengths = np.array([(len(source) + 1, len(target) + 1) for source, target in pairs])
        longest = self.lengths.max(1)
        if self.by_tokens and longest.max() > size:
            raise RegardError(
                f"Batches: pair {longest.argmax()} has {longest.max()} tokens, more than the {size} of a batch. "
                "Give a batch more tokens (training.tokens), or leave long pairs out of the corpus."
            )

    def epoch(self, number: int = 0) -> Epoch:
        """All batches of this process in one epoch. A slice of it is free: batches are built when they are read."""
        rank, world = self.shard
        return Epoch(self.pairs, [rows[rank::world] for rows in self._plan(number)])

    def start_at(self, epoch: int = 0, step: int = 0) -> Iterator[tuple[tuple[int, int], Batch]]:
        """An endless stream of batches from (epoch, step) on, each with the (epoch, step) of the next batch.

        Training that saves this (epoch, step) can resume exactly there.
        """
        while True:
            batches = self.epoch(epoch)
            if step > len(batches):
                raise RegardError(
                    f"Batches: epoch {epoch} has {len(batches)} batches, so it cannot resume at step {step}. "
                    "Resume with the corpus, the batch size and the seed of the run."
                )
            for number in range(step, len(batches)):
                is_last = number + 1 == len(batches)
                yield ((epoch + 1, 0) if is_last else (epoch, number + 1)), batches[number]
            epoch, step = epoch + 1, 0

    def _plan(self, epoch: int) -> list[list[int]]:
        """The numbers of the pairs of each step, for all processes together."""
        random = np.random.default_rng((self.seed, epoch))
        batches = self._cut(self._order(random))
        if len(batches) > 1:  # a small last batch is a noisy step, and may have fewer rows than processes
            rest = batches[-2] + batches[-1]
            halves = [rest[: (len(rest) + 1) // 2], rest[(len(rest) + 1) // 2 :]]
            batches[-2:] = halves if all(map(self._fits, halves)) else batches[-2:]
        if self.shuffle:
            batches = [batches[number] for number in random.permutation(len(batches))]
        return batches

    def _order(self, random: np.random.Generator) -> np.ndarray:
        """The numbers of all pairs in the order of the batches of `_cut`: random pools, each sorted by length.

        The pools ascend and descend in turn, so a batch over the border of two pools has pairs of similar lengths.
        """
        count = len(self.pairs)
        if not self.shuffle:
            return np.lexsort(self.lengths.T)
        order = random.permutation(count)
        pools = np.array_split(order, max(1, round(count / POOL)))
        pools = [pool[np.lexsort(self.lengths[pool].T)] for pool in pools]
        return np.concatenate([pool[::-1] if number % 2 else pool for number, pool in enumerate(pools)])

    def _fits(self, rows: list[int]) -> bool:
        """Whether pairs, given by their numbers, are at most one batch of all processes together."""
        width = int(self.lengths[rows].max()) if self.by_tokens else 1
        return len(rows) * width <= self.size * self.shard[1]

    def _cut(self, order: np.ndarray) -> list[list[int]]:
        """The order, cut into batches that are as large as the batch size allows."""
        largest = self.size * self.shard[1]
        if not self.by_tokens:
            return [order[start : start + largest].tolist() for start in range(0, len(order), largest)]
        batches: list[list[int]] = [[]]
        widest, widths = 0, self.lengths.max(1)
        for index, width in zip(order.tolist(), widths[order].tolist(), strict=True):
            if (len(batches[-1]) + 1) * max(widest, width) > largest:
                batches.append([])
                widest = 0
            widest = max(widest, width)
            batches[-1].append(index)
        return batches


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids as one tensor (rows, longest), padded on the right."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *(PAD,) * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long).view(len(rows), width)  # the view is for no rows
