"""What one rank gives to a call, and the tensors of the call for the keys of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, checked_attention
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.engine.problem import Problem
from regard.engine.ring.exchange import Exchange
from regard.engine.ring.gathering import Gathered
from regard.engine.ring.sharding import ShardPositions
from regard.engine.transforms import differentiable_once
from regard.pieces.bias import Bias, State
from regard.pieces.call_tensors import ARGUMENTS, CallTensors, check_call_tensors, needs_of


@dataclass(frozen=True, eq=False)
class RankShare:
    """The tokens of one rank: queries, keys, values, and the tensors of the call for them. Pieces are the same."""

    attention: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions | None = None
    tensors: CallTensors = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.query, self.key, self.value)

    def checked(self) -> RankShare:
        """The share after checks of its pieces and tensors, with all axes of the tensors of the call."""
        pieces = checked_attention("attend: the first argument", self.attention).pieces()
        if (reason := _unsent(self.attention)) is not None:
            raise RegardError(f"attend: the ring engine cannot run {self.attention!r}: {reason}. Use another engine.")
        tensors = check_call_tensors("attend", pieces, self.sizes, self.tensors, ARGUMENTS)
        return replace(self, tensors=tensors)

    def axes(self) -> Iterator[tuple[str, list[str]]]:
        """The tensors of the call by name, in one order on all ranks, each with the letters of its axes."""
        words = {name: axes for piece in self.attention.pieces() for name, axes in needs_of(piece).items()}
        yield from ((name, words[name].split()) for name in sorted(words))

    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors without an axis of tokens, which must be the same on all ranks."""
        return {name: self.tensors[name] for name, letters in self.axes() if not {"I", "J"} & set(letters)}

    def first_token(self) -> RankShare:
        """The first query and the first key, with their tensors: enough for sizes and dtypes."""
        tensors = dict(self.tensors)
        for name, letters in self.axes():
            for axis, letter in enumerate(letters):
                tensors[name] = tensors[name].narrow(axis, 0, 1) if letter in "IJ" else tensors[name]
        query, key, value = (x[:, :, :1] for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, tensors=tensors)

    def prepared_token(self) -> Prepared:
        """The prepared tensors of the first token."""
        first = self.first_token()
        return Prepared.of(first.attention, first.query, first.key, Positions.aligned_to_end(1, 1), first.tensors)


def _unsent(attention: Attention) -> str | None:
    """Why the ring does not carry the tensors of a piece; None if it does."""
    if (selection := attention.selection) is not None and selection.reads_vectors:
        return f"{type(selection).__name__} compares queries with all keys, and each rank has only its part"
    for piece in (attention.score, attention.mask, attention.normalizer):
        if needs := needs_of(piece):
            return f"{type(piece).__name__} needs {', '.join(needs)}, and the ring sends no tensors of this slot"
    for bias in attention.bias:
        for name, letters in needs_of(bias).items():
            if {"I", "J"} <= set(letters.split()):
                return f"{name} has a number for each pair, and each rank has only its part of the keys"
    return None


@dataclass(frozen=True, eq=False)
class ShareProblem(Problem):
    """The problem of one rank. `whole` are the tensors of biases for the keys of all ranks, which are `all_keys`.

    A bias with tensors of the call prepares its vectors from the tensors of all keys: a sum over the tokens before a
    key, for instance, reaches over ranks. They take a few numbers for each token. Of the vectors of keys each rank
    keeps its own.
    """

    whole: CallTensors = field(default_factory=dict)
    all_keys: Spans = field(default_factory=Spans)

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.of(self.attention, self.query, self.key, self.positions, self.call_tensors, self._state_of)

    def _state_of(self, bias: Bias, query: Tensor, key: Tensor, positions: Positions, tensors: CallTensors) -> State:
        """What a bias prepares for the own queries and keys (`Prepared.of` asks).

        A bias that needs tensors of the call prepares each interval of the own queries together with all keys.
        """
        if not needs_of(bias):
            return bias.prepare(query, key, positions)
        rows: list[Tensor | None] = []
        cols, before = None, 0
        assert isinstance(positions, ShardPositions)
        for start, stop in positions.rows:
            part = slice(before, before := before + stop - start)
            call_tensors, stand_in = of_queries(bias, self.whole, part), unread_keys(key, len(self.all_keys))
            row, cols = bias.prepare(query[:, :, part], stand_in, Positions(start, self.all_keys), **call_tensors)
            rows.append(row)
        filled = [row for row in rows if row is not None]
        return torch.cat(filled, 2) if filled else None, self._own(bias, cols)

    def _own(self, bias: Bias, cols: Tensor | None) -> Tensor | None:
        """The vectors of the own keys, out of `cols`, those of all keys, which are on axis 2.

        A bias that read the stand-in has made a NaN. Without `cols` there are none: None.
        """
        if cols is None:
            return None
        ((first, _),) = self.all_keys
        own = cols.index_select(2, self.positions.keys.shift(-first).tensor(cols.device))
        if type(bias).__module__.startswith("regard."):
            return own  # it reads no keys, and the host need not wait for the device
        if bool(own.isnan().any()) and not any(bool(t.isnan().any()) for t in self.whole.values()):
            raise RegardError(
                f"attend: {type(bias).__name__} reads keys in `prepare` beside tensors of the call, and each rank of "
                "a ring has only its part of the keys. Use another engine."
            )
        return own


def of_queries(piece: object, whole: CallTensors, part: slice) -> dict[str, Tensor]:
    """The tensors that a piece needs: for all keys, and for the own queries of `part`, by their indices."""
    tensors = {}
    for name, words in needs_of(piece).items():
        tensors[name] = whole[name][tuple(part if letter == "I" else slice(None) for letter in words.split())]
    return tensors


def unread_keys(key: Tensor, count: int) -> Tensor:
    """In place of the keys of all ranks, which no rank holds: NaN, so that a piece that reads them is noticed."""
    return key.new_full((1, 1, 1, 1), torch.nan).expand(*key.shape[:2], count, key.shape[3])


def of_all_keys(
    share: RankShare, pieces: Iterable[object], exchange: Exchange, number: int, held: Sequence[Spans]
) -> CallTensors:
    """The tensors of pieces for the keys of all ranks. Gradients return to the rank that gave them. Collective.

    `held` are the tokens of each rank. `number` is that of the operation. Tensors without an axis of keys stay as they
    are.
    """
    names = {name for piece in pieces for name in needs_of(piece)}
    whole = {name: share.tensors[name] for name in names}
    for name, letters in share.axes():
        if name in names and "J" in letters:
            x = share.tensors[name].movedim(letters.index("J"), -1)
            others = x.shape[:-1]
            # `Gathered` joins axis 2: the axis of keys is moved there, and back after
            (flat,) = differentiable_once("ring", x.reshape(-1, 1, x.shape[-1]))
            gathered = Gathered.apply(exchange, number, held, flat)
            assert isinstance(gathered, Tensor)
            whole[name] = gathered.reshape(*others, -1).movedim(-1, letters.index("J"))
    return whole
