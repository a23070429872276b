"""`evaluate` and `score`: BLEU, chrF and TER of translations, and BLEU by length, similarity and word frequency."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.lab.data.batches import Batches
from regard.lab.data.corpus import encode_pairs
from regard.lab.data.length_limits import pairs_within
from regard.lab.data.retrieval import NEAR, NOVEL, nearest_pairs
from regard.lab.data.words import cut
from regard.lab.decoding.alignment import align, alignment_error_rate
from regard.lab.decoding.search import evaluating
from regard.lab.decoding.translation import Translation, TranslationOptions, translate
from regard.lab.evaluation import clock
from regard.lab.evaluation.bootstrap import (
    PairedComparison,
    bleu,
    bleu_counts,
    bleu_interval,
    check_sentences,
    paired_bootstrap,
)
from regard.lab.evaluation.metrics import Metric, bleu_score, bleu_tokenizer, chrf_score, ter_score, word_tokenizer
from regard.lab.evaluation.validation import negative_log_likelihood

if TYPE_CHECKING:
    from regard.lab.data.corpus import Pair
    from regard.lab.data.tokenizer import Tokenizer
    from regard.lab.models.translator import Translator

#: Upper limits of the buckets of source lengths, in words.
LENGTHS = (5, 10, 15, 20, 30, 40, 60)
#: Lower limits of the bins of word frequencies in the training targets; the first bin is for words not seen.
FREQUENCIES = (1, 2, 5, 10, 100, 1000)


class TranslationSystem(Protocol):
    """A system that can be evaluated: a run, or any object with a model and its two tokenizers."""

    @property
    def model(self) -> Translator: ...
    @property
    def source_tokenizer(self) -> Tokenizer: ...
    @property
    def target_tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class Bucket:
    """BLEU of one group of sentences, their number `count`, and the ends of the 95 % bootstrap interval.

    `label` says which sentences these are.
    """

    label: str
    count: int
    bleu: float
    low: float
    high: float


@dataclass(frozen=True)
class Frequency:
    """The quality of words of one range of training frequency. Every occurrence counts, in any order.

    precision = matches / words of the translations (`put_out`), recall = matches / words of the references
    (`expected`).
    """

    label: str
    matches: int
    put_out: int
    expected: int

    @property
    def precision(self) -> float:
        return self.matches / self.put_out if self.put_out else 0.0

    @property
    def recall(self) -> float:
        return self.matches / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """2 m / (put out + expected)."""
        size = self.put_out + self.expected
        return 2 * self.matches / size if size else 0.0


@dataclass(frozen=True)
class Evaluation:
    """The quality of a system on a set of sentence pairs.

    Scores are percentages, as from sacrebleu; BLEU, TER and words count tokens of its `tokenizer`. `exact` is the share
    of sentences that equal their reference. `length_ratio` is the tokens of the translations over those of the
    references. `perplexity` is that of the reference pieces under teacher forcing. `alignment_error_rate` is that of
    the attention (0 is best), if gold alignments exist. Both leave out pairs that are too long to translate.
    `by_similarity` is BLEU by the similarity of the nearest training source; the first bucket is the novel part.
    `retrieval` is the BLEU of copying the target of the most similar training source: first for all sentences, then by
    similarity. Skipped sentences count as empty translations. `left_out` is the number of near-duplicates of training
    sources that were not tested. `interval` is the 95 % bootstrap interval of BLEU, and `by_frequency` the quality of
    words by their count in training. `reading` says how the attention was read for its error rate. `seconds` is the
    time of the translation, and `search` its settings. `hypotheses` are the translations. By `references_hash` two
    evaluations are known to have the same references.

    >>> from regard.lab import score
    >>> measured = score(["the dog sees a cat", "no"], ["the dog sees a cat", "yes"], sources=["x", "y"])
    >>> measured.num_sentences, measured.exact, measured.length_ratio
    (2, 0.5, 1.0)
    """

    num_sentences: int
    bleu: Metric
    interval: tuple[float, float]
    chrf: Metric
    ter: Metric
    exact: float
    length_ratio: float
    by_length: tuple[Bucket, ...]
    by_similarity: tuple[Bucket, ...] = ()
    by_frequency: tuple[Frequency, ...] = ()
    retrieval: tuple[Bucket, ...] = ()
    perplexity: float | None = None
    alignment_error_rate: float | None = None
    reading: str | None = None
    seconds: float | None = None
    skipped: int = 0
    left_out: int = 0
    search: Mapping[str, Any] | None = None
    references_hash: str = ""
    hypotheses: tuple[str, ...] = ()
    tokenizer: str = "13a"

    @property
    def novel(self) -> Bucket | None:
        """BLEU on sources that resemble no training source; None if there are none, or no similarities were given."""
        return next((bucket for bucket in self.by_similarity if bucket.label.startswith("novel")), None)

    @property
    def sentences_per_second(self) -> float | None:
        """The speed of the search, with tokenizing; on a CPU by the processor time of this thread."""
        return self.num_sentences / self.seconds if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers for `json.dumps`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `to_json` wrote."""
        try:
            parts: dict[str, Any] = dict(data)
            parts |= {name: Metric(**data[name]) for name in ("bleu", "chrf", "ter")}
            parts |= {
                name: tuple(Bucket(**bucket) for bucket in data[name])
                for name in ("by_length", "by_similarity", "retrieval")
            }
            parts["by_frequency"] = tuple(Frequency(**row) for row in data["by_frequency"])
            low, high = data["interval"]
            return Evaluation(**parts | {"interval": (low, high), "hypotheses": tuple(data["hypotheses"])})
        except (KeyError, TypeError, ValueError) as error:
            raise RegardError(
                f"Evaluation.from_json: this is not an evaluation ({type(error).__name__}: {error}). "
                "Give the result of Evaluation.to_json of this version."
            ) from None


