"""`inspect`: attention shares, gradients and alignments of a trained run, for the report of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.lab.comparison.study import chosen_sentences
from regard.lab.data.batches import Batch
from regard.lab.data.corpus import encode_pairs
from regard.lab.data.length_limits import pairs_within
from regard.lab.data.vocabulary import EOS, PAD
from regard.lab.data.words import cut
from regard.lab.decoding.alignment import align
from regard.lab.decoding.translation import LIMIT
from regard.lab.evaluation.dependence import attention_shares, source_gradients
from regard.lab.runs.run import WEIGHTS

if TYPE_CHECKING:
    from regard.lab.data.corpus import Corpus, Pair
    from regard.lab.runs.run import Run

#: Test pairs for means over weights, and for gradients, which need a backward pass for each token.
PAIRS, GRADIENTS = 200, 40
#: Parts of a source, from its start to its end.
BINS = 10


def inspect(run: Run, corpus: Corpus, similarities: Sequence[float]) -> dict[str, Any]:
    """Shares and entropy of the cross-attention, gradients, and alignments of a few sentences, for looking.json.

    `similarities` are those of each test source to its nearest training source; they choose the aligned sentences.
    """
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
    """At most `count` of the pairs, evenly distributed.

    >>> spread("abcdefg", 3)
    ['a', 'c', 'e']
    """
    distance = max(1, len(pairs) // count)
    return list(pairs[: distance * count : distance])


def gradient_profile(run: Run, pairs: Sequence[Pair]) -> dict[str, Any]:
    """How much a target word depends on the source, from its start to its end: |d log p / d x_s|, mean over targets.

    `relative` divides by the mean over the words of the sentence, so equal gradients give 1; `absolute` does not. The
    end of the sentence is left out.
    """
    encoded = encode_pairs(pairs, run.source_tokenizer, run.target_tokenizer)
    batch = Batch.of([pair for pair in encoded if pair[0] and pair[1]])
    near = batch.to(run.model.device)
    norms = source_gradients(run.model, near.source, near.target).cpu()  # (B, T, S)
    num_tokens = (batch.target_output != PAD).sum(1, keepdim=True)
    by_position = norms.sum(1) / num_tokens  # (B, S): the mean over target tokens
    words = (batch.source != PAD) & (batch.source != EOS)
    # the middle of each word, from 0 (start of the source) to 1 (end)
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
    """The mean of values (B, S) in each bin, where `real`; None for an empty bin. `bins` (B, S) are numbers of bins."""
    chosen = [values[real & (bins == number)] for number in range(BINS)]
    return [float(members.double().mean()) if members.numel() else None for members in chosen]


def _shares(run: Run, pairs: Sequence[Pair]) -> dict[str, float | None]:
    """What the cross-attention attends to in `pairs`, by names of looking.json; None for a model without one.

    Shares of the weight on the end of the source and on its punctuation, the shares of these among source pieces
    (`..._pieces`), the entropy in nats, and `spread`, the entropy divided by that of equal weights (`AttentionShares`).
    """
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
    shares = attention_shares(run, pairs)
    return {name: getattr(shares, attribute) for name, attribute in names.items()}


def _alignments(run: Run, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Alignments under teacher forcing with the references, so all systems have the same target words."""
    if run.model.cross_attention is None or not pairs:
        return []
    tokenizers = run.source_tokenizer, run.target_tokenizer
    encoded = encode_pairs(pairs, *tokenizers)
    alignments = align(run.model, tokenizers, [source for source, _ in encoded], [target for _, target in encoded])
    return [
        {
            "source": list(alignment.source),
            "target": list(alignment.target),
            "weights": [[round(weight, 4) for weight in row] for row in alignment.weights.tolist()],
            "reading": alignment.reading,
            "gold": None if pair.gold is None else sorted(map(list, pair.gold)),
        }
        for alignment, pair in zip(alignments, pairs, strict=True)
    ]
