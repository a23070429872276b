"""All laws on a piece or mechanism that a user wrote with Regard, as a report."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.biases import Bias
from regard.catalog import CatalogEntry
from regard.diagnosis.laws import LAWS, Example, agrees_with_the_reference, gradients_agree_with_dense, is_defined
from regard.diagnosis.progress import CheckProgress
from regard.diagnosis.report import CheckFinding, CheckReport
from regard.encodings import Encoding
from regard.engine import ENGINES
from regard.masks import Mask
from regard.normalizers import Normalizer
from regard.scores import Score

Piece = Attention | CatalogEntry | Bias | Mask | Normalizer | Encoding | Score
#: Heads, widths of queries and keys, and lengths that are tried for an `Attention` of unknown sizes.
TRIED = [(h, d, n) for n in (24, 12) for d in (8, 16, 32, 64, 4, 6) for h in (4, 2, 8, 1)]


def law_report(subject: Piece, inputs: tuple[Tensor, ...], progress: CheckProgress) -> CheckReport:
    """A finding for each law; with inputs the laws run on these tensors, as float64."""
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = subject.example if isinstance(subject, CatalogEntry) else _example_of(_attention_of(subject), inputs)
        q, k, v = small()[1:]
        for name, law in _laws(small):
            progress.begin(name)
            progress.add([_finding(name, law, small)])
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True))
    name = subject.name if isinstance(subject, CatalogEntry) else type(subject).__name__
    return CheckReport(name, f"attention(q, k, v), {shapes}", tuple(progress.findings))


def _attention_of(piece: Piece) -> Attention:
    """A copy of an attention; of a piece, an attention that has it in its slot, and is plain otherwise."""
    if isinstance(piece, Attention):
        return copy.deepcopy(piece)
    slots = {"bias": Bias, "mask": Mask, "normalizer": Normalizer, "position": Encoding, "score": Score}
    slot = next(name for name, kind in slots.items() if isinstance(piece, kind))
    return Attention(**{slot: copy.deepcopy(piece)})  # type: ignore[arg-type]


def _example_of(attention: Attention, inputs: tuple[Tensor, ...]) -> Callable[[], Example]:
    """Fresh copies of the attention in evaluation, with inputs that fit it."""
    attention = attention.double().eval()
    if inputs and len(inputs) != 3:
        raise RegardError(f"check: an Attention takes q, k and v, got {len(inputs)} inputs.")
    tensors = [x.detach().double() for x in inputs] or _fitting(attention)
    return lambda: (copy.deepcopy(attention), *(x.clone() for x in tensors))  # type: ignore[return-value]


def _fitting(attention: Attention) -> list[Tensor]:
    """Random query, key and value of the first sizes of `TRIED` that the attention takes."""
    errors = []
    for heads, width, length in TRIED:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 2, heads, length, width, dtype=torch.float64, generator=generator)
        try:
            attention(q, k, v)
        except RegardError as error:
            errors.append(str(error))
            continue
        return [q, k, v]
    raise RegardError(
        f"check: no inputs of {len(TRIED)} sizes fit {attention!r}. The last error: {errors[-1]} "
        "Give inputs: regard.check(attention, q, k, v)."
    )


def _laws(small: Callable[[], Example]) -> Iterator[tuple[str, Callable[[Callable[[], Example]], None]]]:
    """All laws by name; those of the definition in NumPy only if there is one.

    `small` makes a fresh example, and each law takes such a function.
    """
    try:
        defined = is_defined(small)
    except Exception:  # of the user's piece; the laws report it
        defined = False
    if defined:
        for engine in sorted(set(ENGINES) - {"reference"}):
            yield f"{engine} agrees with the definition", lambda s, e=engine: agrees_with_the_reference(e, s())
    for engine in sorted(set(ENGINES) - {"reference", "dense"}):
        yield f"gradients of {engine} agree with dense", lambda s, e=engine: gradients_agree_with_dense(e, s())
    yield from LAWS.items()


def _finding(name: str, law: Callable[[Callable[[], Example]], None], small: Callable[[], Example]) -> CheckFinding:
    """The finding about one law, by its name, on the examples that `small` makes.

    An error of the piece is a broken law too.
    """
    try:
        law(small)
    except Exception as error:  # of the user's piece
        text = " ".join(str(error).split())[:400] or type(error).__name__
        said = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
        return CheckFinding("law", "wrong", said, _REMEDIES.get(name, ""), f"broken law: {name}")
    return CheckFinding("law", "right", f"{name[0].upper()}{name[1:]}.")


_REMEDIES = {
    "spans bound the mask": "any_allowed may be too large, never too small; all_allowed too small, never too large.",
    "engines agree with dense": "A tile must depend only on grid.i, grid.j and the tensors, not on its size.",
    "rows merge from their parts": "Without `merge` and `share` of its own, leave out `merge_refusal = None`.",
    "rows sum to what the normalizer declares": "Set `row_sum` to what a full row sums to, or None.",
}
