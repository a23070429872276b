"""`check(..., like=...)`: the user's numbers beside those of a reference, and the first step that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, permutations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError, nearest
from regard.diagnosis.calling import (
    SAY_AXES,
    Caller,
    InputSizes,
    Subject,
    callers_of,
    copy_of,
    declared_heads,
    without_rounding,
)
from regard.diagnosis.mask_builders import MASKS
from regard.diagnosis.matrices import check_names, fitting, matrices_of, swapped_names, unified
from regard.diagnosis.numerics import precision_finding
from regard.diagnosis.recording import Recording, recorded
from regard.diagnosis.references import REFERENCES
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.signatures import HEADS
from regard.diagnosis.steps import Matrix, Mistake, Reference, Step, Values, mistakes_of, run
from regard.diagnosis.weights import TOLERANCE

#: Ways to give matrices their roles: so many are looked at, and mistakes are tried in so many of them.
MOST_WAYS, MOST_TRIED = 24, 12
#: Results of steps that a search for matrices computes, and pairs of mistakes that are tried.
MOST_VALUES, MOST_PAIRS = 4_000, 3_000
#: Steps in a row that may differ before the later ones are compared no more.
LONGEST_GAP = 3
#: Matrices that are tried in a role, where no number shows which one it is.
MOST_GUESSES = 3
#: Tokens of a long call.
MANY = 40


@dataclass(frozen=True)
class Case:
    """One call: its inputs (B, H, n, D), and what it returned, which is compared with a tolerance.

    `numbers` are all that it computed. `what` ends sentences about it: "", or for example " with 40 keys".
    """

    caller: Caller
    inputs: tuple[Tensor, Tensor, Tensor]
    returned: list[Tensor]
    numbers: Recording
    what: str
    tolerance: float


@dataclass(frozen=True)
class Way:
    """One reading of the user's function: its call, the steps of a reference, heads, and the matrices by their roles.

    `order` is the name of this order of steps (`Reference.orders`), and `steps` are in the conventions of the reading.
    `agreeing` is the number of the last step whose result is among the numbers that the call computed; 0 for none.
    `smaller` is the same reading of a smaller call for which the function is right. A mistake that would change the
    numbers of that call is not the cause.
    """

    case: Case
    order: str
    steps: tuple[Step, ...]
    num_heads: int
    matrices: Mapping[str, Matrix]
    agreeing: int
    smaller: Way | None = None

    @cached_property
    def before(self) -> list[Values]:
        """The values before each step, and those after the last one."""
        values = [_values(self.case, self.num_heads, self.matrices)]
        for step in self.steps:
            values.append(run([step], values[-1]))
        return values

    @cached_property
    def kept(self) -> dict[tuple[tuple[int, str], ...], list[Values]]:
        """Mistakes by the numbers of their steps -> the values before the first of these steps and each later one."""
        return {}

    def before_with(self, number: int, wrong: Mapping[str, str]) -> Values:
        """The values before a step, where earlier steps have these mistakes. Pairs of mistakes share them."""
        mistakes = tuple((n, wrong[step.name]) for n, step in enumerate(self.steps[:number]) if step.name in wrong)
        if not mistakes:
            return self.before[number]
        first = mistakes[0][0]
        values = self.kept.setdefault(mistakes, [self.before[first]])
        for step in self.steps[first + len(values) - 1 : number]:
            values.append(run([step], values[-1], wrong))
        return values[number - first]

    @property
    def text(self) -> str:
        """The conventions, and the matrices by their roles, in words."""
        roles = [f"{role} = {matrix.name}" for role, matrix in self.matrices.items()]
        conventions = [self.order, *(step.convention for step in self.steps)]
        said = [*dict.fromkeys(filter(None, conventions)), *([", ".join(roles)] if roles else [])]
        return f" ({'; '.join(said)})" if said else ""


@dataclass(frozen=True)
class Likeness:
    """A function beside a reference: the finding, the call, and whether the mistake explains all numbers.

    `rounding` is the finding that numbers are rounded to half precision inside; then the call is without it. `axes` is
    the question which axes are meant, if the numbers are right without a batch, and others with one.
    """

    finding: CheckFinding
    caller: Caller
    is_explained: bool = True
    rounding: CheckFinding | None = None
    axes: CheckFinding | None = None

    @property
    def findings(self) -> list[CheckFinding]:
        """The finding about the steps, and the further ones."""
        return [finding for finding in (self.finding, self.rounding, self.axes) if finding is not None]


@torch.no_grad()
def likeness(
    subject: Subject,
    reference: Reference,
    names_mistakes: bool = True,
    is_rounding: bool | None = None,
    callers: list[Caller] | None = None,
) -> Likeness:
    """The verdict about a function beside a reference: equal, a mistake, the first step that differs, or unknown.

    Without `names_mistakes` only a function that is equal has a verdict: the search for a mistake takes longest.
    `is_rounding`: the function is known to round to half precision inside, or not to; None: it is not known.
    `callers` is the result of `callers_beside`: give it to compare one function with several references.
    """
    callers = callers_beside(subject) if callers is None else callers
    # one token hides other mistakes, and so does one vector, but that of the state of a decoder
    clear = [c for c in callers if not (c.is_of_one_token or (c.query_axes == "d" and len(c.roles.inputs) == 3))]
    callers = clear if any(c.query_axes != "d" for c in clear) else callers
    if is_rounding:
        callers = list(map(without_rounding, callers))
    # the readings whose numbers differ, and one that is right in a small call, in the larger call where it is not
    every: list[Way] = []
    wrong_in_larger: Way | None = None
    for way in (way for caller in callers for way in ways_of(caller, reference, subject.names)):
        if not _agrees(way, way.case, {}):
            every.append(way)
            continue
        # right here: a larger call may still differ
        later = next((case for case in _further_cases(way.case.caller) if not _agrees(way, case, {})), None)
        if later is None:
            return replace(_equal(way, reference), axes=_axes_question(way, every))
        wrong_in_larger = _in_case(way, later)
        # a function of one query alone says little: readings of other axes are looked at too
        if not _is_one_query(way):
            every.clear()
            break
    if not names_mistakes:
        finding = CheckFinding("steps", "unknown", f"Its numbers are not those of {reference.name}.")
        return Likeness(finding, callers[0], is_explained=False)
    # steps may not hold rounded numbers, so all is compared again without the rounding
    if is_rounding is None and (rounding := _rounding(callers[0])) is not None:
        return replace(likeness(subject, reference, is_rounding=True), rounding=rounding)
    if every:
        every.sort(key=lambda way: -way.agreeing)
        found = _mistake_of(every[:MOST_TRIED], reference)
        if wrong_in_larger is None or found.is_explained:
            return found
    if wrong_in_larger is not None:
        return _mistake_of([wrong_in_larger], reference)
    return Likeness(_without_readings(reference, callers[0]), callers[0], is_explained=False)


def _equal(way: Way, reference: Reference) -> Likeness:
    """All numbers are equal; with heads, the names of the matrices may still say otherwise."""
    text = f"All numbers are those of {reference.name}{way.text}"
    swapped = swapped_names(way.matrices) if "value" in way.matrices else ""
    if swapped:
        return Likeness(_wrong(f"{text}, and the names say otherwise.", swapped), way.case.caller)
    return Likeness(CheckFinding("steps", "right", f"{text}."), way.case.caller)


def _axes_question(way: Way, others: list[Way]) -> CheckFinding | None:
    """Which axes are meant, if the function is right without a batch in front, and another call of it has one.

    `way` is the reading that is right, and `others` are those that are not.
    """
    other = next((o.case.caller for o in others if "b" in o.case.caller.query_axes), None)
    if way.case.caller.query_axes[0] == "b" or other is None:
        return None
    text = f"With axes ({way.case.caller.axes}) its numbers are right, and with ({other.axes}) they are not."
    return CheckFinding("axes", "unknown", text, SAY_AXES)


def _is_one_query(way: Way) -> bool:
    """Whether a function of query, key and value got one query alone: it may be wrong for several."""
    return len(way.case.caller.roles.inputs) == 3 and "n" not in way.case.caller.query_axes


def _rounding(caller: Caller) -> CheckFinding | None:
    """The finding that numbers are rounded to half precision inside; None if they are not, or if it cannot be seen."""
    finding = None if caller.returns_weights_alone else precision_finding(caller)
    return finding if finding is not None and finding.verdict == "wrong" else None


@torch.no_grad()
def callers_beside(subject: Subject) -> list[Caller]:
    """Calls to compare with a reference, with drawn parameters: those that return an output for each query.

    If there are none, all calls that run.
    """
    subject = replace(subject, function=with_drawn_parameters(subject.function))
    try:
        return callers_of(subject)
    except RegardError:
        return callers_of(subject, needs_output=False)


def with_drawn_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module in evaluation in which no parameter is 0 or 1 any more: zeros would hide mistakes.

    It adds in place, so gradients must be off. A function that is no module is returned as it is.
    """
    if not isinstance(function, nn.Module):
        return function
    module, generator = copy_of(function).eval(), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.add_(0.1 * noise.to(parameter))
    return module


