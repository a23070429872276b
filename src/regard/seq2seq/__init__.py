"""The translation lab: encoder-decoders, how they are trained, and what they translate."""

from regard.seq2seq.alignment import Alignment, align, attention_of
from regard.seq2seq.decoding import Hypothesis, Search, beam_search, greedy
from regard.seq2seq.evaluation import Evaluation, evaluate, score
from regard.seq2seq.hybrid import HybridTranslator
from regard.seq2seq.model import Memory, State, Translator
from regard.seq2seq.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.seq2seq.systems import SYSTEMS, System, build, system
from regard.seq2seq.transformer import TransformerTranslator
from regard.seq2seq.translation import Translation, Wanted, translate

__all__ = [
    "SYSTEMS",
    "Alignment",
    "BahdanauTranslator",
    "Evaluation",
    "FixedVectorTranslator",
    "HybridTranslator",
    "Hypothesis",
    "LuongTranslator",
    "Memory",
    "Search",
    "State",
    "System",
    "TransformerTranslator",
    "Translation",
    "Translator",
    "Wanted",
    "align",
    "attention_of",
    "beam_search",
    "build",
    "evaluate",
    "greedy",
    "score",
    "system",
    "translate",
]
