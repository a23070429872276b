"""Published results, each with the reason why it is or is not comparable with ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Anchor:
    """A result of a paper, the systems of ours to compare (`ours`), and why they are comparable or not.

    `figures` are its numbers in words. `sweeps` are the sweeps whose report shows it; None means a comparison of
    systems.
    """

    paper: str
    task: str
    figures: str
    why: str
    ours: tuple[str, ...] = ()
    sweeps: tuple[str | None, ...] = (None,)


ANCHORS = (
    Anchor(
        "Bahdanau et al. 2015",
        "WMT14 English-French, BLEU",
        "without attention 13.93 (at most 30 words), 17.82 (at most 50); with 21.50, 26.75",
        "The gain and its growth with length are comparable. The scores are not: theirs are on news, with 348 million "
        "words of training text and another tokenization.",
        ("none", "bahdanau"),
    ),
    Anchor(
        "Luong et al. 2015",
        "WMT14 English-German, BLEU",
        "base 11.3, reversed source 12.6, dropout 14.0, global attention 16.8, input feeding 18.1, local-p general "
        "19.0, unknown words replaced 20.9",
        "The order is comparable. Each of their rows adds to the row before; ours differ only in the attention. The "
        "languages differ.",
        ("none", "luong_dot", "luong_general", "luong_concat"),
    ),
    Anchor(
        "Luong et al. 2015",
        "Alignment error rate, English-German",
        "0.34 to 0.39",
        "Comparable only if the corpus has gold alignments. They found that it does not follow BLEU.",
    ),
    Anchor(
        "Britz et al. 2017",
        "WMT15 English-German, newstest2013, BLEU",
        "additive 22.33 to 22.47; multiplicative 22.33 at 256 units, 18.22 at 1,024 (unscaled); none 9.98 to 11.57",
        "Comparable: whether attention helps, and whether an unscaled product gets worse with width. Scores are not.",
        ("none", "bahdanau", "luong_general"),
        (None, "scaled"),
    ),
    Anchor(
        "Tutorials on Multi30k",
        "German-English captions, tokenized BLEU",
        "LSTM 13.76, GRU with the context at each step 20.61, Bahdanau 28.30, Transformer 36.52",
        "The order none, attention, Transformer is comparable. Tokenized BLEU is not sacreBLEU. Equal time on a CPU "
        "favors recurrent systems, whose steps are 2 to 3 times faster there.",
        ("none", "bahdanau", "transformer"),
    ),
    Anchor(
        "Vaswani et al. 2017",
        "English-German, newstest2013, table 3 A, BLEU",
        "1 head 24.9, 4 heads 25.5, 8 heads 25.8, 16 heads 25.8, 32 heads 25.4",
        "Both have constant computation, so the shape is comparable: one head is worst, then flat. Theirs has d = 512, "
        "so heads are wider there.",
        sweeps=("heads",),
    ),
    Anchor(
        "Press et al. 2022 (ALiBi)",
        "WikiText-103, trained at 512, perplexity at 3,072",
        "ALiBi 18.40; sinusoidal trained at 3,072: 18.67",
        "Comparable: whether a scheme works beyond the training length. Theirs is a decoder and perplexity, ours an "
        "encoder-decoder and BLEU.",
        sweeps=("positions",),
    ),
    Anchor(
        "Su et al. 2021 (RoPE)",
        "WMT14 English-German, BLEU",
        "sinusoidal 27.3, RoPE 27.5",
        "The size of the difference within the training lengths is comparable.",
        sweeps=("positions",),
    ),
    Anchor(
        "Michel et al. 2019",
        "WMT14 English-French, pruning heads",
        "8 of 96 encoder heads matter if removed alone; about 20 % of all can be removed without loss; all but one "
        "of the last cross-attention: -13.56 BLEU",
        "The shape of the curve and the most sensitive role are comparable. Their Transformer is larger and has more "
        "redundant heads.",
        sweeps=("prune",),
    ),
)


def anchors(about: Mapping[str, Any]) -> list[Anchor]:
    """The published results for a comparison: of its sweep, or of systems."""
    return [anchor for anchor in ANCHORS if about.get("sweep") in anchor.sweeps]
