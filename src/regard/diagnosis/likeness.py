"""`check(..., like=...)`: the user's numbers beside those of a reference, and the first step that differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, permutations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError, nearest
from regard.diagnosis.calling import Caller, InputSizes, callers_of, declared_heads
from regard.diagnosis.matrices import check_names, fitting, matrices_of
from regard.diagnosis.progress import CheckProgress
from regard.diagnosis.recording import recorded
from regard.diagnosis.references import REFERENCES
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.steps import Matrix, Reference, Step, Values, mistakes_of, run

#: Numbers that differ by less are equal. Functions that compute in float32 must pass.
TOLERANCE = 1e-4
#: Ways to give matrices their roles: as many are looked at, and in as many mistakes are tried.
MOST_WAYS, MOST_TRIED = 24, 12
#: Steps in a row that may differ before the later ones are compared no more.
LONGEST_GAP = 3
#: Matrices that are tried in a role, where no number shows which one it is.
MOST_GUESSES = 3
#: Tokens of a long call.
MANY = 40


@dataclass(frozen=True)
class Case:
    """One call: its inputs (B, H, n, D), and what it returned, which is compared with a tolerance."""

    caller: Caller
    inputs: tuple[Tensor, Tensor, Tensor]
    returned: list[Tensor]
    what: str
    tolerance: float


@dataclass(frozen=True)
class Way:
    """One reading of the user's function: its call, a convention of the reference, heads, and the roles of matrices.

    `agreeing` is the number of the last step whose result is among the numbers that the call computed; 0 for none.
    """

    case: Case
    convention: str
    steps: tuple[Step, ...]
    num_heads: int
    matrices: Mapping[str, Matrix]
    agreeing: int

    @property
    def text(self) -> str:
        """The matrices by their roles, and the convention, in words."""
        roles = [f"{role} = {matrix.name}" for role, matrix in self.matrices.items()]
        said = ([self.convention] if self.convention else []) + ([", ".join(roles)] if roles else [])
        return f" ({'; '.join(said)})" if said else ""


@dataclass(frozen=True)
class Likeness:
    """A function beside a reference: the finding, the call, and whether the mistake explains all numbers."""

    finding: CheckFinding
    caller: Caller
    is_explained: bool = True


@torch.no_grad()
def likeness(
    function: Callable[..., Any],
    reference: Reference,
    inputs: tuple[Tensor, ...],
    names: Mapping[str, str],
    seed: int,
    progress: CheckProgress,
) -> Likeness:
    """Equal to the reference, the mistake by its step, the first step that differs, or not decided."""
    function = with_drawn_parameters(function)
    callers = callers_of(function, inputs, seed, progress, needs_output=False)
    every: list[Way] = []
    for way in (way for caller in callers for way in ways_of(caller, reference, names)):
        every.append(way)
        if _agrees(way, way.case, {}):
            later = next((case for case in _further_cases(way.case.caller) if not _agrees(way, case, {})), None)
            if later is None:
                text = f"All numbers are those of {reference.name}{way.text}."
                return Likeness(CheckFinding("steps", "right", text), way.case.caller)
            return _mistake_of([replace(way, case=later)], reference)
    if not every:
        return Likeness(_without_matrices(reference), callers[0], is_explained=False)
    every.sort(key=lambda way: -way.agreeing)
    return _mistake_of(every[:MOST_TRIED], reference)


def with_drawn_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module in evaluation in which no parameter is 0 or 1 any more: zeros would hide mistakes."""
    if not isinstance(function, nn.Module):
        return function
    module, generator = copy.deepcopy(function).eval(), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.add_(0.1 * noise.to(parameter))
    return module


