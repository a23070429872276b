"""Warnings about heads whose weights are easily misread, each with what it does not mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from regard.base.checks import checked
from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile, ModelProfile

#: Printed once with any list of findings.
CAVEAT = "Weights show what a model attended to, not why it decided. One text is not evidence for a role."
#: A head is uniform above this share of the largest entropy. A head with equal weights on 450 of 512 tokens reaches
#: it, so its preferences mean very little.
UNIFORM = 0.98
#: Two maps are near copies above this cosine. Heads that put most weight on the same token have similar maps for that
#: reason alone: on a sentence of 16 tokens, 42 of MiniLM's 72 heads reach 0.9 with another head, and 14 reach 0.95.
COPY = 0.95
#: Least numbers of free weights, the sum over queries of n_i - 1, for a warning of uniform heads and of near copies.
#: With this many random weights (Dirichlet), a head is uniform, and a pair is near copies, in at most 1 of 600 draws.
#: Two random heads on 3 tokens are near copies in 1 of 95 draws, on 2 tokens in 1 of 6. For near copies, only weights
#: on tokens that are not special count as free, because many heads put most weight on special tokens in every text:
#: on "[CLS] short . [SEP]", 55 of MiniLM's 72 heads reach 0.95 with another head.
FREE_UNIFORM, FREE_COPIES = 6, 12
#: Heads of a layer have collapsed if their mean agreement (`LayerProfile.agreement`) is above this cosine. Random heads
#: have 0 and MiniLM's layers 0.05 to 0.29. Heads that trained with too much dropout have 0.5 (example 26).
COLLAPSED = 0.45
#: Least numbers of heads and of free weights for that warning.
COLLAPSED_HEADS, FREE_COLLAPSED = 3, 100
#: Scores have too large a factor if it is above this multiple of 1 / sqrt(D), and all heads of the layer have less than
#: this share of the largest entropy. T5 has a factor of 1, with smaller weights: its rows are not that sharp.
LARGE_SCALE, SATURATED = 2.0, 0.25
#: Statistic -> the tokens on which it is the share of the weight.
COMMON_TARGETS = {"special": "special tokens", "first": "the first token"}
#: A head is reported above this share of weight on special tokens, or on the first token.
SPECIAL = 0.9


@dataclass(frozen=True)
class Finding:
    """One warning: its kind, the number of the layer, the heads, the value that caused it, and a sentence.

    >>> import torch, regard as rg
    >>> from regard.stats import findings, profile
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> maps = {"layers.2": rg.Attention()(x, x, x).weights}
    >>> [(finding.kind, finding.layer, finding.heads) for finding in findings(profile(maps, ["a", "b", "c"]))]
    [('uniform', 2, (0,))]
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    number: float
    sentence: str


@checked
def findings(profile: ModelProfile) -> list[Finding]:
    """All warnings about a profile, layer by layer.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> weights = rg.Attention()(x, x, x).weights
    >>> [finding.kind for finding in findings(profile({"layer": weights}, ["a", "b", "c"]))]
    ['uniform']
    """
    return [finding for layer in profile.layers for check in CHECKS for finding in check(layer.number, layer)]


def uniform_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads with nearly equal weights on all tokens."""
    heads, value = _above(layer.values.get("evenness"), UNIFORM)
    if heads and _free(layer) >= FREE_UNIFORM:
        names, s = head_names(number, heads), ending(heads)
        whole = 1 < len(heads) == layer.num_heads
        why = " These are all heads of the layer: its scores may be scaled wrongly." if whole else ""
        yield Finding(
            "uniform",
            number,
            heads,
            value,
            f"{names} give{s} all tokens nearly the same weight ({value:.1%} of the largest entropy or more), as an "
            f"average does.{why} The strongest links differ little from the others. This does not make them useless.",
        )


def special_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads with nearly all weight on special tokens such as [CLS] and [SEP]."""
    heads, value = _above(layer.values.get("special"), SPECIAL)
    if heads:
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "special",
            number,
            heads,
            value,
            f"{names} put{s} {value:.0%} of the weight or more on special tokens in this text. This does not mean that "
            "these tokens matter, and other texts may differ.",
        )


