"""`read_pair`: every attention map of translators for one sentence pair, with the pieces of both sides, to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.base.errors import RegardError
from regard.hf import watch
from regard.lab.data.tokenizer import SPACE
from regard.lab.data.vocabulary import BOS, EOS
from regard.lab.data.words import begins_spaceless
from regard.lab.decoding.alignment import Links
from regard.lab.decoding.search import evaluating
from regard.lab.evaluation.dependence import source_gradients
from regard.maps import AttentionMap, DenseMap
from regard.stats.text_reading import TextReading

if TYPE_CHECKING:
    from regard.lab.data.corpus import Pair
    from regard.lab.data.tokenizer import Tokenizer
    from regard.lab.evaluation.scores import TranslationSystem
    from regard.lab.models.translator import Translator

#: The name of maps of models without attention.
GRADIENT = "gradient"
#: An alignment as `inspection` writes it: source, target, weights, reading, gold.
WrittenAlignment = Mapping[str, Any]


class PairReading(NamedTuple):
    """The maps of a sentence pair with its pieces, and its gold links (query, key, sure), if they are known.

    `aligned` is one of `regard.lab.decoding.alignment.READINGS`, or "" for self-attention.
    """

    reading: TextReading
    gold: list[tuple[int, int, bool]]
    aligned: str = ""


def read_pair(systems: Mapping[str, TranslationSystem], pair: Pair, parts: bool = False) -> list[PairReading]:
    """The cross-attention of systems, by name, for one sentence pair, under teacher forcing with its target.

    Systems that split the pair into the same pieces share one reading. Its queries are the pieces of the target, each
    at the step that predicts it. Its keys are the pieces of the source. Both end with the end of sentence. With `parts`
    the self-attention of encoder and decoder follows, one reading each. For a system without attention the map
    has the gradients of its output words (`source_gradients`), divided by their sum over the row.

    >>> from regard import lab
    >>> from regard.lab.data import Pair, WordTokenizer
    >>> from types import SimpleNamespace
    >>> words = WordTokenizer.train(["a b"])
    >>> model = lab.build("bahdanau", source_size=6, target_size=6, width=8)
    >>> system = SimpleNamespace(model=model, source_tokenizer=words, target_tokenizer=words)
    >>> (pair_reading,) = read_pair({"Bahdanau": system}, Pair("a b", "b", gold=frozenset({(1, 0)})))
    >>> pair_reading.reading.profile.tokens, pair_reading.reading.profile.query_tokens, pair_reading.gold
    (['a', 'b', '</s>'], ['b', '</s>'], [(0, 1, True)])
    """
    # the maps of systems that split the pair into the same pieces (source, target)
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, AttentionMap]] = {}
    gold, rest, members = {}, [], {}  # `gold` and `members` (names of systems) have the keys of `groups`
    for name, system in systems.items():
        ids = _ids(system.source_tokenizer, pair.source), _ids(system.target_tokenizer, pair.target)
        source = _labels(system.source_tokenizer, [*ids[0], EOS])
        target = _labels(system.target_tokenizer, [*ids[1], EOS])
        encoder, decoder, cross = _maps(system.model, *ids)
        names = [name] if len(cross) == 1 else [f"{name}, layer {n}" for n in range(len(cross))]
        names = [f"{name} ({GRADIENT})"] if GRADIENT in cross else names
        groups.setdefault((source, target), {}).update(zip(names, cross.values(), strict=True))
        members.setdefault((source, target), []).append(name)
        gold[source, target] = _links_of_pieces(pair.gold or frozenset(), system, *ids)
        decoder_inputs = _labels(system.target_tokenizer, [BOS, *ids[1]])
        for part, maps, tokens in (("Encoder", encoder, source), ("Decoder", decoder, decoder_inputs)):
            if parts and maps:
                rest.append(PairReading(TextReading.of(f"{part}: {pair.source}", maps, tokens, model=name), []))
    aligned = [
        _aligned(pair.source, maps, *sides, gold[sides], model=", ".join(members[sides]))
        for sides, maps in groups.items()
    ]
    return aligned + rest


def read_alignments(written: Mapping[str, WrittenAlignment]) -> PairReading:
    """Written alignments of several systems, by name, of the same words, as one reading."""
    first = next(iter(written.values()))
    # False: these weights are not negative
    maps = {
        name: DenseMap(torch.tensor(alignment["weights"])[None, None], False) for name, alignment in written.items()
    }
    gold = [(target, source, True) for source, target in first.get("gold") or ()]
    words, model = (first["source"], first["target"]), ", ".join(written)
    return _aligned(" ".join(first["source"]), maps, *words, gold, first["reading"], model)


def _aligned(
    title: str,
    maps: Mapping[str, AttentionMap],
    source: Sequence[str],
    target: Sequence[str],
    gold: list[tuple[int, int, bool]],
    aligned: str = "output",
    model: str = "",
) -> PairReading:
    """The reading of maps by name, whose queries are the target words or pieces and whose keys those of the source.

    `gold` and `aligned` are those of `PairReading`; `model` are the names of the systems.
    """
    reading = TextReading.of(title, maps, source, queries=target, numbers=range(len(maps)), model=model)
    return PairReading(reading, gold, aligned)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text; an error if it has none."""
    ids = list(tokenizer.encode(text))
    if not ids:
        raise RegardError(f"read_pair: {text!r} has no words. Give a source and a target of at least one word each.")
    return ids


def _maps(model: Translator, source: list[int], target: list[int]) -> tuple[dict[str, AttentionMap], ...]:
    """The maps of the encoder, of the decoder, and of the cross-attention."""
    source_ids, target_ids = (
        torch.tensor([[*source, EOS]]).to(model.device),
        torch.tensor([[BOS, *target, EOS]]).to(model.device),
    )
    if model.cross_attention is None:
        norms = source_gradients(model, source_ids, target_ids)
        shares = norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
        return {}, {}, {GRADIENT: DenseMap(shares[:, None].detach(), False)}
    with evaluating(model), watch(model, verify=False) as seen:
        model(source_ids, target_ids[:, :-1])
    return seen.encoder.maps, seen.decoder.maps, seen.cross.maps


def _links_of_pieces(
    gold: Links, system: TranslationSystem, source: Sequence[int], target: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """Links between words (source, target), as links between all pieces of these words (target, source)."""
    words = [system.source_tokenizer.word_numbers(source), system.target_tokenizer.word_numbers(target)]
    return [(t, s, True) for t, y in enumerate(words[1]) for s, x in enumerate(words[0]) if (x, y) in gold]


def _labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Readable pieces; a piece inside a word begins with ##.

    Without any sign of a space the pieces are whole words, and stay as they are.
    """
    pieces = tokenizer.pieces(ids)
    if not any(piece.startswith(SPACE) for piece in pieces):
        return tuple(pieces)
    inside = (piece[0].isalnum() and not begins_spaceless(piece) for piece in pieces)
    return tuple(f"##{p}" if within else p.removeprefix(SPACE) or p for p, within in zip(pieces, inside, strict=True))
