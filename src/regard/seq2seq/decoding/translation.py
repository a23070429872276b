"""From lines of text to translations, in their order, in batches of alike lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from regard.checks import Count, checked
from regard.data.vocabulary import EOS, UNK
from regard.errors import RegardError
from regard.seq2seq.decoding.alignment import Alignment, align, as_written, check_alignable, padded, written_words
from regard.seq2seq.decoding.search import Hypothesis, Search

if TYPE_CHECKING:
    from regard.data.tokenizer import Tokenizer
    from regard.seq2seq.models.translator import Translator

#: Most pieces of a sentence that is translated.
LIMIT = 1000


@dataclass(frozen=True, eq=False)
class Translation:
    """A sentence and its translations, best first; of one that was not translated `skipped` says why.

    The texts differ. `alignments` has one for each text, if alignments were asked for. Of the sentence's `num_pieces`
    pieces, `num_unknown` are unknown to the tokenizer: the model reads nothing of them.

    >>> from regard.seq2seq import Translation
    >>> Translation("das Haus", texts=("the house", "a house")).text, Translation("", skipped="empty").text
    ('the house', '')
    """

    source: str
    texts: tuple[str, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    alignments: tuple[Alignment, ...] = ()
    skipped: str = ""
    num_pieces: int = 0
    num_unknown: int = 0

    @property
    def text(self) -> str:
        """The best translation; empty where there is none."""
        return self.texts[0] if self.texts else ""

    @property
    def alignment(self) -> Alignment | None:
        """The alignment of the best translation."""
        return self.alignments[0] if self.alignments else None


@checked
@dataclass(frozen=True)
class Wanted:
    """What to do with every sentence: how to search, in which batches, and what else to tell.

    `window` batches are read ahead and sorted by length. `reading` asks for alignments (see
    `regard.seq2seq.decoding.alignment.READINGS`); `replace_unknown` puts the source word that an unknown word
    is aligned to in its place (Luong et al. 2015). Sentences of more than `limit` pieces are skipped.

    >>> from regard.seq2seq import Search, Wanted
    >>> wanted = Wanted(Search(beam=4, n_best=2), batch=16)
    >>> wanted.batch * wanted.window  # sentences that are read ahead
    128
    """

    search: Search = field(default_factory=Search)
    batch: Count = 32
    window: int = 8
    limit: int = LIMIT
    reading: str | None = None
    replace_unknown: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "window", "limit"):
            if getattr(self, name) < 1:
                raise RegardError(f"translate: {name} must be at least 1, got {getattr(self, name)}.")


@checked
def translate(
    model: Translator,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    sentences: Iterable[str],
    wanted: Wanted | None = None,
) -> Iterator[Translation]:
    """Translate sentences as they come: one `Translation` for each, in their order.

    A window of sentences is read, sorted by length, searched in batches and given out before the next is
    read. An empty sentence, or one above the limit, comes back untranslated with the reason in `skipped`.

    >>> from regard import data, seq2seq
    >>> words, model = data.Words(["a", "b", "c"]), seq2seq.build("bahdanau", source_size=7, target_size=7, width=8)
    >>> found = seq2seq.translate(model, words, words, ["a b c", "", "b"], seq2seq.Wanted(limit=2))
    >>> [each.skipped for each in found]
    ['3 pieces, the limit is 2', 'empty', '']
    """
    wanted = wanted or Wanted()
    if wanted.reading is not None or wanted.replace_unknown:
        check_alignable(model, wanted.reading or "output")
    work, remaining = _Work(model, (source_tokenizer, target_tokenizer), wanted), iter(sentences)
    while window := list(islice(remaining, wanted.batch * wanted.window)):
        yield from work.window(window)


@dataclass(frozen=True, eq=False)
class _Work:
    model: Translator
    tokenizers: tuple[Tokenizer, Tokenizer]
    wanted: Wanted

    def window(self, sentences: Sequence[str]) -> list[Translation]:
        encoded = [self.tokenizers[0].encode(sentence) for sentence in sentences]
        done = [
            Translation(sentence, skipped=self._reason(ids)) for sentence, ids in zip(sentences, encoded, strict=True)
        ]
        order = sorted((n for n, each in enumerate(done) if not each.skipped), key=lambda n: len(encoded[n]))
        for start in range(0, len(order), self.wanted.batch):
            places = order[start : start + self.wanted.batch]
            found = self._batch([sentences[n] for n in places], [encoded[n] for n in places])
            for place, each in zip(places, found, strict=True):
                done[place] = each
        return [
            replace(each, num_pieces=len(ids), num_unknown=ids.count(UNK))
            for each, ids in zip(done, encoded, strict=True)
        ]

    def _reason(self, ids: Sequence[int]) -> str:
        if not ids:
            return "empty"
        return f"{len(ids)} pieces, the limit is {self.wanted.limit}" if len(ids) > self.wanted.limit else ""

    def _batch(self, sentences: Sequence[str], encoded: Sequence[Sequence[int]]) -> list[Translation]:
        found = self.wanted.search(self.model, padded([[*ids, EOS] for ids in encoded], self.model.device))
        done = [self._distinct(*each) for each in zip(sentences, found, strict=True)]
        unknown = self.wanted.replace_unknown and any(UNK in h.tokens for each in done for h in each.hypotheses)
        if self.wanted.reading is None and not unknown:
            return done
        words = [written_words(self.tokenizers[0], *each) for each in zip(sentences, encoded, strict=True)]
        rows = [(encoded[n], h.tokens, words[n]) for n, each in enumerate(done) for h in each.hypotheses]
        alignments = iter(self._alignments(rows))
        return [self._aligned(each, [next(alignments) for _ in each.hypotheses]) for each in done]

    def _distinct(self, sentence: str, hypotheses: Sequence[Hypothesis]) -> Translation:
        """Keep the best hypothesis of each text, since different tokens may spell the same."""
        spelt = {}
        for hypothesis in hypotheses:
            spelt.setdefault(self.tokenizers[1].decode(hypothesis.tokens), hypothesis)
        return Translation(sentence, tuple(spelt), tuple(spelt.values()))

    def _alignments(self, rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> Iterator[Alignment]:
        reading = self.wanted.reading or "output"
        for start in range(0, len(rows), self.wanted.batch):
            sources, targets, words = zip(*rows[start : start + self.wanted.batch], strict=True)
            yield from align(self.model, self.tokenizers, sources, targets, reading=reading, source_words=words)

    def _aligned(self, done: Translation, alignments: list[Alignment]) -> Translation:
        texts = list(done.texts)
        for n, alignment in enumerate(alignments):
            written = as_written(self.tokenizers[0], done.source, alignment.source)
            alignments[n] = alignment = replace(alignment, source=written)
            if self.wanted.replace_unknown and UNK in done.hypotheses[n].tokens:
                words = self._known(done.hypotheses[n].tokens, alignment)
                texts[n] = _rewritten(texts[n], alignment.target, words)
                alignments[n] = replace(alignment, target=words)
        shown = () if self.wanted.reading is None else tuple(alignments)
        return replace(done, texts=tuple(texts), alignments=shown)

    def _known(self, tokens: Sequence[int], alignment: Alignment) -> tuple[str, ...]:
        """The target words, with the source words they look at in the place of unknown ones."""
        numbers = self.tokenizers[1].word_numbers(tokens)
        if max(numbers, default=-1) + 1 == len(alignment.target):
            unknown = {number for token, number in zip(tokens, numbers, strict=True) if token == UNK}
        else:  # words were cut further than the pieces
            mark = self.tokenizers[1].decode([UNK])
            unknown = {place for place, word in enumerate(alignment.target) if mark in word}
        aligned = alignment.weights.argmax(1).tolist()
        return tuple(
            alignment.source[aligned[place]] if place in unknown else word
            for place, word in enumerate(alignment.target)
        )


def _rewritten(text: str, words: Sequence[str], others: Sequence[str]) -> str:
    """The text with each of `words` replaced by the one of `others`."""
    parts, place = [], 0
    for word, other in zip(words, others, strict=True):
        start = text.find(word, place)
        parts += [text[place:start], other]
        place = start + len(word)
    return "".join([*parts, text[place:]])
