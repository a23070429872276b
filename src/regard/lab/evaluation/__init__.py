"""The quality of translations: BLEU, chrF, TER and perplexity, with bootstrap intervals; and attribution."""

from regard.lab.evaluation.scores import Evaluation, evaluate, score

__all__ = ["Evaluation", "evaluate", "score"]
