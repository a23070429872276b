"""A sentence pair as a translator reads it: every attention as a map beside the pieces it is of, to be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.data.tokenizer import SPACE
from regard.data.vocabulary import BOS, EOS
from regard.data.words import begins_spaceless
from regard.errors import RegardError
from regard.hf import watch
from regard.maps import AttentionMap
from regard.maps.stored import tabled
from regard.seq2seq.decoding.alignment import Links
from regard.seq2seq.decoding.search import evaluating
from regard.seq2seq.evaluation.dependence import source_gradients
from regard.stats import TextReading

if TYPE_CHECKING:
    from regard.data.corpus import Pair
    from regard.data.tokenizer import Tokenizer
    from regard.seq2seq.evaluation.scores import TranslationSystem
    from regard.seq2seq.models.translator import Translator

#: What the rows of a model without attention are.
GRADIENT = "gradient"
#: As `inspection` writes them: source, target, weights, reading, gold.
Written = Mapping[str, Any]


class PairReading(NamedTuple):
    """A reading of a pair, gold links (query, key, sure) where they are known, and how its rows were read.

    `aligned` is one of `regard.seq2seq.decoding.alignment.READINGS`, or empty for a text that looks at itself.
    """

    reading: TextReading
    gold: list[tuple[int, int, bool]]
    aligned: str = ""


def read_pair(systems: Mapping[str, TranslationSystem], pair: Pair, parts: bool = False) -> list[PairReading]:
    """What systems, by name, look at in the source as they are made to say the target of a pair.

    Mechanisms that cut the pair into the same pieces stand side by side in one reading. Its queries are the
    pieces of the target, each at the step that predicts it; its keys are those of the source; both end with the
    end of sentence. With `parts` the encoder and the decoder of every system follow, each as a reading. A
    system without attention shows how much each piece it says depends on each of the source (`source_gradients`), as
    shares of a row.

    >>> from regard import seq2seq
    >>> from regard.data import Pair, Words
    >>> from types import SimpleNamespace
    >>> words = Words.train(["a b"])
    >>> model = seq2seq.build("bahdanau", source_size=6, target_size=6, width=8)
    >>> system = SimpleNamespace(model=model, source_tokenizer=words, target_tokenizer=words)
    >>> (looked,) = read_pair({"Bahdanau": system}, Pair("a b", "b", gold=frozenset({(1, 0)})))
    >>> looked.reading.profile.tokens, looked.reading.profile.query_tokens, looked.gold
    (['a', 'b', '</s>'], ['b', '</s>'], [(0, 1, True)])
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, AttentionMap]] = {}
    gold, rest = {}, []
    for name, system in systems.items():
        ids = _ids(system.source_tokenizer, pair.source), _ids(system.target_tokenizer, pair.target)
        source = _labels(system.source_tokenizer, [*ids[0], EOS])
        target = _labels(system.target_tokenizer, [*ids[1], EOS])
        encoder, decoder, cross = _maps(system.model, *ids)
        names = [name] if len(cross) == 1 else [f"{name}, layer {n}" for n in range(len(cross))]
        names = [f"{name} ({GRADIENT})"] if GRADIENT in cross else names
        groups.setdefault((source, target), {}).update(zip(names, cross.values(), strict=True))
        gold[source, target] = _links_of_pieces(pair.gold or frozenset(), system, *ids)
        taken = _labels(system.target_tokenizer, [BOS, *ids[1]])
        for part, maps, tokens in (("Encoder", encoder, source), ("Decoder", decoder, taken)):
            if parts and maps:
                rest.append(PairReading(TextReading.of(f"{part}: {pair.source}", maps, tokens), []))
    return [_aligned(pair.source, maps, *sides, gold[sides]) for sides, maps in groups.items()] + rest


def read_alignments(written: Mapping[str, Written]) -> PairReading:
    """Alignments of the same words by several systems, by name, side by side."""
    one = next(iter(written.values()))
    maps = {name: tabled(torch.tensor(each["weights"])[None, None]) for name, each in written.items()}
    gold = [(target, source, True) for source, target in one.get("gold") or ()]
    return _aligned(" ".join(one["source"]), maps, one["source"], one["target"], gold, one["reading"])


def _aligned(
    title: str,
    maps: Mapping[str, AttentionMap],
    source: Sequence[str],
    target: Sequence[str],
    gold: list[tuple[int, int, bool]],
    aligned: str = "output",
) -> PairReading:
    return PairReading(TextReading.of(title, maps, source, queries=target, numbers=range(len(maps))), gold, aligned)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found = list(tokenizer.encode(text))
    if not found:
        raise RegardError(f"read_pair: {text!r} has no words. Give a source and a target of at least one word each.")
    return found


def _maps(model: Translator, source: list[int], target: list[int]) -> tuple[dict[str, AttentionMap], ...]:
    """The maps of encoder, decoder and between them."""
    read, said = torch.tensor([[*source, EOS]]).to(model.device), torch.tensor([[BOS, *target, EOS]]).to(model.device)
    if model.cross_attention is None:
        norms = source_gradients(model, read, said)
        shares = norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
        return {}, {}, {GRADIENT: tabled(shares[:, None])}
    with evaluating(model), watch(model, verify=False) as seen:
        model(read, said[:, :-1])
    return seen.encoder.maps, seen.decoder.maps, seen.cross.maps


def _links_of_pieces(
    gold: Links, system: TranslationSystem, source: Sequence[int], target: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """Links between words (source, target) as links between all of their pieces (target, source)."""
    words = [system.source_tokenizer.word_numbers(source), system.target_tokenizer.word_numbers(target)]
    return [(t, s, True) for t, y in enumerate(words[1]) for s, x in enumerate(words[0]) if (x, y) in gold]


def _labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Pieces as people read them; those inside a word are marked ##."""
    pieces = tokenizer.pieces(ids)
    if not any(piece.startswith(SPACE) for piece in pieces):
        return tuple(pieces)
    inside = (piece[0].isalnum() and not begins_spaceless(piece) for piece in pieces)
    return tuple(f"##{p}" if within else p.removeprefix(SPACE) or p for p, within in zip(pieces, inside, strict=True))
