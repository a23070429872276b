"""The translation lab: encoder-decoders, how they are trained, and what they translate; `data` has its texts.

Each package imports from those before it: data, models, decoding, evaluation, runs, training, report, comparison, pages
and commands. Names of `runs.config`, training and comparison are loaded at the first use: they need the packages of the
extra "lab". Nothing outside of the lab imports it; the command line finds it by the table in `regard/cli/lab.py`.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from regard.base.errors import MissingPackage
from regard.base.other_libraries import missing_here
from regard.lab import data as data
from regard.lab.decoding import (
    Alignment,
    Search,
    Translation,
    TranslationOptions,
    align,
    attention_of,
    beam_search,
    greedy,
    translate,
)
from regard.lab.evaluation import Evaluation, evaluate, score
from regard.lab.models import (
    SYSTEMS,
    BahdanauTranslator,
    FixedVectorTranslator,
    HybridTranslator,
    LuongTranslator,
    System,
    TransformerTranslator,
    Translator,
    build,
    find_system,
)
from regard.lab.runs import Run, load_pretrained, load_run, pretrained_runs

if TYPE_CHECKING:
    from regard.lab.comparison.design import make_study
    from regard.lab.comparison.results import Comparison, compare
    from regard.lab.comparison.run_evaluation import (
        PairSelection,
        compare_runs,
        corpus_of,
        evaluate_run,
    )
    from regard.lab.comparison.study import Study
    from regard.lab.runs.config import Config, make_config, read_config
    from regard.lab.training.session import Trained, resume_training, train

#: Names that are loaded at the first use, and their modules.
_LAZY = {
    "Config": "runs.config",
    "make_config": "runs.config",
    "read_config": "runs.config",
    "Trained": "training.session",
    "resume_training": "training.session",
    "train": "training.session",
    "Study": "comparison.study",
    "make_study": "comparison.design",
    "Comparison": "comparison.results",
    "compare": "comparison.results",
    "PairSelection": "comparison.run_evaluation",
    "compare_runs": "comparison.run_evaluation",
    "corpus_of": "comparison.run_evaluation",
    "evaluate_run": "comparison.run_evaluation",
}
#: Packages of the extra "lab".
_LAB = ("lightning", "pydantic", "sentencepiece", "sacrebleu", "safetensors")

__all__ = [
    "SYSTEMS",
    "Alignment",
    "BahdanauTranslator",
    "Comparison",
    "Config",
    "Evaluation",
    "FixedVectorTranslator",
    "HybridTranslator",
    "LuongTranslator",
    "PairSelection",
    "Run",
    "Search",
    "Study",
    "System",
    "Trained",
    "TransformerTranslator",
    "Translation",
    "TranslationOptions",
    "Translator",
    "align",
    "attention_of",
    "beam_search",
    "build",
    "compare",
    "compare_runs",
    "corpus_of",
    "evaluate",
    "evaluate_run",
    "find_system",
    "greedy",
    "load_pretrained",
    "load_run",
    "make_config",
    "make_study",
    "pretrained_runs",
    "read_config",
    "resume_training",
    "score",
    "train",
    "translate",
]


if not TYPE_CHECKING:  # for a type checker, a `__getattr__` would make every misspelt name valid

    def __getattr__(name):
        """Load a name of `_LAZY` at its first use. The error for a missing package names the extra "lab"."""
        if name not in _LAZY:
            raise missing_here(__name__, name, __all__)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning warns while it is imported
                return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in _LAB:
                raise
            raise MissingPackage(f"lab.{name}", error.name or "", "lab") from None

    def __dir__():
        """All public names, also those that are not loaded yet."""
        return [*__all__, "data"]
