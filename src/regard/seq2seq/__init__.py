"""The translation lab: encoder-decoders, how they are trained, and what they translate.

Each package imports from those before it: models, decoding, evaluation, runs, training, comparison.
"""

from regard.seq2seq.decoding import (
    Alignment,
    Hypothesis,
    Search,
    Translation,
    Wanted,
    align,
    attention_of,
    beam_search,
    greedy,
    translate,
)
from regard.seq2seq.evaluation import Evaluation, evaluate, score
from regard.seq2seq.models import (
    SYSTEMS,
    BahdanauTranslator,
    FixedVectorTranslator,
    HybridTranslator,
    LuongTranslator,
    Memory,
    State,
    System,
    TransformerTranslator,
    Translator,
    build,
    system,
)
from regard.seq2seq.runs import Run, load_run

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
    "Run",
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
    "load_run",
    "score",
    "system",
    "translate",
]
