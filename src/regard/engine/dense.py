"""The dense engine: all scores at once, for any pieces and small sizes."""

from __future__ import annotations

import torch

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.rows import attend_rows


class Dense(Engine):
    """All scores at once."""

    name = "dense"
    description = "holds all scores at once"
    is_transformable = True

    def run(self, problem: Problem) -> Result:
        columns = torch.arange(problem.sizes.J, device=problem.query.device)
        output, row_statistic = attend_rows(
            problem.attention,
            problem.prepared,
            problem.value,
            problem.grid,
            columns,
            dropout=problem.dropout,
            seed=problem.seed or 0,
        )
        return Result(output, row_statistic)

    def cost(self, problem: Problem) -> Cost:
        s = problem.sizes
        pairs = s.B * s.H * s.I * s.J
        # what computes the scores, the scores, and two tensors of their size
        num_bytes = pairs * (problem.attention.score.floats_per_score + 3) * 4
        return Cost(pairs, pairs * flops_per_pair(problem), num_bytes)


def flops_per_pair(problem: Problem) -> int:
    """Floating-point operations of one pair: its score, its weight, and the weight times the value."""
    width = problem.prepared.query.shape[-1]
    return 2 * max(width, problem.attention.score.floats_per_score) + 2 * problem.sizes.E + 4
