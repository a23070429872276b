"""The Transformer as a translator (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.lab.models.translator import Memory, State, Translator, real_tokens
from regard.nn import DecoderCache, Transformer, TransformerConfig


@checked
class TransformerTranslator(Translator):
    """Encoder and decoder without recurrence (Vaswani et al. 2017, arXiv:1706.03762).

    `blueprint` describes the layers, with their attention mechanisms and positions. With `tied` the last projection
    shares its weights with the target embeddings (Press & Wolf 2017, arXiv:1608.05859). This halves the vectors of
    target words, but in a training of minutes it learns later. The state holds the keys and values of earlier
    target tokens. The memory holds those of the source, projected once.

    >>> import torch
    >>> from regard.lab import TransformerTranslator
    >>> model = TransformerTranslator.of(source_size=9, target_size=7, width=8, num_heads=2, tied=True)
    >>> model.logits(model(torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]]))).shape
    torch.Size([1, 2, 7])
    """

    def __init__(
        self, source_size: Size, target_size: Size, blueprint: TransformerConfig, layers: Size = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.source_size, self.target_size = source_size, target_size
        self.transformer = Transformer(
            blueprint.encoder(layers, vocab_size=source_size), blueprint.decoder(layers, vocab_size=target_size)
        )
        self.projection = nn.Linear(blueprint.embed_dim, target_size, bias=not tied)
        if tied:
            embedding = self.transformer.decoder.embedding
            assert embedding is not None, "a translator's decoder takes ids"
            self.projection.weight = embedding.table.weight  # type: ignore[assignment]
        self.cross_attention = f"transformer.decoder.layers.{layers - 1}.cross_attention"

    @classmethod
    def of(
        cls,
        source_size: int,
        target_size: int,
        *,
        width: int,
        layers: int = 2,
        tied: bool = False,
        attention: str | Mapping[str, Any] = "full",
        **options: Any,
    ) -> TransformerTranslator:
        """Build it from numbers and names: the fields of `TransformerConfig` as keyword arguments.

        The sizes are those of the two vocabularies. `layers` is the number in the encoder, and in the decoder.
        """
        blueprint = TransformerConfig(width, attention=attention, **options)
        return cls(source_size, target_size, blueprint, layers, tied)

    def encode(self, source: Tensor) -> Memory:
        real, mask = real_tokens(source, self.source_size)
        states = self.transformer.encoder(source, mask)
        return Memory(states, real, self.transformer.decoder.keys(states, mask))

    def start(self, memory: Memory) -> State:
        return State(())

    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        past = DecoderCache(state.carried) if state.carried else None
        hidden, following = self.transformer.decoder.advance(tokens[:, None], memory.keys, past)
        return hidden[:, 0], State(following.keys, state.length + 1)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        return self.transformer.decoder(target, memory.keys)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)