@dataclass(frozen=True, eq=False)
class Training:
    """Facts about the training text for the evaluation of a test set.

    `frequencies` are the `word_frequencies` of the training targets. For every test source, `similarities` has its
    similarity to the nearest training source, and `retrieved` the target of that training source.
    """

    frequencies: Mapping[str, int] | None = None
    similarities: Sequence[float] | None = None
    retrieved: Sequence[str] | None = None

    @staticmethod
    def of(train: Sequence[Pair], pairs: Sequence[Pair], tokenizer: str | None = None) -> Training:
        """The facts for a training split and the pairs of a test."""
        neighbors = nearest_pairs([pair.source for pair in train], [pair.source for pair in pairs])
        targets = [pair.target for pair in train]
        frequencies = word_frequencies(targets, tokenizer or bleu_tokenizer(pair.target for pair in pairs))
        return Training(frequencies, neighbors.similarity.tolist(), neighbors.copies(targets))


@checked
def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    training: Training | None = None,
    tokenizer: str | None = None,
) -> Evaluation:
    """Evaluate translations from texts alone, without the model.

    `tokenizer` is that of sacrebleu, for BLEU. None chooses by the script of the references: "ja-mecab", "zh", "char"
    or "flores200" where words are written without spaces, else "13a".

    >>> round(score(["a b c d e"], ["a b c d e"], ["v w x y z"]).bleu.score, 6)
    100.0
    """
    check_sentences("score", hypotheses, references)
    check_sentences("score", sources, references)
    tokenizer, training = tokenizer or bleu_tokenizer(references), training or Training()
    counts = bleu_counts(hypotheses, references, tokenizer)
    total, lengths = counts.sum(0), [len(cut(source)) for source in sources]
    frequencies, similarities = training.frequencies, training.similarities
    return Evaluation(
        num_sentences=len(references),
        bleu=bleu_score(tokenizer, hypotheses, references),
        interval=bleu_interval(counts),
        chrf=chrf_score(hypotheses, references),
        ter=ter_score(tokenizer, hypotheses, references),
        exact=sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references),
        length_ratio=float(total[0] / total[1].clamp_min(1)),
        by_length=_buckets(counts, lengths, _length_label),
        by_similarity=() if similarities is None else _buckets(counts, similarities, _similarity_label),
        by_frequency=() if frequencies is None else by_frequency(hypotheses, references, frequencies, tokenizer),
        retrieval=_retrieval(training, references, tokenizer),
        references_hash=_hash(references),
        hypotheses=tuple(hypotheses),
        tokenizer=tokenizer,
    )


