"""Recurrent encoder-decoders: without attention, with Bahdanau's and with Luong's, or any mechanism in their place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import Size, checked
from regard.nn import Bridge, Cells, CellStates, Dropout, Embedding, MultiHeadAttention, RecurrentEncoder, attention_for
from regard.seq2seq.models.translator import Memory, State, Translator, real_tokens

Mechanism = str | Mapping[str, Any]
#: Deviation of the words' numbers at first. With 1 attention learns late (docs/log.md).
WORD_STD = 0.3


class RecurrentTranslator(Translator):
    """What recurrent encoder-decoders share: embeddings, the encoder, the decoder's cells, and how they start.

    `input_width` and `feed_width` are what the lowest cell is given: inputs that are known for all steps at
    once, and what the step before made. `dropout` is that of outputs and between layers; words keep all their
    numbers unless `embedding_dropout` says otherwise, for dropping theirs costs a short training most.
    """

    cross_attention = None

    def __init__(
        self,
        source_size: int,
        target_size: int,
        width: int,
        layers: int,
        cell: str,
        bidirectional: bool,
        dropout: float,
        embedding_dropout: float,
        *,
        input_width: int,
        feed_width: int,
    ) -> None:
        super().__init__()
        self.source_size, self.target_size, self.width = source_size, target_size, width
        words = partial(Embedding, width=width, dropout=embedding_dropout, scale=False, std=WORD_STD)
        self.source_embedding, self.target_embedding = words(source_size), words(target_size)
        self.encoder = RecurrentEncoder(width, width, layers, cell, bidirectional, dropout)
        self.cells = Cells(input_width, width, layers, cell, feed_width, dropout)
        self.dropout = Dropout(dropout)
        self.projection = nn.Linear(width, target_size)

    def encode(self, source: Tensor) -> Memory:
        real, mask = real_tokens(source, self.source_size)
        states, final = self.encoder(self.source_embedding(source), real.sum(1).clamp_min(1))
        bridge = self._bridge()
        return Memory(states, real, () if bridge is None else (bridge.keys(states, mask=mask),), final)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)

    def _bridge(self) -> Bridge | MultiHeadAttention | None:
        """The attention of the decoder to the encoder, if it has one."""
        return None

    def _first(self, memory: Memory) -> CellStates:
        """The states of all cells before the first token."""
        return self.cells.first(_final(memory))

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The vectors of one token a row, (B,) -> (B, C)."""
        return self.target_embedding(tokens[:, None])[:, 0]


@checked
class FixedVectorTranslator(RecurrentTranslator):
    """Without attention: all the decoder knows of the source is one vector c, fed at every step.

    s_t = cell([e_t; c], s_{t-1}); output tanh(W [s_t; c; e_t]) (Cho et al. 2014, arXiv:1406.1078; Sutskever et
    al. 2014, arXiv:1409.3215 give c as the first state alone). The bottleneck that attention was invented for.

    >>> import torch
    >>> from regard.seq2seq import FixedVectorTranslator
    >>> model = FixedVectorTranslator(source_size=9, target_size=7, width=8)
    >>> memory = model.encode(torch.tensor([[5, 4, 8, 6, 3]]))
    >>> memory.final.shape, memory.keys  # however long the source is
    (torch.Size([1, 8]), ())
    """

    def __init__(
        self,
        source_size: Size,
        target_size: Size,
        width: Size = 128,
        layers: Size = 1,
        dropout: float = 0.0,
        *,
        cell: str = "lstm",
        bidirectional: bool = True,
        embedding_dropout: float = 0.0,
    ) -> None:
        sizes = {"input_width": 2 * width, "feed_width": 0}
        super().__init__(
            source_size, target_size, width, layers, cell, bidirectional, dropout, embedding_dropout, **sizes
        )
        self.readout = nn.Linear(3 * width, width)

    def start(self, memory: Memory) -> State:
        return State((self._first(memory),))

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded, final = self._embedded(tokens), _final(memory)
        projected = self.cells.project(torch.cat((embedded, final), -1))
        cells = self.cells(projected, None, state.carried[0])
        return self._out(cells[-1][0], final, embedded), State((cells,), state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        embedded = self.target_embedding(target)
        final = _final(memory)[:, None].expand_as(embedded)
        states = self.cells.whole(torch.cat((embedded, final), -1), self._first(memory))
        return self._out(states, final, embedded)

    def _out(self, state: Tensor, final: Tensor, embedded: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.readout(torch.cat((state, final, embedded), -1))))


