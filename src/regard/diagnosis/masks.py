"""Findings about masks: their shape and sense, whether hidden keys have weight 0, and which later keys are visible."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.calling import Caller
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.signatures import signature_of
from regard.diagnosis.weights import Measurement, close, measure
from regard.masks import Mask, mask_tensor

#: The senses of a mask: True may attend, True may not attend, and numbers that are added to the scores.
SENSES = ("keep", "drop", "additive")
SENSE_TEXTS = {
    "keep": "True or 1 = may attend",
    "drop": "True or 1 = may not attend",
    "additive": "added to the scores: 0 = may attend, -inf or a large negative number = may not",
}
#: A pair is hidden if its weight is below this share of its weight without a mask.
HIDDEN = 1e-3


@dataclass(frozen=True)
class Form:
    """A shape of a mask, with `shape` in words. `of` gives the mask of pairs (B, 1, I, J)."""

    shape: str
    of: Callable[[Tensor], Tensor]

    def back(self, pairs: Tensor) -> Tensor:
        """The pairs (B, 1, I, J) that such a mask holds: the first entry of an axis that it lacks stands for all."""
        of_batch, of_queries = (slice(None) if axis in self.shape else slice(1) for axis in "BI")
        return pairs[of_batch, :, of_queries].expand_as(pairs)

    @property
    def is_padding(self) -> bool:
        """Whether the mask hides the same keys from all queries: it has no axis of queries."""
        return "I" not in self.shape


@dataclass(frozen=True)
class Response:
    """What a mask did: `effect` is a sense of `SENSES`, or a key of `MISTAKES`.

    `parameter` is the argument of the function; the mask that it got has the shape `form` and the `kind` of `as_kind`.
    `amount` is the number in the text of some mistakes.
    """

    parameter: str
    form: Form
    kind: str
    effect: str
    amount: float = 0.0

    def mask(self, pairs: Tensor, dtype: torch.dtype) -> Tensor | Mask:
        """The mask tensor for which exactly `pairs` (B, 1, I, J) may attend."""
        shown = ~pairs if self.effect == "drop" else pairs
        return as_kind(self.form.of(shown), self.kind, dtype)


def as_kind(pairs: Tensor, kind: str, dtype: torch.dtype) -> Tensor | Mask:
    """The mask for `pairs` in a kind: booleans, numbers 0 and 1, "additive" (0 where True, else -inf), or a `Mask`."""
    if kind == "a Mask of Regard":
        return mask_tensor(pairs)
    if kind == "additive":
        return torch.zeros(pairs.shape, dtype=dtype).masked_fill(~pairs, -torch.inf)
    return pairs if kind == "boolean" else pairs.to(dtype)


def forms(caller: Caller, num_heads: int) -> list[Form]:
    """The shapes of masks that functions take, the usual ones first.

    In a function without a batch those without an axis B come first. `num_heads` is the size of an axis of heads.
    """
    B, I = caller.sizes.batch, caller.sizes.queries
    whole = [
        Form("(B, 1, I, J)", lambda p: p),
        Form("(B, I, J)", lambda p: p[:, 0]),
        Form("(I, J)", lambda p: p[0, 0]),
        Form("(B, H, I, J)", lambda p: p.expand(-1, num_heads, -1, -1)),
        Form("(B H, I, J)", lambda p: p.expand(-1, num_heads, -1, -1).flatten(0, 1)),
        Form("(1, I, J)", lambda p: p[:1, 0]),
    ]
    by_key = [
        Form("(B, J)", lambda p: p[:, 0, 0]),
        Form("(B, 1, 1, J)", lambda p: p[:, :, :1]),
        Form("(B, 1, J)", lambda p: p[:, 0, :1]),
        Form("(J,)", lambda p: p[0, 0, 0]),
    ]
    if B == 1 and "b" not in caller.query_axes:
        whole = [whole[2], whole[1], whole[0]]
        by_key = [by_key[3], *by_key[:3]]
    # for one query, a mask of keys is the usual one
    return [*whole, *by_key] if I > 1 else [by_key[0], by_key[2], *whole]


def lengths_finding(caller: Caller) -> CheckFinding | None:
    """Which arguments of lengths, such as `valid_lens`, kept their default, so masks made of them were not checked.

    None if the function has no such argument.
    """
    names = [name for name in signature_of(caller.function).parameters if re.search("len(s|gths?)?$", name)]
    text = f"{', '.join(names)}: lengths keep their default, so what they hide was not checked."
    remedy = "Check the function that makes a mask of them: like='padding_mask'."
    return CheckFinding("lengths", "unknown", text, remedy) if names else None


def random_pairs(sizes: Any, seed: int = 3) -> Tensor:
    """Pairs (B, 1, I, J) of which each row has some that may attend and some that may not; key 0 may attend.

    `sizes` are those of a caller.
    """
    pairs = torch.rand(sizes.batch, 1, sizes.queries, sizes.keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    pairs[..., 0], pairs[..., 1] = True, False
    rows = torch.arange(sizes.queries)  # each gets a second visible key, so that no weight has to be 1
    pairs[:, :, rows, 2 + rows % max(1, sizes.keys - 2) if sizes.keys > 2 else 0] = True
    return pairs


def mask_response(caller: Caller, plain: Measurement, parameter: str, num_heads: int) -> Response | None:
    """The first shape and kind of mask that hides the right keys; else the first of `MISTAKES`; None if none runs.

    Here and below `plain` are the weights without a mask, `parameter` is the name of the mask argument, and `num_heads`
    is the number of heads of the weights. If all sequences get the same mask, this is a mistake, even if a mask without
    a batch axis hides the right keys.
    """
    responses = list(_responses(caller, plain, parameter, num_heads))
    working = [r for r in responses if r.effect in SENSES]
    mistakes = [r for r in responses if r.effect not in SENSES]
    if working and all(r.effect not in OF_THE_BATCH for r in mistakes):
        return working[0]
    return min(mistakes, key=lambda r: list(MISTAKES).index(r.effect), default=None)


def _responses(caller: Caller, plain: Measurement, parameter: str, num_heads: int) -> Iterator[Response]:
    """What each shape and kind of mask does; stops at the first that hides exactly what it should.

    `plain` are the weights without a mask. A `Mask` of Regard has no shape, so it is tried once.
    """
    inputs = caller.sizes.sample(0, caller.dtype)
    pairs = random_pairs(caller.sizes)
    for kind in ("boolean", "0 and 1", "additive", "a Mask of Regard"):
        for form in forms(caller, num_heads)[: 1 if kind == "a Mask of Regard" else None]:
            try:
                mask = as_kind(form.of(pairs), kind, caller.dtype)
                masked = measure(caller, inputs, {parameter: mask})
            except Exception:  # of the user's function, which may not take this shape
                continue
            if masked is None or masked.weights.shape != plain.weights.shape or masked.weights.isnan().all():
                continue
            effect, amount = _effect(plain.weights, masked.weights, form.back(pairs), kind)
            yield Response(parameter, form, kind, effect, amount)
            if effect in SENSES:
                return


def _effect(plain: Tensor, masked: Tensor, pairs: Tensor, kind: str) -> tuple[str, float]:
    """What a mask did: the sense in which it hid keys, or a key of `MISTAKES`, with the number for its text.

    `plain` and `masked` are the weights (B, H, I, J) without and with it, and `pairs` (B, 1, I, J) are those where it
    is True. `kind` is what its numbers are: "boolean", "0 and 1", "additive" or "a Mask of Regard".
    """
    # only pairs that have a weight without the mask, in rows that are not all NaN with it
    seen = (plain > 1e-9) & ~masked.isnan().all(-1, keepdim=True)
    hidden = (masked.nan_to_num() < HIDDEN * plain) & seen
    pairs = pairs.expand_as(plain)
    for sense, expected in (("keep", ~pairs), ("drop", pairs)):
        if bool(seen.any()) and torch.equal(hidden, expected & seen):
            if _keeps_other_weights(plain, masked, ~expected):
                return "after", float(masked.sum(-1).mean())
            return ("additive" if kind == "additive" and sense == "keep" else sense), 0.0
    shared = _shared_by_the_batch(hidden, seen, pairs)
    if shared:
        return shared, 0.0
    if close(plain, masked):
        return "nothing", 0.0
    # each row is NaN
    if not seen.any():
        return "partly", float("nan")
    if plain.shape[2] == plain.shape[3]:
        if any(_hides_the_transposed(hidden, seen, forbidden) for forbidden in (pairs, ~pairs)):
            return "transposed", 0.0
        if _hides_whole_rows(plain, masked, pairs[:, :, 0]):
            return "rows", 0.0
    # a mask of 0 and 1 that is added to the scores multiplies weights by e, up to the sum of the row;
    # so the logarithms of both weights are compared, and in each row with the pair that gained most
    ratio = (masked.clamp(min=1e-12) / plain.clamp(min=1e-12)).log()
    inside, outside = (ratio - ratio.amax(-1, keepdim=True))[pairs], (ratio - ratio.amax(-1, keepdim=True))[~pairs]
    if inside.numel() and outside.numel() and inside.std() < 1e-2 and outside.std() < 1e-2:
        return "added", float(inside.mean() - outside.mean())
    return "partly", float((masked / plain.clamp(min=1e-12))[seen].nan_to_num().min())


def _shared_by_the_batch(hidden: Tensor, seen: Tensor, pairs: Tensor) -> str:
    """The mistake of a function that gives all sequences the mask of one of them, or all masks joined; "" if none.

    `hidden`, `seen` and `pairs` are those of `_effect`.
    """
    if len(pairs) == 1:
        return ""
    for shown in (pairs, ~pairs):
        masks = {"one entry": list(shown), "one mask": [shown.any(0), shown.all(0)]}
        for mistake, options in masks.items():
            if any(torch.equal(hidden, ~option.expand_as(pairs) & seen) for option in options):
                return mistake
    return ""


def _keeps_other_weights(plain: Tensor, masked: Tensor, kept: Tensor) -> bool:
    """Whether the weights of the pairs `kept` are those without the mask, so that rows no longer sum to 1."""
    total = plain.sum(-1)
    sums_to_one = close(total, torch.ones_like(total), 1e-3)
    return sums_to_one and close(masked, plain * kept) and bool((masked.sum(-1) < 1 - 1e-2).any())


def _hides_the_transposed(hidden: Tensor, seen: Tensor, forbidden: Tensor) -> bool:
    """Whether the hidden pairs are the transposed forbidden ones, (n, n) each.

    `seen` are the pairs that had a weight (`_effect`). A row that is all forbidden tells nothing.
    """
    informative = ~forbidden.mT.all(-1, keepdim=True) & seen
    return bool((forbidden.mT & informative).any()) and torch.equal(hidden & informative, forbidden.mT & informative)


def _hides_whole_rows(plain: Tensor, masked: Tensor, tokens: Tensor) -> bool:
    """Whether the rows of some tokens changed as a whole, and all other rows are as without the mask.

    `tokens` (B, 1, I) are those that are True in the mask.
    """
    changed = ((plain - masked).abs() > 1e-6).any(-1) | masked.isnan().any(-1)
    return any(torch.equal(changed, rows.expand_as(changed)) for rows in (tokens, ~tokens))


def mask_findings(
    caller: Caller, plain: Measurement, parameter: str, num_heads: int, expected: str | None
) -> tuple[list[CheckFinding], Response | None]:
    """The findings about one mask argument, and what the mask did if it works in some sense; else None.

    `plain` are the weights without a mask, and `expected` is the sense that the user means, if it is known.
    """
    response = mask_response(caller, plain, parameter, num_heads)
    if response is None or response.effect not in (*SENSES, *OF_THE_BATCH):
        response = row_mask_response(caller, plain, parameter, num_heads) or response
    what = "mask"
    if response is None:
        text = (
            f"{parameter}: no mask that was tried ran (boolean, 0 and 1, 0 and -inf; in ten shapes; a Mask of Regard)."
        )
        return [
            CheckFinding(what, "unknown", text, "Check the function without it, or wrap it: def f(q, k, v, mask).")
        ], None
    if response.effect in SENSES:
        return [_sense_finding(what, response, expected)], response
    return [_mistake_finding(what, response)], None


def row_mask_response(caller: Caller, plain: Measurement, parameter: str, num_heads: int) -> Response | None:
    """What a mask does where there are as many keys as queries; None if this shows no mistake and no sense.

    A mask over tokens that hides queries instead of keys runs only there.
    """
    s = caller.sizes
    if s.queries == s.keys or s.queries == 1:
        return None
    square = replace(caller, sizes=replace(s, keys=s.queries))
    unmasked = measure(square, square.sizes.sample(0, caller.dtype))
    response = mask_response(square, unmasked, parameter, num_heads) if unmasked is not None else None
    return response if response is not None and response.effect in ("rows", "transposed", *SENSES) else None


def _sense_finding(what: str, response: Response, expected: str | None) -> CheckFinding:
    """The finding about a mask that works: is its sense the one that the user means, `expected`?

    If the user named none, "keep" is right, and the others are questions. `what` is the property of the finding.
    """
    text = f"{response.parameter}: {SENSE_TEXTS[response.effect]}; {response.kind}, shape {response.form.shape}."
    if expected == response.effect or (expected is None and response.effect == "keep"):
        return CheckFinding(what, "right", text)
    if response.effect == "additive":
        text += " A mask of True and False only adds 1 to some scores, which hides nothing."
        mistake = "the mask is added as 0 and 1"
        remedy = "For a boolean mask: scores.masked_fill(~mask, -torch.inf)."
        question = f'Right if you pass 0 and -inf; then say so: mask="additive". {remedy}'
    else:
        mistake = "the mask is reversed"
        remedy = "Invert it: scores.masked_fill(~mask, -torch.inf) hides where mask is False."
        question = 'Right if you mean it, as in nn.MultiheadAttention; then say so: mask="drop". Else invert it: ~mask.'
    if expected is None:
        of_torch = "" if response.effect == "additive" else " This is the opposite of scaled_dot_product_attention."
        return CheckFinding(what, "unknown", f"{text}{of_torch}", question)
    if expected == "additive":
        remedy = "Add the mask to the scores before the softmax: scores + mask."
        mistake = "the mask is not added to the scores"
    return CheckFinding(what, "wrong", f"{text} You meant: {SENSE_TEXTS[expected]}.", remedy, mistake)


#: Effects of a mask that are mistakes: their names, and what was measured.
MISTAKES = {
    "one entry": ("only the mask of one batch entry is used", "Every sequence hides the keys of one of them."),
    "one mask": ("one mask is used for the whole batch", "A key is hidden in every sequence, or in none."),
    "after": (
        "the mask is applied after the softmax",
        "Visible weights are those without the mask, and rows sum to {amount:.2f} on average.",
    ),
    "transposed": ("the mask is transposed", "The pair (i, j) of the mask changes the weight of query j on key i."),
    "rows": ("the padding mask hides queries instead of keys", "A mask {shape} changed whole rows."),
    "added": (
        "the mask is added as 0 and 1",
        "The mask changes scores by {amount:.3g} only: hidden keys keep weight.",
    ),
    "partly": ("the mask does not hide keys", "Hidden keys keep weight, e.g. {amount:.2g} of that without a mask."),
    "nothing": ("the mask does nothing", "The weights with and without it are equal."),
}
#: Those of a function that gives all sequences of a batch the same mask.
OF_THE_BATCH = ("one entry", "one mask")
BEFORE_SOFTMAX = "Mask the scores before the softmax: scores.masked_fill(~mask, -torch.inf).softmax(-1)."
REMEDIES = {
    "rows": "Hide keys, the last axis: mask[:, None, None, :], (B, 1, 1, J).",
    **dict.fromkeys(OF_THE_BATCH, "Keep the batch axis of the mask: no mask[0], mask[:1] or mask.any(0)."),
}


def _mistake_finding(what: str, response: Response) -> CheckFinding:
    """The finding about a mask with one of `MISTAKES`. `what` is the property that the finding is about."""
    mistake, measured = MISTAKES[response.effect]
    text = measured.format(amount=response.amount, shape=response.form.shape)
    tried = f"Tried: {response.parameter}, {response.kind}, shape {response.form.shape}."
    remedy = REMEDIES.get(response.effect, BEFORE_SOFTMAX)
    return CheckFinding(what, "wrong", f"{text} {tried}", remedy, mistake)


def after_softmax_finding(plain: Measurement | None, causal: Measurement, switch: str) -> CheckFinding | None:
    """The mistake of a causal switch that removes weights instead of scores; None if it is not made."""
    if plain is None or plain.weights.shape != causal.weights.shape:
        return None
    if not _keeps_other_weights(plain.weights, causal.weights, causal.weights.abs() > 1e-9):
        return None
    total = float(causal.weights.sum(-1).mean())
    text = f"With {switch}=True, visible weights are those without it, and rows sum to {total:.2f} on average."
    return CheckFinding("future", "wrong", text, BEFORE_SOFTMAX, "the causal mask is applied after the softmax")


def visible_pairs(measurement: Measurement) -> Tensor:
    """Pairs (I, J) with a weight, of either sign, in some head of some sequence."""
    return (measurement.weights.nan_to_num().abs() > 1e-9).any(1).any(0)


def causal_pattern(visible: Tensor) -> str:
    """The name of a pattern of visible pairs (I, J).

    It is all, causal, next (off by one), past (not the token itself), future (reversed), later (future without the
    token itself), or other.
    """
    i, j = torch.arange(visible.shape[0])[:, None], torch.arange(visible.shape[1])
    patterns = {
        "all": i >= 0 * j,
        "causal": j <= i,
        "next": j <= i + 1,
        "past": j < i,
        "future": j >= i,
        "later": j > i,
    }
    return next((name for name, pairs in patterns.items() if torch.equal(visible, pairs.expand_as(visible))), "other")


def causal_finding(visible: Tensor, switch: str | None) -> CheckFinding:
    """Whether the visible pairs (n, n) are a usual pattern: all keys, or those up to the query.

    `switch` is the name of the causal switch that is on, or None for a call without a mask. With the switch later keys
    must be hidden. Earlier ones may be hidden too, as in a window.
    """
    pattern = causal_pattern(visible)
    by = f"With {switch}=True" if switch else "Without a mask"
    hide = "Hide j > i: torch.ones(n, n).triu(1).bool(), or keep torch.ones(n, n).tril().bool()."
    wrong = {
        "next": ("the causal mask is off by one: it shows the next token", "query i sees key i + 1."),
        "past": ("the causal mask hides the token itself", "query i sees only keys before i; query 0 sees no key."),
        "future": ("the causal mask is reversed", "query i sees the keys from i on, and none before."),
        "later": ("the causal mask is reversed", "query i sees only keys after i."),
    }
    if switch and pattern == "all":
        return CheckFinding("future", "wrong", f"{by}, all keys are visible.", hide, "the causal mask does nothing")
    if pattern in wrong:
        return CheckFinding("future", "wrong", f"{by}, {wrong[pattern][1]}", hide, wrong[pattern][0])
    i, j = torch.arange(visible.shape[0])[:, None], torch.arange(visible.shape[1])
    shows_later = bool((visible & (j > i)).any())
    if switch and shows_later:
        mistake = "the causal mask shows later tokens"
        return CheckFinding("future", "wrong", f"{by}, some queries see keys after them.", hide, mistake)
    sentences = {"all": "every query sees all keys.", "causal": "query i sees the keys up to i, and none after."}
    default = "some keys are hidden, and some later ones are not." if shows_later else "no key after i is visible."
    return CheckFinding(
        "future",
        "right" if pattern != "other" or "no key" in default else "unknown",
        f"{by}, {sentences.get(pattern, default)}",
    )
