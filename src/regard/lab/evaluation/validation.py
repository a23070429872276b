"""Validation during training: loss, perplexity and BLEU of a model on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regard.lab.data.batches import Batch, Batches, Encoded
from regard.lab.data.tokenizer import Tokenizer
from regard.lab.decoding.search import greedy
from regard.lab.evaluation.metrics import bleu_metric
from regard.lab.models.loss import translation_loss

if TYPE_CHECKING:
    from regard.lab.models.translator import Translator

#: A function of a model: its BLEU on held-out pairs.
Score = Callable[["Translator"], float]


@dataclass(frozen=True)
class Validation:
    """Means over the held-out target tokens.

    Args:
        loss: The mean of -log p(y), in nats, without smoothing.
        bleu: Of greedy translations, by sacreBLEU; None if nothing was translated.
    """

    loss: float
    bleu: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))  # exp of more than 709 overflows


@torch.no_grad()
def negative_log_likelihood(model: Translator, batches: Sequence[Batch]) -> tuple[float, int]:
    """The sum of -log p(y) over the target tokens of all batches, and the number of these tokens."""
    total, tokens = 0.0, 0
    for batch in batches:
        # a process without pairs computes a dummy batch, because the others wait for it
        on_device = batch.filled.to(next(model.parameters()).device)
        loss = translation_loss(model, on_device.source, on_device.target)
        if len(batch):
            total, tokens = total + loss.nll.item(), tokens + loss.num_tokens
    return total, tokens


def bleu_of(
    tokenizer: Tokenizer, pairs: Sequence[Encoded], references: Sequence[str], counted: str, rows: int = 100
) -> Score:
    """A function of a model: the BLEU of its greedy translations of fixed sources.

    Args:
        tokenizer: Of the target side.
        pairs: Ids; the sources are translated.
        references: Their translations as text.
        counted: Tokenizer of sacrebleu, whose tokens BLEU counts.
        rows: Sentences of a batch.
    """
    metric = bleu_metric(counted)
    batches = Batches(pairs, sentences=rows, shuffle=False).epoch(0)

    def score(model: Translator) -> float:
        """The score of the translations of all sources, in percent.

        They are translated in batches of similar length, and counted in the order of the pairs.
        """
        texts: dict[int, str] = {}
        device: Any = next(model.parameters()).device
        for batch in batches:
            hypotheses = greedy(model, batch.source.to(device))
            texts |= {i: tokenizer.decode(best[0].tokens) for i, best in zip(batch.indices, hypotheses, strict=True)}
        order = sorted(texts)
        return float(metric.corpus_score([texts[i] for i in order], [[references[i] for i in order]]).score)

    return score
