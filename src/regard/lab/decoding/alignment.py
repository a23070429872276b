"""Word alignments from attention; their formats and their error rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.hf import watch
from regard.lab.data.vocabulary import BOS, EOS, PAD
from regard.lab.decoding.search import evaluating
from regard.maps import AttentionMap
from regard.nn import Attends

if TYPE_CHECKING:
    from regard.lab.data.tokenizer import Tokenizer
    from regard.lab.models.translator import Translator

#: Number of batches that are read ahead and sorted by length.
AHEAD = 8
#: Links (source word, target word), counted from 0.
Links = frozenset[tuple[int, int]]

#: The step whose attention belongs to a target word, and the title of the axis.
READINGS = {
    "output": "target word at the step that predicts it",
    "input": "target word at the step that reads it",
}


@checked
def attention_of(model: Translator, source: Tensor, target_input: Tensor) -> dict[str, AttentionMap]:
    """The map of every attention module under teacher forcing with `target_input`: module path -> map.

    `source` is (B, S), `target_input` (B, T) is [BOS, y_1 .. y_n], both padded on the right. Row t of a decoder map
    is the step that reads y_t and predicts y_{t+1}. Decoding the same tokens step by step, in a beam and in any
    batch, has the same attention. The dictionary is empty for a model without attention.

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("bahdanau", source_size=9, target_size=9, width=8)
    >>> maps = attention_of(model, torch.tensor([[5, 4, 7, 3]]), torch.tensor([[2, 6, 8]]))
    >>> maps[model.cross_attention]
    AttentionMap(1 x 1 heads x 3 queries x 4 keys)
    """
    if not any(isinstance(module, Attends) for module in model.modules()):
        return {}
    # modules of `regard.nn` give their own maps, so there is nothing to verify
    with evaluating(model), watch(model, verify=False) as seen:
        model(source, target_input)
    return seen.maps


@dataclass(frozen=True, eq=False)
class Alignment:
    """The weight of every target word on every source word: weights (target words, source words).

    A row may sum to less than 1; the rest is the weight on the end of the sentence. `reading` is the step whose
    attention belongs to a target word, see `READINGS`.

    >>> import torch
    >>> from regard.lab import Alignment
    >>> alignment = Alignment(("klein", "Haus"), ("small", "house"), torch.tensor([[0.9, 0.0], [0.2, 0.7]]))
    >>> sorted(alignment.links())
    [(0, 0), (1, 1)]
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor
    reading: str = "output"

    def links(self, threshold: float | None = None) -> Links:
        """For every target word its source word of greatest weight, or all source words of at least `threshold`.

        >>> alignment = Alignment(("a", "b"), ("x", "y"), torch.tensor([[0.1, 0.8], [0.5, 0.4]]))
        >>> sorted(alignment.links()), sorted(alignment.links(threshold=0.4))
        ([(0, 1), (1, 0)], [(0, 1), (1, 0), (1, 1)])
        """
        if not self.weights.numel():
            return frozenset()
        if threshold is not None:
            indices = (self.weights >= threshold).nonzero().tolist()
            return frozenset((source, target) for target, source in indices)
        return frozenset((source, target) for target, source in enumerate(self.weights.argmax(1).tolist()))


@checked
def align(
    model: Translator,
    tokenizers: tuple[Tokenizer, Tokenizer],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    reading: str = "output",
    name: str | None = None,
    source_words: Sequence[Sequence[int]] | None = None,
    target_words: Sequence[Sequence[int]] | None = None,
) -> list[Alignment]:
    """Word alignments of sentence pairs (ids, without BOS and EOS) from the cross-attention.

    The weights are the mean over the heads of module `name`, by default the model's last cross-attention. Pieces are
    merged to words by the sum over source pieces and the mean over target pieces. With `reading="output"` a target
    word has the attention of the step that predicts it; with "input" that of the step that reads it as input. Chen et
    al. (2020, arXiv:2004.14837) found that large Transformers align best with "input"; the small ones of example 23
    align best with "output". `source_words` and `target_words` are the word number of every piece, for
    tokenizers that cannot compute it from the pieces (see `written_words`).

    >>> from regard import lab

    >>> from regard.lab import data
    >>> words = data.WordTokenizer(["a", "b", "c"])
    >>> model = lab.build("bahdanau", source_size=7, target_size=7, width=8)
    >>> (alignment,) = lab.align(model, (words, words), [words.encode("a b c")], [words.encode("c b")])
    >>> alignment.source, alignment.target, alignment.weights.shape, bool((alignment.weights.sum(1) <= 1).all())
    (('a', 'b', 'c'), ('c', 'b'), torch.Size([2, 3]), True)
    """
    check_alignable(model, reading)
    device = model.device
    source = padded([[*ids, EOS] for ids in sources], device)
    target = padded([[BOS, *ids] for ids in targets], device)
    maps = attention_of(model, source, target)
    name = name or model.cross_attention or ""
    if name not in maps:
        raise RegardError(f"align: there is no attention module {name!r}. {nearest(name, maps)}")
    weights = maps[name].dense().mean(1).cpu()
    first = 0 if reading == "output" else 1  # row t reads y_t and predicts y_(t+1), and y_0 is BOS
    alignments = []
    source_words = source_words or [tokenizers[0].word_numbers(x) for x in sources]
    target_words = target_words or [tokenizers[1].word_numbers(y) for y in targets]
    for row, x, y, *numbers in zip(weights, sources, targets, source_words, target_words, strict=True):
        source_side, source_shares = _words_of_pieces(tokenizers[0], x, numbers[0])
        target_side, target_shares = _words_of_pieces(tokenizers[1], y, numbers[1])
        # the columns of EOS and of padding are left out
        merged = _merged(row[first : first + len(y), : len(x)], target_shares, source_shares)
        alignments.append(Alignment(source_side, target_side, merged, reading))
    return alignments


