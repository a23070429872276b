"""The laws of a mechanism, as assertions. `regard.check` runs them on a user's piece, the tests on the whole catalog.

Each takes an example, or `small`, a function that makes a fresh one. Those before `_laws` must hold before a mechanism
is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Transported, scores
from regard.attention_output import AttentionOutput
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.caches import GrowingCache
from regard.catalog.entry import call_tensors
from regard.composites import Composite
from regard.engine import ENGINES, Problem
from regard.maps import Distance, Entropy, KeyTotals, Pool, Similarity, TopLinks
from regard.masks import mask_mod, padding
from regard.pieces.call_tensors import needs_of
from regard.pieces.grid import Grid
from regard.reference import reference

#: A mechanism with query, key and value that fit it: small, and in float64.
Example = tuple[Attention, Tensor, Tensor, Tensor]


def problem_of(attention: Attention, q: Tensor, k: Tensor, v: Tensor, positions: Positions | None = None) -> Problem:
    """The `Problem` of a call, as engines get it, with random tensors of the call."""
    sizes, tensors = Sizes.of(q, k, v), call_tensors(attention, q, k, v)
    positions = positions or Positions.aligned_to_end(sizes.I, sizes.J)
    return Problem(attention, q, k, v, positions, sizes, call_tensors=tensors)


def called(attention: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionOutput:
    """`attend` with random tensors of the call, if the pieces need some. They depend on the shapes only."""
    return attention(q, k, v, **call_tensors(attention, q, k, v), **options)


def runs(
    engine: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor, tensors: Mapping[str, Any] | None = None
) -> AttentionOutput | None:
    """The result of an engine, or None if it refuses; the refusal must name the engines that can.

    `tensors` are those of the call, random if they are not given.
    """
    tensors = call_tensors(attention, q, k, v) if tensors is None else tensors
    try:
        return attention(q, k, v, engine=engine, **tensors)
    except RegardError as error:
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
    """Gradients for a fixed random output gradient; None if the engine refuses.

    They are those of query, key, value, of the tensors of the call, and of the parameters. One is None if the output
    does not depend on the tensor.
    """
    attention, *tensors = example
    of_call = {name: t.detach().requires_grad_() for name, t in call_tensors(*example).items()}
    inputs = [t.detach().requires_grad_() for t in tensors]
    seen = runs(engine, attention, *inputs, tensors=of_call)
    if seen is None:
        return None
    grad_output = torch.randn(seen.output.shape, dtype=inputs[0].dtype, generator=torch.Generator().manual_seed(1))
    leaves = [*inputs, *of_call.values(), *(p for p in attention.parameters() if p.requires_grad)]
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


def _slope_is_that_of(output_of: Callable[..., Tensor], example: Example, step: float = 1e-6) -> None:
    """Check the gradient of dense along a random direction against a central difference of `output_of` an example.

    Only query, key and value are moved, by `step` times a random direction.
    """
    attention, *tensors = example
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]
    dense = gradients("dense", example)
    assert dense is not None
    ends = []
    for sign in (1, -1):
        moved = [t + sign * step * d for t, d in zip(tensors, directions, strict=True)]
        with torch.no_grad():
            output = output_of(attention, *moved)
        # the output gradient of `gradients`, by its seed
        toward = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        ends.append((output * toward).sum())
    slope = sum((g * d).sum() for g, d in zip(dense, directions, strict=False) if g is not None)
    torch.testing.assert_close(torch.as_tensor(slope), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def dense_slope_is_that_of_the_reference(example: Example) -> None:
    """Check the gradient of dense along a random direction against a central difference of the reference."""
    _slope_is_that_of(lambda *moved: torch.from_numpy(reference(problem_of(*moved))[0]), example)


def broken_law(small: Callable[[], Example]) -> str:
    """The first broken law with its error, or "". The laws are about output, weights and gradients of every engine.

    `small` makes a fresh example, here and below.
    """
    for law, check in _laws(small):
        try:
            check()
        except AssertionError as error:
            return f"{law}: {' '.join(str(error).split())}"
    return ""


@torch.no_grad()
def call_agrees_with_the_reference(example: Example) -> None:
    """Check output and weights of an attention with a transition against the reference."""
    _, q, _, v = example
    seen, expected = called(*example), called(*example, engine="reference").output
    torch.testing.assert_close(seen.output, expected, **CLOSE)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(seen.weights.dense() @ values, expected, **CLOSE)


@torch.no_grad()
def composite_gives_its_map(example: Example) -> None:
    """Check that the weights of a composite, times the values, are its output, in two engines."""
    _, q, _, v = example
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    for engine in ("auto", "dense"):
        seen = called(*example, engine=engine)
        torch.testing.assert_close(seen.weights.dense() @ values, seen.output, **CLOSE)


def _laws(small: Callable[[], Example]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The name and the check of each law that `broken_law` runs: those of a composite, a transition, or a score."""
    attention = small()[0]
    if isinstance(attention, Composite):
        yield "the output of a composite is that of its map", lambda: composite_gives_its_map(small())
        return
    if attention.family is Transported:
        yield "a call with its tensors agrees with the reference", lambda: call_agrees_with_the_reference(small())
        return
    yield "dense agrees with the reference", lambda: agrees_with_the_reference("dense", small())
    yield "gradients of dense agree with the reference", lambda: dense_slope_is_that_of_the_reference(small())
    for engine in sorted(set(ENGINES) - {"reference", "dense"}):
        yield f"{engine} agrees with the reference", lambda e=engine: agrees_with_the_reference(e, small())
        yield f"gradients of {engine} agree with dense", lambda e=engine: gradients_agree_with_dense(e, small())