def sink_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads with nearly all weight on the first token, except for heads that `special_heads` reports."""
    choice = layer.allowed > 1
    # A query with a single key has no choice; under a causal mask that is the first query, on the first key.
    forced = (~choice).sum(-1)
    share = (layer.received[:, 0] - forced) / choice.sum(-1).clamp_min(1)
    share = share.where(choice.sum(-1) > 1, 0.0)
    special = layer.values.get("special")
    heads, value = _above(share if special is None else share.where(special <= SPECIAL, 0.0), SPECIAL)
    if heads:
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "sink",
            number,
            heads,
            value,
            f"{names} put{s} {value:.0%} of the weight or more on the first token in this text. This does not mean "
            "that the first token matters.",
        )


def copied_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Groups of heads with nearly the same map; each head is a near copy of at least one other head of its group."""
    for group in _groups(layer.similarity, COPY) if _free(layer, layer.num_special) >= FREE_COPIES else ():
        value = min(max(float(layer.similarity[a, b]) for b in group if b != a) for a in group)
        shared = next((target for name, target in COMMON_TARGETS.items() if _most_on(name, layer, group)), None)
        why = f" Each puts most of its weight on {shared}, which alone makes maps similar." if shared else ""
        yield Finding(
            "copies",
            number,
            group,
            value,
            f"{head_names(number, group)} have nearly the same map (cosine {value:.2f} or more with "
            f"another of the group).{why} What they carry may still differ.",
        )


def collapsed_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Layers whose heads treat each query alike, without being copies. Only where all queries have the same keys."""
    H, same_keys = layer.num_heads, bool((layer.allowed == layer.allowed[:, :1]).all())
    if layer.agreement is None or H < COLLAPSED_HEADS or not same_keys or _free(layer) < FREE_COLLAPSED:
        return
    value = float((layer.agreement.sum() - layer.agreement.trace()) / (H * (H - 1)))
    if value > COLLAPSED:
        yield Finding(
            "collapse",
            number,
            tuple(range(H)),
            value,
            f"The {H} heads of layer {number} attend alike, query by query (mean cosine {value:.2f} after the mean "
            "row of each head is subtracted). Heads that stay alike are often too narrow, have too much dropout, or "
            "were trained for too few steps. If the task needs one head only, this does no harm.",
        )


def saturated_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Layers whose scores have a large factor and whose rows are nearly one-hot."""
    evenness = layer.values.get("evenness")
    if evenness is None or layer.scale is None or layer.scale <= LARGE_SCALE or _free(layer) < FREE_UNIFORM:
        return
    value = float(evenness.max())
    if value < SATURATED:
        yield Finding(
            "scale",
            number,
            tuple(range(layer.num_heads)),
            value,
            f"The scores of layer {number} are {layer.scale:.1f} times as large as with the factor 1/sqrt(D), and all "
            f"its heads give one token nearly all weight (at most {value:.1%} of the largest entropy). Then softmax "
            "has almost no gradient. Divide q . k by sqrt(D), unless the weights were initialized for another factor.",
        )


#: A check takes the number of a layer and its profile and yields findings. A new check is one function here.
CHECKS: tuple[Callable[[int, LayerProfile], Iterator[Finding]], ...] = (
    uniform_heads,
    special_heads,
    sink_heads,
    copied_heads,
    collapsed_heads,
    saturated_heads,
)


def _most_on(name: str, layer: LayerProfile, heads: tuple[int, ...]) -> bool:
    """Whether this statistic, a share, is above 0.5 for each of the heads."""
    return name in layer.values and bool((layer.values[name][list(heads)] > 0.5).all())


def _free(layer: LayerProfile, num_left_out: int = 0) -> float:
    """The number of weights that a head of the layer can choose freely, if some keys are left out."""
    return float((layer.allowed - num_left_out - 1).clamp_min(0).sum(-1).amax())


def _above(values: Tensor | None, threshold: float) -> tuple[tuple[int, ...], float]:
    """The heads above a threshold, and the smallest of their values."""
    above = {head: v for head, v in enumerate([] if values is None else values.tolist()) if v > threshold}
    return tuple(above), min(above.values(), default=0.0)


def _groups(similarity: Tensor, threshold: float) -> list[tuple[int, ...]]:
    """Groups of at least two heads that are connected by similarities above the threshold."""
    remaining, groups = set(range(len(similarity))), []
    while remaining:
        group, added = set(), {min(remaining)}
        while added:
            group |= added
            similar = {int(b) for a in added for b in (similarity[a] > threshold).nonzero().flatten()}
            added = similar - group
        remaining -= group
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return groups


def head_names(layer: int, heads: tuple[int, ...]) -> str:
    """`L2.H1, L2.H4 and L2.H5`."""
    *others, last = (head_name(layer, head) for head in heads)
    return f"{', '.join(others)} and {last}" if others else last


def ending(heads: tuple[int, ...]) -> str:
    """The ending of the verb after the names of these heads."""
    return "s" if len(heads) == 1 else ""
