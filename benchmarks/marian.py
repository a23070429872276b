"""A MarianMTModel of transformers with the weights of one of our Transformers, which makes it the same function."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from regard.encodings import Sinusoidal
from regard.lab import TransformerTranslator, build
from regard.lab.data import BOS, EOS, PAD
from regard.nn import DecoderLayer, EncoderLayer, MultiHeadAttention

#: What neither may say, so that every translation has the length that is asked for.
BARRED = [PAD, BOS, EOS]
LONGEST = 256


def available() -> str:
    """The name and version of the peer, or "" where it is not installed."""
    try:
        return f"transformers {version('transformers')}"
    except PackageNotFoundError:
        return ""


def translator(size: int, width: int, layers: int, num_heads: int) -> TransformerTranslator:
    """Ours, of the equations that Marian has: norms behind the sublayers, sinusoidal positions."""
    model = build(
        "transformer",
        source_size=size,
        target_size=size,
        width=width,
        layers=layers,
        num_heads=num_heads,
        norm="post",
        tied=False,  # theirs has a bias of the words, as ours has where it is not tied
    )
    assert isinstance(model, TransformerTranslator)
    with torch.no_grad():
        model.projection.bias.zero_()
        model.projection.bias[BARRED] = -1e9
    return model.eval()


def peer(ours: TransformerTranslator) -> Any:
    """A MarianMTModel of the same sizes and weights; their table of positions is ours."""
    from transformers import MarianConfig, MarianMTModel

    encoder, decoder = ours.transformer.encoder, ours.transformer.decoder
    layer: Any = encoder.layers[0]
    width, heads = ours.projection.in_features, layer.self_attention.num_heads
    config = MarianConfig(
        vocab_size=ours.source_size,
        max_position_embeddings=LONGEST,
        encoder_layers=len(encoder.layers),
        decoder_layers=len(decoder.layers),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=layer.feed_forward.inner.out_features,
        decoder_ffn_dim=layer.feed_forward.inner.out_features,
        d_model=width,
        activation_function=layer.feed_forward.activation,
        scale_embedding=True,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        decoder_start_token_id=BOS,
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        _copy(ours, model)
    return model


def _copy(ours: TransformerTranslator, theirs: Any) -> None:
    places = Sinusoidal().encode(torch.zeros(1, 1, LONGEST, ours.projection.in_features), torch.arange(LONGEST))
    for mine, other in (
        (ours.transformer.encoder, theirs.model.encoder),
        (ours.transformer.decoder, theirs.model.decoder),
    ):
        assert mine.embedding is not None and mine.embedding.factor == other.embed_scale == math.sqrt(places.shape[-1])
        other.embed_tokens.weight.copy_(mine.embedding.table.weight)
        other.embed_positions.weight.copy_(places[0, 0])
        for layer, their_layer in zip(mine.layers, other.layers, strict=True):
            _copy_layer(layer, their_layer)  # type: ignore[arg-type]
    theirs.lm_head.weight.copy_(ours.projection.weight)
    theirs.final_logits_bias.copy_(ours.projection.bias[None])


def _copy_layer(ours: EncoderLayer | DecoderLayer, theirs: Any) -> None:
    _copy_attention(ours.self_attention, theirs.self_attn)
    _copy_linear(ours.around_self.norm, theirs.self_attn_layer_norm)
    if isinstance(ours, DecoderLayer):
        assert ours.cross_attention is not None
        _copy_attention(ours.cross_attention, theirs.encoder_attn)
        _copy_linear(ours.around_cross.norm, theirs.encoder_attn_layer_norm)
    _copy_linear(ours.feed_forward.inner, theirs.fc1)
    _copy_linear(ours.feed_forward.outer, theirs.fc2)
    _copy_linear(ours.around_feed.norm, theirs.final_layer_norm)


def _copy_attention(ours: MultiHeadAttention, theirs: Any) -> None:
    for mine, other in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
        _copy_linear(getattr(ours, mine), getattr(theirs, other))


def _copy_linear(ours: Any, theirs: nn.Module) -> None:
    theirs.weight.copy_(ours.weight)
    theirs.bias.copy_(ours.bias)


def generate(model: Any, source: Tensor, beam: int, length: int) -> Tensor:
    """`generate` for `length` tokens, with its caches: ids (B, length)."""
    options = {"num_beams": beam, "do_sample": False, "max_new_tokens": length, "length_penalty": 1.0}
    found = model.generate(input_ids=source, attention_mask=(source != PAD).long(), **options)
    return found[:, 1:]
