"""Hidden keys and values have no effect on the output, also if they are NaN or infinite.

A weight of 0 times NaN is NaN, so the products of an engine spread it to rows that may not attend to it. This is rare,
and a check of all keys would read them again. So only the output is checked. If it is not finite, the call runs again
with zeros in place of the keys and values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.shapes import Sizes, has_finite_sum, has_numbers
from regard.engine.kept_plans import Request
from regard.engine.plan import plan
from regard.engine.problem import Problem, Result
from regard.engine.transforms import is_transformed
from regard.pieces.normalizer import RowStatistic


def may_be_spoiled(problem: Problem, output: Tensor) -> bool:
    """Whether hidden keys or values may have made a NaN: the output (for gradients also the input) is not finite.

    On devices other than the CPU this is False, because the host would wait for them.
    """
    attention = problem.attention
    if attention.mask is None or not attention.family.applies_mask or output.device.type != "cpu":
        return False
    if is_transformed() or not has_numbers(output):
        return False
    read_backward = (problem.key, problem.value) if problem.learns else ()
    return not all(map(has_finite_sum, (output, *read_backward)))


@dataclass(frozen=True, eq=False)
class Shown:
    """A call that is shown zeros in place of keys and values that are not finite.

    `rows_of_keys` (B, H, I, 1) are the rows that may attend to such a key, `rows_of_values` (B, H, I, E) the rows and
    channels that may read such a value. `marked` sets them to NaN.
    """

    request: Request
    rows_of_keys: Tensor
    rows_of_values: Tensor

    def marked(self, problem: Problem, result: Result) -> Result:
        """NaN in the outputs of these rows and, where a key is not finite, in queries and statistics of the map.

        `problem` is that of `request`, which made `result`; its map is made of its prepared queries.
        """
        query = problem.prepared.query.masked_fill(self.rows_of_keys, torch.nan)
        vars(problem).update(prepared=replace(problem.prepared, query=query))
        output = result.output.masked_fill(self.rows_of_keys | self.rows_of_values, torch.nan)
        return replace(result, output=output, row_statistic=self._statistic(result.row_statistic))

    def _statistic(self, row_statistic: RowStatistic | None) -> RowStatistic | None:
        """NaN in the numbers (B, H, I, ...) of these rows; indices of kept keys, which are integers, stay.

        An engine without a row statistic has None.
        """
        if row_statistic is None:
            return None
        rows = self.rows_of_keys[..., 0]
        return tuple(
            t.masked_fill(rows.view(*rows.shape, *[1] * (t.ndim - 3)), torch.nan) if t.is_floating_point() else t
            for t in row_statistic
        )


def without_hidden(request: Request, problem: Problem) -> Shown | None:
    """The call without the keys and values that spoil others; None if there are none."""
    key, bad_values = request.key.detach(), ~request.value.detach().isfinite()
    wrong = key.isnan() if problem.scale is None else ~key.isfinite()  # an additive score of an infinite key is finite
    bad_keys = wrong.any(-1, keepdim=True)
    if not (bool(bad_keys.any()) or bool(bad_values.any())):
        return None
    finite = {"key": request.key.masked_fill(bad_keys, 0.0), "value": request.value.masked_fill(bad_values, 0.0)}
    rows = (_may_attend(request.attention, problem, bad) for bad in (bad_keys, bad_values))
    return Shown(request._replace(**finite), *rows)


@torch.no_grad()
def _may_attend(attention: Attention, problem: Problem, flags: Tensor) -> Tensor:
    """The rows (B, H, I, C) that may attend to at least one of some flags (B, G, J, C): equal weights on them all."""
    query, key = (torch.zeros(*t.shape[:3], 1, dtype=torch.float32, device="cpu") for t in (problem.query, flags))
    inputs = query, key, flags.float()
    return plan(Problem(Attention(mask=attention.mask), *inputs, problem.positions, Sizes.of(*inputs))).run().output > 0
