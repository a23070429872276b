"""The encoder-decoders: one protocol (`Translator`), its implementations, and `build`, which makes one by its name."""

from regard.lab.models.hybrid import HybridTranslator
from regard.lab.models.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.lab.models.systems import SYSTEMS, System, build, find_system
from regard.lab.models.transformer import TransformerTranslator
from regard.lab.models.translator import Memory, State, Translator

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
