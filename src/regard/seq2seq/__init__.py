"""The translation lab: encoder-decoders, how they are trained, and what they translate."""

from regard.seq2seq.hybrid import HybridTranslator
from regard.seq2seq.model import Memory, State, Translator
from regard.seq2seq.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.seq2seq.systems import SYSTEMS, System, build, system
from regard.seq2seq.transformer import TransformerTranslator

__all__ = [
    "SYSTEMS",
    "BahdanauTranslator",
    "FixedVectorTranslator",
    "HybridTranslator",
    "LuongTranslator",
    "Memory",
    "State",
    "System",
    "TransformerTranslator",
    "Translator",
    "build",
    "system",
]
