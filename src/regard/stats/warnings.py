"""What to be warned of when reading the weights of a head, and what the warning does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from regard.checks import checked
from regard.stats.profile import LayerProfile, Profile

#: Said once above any list of findings.
CAVEAT = "Weights show where a model looked, not why it decided; one text is no evidence for a role."
#: Share of the largest entropy from which a head counts as uniform: as even as one that looks at 450 of 512
#: tokens alike, so which of them it prefers says next to nothing.
UNIFORM = 0.98
#: Cosine from which two maps count as near copies. Heads that rest on the same token are alike by that alone: on a
#: sentence of 16 tokens, 42 of MiniLM's 72 heads reach 0.9 with another one, 14 reach 0.95.
COPY = 0.95
#: Least number of free weights, the sum over queries of n_i - 1, for a statement about the evenness of a head and
#: about its likeness to another head. With as many weights drawn at random (Dirichlet) a head counts as uniform, and
#: a pair as near copies, in at most 1 of 600 draws; two heads on 3 tokens are near copies in 1 of 95, on 2 in 1 of 6.
#: Heads rest on special tokens, whatever the text, so for likeness only weights on other keys count as free: of
#: MiniLM's 72 heads, 55 reach 0.95 with another one on "[CLS] short . [SEP]".
FREE_UNIFORM, FREE_COPIES = 6, 12
#: Statistic -> where heads with most of it rest.
RESTING = {"special": "special tokens", "first": "the first token"}
#: Share of weight on special tokens from which a head counts as looking at nothing else.
SPECIAL = 0.9


@dataclass(frozen=True)
class Finding:
    """One warning: its kind, the layer (number), the heads, the number that tripped it, and a sentence.

    >>> import torch, regard as rg
    >>> from regard.stats import findings, profile
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> maps = {"layers.2": rg.attend(rg.Attention(), x, x, x).weights}
    >>> [(finding.kind, finding.layer, finding.heads) for finding in findings(profile(maps, ["a", "b", "c"]))]
    [('uniform', 2, (0,))]
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    number: float
    sentence: str


@checked
def findings(profile: Profile) -> list[Finding]:
    """All warnings about a profile, layer by layer.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> weights = rg.attend(rg.Attention(), x, x, x).weights
    >>> [finding.kind for finding in findings(profile({"layer": weights}, ["a", "b", "c"]))]
    ['uniform']
    """
    found = []
    for layer in profile.layers:
        for check in CHECKS:
            found.extend(check(layer.number, layer))
    return found


def uniform_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads that look at everything alike."""
    heads, value = _above(layer.values.get("evenness"), UNIFORM)
    if heads and _free(layer) >= FREE_UNIFORM:
        who, s = name_of(number, heads), ending(heads)
        whole = 1 < len(heads) == layer.num_heads
        why = " That is every head of the layer: its scores may have lost their scale." if whole else ""
        yield Finding(
            "uniform",
            number,
            heads,
            value,
            f"{who} look{s} at all tokens nearly alike ({value:.1%} of the largest entropy or more): the text is "
            f"averaged.{why} The strongest links stand out by very little, and that does not mean they are useless.",
        )


def special_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads that look at [CLS], [SEP] and the like, and at little else."""
    heads, value = _above(layer.values.get("special"), SPECIAL)
    if heads:
        who, s = name_of(number, heads), ending(heads)
        yield Finding(
            "special",
            number,
            heads,
            value,
            f"{who} put{s} {value:.0%} of the weight or more on special tokens, and on this text mostly rest{s}. That "
            "does not say that those tokens matter, nor what happens on other texts.",
        )


def sink_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Heads that rest on the first token; where that is a special token, `special_heads` says so already."""
    choice = layer.allowed > 1
    # A query with a single key has no choice; under a causal mask that is the first query, on the first key.
    forced = (~choice).sum(-1)
    share = (layer.received[:, 0] - forced) / choice.sum(-1).clamp_min(1)
    share = share.where(choice.sum(-1) > 1, 0.0)
    special = layer.values.get("special")
    heads, value = _above(share if special is None else share.where(special <= SPECIAL, 0.0), SPECIAL)
    if heads:
        who, s = name_of(number, heads), ending(heads)
        yield Finding(
            "sink",
            number,
            heads,
            value,
            f"{who} put{s} {value:.0%} of the weight or more on the first token, whatever it is, and on this text "
            f"mostly rest{s}. That does not say that the first token matters.",
        )


def copied_heads(number: int, layer: LayerProfile) -> Iterator[Finding]:
    """Groups of heads whose maps are nearly the same, each head linked to another of its group."""
    for group in _groups(layer.similarity, COPY) if _free(layer, layer.num_special) >= FREE_COPIES else ():
        value = min(max(float(layer.similarity[a, b]) for b in group if b != a) for a in group)
        shared = next((place for name, place in RESTING.items() if _most_on(name, layer, group)), None)
        why = f" Each puts most of its weight on {shared}, which alone makes maps alike." if shared else ""
        yield Finding(
            "copies",
            number,
            group,
            value,
            f"{name_of(number, group)} look at nearly the same places (cosine {value:.2f} or more with "
            f"another of the group).{why} They may still carry different values onwards.",
        )


#: A check takes the number of a layer and its profile and gives its findings. A new one is one function here.
CHECKS: tuple[Callable[[int, LayerProfile], Iterator[Finding]], ...] = (
    uniform_heads,
    special_heads,
    sink_heads,
    copied_heads,
)


def _most_on(name: str, layer: LayerProfile, heads: tuple[int, ...]) -> bool:
    """Whether all these heads have more than half of a statistic that is a share."""
    return name in layer.values and bool((layer.values[name][list(heads)] > 0.5).all())


def _free(layer: LayerProfile, num_left_out: int = 0) -> float:
    """How many weights a head of the layer is free to choose, among the keys that are not left out."""
    return float((layer.allowed - num_left_out - 1).clamp_min(0).sum(-1).amax())


def _above(values: Tensor | None, threshold: float) -> tuple[tuple[int, ...], float]:
    """The heads above a threshold, and the least of their values."""
    above = {head: v for head, v in enumerate([] if values is None else values.tolist()) if v > threshold}
    return tuple(above), min(above.values(), default=0.0)


def _groups(similarity: Tensor, threshold: float) -> list[tuple[int, ...]]:
    """Heads joined by similarities above the threshold, groups of one left out."""
    left, groups = set(range(len(similarity))), []
    while left:
        group, fresh = set(), {min(left)}
        while fresh:
            group |= fresh
            near = {int(b) for a in fresh for b in (similarity[a] > threshold).nonzero().flatten()}
            fresh = near - group
        left -= group
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return groups


def name_of(layer: int, heads: tuple[int, ...]) -> str:
    """`Layer 2 heads 1, 4 and 5`."""
    if len(heads) == 1:
        return f"Layer {layer} head {heads[0]}"
    return f"Layer {layer} heads {', '.join(map(str, heads[:-1]))} and {heads[-1]}"


def ending(heads: tuple[int, ...]) -> str:
    """The ending of a verb."""
    return "s" if len(heads) == 1 else ""