def align_texts(
    model: Translator,
    tokenizers: tuple[Tokenizer, Tokenizer],
    pairs: Iterable[tuple[str, str]],
    *,
    reading: str = "output",
    batch: int = 32,
    limit: int = 1000,
) -> Iterator[Alignment | None]:
    """The word alignments of sentence pairs, under teacher forcing with the targets.

    Words are those of the texts as written (see `Tokenizer.cut`). A pair gives None if a side is empty or has more
    than `limit` pieces.

    >>> from regard import lab

    >>> from regard.lab import data
    >>> words = data.WordTokenizer(["a", "b", "c"])
    >>> model = lab.build("bahdanau", source_size=7, target_size=7, width=8)
    >>> alignments = list(align_texts(model, (words, words), [("a b", "c"), ("", "a")]))
    >>> alignments[0].source, alignments[0].target, alignments[1]
    (('a', 'b'), ('c',), None)
    """
    check_alignable(model, reading)
    remaining = iter(pairs)
    while window := list(islice(remaining, batch * AHEAD)):
        encoded = [tuple(t.encode(text) for t, text in zip(tokenizers, pair, strict=True)) for pair in window]
        fitting = [n for n, sides in enumerate(encoded) if all(0 < len(ids) <= limit for ids in sides)]
        fitting.sort(key=lambda n: [len(ids) for ids in encoded[n]])
        done: list[Alignment | None] = [None] * len(window)
        for start in range(0, len(fitting), batch):
            places = fitting[start : start + batch]
            alignments = _align_written(
                model, tokenizers, [window[n] for n in places], [encoded[n] for n in places], reading
            )
            for place, alignment in zip(places, alignments, strict=True):
                done[place] = alignment
        yield from done


def _align_written(
    model: Translator, tokenizers: tuple[Tokenizer, Tokenizer], pairs: Any, encoded: Any, reading: str
) -> list[Alignment]:
    """`align` with the words of the texts as written, in place of those of the pieces.

    `pairs` are the texts of each pair (source, target), `encoded` their ids.
    """
    texts, ids = list(zip(*pairs, strict=True)), list(zip(*encoded, strict=True))
    words = [
        [written_words(tokenizers[side], *pair) for pair in zip(texts[side], ids[side], strict=True)] for side in (0, 1)
    ]
    alignments = align(model, tokenizers, *ids, reading=reading, source_words=words[0], target_words=words[1])
    return [
        replace(
            alignment,
            source=as_written(tokenizers[0], x, alignment.source),
            target=as_written(tokenizers[1], y, alignment.target),
        )
        for alignment, (x, y) in zip(alignments, pairs, strict=True)
    ]


def as_written(tokenizer: Tokenizer, text: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a text as written, if their number equals that of the words of the pieces; else the latter."""
    written = tuple(tokenizer.cut(text))
    return written if len(written) == len(words) else words


def written_words(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[int]:
    """For each id of a text the number of its word in `text.split()`.

    Tokenizers normalize: a character may become a space, or vanish, so the pieces may spell other words than the text.
    If the words, encoded one by one, do not give the same ids, or if the script has no spaces between words, the
    numbers are those of the pieces (`Tokenizer.word_numbers`).
    """
    if tokenizer.cut(text) != text.split():
        return tokenizer.word_numbers(ids)
    parts = [tokenizer.encode(word) for word in text.split()]
    if [piece for part in parts for piece in part] != list(ids):
        return tokenizer.word_numbers(ids)
    return [number for number, part in enumerate(parts) for _ in part]


def check_alignable(model: Translator, reading: str) -> None:
    """Raise an error for an unknown reading, and for a model without attention to the source."""
    if reading not in READINGS:
        raise RegardError(f"align: there is no reading {reading!r}. {nearest(reading, READINGS)}")
    if model.cross_attention is None:
        raise RegardError(
            "align: this model has no attention to the source, so it has no alignment. Use a model with attention, "
            "such as bahdanau."
        )


def padded(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Ids as one tensor (rows, longest), padded on the right with PAD."""
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, PAD).to(device)