def ways_of(caller: Caller, reference: Reference, names: Mapping[str, str]) -> Iterator[Way]:
    """All readings of one call, as many as `MOST_WAYS` for each number of heads and order of steps.

    A matrix has a role if the numbers of its step are among those that the call computed; if none has, those whose
    names fit best.
    """
    case, width, s = _case(caller, caller.sizes, 0.7, "", TOLERANCE), caller.argument_width, caller.sizes
    key_width = s.key_width or width
    for num_heads in _numbers_of_heads(caller, reference, width):
        found = matrices_of(caller.function, num_heads, (width, key_width)) if reference.matrices else []
        check_names(reference.matrices, found, names)
        sizes = {"C": width, "K": key_width, "V": s.value_width or key_width}
        for order, steps in reference.orders.items():
            search = _Search(reference.matrices, found, names, case.numbers.holds, bool(caller.roles.masks))
            for chosen, matrices, agreeing in islice(search.ways(steps, _values(case, num_heads), sizes), MOST_WAYS):
                yield Way(case, order, chosen, num_heads, matrices, agreeing)


def _in_case(way: Way, case: Case) -> Way:
    """The same reading of another call, with the number of the last step that agrees there."""
    there = replace(way, case=case, smaller=way)
    held = [n for n, step in enumerate(way.steps, 1) if case.numbers.holds(getattr(there.before[n], step.into))]
    return replace(there, agreeing=max(held, default=0))


