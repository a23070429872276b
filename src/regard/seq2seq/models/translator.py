"""The one protocol of all translators: encode once, then one token after the other, or all of them taught at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.vocabulary import PAD
from regard.errors import RegardError
from regard.nn import Keys, MultiHeadAttention, Rows, select_rows
from regard.pieces import Mask, padding
from regard.shapes import to_device


@dataclass(frozen=True, eq=False)
class Memory:
    """What the encoder made of a batch of sources.

    `states` are (B, S, C) and `real` (B, S) is True where a token is real. What steps read of them are `keys`, what
    each attention of the decoder projected of the states, once for the source, and `final` (B, C), which
    summarises a recurrent encoder.

    >>> import torch
    >>> from regard import seq2seq
    >>> model = seq2seq.build("bahdanau", source_size=9, target_size=9, width=8)
    >>> memory = model.encode(torch.tensor([[5, 4, 3], [6, 3, 0]]))
    >>> memory.states.shape, memory.real.sum(1).tolist()
    (torch.Size([2, 3, 8]), [3, 2])
    >>> memory.select(torch.tensor([0, 0, 1])).final.shape  # a beam of two, and one
    torch.Size([3, 8])
    """

    states: Tensor
    real: Tensor
    keys: tuple[Keys, ...] = ()
    final: Tensor | None = None

    def select(self, index: Tensor) -> Memory:
        """For decoders whose rows read the sources at `index`, in that order; sources may come more than once.

        Hypotheses of one sentence share its keys. `states` and `real` stay those of all sources.
        """
        rows = Rows.of(index)
        return replace(self, keys=tuple(keys.shared(rows) for keys in self.keys), final=select_rows(self.final, index))


@dataclass(frozen=True, eq=False)
class State:
    """Where a decoder stands after some tokens: `length` of them (the same for all rows), and what it carries on.

    `carried` is nested tuples of tensors with the batch on axis 0: cells, the last attentional vector, or
    the keys and values of earlier tokens.

    >>> import torch
    >>> from regard.seq2seq import State
    >>> State((torch.tensor([[1.0], [2.0]]),), length=3).select(torch.tensor([1, 1, 0]))
    State(carried=(tensor([[2.], [2.], [1.]]),), length=3)
    """

    carried: Any
    length: int = 0

    def select(self, index: Tensor) -> State:
        """The rows at `index`, in that order; an index may come more than once (beams repeat and reorder rows)."""
        return replace(self, carried=select_rows(self.carried, index))


class Translator(nn.Module, ABC):
    """Base of all encoder-decoders.

    Source ids (B, S) end with the end of sentence and are padded on the right with 0; target input (B, T)
    begins with the start of sentence. No attribute holds anything of a call: what is carried is in `Memory`
    and `State`, which go in and come out. One law binds both ways to run a decoder: the logits of `step`
    equal `logits(forward(source, target))[:, t]` for the same tokens before.

    `settings` are the arguments that `regard.seq2seq.build` makes an equal model from, and `cross_attention`
    is the path of the module whose map aligns target with source (None: the model has none).

    >>> import torch
    >>> from regard import seq2seq
    >>> model = seq2seq.build("bahdanau", source_size=9, target_size=9, width=8)
    >>> source, target = torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]])
    >>> memory = model.encode(source)
    >>> logits, state = model.step(memory, model.start(memory), target[:, 0])
    >>> torch.allclose(logits, model.logits(model(source, target))[:, 0], atol=1e-6), state.length
    (True, 1)
    """

    source_size: int
    target_size: int
    cross_attention: str | None

    @abstractmethod
    def encode(self, source: Tensor) -> Memory:
        """Source ids (B, S) -> what the decoder reads."""

    @abstractmethod
    def start(self, memory: Memory) -> State:
        """The state before the first token."""

    @abstractmethod
    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One more token (B,) -> the decoder's output (B, C), and the next state; `state` stays valid."""

    @abstractmethod
    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        """Teacher forcing: target input (B, T) -> the decoder's outputs (B, T, C)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The decoder's outputs (..., C) -> scores of every target token (..., V), before softmax."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: source (B, S) and target input (B, T) -> the decoder's outputs (B, T, C).

        The projection to the vocabulary is `logits`, so that a loss need not pay it for padding.
        """
        check_ids("target", target, self.target_size)
        memory = self.encode(source)
        if len(source) != len(target):
            raise RegardError(
                f"forward: {len(source)} sources against {len(target)} targets; each source has one target."
            )
        return self.decode(memory, target)

    def step(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One more token (B,) -> logits (B, V) of the one after it, and the next state. The old state stays valid."""
        hidden, following = self.advance(memory, state, tokens)
        return self.logits(hidden), following

    def settings(self) -> dict[str, Any]:
        """What rebuilds the model: `build(**model.settings())`, all of it fit for JSON, also after `regard.prune`."""
        left = {
            name: module.num_heads
            for name, module in self.named_modules()
            if isinstance(module, MultiHeadAttention) and module.query.out_features < module.query.in_features
        }
        return {**self._settings, "heads_left": left} if left else dict(self._settings)

    _settings: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def check_ids(name: str, ids: Tensor, size: int) -> Tensor:
    """The ids on the host, copied once; refuse a tensor that is no batch of token ids."""
    if ids.ndim != 2 or ids.is_floating_point() or 0 in ids.shape:
        raise RegardError(
            f"{name}: token ids are integers (batch, length) with at least one token, got {ids.dtype} of shape "
            f"{tuple(ids.shape)}. Pad shorter sentences on the right with 0; one sentence is ids[None]."
        )
    near = ids.cpu()
    low, high = (int(edge) for edge in near.aminmax())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise RegardError(f"{name}: token id {wrong}, but the vocabulary has ids 0 to {size - 1}. Is it another's?")
    return near


def real_tokens(source: Tensor, size: int) -> tuple[Tensor, Mask | None]:
    """Which ids (B, S) are no padding, and a padding mask; None instead of a mask if all are real."""
    real = check_ids("source", source, size) != PAD
    return to_device(real, source.device), None if bool(real.all()) else padding(real)
