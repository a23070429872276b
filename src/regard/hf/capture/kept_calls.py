"""`KeptCall`: what a watch keeps of a call of attention, and `Check`: whether its map reproduces the model's output.

Each kind of call is a subclass of `KeptCall`. `ModuleCalls` (captured_calls.py) has the calls of one module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Self

import torch
from torch import Tensor

from regard.attention import Prepared, scores
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, grouped_values, spread_indices
from regard.hf.calls import DIRECT, AttentionCall, Translation
from regard.hf.capture.softmax_trace import WeightedSum
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.masks.span_masks import OURS
from regard.maps.attention_map import AttentionMap
from regard.pieces.grid import Grid

#: The kind of every layer that is not recurrent.
ATTENTION = "attention"


class NoValues(Exception):
    """The reason why a captured call has no values."""


class LostProjection(NoValues):
    """The reason why an output projection that the call had is not known any more."""


class KeptCall:
    """One call of attention as a watch keeps it: shape, check and map, and its values with watch(keep="qkv").

    A later call may continue a call, as the next step of decoding does. By default none does.
    """

    #: The part of the model of all calls of this kind, such as "encoder"; None: the name of the module decides.
    part: str | None = None
    kind: str = ATTENTION
    #: (B, H, I, J).
    shape: tuple[int, int, int, int]
    check: Check
    #: The output (B, H, I, E) of the call, if an edit changed it and values are kept.
    patched: Tensor | None = None
    #: Whether its map has gradients.
    is_live: bool = False
    #: Whether its map is one `ScoredMap` of its queries and keys, without graphs and edits.
    is_scored: bool = False
    #: Whether it is a call of a recurrent layer, whose `whole_map` has the weights of all tokens so far.
    has_state: bool = False

    @property
    def map(self) -> AttentionMap:
        """The weights, computed when they are read."""
        raise NotImplementedError

    def whole_map(self) -> AttentionMap:
        """The weights; for a recurrent layer, those of all tokens so far."""
        return self.map

    def run(self) -> Iterator[tuple[KeptCall, Tensor | None]]:
        """This call and those that it continues, the last first, each with the entries (B,) of this call's batch in it.

        None: the entries are the same.
        """
        yield self, None

    def read_values(self) -> Tensor:
        """The values (B, G, J, E), or `NoValues` with the reason why there are none."""
        raise NotImplementedError

    def read(self, part: str) -> Tensor | None:
        """The "query" (B, H, I, D) or the "key" (B, G, J, D) of the call; None if they are not kept."""
        return None

    def without_map(self) -> Self:
        """A copy that does not hold the map: a map and a call that hold each other would stay in memory until the
        garbage collector runs.
        """
        alone = copy(self)
        vars(alone).pop("map", None)
        return alone

    def followed_by(self, later: KeptCall) -> KeptCall | None:
        """Join this call and the next one, or return None and share tensors that both have."""
        return None

    def release(self) -> None:
        """Release what is kept only to join the next call."""

    def own_tensors(self) -> None:
        """Copy tensors that a program may change in place."""


@dataclass(eq=False)
class LazyCall(KeptCall):
    """A call whose map and values are computed by two functions, `build` and `values`, when they are read."""

    shape: tuple[int, int, int, int]
    check: Check
    build: Callable[[], AttentionMap]
    values: Callable[[], Tensor]

    @cached_property
    def map(self) -> AttentionMap:  # type: ignore[override]
        return self.build()

    def read_values(self) -> Tensor:
        return self.values()


def values_reader(call: KeptCall) -> Callable[[], Tensor]:
    """A function that reads the values of a call, for its map."""
    alone = call.without_map()

    def read() -> Tensor:
        """The values; a user gets the reason why there are none as a `RegardError`."""
        try:
            return alone.read_values()
        except NoValues as reason:
            raise RegardError(f"weights.value: {reason}.") from None

    return read


def values_of_product(product: WeightedSum, shape: tuple[int, int, int, int], kind: str) -> Tensor | NoValues:
    """The values (B, H, J, E) of a product with weights (B, H, I, J), or why its operands do not show them.

    The product may have one axis for batch and heads together, as `torch.bmm` needs. `kind` is the class of the module.
    """
    (B, H, _, J), values = shape, product.by_key
    if values is None:
        return NoValues(f"the product of {kind} with its weights does not show which axes of its values are the keys")
    leading, of_weights = tuple(values.shape[:-2]), tuple(product.weights.tensor.shape[:-2])
    sizes = f"weights of shape {tuple(product.weights.tensor.shape)}, values of shape {tuple(values.shape)}"
    fits = of_weights in ((B, H), (B * H,)) or prod(of_weights) == B * H == B  # the last: one head
    if values.shape[-2] != J or not fits:
        return NoValues(f"the product of {kind} does not show which axes are batch, heads and keys: {sizes}")
    if prod(leading) == B * H:
        return values.detach().reshape(B, H, J, -1)
    if len(leading) == 2 and leading[0] in (1, B) and leading[1] in (1, H):
        return values.detach().expand(B, -1, -1, -1)
    return NoValues(f"the product of {kind} does not show which axes are batch, heads and keys: {sizes}")


#: Rows recomputed for known kernels, spread over the sequence, for the first and the last batch entry.
ROWS = 4
#: Bytes of scores that are recomputed at once if every row is verified.
BYTES = 8 << 20
#: Packages whose backends are known kernels.
KNOWN = ("torch", "transformers", "regard")
#: Allowed error, relative to the largest output.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass(frozen=True)
class Check:
    """The verification of one module: does recomputed weights @ values equal the kernel's output?

    `error` is the largest difference, and `tolerance` the error that rounding explains. If nothing could be compared,
    both and `ok` are None, and `note` says why.
    """

    name: str
    error: float | None = None
    tolerance: float | None = None
    ok: bool | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.ok is None:
            return f"{self.name}: not verified, {self.note}"
        return f"{self.name}: {'ok' if self.ok else 'WRONG'}, error {self.error:.2g}, tolerance {self.tolerance:.2g}"


def worst(checks: list[Check]) -> Check:
    """The failed check with the largest error, or else the passed one; it notes how many calls were not verified.

    An error that is NaN is the worst.
    """
    verified = [check for check in checks if check.ok is not None]
    if not verified:
        return checks[-1]
    result = max(verified, key=lambda check: (not check.ok, check.error != check.error, check.error or 0.0))
    skipped = len(checks) - len(verified)
    return replace(result, note=f"{skipped} of {len(checks)} calls not verified") if skipped and result.ok else result


@torch.no_grad()
def check(name: str, observed: ObservedCall, translation: Translation, every_row: bool = False) -> Check:
    """Recompute rows of all heads, and compare them with the kernel's output, or after `finish` with the module's.

    For a known kernel a few rows suffice. A user's own backend may treat every pair differently, so all rows are
    recomputed, block by block.
    """
    call, output, finish = observed.call, observed.output, observed.finish
    if call.drops:
        return Check(name, note=f"dropout {call.dropout} drops weights in training mode; use model.eval()")
    (B, H, I, _), (*_, J, E) = call.query.shape, call.value.shape
    if 0 in (B, H, I, J):
        return Check(name, note="there are no queries or no keys")
    if finish is None and output.shape != (B, I, H, E):
        return Check(name, note=f"the backend returned shape {tuple(output.shape)} instead of {(B, I, H, E)}")
    compared = _Compared()
    with torch.autocast(output.device.type, enabled=False):
        for entries, rows in _blocks(observed, every_row or not _is_known(call)):
            compared.add(observed, translation, entries, rows)
    return compared.check(name, call, output.dtype)


def _is_known(call: AttentionCall) -> bool:
    """Whether the backend is an unchanged function of torch, of transformers or of this package."""
    function = call.function
    module = getattr(function, "__module__", None) or ""
    original = getattr(sys.modules.get(module), getattr(function, "__name__", ""), None)
    return call.backend in (DIRECT, OURS) or (module.split(".")[0] in KNOWN and original is function)


def _blocks(observed: ObservedCall, every_row: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch entries and rows of each block that is recomputed at once: all rows with `every_row`, else a few.

    `is_whole` of the call: the output of a module is only comparable for all rows together.
    """
    call = observed.call
    (B, H, I, _), J, device = call.query.shape, call.key.shape[2], call.query.device
    if every_row or observed.is_whole:
        at_once = I if observed.is_whole else max(BYTES // (4 * B * H * J), 1)
        for rows in torch.arange(I, device=device).split(at_once):
            yield torch.arange(B, device=device), rows
        return
    rows = spread_indices(I, ROWS, device)
    yield torch.tensor(sorted({0, B - 1}), device=device), rows


@dataclass
class _Compared:
    """The largest difference so far, the largest output, and the largest change that rounded scores explain.

    `any_row`: a row was compared. `any_effect`: the output of the module depends on those of its heads.
    """

    any_row: bool = False
    any_effect: bool = True
    error: float = 0.0
    largest_output: float = 0.0
    rounding: float = 0.0

    def add(self, observed: ObservedCall, translation: Translation, entries: Tensor, rows: Tensor) -> None:
        """Recompute these rows of these batch entries, and compare them with the output of the model.

        Rows without an allowed key are not compared, because kernels differ in what they return for them.
        """
        heads, empty, rounding = _recompute(observed, translation, entries, rows)
        actual = observed.output if observed.is_whole else observed.output[entries[:, None], rows]
        actual = at_least_float32(actual)
        finish = observed.finish
        if finish is None:
            expected, actual = heads, actual.transpose(1, 2)
        else:
            expected, empty = at_least_float32(finish(heads, entries, rows)), empty.any(1)
            if observed.is_whole:
                self.any_effect = not torch.equal(expected, at_least_float32(finish(2 * heads, entries, rows)))
        # An adapter may return its output in other axes than rows. Then every number is compared.
        if observed.is_whole and (expected.shape != actual.shape or actual.shape[:2] != empty.shape[:2]):
            empty = empty.new_zeros(())
        compared = expected.isfinite() & ~empty
        if not compared.any():
            return
        actual, expected = actual[compared], expected[compared]
        difference = float((expected - actual).abs().max())
        self.error = max(self.error, difference) if difference == difference else difference  # NaN stays
        self.largest_output = max(self.largest_output, float(actual.abs().max()))
        self.rounding, self.any_row = max(self.rounding, rounding), True

    def check(self, name: str, call: AttentionCall, dtype: torch.dtype) -> Check:
        """The verdict on all rows. Eager code rounds scores to the dtype of the model, which may explain more error."""
        if not self.any_row:
            return Check(name, note="the values are not finite, or all compared rows are empty")
        share = TOLERANCE.get(dtype, TOLERANCE[torch.float32]) + (self.rounding if call.backend == "eager" else 0.0)
        tolerance = share * max(self.largest_output, 1e-6)
        if self.error <= tolerance and not self.any_effect:
            return Check(name, note="what the module returns does not depend on the outputs of its heads")
        return Check(name, self.error, tolerance, self.error <= tolerance)


def _recompute(
    observed: ObservedCall, translation: Translation, entries: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Outputs (b, H, r, E) of r rows, a flag for each empty row (b, H, r, 1), and the error that rounding explains.

    A score s that is rounded to the dtype of the model changes its weight by the share |s| eps.
    """
    attention, positions, call = translation.attention, translation.positions, observed.call
    B, H, I, _ = call.query.shape
    prepared = Prepared.of(attention, translation.query, call.key, positions)
    heads = torch.arange(H, device=rows.device)
    whole = Grid.whole(positions, B, H, I, rows.device)
    grid = Grid(whole.batch[entries], heads, whole.query[rows], whole.key)
    columns = torch.arange(call.key.shape[2], device=rows.device)
    tile = prepared.select(entries, heads).tile(rows, slice(None))
    if observed.inputs is None:
        value = call.value[entries]
    else:
        query, key, value = observed.inputs.folded(entries, rows)
        tile = replace(tile, query=query, key=key)
    s = scores(attention, tile, grid)
    weights = attention.normalizer.weights(s, attention.normalizer.row_statistic(s, columns), columns)
    weights = translation.edited(weights, grid, whole)
    output = grouped_values(weights, at_least_float32(value))
    if observed.inputs is not None:
        output = observed.inputs.project_output(output)
    low = call.query.dtype in (torch.bfloat16, torch.float16)
    mean_score = float((weights * s.masked_fill(weights == 0, 0.0).abs()).sum(-1).max()) if low else 0.0
    return output, s.isneginf().all(-1, keepdim=True), mean_score * torch.finfo(call.query.dtype).eps