@dataclass
class _Search:
    """Gives the matrices of a module to the steps of a reference, one after the other.

    `wanted` are the axes of the matrices by role, in letters, and `names` the parameters that the user names. `found`
    are all matrices of the module. `holds` says whether the numbers of a tensor are among those that the call computed,
    `takes_mask` whether the function takes a mask, and `computed` counts the results of steps.
    """

    wanted: Mapping[str, str]
    found: list[Matrix]
    names: Mapping[str, str]
    holds: Callable[[Tensor], bool]
    takes_mask: bool
    computed: int = 0

    @cached_property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of all matrices of the module."""
        return {tuple(matrix.weight.shape) for matrix in self.found}

    def ways(
        self,
        steps: tuple[Step, ...],
        values: Values,
        sizes: Mapping[str, int],
        done: tuple[Step, ...] = (),
        agreeing: int = 0,
    ) -> Iterator[tuple[tuple[Step, ...], dict[str, Matrix], int]]:
        """The steps with their conventions, the matrices by their roles, and the number of the last step that agrees.

        It goes on from the steps `done`, with their values, the sizes of the letters, and the last step `agreeing`
        among them. Behind a matrix that no number shows, the others are those whose names fit best.
        """
        number = len(done)
        if self.computed > MOST_VALUES:
            return
        if number == len(steps):
            yield done, values.matrices, agreeing
            return
        # too many steps in a row differ: the later ones are filled in without a comparison
        is_lost = number - agreeing > LONGEST_GAP
        forms = steps[number : number + 1] if is_lost else (steps[number], *steps[number].others)
        guesses = 1 if number > agreeing or is_lost else MOST_GUESSES
        forms = [form for form in forms if self.takes_mask or not form.takes_mask]
        choices = [(form, self._choices(form, values, sizes, is_lost)) for form in forms]
        # choices that agree rule out the others; if none agrees, the first ones are guessed
        agree = [(form, choice) for form, found in choices for choice in found if choice[2]]
        guessed = [(form, choice) for form, found in choices for choice in found[:guesses]]
        for form, (chosen, with_it, agrees) in agree or guessed:
            yield from self.ways(steps, chosen, with_it, (*done, form), number + 1 if agrees else agreeing)

    def _choices(
        self, step: Step, values: Values, sizes: Mapping[str, int], is_lost: bool
    ) -> list[tuple[Values, Mapping[str, int], bool]]:
        """The values after a step for each matrix that it may have, with all sizes, and whether the numbers agree.

        If the way `is_lost`, no numbers are compared, and the first matrix that fits is the only one.
        """
        role, choices = step.matrix, []
        if not role or role in values.matrices:
            options: list[tuple[Mapping[str, Matrix], Mapping[str, int]]] = [(values.matrices, sizes)]
        else:
            used = {matrix.name for matrix in values.matrices.values()}
            free = [m for m in self.found if m.name not in used and m.name.startswith(self.names.get(role, ""))]
            parents = {_parent(matrix) for matrix in values.matrices.values()}
            # if names fit equally well, parts of one parameter go together, such as query and key in one projection
            free.sort(key=lambda matrix: _parent(matrix) not in parents)
            fits = fitting(role, self.wanted[role], free, sizes)
            options = [({**values.matrices, role: matrix}, with_it) for matrix, with_it in fits]
            options = [option for option in options if self._can_go_on(*option)]
        for matrices, with_it in options[:1] if is_lost else options:
            self.computed += 1
            try:
                after = run([step], Values(**{**vars(values), "matrices": matrices}))
            except (RuntimeError, IndexError):  # the shapes of this reading do not fit
                continue
            choices.append((after, with_it, not is_lost and self.holds(getattr(after, step.into))))
        return choices

    def _can_go_on(self, matrices: Mapping[str, Matrix], sizes: Mapping[str, int]) -> bool:
        """Whether some matrix has the shape of each role that is still free."""
        free = [letters for role, letters in self.wanted.items() if role not in matrices]
        return all(any(unified(letters, shape, sizes) for shape in self.shapes) for letters in free)


def _parent(matrix: Matrix) -> str:
    """The parameter that a matrix is a part of; for a whole matrix a text that no other one has.

    So parts of one parameter have the same parent, and whole matrices have none in common.
    """
    return matrix.name.rpartition("[")[0] or f"whole {matrix.name}"


def _numbers_of_heads(caller: Caller, reference: Reference, width: int) -> list[int]:
    """The numbers of heads to try; none if the reference splits a width that the function gets in heads."""
    if not reference.has_heads:
        return [1]
    if "h" in caller.query_axes:
        return []
    modules = list(caller.function.modules())[1:] if isinstance(caller.function, nn.Module) else []
    inner = [n for m in modules for name in HEADS if isinstance(n := getattr(m, name, None), int)]
    options = declared_heads(caller.function) or inner or [1, 2, 4, 8]
    return [n for n in dict.fromkeys(options) if width % n == 0]


def _further_cases(caller: Caller) -> Iterator[Case]:
    """Calls with large scores, and with many tokens, where windows show.

    Large scores make roundings larger, so more of a difference is tolerated.
    """
    s, n = caller.sizes, MANY
    longer = replace(s, queries=n if s.queries > 1 else 1, keys=n)
    for sizes, scale, what in ((s, 25.0, " where scores are large"), (longer, 0.7, f" with {n} keys")):
        try:
            yield _case(caller, sizes, scale, what, TOLERANCE if scale < 1 else 100 * TOLERANCE)
        except Exception:  # of the user's function: it may know fewer tokens
            continue


def _case(caller: Caller, sizes: InputSizes, scale: float, what: str, tolerance: float) -> Case:
    """One recorded call of the caller; `scale` is the standard deviation of its inputs.

    `what` and `tolerance` are those of the `Case`. A function of one input has it for query, key and value, and one of
    two has the keys for values.
    """
    query, key, value = inputs = sizes.sample(21, caller.dtype, scale)
    numbers, returned = recorded(caller, inputs)
    if caller.roles.is_self:
        key = value = query
    elif len(caller.roles.inputs) == 2:
        value = key
    return Case(caller, (query, key, value), [x.double() for x in returned], numbers, what, tolerance)


def _values(case: Case, num_heads: int, matrices: Mapping[str, Matrix] = MappingProxyType({})) -> Values:
    """The values before the first step. A row without any visible key has NaN for weights, as in a softmax."""
    query, key, value = (x.double() for x in case.inputs)
    return Values(query=query, key=key, value=value, num_heads=num_heads, matrices=matrices, of_no_keys=torch.nan)


def _agrees(way: Way, case: Case, wrong: Mapping[str, str]) -> bool:
    """Whether the steps give what the function returned in a call: the output, or the weights alone.

    `wrong` are the mistakes of steps, by their names; {} if all are right.
    """
    # in the call of the way itself, the values before the last wrong step are known
    numbers = [n for n, step in enumerate(way.steps) if step.name in wrong and case is way.case] or [0]
    first, last = numbers[0], numbers[-1]
    start = way.before[first] if case is way.case else _values(case, way.num_heads, way.matrices)
    try:
        values = run(way.steps[last:], way.before_with(last, wrong) if last > first else start, wrong)
        # the function may give zeros to a query without any visible key
        if values.output.isnan().any() and not any(x.isnan().any() for x in case.returned):
            values = run(way.steps[first:], Values(**{**vars(start), "of_no_keys": 0.0}), wrong)
    except (RuntimeError, IndexError):  # a mistake that these sizes do not allow
        return False
    if any(_same(values.output, x, case.tolerance) for x in case.returned):
        return True
    if not hasattr(values, "weights"):
        return False
    # weights count if there is no output beside them, of the size of the right one either
    outputs = (values.output.numel(), way.before[-1].output.numel())
    is_alone = not any(x.numel() in outputs for x in case.returned)
    return is_alone and any(_same(values.weights, x, case.tolerance) for x in case.returned)


def _same(expected: Tensor, given: Tensor, tolerance: float) -> bool:
    """Whether two tensors have equal numbers, in any order of their axes; axes of size 1 do not count.

    `tolerance` is as in `_close`.
    """
    expected, given = expected.squeeze(), given.squeeze()
    if expected.ndim != given.ndim or sorted(expected.shape) != sorted(given.shape):
        return False
    return any(
        _close(expected.permute(order), given, tolerance)
        for order in permutations(range(expected.ndim))
        if tuple(expected.shape[axis] for axis in order) == tuple(given.shape)
    )


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors of one shape differ by at most `tolerance` times the largest finite number of `one`.

    Both must be finite in the same places. Elsewhere they agree, whichever of NaN, inf and -inf they have.
    """
    difference, size = (one - other).abs(), one.abs()
    if not (size.numel() and math.isfinite(difference.max())):  # all finite, as usual: no search is needed
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        difference, size = difference[finite], size[finite]
    return not size.numel() or bool(difference.max() <= tolerance * (size.max() + 1e-6))


