"""What a trained run looks at and depends on, as numbers that compare: of one trial, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.data.batches import Batch
from regard.data.corpus import encode_pairs
from regard.data.length_limits import pairs_within
from regard.data.vocabulary import EOS, PAD
from regard.data.words import cut
from regard.seq2seq.comparison.study import chosen_sentences
from regard.seq2seq.decoding.alignment import align
from regard.seq2seq.decoding.translation import LIMIT
from regard.seq2seq.evaluation.dependence import attention_shares, source_gradients
from regard.seq2seq.runs.run import WEIGHTS

if TYPE_CHECKING:
    from regard.data.corpus import Corpus, Pair
    from regard.seq2seq.runs.run import Run

#: Test pairs that means over weights are of, and those that gradients are of, which take a backward pass a token.
PAIRS, GRADIENTS = 200, 40
#: Parts of a source, from its start to its end.
BINS = 10


def inspect(run: Run, corpus: Corpus, similarities: Sequence[float]) -> dict[str, Any]:
    """Shares and entropy of the cross-attention, gradients, and alignments of a few sentences."""
    pairs = pairs_within(corpus.test, run.source_tokenizer, run.target_tokenizer, LIMIT)
    lengths = [len(cut(pair.source)) for pair in corpus.test]
    close = [corpus.test[n] for n in chosen_sentences(similarities, lengths)]
    return {
        **_shares(run, spread(pairs, PAIRS)),
        "gradient": gradient_profile(run, spread(pairs, GRADIENTS)),
        "alignments": _alignments(run, close),
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "bytes": (run.path / WEIGHTS).stat().st_size,
    }


def spread(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """At most so many of the pairs, evenly over all.

    >>> spread("abcdefg", 3)
    ['a', 'c', 'e']
    """
    apart = max(1, len(pairs) // count)
    return list(pairs[: apart * count : apart])


def gradient_profile(run: Run, pairs: Sequence[Pair]) -> dict[str, Any]:
    """How much a target word depends on the source, from its start to its end: |d log p / d x_s|, mean over targets.

    `relative` divides by the mean over the words of the sentence, so 1 is all alike; `absolute` does not. The
    end of the sentence is left out.
    """
    encoded = encode_pairs(pairs, run.source_tokenizer, run.target_tokenizer)
    batch = Batch.of([pair for pair in encoded if pair[0] and pair[1]])
    near = batch.to(run.model.device)
    norms = source_gradients(run.model, near.source, near.target).cpu()
    said = (batch.target_output != PAD).sum(1, keepdim=True)
    by_position = norms.sum(1) / said
    words = (batch.source != PAD) & (batch.source != EOS)
    places = (torch.arange(words.shape[1]) + 0.5) / words.sum(1, keepdim=True).clamp_min(1)
    bins = (places * BINS).long().clamp_max(BINS - 1)
    mean = (by_position * words).sum(1, keepdim=True) / words.sum(1, keepdim=True).clamp_min(1)
    relative = by_position / mean.clamp_min(torch.finfo(mean.dtype).tiny)
    return {
        "bins": [round((number + 0.5) / BINS, 3) for number in range(BINS)],
        "relative": _binned(relative, bins, words),
        "absolute": _binned(by_position, bins, words),
        "sentences": len(batch),
    }


def _binned(values: Tensor, bins: Tensor, real: Tensor) -> list[float | None]:
    """The mean in each bin; None where there is nothing."""
    chosen = [values[real & (bins == number)] for number in range(BINS)]
    return [float(each.double().mean()) if each.numel() else None for each in chosen]


def _shares(run: Run, pairs: Sequence[Pair]) -> dict[str, float | None]:
    names = {
        "entropy": "entropy",
        "spread": "spread",
        "share_eos": "end",
        "share_punctuation": "punctuation",
        "end_pieces": "end_pieces",
        "punctuation_pieces": "punctuation_pieces",
    }
    if run.model.cross_attention is None:
        return dict.fromkeys(names)
    found = attention_shares(run, pairs)
    return {name: getattr(found, attribute) for name, attribute in names.items()}


def _alignments(run: Run, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Made to say the references, so that the target words are the same for all systems."""
    if run.model.cross_attention is None or not pairs:
        return []
    tokenizers = run.source_tokenizer, run.target_tokenizer
    encoded = encode_pairs(pairs, *tokenizers)
    found = align(run.model, tokenizers, [source for source, _ in encoded], [target for _, target in encoded])
    return [
        {
            "source": list(each.source),
            "target": list(each.target),
            "weights": [[round(weight, 4) for weight in row] for row in each.weights.tolist()],
            "reading": each.reading,
            "gold": None if pair.gold is None else sorted(map(list, pair.gold)),
        }
        for each, pair in zip(found, pairs, strict=True)
    ]
