"""`pruning`: BLEU of a run when a growing share of its heads is removed, and without each single head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.hf.heads.gates import gated
from regard.hf.heads.head_importance import ImportanceScores, importance
from regard.hf.heads.pruning_curve import ORDERS, pruning_curve
from regard.lab.comparison.inspection import spread
from regard.lab.data.batches import Batch, Batches
from regard.lab.data.corpus import encode_pairs
from regard.lab.data.length_limits import pairs_within
from regard.lab.decoding.translation import LIMIT
from regard.lab.evaluation.metrics import bleu_tokenizer
from regard.lab.evaluation.validation import Score, bleu_of
from regard.lab.models.loss import translation_loss

if TYPE_CHECKING:
    from regard.lab.data.corpus import Corpus
    from regard.lab.runs.run import Run

#: Validation pairs for the importance of heads, and test pairs that are translated for each BLEU.
MEASURED, TRANSLATED = 200, 200
SHARES = tuple(tenth / 10 for tenth in range(10))


def pruning(run: Run, corpus: Corpus, progress: Callable[[float], object] = lambda share: None) -> dict[str, Any]:
    """BLEU after removing heads: the least important first, at random, the most important first, and each alone.

    Importance is that of Michel et al. (2019, arXiv:1905.10650), on validation pairs; BLEU is that of greedy
    translations of test pairs. The result is the content of pruning.json.
    """
    tokenizers = run.source_tokenizer, run.target_tokenizer
    pairs = spread(pairs_within(corpus.test, *tokenizers, LIMIT), TRANSLATED)
    references = [pair.target for pair in pairs]
    counted = run.bleu_tokenizer or bleu_tokenizer(references)
    quality = bleu_of(run.target_tokenizer, encode_pairs(pairs, *tokenizers), references, counted)
    encoded = encode_pairs(spread(pairs_within(corpus.valid, *tokenizers, LIMIT), MEASURED), *tokenizers)
    scores = importance(run.model, _loss, list(Batches(encoded, sentences=1, shuffle=False).epoch(0)))
    count = sum(len(value) for value in scores.values.values())
    done, todo = [0], len(ORDERS) * len(SHARES) + count

    def one_more(_: Any = None) -> None:
        """Count one more measured BLEU. `pruning_curve` also passes its point, which is not needed here."""
        done[0] += 1
        progress(done[0] / todo)

    curve = pruning_curve(run.model, quality, scores, shares=SHARES, progress=one_more)
    whole = curve.qualities("importance")[0.0]
    points = [
        {"order": point.order, "share": point.share, "removed": point.removed, "bleu": point.quality}
        for point in curve.points
    ]
    single = _single(run, scores, quality, whole, one_more)
    return {"heads": count, "sentences": len(pairs), "bleu": whole, "points": points, "single": single}


def role(module: str) -> str:
    """The role of an attention module, from its path: "encoder", "decoder" or "cross".

    >>> role("transformer.decoder.layers.1.cross_attention")
    'cross'
    """
    if "cross" in module:
        return "cross"
    return "decoder" if "decoder" in module else "encoder"


def _loss(model: Any, batch: Batch) -> Tensor:
    """The mean loss over the target tokens of a batch, whose derivative `importance` computes."""
    loss = translation_loss(model, batch.source, batch.target)
    return loss.smoothed / loss.num_tokens


def _single(
    run: Run, found: ImportanceScores, quality: Score, whole: float, one_more: Callable[[], None]
) -> list[dict[str, Any]]:
    """BLEU without one head, for every head, and its difference from `whole`, the BLEU with all heads."""
    rows = []
    for module, value in found.values.items():
        for head in range(len(value)):
            gate = torch.ones(len(value))
            gate[head] = 0
            with torch.no_grad(), gated(run.model, {module: gate}):
                bleu = float(quality(run.model))
            rows.append(
                {"module": module, "role": role(module), "head": head, "bleu": bleu, "difference": bleu - whole}
            )
            one_more()
    return rows
