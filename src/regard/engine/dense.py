"""The dense engine: all scores at once. Any pieces, small sizes."""

from __future__ import annotations

import torch

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.rows import attend_rows


class Dense(Engine):
    """All scores at once."""

    name = "dense"
    description = "holds all scores at once"

    def refusal(self, problem: Problem) -> str | None:
        return None

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
        held = pairs * (problem.attention.score.floats_per_score + 3) * 4
        return Cost(pairs, pairs * flops_per_pair(problem), held)


def flops_per_pair(problem: Problem) -> int:
    """Operations for one pair: its score, its share of the row, its value."""
    width = problem.prepared.query.shape[-1]
    return 2 * max(width, problem.attention.score.floats_per_score) + 2 * problem.sizes.E + 4