def ways_of(caller: Caller, reference: Reference, names: Mapping[str, str]) -> Iterator[Way]:
    """All readings of one call. A matrix has a role if the numbers of its step are among those that the call computed;
    if none has, those whose names fit best.
    """
    case, width, key_width = _first_case(caller), caller.argument_width, caller.sizes.key_width
    numbers = recorded(caller, case.inputs)
    for num_heads in _numbers_of_heads(caller, reference, width):
        found = matrices_of(caller.function, num_heads, (width, key_width or width)) if reference.matrices else []
        check_names(reference.matrices, found, names)
        sizes = {"C": width, "K": key_width or width}
        for convention, steps in reference.conventions.items():
            search = _Search(reference.matrices, found, names, numbers.holds)
            for matrices, agreeing in islice(search.ways(steps, _values(case, num_heads), sizes), MOST_WAYS):
                yield Way(case, convention, steps, num_heads, matrices, agreeing)


@dataclass(frozen=True)
class _Search:
    """Gives the matrices of a module to the steps of a reference, one after the other."""

    wanted: Mapping[str, str]
    found: list[Matrix]
    names: Mapping[str, str]
    holds: Callable[[Tensor], bool]

    def ways(
        self, steps: tuple[Step, ...], values: Values, sizes: Mapping[str, int], number: int = 0, agreeing: int = 0
    ) -> Iterator[tuple[dict[str, Matrix], int]]:
        """The matrices by their roles, and the number of the last step that agrees, from the step `number` on.

        Behind a matrix that no number shows, the others are those whose names fit best.
        """
        if number == len(steps):
            yield values.matrices, agreeing
            return
        is_lost = number - agreeing > LONGEST_GAP
        choices = self._choices(steps[number], values, sizes, is_lost)
        agree = [choice for choice in choices if choice[2]]
        is_guess = number > agreeing or is_lost
        for chosen, with_it, agrees in agree or choices[: 1 if is_guess else MOST_GUESSES]:
            yield from self.ways(steps, chosen, with_it, number + 1, number + 1 if agrees else agreeing)

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
            fits = fitting(role, self.wanted[role], free, sizes)
            options = [({**values.matrices, role: matrix}, with_it) for matrix, with_it in fits]
        for matrices, with_it in options[:1] if is_lost else options:
            try:
                after = run([step], Values(**{**vars(values), "matrices": matrices}))
            except (RuntimeError, IndexError):  # the shapes of this reading do not fit
                continue
            choices.append((after, with_it, not is_lost and self.holds(getattr(after, step.into))))
        return choices


def _numbers_of_heads(caller: Caller, reference: Reference, width: int) -> list[int]:
    if not reference.has_heads:
        return [1]
    if "h" in caller.query_axes:
        return []
    options = declared_heads(caller.function) or [1, 2, 4, 8]
    return [n for n in dict.fromkeys(options) if width % n == 0]


def _first_case(caller: Caller) -> Case:
    return _case(caller, caller.sizes, 0.7, "", TOLERANCE)


def _further_cases(caller: Caller) -> Iterator[Case]:
    """Calls with large scores, and with many tokens, where windows show."""
    s, n = caller.sizes, MANY
    longer = replace(s, queries=n if s.queries > 1 else 1, keys=n)
    for sizes, scale, what in ((s, 25.0, " where scores are large"), (longer, 0.7, f" with {n} keys")):
        try:
            yield _case(caller, sizes, scale, what, TOLERANCE if scale < 1 else 100 * TOLERANCE)
        except Exception:  # of the user's function: it may know fewer tokens
            continue


def _case(caller: Caller, sizes: InputSizes, scale: float, what: str, tolerance: float) -> Case:
    query, key, value = inputs = sizes.sample(21, caller.dtype, scale)
    returned = [x.double() for x in caller.returned(*inputs)]
    if caller.roles.is_self:
        key = value = query
    elif len(caller.roles.inputs) == 2:
        value = key
    return Case(caller, (query, key, value), returned, what, tolerance)


def _values(case: Case, num_heads: int, matrices: Mapping[str, Matrix] = MappingProxyType({})) -> Values:
    query, key, value = (x.double() for x in case.inputs)
    return Values(query=query, key=key, value=value, num_heads=num_heads, matrices=matrices)


