"""A recurrent encoder-decoder with the multi-head attention of the Transformer, as in well-known tutorials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.encodings import Sinusoidal
from regard.lab.models.translator import Memory, State, Translator, real_tokens
from regard.nn import Cells, Embedding, MultiHeadAttention, RecurrentEncoder, Residual, attention_for


@checked
class HybridTranslator(Translator):
    """A bidirectional LSTM encoder with multi-head self-attention, and an LSTM decoder with multi-head cross-attention.

    Embeddings are sqrt(C) E + sinusoidal positions. Encoder: h = LSTM(x), m = norm(h + self-attention(h)); decoder:
    s = LSTM(y), output norm(s + cross-attention(s, m)). The LSTM does not read the context, so in training only the
    LSTM is sequential. The attention tutorials of TensorFlow and PyTorch have such models, without some of these parts.

    >>> import torch
    >>> from regard.lab import HybridTranslator, attention_of
    >>> model = HybridTranslator(source_size=9, target_size=7, width=8, num_heads=2)
    >>> [seen.shape for seen in attention_of(model, torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]])).values()]
    [(1, 2, 3, 3), (1, 2, 2, 3)]
    """

    cross_attention = "cross_attention_layer"

    def __init__(
        self,
        source_size: Size,
        target_size: Size,
        width: Size = 128,
        layers: Size = 1,
        dropout: float = 0.0,
        *,
        num_heads: Size = 4,
        cell: str = "lstm",
        bidirectional: bool = True,
        attention: str | Mapping[str, Any] = "full",
    ) -> None:
        super().__init__()
        self.source_size, self.target_size = source_size, target_size
        self.source_embedding = Embedding(source_size, width, Sinusoidal(), dropout)
        self.target_embedding = Embedding(target_size, width, Sinusoidal(), dropout)
        self.encoder = RecurrentEncoder(width, width, layers, cell, bidirectional, dropout)
        self.self_attention = _multi_head("encoder", attention, width, num_heads)
        self.around_self = Residual(width, "post", dropout)
        self.cells = Cells(width, width, layers, cell, dropout=dropout)
        self.cross_attention_layer = _multi_head("cross", attention, width, num_heads)
        self.around_cross = Residual(width, "post", dropout)
        self.projection = nn.Linear(width, target_size)

    def encode(self, source: Tensor) -> Memory:
        real, mask = real_tokens(source, self.source_size)
        states, final = self.encoder(self.source_embedding(source), real.sum(1).clamp_min(1))
        states = self.around_self.after(states, self.self_attention(states, mask=mask).output)
        return Memory(states, real, (self.cross_attention_layer.keys(states, mask=mask),), final)

    def start(self, memory: Memory) -> State:
        return State(self.cells.first(memory.last_state))

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded = self.target_embedding(tokens[:, None], state.length)[:, 0]
        cells = self.cells(self.cells.project(embedded), None, state.carried)
        return self._read(memory, cells[-1][0][:, None], state.length)[:, 0], State(cells, state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        states = self.cells.whole(self.target_embedding(target), self.start(memory).carried)
        return self._read(memory, states, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)

    def _read(self, memory: Memory, states: Tensor, start: int) -> Tensor:
        """LSTM states (B, T, C), the first at position `start`, -> outputs of the decoder (B, T, C)."""
        seen = self.cross_attention_layer(states, memory.source_keys, start=start)
        return self.around_cross.after(states, seen.output)


def _multi_head(role: str, attention: str | Mapping[str, Any], width: int, num_heads: int) -> MultiHeadAttention:
    """The attention of a role, "encoder" or "cross".

    `attention` is a mechanism for both (a name, or a mapping with "name"), or a mapping from roles to mechanisms. A
    role that it lacks has full attention.
    """
    if isinstance(attention, Mapping) and "name" not in attention:
        attention = attention.get(role, "full")
    head_attention = attention_for(role, attention, num_heads=num_heads, head_dim=max(1, width // num_heads))
    module = MultiHeadAttention(width, num_heads, attention=head_attention)
    module.is_cross_attention = role == "cross"
    return module
