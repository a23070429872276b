"""The laws that must hold before a mechanism is timed. tests/test_laws.py checks them for all mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import regard as rg
from regard.engine import ENGINES, Problem
from regard.engine.reference import reference
from regard.shapes import Sizes

#: A mechanism with query, key and value that fit it: small, and in float64.
Example = tuple[rg.Attention, Tensor, Tensor, Tensor]


def problem_of(
    attention: rg.Attention, q: Tensor, k: Tensor, v: Tensor, positions: rg.Positions | None = None
) -> Problem:
    """The `Problem` of a call, as engines get it."""
    sizes = Sizes.of(q, k, v)
    return Problem(attention, q, k, v, positions or rg.Positions.aligned_to_end(sizes.I, sizes.J), sizes)


def runs(engine: str, attention: rg.Attention, q: Tensor, k: Tensor, v: Tensor) -> rg.AttentionOutput | None:
    """The result of an engine, or None if it refuses; the refusal must name the engines that can."""
    try:
        return rg.attend(attention, q, k, v, engine=engine)
    except rg.RegardError as error:
        assert "Engines that can: " in str(error) and "dense" in str(error).split("Engines that can: ")[1]
        return None


@torch.no_grad()
def agrees_with_the_reference(engine: str, example: Example) -> None:
    """Check that output and weights of an engine agree with the reference, or that it refuses."""
    output, weights = reference(problem_of(*example))
    seen = runs(engine, *example)
    if seen is not None:
        torch.testing.assert_close(seen.output, torch.from_numpy(output), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(seen.weights.dense(), torch.from_numpy(weights), rtol=1e-9, atol=1e-10)


def gradients(engine: str, example: Example) -> tuple[Tensor | None, ...] | None:
    """Gradients of query, key, value and parameters for a fixed random output gradient; None if the engine refuses."""
    attention, *tensors = example
    inputs = [t.detach().requires_grad_() for t in tensors]
    seen = runs(engine, attention, *inputs)
    if seen is None:
        return None
    grad_output = torch.randn(seen.output.shape, dtype=inputs[0].dtype, generator=torch.Generator().manual_seed(1))
    leaves = [*inputs, *(p for p in attention.parameters() if p.requires_grad)]
    return torch.autograd.grad(seen.output, leaves, grad_output, allow_unused=True)


def gradients_agree_with_dense(engine: str, example: Example) -> None:
    """Check that gradients of an engine agree with those of dense, which are checked against finite differences."""
    actual, expected = gradients(engine, example), gradients("dense", example)
    if actual is None or expected is None:
        return
    for gradient, dense in zip(actual, expected, strict=True):
        if gradient is None or dense is None:
            assert all(g is None or not g.any() for g in (gradient, dense)), "one engine omits a gradient"
        else:
            torch.testing.assert_close(gradient, dense, rtol=1e-8, atol=1e-10)


def dense_slope_is_that_of_the_reference(example: Example, step: float = 1e-6) -> None:
    """Check the gradient of dense along a random direction against a central difference of the reference."""
    attention, *tensors = example
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]
    dense = gradients("dense", example)
    assert dense is not None
    grad_output = None
    ends = []
    for sign in (1, -1):
        q, k, v = (t + sign * step * d for t, d in zip(tensors, directions, strict=True))
        with torch.no_grad():
            output = torch.from_numpy(reference(problem_of(attention, q, k, v))[0])
        if grad_output is None:
            grad_output = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        ends.append((output * grad_output).sum())
    slope = sum((g * d).sum() for g, d in zip(dense, directions, strict=False) if g is not None)
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def broken_law(small: Callable[[], Example]) -> str:
    """The first broken law with its error, or "": output, weights and gradients of every engine."""
    for law, check in _laws(small):
        try:
            check()
        except AssertionError as error:
            return f"{law}: {' '.join(str(error).split())}"
    return ""


def _laws(small: Callable[[], Example]) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "dense agrees with the reference", lambda: agrees_with_the_reference("dense", small())
    yield "gradients of dense agree with the reference", lambda: dense_slope_is_that_of_the_reference(small())
    for engine in sorted(set(ENGINES) - {"reference", "dense"}):
        yield f"{engine} agrees with the reference", lambda e=engine: agrees_with_the_reference(e, small())
        yield f"gradients of {engine} agree with dense", lambda e=engine: gradients_agree_with_dense(e, small())
