"""Warnings about heads, masks and predictions, as findings with a sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.base.checks import Count, HoldsMaps, checked
from regard.base.errors import RegardError
from regard.base.shapes import as_tensor, unusual_kind
from regard.maps import AttentionMap, DenseMap, KeyTotals, MassOn, MassWhere
from regard.pieces import mask
from regard.stats.numbering import head_name, layer_numbers
from regard.stats.profile import LayerProfile, ModelProfile, profile, token_names

# Warnings about heads whose weights are easily misread, each with what it does not mean. Each check takes the number of
# a layer and its profile.


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
def findings(
    source: ModelProfile | AttentionMap | HoldsMaps | Mapping[str, AttentionMap] | Tensor,
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    batch: Count = 0,
) -> list[Finding]:
    """All warnings about a profile, a map, the maps of a watched model or a dict of maps, layer by layer.

    A tensor of weights (I, J), (H, I, J) or (B, H, I, J) is a map too.

    `tokens` are the tokens of the keys, and `query_tokens` those of the queries if they differ. By default they are
    those that a watched model read. Without tokens no token is known to be special. `batch` is the index of one text.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> [finding.kind for finding in rg.findings(rg.Attention()(x, x, x).weights)]
    ['uniform']
    """
    if isinstance(source, ModelProfile):
        layers: Iterable[LayerProfile] = source.layers
    else:
        source = _as_map(source) if isinstance(source, Tensor) else source
        layers = _measured(source, tokens, query_tokens, batch)
    return [finding for layer in layers for check in CHECKS for finding in check(layer.number, layer)]


def _as_map(weights: Tensor) -> AttentionMap:
    """The map of weights (I, J), (H, I, J) or (B, H, I, J), with the missing axes of size 1 in front."""
    if kind := unusual_kind(weights):
        raise RegardError(f"findings: the tensor of weights is {kind}. Give a dense tensor of real numbers.")
    if weights.ndim not in (2, 3, 4):
        raise RegardError(
            f"findings: the weights have shape {(*weights.shape,)}. Expected (I, J), (H, I, J) or (B, H, I, J)."
        )
    found = DenseMap(weights[(None,) * (4 - weights.ndim)])  # refuses the meta device, where no number can be read
    if not weights.numel() or not bool(weights.isfinite().all()):
        reason = "no numbers" if not weights.numel() else "NaN or infinite numbers"
        raise RegardError(f"findings: the weights {(*weights.shape,)} hold {reason}.")
    return found


def _measured(
    source: Any, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None, batch: int
) -> Iterator[LayerProfile]:
    """The profile of each layer. Its tokens are those given, else those that the watched model read, else numbers."""
    maps = source.maps if isinstance(source, HoldsMaps) else source
    maps = maps if isinstance(maps, Mapping) else {"layer": maps}
    if not maps:
        raise RegardError("findings: there are no maps. Watch at least one attention layer.")
    for number, (name, weights) in zip(layer_numbers(maps), maps.items(), strict=True):
        keys, queries = tokens, query_tokens
        if keys is None and isinstance(source, HoldsMaps):
            names = source.names_of(weights, batch)
            queries, keys = names if isinstance(names, tuple) else (names, names)
        keys, queries = token_names(weights, keys, queries)
        yield profile({name: weights}, keys, query_tokens=queries, batch=batch, numbers=[number]).layers[0]


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
    choice, first = layer.allowed > 1, layer.first_key
    # A query with a single key has no choice; under a causal mask that is the first query, on the first key.
    forced = ((layer.allowed == 1) & (layer.links.keys[:, :, 0] == first)).sum(-1)
    share = (layer.received[:, first] - forced) / choice.sum(-1).clamp_min(1)
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
    """The number of weights that a head can choose freely, if so many keys are left out: sum_i (n_i - 1).

    The mask may leave heads different numbers n_i of keys; this is the largest sum.
    """
    return float((layer.allowed - num_left_out - 1).clamp_min(0).sum(-1).amax())


def _above(values: Tensor | None, threshold: float) -> tuple[tuple[int, ...], float]:
    """The heads with values (H,) above a threshold, and the smallest of these values, which a sentence can promise."""
    above = {head: value for head, value in enumerate([] if values is None else values.tolist()) if value > threshold}
    return tuple(above), min(above.values(), default=0.0)


def _groups(similarity: Tensor, threshold: float) -> list[tuple[int, ...]]:
    """Groups of at least two heads that are connected by similarities (H, H) above the threshold."""
    remaining, groups = set(range(len(similarity))), []
    while remaining:
        group, added = set(), {min(remaining)}  # grows by all heads that are similar to a new one
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


# Warnings about wrong masks: weight on future tokens or on padding, or one mask for texts of different lengths.


#: Said if the weights of texts of different lengths are positive on the same keys.
ONE_MASK = "Texts of different lengths attend to the same keys: one mask seems to be used for the whole batch."
#: Weight on masked keys is reported above this share of a row. A boolean mask gives exactly 0. Models that add a large
#: negative number instead may leave a little weight in half precision, where a weight is rounded to 1e-3 of its value.
NEGLIGIBLE = 1e-4


@checked
def mask_findings(
    maps: Mapping[str, AttentionMap],
    *,
    causal: bool = False,
    real: Tensor | Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Finding]:
    """Warnings about masks, checked against what should hold: that the model is causal, and which keys are real.

    `real` is lengths (B,) or a boolean (B, J) with True = real, as for `padding`. The kinds of findings are "leak"
    (weight on future tokens), "padding" (weight on padding) and "unseen" (real keys with weight 0 for every query,
    while other keys have weight). If texts of different lengths attend to the same keys, the sentence adds that one
    mask seems to be used for the whole batch; broadcasting along the wrong axis causes this. Of signed weights, shares
    of |weight| are read, so that opposite signs do not cancel. `numbers` are the numbers of the layers; by default they
    are read from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> [finding.kind for finding in mask_findings({"layer": rg.Attention()(x, x, x).weights}, causal=True)]
    ['leak']
    """
    found = []
    for number, weights in zip(layer_numbers(maps, numbers), maps.values(), strict=True):
        weights = weights if weights.has_shares else weights.shares()
        if causal:
            found += leaks(number, weights)
        if real is not None:
            found += broadcasts(number, weights, _real(real, weights.shape))
    return found


def leaks(number: int, weights: AttentionMap) -> Iterator[Finding]:
    """Heads of the layer `number` with weight on tokens after the query."""
    share = weights.summarize(MassWhere(~mask.causal()))[0].amax((0, 2))
    heads = tuple((share > NEGLIGIBLE).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "leak",
            number,
            heads,
            value,
            f"{names} put{s} up to {value:.1%} of a row on tokens after the query, but the "
            "model should be causal: the causal mask is missing, transposed or shifted. Do not trust next-token scores "
            "of this model.",
        )


def broadcasts(number: int, weights: AttentionMap, real: Tensor) -> Iterator[Finding]:
    """Heads of the layer `number` with weight on padding, and heads with weight 0 on real keys; `real` is (B, J)."""
    real = real.to(weights.device)
    padding, received = weights.summarize(MassOn(~real), KeyTotals())
    shared = _shared(received, real)
    why = f" {ONE_MASK}" if shared else ""
    I, J = weights.shape[2:]
    # rows of padding do not matter; the queries are the last keys, or it is not known which of them are padding
    queries = real[:, None, J - I :] if I <= J else real.new_ones(1, 1, I)
    share = (padding * queries).amax((0, 2))
    heads = tuple((share > NEGLIGIBLE).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "padding",
            number,
            heads,
            value,
            f"{names} put{s} up to {value:.1%} of a row on padding. The mask seems to be "
            f"missing, inverted, or broadcast along the wrong axis.{why} The output then depends on the padding.",
        )
    yield from _unseen(number, received, real, why)


def _unseen(number: int, received: Tensor, real: Tensor, why: str) -> Iterator[Finding]:
    """Heads with weight 0 on some real keys for every query, and positive weight on others; `why` ends the sentence.

    `number` is that of the layer. `received` (B, H, J) is the weight that each key receives, `real` is (B, J).
    """
    unseen = (received <= 0) & real[:, None] & (received.amax(-1, keepdim=True) > 0)
    heads = tuple(unseen.any(-1).any(0).nonzero().flatten().tolist())
    if heads:
        count = int(unseen[:, list(heads)].sum(-1).amax())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "unseen",
            number,
            heads,
            float(count),
            f"{names} never attend{s} to up to {count} real token{'s' * (count > 1)} of a "
            f"text: their weight is exactly 0 for every query.{why} A window or a chunk can cause this too.",
        )


def _shared(received: Tensor, real: Tensor) -> bool:
    """Whether the texts of a batch attend to the same keys although their real keys (B, J) differ.

    `received` (B, H, J) is the weight that each key receives.
    """
    attended = (received > 0).any(1)
    return bool((real != real[:1]).any()) and bool((attended == attended[:1]).all())


def _real(real: Tensor | Sequence[int], shape: tuple[int, int, int, int]) -> Tensor:
    """Which keys are real, (B, J), from lengths (B,) or booleans (B, J)."""
    B, _, _, J = shape
    real = as_tensor(real)
    if real.dtype in (torch.int32, torch.int64) and real.shape == (B,):
        return torch.arange(J, device=real.device) < real[:, None]
    if real.dtype == torch.bool and real.shape == (B, J):
        return real
    raise RegardError(
        f"mask_findings: real are {B} integer lengths or booleans of shape ({B}, {J}) with True = real, "
        f"got {real.dtype} of shape {tuple(real.shape)}. An attention_mask of 0 and 1 becomes mask.bool()."
    )


# Warnings about what a whole model predicts: it reads later tokens, or it predicts another token than the next.


#: Logits count as changed above this share of the largest logit.
CHANGED = 1e-4
#: The tokens that the logits may predict instead of the next one, by their distance from the token that is read.
OFFSETS = {-1: "the token before the one that they read", 0: "the token that they read", 2: "the next token but one"}
#: Another token is predicted if it has a loss this much smaller than the next one, in nats a token.
SMALLER = 0.5
#: The number of the layer in a finding about the whole model.
WHOLE_MODEL = -1
#: Fewest tokens of a text: each offset needs a position where all tokens exist.
SHORTEST = 5


@checked
@torch.no_grad()
def prediction_findings(model: Callable[[Tensor], Tensor], ids: Tensor) -> list[Finding]:
    """Warnings about a trained model of the next token: "leak" and "offset". No map is needed.

    `model` maps ids (B, I) to logits (B, I, V). `ids` (B, I + 1) are texts of one length without padding: the model
    reads all but the last token, and position t should predict token t + 1. For an encoder and decoder, ids are those
    of the target: `lambda ids: model(source, ids)`.

    - "leak": a change of the last token changes earlier outputs, so the model reads later tokens. The sentence
      gives the loss at the last position, where no later token can be read.
    - "offset": the logits fit another token better than the next one, so the labels were shifted wrongly.

    Findings are about the whole model: `layer` is -1 and `heads` are empty. `number` is the largest change of a logit,
    or the distance from the token that is read to the token that is predicted.

    >>> import torch
    >>> ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 2, 7, 0, 5]])
    >>> def repeats_its_input(ids):
    ...     return 9.0 * torch.nn.functional.one_hot(ids, 8)
    >>> [finding.kind for finding in prediction_findings(repeats_its_input, ids)]
    ['offset']
    """
    _check_ids(ids)
    read = ids[:, :-1]
    logits = _logits(model, read)
    if not torch.equal(logits, _logits(model, read)):
        raise RegardError(
            "prediction_findings: two calls with equal ids gave different logits. Call model.eval() to switch off "
            "dropout."
        )
    changed = _logits(model, torch.cat([read[:, :-1], _other_tokens(read)[:, None]], 1))
    return [*_leak(logits, changed, ids), *_offset(logits, ids)]


def _leak(logits: Tensor, changed: Tensor, ids: Tensor) -> Iterator[Finding]:
    """The finding that later tokens are read. `changed` are the logits (B, I, V) after a change of the last token.

    `ids` (B, I + 1) are the texts with the token that follows the last one that was read.
    """
    change = (logits - changed)[:, :-1].abs().amax((0, 2))
    count = int((change > CHANGED * logits.abs().max()).sum())
    if count:
        loss = cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(0)
        yield Finding(
            "leak",
            WHOLE_MODEL,
            (),
            float(change.max()),
            f"The model reads later tokens: a change of the last token changes the outputs at {count} of the "
            f"{len(change)} positions before it. The loss is {float(loss[:-1].mean()):.2f} nats a token at these "
            f"positions and {float(loss[-1]):.2f} at the last, where no later token can be read. Look for a missing "
            "causal mask (mask_findings) and for cross-attention whose keys are those of the target.",
        )


def _offset(logits: Tensor, ids: Tensor) -> Iterator[Finding]:
    """The finding that another token than the next is predicted: the loss for it is much smaller.

    `logits` are (B, I, V), and `ids` (B, I + 1) the texts.
    """
    positions = torch.arange(1, ids.shape[1] - 2, device=ids.device)  # where every offset has a token
    losses = {by: float(cross_entropy(logits[:, positions].mT, ids[:, positions + by])) for by in (1, *OFFSETS)}
    best = min(losses, key=losses.__getitem__)
    if losses[best] < losses[1] - SMALLER:
        yield Finding(
            "offset",
            WHOLE_MODEL,
            (),
            float(best),
            f"The logits predict {OFFSETS[best]} ({losses[best]:.2f} nats a token) rather than the next token "
            f"({losses[1]:.2f}). The labels of position t must be the token t + 1: shift them once, either in the data "
            "or in the model.",
        )


def _other_tokens(read: Tensor) -> Tensor:
    """For each text (B, I) a token that differs from its last one, and that the texts contain; (B,)."""
    known = read.unique()
    if len(known) < 2:
        raise RegardError("prediction_findings: all ids are equal, so no token can be replaced. Give a text.")
    return known[(torch.searchsorted(known, read[:, -1].contiguous()) + 1) % len(known)]


def _logits(model: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
    """The logits (B, I, V) in float32 for the ids `read` (B, I); an error if the model returns anything else."""
    logits = model(read)
    if not isinstance(logits, Tensor) or logits.shape[:2] != read.shape or logits.ndim != 3:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RegardError(
            f"prediction_findings: model(ids) must return logits (B, I, V), here {(*read.shape, 'V')}, got {got}. "
            "For a model of transformers give lambda ids: model(ids).logits."
        )
    return logits.float()


def _check_ids(ids: Tensor) -> None:
    """Refuse all but integers (B, I + 1) with at least one text and `SHORTEST` tokens a text."""
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not len(ids) or ids.shape[1] < SHORTEST:
        raise RegardError(
            f"prediction_findings: ids are integers (B, I + 1) with at least {SHORTEST} tokens a text, "
            f"got {ids.dtype} of shape {tuple(ids.shape)}."
        )


# One line for each kind of warning, for many heads together.


#: Kind of warning -> its text for several heads, for one head, and what it does not mean.
WARNINGS = {
    "uniform": (
        "give all tokens nearly the same weight",
        "gives all tokens nearly the same weight",
        "this does not make them useless",
    ),
    "special": (
        "put 90 % of their weight or more on special tokens",
        "puts 90 % of its weight or more on special tokens",
        "they may not matter",
    ),
    "sink": (
        "put 90 % of their weight or more on the first token",
        "puts 90 % of its weight or more on the first token",
        "they may not matter",
    ),
    "copies": (
        "have nearly the same map as another",
        "has nearly the same map as another",
        "what they carry may still differ",
    ),
}


def warning_lines(findings: Sequence[Finding], num_heads: int) -> dict[str, str]:
    """Kind of warning -> one line for all warnings of this kind, about a model of `num_heads` heads.

    >>> print(warning_lines([Finding("sink", 2, (0, 3), 0.95, "A sentence.")], num_heads=8)["sink"])
    2 of 8 heads (L2.H0, ...) put 90 % of their weight or more on the first token; they may not matter.
    """
    lines = {}
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        lines[kind] = _line(same, num_heads) if kind in WARNINGS else _first_of(same)
    return lines


def _line(same: Sequence[Finding], num_heads: int) -> str:
    """One line for all findings of one kind of `WARNINGS`."""
    heads = [head_name(finding.layer, head) for finding in same for head in finding.heads]
    several, single, caution = WARNINGS[same[0].kind]
    text = several if len(heads) > 1 else single
    return f"{len(heads)} of {num_heads} heads ({heads[0]}{', ...' if len(heads) > 1 else ''}) {text}; {caution}."


def _first_of(same: Sequence[Finding]) -> str:
    """The sentence of the first of these findings, and how many more there are."""
    more = f" The same in {len(same) - 1} more." if len(same) > 1 else ""
    return same[0].sentence + more
