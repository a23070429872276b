"""`check(..., like="causal_mask")` and `"padding_mask"`: functions that build a mask, beside the mask that is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.shapes import tensor_of_array
from regard.diagnosis.failures import FailedCall, is_not_written, listed
from regard.diagnosis.masks import SENSE_TEXTS
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.signatures import name_of, signature_of

#: A number below this hides a pair where it is added to the scores.
HIDES = -1e3


@dataclass(frozen=True)
class MaskCase:
    """One call of a function that builds a mask, with its arguments; `given` says them in words.

    `visible` are the masks (B, I, J) that are right, True where a query may attend, by a text that says the convention:
    "" for the usual one. `wrong` are masks by their mistakes.
    """

    given: str
    arguments: tuple[Any, ...]
    visible: Mapping[str, Tensor]
    wrong: Mapping[str, Tensor] = field(default_factory=dict)


def mask_finding_beside(name: str, function: Callable[..., Any], meant: str | None) -> tuple[str, CheckFinding]:
    """How the function was called, and the finding about its masks.

    `name` is one of `MASKS`, and `meant` the sense that the user means, or None. The first list of calls counts whose
    first call runs.
    """
    failures: list[FailedCall] = []
    for cases in _BUILDERS[name](_number_of_arguments(function), _pad_id(function)):
        found: list[CheckFinding] = []
        for case in cases:
            try:
                built = function(*case.arguments)
                if built is None:
                    raise NotImplementedError("it returned None")
                built = built if isinstance(built, Tensor) else tensor_of_array(np.asarray(built))
            except Exception as error:  # of the user's function
                failures.append(replace(FailedCall.of(error, ()), inputs=case.given))
                break
            found.append(_finding(name, case, built, meant))
        if found:
            return f"({cases[0].given})", next((one for one in found if one.verdict == "wrong"), found[-1])
    if is_not_written(failures):
        raise RegardError(
            f"check: {name_of(function)} is not written yet. {failures[0].error}. Write its body, and return the mask."
        )
    raise RegardError(f"check: {name_of(function)} built no mask. Tried:\n{listed(failures)}")


def _finding(name: str, case: MaskCase, built: Tensor, meant: str | None) -> CheckFinding:
    """The finding about one mask that the function built: right in a sense, or its mistake in each sense.

    `name` is one of `MASKS`, and `meant` the sense that the user means, or None.
    """
    readings = list(_readings(built))
    what = name.replace("_", " ")
    right = [(s, text) for s, visible in readings for text, mask in case.visible.items() if _fits(visible, mask)]
    senses = [sense for sense, _ in right]
    if right and meant not in (None, *senses):
        text = f"It is the {what} where {SENSE_TEXTS[senses[0]]}. The check was told: {SENSE_TEXTS[str(meant)]}."
        return CheckFinding("steps", "wrong", text, "Return the opposite, ~mask.", "the mask is reversed")
    if right:
        sense, text = right[senses.index(meant) if meant else 0]
        return CheckFinding("steps", "right", f"It is the {what}{text}: {SENSE_TEXTS[sense]}.")
    said = [(s, mistake) for s, visible in readings for mistake, mask in case.wrong.items() if _fits(visible, mask)]
    said = [each for each in said if meant in (None, each[0])] or said
    mistakes = [f"{mistake} ({SENSE_TEXTS[sense]})" if len(said) > 1 else mistake for sense, mistake in said]
    mistake = ", or ".join(mistakes) or f"the mask is no {what}"
    text = f"With {case.given} it returned a mask {tuple(built.shape)} that differs from the one that is meant."
    return CheckFinding("steps", "wrong", text, "Print the mask of a small example.", mistake)


def _readings(built: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each sense in which the numbers of a mask, `built`, can be read, and the pairs that are visible in it."""
    if built.is_floating_point() and bool((built < HIDES).any()):
        yield "additive", built >= HIDES
    elif bool(((built == 0) | (built == 1)).all()):
        # zeros that are added to the scores hide nothing
        if built.is_floating_point() and not built.any():
            yield "additive", built == 0
        yield "keep", built != 0
        yield "drop", built == 0


def _fits(visible: Tensor, expected: Tensor) -> bool:
    """Whether a mask shows the expected pairs (B, I, J). Axes that it lacks, or of size 1, are repeated.

    `visible` are the pairs that it shows, in one sense of its numbers. Of a mask with an axis of heads each head is
    compared.
    """
    B, _, J = expected.shape
    if visible.ndim > 4:
        raise RegardError(
            f"check: the mask {tuple(visible.shape)} has {visible.ndim} axes. A mask has at most 4: (batch, heads, "
            "queries, keys)."
        )
    if visible.ndim == 4:
        heads = visible.unbind(1)
        return bool(heads) and all(_expanded_is(head, expected) for head in heads)
    # (I, J) for all sequences, if I = B, or the keys of each sequence
    if tuple(visible.shape) == (B, J):
        options = [visible[None], visible[:, None]]
    else:
        options = [visible[(None,) * (3 - visible.ndim)]]
    return any(_expanded_is(each, expected) for each in options)