@checked
def evaluate(
    system: TranslationSystem,
    pairs: Sequence[Pair],
    options: TranslationOptions | None = None,
    training: Training | None = None,
    *,
    tokenizer: str | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Evaluation:
    """Translate the sources, and evaluate the translations against the targets.

    `progress` is called with the number of translated sentences. `tokenizer` is that of BLEU, see `score`.

    >>> from types import SimpleNamespace
    >>> from regard import lab
    >>> from regard.lab import data
    >>> words = data.WordTokenizer(["a", "b", "c"])
    >>> model = lab.build("bahdanau", source_size=7, target_size=7, width=8)
    >>> system = SimpleNamespace(model=model, source_tokenizer=words, target_tokenizer=words)
    >>> measured = lab.evaluate(system, [data.Pair("a b", "b a"), data.Pair("c", "c")])
    >>> measured.num_sentences, len(measured.hypotheses), measured.perplexity > 1
    (2, 2, True)
    """
    options = options or TranslationOptions()
    if not pairs:
        raise RegardError("evaluate: there are no sentence pairs. Give at least one.")
    sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    translations: list[Translation] = []
    device = system.model.device
    start = clock.seconds(device)
    tokenizers = system.source_tokenizer, system.target_tokenizer
    # alignments are computed apart, so that `seconds` is the time of the search
    for translation in translate(system.model, *tokenizers, sources, replace(options, reading=None)):
        translations.append(translation)
        progress(len(translations))
    seconds = clock.seconds(device) - start
    short = pairs_within(pairs, *tokenizers, options.limit)
    error_rate, reading = _error_rate(system, short, options)
    return replace(
        score([translation.text for translation in translations], references, sources, training, tokenizer),
        perplexity=perplexity(system, short, options.batch) if short else None,
        alignment_error_rate=error_rate,
        reading=reading,
        seconds=seconds,
        skipped=sum(bool(translation.skipped) for translation in translations),
        search=asdict(options.search) | {"batch": options.batch},
    )


def paired_comparison(a: Evaluation, b: Evaluation, references: Sequence[str]) -> PairedComparison:
    """The paired bootstrap test between two systems that translated the same sentences."""
    if not a.references_hash == b.references_hash == _hash(references):
        raise RegardError(
            "paired_comparison: the two systems were evaluated on different sentences. Evaluate both on "
            "the same test set."
        )
    if a.tokenizer != b.tokenizer:
        raise RegardError(
            f"paired_comparison: BLEU of one system counts tokens of {a.tokenizer}, of the other of {b.tokenizer}. "
            "Evaluate both with the same tokenizer."
        )
    counts_a, counts_b = (bleu_counts(evaluation.hypotheses, references, a.tokenizer) for evaluation in (a, b))
    return paired_bootstrap(counts_a, counts_b)


def perplexity(system: TranslationSystem, pairs: Sequence[Pair], batch: int = 32) -> float:
    """exp of the mean -log p of the pieces of the references and their EOS, under teacher forcing."""
    encoded = encode_pairs(pairs, system.source_tokenizer, system.target_tokenizer)
    with evaluating(system.model):
        total, tokens = negative_log_likelihood(system.model, Batches(encoded, sentences=batch, shuffle=False).epoch(0))
    return math.exp(min(total / tokens, 700.0))  # exp of more than 709 overflows


def word_frequencies(texts: Iterable[str], tokenizer: str = "13a") -> Counter[str]:
    """The number of occurrences of every word, tokenized as for BLEU."""
    tokenize = word_tokenizer(tokenizer)
    return Counter(word for text in texts for word in tokenize(text).split())


def by_frequency(
    hypotheses: Sequence[str], references: Sequence[str], frequencies: Mapping[str, int], tokenizer: str = "13a"
) -> tuple[Frequency, ...]:
    """Matching words, counted sentence by sentence, by the frequency of the word in the training targets.

    `frequencies` are these counts; a word that has none has 0. `tokenizer` is one of sacrebleu.

    >>> [(bin.label, bin.recall) for bin in by_frequency(["a c"], ["a b"], {"a": 1, "b": 3})]
    [('0', 0.0), ('1', 1.0), ('2-4', 0.0)]
    """
    tokenize = word_tokenizer(tokenizer)
    matches, put_out, expected = Counter[int](), Counter[int](), Counter[int]()
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        output, target = Counter(tokenize(hypothesis).split()), Counter(tokenize(reference).split())
        for counter, words in ((put_out, output), (expected, target), (matches, output & target)):
            for word, count in words.items():
                # the bin: the number of limits that the frequency reaches
                counter[sum(frequencies.get(word, 0) >= least for least in FREQUENCIES)] += count
    bins = sorted({*put_out, *expected})
    return tuple(Frequency(_range(n), matches[n], put_out[n], expected[n]) for n in bins)


def _range(place: int) -> str:
    """The label of a bin of frequencies, such as "2-4". `place` is the number of `FREQUENCIES` that it reaches."""
    edges = (0, *FREQUENCIES)
    if place == len(FREQUENCIES):
        return f"{edges[place]}+"
    last = edges[place + 1] - 1
    return str(edges[place]) if last == edges[place] else f"{edges[place]}-{last}"


def _buckets(counts: Tensor, values: Sequence[float], label: Callable[[float], tuple[int, str]]) -> tuple[Bucket, ...]:
    """BLEU of groups of sentences: `label` gives the (place, text) of the group of a value.

    `counts` are the `bleu_counts` of the sentences, (N, 10) in float64, and `values` (N,) are their lengths or
    similarities. Groups are in the order of their places, and empty ones are left out.
    """
    if len(values) != len(counts):
        raise RegardError(f"score: {len(values)} similarities for {len(counts)} sentences. Give one for each sentence.")
    labels = [label(float(value)) for value in values]
    buckets = []
    for bucket_label in sorted(set(labels)):
        chosen = counts[[n for n, sentence_label in enumerate(labels) if sentence_label == bucket_label]]
        buckets.append(Bucket(bucket_label[1], len(chosen), float(bleu(chosen.sum(0))), *bleu_interval(chosen)))
    return tuple(buckets)


def _retrieval(training: Training, references: Sequence[str], tokenizer: str) -> tuple[Bucket, ...]:
    """BLEU of copying the nearest training target: of all sentences, then by similarity; () if it is not known."""
    if training.retrieved is None:
        return ()
    counts = bleu_counts(training.retrieved, references, tokenizer)
    whole = _buckets(counts, [0.0] * len(counts), lambda _: (0, "all"))
    similarities = training.similarities
    return whole if similarities is None else (*whole, *_buckets(counts, similarities, _similarity_label))


def _length_label(length: float) -> tuple[int, str]:
    """The place and the text of the bucket of a source length, such as (1, "6-10")."""
    place = sum(length > most for most in LENGTHS)
    first = LENGTHS[place - 1] + 1 if place else 1
    return place, f"{first}-{LENGTHS[place]}" if place < len(LENGTHS) else f"{first}+"


def _similarity_label(similarity: float) -> tuple[int, str]:
    """The place and the text of the bucket of a similarity to the nearest training source."""
    if similarity < NOVEL:
        return 0, f"novel (below {NOVEL})"
    return (1, f"{NOVEL} to {NEAR}") if similarity <= NEAR else (2, f"near-duplicate (above {NEAR})")


def _error_rate(
    system: TranslationSystem, pairs: Sequence[Pair], options: TranslationOptions
) -> tuple[float | None, str | None]:
    """AER (0 to 1) of the attention under teacher forcing with the references, for pairs whose alignments are known.

    The text is how the attention was read, "output" by default. (None, None) without such pairs or cross-attention.
    """
    with_gold = [pair for pair in pairs if pair.gold is not None]
    if not with_gold or system.model.cross_attention is None:
        return None, None
    reading, tokenizers = options.reading or "output", (system.source_tokenizer, system.target_tokenizer)
    predicted, gold = [], []
    for start in range(0, len(with_gold), options.batch):
        part = with_gold[start : start + options.batch]
        sides = [tokenizers[0].encode(p.source) for p in part], [tokenizers[1].encode(p.target) for p in part]
        predicted += [alignment.links() for alignment in align(system.model, tokenizers, *sides, reading=reading)]
        gold += [pair.gold or frozenset() for pair in part]
    return alignment_error_rate(predicted, gold), reading


def _hash(references: Sequence[str]) -> str:
    """The sha256 of the references, by which two evaluations of the same sentences are recognized."""
    return hashlib.sha256("\n".join(references).encode()).hexdigest()
