"""Decoding: a few queries that attend to a range of keys, without a plan. Planning takes longer than the arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.attention import Attention, snapshot_around
from regard.base.positions import Positions
from regard.base.shapes import Sizes, in_one_dtype
from regard.base.spans import INFINITY
from regard.engine.flash import flash, returns_row_statistic
from regard.engine.kernel.attention import is_few
from regard.engine.kernel.engine import can_run, few_rows_pay
from regard.engine.kernel.mask_layout import distance_range
from regard.engine.kernel.operator import decode as decode_by_kernel
from regard.engine.kernel.recurrence import NextState
from regard.engine.recurrent.engine import next_state, recur
from regard.pieces.call_tensors import ARGUMENTS, CallTensors, check_call_tensors
from regard.pieces.contents import Originals, autograd_records, split_tensors
from regard.pieces.score import dot_scale
from regard.pieces.transition import Steps, scaled_steps, with_heads

#: Here torch's fused kernel runs without a plan, so ours is faster only from this many times as many numbers. Measured:
#: 1.2 to 1.7 times as fast from there on, as fast or slower at half as many.
AGAINST_NO_PLAN = 2


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    real: Tensor | None = None,
    added: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor | None]:
    """The output (B, H, I, E) and the log-sum-exp of queries that attend to all real keys, by the faster kernel.

    `scale` is the factor of the scores. `real` (B, n) says which of the first n keys are real, and no other key is;
    None: all keys. `added` returns the same as a tensor that is added to scores, (B, 1, 1, J), or None; only torch's
    kernel needs it. The log-sum-exp is None where torch's kernel does not return it.
    """
    query, key, value = in_one_dtype(query, key, value)
    if _kernel_pays(query, key, value):
        return decode_by_kernel(query, key, value, real, scale)
    mask = added()
    return flash(query, key, value, scale=scale, mask=None if mask is None else mask.to(query.dtype))


def _kernel_pays(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the compiled kernel computes the rows: without gradients, and where it is measured to be faster."""
    num_numbers = (key.numel() + value.numel()) // AGAINST_NO_PLAN
    if not few_rows_pay(num_numbers, key.dtype):
        return False
    learns = autograd_records((query, key, value))
    num_rows = query.shape[1] // key.shape[1] * query.shape[2]
    return is_few(num_rows, learns) and can_run(query, key, value)


class NextToken(ABC):
    """What a call of one query after a cache needs besides its tensors. It is kept for the calls of later tokens."""

    @staticmethod
    @abstractmethod
    def of(
        attention: Attention, query: Tensor, key: Tensor, value: Tensor, tensors: CallTensors, state: Tensor | None
    ) -> NextToken | None:
        """The step of pieces that never change, after checks of all sizes; None if a step is not as simple.

        `tensors` are those of the pieces, and `state` is the sum over earlier keys.
        """


@dataclass(frozen=True, eq=False)
class DecodingStep(NextToken):
    """One query after the keys of a cache, for any number of keys: the softmax of `scale` q . k over some of them.

    The query has the position of the last key, and attends to the keys at the distances [low, high) from it.
    """

    attention: Attention
    originals: Originals
    scale: float
    low: int
    high: int
    sizes: Sizes

    @staticmethod
    def of(
        attention: Attention, query: Tensor, key: Tensor, value: Tensor, tensors: CallTensors, state: Tensor | None
    ) -> DecodingStep | None:
        """The step of a softmax of dot products without encoding, bias and sink, whose mask is a range of distances.

        Other pieces, tensors of the pieces and gradients have no step: the result is None.
        """
        if tensors or autograd_records((query, key, value)):
            return None
        mask, softmax = attention.mask, attention.normalizer.as_softmax
        others = attention.position, attention.selection, attention.transition, *attention.bias
        if any(other is not None for other in others) or softmax is None or softmax.sink is not None:
            return None
        scale = dot_scale(attention.score, query.shape[3])
        prepared = attention.score.prepare(query, key)
        if not isinstance(scale, float | int) or prepared[0] is not query or prepared[1] is not key:
            return None  # `run` compares queries and keys as they are
        if not (mask is None or mask.relative) or not returns_row_statistic(query):
            return None
        low, high, is_whole = (-INFINITY, 1, True) if mask is None else distance_range(mask)
        if not is_whole or not low <= 0 < high:  # `run` has all keys from the first on, so also the last, at distance 0
            return None
        sizes = Sizes.of(query, key, value)
        attention.check(sizes, Positions.aligned_to_end(1, sizes.J), key.shape[3])
        assert isinstance(softmax.temperature, float | int), "the pieces hold no tensor"
        no_tensors, template = split_tensors(attention)
        pieces, originals = snapshot_around(no_tensors, template), Originals.of(no_tensors, template)
        return DecodingStep(pieces, originals, scale / softmax.temperature, low, high, sizes)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of a query after all these keys."""
        first = max(0, key.shape[2] - 1 + self.low)
        if first:
            key, value = key[:, :, first:], value[:, :, first:]
        return decode(query, key, value, self.scale)  # type: ignore[return-value]

    def sizes_of(self, num_keys: int) -> Sizes:
        """The sizes of a call with so many keys."""
        s = self.sizes
        return Sizes(s.B, s.H, s.G, s.I, num_keys, s.D, s.E)


@dataclass(frozen=True, eq=False)
class RecurrentStep(NextToken):
    """One token of a recurrent layer after the state of a cache.

    `compiled` computes it by the kernels; None if they cannot, or if gradients are needed.
    """

    attention: Attention
    compiled: NextState | None

    @staticmethod
    def of(
        attention: Attention, query: Tensor, key: Tensor, value: Tensor, tensors: CallTensors, state: Tensor | None
    ) -> RecurrentStep | None:
        """The step of a transition without encoding, for one new key, if the cache has a state; else None."""
        if attention.transition is None or attention.position is not None or key.shape[2] != 1:
            return None
        sizes = Sizes.of(query, key, value)
        attention.check(sizes, Positions.aligned_to_end(1, 1), key.shape[3])
        fitted = check_call_tensors("attend", attention.pieces(), sizes, tensors, ARGUMENTS)
        if state is None or sizes.is_empty or any(fitted[name] is not tensor for name, tensor in tensors.items()):
            return None
        learns = autograd_records((query, key, value, *tensors.values(), state))
        steps = scaled_steps(attention.transition, attention.score, query, key, tensors)
        compiled = None if learns else next_state(steps, with_heads(value, sizes.H), state)
        return RecurrentStep(snapshot_around(*split_tensors(attention)), compiled)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: CallTensors, state: Tensor
    ) -> tuple[Tensor, Tensor, Steps]:
        """The output (B, H, 1, E), the state (B, H, D, E) after the token, and the steps that the map is made of."""
        assert self.attention.transition is not None, "`of` has looked"
        steps = scaled_steps(self.attention.transition, self.attention.score, query, key, tensors)
        value = with_heads(value, query.shape[1])
        if self.compiled is not None:
            return *self.compiled(steps, value, state), steps
        output, last = recur(steps, value, state)
        return output.to(value.dtype), last, steps