@checked
class BahdanauTranslator(RecurrentTranslator):
    """The previous state asks: c_t = attend(s_{t-1}), s_t = cell([e_t; c_t], s_{t-1}), output tanh(W [s_t; c_t; e_t]).

    Bahdanau, Cho & Bengio 2015, arXiv:1409.0473. The keys are projected once for a source. `attention` is any
    mechanism of the catalogue; with `bridge_heads` above 1 it is that of a `MultiHeadAttention`. The paper has a
    GRU (`cell="gru"`) and a maxout before the softmax, where this has tanh.

    >>> import torch
    >>> from regard.seq2seq import BahdanauTranslator, attention_of
    >>> model = BahdanauTranslator(source_size=9, target_size=7, width=8, cell="gru")
    >>> attention_of(model, torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]]))
    {'bridge': AttentionMap(1 x 1 heads x 2 queries x 3 keys)}
    """

    cross_attention = "bridge"

    def __init__(
        self,
        source_size: Size,
        target_size: Size,
        width: Size = 128,
        layers: Size = 1,
        dropout: float = 0.0,
        *,
        cell: str = "lstm",
        bidirectional: bool = True,
        embedding_dropout: float = 0.0,
        attention: Mechanism = "bahdanau",
        bridge_heads: Size = 1,
    ) -> None:
        sizes = {"input_width": width, "feed_width": width}
        super().__init__(
            source_size, target_size, width, layers, cell, bidirectional, dropout, embedding_dropout, **sizes
        )
        self.bridge = bridge_for(attention, width, bridge_heads)
        self.readout = nn.Linear(3 * width, width)

    def _bridge(self) -> Bridge | MultiHeadAttention:
        return self.bridge

    def start(self, memory: Memory) -> State:
        return State((self._first(memory),))

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded = self._embedded(tokens)
        projected = self.cells.project(embedded)
        context, cells = self._step(memory, projected, state.carried[0], state.length)
        return self._out(cells[-1][0], context, embedded), State((cells,), state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        embedded = self.target_embedding(target)
        cells, contexts, states = self._first(memory), [], []
        for place, projected in enumerate(self.cells.project(embedded).unbind(1)):
            context, cells = self._step(memory, projected, cells, place)
            contexts.append(context)
            states.append(cells[-1][0])
        return self._out(torch.stack(states, 1), torch.stack(contexts, 1), embedded)

    def _step(self, memory: Memory, projected: Tensor, cells: CellStates, place: int) -> tuple[Tensor, CellStates]:
        context = self.bridge(cells[-1][0][:, None], memory.keys[0], start=place)[:, 0]
        return context, self.cells(projected, context, cells)

    def _out(self, state: Tensor, context: Tensor, embedded: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.readout(torch.cat((state, context, embedded), -1))))


@checked
class LuongTranslator(RecurrentTranslator):
    """The current state asks: c_t = attend(h_t), and the output is the attentional vector a_t = tanh(W [c_t; h_t]).

    Luong, Pham & Manning 2015, arXiv:1508.04025, section 3. With `input_feeding` (section 3.3) a_{t-1} is fed to the
    lowest cell, h_t = cell([e_t; a_{t-1}], h_{t-1}), from a_0 = 0; without it all steps are one call, in parallel.

    >>> import torch
    >>> from regard.seq2seq import LuongTranslator
    >>> model = LuongTranslator(source_size=9, target_size=7, width=8, attention="luong_dot")
    >>> hidden = model(torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]]))  # a_1 and a_2
    >>> hidden.shape, bool((hidden.abs() <= 1).all()), model.logits(hidden).shape
    (torch.Size([1, 2, 8]), True, torch.Size([1, 2, 7]))
    """

    cross_attention = "bridge"

    def __init__(
        self,
        source_size: Size,
        target_size: Size,
        width: Size = 128,
        layers: Size = 1,
        dropout: float = 0.0,
        *,
        cell: str = "lstm",
        bidirectional: bool = True,
        embedding_dropout: float = 0.0,
        attention: Mechanism = "luong_general",
        bridge_heads: Size = 1,
        input_feeding: bool = True,
    ) -> None:
        sizes = {"input_width": width, "feed_width": width if input_feeding else 0}
        super().__init__(
            source_size, target_size, width, layers, cell, bidirectional, dropout, embedding_dropout, **sizes
        )
        self.input_feeding = input_feeding
        self.bridge = bridge_for(attention, width, bridge_heads)
        self.attentional = nn.Linear(2 * width, width)

    def _bridge(self) -> Bridge | MultiHeadAttention:
        return self.bridge

    def start(self, memory: Memory) -> State:
        cells = self._first(memory)
        return State((cells, torch.zeros_like(cells[-1][0])))

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        projected = self.cells.project(self._embedded(tokens))
        cells, vector = state.carried
        vector, cells = self._step(memory, projected, cells, vector, state.length)
        return vector, State((cells, vector), state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        embedded, cells = self.target_embedding(target), self._first(memory)
        if not self.input_feeding:
            states = self.cells.whole(embedded, cells)
            return self._vector(self.bridge(states, memory.keys[0], start=0), states)
        vector, vectors = torch.zeros_like(cells[-1][0]), []
        for place, projected in enumerate(self.cells.project(embedded).unbind(1)):
            vector, cells = self._step(memory, projected, cells, vector, place)
            vectors.append(vector)
        return torch.stack(vectors, 1)

    def _step(
        self, memory: Memory, projected: Tensor, cells: CellStates, vector: Tensor, place: int
    ) -> tuple[Tensor, CellStates]:
        cells = self.cells(projected, vector if self.input_feeding else None, cells)
        context = self.bridge(cells[-1][0][:, None], memory.keys[0], start=place)[:, 0]
        return self._vector(context, cells[-1][0]), cells

    def _vector(self, context: Tensor, state: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.attentional(torch.cat((context, state), -1))))


def bridge_for(attention: Mechanism, width: int, num_heads: int = 1) -> Bridge | MultiHeadAttention:
    """The attention of a recurrent decoder; with several heads it has their projections."""
    if num_heads == 1:
        return Bridge(attention_for("cross", attention, width=width), width, width)
    each = attention_for("cross", attention, num_heads=num_heads, width=max(1, width // num_heads))
    bridge = MultiHeadAttention(width, num_heads, attention=each)
    bridge.is_cross_attention = True
    return bridge


def _final(memory: Memory) -> Tensor:
    assert memory.final is not None, "recurrent encoders have a last state"
    return memory.final
