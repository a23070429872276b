"""`translate`: translations of lines of text, in their order, computed in batches of similar lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.lab.data.vocabulary import EOS, UNK
from regard.lab.decoding.alignment import Alignment, align, as_written, check_alignable, padded, written_words
from regard.lab.decoding.search import Hypothesis, Search

if TYPE_CHECKING:
    from regard.lab.data.tokenizer import Tokenizer
    from regard.lab.models.translator import Translator

#: Longer sentences (in pieces) are not translated.
LIMIT = 1000


@dataclass(frozen=True, eq=False)
class Translation:
    """A sentence and its translations, best first.

    `skipped` is the reason why the sentence was not translated, or "". All texts are different. `alignments` has one
    alignment for each text, if `TranslationOptions.reading` is set. The sentence has `num_pieces` pieces; the tokenizer
    does not know `num_unknown` of them, so the model cannot tell these apart.

    >>> from regard.lab import Translation
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
        """The best translation, or ""."""
        return self.texts[0] if self.texts else ""

    @property
    def alignment(self) -> Alignment | None:
        """The alignment of the best translation."""
        return self.alignments[0] if self.alignments else None


@checked
@dataclass(frozen=True)
class TranslationOptions:
    """Options of `translate`: the search, the batches, alignments and unknown words.

    `window` batches are read ahead and sorted by length. `reading` adds alignments (see
    `regard.lab.decoding.alignment.READINGS`). `replace_unknown` replaces an unknown word by the source word that
    it is aligned to (Luong et al. 2015). Sentences of more than `limit` pieces are skipped.

    >>> from regard.lab import Search, TranslationOptions
    >>> options = TranslationOptions(Search(beam=4, n_best=2), batch=16)
    >>> options.batch * options.window  # sentences that are read ahead
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
    options: TranslationOptions | None = None,
) -> Iterator[Translation]:
    """Translate sentences one window at a time: yields one `Translation` for each sentence, in their order.

    A window of sentences is read, sorted by length and translated in batches; its translations are yielded before
    the next window is read. An empty sentence, or one above the limit, is not translated; `skipped` says why.

    >>> from regard import lab

    >>> from regard.lab import data
    >>> words = data.WordTokenizer(["a", "b", "c"])
    >>> model = lab.build("bahdanau", source_size=7, target_size=7, width=8)
    >>> translations = lab.translate(model, words, words, ["a b c", "", "b"], lab.TranslationOptions(limit=2))
    >>> [translation.skipped for translation in translations]
    ['3 pieces, the limit is 2', 'empty', '']
    """
    options = options or TranslationOptions()
    if options.reading is not None or options.replace_unknown:
        check_alignable(model, options.reading or "output")
    work, remaining = _Work(model, (source_tokenizer, target_tokenizer), options), iter(sentences)
    while window := list(islice(remaining, options.batch * options.window)):
        yield from work.window(window)


@dataclass(frozen=True, eq=False)
class _Work:
    """What `translate` does with each window of sentences."""

    model: Translator
    tokenizers: tuple[Tokenizer, Tokenizer]
    options: TranslationOptions

    def window(self, sentences: Sequence[str]) -> list[Translation]:
        """The translations of sentences, in their order; those of similar length are translated in one batch."""
        encoded = [self.tokenizers[0].encode(sentence) for sentence in sentences]
        done = [
            Translation(sentence, skipped=self._reason(ids)) for sentence, ids in zip(sentences, encoded, strict=True)
        ]
        order = sorted(
            (n for n, translation in enumerate(done) if not translation.skipped), key=lambda n: len(encoded[n])
        )
        for start in range(0, len(order), self.options.batch):
            places = order[start : start + self.options.batch]
            translations = self._batch([sentences[n] for n in places], [encoded[n] for n in places])
            for place, translation in zip(places, translations, strict=True):
                done[place] = translation
        return [
            replace(translation, num_pieces=len(ids), num_unknown=ids.count(UNK))
            for translation, ids in zip(done, encoded, strict=True)
        ]

    def _reason(self, ids: Sequence[int]) -> str:
        """Why a sentence with these ids is not translated; "" if it is."""
        if not ids:
            return "empty"
        return f"{len(ids)} pieces, the limit is {self.options.limit}" if len(ids) > self.options.limit else ""

    def _batch(self, sentences: Sequence[str], encoded: Sequence[Sequence[int]]) -> list[Translation]:
        """Search the translations of sentences, given also by their ids.

        They are aligned only if alignments are wanted, or if a translation has an unknown word to replace.
        """
        hypotheses = self.options.search(self.model, padded([[*ids, EOS] for ids in encoded], self.model.device))
        done = [self._distinct(*pair) for pair in zip(sentences, hypotheses, strict=True)]
        unknown = self.options.replace_unknown and any(UNK in h.tokens for t in done for h in t.hypotheses)
        if self.options.reading is None and not unknown:
            return done
        words = [written_words(self.tokenizers[0], *pair) for pair in zip(sentences, encoded, strict=True)]
        # one row for each hypothesis; `words` is the word number of each id of the source
        rows = [(encoded[n], h.tokens, words[n]) for n, t in enumerate(done) for h in t.hypotheses]
        alignments = iter(self._alignments(rows))
        return [self._aligned(t, [next(alignments) for _ in t.hypotheses]) for t in done]

    def _distinct(self, sentence: str, hypotheses: Sequence[Hypothesis]) -> Translation:
        """Keep the best hypothesis of each text, since different tokens may spell the same text."""
        by_text = {}
        for hypothesis in hypotheses:
            by_text.setdefault(self.tokenizers[1].decode(hypothesis.tokens), hypothesis)
        return Translation(sentence, tuple(by_text), tuple(by_text.values()))

    def _alignments(self, rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> Iterator[Alignment]:
        """The alignments of rows (source ids, target ids, word number of each source id), in batches."""
        reading = self.options.reading or "output"
        for start in range(0, len(rows), self.options.batch):
            sources, targets, words = zip(*rows[start : start + self.options.batch], strict=True)
            yield from align(self.model, self.tokenizers, sources, targets, reading=reading, source_words=words)

    def _aligned(self, done: Translation, alignments: list[Alignment]) -> Translation:
        """The translation with an alignment for each hypothesis, and with its unknown words replaced if that is wanted.

        The alignments are dropped if they were needed only to replace words.
        """
        texts = list(done.texts)
        for n, alignment in enumerate(alignments):
            written = as_written(self.tokenizers[0], done.source, alignment.source)
            alignments[n] = alignment = replace(alignment, source=written)
            if self.options.replace_unknown and UNK in done.hypotheses[n].tokens:
                words = self._known(done.hypotheses[n].tokens, alignment)
                texts[n] = _rewritten(texts[n], alignment.target, words)
                alignments[n] = replace(alignment, target=words)
        shown = () if self.options.reading is None else tuple(alignments)
        return replace(done, texts=tuple(texts), alignments=shown)

    def _known(self, tokens: Sequence[int], alignment: Alignment) -> tuple[str, ...]:
        """The target words; unknown words are replaced by the source words that they are aligned to."""
        numbers = self.tokenizers[1].word_numbers(tokens)
        if max(numbers, default=-1) + 1 == len(alignment.target):
            unknown = {number for token, number in zip(tokens, numbers, strict=True) if token == UNK}
        else:  # the words were split further than the pieces
            mark = self.tokenizers[1].decode([UNK])
            unknown = {place for place, word in enumerate(alignment.target) if mark in word}
        aligned = alignment.weights.argmax(1).tolist()
        return tuple(
            alignment.source[aligned[place]] if place in unknown else word
            for place, word in enumerate(alignment.target)
        )


def _rewritten(text: str, words: Sequence[str], others: Sequence[str]) -> str:
    """The text with each of `words` replaced by its entry of `others`."""
    parts, place = [], 0
    for word, other in zip(words, others, strict=True):
        start = text.find(word, place)
        parts += [text[place:start], other]
        place = start + len(word)
    return "".join([*parts, text[place:]])
