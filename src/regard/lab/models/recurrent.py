"""Recurrent encoder-decoders: without attention, with Bahdanau's or Luong's attention, or with any other mechanism."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.lab.models.translator import Memory, State, Translator, real_tokens
from regard.masks import Mask
from regard.nn import (
    Cells,
    CrossAttention,
    Dropout,
    Embedding,
    MultiHeadAttention,
    ProjectedKV,
    RecurrentEncoder,
    attention_for,
)

Mechanism = str | Mapping[str, Any]
#: Standard deviation of new embeddings. With 1.0 attention is learned late (docs/log.md).
EMBEDDING_STD = 0.3


class RecurrentTranslator(Translator):
    """The common part of recurrent encoder-decoders: embeddings, the encoder, and the cells of the decoder.

    `source_size` and `target_size` are the numbers of tokens of the vocabularies, and `width` is that of embeddings and
    states. `cell` is "lstm" or "gru". With `bidirectional` the encoder reads in both directions, each with half of the
    width.

    The lowest cell of the decoder has two inputs. `input_width` is the width of the input that is known for all steps
    before decoding; `feed_width` that of the input from the previous step. `dropout` acts on outputs and between
    layers. `embedding_dropout` acts on embeddings. It is 0 by default, because it slows a short training most.

    `State.carried` is a tuple that begins with the states of the cells, the lowest first; `cells[-1][0]` is the output
    (B, C) of the highest cell.
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
        embedding = partial(Embedding, embed_dim=width, dropout=embedding_dropout, scale=False, std=EMBEDDING_STD)
        self.source_embedding, self.target_embedding = embedding(source_size), embedding(target_size)
        self.encoder = RecurrentEncoder(width, width, layers, cell, bidirectional, dropout)
        self.cells = Cells(input_width, width, layers, cell, feed_width, dropout)
        self.dropout = Dropout(dropout)
        self.projection = nn.Linear(width, target_size)

    def encode(self, source: Tensor) -> Memory:
        real, mask = real_tokens(source, self.source_size)
        states, final = self.encoder(self.source_embedding(source), real.sum(1).clamp_min(1))
        return Memory(states, real, self._keys(states, mask), final)

    def start(self, memory: Memory) -> State:
        return State((self.cells.first(memory.last_state),))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)

    def _keys(self, states: Tensor, mask: Mask | None) -> tuple[ProjectedKV, ...]:
        """The keys that the decoder attends to."""
        return ()

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings of one token for each row, (B,) -> (B, C)."""
        return self.target_embedding(tokens[:, None])[:, 0]


@checked
class FixedVectorTranslator(RecurrentTranslator):
    """Without attention: the decoder sees the source only through one vector c, an input of every step.

    s_t = cell([e_t; c], s_{t-1}); output tanh(W [s_t; c; e_t]) (Cho et al. 2014, arXiv:1406.1078; Sutskever et
    al. 2014, arXiv:1409.3215, use c only as the first state). Attention was invented to remove this bottleneck.

    >>> import torch
    >>> from regard.lab import FixedVectorTranslator
    >>> model = FixedVectorTranslator(source_size=9, target_size=7, width=8)
    >>> memory = model.encode(torch.tensor([[5, 4, 8, 6, 3]]))
    >>> memory.final.shape, memory.keys  # for a source of any length
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

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded, final = self._embedded(tokens), memory.last_state
        projected = self.cells.project(torch.cat((embedded, final), -1))
        cells = self.cells(projected, None, state.carried[0])
        return self._output(embedded, cells[-1][0], final), State((cells,), state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        embedded = self.target_embedding(target)
        final = memory.last_state[:, None].expand_as(embedded)
        states = self.cells.whole(torch.cat((embedded, final), -1), self.start(memory).carried[0])
        return self._output(embedded, states, final)

    def _output(self, embedded: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """tanh(W [s; c; e]) of one step, (B, C) each, or of all steps, (B, T, C) each."""
        return self.dropout(torch.tanh(self.readout(torch.cat((state, final, embedded), -1))))


class RecurrentAttentionTranslator(RecurrentTranslator):
    """The common part of recurrent decoders with attention: `bridge` attends, and steps run one after the other.

    A subclass defines one step, and the decoder's output from the results of steps. `sizes` are the positional
    arguments of `RecurrentTranslator`, the third is the width. `bridge_heads` is the number of heads of the attention,
    and `feed_width` the width of what a step hands to the next one.
    """

    cross_attention = "bridge"

    def __init__(self, *sizes: Any, attention: Mechanism, bridge_heads: int, feed_width: int) -> None:
        width = sizes[2]
        super().__init__(*sizes, input_width=width, feed_width=feed_width)
        self.bridge = bridge_for(attention, width, bridge_heads)

    @abstractmethod
    def _step(self, memory: Memory, projected: Tensor, carried: Any, position: int) -> tuple[tuple[Tensor, ...], Any]:
        """One step from the projected embedding (B, gates): tensors (B, C) for `_output`, and what is carried on."""

    @abstractmethod
    def _output(self, embedded: Tensor, *results: Tensor) -> Tensor:
        """The decoder's output from embeddings (..., C) and the results of their steps (..., C)."""

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded = self._embedded(tokens)
        results, carried = self._step(memory, self.cells.project(embedded), state.carried, state.length)
        return self._output(embedded, *results), State(carried, state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        embedded, carried, steps = self.target_embedding(target), self.start(memory).carried, []
        for position, projected in enumerate(self.cells.project(embedded).unbind(1)):
            results, carried = self._step(memory, projected, carried, position)
            steps.append(results)
        return self._output(embedded, *(torch.stack(results, 1) for results in zip(*steps, strict=True)))

    def _keys(self, states: Tensor, mask: Mask | None) -> tuple[ProjectedKV, ...]:
        return (self.bridge.keys(states, mask=mask),)

    def _context(self, memory: Memory, state: Tensor, position: int) -> Tensor:
        """The context (B, C) that the state (B, C) of one step attends to."""
        return self.bridge(state[:, None], memory.source_keys, start=position).output[:, 0]


@checked
class BahdanauTranslator(RecurrentAttentionTranslator):
    """The previous state is the query: c_t = attend(s_{t-1}), s_t = cell([e_t; c_t], s_{t-1}).

    The output is tanh(W [s_t; c_t; e_t]). Bahdanau, Cho & Bengio 2015, arXiv:1409.0473. The keys are projected once
    for a source. `attention` is any mechanism of the catalog; with `bridge_heads` above 1 a `MultiHeadAttention`
    computes it. The paper has a GRU (`cell="gru"`) and a maxout before the softmax, where this has tanh.

    >>> import torch
    >>> from regard.lab import BahdanauTranslator, attention_of
    >>> model = BahdanauTranslator(source_size=9, target_size=7, width=8, cell="gru")
    >>> attention_of(model, torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]]))
    {'bridge': AttentionMap(1 x 1 heads x 2 queries x 3 keys)}
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
        attention: Mechanism = "bahdanau",
        bridge_heads: Size = 1,
    ) -> None:
        sizes = (source_size, target_size, width, layers, cell, bidirectional, dropout, embedding_dropout)
        super().__init__(*sizes, attention=attention, bridge_heads=bridge_heads, feed_width=width)
        self.readout = nn.Linear(3 * width, width)

    def _step(self, memory: Memory, projected: Tensor, carried: Any, position: int) -> tuple[tuple[Tensor, ...], Any]:
        (cells,) = carried
        context = self._context(memory, cells[-1][0], position)
        cells = self.cells(projected, context, cells)
        return (cells[-1][0], context), (cells,)

    def _output(self, embedded: Tensor, *results: Tensor) -> Tensor:
        state, context = results
        return self.dropout(torch.tanh(self.readout(torch.cat((state, context, embedded), -1))))


@checked
class LuongTranslator(RecurrentAttentionTranslator):
    """The current state is the query: c_t = attend(h_t). The output is the attentional vector a_t = tanh(W [c_t; h_t]).

    Luong, Pham & Manning 2015, arXiv:1508.04025, section 3. With `input_feeding` (section 3.3) a_{t-1} is an input of
    the lowest cell, h_t = cell([e_t; a_{t-1}], h_{t-1}), from a_0 = 0; without it all steps run in parallel.

    >>> import torch
    >>> from regard.lab import LuongTranslator
    >>> model = LuongTranslator(source_size=9, target_size=7, width=8, attention="luong_dot")
    >>> hidden = model(torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]]))  # a_1 and a_2
    >>> hidden.shape, bool((hidden.abs() <= 1).all()), model.logits(hidden).shape
    (torch.Size([1, 2, 8]), True, torch.Size([1, 2, 7]))
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
        attention: Mechanism = "luong_general",
        bridge_heads: Size = 1,
        input_feeding: bool = True,
    ) -> None:
        sizes = (source_size, target_size, width, layers, cell, bidirectional, dropout, embedding_dropout)
        feed_width = width if input_feeding else 0
        super().__init__(*sizes, attention=attention, bridge_heads=bridge_heads, feed_width=feed_width)
        self.input_feeding = input_feeding
        self.attentional = nn.Linear(2 * width, width)

    def start(self, memory: Memory) -> State:
        (cells,) = super().start(memory).carried
        return State((cells, torch.zeros_like(cells[-1][0])))

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        if self.input_feeding:
            return super().decode(memory, target)
        states = self.cells.whole(self.target_embedding(target), self.start(memory).carried[0])
        return self._attentional_vector(self.bridge(states, memory.source_keys, start=0).output, states)

    def _step(self, memory: Memory, projected: Tensor, carried: Any, position: int) -> tuple[tuple[Tensor, ...], Any]:
        cells, previous = carried
        cells = self.cells(projected, previous if self.input_feeding else None, cells)
        vector = self._attentional_vector(self._context(memory, cells[-1][0], position), cells[-1][0])
        return (vector,), (cells, vector)

    def _output(self, embedded: Tensor, *results: Tensor) -> Tensor:
        return results[0]

    def _attentional_vector(self, context: Tensor, state: Tensor) -> Tensor:
        """a = tanh(W [c; h]) of one step, (B, C) each, or of all steps, (B, T, C) each."""
        return self.dropout(torch.tanh(self.attentional(torch.cat((context, state), -1))))


def bridge_for(attention: Mechanism, width: int, num_heads: int = 1) -> CrossAttention | MultiHeadAttention:
    """The attention of a recurrent decoder; several heads add query, key, value and output projections.

    `width` is that of the states, of the decoder and of the encoder.
    """
    if num_heads == 1:
        return CrossAttention(attention_for("cross", attention, head_dim=width), width, width)
    head_attention = attention_for("cross", attention, num_heads=num_heads, head_dim=max(1, width // num_heads))
    bridge = MultiHeadAttention(width, num_heads, attention=head_attention)
    bridge.is_cross_attention = True
    return bridge
