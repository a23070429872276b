"""`check` finds the mistakes of an attention function, or runs the laws on a mechanism of Regard."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.base.checks import fits, words
from regard.base.errors import RegardError, nearest
from regard.biases import Bias
from regard.catalog import CatalogEntry
from regard.diagnosis import invariance, numerics
from regard.diagnosis.cached_calls import cache_finding
from regard.diagnosis.calling import (
    NO_ARGUMENTS,
    SAY_AXES,
    Caller,
    Subject,
    adding_table,
    callers_of,
    copy_of,
    without_rounding,
)
from regard.diagnosis.grouping import grouping_finding, with_own_keys
from regard.diagnosis.likeness import callers_beside, likeness, reference_named
from regard.diagnosis.mask_builders import MASKS, mask_finding_beside
from regard.diagnosis.masks import (
    SENSES,
    Response,
    after_softmax_finding,
    causal_finding,
    lengths_finding,
    mask_findings,
    visible_pairs,
)
from regard.diagnosis.mechanisms import equal_mechanisms, learned_mechanism
from regard.diagnosis.piece_laws import law_report
from regard.diagnosis.progress import CheckProgress, Tell, of_threads
from regard.diagnosis.references import REFERENCES
from regard.diagnosis.report import CheckFinding, CheckReport
from regard.diagnosis.returned import returned_finding
from regard.diagnosis.scores import axis_finding, roles_finding, scale_finding, unmeasured_finding
from regard.diagnosis.signatures import build, name_of
from regard.diagnosis.steps import Reference
from regard.diagnosis.variants import Variant, term_finding, variant_of_measured, variants_of
from regard.diagnosis.weights import Measurement, close, measure, measured
from regard.encodings import Encoding
from regard.masks import Mask
from regard.normalizers import Normalizer
from regard.scores import Score

#: The largest `limit` of a check in seconds. Timers of systems do not take every float.
LONGEST = 1e9
#: Orders of axes of functions that also run without the first axes.
WIDER = {"nd": ("bhnd", "bnd"), "bnd": ("bhnd",)}
#: Mechanisms whose weights depend on matrices, so that measured weights alone do not show which one a module is.
LEARNED = ("bahdanau", "luong_general", "luong_concat")
#: Mechanisms whose weights are the softmax of q . k, alone or with a causal mask.
PLAIN = ("masked", "cross", "self_attention", "multi_head", "luong_dot")
#: References of functions and of modules whose weights are those of a known mechanism.
FUNCTIONS = ("scaled_dot_product", "causal_dot_product", "luong_dot")
MODULES = ("multi_head", "causal_multi_head", "self_attention", "causal_self_attention")
#: References of functions in which no token attends to another.
POSITIONS = ("sinusoidal", "learned_positions", "rope")
#: Findings that the comparison of steps makes.
DECIDED_BY_STEPS = {"scores", "scale", "softmax axis", "query and key", "steps", "residual"}
DECIDED_BY_STEPS |= {"groups", "channels", "order"}
NO_NAMES: Mapping[str, str] = MappingProxyType({})
_PIECES = (Attention, CatalogEntry, Bias, Mask, Normalizer, Encoding, Score)


def check(
    subject: Callable[..., Any] | nn.Module | Attention | CatalogEntry | Mask | Score | Bias | Normalizer | Encoding,
    *inputs: Tensor,
    like: str | None = None,
    matrices: Mapping[str, str] = NO_NAMES,
    mask: str | None = None,
    scale: float | None = None,
    seed: int = 0,
    limit: float | None = 120.0,
    progress: Tell | None = None,
) -> CheckReport:
    """Check an attention function of your own, or a piece or mechanism that is written with Regard.

    `subject` is a function or a module: f(x), f(query, keys) or f(q, k, v), with masks and switches under their usual
    names, with 2, 3 or 4 axes. It returns the output, alone or with the weights. It is called with small random inputs;
    its source is not read. `inputs` are examples of what it takes, if it cannot be called without. For a class an
    instance is made.

    `like` names what the function should be: "scaled_dot_product", "causal_dot_product", "luong_dot", "luong_general",
    "luong_concat", "bahdanau", "self_attention", "causal_self_attention", "multi_head", "causal_multi_head",
    "encoder_block", "causal_block", "decoder_block", "sinusoidal", "learned_positions", "rope", or "causal_mask" and
    "padding_mask" for a function that builds a mask.
    Its numbers are then compared with those of plain formulas, step by step, with the function's own matrices. Which
    matrix has which role is found by the numbers, or given: `matrices` has for a role, such as "query", the name of a
    parameter. Without `like` the check says what the function seems to be, and compares it with that.

    `mask` is the sense that you mean: "keep" (True = may attend), "drop" (True = may not) or
    "additive" (0 and -inf). `scale` is the factor of the scores that you mean; by default 1 / sqrt(width of a head).

    For an `Attention`, a piece or a `CatalogEntry` of Regard, all laws of the catalog run on it; `inputs` are then q
    (B, H, I, D), k (B, G, J, D) and v (B, G, J, E).

    About 200 calls are made. After `limit` seconds a `RegardError` says which check was running, and what was found so
    far; None is no limit. `progress(check, calls, findings)` is called before each call of the function, with the name
    of the check, the number of calls so far, and the findings so far.

    A `RegardError` says what was tried if the function cannot be called.

    >>> import math, regard as rg
    >>> def attention(q, k, v, mask=None):
    ...     scores = q @ k.transpose(-2, -1)
    ...     if mask is not None:
    ...         scores = scores.masked_fill(mask == 0, -math.inf)
    ...     return scores.softmax(-1) @ v
    >>> report = rg.check(attention)
    >>> report.ok, report.mistakes, report.mechanism
    (False, ('the scores are not scaled',), 'luong_dot')
    >>> rg.check(attention, like="luong_dot").ok
    True
    """
    if mask is not None and not (isinstance(mask, str) and mask in SENSES):
        raise RegardError(f"check(mask={mask!r}): the sense of a mask is one of these. {nearest(mask, SENSES)}")
    options = (("scale", scale, float | None), ("seed", seed, int), ("progress", progress, Callable[..., Any] | None))
    for name, value, expected in options:
        if not fits(value, expected):
            raise RegardError(f"check({name}={value!r}): {name} must be {words(expected)}.")
    if scale is not None and not math.isfinite(scale):
        raise RegardError(f"check(scale={scale}): the factor of the scores is a finite number.")
    if limit is not None and not (fits(limit, float) and 0 < limit <= LONGEST):
        raise RegardError(
            f"check(limit={limit}): the limit is a number of seconds above 0 and at most {LONGEST:.0e}, or None for no "
            "limit."
        )
    _check_matrices(matrices, like)
    if like is not None and isinstance(subject, _PIECES):
        raise RegardError(
            f"check(like={like!r}): pieces and mechanisms that are written with Regard are checked by its laws. "
            f"Leave like= out, or give a function: lambda q, k, v: attention(q, k, v).output."
        )
    reference = None if like is None or like in MASKS else reference_named(like)
    importlib.import_module("torch._dynamo")  # modes need it, and a limit in the middle of its import would break torch
    state = CheckProgress(limit, progress) if progress is not None else CheckProgress(limit)
    with state.limited(name_of(subject)), of_threads(1):
        if like in MASKS:
            return _report_of_mask(str(like), subject, inputs, mask)
        if inspect.isclass(subject):
            subject = build(subject)
        elif like in ("sinusoidal", "learned_positions"):
            subject = adding_table(subject)
        if isinstance(subject, _PIECES):
            return law_report(subject, inputs, state)
        if not callable(subject):
            raise RegardError(
                f"check: {type(subject).__name__} cannot be called. Give a function, a module or an Attention."
            )
        function = copy_of(subject).eval() if isinstance(subject, nn.Module) else subject
        with torch.random.fork_rng(devices=[]):
            return _report(Subject(function, inputs, seed, mask, scale, matrices, state), reference)


def _report_of_mask(like: str, subject: Any, inputs: tuple[Tensor, ...], meant: str | None) -> CheckReport:
    """The report of a function that builds a mask; `meant` is the sense that the user means."""
    name = name_of(subject)
    if not callable(subject):
        raise RegardError(f"check(like={like!r}): {name} is no function that builds a mask.")
    if inputs:
        raise RegardError(f"check(like={like!r}): it takes no inputs, but calls the function with lengths.")
    call, finding = mask_finding_beside(like, subject, meant)
    return CheckReport(name, f"{name}{call}", (finding,), (like,) if finding.verdict == "right" else ())


def _check_matrices(matrices: object, like: str | None) -> None:
    """Refuse matrices that are no names of parameters by roles, or that no reference asks for."""
    is_named = isinstance(matrices, Mapping) and all(
        isinstance(name, str) for pair in matrices.items() for name in pair
    )
    if not is_named:
        raise RegardError(
            f"check(matrices={matrices!r}): it maps roles to names of parameters: {{'query': 'W.weight'}}."
        )
    if matrices and (like is None or like in MASKS):
        reason = "it needs like=, which says what the matrices are for" if like is None else f"{like} has no matrices"
        raise RegardError(f"check(matrices={matrices!r}): {reason}.")


def _report(subject: Subject, reference: Reference | None) -> CheckReport:
    """The report of a function; with a reference, that of what it should be like."""
    if reference is not None:
        return _report_beside(subject, reference)
    best = _best_examination(subject, callers_of(subject))
    findings, equal = best.findings(), best.equal
    # a function of one input in which no token sees another may add positions, which is no mistake
    if best.isolation is not None and best.caller.roles.is_self:
        findings, equal = _positions_of(subject, best.caller) or (findings, equal)
    elif not any(finding.verdict == "wrong" for finding in findings):
        findings += _steps_findings(subject, best)
    return _report_of(best.caller, findings, equal)


def _report_of(caller: Caller, findings: list[CheckFinding], equal: tuple[str, ...]) -> CheckReport:
    name = name_of(caller.function)
    return CheckReport(name, f"{name}{caller.text}", tuple(findings), equal)


def _report_beside(subject: Subject, reference: Reference) -> CheckReport:
    """The report of a function that should be like a reference. If its steps are right, all else is checked too."""
    subject.progress.begin("steps")
    found = likeness(subject, reference)
    steps, caller = found.finding, found.caller
    findings, equal = found.findings, (reference.name,) if steps.verdict == "right" else ()
    subject.progress.add(findings)
    if steps.verdict == "right" and reference.is_attention and not caller.returns_weights_alone:
        scale = reference.scale if subject.scale is None else subject.scale
        best = _best_examination(replace(subject, scale=scale), [caller])
        # what the steps have decided already is not said twice
        known = DECIDED_BY_STEPS | {finding.what for finding in findings}
        findings = [*findings, *(finding for finding in best.findings() if finding.what not in known)]
    return _report_of(caller, findings, equal)


def _positions_of(subject: Subject, caller: Caller) -> tuple[list[CheckFinding], tuple[str, ...]] | None:
    """The findings and the name of a function that adds positions, or rotates by them; None if it does neither.

    A function that adds the same numbers to any input, other ones for each token, adds positions of its own.
    """
    callers = callers_beside(subject)
    for name in POSITIONS:
        found = likeness(subject, REFERENCES[name], True, caller.undone.rounding, callers).finding
        if found.verdict == "right":
            return [found], (name,)
    # inputs of two seeds
    outputs = [(x, caller(x, x, x).output) for x in (caller.sizes.sample(n, caller.dtype)[0] for n in (7, 8))]
    (one, its_output), (other, other_output) = outputs
    if its_output.shape != one.shape or not close(its_output - one, other_output - other):
        return None
    added = its_output - one
    if close(added, added[:, :, :1].expand_as(added)):
        return None  # the same for all tokens
    known = " or ".join(POSITIONS)
    text = f"It adds the same numbers to each input, so it seems to add positions, and they are not those of {known}."
    remedy = "Say what it should be, for example: regard.check(function, like='sinusoidal')."
    return [CheckFinding("steps", "unknown", text, remedy)], ()


def _steps_findings(subject: Subject, best: _Examination) -> list[CheckFinding]:
    """The steps of what the function seems to be, beside its own; or that it is not known what they should be.

    Empty if there is no reference for what it seems to be.
    """
    if best.isolation is not None or best.measurement is None:
        return []
    if not best.equal:
        text = "The weights are those of no mechanism of the catalog, so it is not known what they should be."
        return [CheckFinding("steps", "unknown", text, "Say what they should be: regard.check(function, like=...).")]
    is_learned = best.equal[0] in LEARNED
    if not (is_learned or set(best.equal) & set(PLAIN)):
        return []  # measured weights are all that is known of the others
    subject.progress.begin("steps")
    is_recurrent, is_module = best.caller.roles.is_recurrent, subject.is_module
    # the references to compare with; the mistake is only searched for in the first of them
    names: Sequence[str] = MODULES if is_module else FUNCTIONS
    if is_learned:
        names = [best.equal[0]]
    elif is_recurrent and is_module:
        names = ["luong_general"] if any(p.ndim > 1 for p in subject.function.parameters()) else ["luong_dot"]
    rounding, callers = best.caller.undone.rounding, callers_beside(subject)
    found = (likeness(subject, REFERENCES[name], name == names[0], rounding, callers) for name in names)
    seems = next(found)
    right = next((one.finding for one in (seems, *found) if one.finding.verdict == "right"), None)
    if right is not None:
        return [right]
    # here it is clear what the function should be, so its mistake is named
    if (is_learned or is_recurrent) and seems.is_explained:
        return [seems.finding]
    if not is_learned and is_module:
        return []  # its weights were measured, and it may have parts that no reference has
    text = f"It seems to be {names[0]}, and its numbers differ. {seems.finding.evidence}"
    said = [f"Here: {seems.finding.mistake}."] if seems.finding.mistake else []
    return [CheckFinding("steps", "unknown", text, " ".join([*said, f"If it should be that, say like={names[0]!r}."]))]


def _best_examination(subject: Subject, callers: list[Caller]) -> _Examination:
    """The examination of the order of axes with the fewest mistakes.

    Mistakes that hide the weights are undone and noted, so that the rest is checked behind them.
    """
    # one vector hides other mistakes; but the state of a decoder is one
    callers = [caller for caller in callers if caller.query_axes != "d" or caller.roles.is_recurrent] or callers
    subject.progress.begin("precision")
    precision = numerics.precision_finding(callers[0])
    subject.progress.begin("weights")
    if precision is not None and precision.verdict == "wrong":
        callers = list(map(without_rounding, callers))
    examinations = [_Examination(subject, caller) for caller in callers]
    best = _most_plausible(examinations)
    if best.isolation is not None:
        return best
    variant = best.variant()
    if not best.is_plausible() or best.caller.sizes.queries == 1:  # of one token, some mistakes do not show
        others = [one.caller for one in examinations if not one.is_plausible()]
        variant = next((v for caller in others for v in variants_of(caller)), variant)
    if variant is not None:
        best = _Examination(subject, variant.caller, (*best.noted, variant.finding))
    return best.with_notes(*([precision] if precision is not None else []))


def _most_plausible(examinations: list[_Examination]) -> _Examination:
    """The examination with the fewest mistakes, of those whose weights can be measured.

    Calls with several tokens come before those with one.
    """
    plausible = [one for one in examinations if one.is_plausible()] or examinations[:1]
    plausible = [one for one in plausible if not one.caller.is_of_one_token] or plausible
    # a state (batch, width) that is broadcast over the keys may run as (length, width) too
    best = min(plausible, key=lambda one: (one.num_wrong(), one.caller.query_axes == "nd"))
    return _with_wider_axes(best, examinations)


def _with_wider_axes(best: _Examination, others: list[_Examination]) -> _Examination:
    """`best`, or the examination with more axes, for a function that is right with few axes and wrong with more.

    `others` are the examinations of the function with all orders of axes, `best` among them.

    An operation over axis 0, such as k - k.mean(0), is over tokens in (n, d), and over the batch in (b, n, d), where it
    is a mistake. A softmax over dim=1 is over the keys in (n, d), and over the heads in (b, h, n, d). So for (n, d) the
    examination with more axes counts.

    Axis 1 holds the tokens in (b, n, d), and heads in (b, h, n, d). Functions without heads are usual, so for (b, n, d)
    `best` counts, if all is right about its scores. Both get a note.
    """
    axes, is_module = best.caller.query_axes, isinstance(best.caller.function, nn.Module)
    if axes not in WIDER or best.num_wrong():
        return best
    wider = [one for one in others if one.caller.query_axes in WIDER[axes]]
    mixed = next((one for one in wider if {"batch", "heads"} & set(one.wrong_properties())), None)
    if mixed is not None:
        (mistake,) = (found.mistake for found in mixed.mixing if found.verdict == "wrong")
        text = f"With axes ({best.caller.axes}) nothing mixes, but with ({mixed.caller.axes}) {mistake}."
        is_right = best.measurement is not None and all(found.verdict == "right" for found in best.score_findings(None))
        counts = best if axes == "bnd" and is_right else mixed
        return counts.with_notes(CheckFinding("axes", "unknown", text, SAY_AXES))
    of_heads = (
        one for one in others if "h" in one.caller.query_axes and one.is_plausible() and not one.caller.is_of_one_token
    )
    other = next((one for one in of_heads if one.wrong_properties() == ["softmax axis"]), None)
    if is_module or other is None:
        return best
    text = f"With axes ({best.caller.axes}) the softmax is over the keys, but not if there are heads."
    remedy = f"Use dim=-1, which is right for both. {SAY_AXES}"
    return (other if axes == "nd" else best).with_notes(CheckFinding("softmax axis", "unknown", text, remedy))


class _Examination:
    """All findings of one function, called with one order of axes. `noted` are findings that were made before.

    `mask` and `scale` are what the user means (`Subject`). `measurable` calls the function, or a copy with
    identities for its matrices, whose weights can be measured; `measurement` are these. Both are None if there is none.
    """

    def __init__(self, subject: Subject, caller: Caller, noted: tuple[CheckFinding, ...] = ()) -> None:
        self.caller, self.mask, self.scale, self.noted = caller, subject.mask, subject.scale, noted
        found = measured(caller)
        self.measurable = None if found is None else found[0]
        self.measurement = None if found is None else with_own_keys(found[1])

    def with_notes(self, *findings: CheckFinding) -> _Examination:
        """The same with further findings. The copy keeps what was measured and found."""
        other = copy.copy(self)
        other.noted = (*self.noted, *findings)
        return other

    def variant(self) -> Variant | None:
        """The call in which a mistake is undone that changes the weights; None if no such mistake is found."""
        if self.measurable is None or self.measurement is None:
            return None
        return variant_of_measured(self.caller, self.measurable, self.measurement)

    @cached_property
    def isolation(self) -> CheckFinding | None:
        """The mistake that no token sees another, which leaves nothing else to check."""
        return None if self.is_plausible() else invariance.isolation_finding(self.caller)

    @cached_property
    def equal(self) -> tuple[str, ...]:
        """Mechanisms with equal weights; masks and positions may need as many keys as queries."""
        if self.measurement is None or self.measurable is None or self.isolation is not None:
            return ()
        square = self.measure_square()
        measurements = [self.measurement, *([square] if square is not None else [])]
        equal = (equal_mechanisms(each, each.weights.shape[1]) for each in measurements)
        return next((names for names in equal if names), ()) or learned_mechanism(self.measurable)

    def is_plausible(self) -> bool:
        """Whether the axes can be those that are meant: weights can be measured, and some query sees several keys."""
        return self.measurement is not None and bool(((self.measurement.weights.abs() > 1e-6).sum(-1) > 1).any())

    @cached_property
    def mixing(self) -> list[CheckFinding]:
        """Whether sequences of a batch and heads are independent; if sequences mix, heads are not looked at."""
        batch = invariance.batch_finding(self.caller)
        heads = None if batch is not None and batch.verdict == "wrong" else invariance.heads_finding(self.caller)
        return [found for found in (batch, heads) if found is not None]

    def num_wrong(self) -> int:
        """The number of mistakes that another order of axes could explain."""
        return len(self.wrong_properties())

    def wrong_properties(self) -> list[str]:
        """The properties in which another order of axes could differ, where they are wrong."""
        scores = self.score_findings(None)
        # a softmax over a wrong axis may mix sequences or heads, which is no other mistake
        findings = scores if scores[0].verdict == "wrong" else [*scores, *self.mixing]
        return [finding.what for finding in findings if finding.verdict == "wrong"]

    def score_findings(self, mechanism: str | None) -> list[CheckFinding]:
        """Axis of the softmax, factor and product; `mechanism` is a known one that the weights equal."""
        if self.measurement is None:
            return [unmeasured_finding(self.caller)]
        scale = self._scale_finding(self.measurement, mechanism)
        findings = [axis_finding(self.measurement), scale, roles_finding(self.measurement, mechanism is not None)]
        known = {noted.what for noted in self.noted if noted.verdict == "wrong"}
        return [finding for finding in findings if finding.what not in known]

    def _scale_finding(self, measurement: Measurement, mechanism: str | None) -> CheckFinding:
        """The factor of the scores. A recurrent decoder may have none. `mechanism` is as in `score_findings`."""
        if self.scale is None and self.caller.roles.is_recurrent:
            without = scale_finding(measurement, self.caller.sizes, 1.0, mechanism)
            if without.verdict != "wrong":
                return without
        return scale_finding(measurement, self.caller.sizes, self.scale, mechanism)

    def findings(self) -> list[CheckFinding]:
        """All findings. Mistakes that follow from wrong weights are left out."""
        progress = self.caller.progress
        progress.add(list(self.noted))
        if self.isolation is not None:
            return [*self.noted, self.isolation]
        progress.begin("mechanism")
        for name, find in self._checks(self.equal[0] if self.equal else None):
            progress.begin(name)
            progress.add([finding for finding in find() if finding is not None])
        return list(progress.findings)

    def _checks(self, mechanism: str | None) -> Iterator[tuple[str, Callable[[], Sequence[CheckFinding | None]]]]:
        """The name of each check, and the function that makes its findings, in the order of the calls.

        What follows from wrong scores is not checked. `mechanism` is a known one that the weights equal.
        """
        caller, measurement, measurable = self.caller, self.measurement, self.measurable
        scores = self.score_findings(mechanism)
        yield "scores", lambda: scores
        yield "future", self.causal_findings
        yield "mask", self.all_mask_findings
        if scores[0].verdict != "wrong" and not caller.undone.mixes_tokens:
            yield "batch", lambda: self.mixing
            yield "order", lambda: [invariance.order_finding(caller, self.visible(), mechanism)]
        yield "cache", lambda: [cache_finding(caller)]
        yield "lengths", lambda: [lengths_finding(caller)]
        if measurement is not None and measurable is not None:
            grouped = None if "heads" in self.wrong_properties() else measurement
            yield "groups", lambda: [grouped and grouping_finding(measurable, grouped), term_finding(measurable)]
        if any(finding.verdict == "unknown" for finding in scores):
            yield "channels", lambda: [invariance.channels_finding(caller)]
        yield "evaluation", lambda: [invariance.dropout_finding(caller)]
        yield "inputs", lambda: [invariance.inputs_finding(caller)]
        yield "values", lambda: [invariance.values_finding(caller)]
        yield "unused inputs", lambda: [invariance.unused_finding(caller, measurement is not None)]
        yield "returned weights", lambda: [returned_finding(measurable or caller, measurement)]
        yield "gradient", lambda: [numerics.gradient_finding(caller)]
        yield "large scores", lambda: [numerics.large_score_finding(caller)]
        yield "bfloat16", lambda: [numerics.bfloat16_finding(caller)]
        yield "speed", lambda: [numerics.speed_finding(caller)]

    def measure_square(self, extra: Mapping[str, Any] = NO_ARGUMENTS) -> Measurement | None:
        """Weights where there are as many keys as queries; None if this does not run.

        `extra` are further arguments of the call by name, such as a mask.
        """
        if self.measurable is None or self.caller.sizes.queries == 1:
            return None
        square = invariance.square_caller(self.measurable)
        try:
            measurement = measure(square, square.sizes.sample(0, square.dtype), extra)
        except Exception:  # of the user's function
            return None
        return None if measurement is None else with_own_keys(measurement)

    def visible(self, extra: Mapping[str, Any] = NO_ARGUMENTS) -> Tensor | None:
        """Pairs (n, n) with a weight where there are as many keys as queries; None if this cannot be measured."""
        square = self.measure_square(extra)
        return visible_pairs(square) if square is not None else None

    def causal_findings(self) -> list[CheckFinding]:
        """Which later keys are visible, without a mask and with the function's own switch."""
        switch = self.caller.roles.causal
        found = []
        for name, extra in ((None, {}), *([(switch, {switch: True})] if switch else [])):
            square = self.measure_square(extra)
            if square is not None:
                found.append(causal_finding(visible_pairs(square), name))
                after = after_softmax_finding(self.measure_square(), square, name) if name else None
                found += [after] if after is not None else []
        return found

    def all_mask_findings(self) -> list[CheckFinding]:
        """The findings about each mask argument, with further ones if the mask hides the right keys."""
        if self.measurement is None or self.measurable is None:
            return []
        found: list[CheckFinding] = []
        for parameter in self.caller.roles.masks:
            mask_results, working = mask_findings(
                self.measurable, self.measurement, parameter, self.measurement.weights.shape[1], self.mask
            )
            found += mask_results
            # with such a mistake hidden keys may reach the output, although they have no weight
            hides_mistakes = self.caller.undone.mixes_tokens or self.caller.undone.weights is not None
            if working is not None and not hides_mistakes and all(f.verdict != "wrong" for f in mask_results):
                found += self.working_mask_findings(working)
        return found

    def working_mask_findings(self, mask: Response) -> list[CheckFinding]:
        """Further findings about a mask that hides the right keys."""
        found: list[CheckFinding | None] = [
            invariance.padding_finding(self.caller, mask),
            invariance.empty_row_finding(self.caller, mask),
        ]
        if not mask.form.is_padding and self.caller.sizes.queries > 1:
            square = invariance.square_caller(self.caller)
            pairs = invariance.causal_pairs(square)
            extra = {mask.parameter: mask.mask(pairs, square.dtype)}
            found.append(invariance.leak_finding(square, extra, f"With a causal {mask.parameter}"))
        return [finding for finding in found if finding is not None]