def _expanded_is(visible: Tensor, expected: Tensor) -> bool:
    """Whether a mask of three axes shows the expected pairs (B, I, J), with its axes of size 1 repeated."""
    fits = all(size in (1, full) for size, full in zip(visible.shape, expected.shape, strict=True))
    return fits and torch.equal(visible.expand_as(expected), expected)


def _number_of_arguments(function: Callable[..., Any]) -> int:
    """How many arguments a call needs."""
    return sum(p.default is p.empty for p in signature_of(function).parameters.values())


def _pad_id(function: Callable[..., Any]) -> int:
    """The id of padding: the default of an argument whose name says so, or 0."""
    named = [p.default for name, p in signature_of(function).parameters.items() if "pad" in name.lower()]
    return next((default for default in named if isinstance(default, int)), 0)


# The masks


def _causal_calls(needed: int, pad: int) -> Iterator[list[MaskCase]]:
    """Lists of calls, one for each kind of argument, for a function of `needed` arguments: lengths, tokens, inputs.

    Several lengths show masks that are fixed for one length.
    """
    if needed >= 2:
        yield [_causal_case(f"{I}, {J}", (I, J), (1, I, J)) for I, J in ((6, 6), (1, 5), (4, 6))]
    lengths = (6, 1, 2, 40)
    yield [_causal_case(str(n), (n,), (1, n, n)) for n in lengths]
    yield [_causal_case(f"tokens (2, {n})", (torch.ones(2, n, dtype=torch.long),), (2, n, n)) for n in lengths]
    yield [_causal_case(f"x (2, {n}, 8)", (torch.ones(2, n, 8),), (2, n, n)) for n in lengths]


def _causal_case(given: str, arguments: tuple[Any, ...], shape: tuple[int, int, int]) -> MaskCase:
    """A call that builds a causal mask of a shape (B, I, J), with the right masks and the wrong ones.

    `given` are the `arguments` of the call in words.
    """
    _, I, J = shape
    d = torch.arange(J) - torch.arange(I)[:, None]  # j - i
    right = {"": d <= 0} if I == J else {", whose first keys are those of the first queries": d <= 0}
    right |= {", whose last keys are those of the last queries": d <= J - I} if I != J else {}
    wrong = {
        "the mask hides the token itself": d < 0,
        "the mask shows the next token": d <= 1,
        "the mask shows later tokens and hides earlier ones": d >= 0,
        "the mask hides nothing": d < J,
        "the mask hides everything": d > J,
        "the mask shows each token itself alone": d == 0,
    }
    of_batch = [{name: mask.expand(shape) for name, mask in masks.items()} for masks in (right, wrong)]
    return MaskCase(given, arguments, *of_batch)


def _padding_calls(needed: int, pad: int) -> Iterator[list[MaskCase]]:
    """Lists of calls with tokens, or with the lengths of three sequences; `pad` is the id of padding.

    A function of two `needed` arguments gets the id beside the tokens.
    """
    lengths = torch.tensor([6, 4, 1])
    # tokens that are not the padding, and then padding
    tokens = torch.where(torch.arange(6) < lengths[:, None], pad + 1 + torch.arange(6), pad)
    cases = [("tokens (3, 6)", (tokens,)), (f"tokens (3, 6), {pad}", (tokens, pad))]
    yield [_padding_case(given, arguments, lengths) for given, arguments in cases[needed >= 2 : (needed >= 2) + 1]]
    yield [_padding_case("lengths (3,), 6", (lengths, 6), lengths)]
    yield [_padding_case("lengths (3,)", (lengths,), lengths)]


def _padding_case(given: str, arguments: tuple[Any, ...], lengths: Tensor) -> MaskCase:
    """A call that builds a padding mask (3, 6, 6) for sequences of these lengths. `given` is as in `_causal_case`."""
    key = torch.arange(6)
    real = key < lengths[:, None]

    def of_keys(visible: Tensor) -> Tensor:
        return visible[:, None].expand(-1, 6, -1).clone()

    right = {"": of_keys(real), ", which hides queries too": real[:, None] & real[..., None]}
    wrong = {
        "the mask hides queries, not keys": real[..., None].expand(-1, -1, 6).clone(),
        "the mask hides nothing": of_keys(torch.ones_like(real)),
        "the mask hides the last real token too": of_keys(key < lengths[:, None] - 1),
        "the mask shows the first token of the padding": of_keys(key < lengths[:, None] + 1),
        "the mask hides the first tokens, not the last ones": of_keys(real.flip(1)),
        "all sequences have the mask of the first": of_keys(real[:1].expand(3, -1)),
    }
    return MaskCase(given, arguments, right, wrong)


_BUILDERS: dict[str, Callable[[int, int], Iterator[list[MaskCase]]]] = {
    "causal_mask": _causal_calls,
    "padding_mask": _padding_calls,
}
#: The names of the masks.
MASKS = tuple(_BUILDERS)
