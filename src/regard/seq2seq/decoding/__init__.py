"""Translations from a trained model: greedy and beam search, word alignments, and `translate` for lines of text."""

from regard.seq2seq.decoding.alignment import Alignment, align, attention_of
from regard.seq2seq.decoding.search import Hypothesis, Search, beam_search, greedy
from regard.seq2seq.decoding.translation import Translation, TranslationOptions, translate

__all__ = [
    "Alignment",
    "Hypothesis",
    "Search",
    "Translation",
    "TranslationOptions",
    "align",
    "attention_of",
    "beam_search",
    "greedy",
    "translate",
]
