"""BLEU from counts of n-grams, bootstrap intervals, and the paired bootstrap test between two systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.lab.evaluation.metrics import bleu_metric, bleu_tokenizer

#: Counts for each sentence: its length, the length of the reference, matching n-grams and all n-grams, n = 1 to 4.
NUM_COUNTS = 10
SEED = 12345
RESAMPLES = 1000


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str | None = None) -> Tensor:
    """The counts of every sentence for BLEU, (N, 10) in float64; `bleu` of their sum is the BLEU of the corpus.

    `NUM_COUNTS` says what they are. `tokenizer` is one of sacrebleu's; None chooses by the script of the references
    (see `bleu_tokenizer`).
    """
    check_sentences("bleu_counts", hypotheses, references)
    metric = bleu_metric(tokenizer or bleu_tokenizer(references), effective_order=True)
    scores = [metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    rows = [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]
    return torch.tensor(rows, dtype=torch.float64)


def check_sentences(operation: str, hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise an error unless there is one hypothesis for each reference, and at least one."""
    if len(hypotheses) != len(references) or not references:
        raise RegardError(
            f"{operation}: {len(hypotheses)} hypotheses and {len(references)} references. Give one of each for "
            "every sentence, and at least one sentence."
        )


def bleu(counts: Tensor) -> Tensor:
    """BLEU = min(1, exp(1 - r / c)) * (prod_n p_n)^(1/4) * 100 of summed counts (..., 10) (Papineni et al. 2002).

    Smoothed as sacrebleu does by default ("exp"): the k-th order without a matching n-gram counts 1 / 2^k matches. The
    result is 0 without any match, or if an order has no n-grams. `NUM_COUNTS` says what each of the ten counts is.

    >>> float(bleu(torch.tensor([4.0, 4, 4, 3, 2, 1, 4, 3, 2, 1])))
    100.0
    """
    system, reference = counts[..., 0], counts[..., 1]
    correct, total = counts[..., 2:6], counts[..., 6:]
    unmatched = correct == 0
    smoothed = torch.where(unmatched, 0.5 ** unmatched.cumsum(-1), correct)
    logs = (smoothed / total.clamp_min(1)).log().mean(-1)
    brevity = (1 - reference / system.clamp_min(1)).clamp_max(0)
    defined = (correct.sum(-1) > 0) & (total > 0).all(-1)
    return torch.where(defined, 100 * (logs + brevity).exp(), 0.0)


def resample(size: int, resamples: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """The number of times that every sentence is drawn in every resample, (resamples, size); a row sums to `size`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size, (resamples, size), generator=generator)
    # numbers of another range for each resample, so that one bincount counts all
    drawn += size * torch.arange(resamples)[:, None]
    return drawn.flatten().bincount(minlength=resamples * size).view(resamples, size).double()


def bleu_interval(
    counts: Tensor, share: float = 0.95, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """The percentile bootstrap interval of BLEU: `share` of the resampled corpora are in it."""
    return _interval(bleu(resample(len(counts), resamples, seed) @ counts), share)


def _interval(values: Tensor, share: float = 0.95) -> tuple[float, float]:
    """The ends of the interval that holds the middle `share` of the values."""
    low, high = values.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=values.dtype)).tolist()
    return low, high


@dataclass(frozen=True)
class PairedComparison:
    """Two systems on the same sentences: BLEU of each, a - b, its 95 % interval, and p.

    `p_value` is the share of resamples in which the system with the better corpus BLEU is not better (Koehn 2004). One
    is added to both counts, so it is never 0.
    """

    bleu: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    p_value: float
    resamples: int


def paired_bootstrap(a: Tensor, b: Tensor, resamples: int = RESAMPLES, seed: int = SEED) -> PairedComparison:
    """The paired bootstrap: the difference in BLEU of two systems, its interval and its p value (Koehn 2004).

    `a` and `b` are the `bleu_counts` of the same sentences, (N, 10), or of several trainings of each system,
    (seeds, N, 10). Sentences are resampled for both systems together, seeds for each system alone. So p accounts for
    the choice of sentences and, with several seeds, for the variance between trainings.

    >>> counts = torch.tensor([[4.0, 4, 4, 3, 2, 1, 4, 3, 2, 1]]).double()
    >>> paired_bootstrap(counts, counts, resamples=9).p_value
    1.0
    """
    sides = [counts if counts.ndim == 3 else counts[None] for counts in (a, b)]
    if any(s.ndim != 3 or s.shape[1:] != (sides[0].shape[1], NUM_COUNTS) or not s.numel() for s in sides):
        raise RegardError(
            f"paired_bootstrap: counts {tuple(a.shape)} and {tuple(b.shape)}; both must be (sentences, {NUM_COUNTS}) "
            f"or (seeds, sentences, {NUM_COUNTS}) of the same sentences, from bleu_counts."
        )
    # the same sentences for both systems, (resamples, N); other seeds for each, (resamples, seeds)
    weights = resample(sides[0].shape[1], resamples, seed)
    seeds = [resample(len(side), resamples, seed + number) for number, side in enumerate(sides, 1)]
    # the summed counts of each resample, (resamples, 10) for each system
    drawn = [torch.einsum("rs,srk->rk", times, weights @ side) for times, side in zip(seeds, sides, strict=True)]
    differences = bleu(drawn[0]) - bleu(drawn[1])
    whole = float(bleu(sides[0].sum((0, 1)))), float(bleu(sides[1].sum((0, 1))))
    difference = whole[0] - whole[1]
    better = differences > 0 if difference > 0 else differences < 0
    p_value = (int((~better).sum()) + 1) / (resamples + 1)
    return PairedComparison(whole, difference, _interval(differences), p_value, resamples)