def merge_pieces(weights: Tensor, target_words: Sequence[int], source_words: Sequence[int]) -> Tensor:
    """Weights between pieces (T, S) as weights between words: the sum over source pieces, the mean over target pieces.

    `target_words` and `source_words` are the word number of every piece; -1 means no word.

    >>> merge_pieces(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]), [0, 0], [0, 1, 1])
    tensor([[0.2500, 0.7500]])
    """
    if weights.shape != (len(target_words), len(source_words)):
        raise RegardError(
            f"merge_pieces: weights are {tuple(weights.shape)}; with words of {len(target_words)} target and "
            f"{len(source_words)} source pieces they must be ({len(target_words)}, {len(source_words)})."
        )
    return _merged(weights, _membership(target_words), _membership(source_words))


def _merged(weights: Tensor, target_shares: Tensor, source_shares: Tensor) -> Tensor:
    """Weights between pieces (T, S) -> weights between words.

    The shares are (words, pieces), from `_membership` or `_words_of_pieces`.
    """
    target, source = target_shares.to(weights), source_shares.to(weights)
    return (target / target.sum(1, keepdim=True)) @ weights @ source.T


def _membership(words: Sequence[int]) -> Tensor:
    """(words, pieces): 1 where a piece is part of a word, else 0. `words` is the word number of each piece, or -1."""
    numbers = torch.tensor(words, dtype=torch.int64)
    count = int(numbers.max()) + 1 if len(words) else 0
    return (numbers == torch.arange(count)[:, None]).double()


def _words_of_pieces(
    tokenizer: Tokenizer, ids: Sequence[int], numbers: Sequence[int]
) -> tuple[tuple[str, ...], Tensor]:
    """The words, and the share of every piece in each word (words, pieces).

    `numbers` is the word number of every piece; -1 means no word. In a script without spaces a piece may be part of two
    words. Its shares are those of its characters in each.
    """
    words = _words(tokenizer, ids, numbers)
    parts = tokenizer.cut(" ".join(words))
    pieces = zip(ids, numbers, strict=True)
    surfaces = ["".join(tokenizer.decode([piece]).split()) if number >= 0 else "" for piece, number in pieces]
    if parts == [word for word in words if word] or "".join(surfaces) != "".join(parts):
        return words, _membership(numbers)
    places = [place for place, part in enumerate(parts) for _ in part]  # the word of every character
    shares, start = torch.zeros(len(parts), len(ids), dtype=torch.float64), 0
    for piece, surface in enumerate(surfaces):
        # a piece without characters, such as a lone space, belongs to the word of the next character
        inside = places[start : start + len(surface)] or places[start : start + 1] * (numbers[piece] >= 0)
        for place in inside:
            shares[place, piece] += 1 / len(inside)
        start += len(surface)
    return tuple(parts), shares


def _words(tokenizer: Tokenizer, ids: Sequence[int], numbers: Sequence[int]) -> tuple[str, ...]:
    """The text of each word, decoded from its pieces together. `numbers` is the word number of every piece."""
    groups: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for piece, number in zip(ids, numbers, strict=True):
        if number >= 0:
            groups[number].append(piece)
    return tuple(tokenizer.decode(group) for group in groups)


def write_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Links as `source-target` pairs, counted from 0, in order: the format of Pharaoh, Moses and fast_align.

    >>> write_pharaoh({(1, 2), (0, 0)})
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def read_pharaoh(line: str) -> Links:
    """The links of one line.

    >>> sorted(read_pharaoh("0-0 1-2"))
    [(0, 0), (1, 2)]
    """
    links = set()
    for pair in line.split():
        source, dash, target = pair.partition("-")
        if not (dash and source.isdecimal() and target.isdecimal()):
            raise RegardError(
                f"read_pharaoh: {pair!r} is not a link. A line of links has the form source-target, such as 0-0 1-2."
            )
        links.add((int(source), int(target)))
    return frozenset(links)


def alignment_error_rate(
    predicted: Sequence[Links], sure: Sequence[Links], possible: Sequence[Links] | None = None
) -> float:
    """AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) over all sentences (Och & Ney 2003); 0 is best.

    A are the predicted links, S the sure links and P, which contains S, the possible links. By default P is S, and
    AER is 1 - F1. NaN if there are no links at all.

    >>> alignment_error_rate([{(0, 0), (1, 1)}], sure=[{(0, 0)}], possible=[{(0, 0), (1, 1)}])
    0.0
    """
    possible = sure if possible is None else possible
    if not len(predicted) == len(sure) == len(possible):
        raise RegardError(
            f"alignment_error_rate: {len(predicted)} predicted, {len(sure)} sure and {len(possible)} possible sets of "
            "links. Give one set of each for every sentence."
        )
    hits = sum(len(a & s) + len(a & (p | s)) for a, s, p in zip(predicted, sure, possible, strict=True))
    size = sum(len(a) + len(s) for a, s in zip(predicted, sure, strict=True))
    return 1 - hits / size if size else float("nan")