def _agrees(way: Way, case: Case, wrong: Mapping[str, str]) -> bool:
    """Whether the steps, with these mistakes, give what the function returned: the output, or the weights alone."""
    try:
        values = run(way.steps, _values(case, way.num_heads, way.matrices), wrong)
    except (RuntimeError, IndexError):  # a mistake that these sizes do not allow
        return False
    if any(_same(values.output, x, case.tolerance) for x in case.returned):
        return True
    if not hasattr(values, "weights"):
        return False
    is_alone = not any(x.numel() == values.output.numel() for x in case.returned)
    return is_alone and any(_same(values.weights, x, case.tolerance) for x in case.returned)


def _same(expected: Tensor, given: Tensor, tolerance: float) -> bool:
    """Whether two tensors have equal numbers, in any order of their axes; axes of size 1 do not count."""
    expected, given = expected.squeeze(), given.squeeze()
    if expected.ndim != given.ndim or sorted(expected.shape) != sorted(given.shape):
        return False
    return any(
        _close(expected.permute(order), given, tolerance)
        for order in permutations(range(expected.ndim))
        if tuple(expected.shape[axis] for axis in order) == tuple(given.shape)
    )


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    finite = one.isfinite()
    size = float(one[finite].abs().max()) if finite.any() else 0.0
    return bool(((one - other)[finite].abs() <= tolerance * (size + 1e-6)).all())


def _mistake_of(tried: list[Way], reference: Reference) -> Likeness:
    """The mistake that explains the numbers of the first way that has one; else the first step that differs."""
    for way in tried:
        for step, mistake in mistakes_of(way.steps):
            if _agrees(way, way.case, {step: mistake}):
                text = f"With this mistake in the step {step!r}, the steps of {reference.name} give the same numbers"
                return Likeness(_wrong(f"{text}{way.case.what}{way.text}.", mistake), way.case.caller)
    way = tried[0]
    for one, other in _pairs(way.steps[max(0, way.agreeing - 2) :]):
        if _agrees(way, way.case, dict([one, other])):
            text = f"With both mistakes, the steps of {reference.name} give the same numbers{way.case.what}{way.text}."
            return Likeness(_wrong(text, f"{one[1]}; {other[1]}"), way.case.caller)
    return Likeness(_first_difference(way, reference), way.case.caller, is_explained=False)


def _wrong(evidence: str, mistake: str) -> CheckFinding:
    return CheckFinding("steps", "wrong", evidence, "Compare this step with its formula.", mistake)


def _pairs(steps: Iterable[Step]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Two mistakes of different steps."""
    every = list(mistakes_of(steps))
    return ((one, other) for n, one in enumerate(every) for other in every[n + 1 :] if one[0] != other[0])


def _first_difference(way: Way, reference: Reference) -> CheckFinding:
    """The step after the last one that agrees."""
    last = way.agreeing
    step = way.steps[min(last, len(way.steps) - 1)]
    before = f"The steps until {way.steps[last - 1].name!r} agree" if last else "No step agrees"
    text = f"{before} with {reference.name}{way.case.what}{way.text}. The first step that differs: {step.name!r}."
    return CheckFinding(
        "steps", "wrong", text, "Compare this step with its formula.", f"the step {step.name!r} differs"
    )


def _without_matrices(reference: Reference) -> CheckFinding:
    wanted = ", ".join(f"{role} ({axes.replace(' ', ' x ')})" for role, axes in reference.matrices.items())
    text = f"{reference.name} needs the matrices {wanted}, and the parameters of the function do not fit these shapes."
    remedy = "Say which they are: regard.check(module, like=..., matrices={'query': 'name of a parameter'})."
    return CheckFinding("steps", "unknown", text, remedy)


def reference_named(name: object) -> Reference:
    """The reference of a name, or an error with the nearest one."""
    if not isinstance(name, str) or name not in REFERENCES:
        raise RegardError(f"check(like={name!r}): the references have other names. {nearest(str(name), REFERENCES)}")
    return REFERENCES[name]