# Laws of the weights, the mask and the cache. Each takes a function that makes a fresh small example.

Small = Callable[[], Example]
TORCH_ENGINES = tuple(sorted(set(ENGINES) - {"reference"}))
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def is_defined(small: Small) -> bool:
    """Whether every piece has a definition in NumPy; a user's piece need not have one."""
    try:
        with torch.no_grad():
            reference(problem_of(*small()))
    except RegardError as error:
        assert "no definition of" in str(error), error
        return False
    return True


def sees_the_future(attention: Attention, q: Tensor, k: Tensor) -> bool:
    """Whether some query may attend to a later key, by the mask's own predicate.

    True too without a mask, and if there are not as many keys as queries: then laws about the future do not apply.
    """
    if attention.mask is None or q.shape[2] != k.shape[2]:
        return True
    length = q.shape[2]
    grid = Grid.whole(Positions.aligned_to_end(length, length), q.shape[0], q.shape[1], length)
    return bool((attention.mask.allowed(grid) & (grid.j > grid.i)).any())


@torch.no_grad()
def engines_agree_with_dense(small: Small) -> None:
    """Output and weights of every engine are those of dense, or the engine refuses and names those that can."""
    expected = called(*small(), engine="dense")
    for engine in TORCH_ENGINES:
        seen = runs(engine, *small())
        if seen is not None:
            torch.testing.assert_close(seen.output, expected.output, **CLOSE, msg=lambda m, e=engine: f"{e}: {m}")
            torch.testing.assert_close(seen.weights.dense(), expected.weights.dense(), **CLOSE)


def gradients_agree_with_finite_differences(small: Small) -> None:
    """The slope of dense along a random direction is that of a central difference of its outputs."""
    _slope_is_that_of(lambda *moved: called(*moved, engine="dense").output, small())