def _mistake_of(tried: list[Way], reference: Reference) -> Likeness:
    """The mistake that explains the numbers of the first way that has one; else the first step that differs.

    `tried` are ways, the best ones first. Two mistakes together are searched for in the first way alone.
    """
    for way in tried:
        found = _explaining(way, mistakes_of(way.steps))
        if found is not None:
            where = next(iter(found.wrong))
            step = next(step for step in way.steps if step.name == where)
            text = f"With this mistake in the step {where!r}, the steps of {reference.name} give the same numbers"
            return Likeness(_wrong(f"{text}{way.case.what}{way.text}.", found.text, step), way.case.caller)
    way = tried[0]
    # at least one of two mistakes is in the first step that differs, shortly before it, or after it
    late = {step.name for step in way.steps[max(0, way.agreeing - 2) :]}
    pairs = _pairs([each for each in mistakes_of(way.steps) if late & set(each.wrong)])
    found = next((each for each in islice(pairs, MOST_PAIRS) if _explains(way, each)), None)
    if found is not None:
        text = f"With both mistakes, the steps of {reference.name} give the same numbers{way.case.what}{way.text}."
        return Likeness(_wrong(text, found.text), way.case.caller)
    return Likeness(_first_difference(way, reference), way.case.caller, is_explained=False)


