"""Translations from a trained model: greedy and beam search, word alignments, and `translate` for lines of text."""

from regard.lab.decoding.alignment import Alignment, align, attention_of
from regard.lab.decoding.search import Hypothesis, Search, beam_search, greedy
from regard.lab.decoding.translation import Translation, TranslationOptions, translate

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
