"""The encoder-decoders: one protocol (`Translator`), its implementations, and `build`, which makes one by its name."""

from regard.seq2seq.models.hybrid import HybridTranslator
from regard.seq2seq.models.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.seq2seq.models.systems import SYSTEMS, System, build, find_system
from regard.seq2seq.models.transformer import TransformerTranslator
from regard.seq2seq.models.translator import Memory, State, Translator

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
    "find_system",
]