def _explaining(way: Way, mistakes: Iterable[Mistake]) -> Mistake | None:
    """The mistake that gives the user's numbers; of several, that whose values are found most among those computed."""
    found = [each for each in mistakes if _explains(way, each)]
    return max(found, key=lambda each: _share_held(way, each.wrong), default=None)


def _explains(way: Way, mistake: Mistake) -> bool:
    """Whether the mistake gives the numbers of the call, and of the smaller call if there is one.

    One query may fit by chance: then it must give those of the further calls too.
    """
    calls = [way] if way.smaller is None else [way, way.smaller]
    further = ((way, case) for case in _further_cases(way.case.caller)) if _is_one_query(way) else ()
    return all(_agrees(*each, mistake.wrong) for each in chain(((call, call.case) for call in calls), further))


def _share_held(way: Way, wrong: Mapping[str, str]) -> float:
    """The share of the steps, from the first wrong one on, whose results with the mistakes the call computed."""
    first = next(n for n, step in enumerate(way.steps) if step.name in wrong)
    values, held = way.before[first], []
    for step in way.steps[first:]:
        values = run([step], values, wrong)
        held.append(way.case.numbers.holds(getattr(values, step.into)))
    return sum(held) / max(1, len(held))


def _wrong(evidence: str, mistake: str, step: Step | None = None) -> CheckFinding:
    """The finding about steps with a mistake, with the formula of the wrong step as remedy."""
    remedy = f"The formula: {step.formula}." if step is not None and step.formula else "Compare it with the formula."
    return CheckFinding("steps", "wrong", evidence, remedy, mistake)