@torch.no_grad()
def lazy_tiles_equal_dense_weights(small: Small) -> None:
    """Any tile that is computed on demand equals the same part of the dense weights."""
    seen = called(*small())
    weights = called(*small(), engine="dense").weights.dense()
    I, J = weights.shape[2:]
    torch.testing.assert_close(seen.weights[-1, -1, I // 3, :], weights[-1, -1, I // 3], **CLOSE)
    torch.testing.assert_close(seen.weights[0, :, 1:-1, J // 2 :], weights[0, :, 1:-1, J // 2 :], **CLOSE)
    torch.testing.assert_close(seen.weights[..., [J - 1, 0, 0]], weights[..., [J - 1, 0, 0]], **CLOSE)
    torch.testing.assert_close(seen.weights.tile(rows=[-1], cols=slice(0, J, 2)), weights[:, :, -1:, ::2], **CLOSE)


@torch.no_grad()
def weights_times_values_are_the_output(small: Small) -> None:
    """The output is the weights times the values."""
    attention, q, k, v = small()
    seen = called(attention, q, k, v)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(seen.weights.dense() @ values, seen.output, **CLOSE)


@torch.no_grad()
def rows_sum_to_what_the_normalizer_declares(small: Small) -> None:
    """Rows with an allowed key sum to `row_sum` of the normalizer; if that is None, to a number in (0, 1).

    If the normalizer's keys are independent, a row may sum to as much as the number of keys. Signed weights may have
    any sum.
    """
    attention, q, k, v = small()
    if attention.normalizer.is_signed:
        return
    weights = called(attention, q, k, v).weights
    sums, expected = weights.dense().sum(-1), attention.normalizer.row_sum
    if attention.mask is not None:
        grid = Grid.whole(weights.positions, q.shape[0], q.shape[1], q.shape[2])
        sums = sums[attention.mask.allowed(grid).expand(weights.shape).any(-1)]
    if expected is None:
        most = weights.shape[3] if attention.normalizer.independent else 1
        assert (sums > 0).all() and (sums < most).all(), f"rows do not sum to a number between 0 and {most}"
    else:
        torch.testing.assert_close(sums, torch.full_like(sums, expected))


@torch.no_grad()
def rows_merge_from_their_parts(small: Small) -> None:
    """The statistics of two halves of a row merge to that of the row, and weights of a half times its share are right.

    Normalizers with a `merge_refusal` are skipped, because they need all scores of a row at once.
    """
    problem = problem_of(*small())
    normalizer = problem.attention.normalizer
    if normalizer.merge_refusal is not None:
        return
    # a sink belongs to the whole row: `of_part` is without it, and `finish` adds it
    s, part = scores(problem.attention, problem.prepared, problem.grid), normalizer.of_part()
    columns = torch.arange(s.shape[-1])
    halves = list(zip(s.tensor_split(2, -1), columns.tensor_split(2), strict=True))
    statistics = [part.row_statistic(*half) for half in halves]
    whole = normalizer.finish(reduce(part.merge, statistics, part.empty_statistic(s[..., 0])))
    expected = normalizer.row_statistic(s, columns)
    torch.testing.assert_close(whole, expected, **CLOSE)
    weights = [
        part.weights(own, statistic, indices) * normalizer.share(statistic, whole)[..., None]
        for (own, indices), statistic in zip(halves, statistics, strict=True)
    ]
    torch.testing.assert_close(torch.cat(weights, -1), normalizer.weights(s, expected, columns), **CLOSE)


def _parts(attention: Attention, tensors: Mapping[str, Any], start: int, count: int) -> dict[str, Any]:
    """The tensors of a call for the `count` tokens from `start` on, along all axes of queries and keys."""
    found = dict(tensors)
    for name, axis in _axes(attention, "IJ"):
        found[name] = found[name].narrow(axis, start, min(count, found[name].shape[axis] - start))
    return found


def _halved(attention: Attention, tensors: Mapping[str, Any], letters: str, start: int) -> dict[str, Any]:
    """The tensors of a call with half of each number from index `start` on, along the axes of these letters."""
    found = dict(tensors)
    for name, axis in _axes(attention, letters):
        early, late = found[name].tensor_split((start,), axis)
        found[name] = torch.cat((early, late / 2), axis)
    return found


def _axes(attention: Attention, letters: str) -> Iterator[tuple[str, int]]:
    """The names of the tensors that the pieces need for each call, each with the index of an axis of these letters.

    The letters are those of `Sizes`, such as B, I and J.
    """
    for piece in attention.pieces():
        for name, words in needs_of(piece).items():
            yield from ((name, axis) for axis, letter in enumerate(words.split()) if letter in letters)


@torch.no_grad()
def masked_weights_are_zero(small: Small) -> None:
    """Pairs that the mask forbids have a weight of exactly 0."""
    attention, q, k, v = small()
    attention = attention.with_mask_too(mask_mod(lambda b, h, i, j: (i + 2 * j + b) % 3 != 0))  # any pairs
    seen = called(attention, q, k, v)
    assert attention.mask is not None
    grid = Grid.whole(seen.weights.positions, q.shape[0], q.shape[1], q.shape[2])
    forbidden = ~attention.mask.allowed(grid).expand(seen.weights.shape)
    assert (seen.weights.dense()[forbidden] == 0).all(), "a forbidden pair has a weight"


@torch.no_grad()
def spans_bound_the_mask(small: Small) -> None:
    """`any_allowed` of a mask is never too small, and `all_allowed` never too large, for any range of queries."""
    attention, q, k, _ = small()
    if attention.mask is None:
        return
    (B, H, I), J = q.shape[:3], k.shape[2]
    positions = Positions.aligned_to_end(I, J)
    allowed = attention.mask.allowed(Grid.whole(positions, B, H, I)).expand(B, H, I, J)
    for size in (1, 3, I):
        for first in range(0, I, size):
            last = min(first + size, I)
            # masks are asked for positions of queries, and answer with positions of keys
            rows, where = allowed[:, :, first:last].flatten(0, 2), (first + positions.start, last + positions.start)
            some = set(positions.columns(attention.mask.any_allowed(*where)).tensor().tolist())
            every = set(positions.columns(attention.mask.all_allowed(*where)).tensor().tolist())
            asked = f"queries {where[0]} to {where[1] - 1}"
            assert set(rows.any(0).nonzero().flatten().tolist()) <= some, f"any_allowed is too small for {asked}"
            assert every <= set(rows.all(0).nonzero().flatten().tolist()), f"all_allowed is too large for {asked}"


@torch.no_grad()
def no_future_leaks(small: Small) -> None:
    """If the mask hides later keys, later tokens do not change earlier outputs and weights, in any engine."""
    for engine in TORCH_ENGINES:
        attention, q, k, v = small()
        if sees_the_future(attention, q, k) or (before := runs(engine, attention, q, k, v)) is None:
            continue
        cut = q.shape[2] // 2
        q, k, v = (torch.cat((x[:, :, :cut], 3 * x[:, :, cut:] + 5), 2) for x in (q, k, v))
        later = _halved(attention, call_tensors(attention, q, k, v), "IJ", cut)
        after = attention(q, k, v, engine=engine, **later)
        assert torch.equal(before.output[:, :, :cut], after.output[:, :, :cut]), f"{engine}: outputs change"
        assert torch.equal(before.weights[:, :, :cut], after.weights[:, :, :cut]), f"{engine}: weights change"


@torch.no_grad()
def decoding_by_chunks_equals_one_call(small: Small) -> None:
    """If the mask hides later keys, decoding with a cache gives the outputs and weights of one call."""
    attention, q, k, v = small()
    if sees_the_future(attention, q, k):
        return
    whole, tensors = called(attention, q, k, v), call_tensors(attention, q, k, v)
    for chunk in (1, 5):
        cache, outputs = GrowingCache(), []
        for step in range(0, q.shape[2], chunk):
            part = (slice(None), slice(None), slice(step, step + chunk))
            here = _parts(attention, tensors, step, chunk)
            seen = attention(q[part], k[part], v[part], cache=cache, **here)
            cache = seen.cache
            outputs.append(seen.output)
            rows = whole.weights[:, :, step : step + chunk, : seen.weights.shape[3]]  # the keys so far
            torch.testing.assert_close(seen.weights.dense(), rows, **CLOSE)
        torch.testing.assert_close(torch.cat(outputs, 2), whole.output, **CLOSE)


@torch.no_grad()
def padding_does_not_matter(small: Small) -> None:
    """The numbers of hidden keys and values do not change the output."""
    attention, q, k, v = small()
    lengths = [max(1, k.shape[2] - (2, 5)[b % 2]) for b in range(k.shape[0])]
    padded = attention.with_mask_too(padding(lengths))
    before = called(padded, q, k, v)
    k, v = k.clone(), v.clone()
    for b, length in enumerate(lengths):
        k[b, :, length:], v[b, :, length:] = 1e3, -1e3
    assert torch.equal(before.output, called(padded, q, k, v).output), "hidden keys change the output"


def empty_rows_give_zeros(small: Small) -> None:
    """A query without any allowed key gets zeros, and finite gradients, in every engine."""
    for engine in TORCH_ENGINES:
        attention, *tensors = small()
        inputs = [t.requires_grad_() for t in tensors]
        q, k, v = inputs
        first = Positions.aligned_to_end(q.shape[2], k.shape[2]).start
        # hides all keys from the first query; j gives the result its axis of keys
        attention = attention.with_mask_too(mask_mod(lambda b, h, i, j, first=first: (i != first) & (j >= 0)))
        seen = runs(engine, attention, q, k, v)
        if seen is None:
            continue
        assert not seen.output[:, :, 0].any() and not seen.weights[:, :, 0].any(), f"{engine}: no zeros"
        found = torch.autograd.grad(seen.output.sum(), [*inputs, *attention.parameters()], allow_unused=True)
        assert all(g is None or torch.isfinite(g).all() for g in found), f"{engine}: a gradient is not finite"
        assert attention.normalizer.row_sum is None or not seen.output.isnan().any(), f"{engine}: NaN"


def a_call_changes_nothing(small: Small) -> None:
    """A call, a look at the weights and a backward pass change no input, and give the same gradients twice."""
    for engine in ("auto", "dense", "blocked"):
        attention, *inputs = small()
        leaves = [t.requires_grad_() for t in inputs]
        kept = [*leaves, *attention.parameters(), *attention.buffers()]
        before = [t.detach().clone() for t in kept]
        seen = called(attention, *leaves, engine=engine)
        toward = torch.ones(1, dtype=torch.float64).expand_as(seen.output)
        first = torch.autograd.grad(seen.output, leaves, toward, retain_graph=True, allow_unused=True)
        assert seen.weights.dense().shape == seen.weights.shape
        # some reductions need shares: weights that are not negative, with the sum 1 in each row
        shares = seen.weights if seen.weights.has_shares else seen.weights.shares()
        shares.summarize(Entropy(), KeyTotals(), TopLinks(2), Distance(), Pool(3, 3), Similarity())
        again = torch.autograd.grad(seen.output, leaves, toward, allow_unused=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True)), "gradients change"
        assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True)), "an input or a parameter changes"


@torch.no_grad()
def batch_entries_are_independent(small: Small) -> None:
    """Other numbers in later entries of a batch change no output and no weight of an entry."""
    attention, q, k, v = small()
    whole = called(attention, q, k, v)
    for b in range(q.shape[0]):
        changed = [torch.cat((x[: b + 1], 3 * x[b + 1 :] + 1)) for x in (q, k, v)]
        others = _halved(attention, call_tensors(attention, q, k, v), "B", b + 1)
        alone = attention(*changed, **others)
        torch.testing.assert_close(whole.output[b], alone.output[b], **CLOSE)
        torch.testing.assert_close(whole.weights[b], alone.weights[b], **CLOSE)


#: All laws by name. An engine that refuses a call must name those that can run it.
LAWS: dict[str, Callable[[Small], None]] = {
    "engines agree with dense": engines_agree_with_dense,
    "gradients agree with finite differences": gradients_agree_with_finite_differences,
    "lazy tiles equal the dense weights": lazy_tiles_equal_dense_weights,
    "weights times values are the output": weights_times_values_are_the_output,
    "rows sum to what the normalizer declares": rows_sum_to_what_the_normalizer_declares,
    "rows merge from their parts": rows_merge_from_their_parts,
    "masked weights are zero": masked_weights_are_zero,
    "spans bound the mask": spans_bound_the_mask,
    "no future leaks": no_future_leaks,
    "decoding by chunks equals one call": decoding_by_chunks_equals_one_call,
    "entries of a batch are independent": batch_entries_are_independent,
    "what padding holds does not matter": padding_does_not_matter,
    "an empty row gives zeros and finite gradients": empty_rows_give_zeros,
    "a call, a look and a backward pass change nothing": a_call_changes_nothing,
}