def _pairs(mistakes: list[Mistake]) -> Iterator[Mistake]:
    """Each two mistakes of different steps, as one mistake."""
    for n, one in enumerate(mistakes):
        for other in mistakes[n + 1 :]:
            if not set(one.wrong) & set(other.wrong):
                yield Mistake(f"{one.text}; {other.text}", {**one.wrong, **other.wrong})


def _first_difference(way: Way, reference: Reference) -> CheckFinding:
    """The finding that names the first step that differs, or several if it is not known which of them it is.

    A step agrees for sure if its numbers are in the run, and in no value before it. The steps after the last sure one
    are named, up to the one after `way.agreeing`.
    """
    last = min(way.agreeing, len(way.steps) - 1)
    first = 0
    for number, step in enumerate(way.steps[: way.agreeing]):
        result = getattr(way.before[number + 1], step.into)
        if way.case.numbers.holds(result) and not _is_known(result, vars(way.before[number]).values()):
            first = number + 1
    # steps that make q, k and v are not named beside a later one
    while first < last and way.steps[first].into in ("q", "k", "v"):
        first += 1
    first = min(first, last)
    names = [step.name for step in way.steps[first : last + 1]]
    before_it = f"The steps until {way.steps[first - 1].name!r} agree" if first else "No step agrees"
    steps = f"the step{'s' * (len(names) > 1)} {' or '.join(map(repr, names))}"
    text = f"{before_it} with {reference.name}{way.case.what}{way.text}. The first that differs is {steps}."
    return _wrong(text, f"{steps} differ{'s' * (len(names) < 2)}", way.steps[last])


def _is_known(result: Tensor, earlier: Iterable[Any]) -> bool:
    """Whether the numbers of a result stand in a value before it, as those of a mask that hides some scores."""
    return Recording(x for x in earlier if isinstance(x, Tensor)).holds(result)


def _without_readings(reference: Reference, caller: Caller) -> CheckFinding:
    """The finding that the steps do not run: no parameters fit its matrices, or the inputs do not fit the steps."""
    if not reference.matrices:
        shapes = ", ".join(f"{name} {shape}" for name, shape in caller.shapes(*caller.sizes.sample()))
        text = f"The steps of {reference.name} do not run with inputs of these shapes: {shapes}."
        return CheckFinding("steps", "unknown", text, "Give queries and keys of the same width.")
    wanted = ", ".join(f"{role} ({axes.replace(' ', ' x ')})" for role, axes in reference.matrices.items())
    text = f"{reference.name} needs the matrices {wanted}, and the parameters of the function do not fit these shapes."
    remedy = "Say which they are: regard.check(module, like=..., matrices={'query': 'name of a parameter'})."
    return CheckFinding("steps", "unknown", text, remedy)


def reference_named(name: object) -> Reference:
    """The reference of a name, or an error with the nearest one."""
    if not isinstance(name, str) or name not in REFERENCES:
        known = [*REFERENCES, *MASKS]
        raise RegardError(f"check(like={name!r}): the references have other names. {nearest(str(name), known)}")
    return REFERENCES[name]
